"""An answer as reply writers see it, the same for every dialect: its output events, its whole, and its end at a stop
string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

import orjson
from msgspec import Struct

from agentlightning.chat.base import Message
from agentlightning.chat.tool_calls.format import partial_marker_length


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


class AnswerView(Protocol):
    """An answer as reply writers see it, whether it comes from our engine or from a provider."""

    @property
    def index(self) -> int:
        """Among the answers to one request."""
        ...

    @property
    def content(self) -> str: ...

    @property
    def tool_calls(self) -> Sequence[ToolCall]: ...

    @property
    def message(self) -> Message:
        """As an assistant message in terms of chat completions."""
        ...

    @property
    def finish_reason(self) -> str:
        """One of stop, length, tool_calls and content_filter; any other: it is not finished."""
        ...

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        ...

    @property
    def is_refusal(self) -> bool:
        """The content is the reason why the model does not answer."""
        ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def prefill(self) -> str:
        """What the caller wrote of the answer; `content` continues it."""
        ...

    @property
    def is_constrained(self) -> bool:
        """The engine sampled no token that the request's constraint forbids."""
        ...

    @property
    def stops_after_tool_call(self) -> bool:
        """Sampling ends with the first tool call."""
        ...

    def parts(self) -> list[OutputEvent]:
        """The whole answer in order, with whole tool calls."""
        ...

    def next_logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities of the next event to be written, as chat completions shows them."""
        ...

    def remaining_logprobs(self) -> list[dict[str, Any]]:
        """Log-probabilities of the tokens that belong to no event."""
        ...

    def all_logprobs(self) -> list[dict[str, Any]]: ...

    def take_token_ids(self) -> list[int]:
        """The tokens of the log-probabilities returned last, once."""
        ...


CUSTOM_INPUT: Final = "input"
"""A call of a custom tool, whose input is free text, is everywhere a call of a function with this one argument."""


def custom_arguments(text: str) -> str:
    """The input of a custom tool as arguments."""
    return orjson.dumps({CUSTOM_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """The input in the arguments of a call of a custom tool; the arguments as they are if they hold none."""
    try:
        given = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = cast("dict[str, Any]", given).get(CUSTOM_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def assistant_message(content: str, reasoning: str, tool_calls: Sequence[ToolCall]) -> Message:
    """An answer as an assistant message in terms of chat completions."""
    message: Message = {"role": "assistant", "content": content or None if tool_calls else content}
    if tool_calls:
        message["tool_calls"] = [call.wire() for call in tool_calls]
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


class StopFilter:
    """Ends a text before the first stop string in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._buffer = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def feed(self, text: str) -> str:
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        self._buffer += text
        found = [(place, stop) for stop in self._stops if (place := self._buffer.find(stop)) >= 0]
        if found:
            place, self.found = min(found)
            return self._buffer[:place]
        return self._release(len(self._buffer) - max(partial_marker_length(self._buffer, stop) for stop in self._stops))

    def finish(self) -> str:
        return "" if self.stopped else self._release(len(self._buffer))

    def _release(self, length: int) -> str:
        shown, self._buffer = self._buffer[:length], self._buffer[length:]
        return shown
