"""The content of messages and answers, the same for every dialect: typed parts and output events."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class ToolCall(Struct, frozen=True):
    """A tool call of an answer, with the id we gave it."""

    index: int
    id: str
    name: str
    arguments: str

    def wire(self) -> dict[str, Any]:
        """As chat completions shows it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ReasoningDelta(Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str
    choice: int = 0


class SignedReasoning(Struct, frozen=True):
    """The end of a reasoning block that its provider wants back unchanged."""

    block: dict[str, Any]


class RefusalDelta(Struct, frozen=True):
    """More of the reason why the model does not answer."""

    text: str
    choice: int = 0


class ToolCallStart(Struct, frozen=True):
    """A tool call whose arguments follow in deltas. No other event comes before its end."""

    index: int
    id: str
    name: str


class ToolCallDelta(Struct, frozen=True):
    """More of the arguments of the current tool call."""

    index: int
    text: str


class ToolCallEnd(Struct, frozen=True):
    """The current tool call is complete."""

    call: ToolCall


OutputEvent = (
    str | ToolCall | ReasoningDelta | SignedReasoning | RefusalDelta | ToolCallStart | ToolCallDelta | ToolCallEnd
)
"""More of an answer as its caller is shown it; a string is more content, a `ToolCall` one that comes whole."""
