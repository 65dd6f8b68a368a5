"""What an answer consists of, as typed events: text, reasoning, refusals and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an answer, with the id we gave it."""

    index: int
    id: str
    name: str
    arguments: str

    def wire(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Thought:
    """Some more of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """A thought is whole, and its provider wants this back with it, unchanged."""

    block: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Some more of why the model does not answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call that will come in parts. Nothing else is shown until it has ended."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallPart:
    """Some more of the arguments of the call that is under way."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call that was under way is whole."""

    call: ToolCall


Piece = str | ToolCall | Thought | Sealed | Refusal | CallBegun | CallPart | CallEnded
"""Something to show: more content, a tool call (whole or in parts), more of a thought or of a refusal."""
