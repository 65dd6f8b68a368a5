"""Accumulates what a provider answers, for the spans of the call: messages, usage, tokens and why each choice ended.

It never fails on an answer that is not as its format says: what cannot be read is not recorded, and the caller still
gets the answer unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from agentlightning.gateway.dialects.anthropic.events import MessagesEvents
from agentlightning.gateway.dialects.openai.chat_events import ChatEvents
from agentlightning.gateway.dialects.openai.responses_events import ResponsesEvents
from agentlightning.gateway.dialects.output import ReasoningDelta, RefusalDelta
from agentlightning.gateway.dialects.provider_events import (
    MALFORMED,
    BlockDone,
    Emit,
    Finish,
    ProviderEvent,
    ProviderFailure,
    ResponseStart,
    SampledTokens,
    TextDelta,
    ToolCallDone,
    ToolCallFragment,
    Usage,
    UsageReport,
)
from agentlightning.gateway.recording.otel_messages import tool_call

Json = dict[str, Any]


@dataclass(slots=True)
class RecordedToolCall:
    """A tool call as it comes in."""

    id: Any = None
    name: str = ""
    arguments: list[Any] = field(default_factory=list[Any])
    """Parts of the JSON text, or one object."""


@dataclass(slots=True)
class Choice:
    """One choice of an answer."""

    index: int = 0
    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    tool_calls: dict[Any, RecordedToolCall] = field(default_factory=dict[Any, RecordedToolCall])
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    prompt_token_ids: list[int] | None = None
    extra_attributes: Json | None = None
    """Attributes of its span beside those read from the response."""

    def message(self) -> Json:
        """As OpenTelemetry has it."""
        parts: list[Json] = []
        if reasoning := "".join(self.reasoning):
            parts.append({"type": "reasoning", "content": reasoning})
        if text := "".join(self.text):
            parts.append({"type": "text", "content": text})
        for call in self.tool_calls.values():
            whole = call.arguments[0] if call.arguments and isinstance(call.arguments[0], dict) else None
            written = "".join(piece for piece in call.arguments if isinstance(piece, str))
            parts.append(tool_call(call.id, call.name, written if whole is None else whole))
        reason = (
            "tool_call" if self.finish_reason == "tool_calls" else self.finish_reason or "error"
        )  # OTel's is singular
        return {"role": "assistant", "parts": parts, "finish_reason": reason}

    def add_tool_call(self, fragment: ToolCallFragment) -> None:
        call = self.tool_calls.setdefault(fragment.place, RecordedToolCall())
        call.id = fragment.id or call.id
        call.name += fragment.name or ""
        if fragment.arguments:
            call.arguments.append(fragment.arguments)

    def add_tokens(self, tokens: SampledTokens) -> None:
        self.prompt_token_ids = tokens.prompt_token_ids or self.prompt_token_ids
        if tokens.token_ids is not None:
            self.token_ids = _extended(self.token_ids, tokens.token_ids)
        if tokens.logprobs is not None:
            self.logprobs = _extended(self.logprobs, tokens.logprobs)


def _extended(values: list[Any] | None, more: Any) -> list[Any]:
    if values is None:
        return list(more)
    values.extend(more)
    return values


class EventReader(Protocol):
    """Reads one answer of one wire format."""

    def read(self, data: Json, emit: Emit) -> None:
        """Emit the events of a whole answer or of one stream event."""
        ...


_READERS: Final[Mapping[str, Callable[[bool], EventReader]]] = {
    "chat/completions": ChatEvents,
    "completions": ChatEvents,
    "embeddings": ChatEvents,
    "responses": ResponsesEvents,
    "messages": MessagesEvents,
}


@dataclass(slots=True)
class ProviderResponse:
    """Everything that was received for one call to `path`."""

    path: str
    with_blocks: bool = False
    """Also read each content block as its provider wrote it, for translation."""
    id: str = ""
    model: str = ""
    usage: Usage | None = None
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    prompt_token_ids: list[int] | None = None
    error: str | None = None
    """What the provider reported as an error, possibly in the middle of a stream."""
    _reader: EventReader | None = field(default=None, init=False)

    def read(self, data: Any) -> list[ProviderEvent]:
        """Add a whole answer or one stream event, and return its events. What is malformed is skipped."""
        events: list[ProviderEvent] = []
        if not isinstance(data, dict):
            return events
        if self._reader is None:
            self._reader = _READERS[self.path](self.with_blocks)
        with suppress(*MALFORMED):
            self._reader.read(cast("Json", data), events.append)
        for event in events:
            try:
                _ADDERS[type(event)](self, event)
            except MALFORMED:
                continue
        return events

    def choice(self, index: int) -> Choice:
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = Choice(index)
        return found

    def add_text(self, event: TextDelta | RefusalDelta) -> None:
        self.choice(event.choice).text.append(event.text)

    def add_reasoning(self, event: ReasoningDelta) -> None:
        self.choice(event.choice).reasoning.append(event.text)

    def add_tool_call(self, event: ToolCallFragment) -> None:
        self.choice(event.choice).add_tool_call(event)

    def add_tokens(self, event: SampledTokens) -> None:
        if event.choice is None:
            self.prompt_token_ids = event.prompt_token_ids
        else:
            self.choice(event.choice).add_tokens(event)

    def finish(self, event: Finish) -> None:
        choice = self.choice(event.choice)
        choice.finish_reason = event.reason or choice.finish_reason

    def add_usage(self, event: UsageReport) -> None:
        self.usage = event.usage

    def identify(self, event: ResponseStart) -> None:
        self.id = self.id or (event.id if isinstance(event.id, str) else "")
        self.model = self.model or (event.model if isinstance(event.model, str) else "")

    def fail(self, event: ProviderFailure) -> None:
        self.error = event.message

    def skip(self, event: ProviderEvent) -> None:
        """An event that no span shows."""


_ADDERS: Final[Mapping[type, Callable[[ProviderResponse, Any], None]]] = {
    TextDelta: ProviderResponse.add_text,
    RefusalDelta: ProviderResponse.add_text,
    ReasoningDelta: ProviderResponse.add_reasoning,
    ToolCallFragment: ProviderResponse.add_tool_call,
    SampledTokens: ProviderResponse.add_tokens,
    Finish: ProviderResponse.finish,
    UsageReport: ProviderResponse.add_usage,
    ResponseStart: ProviderResponse.identify,
    ProviderFailure: ProviderResponse.fail,
    ToolCallDone: ProviderResponse.skip,
    BlockDone: ProviderResponse.skip,
}
