"""A provider's answer as the reply writers of another dialect need it: as ordered output events, and whole.

Provider events may interleave tool calls; output events do not. While a tool call is incomplete, what follows it waits,
so that calls whose arguments arrive mixed are written one after the other.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import orjson

from agentlightning.chat.base import Message
from agentlightning.gateway.dialects.anthropic.signed_reasoning import needs_echo
from agentlightning.gateway.dialects.output import (
    OutputEvent,
    ReasoningDelta,
    RefusalDelta,
    SignedReasoning,
    StopFilter,
    ToolCall,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    assistant_message,
)
from agentlightning.gateway.dialects.provider_events import (
    FINISH_REASONS,
    MALFORMED,
    BlockDone,
    Finish,
    Json,
    ProviderEvent,
    SampledTokens,
    TextDelta,
    ToolCallDone,
    ToolCallFragment,
)
from agentlightning.util.json_values import dumps, loads

_LAST_CHARACTERS: Final = frozenset('}]"0123456789el')
"""How a JSON value may end."""
_REASONS: Final = ("stop", "length", "tool_calls", "content_filter")
"""Finish reasons that every dialect can express."""


@dataclass(slots=True)
class _PartialToolCall:
    """A tool call that is coming in."""

    id: str = ""
    name: str = ""
    deltas: list[str] = field(default_factory=list[str])
    num_taken: int = 0
    """How many of the deltas were taken."""
    start: ToolCallStart | None = None
    is_complete: bool = False
    """Its provider reported its end."""
    is_ended: bool = False
    """Its end was taken."""

    @property
    def arguments(self) -> str:
        return "".join(self.deltas)

    def has_complete_arguments(self) -> bool:
        last = self.deltas[-1].rstrip() if self.deltas else ""
        if last and last[-1] not in _LAST_CHARACTERS:  # Most deltas end in the middle of a value.
            return False
        try:
            loads(self.arguments)
        except orjson.JSONDecodeError:
            return False
        return True


@dataclass(slots=True)
class ProviderAnswer:
    """The first choice of a provider's answer; an `AnswerView`."""

    stops: tuple[str, ...] = ()
    """Stop strings that the provider does not know, so that its answer is ended here."""
    call_prefix: str = "call_"
    """What the ids of tool calls without an id of their own start with."""
    index: int = field(default=0, init=False)
    content: str = field(default="", init=False)
    """Complete once `take_new(done=True)` was called; so is `reasoning`."""
    reasoning: str = field(default="", init=False)
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall], init=False)
    is_refusal: bool = field(default=False, init=False)
    num_tokens: int = field(default=0, init=False)
    prompt_token_ids: Sequence[int] = field(default=(), init=False)
    token_ids: Sequence[int] = field(default=(), init=False)
    prefill: str = field(default="", init=False)
    is_constrained: bool = field(default=False, init=False)
    stops_after_tool_call: bool = field(default=False, init=False)
    protocol_error: str = field(default="", init=False)
    """What the provider did that the caller's dialect cannot express any more."""
    blocks: list[Json] = field(default_factory=list[Json], init=False)
    """The content blocks or items as the provider wrote them, where the format has any."""
    _reason: str | None = field(default=None, init=False)
    _stop_string: str | None = field(default=None, init=False)
    """The stop string that ended it, according to its provider."""
    _stop: StopFilter = field(init=False)
    _waiting: deque[tuple[OutputEvent | _PartialToolCall, list[Json]]] = field(
        default_factory=deque[tuple[OutputEvent | _PartialToolCall, list[Json]]], init=False
    )
    """What was not taken yet, with the log-probabilities of its tokens."""
    _partial: dict[Hashable, _PartialToolCall] = field(default_factory=dict[Hashable, _PartialToolCall], init=False)
    _taken: list[OutputEvent] = field(default_factory=list[OutputEvent], init=False)
    _logprobs: list[Json] = field(default_factory=list[Json], init=False)
    _pending_logprobs: list[Json] = field(default_factory=list[Json], init=False)
    """Log-probabilities that belong to no event yet."""
    _event_logprobs: deque[list[Json]] = field(default_factory=deque[list[Json]], init=False)
    """Log-probabilities of each event that was taken and is not written yet."""

    def __post_init__(self) -> None:
        self._stop = StopFilter(self.stops)

    # -- adding ----------------------------------------------------------------------------------------------------

    def add(self, event: ProviderEvent) -> None:
        """Add what the provider sent. What is malformed, and whatever follows a stop string, is skipped."""
        if getattr(event, "choice", 0):
            return
        try:
            self._add(event)
        except MALFORMED:
            return

    def _add(self, event: ProviderEvent) -> None:
        match event:
            case TextDelta():
                if not self.is_stopped:
                    self._queue_text(self._stop.feed(event.text))
            case SampledTokens():
                self._add_logprobs(event.entries)
            case ReasoningDelta():
                self._queue(event)
            case RefusalDelta():
                self.is_refusal = self._queue(event) or self.is_refusal
            case ToolCallFragment():
                self._add_tool_call(event)
            case ToolCallDone():
                if call := self._partial.get(event.place):
                    call.is_complete = True
            case BlockDone():
                self._add_block(event.block)
            case Finish():
                self._reason = FINISH_REASONS.get(event.reason or "", event.reason) or self._reason
                self._stop_string = event.stop_string or self._stop_string
            case _:
                pass

    def _queue(self, event: OutputEvent) -> bool:
        """Queue an event other than text, unless the answer was stopped."""
        if allowed := self._flush_text():
            self._waiting.append((event, []))
        return allowed

    def _flush_text(self) -> bool:
        """Queue text that might have started a stop string. Whether anything other than text may follow."""
        self._queue_text(self._stop.finish())
        return not self.is_stopped

    def _queue_text(self, text: str) -> None:
        if text:
            self._waiting.append((text, self._pending_logprobs))
            self._pending_logprobs = []

    def _add_logprobs(self, entries: Sequence[Json]) -> None:
        if self.is_stopped:
            return
        for entry in entries:
            tops = [_token(top) for top in entry.get("top_logprobs") or ()]
            shown = _token(entry) | {"top_logprobs": tops}
            self._logprobs.append(shown)
            self._pending_logprobs.append(shown)

    def _add_block(self, block: Json) -> None:
        if self.is_stopped:
            return
        self.blocks.append(block)
        if needs_echo(block):
            self._waiting.append((SignedReasoning(block), []))

    def _add_tool_call(self, fragment: ToolCallFragment) -> None:
        if not self._flush_text():
            return
        call = self._partial.get(fragment.place)
        if call is None:
            call = self._partial[fragment.place] = _PartialToolCall()
            self._waiting.append((call, []))
        if isinstance(fragment.id, str):
            call.id = call.id or fragment.id
        if isinstance(fragment.name, str) and call.start is None:
            call.name += fragment.name
        arguments = fragment.arguments
        if arguments is None or arguments == "":
            return
        text = arguments if isinstance(arguments, str) else dumps(arguments).decode()
        if not call.is_ended:
            call.deltas.append(text)
        elif text.strip():
            self.protocol_error = f"it continued the tool call {call.name!r} after its end"

    # -- taking ----------------------------------------------------------------------------------------------------

    def take_new(self, done: bool = False) -> list[OutputEvent]:
        """The events that can be written since the last call; all that are left once the provider is `done`."""
        events: list[OutputEvent] = []
        if done:
            self._flush_text()
        while self._waiting:
            first, logprobs = self._waiting[0]
            if not isinstance(first, _PartialToolCall):
                events.append(first)
                self._event_logprobs.append(logprobs)
                self._waiting.popleft()
                continue
            ends = done or first.is_complete or (len(self._waiting) > 1 and first.has_complete_arguments())
            new = self._take_tool_call(first, ends)
            events += new
            self._event_logprobs += [[] for _ in new]
            if not ends:
                break
            self._waiting.popleft()
        self._taken += events
        if done:
            self._join()
        return events

    def _join(self) -> None:
        content: list[str] = []
        for event in self._taken:
            if isinstance(event, str):
                content.append(event)
            elif isinstance(event, RefusalDelta):
                content.append(event.text)
        self.content = "".join(content)
        self.reasoning = "".join([event.text for event in self._taken if isinstance(event, ReasoningDelta)])

    def _take_tool_call(self, call: _PartialToolCall, ends: bool) -> list[OutputEvent]:
        """Starts with the first arguments, by which time the name is complete."""
        events: list[OutputEvent] = []
        if ends and not call.arguments.strip():
            call.deltas.append("{}")
        if call.start is None and call.deltas:
            call.start = ToolCallStart(len(self.tool_calls), self._new_id(call.id), call.name)
            events.append(call.start)
        if call.start is None:
            return events
        index, text = call.start.index, "".join(call.deltas[call.num_taken :])
        call.num_taken = len(call.deltas)
        events += [ToolCallDelta(index, text)] if text else []
        if ends:
            call.is_ended = True
            self.tool_calls.append(ToolCall(index, call.start.id, call.name, call.arguments))
            events.append(ToolCallEnd(self.tool_calls[-1]))
        return events

    def _new_id(self, given: str) -> str:
        """The provider's id, unless another call of the answer has it."""
        used = any(call.start is not None and call.start.id == given for call in self._partial.values())
        return given if given and not used else self.call_prefix + secrets.token_hex(12)

    # -- the whole answer ------------------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """Whether the answer was ended here, at a stop string."""
        return self._stop.stopped

    @property
    def message(self) -> Message:
        return assistant_message(self.content, self.reasoning, self.tool_calls)

    @property
    def finish_reason(self) -> str:
        reason = self._reason if self._reason in _REASONS and not self.is_stopped else "stop"
        return "tool_calls" if self.tool_calls and reason == "stop" else reason or "stop"

    @property
    def stop_string(self) -> str | None:
        return self._stop.found or self._stop_string

    def parts(self) -> list[OutputEvent]:
        parts: list[OutputEvent] = []
        for kind, run in groupby(self._taken, type):
            events = list(run)
            if kind is ToolCallEnd:
                parts += [event.call for event in events if isinstance(event, ToolCallEnd)]
            elif kind is SignedReasoning:
                parts += events
            elif kind not in (ToolCallStart, ToolCallDelta):
                parts.append(_joined(events))
        return parts

    def take_token_ids(self) -> list[int]:
        """None are known to be shown."""
        return []

    def next_logprobs(self) -> list[Json]:
        return self._event_logprobs.popleft() if self._event_logprobs else []

    def remaining_logprobs(self) -> list[Json]:
        rest, self._pending_logprobs = self._pending_logprobs, []
        return rest

    def all_logprobs(self) -> list[Json]:
        return self._logprobs


def _joined(events: Sequence[OutputEvent]) -> OutputEvent:
    """Events of one kind as one."""
    if isinstance(events[0], str):
        return "".join(event for event in events if isinstance(event, str))
    text = "".join(event.text for event in events if isinstance(event, ReasoningDelta | RefusalDelta))
    return ReasoningDelta(text) if isinstance(events[0], ReasoningDelta) else RefusalDelta(text)


def _token(given: Json) -> Json:
    text = given.get("token")
    text = text if isinstance(text, str) else ""
    known = given.get("bytes")
    return {"token": text, "logprob": given["logprob"], "bytes": list(text.encode()) if known is None else known}
