"""An answer as a provider tells it, for the writers of another dialect: in pieces as they come, and whole."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import orjson

from agentlightning.gateway.answer import Answer, Piece, Thought, ToolCall
from agentlightning.gateway.heard import Call, Choice
from agentlightning.policy.base import ChatFormat

_NOBODYS: Final = cast("ChatFormat", None)
"""There are no tokens to be read."""
_REASONS: Final = ("stop", "length", "tool_calls", "content_filter")
"""Why an answer ended, as far as every dialect has a word for it."""


@dataclass(slots=True)
class Told(Answer):
    """One choice of a provider. `choice` is what has been heard of it."""

    chat: ChatFormat = _NOBODYS
    choice: Choice = field(default_factory=Choice)
    _texts: int = field(default=0, init=False)
    """Pieces of text that were passed on."""
    _shown: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """It comes as text, with its thoughts and calls told apart."""

    @property
    def finish_reason(self) -> str:
        reason = self.choice.reason if self.choice.reason in _REASONS else "stop"
        return "tool_calls" if self.tool_calls and reason == "stop" else reason or "stop"

    @property
    def stop_string(self) -> str | None:
        """Providers do not say."""
        return None

    def news(self, done: bool = False) -> list[Piece]:
        """What has come since the last time. A tool call is passed on whole: once another begins, or all is `done`."""
        pieces: list[Piece] = [Thought(text) for text in self.choice.thought[self._shown :]]
        self._shown = len(self.choice.thought)
        pieces += self.choice.text[self._texts :]
        self._texts = len(self.choice.text)
        self.thought = "".join(self.choice.thought)
        self.content = "".join(self.choice.text)
        calls = list(self.choice.calls.values())
        for call in calls[len(self.tool_calls) : None if done else -1]:
            self.tool_calls.append(self._call(call))
            pieces.append(self.tool_calls[-1])
        return pieces

    def _call(self, call: Call) -> ToolCall:
        name = call.id if isinstance(call.id, str) and call.id else self.call_prefix + secrets.token_hex(12)
        return ToolCall(len(self.tool_calls), name, call.name, _arguments(call.arguments))


def _arguments(pieces: Sequence[Any]) -> str:
    if pieces and not isinstance(pieces[0], str):
        return orjson.dumps(pieces[0]).decode()
    return "".join(pieces) or "{}"
