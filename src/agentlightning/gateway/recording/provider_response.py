"""The one reader of what providers answer: for the spans of the call, and for callers of another dialect.

A `ProviderResponse` reads a whole answer or its stream events into one `ProviderAnswer` for each choice. It never fails
on an answer that is not as its format says: what cannot be read is skipped, and a caller of the provider's own dialect
gets the answer unchanged. Translation takes the answer as ordered output events. Provider events may interleave tool
calls; output events do not: while a tool call is incomplete, what follows it waits, so that calls whose arguments
arrive mixed are written one after the other.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, cast

import msgspec
import orjson
from msgspec import Struct

from agentlightning.chat.base import Message
from agentlightning.gateway.dialects.anthropic.events import MessagesEvents, messages_usage
from agentlightning.gateway.dialects.anthropic.signed_reasoning import CHAT_TURN, needs_echo
from agentlightning.gateway.dialects.openai.chat_events import ChatEvents, chat_usage
from agentlightning.gateway.dialects.openai.responses_events import ResponsesEvents
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
    custom_arguments,
)
from agentlightning.gateway.dialects.provider_events import (
    MALFORMED,
    BlockDone,
    Finish,
    HostedCall,
    Json,
    ProviderEvent,
    ProviderFailure,
    ResponseStart,
    SampledTokens,
    TextDelta,
    ToolCallDone,
    ToolCallFragment,
    Usage,
    UsageReport,
    finished_reason,
    logprob_entries,
)
from agentlightning.gateway.recording.otel_messages import message_part, tool_call
from agentlightning.util.json_values import dumps, loads

_LAST_CHARACTERS: Final = frozenset('}]"0123456789el')
"""How a JSON value may end."""


@dataclass(slots=True)
class _PartialToolCall:
    """A tool call that is coming in."""

    place: Any
    id: str = ""
    name: str = ""
    deltas: list[str] = field(default_factory=list[str])
    is_custom: bool = False
    extra: Json | None = None
    """See `ToolCallFragment.extra`."""
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
        if self.is_custom or (last and last[-1] not in _LAST_CHARACTERS):  # Most deltas end in the middle of a value.
            return False
        try:
            loads(self.arguments)
        except orjson.JSONDecodeError:
            return False
        return True

    def is_followed_by(self, id: str, name: str, text: str) -> bool:
        """Whether a fragment of the same place that has a name begins the next call. Some servers give all calls one
        index; others repeat the name, or a new id, with each fragment of one call."""
        is_other, arguments = bool(id and self.id) and id != self.id, self.arguments.strip()
        if not self.name or not (arguments or self.is_custom):
            return bool(self.name) and (is_other or not (id or self.is_indexed)) and (name != self.name or not text)
        if self.is_custom or not self.has_complete_arguments():
            return name != self.name or (is_other and self.is_custom)
        if is_other or name != self.name:
            return True
        return text.strip() not in ("", arguments if id else "") and (not id or arguments != "{}")

    @property
    def is_indexed(self) -> bool:
        return _is_index(self.place)

    def add_name(self, name: str) -> None:
        """A name may come in parts, or again."""
        self.name = name if name.startswith(self.name) else self.name + name


@dataclass(slots=True)
class ProviderAnswer:
    """One choice of a provider's answer; an `AnswerView`."""

    index: int = 0
    stops: tuple[str, ...] = ()
    """Stop strings that the provider does not know, so that its answer is ended here."""
    call_prefix: str = ""
    """What the ids of tool calls without an id of their own start with; "": they get none."""
    provider: str = ""
    """Its name, for what it wants back."""
    content: str = ""
    """Complete once `take_new(done=True)` was called; so is `reasoning`."""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    is_refusal: bool = False
    num_tokens: int = 0
    prompt_token_ids: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    prefill: str = ""
    is_constrained: bool = False
    stops_after_tool_call: bool = False
    protocol_error: str = ""
    """What the provider did that the caller's dialect cannot express any more."""
    blocks: list[Json] = field(default_factory=list[Json])
    """The content blocks or items as the provider wrote them, where the format has any."""
    extra_attributes: Json = field(default_factory=dict[str, Any])
    """Attributes of its span beside those read from the response."""
    given_reason: str | None = None
    """Why it ended, in the provider's words."""
    _stop_string: str | None = None
    """The stop string that ended it, according to its provider."""
    _stop: StopFilter = field(init=False)
    _waiting: deque[tuple[OutputEvent | HostedCall | _PartialToolCall, list[Json]]] = field(
        default_factory=deque[tuple[OutputEvent | HostedCall | _PartialToolCall, list[Json]]]
    )
    """What was not taken yet, with the log-probabilities of its tokens."""
    _calls: list[_PartialToolCall] = field(default_factory=list[_PartialToolCall])
    _taken: list[OutputEvent | HostedCall] = field(default_factory=list[OutputEvent | HostedCall])
    _entries: list[Json] = field(default_factory=list[Json])
    """Log-probabilities of all tokens."""
    _pending_entries: list[Json] = field(default_factory=list[Json])
    """Log-probabilities that belong to no event yet."""
    _event_entries: deque[list[Json]] = field(default_factory=deque[list[Json]])
    """Log-probabilities of each event that was taken and is not written yet."""

    def __post_init__(self) -> None:
        self._stop = StopFilter(self.stops)

    # -- adding ----------------------------------------------------------------------------------------------------

    def add(self, event: Any) -> None:
        """Add what the provider sent of this choice. Whatever follows a stop string is skipped."""
        match event:
            case TextDelta():
                if not self.is_stopped:
                    self._queue_text(self._stop.feed(event.text))
            case SampledTokens():
                self._add_tokens(event)
            case ReasoningDelta() | HostedCall():
                self._queue(event)
            case RefusalDelta():
                self.is_refusal = self._queue(event) or self.is_refusal
            case ToolCallFragment():
                self._add_tool_call(event)
            case ToolCallDone():
                for call in self._calls:
                    call.is_complete |= call.place == event.place
            case BlockDone():
                self._add_block(event.block)
            case Finish():
                self.given_reason = event.reason or self.given_reason
                self._stop_string = event.stop_string or self._stop_string
            case _:
                pass

    def _queue(self, event: OutputEvent | HostedCall) -> bool:
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
            self._waiting.append((text, self._pending_entries))
            self._pending_entries = []

    def _add_tokens(self, tokens: SampledTokens) -> None:
        if not self.is_stopped:
            self._entries += tokens.entries
            self._pending_entries += tokens.entries
        self.prompt_token_ids = tokens.prompt_token_ids or self.prompt_token_ids
        self.token_ids += tokens.token_ids or ()
        self.logprobs += tokens.logprobs or ()

    def _add_block(self, block: Json) -> None:
        if self.is_stopped:
            return
        if block.get("type") == CHAT_TURN:
            block = block | {"provider": self.provider}
        self.blocks.append(block)
        if needs_echo(block):
            self._waiting.append((SignedReasoning(block), []))

    def _add_tool_call(self, fragment: ToolCallFragment) -> None:
        if not self._flush_text():
            return
        given, name = (each if isinstance(each, str) else "" for each in (fragment.id, fragment.name))
        arguments = fragment.arguments
        text = arguments if isinstance(arguments, str) else "" if arguments is None else dumps(arguments).decode()
        call = self._find_call(fragment.place, given, name)
        if call is None or (name and call.is_followed_by(given, name, text)):
            call = _PartialToolCall(fragment.place)
            self._calls.append(call)
            self._waiting.append((call, []))
        call.id = call.id or given
        call.is_custom |= fragment.is_custom
        call.extra = fragment.extra or call.extra
        if name and call.start is None:
            call.add_name(name)
        if call.is_ended and text.strip() not in ("", call.arguments.strip()):
            self.protocol_error = f"it continued the tool call {call.name!r} after its end"
        elif text and not call.is_ended and not (name and text == call.arguments and call.has_complete_arguments()):
            if call.start is None and call.arguments.strip() == "{}":  # It stood for arguments that were to come.
                call.deltas.clear()
            call.deltas.append(text)

    def _find_call(self, place: Any, given: str, name: str) -> _PartialToolCall | None:
        """The last call of a place; without an index the id decides. What has no name is no new call."""
        here = [call for call in self._calls if call.place == place]
        among = self._calls if not _is_index(place) or not (here or name) else here
        known = [call for call in among if given and call.id == given]
        found = known or here or ([] if name else self._calls)
        return found[-1] if found else None

    # -- taking ----------------------------------------------------------------------------------------------------

    def take_new(self, done: bool = False) -> list[OutputEvent]:
        """The events that can be written since the last call; all that are left once the provider is `done`."""
        events: list[OutputEvent] = []
        if done:
            self._flush_text()
        while self._waiting:
            first, entries = self._waiting[0]
            if isinstance(first, _PartialToolCall):
                ends = done or first.is_complete or (len(self._waiting) > 1 and first.has_complete_arguments())
                new = self._take_tool_call(first, ends)
                events += new
                self._taken += new
                self._event_entries += [[] for _ in new]
                if not ends:
                    break
            else:
                self._taken.append(first)
                if not isinstance(first, HostedCall):
                    events.append(first)
                    self._event_entries.append(entries)
            self._waiting.popleft()
        if done:
            self._join()
        return events

    def _join(self) -> None:
        content = [event.text if isinstance(event, RefusalDelta) else event for event in self._taken]
        self.content = "".join([text for text in content if isinstance(text, str)])
        self.reasoning = "".join([event.text for event in self._taken if isinstance(event, ReasoningDelta)])

    def _take_tool_call(self, call: _PartialToolCall, ends: bool) -> list[OutputEvent]:
        """Starts with the first arguments, by which time the name is complete."""
        events: list[OutputEvent] = []
        if ends and call.is_custom:
            call.deltas, call.is_custom = [custom_arguments(call.arguments)], False
        if ends and not call.arguments.strip():
            call.deltas.append("{}")
        if call.start is None:
            if not ends and (call.is_custom or call.arguments.strip() in ("", "{}")):
                return events
            call.start = ToolCallStart(len(self.tool_calls), self._new_id(call.id), call.name)
            events += [*self._take_extra(call), call.start]
        index, text = call.start.index, "".join(call.deltas[call.num_taken :])
        call.num_taken = len(call.deltas)
        events += [ToolCallDelta(index, text)] if text else []
        if ends:
            call.is_ended = True
            self.tool_calls.append(ToolCall(index, call.start.id, call.name, call.arguments))
            events += [ToolCallEnd(self.tool_calls[-1]), *self._take_extra(call)]
        return events

    def _take_extra(self, call: _PartialToolCall) -> list[OutputEvent]:
        if not call.extra or call.start is None:
            return []
        block = {"type": CHAT_TURN, "provider": self.provider, "calls": {call.start.id: call.extra}}
        call.extra = None
        self.blocks.append(block)
        return [SignedReasoning(block)]

    def _new_id(self, given: str) -> str:
        """The provider's id, unless another call of the answer has it."""
        used = any(call.start is not None and call.start.id == given for call in self._calls)
        return given if (given and not used) or not self.call_prefix else self.call_prefix + secrets.token_hex(12)

    # -- the whole answer ------------------------------------------------------------------------------------------

    @property
    def is_stopped(self) -> bool:
        """Whether the answer was ended here, at a stop string."""
        return self._stop.stopped

    @property
    def is_finished(self) -> bool:
        """Whether the provider finished it, or a stop string ended it here."""
        return self.is_stopped or finished_reason(self.given_reason) is not None

    @property
    def message(self) -> Message:
        return assistant_message(self.content, self.reasoning, self.tool_calls)

    @property
    def finish_reason(self) -> str:
        reason = "stop" if self.is_stopped else finished_reason(self.given_reason) or self.given_reason or "error"
        return "tool_calls" if self.tool_calls and reason == "stop" else reason

    @property
    def recorded_reason(self) -> str:
        """Chat completions' name for the reason, or the provider's for one that finishes nothing."""
        return finished_reason(self.given_reason) or self.given_reason or "error" if not self.is_stopped else "stop"

    @property
    def stop_string(self) -> str | None:
        return self._stop.found or self._stop_string

    def parts(self) -> list[OutputEvent]:
        return [part for part in self._parts() if not isinstance(part, HostedCall)]

    def _parts(self) -> list[OutputEvent | HostedCall]:
        parts: list[OutputEvent | HostedCall] = []
        for kind, run in groupby(self._taken, type):
            events = list(run)
            if kind is ToolCallEnd:
                parts += [event.call for event in events if isinstance(event, ToolCallEnd)]
            elif kind in (SignedReasoning, HostedCall):
                parts += events
            elif kind not in (ToolCallStart, ToolCallDelta):
                parts.append(_joined(events))
        return parts

    def recorded_message(self, reason: str) -> Json:
        """As OpenTelemetry has it, with what has come so far."""
        self.take_new(done=True)
        parts: list[Json] = []
        for part in self._parts():
            match part:
                case ReasoningDelta():
                    parts.append({"type": "reasoning", "content": part.text})
                case ToolCall():
                    parts.append(tool_call(part.id or None, part.name, part.arguments))
                case HostedCall():
                    parts.append(message_part(part.block))
                case str() | RefusalDelta():
                    parts.append({"type": "text", "content": part if isinstance(part, str) else part.text})
                case _:
                    pass
        reason = "tool_call" if reason == "tool_calls" else reason  # OTel's is singular
        return {"role": "assistant", "parts": parts, "finish_reason": reason}

    def take_token_ids(self) -> list[int]:
        """None are known to be shown."""
        return []

    def next_logprobs(self) -> list[Json]:
        return _shown(self._event_entries.popleft()) if self._event_entries else []

    def remaining_logprobs(self) -> list[Json]:
        rest, self._pending_entries = self._pending_entries, []
        return _shown(rest)

    def all_logprobs(self) -> list[Json]:
        return _shown(self._entries)


def _is_index(place: Any) -> bool:
    return isinstance(place, int) and place >= 0


def _joined(events: Sequence[OutputEvent | HostedCall]) -> OutputEvent:
    """Events of one kind as one."""
    if isinstance(events[0], str):
        return "".join(event for event in events if isinstance(event, str))
    text = "".join(event.text for event in events if isinstance(event, ReasoningDelta | RefusalDelta))
    return ReasoningDelta(text) if isinstance(events[0], ReasoningDelta) else RefusalDelta(text)


def _shown(entries: Sequence[Json]) -> list[Json]:
    """Log-probabilities as chat completions shows them."""
    return [
        _token(entry) | {"top_logprobs": [_token(top) for top in logprob_entries(entry.get("top_logprobs"))]}
        for entry in entries
    ]


def _token(given: Json) -> Json:
    text = given.get("token")
    text = text if isinstance(text, str) else ""
    known = given.get("bytes")
    return {"token": text, "logprob": given["logprob"], "bytes": list(text.encode()) if known is None else known}


_READERS: Final[Mapping[str, type[ChatEvents | ResponsesEvents | MessagesEvents]]] = {
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
    id: str = ""
    model: str = ""
    usage: Usage | None = None
    choices: dict[int, ProviderAnswer] = field(default_factory=dict[int, ProviderAnswer])
    prompt_token_ids: list[int] | None = None
    error: str | None = None
    """What the provider reported as an error, possibly in the middle of a stream."""
    _reader: ChatEvents | ResponsesEvents | MessagesEvents = field(init=False)

    def __post_init__(self) -> None:
        self._reader = _READERS[self.path]()

    def read(self, data: Any) -> list[ProviderEvent]:
        """Add a whole answer or one stream event, and return its events. What is malformed is skipped."""
        events: list[ProviderEvent] = []
        if not isinstance(data, dict):
            return events
        with suppress(*MALFORMED):
            self._reader.read(cast("Json", data), events.append)
        for event in events:
            try:
                self._add(event)
            except MALFORMED:
                continue
        return events

    def choice(self, index: int) -> ProviderAnswer:
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = ProviderAnswer(index)
        return found

    def _add(self, event: ProviderEvent) -> None:
        match event:
            case ResponseStart():
                self.id = self.id or (event.id if isinstance(event.id, str) else "")
                self.model = self.model or (event.model if isinstance(event.model, str) else "")
            case UsageReport():
                self.usage = event.usage if event.usage.tokens else self.usage or event.usage
            case ProviderFailure():
                self.error = event.message
            case SampledTokens(choice=None):
                self.prompt_token_ids = event.prompt_token_ids
            case _:
                self.choice(event.choice or 0).add(event)


# -- the usage of a whole answer, without reading the rest -------------------------------------------------------------

_USAGES: Final[Mapping[str, Callable[[Json], Usage]]] = {
    "chat/completions": chat_usage,
    "responses": chat_usage,
    "messages": messages_usage,
}


class _Used(Struct):
    """The usage of an answer; its other fields are only checked to be JSON."""

    usage: Any = None


_used: Final = msgspec.json.Decoder(_Used)


def usage_of(path: str, answer: bytes) -> Usage | None:
    """The usage that a whole answer reports; None if it reports none that can be read. Raises MsgspecError if it is no
    JSON object."""
    usage = _used.decode(answer).usage
    if not usage or not isinstance(usage, dict):
        return None
    try:
        return _USAGES[path](cast("Json", usage))
    except (AttributeError, TypeError):
        return None
