"""What a model answers: events, and the `Answer` that they make, the same for our engines and for every provider.

A source makes the events: the tokens of our engine (`sampling.SampledAnswer`), or what a provider sends, whole or
streamed, read by the format of its path (a `ProviderResponse`). They go once through the answer: in order to the writer
of the caller's dialect (`take_new`), and as a whole to the record of the call. What providers send of tool calls may be
mixed; events are not: a tool call is one event, and what follows it waits until it is complete.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, cast

import orjson
from msgspec import Struct

from agentlightning.chat.base import Message
from agentlightning.chat.tool_calls.format import partial_marker_length
from agentlightning.util.json_values import Json, dumps, loads

# -- events ------------------------------------------------------------------------------------------------------------


class ToolCall(Struct, frozen=True):
    """A whole tool call of an answer, with the id we gave it."""

    index: int
    id: str
    name: str
    arguments: str

    def wire(self) -> Json:
        """As chat completions shows it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ReasoningDelta(Struct, frozen=True):
    """More of what the model thinks before it answers."""

    text: str


class RefusalDelta(Struct, frozen=True):
    """More of the reason why the model does not answer."""

    text: str


class HostedCall(Struct, frozen=True):
    """A call of a tool that the provider runs itself, or its result, as the provider wrote it. Writers skip it."""

    block: Json


Event = str | ToolCall | ReasoningDelta | RefusalDelta | HostedCall
"""More of an answer; a string is more content."""
_SAMPLED: Final = (str, ToolCall, ReasoningDelta, RefusalDelta)
"""Events that have tokens."""


# -- what a provider wants back with a turn ----------------------------------------------------------------------------

# Anthropic signs or redacts what a model thinks, and continues thinking over a tool's result only if the blocks come
# back unchanged; OpenAI does the same with the `encrypted_content` of reasoning items, and servers of chat completions
# with fields of the message (`dialects.chat.ECHOED`), here a block of the type `CHAT_TURN`. `response_store` stores
# them for the attempt, by the turn they belong to (`turn_key`).

CHAT_TURN: Final = "chat_turn"
"""Type of a block with what a server of chat completions wants back: `message` has fields of the assistant's message,
`calls` the `extra_content` of tool calls by id, `provider` the name of the provider that wrote it."""
THOUGHTS: Final = ("thinking", "redacted_thinking")
"""Types of Anthropic's reasoning blocks."""


def needs_echo(block: Json) -> bool:
    """Whether a content block or an output item is reasoning that its provider wants back."""
    kind = block.get("type")
    if kind == "reasoning":
        return bool(block.get("encrypted_content"))
    return kind in ("redacted_thinking", CHAT_TURN) or (kind == "thinking" and bool(block.get("signature")))


# -- usage and reasons -------------------------------------------------------------------------------------------------


class Usage(Struct, frozen=True):
    """Tokens of one call, as its provider counted them."""

    input_tokens: int = 0
    """The whole prompt, including `cached_tokens`."""
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens read from the provider's cache."""
    written_tokens: int = 0
    """Prompt tokens written to the provider's cache for minutes, at a price of their own."""
    written_hour_tokens: int = 0
    """Prompt tokens written to the provider's cache for an hour."""
    reasoning_tokens: int = 0
    """Those of `output_tokens` that were spent on reasoning."""

    @classmethod
    def counted(cls, *counts: Any) -> Usage:
        """Usage with everything that is no positive number as 0."""
        return cls(*(count if isinstance(count, int) and count > 0 else 0 for count in counts))

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))


_SYNONYMS: Final = {
    "stop": "end_turn stop_sequence pause_turn eos eos_token end complete completed",
    "length": "max_tokens max_output_tokens model_context_window_exceeded model_length max_length max_new_tokens",
    "tool_calls": "tool_use tool_call function_call",
    "content_filter": "refusal safety sensitive recitation prohibited_content guardrail_intervened",
}
_FINISHED: Final = {name: reason for reason, names in _SYNONYMS.items() for name in (reason, *names.split())}
PENDING: Final = frozenset({"queued", "in_progress"})
"""Statuses of a response that its provider works on in the background: later polls bring the answer."""


def finished_reason(reason: str | None) -> str | None:
    """Chat completions' name for the reason why an answer ended; None for a reason that does not finish an answer
    (`abort`, `network_error`, `queued` ...), for an unknown one and for none."""
    return _FINISHED.get(reason.lower()) if reason else None


# -- custom tools ------------------------------------------------------------------------------------------------------

CUSTOM_INPUT: Final = "input"
"""A call of a custom tool, whose input is free text, is everywhere a call of a function with this one argument."""


def custom_arguments(text: str) -> str:
    """The input of a custom tool as arguments."""
    return orjson.dumps({CUSTOM_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """The input in the arguments of a call of a custom tool; the arguments as they are if they hold none."""
    given = json_of(arguments)
    text = cast("Json", given).get(CUSTOM_INPUT) if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


# -- the answer --------------------------------------------------------------------------------------------------------


class StopFilter:
    """Ends a text before the first stop string in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._buffer = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        if self.found or not self._stops:
            return "" if self.found else text
        self._buffer += text
        found = [(place, stop) for stop in self._stops if (place := self._buffer.find(stop)) >= 0]
        if found:
            place, self.found = min(found)
            return self._buffer[:place]
        return self._release(len(self._buffer) - max(partial_marker_length(self._buffer, stop) for stop in self._stops))

    def finish(self) -> str:
        return "" if self.found else self._release(len(self._buffer))

    def _release(self, length: int) -> str:
        shown, self._buffer = self._buffer[:length], self._buffer[length:]
        return shown


_LAST_CHARACTERS: Final = frozenset('}]"0123456789el')
"""How a JSON value may end."""


@dataclass(slots=True)
class _PartialToolCall:
    """A tool call that is coming in."""

    place: Any
    id: str = ""
    name: str = ""
    deltas: list[str] = field(default_factory=list)
    is_custom: bool = False
    """The arguments are free text: the input of a custom tool."""
    extra: Json | None = None
    """What the provider wants back with the call."""
    is_complete: bool = False
    """Its provider reported its end."""
    is_taken: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.deltas)

    def has_complete_arguments(self) -> bool:
        last = self.deltas[-1].rstrip() if self.deltas else ""
        if self.is_custom or (last and last[-1] not in _LAST_CHARACTERS):  # Most deltas end in the middle of a value.
            return False
        return json_of(self.arguments) is not NOT_JSON

    def is_followed_by(self, id: str, name: str, text: str) -> bool:
        """Whether a fragment of the same place that has a name begins the next call. Some servers give all calls one
        index; others repeat the name, or a new id, with each fragment of one call."""
        is_other, arguments = bool(id and self.id) and id != self.id, self.arguments.strip()
        if not self.name or not (arguments or self.is_custom):
            is_indexed = _is_index(self.place)
            return bool(self.name) and (is_other or not (id or is_indexed)) and (name != self.name or not text)
        if self.is_custom or not self.has_complete_arguments():
            return name != self.name or (is_other and self.is_custom)
        if is_other or name != self.name:
            return True
        return text.strip() not in ("", arguments if id else "") and (not id or arguments != "{}")

    def add(self, name: str, text: str) -> None:
        """A name may come in parts, or again."""
        if name and not self.is_taken:
            self.name = name if name.startswith(self.name) else self.name + name
        if text and not self.is_taken and not (name and text == self.arguments and self.has_complete_arguments()):
            if len(self.deltas) == 1 and self.deltas[0].strip() == "{}":  # It stood for arguments that were to come.
                self.deltas.clear()
            self.deltas.append(text)

    def whole(self, index: int, id: str) -> ToolCall:
        """The call, of which nothing more is to come."""
        self.is_taken, written = True, self.arguments
        arguments = custom_arguments(written) if self.is_custom else written if written.strip() else "{}"
        return ToolCall(index, id, self.name, arguments)


@dataclass(slots=True)
class Answer:
    """One choice of a reply, from an engine of ours or from a provider. Whatever follows a stop string is skipped."""

    index: int = 0
    """Among the answers to one request."""
    stops: tuple[str, ...] = ()
    """Stop strings that are applied here."""
    call_prefix: str = ""
    """What the ids of tool calls without an id of their own start with; "": they get none."""
    provider: str = ""
    """Name of the provider, for what it wants back."""
    prefill: str = ""
    """What the caller wrote of the answer; `content` continues it."""
    is_constrained: bool = False
    """The engine sampled no token that the request's constraint forbids."""
    prompt_token_ids: Sequence[int] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of `token_ids`, as a provider reports them."""
    keeps_entries: bool = True
    """Whether it keeps the text of each token beside its log-probability, which a writer of the answer needs."""
    num_tokens: int = 0
    """Sampled tokens."""
    events: list[Event] = field(default_factory=list)
    """Those that were taken."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    is_refusal: bool = False
    """The content is the reason why the model does not answer."""
    protocol_error: str = ""
    """What the provider did that events cannot express any more."""
    blocks: list[Json] = field(default_factory=list)
    """The content blocks or items as the provider wrote them, where the format has any."""
    given_reason: str | None = None
    """Why it ended, in the words of its source."""
    given_stop: str | None = None
    """The stop string that ended it, according to its provider."""
    _stop: StopFilter = field(init=False)
    _waiting: deque[tuple[Event | _PartialToolCall, int]] = field(default_factory=deque)
    """What was not taken yet, with the number of tokens up to then."""
    _calls: list[_PartialToolCall] = field(default_factory=list)
    _tokens: list[Any] = field(default_factory=list)
    """Tokens with their log-probabilities: entries as chat completions shows them, unless a subclass has others."""
    _event_ends: deque[int] = field(default_factory=deque)
    """For each event that was taken and is not written, the number of tokens up to then."""
    _assigned: int = 0
    """The number of tokens that belong to an event."""
    _written: int = 0
    """The number of tokens whose log-probabilities were written."""

    def __post_init__(self) -> None:
        self._stop = StopFilter(self.stops)

    # -- adding: what is no text, no object and so on is skipped -----------------------------------------------------

    def add_text(self, text: Any) -> None:
        if isinstance(text, str) and text and not self.is_stopped:
            self._append(self._stop.feed(text))

    def add_reasoning(self, text: Any) -> None:
        if isinstance(text, str) and text:
            self._queue(ReasoningDelta(text))

    def add_refusal(self, text: Any) -> None:
        if isinstance(text, str) and text:
            self.is_refusal = self._queue(RefusalDelta(text)) or self.is_refusal

    def add_hosted_call(self, block: Json) -> None:
        """Add a call of a tool of the provider, or its result, as the provider wrote it."""
        self._queue(HostedCall(block))

    def add_block(self, block: Json) -> None:
        """Add a complete content block or output item as its provider wrote it, or what else of a turn it wants
        back."""
        if self.is_stopped:
            return
        if block.get("type") == CHAT_TURN:
            block = block | {"provider": self.provider}
        self.blocks.append(block)

    def add_tokens(self, prompt: Any, token_ids: Any, logprobs: Any, entries: Sequence[Json]) -> None:
        """Add tokens, their log-probabilities, and these with the text of each token."""
        if self.keeps_entries and not self.is_stopped:
            self._tokens += entries
        self.prompt_token_ids = prompt or self.prompt_token_ids
        with suppress(TypeError):
            self.token_ids += token_ids or ()
            self.logprobs += logprobs or ()

    def add_call(
        self, place: Any, id: Any, name: Any, arguments: Any, is_custom: bool = False, extra: Json | None = None
    ) -> None:
        """Add a tool call or a part of one, as its provider marks it: by the index `place`, of which a negative one is
        the place in a list whose entries have none. `arguments` are a part of the JSON text, or the whole object."""
        if not self._flush_text():
            return
        id, name = (each if isinstance(each, str) else "" for each in (id, name))
        text = arguments if isinstance(arguments, str) else "" if arguments is None else dumps(arguments).decode()
        call = self._find_call(place, id, name)
        if call is None or (name and call.is_followed_by(id, name, text)):
            call = _PartialToolCall(place)
            self._calls.append(call)
            self._append(call)
        call.id = call.id or id
        call.is_custom |= is_custom
        call.extra = extra or call.extra
        if call.is_taken and text.strip() not in ("", call.arguments.strip()):
            self.protocol_error = f"it continued the tool call {call.name!r} after its end"
        call.add(name, text)

    def end_call(self, place: Any) -> None:
        """The tool call at a place is complete."""
        for call in self._calls:
            call.is_complete |= call.place == place

    def end(self, reason: Any, *stop_strings: Any) -> None:
        """The source names the reason why the answer ended, and perhaps the stop string."""
        self.given_reason = (reason if isinstance(reason, str) else None) or self.given_reason
        self.given_stop = next((each for each in stop_strings if isinstance(each, str) and each), self.given_stop)

    def _queue(self, event: Event) -> bool:
        """Queue an event other than text, unless the answer was stopped."""
        if allowed := self._flush_text():
            self._append(event)
        return allowed

    def _flush_text(self) -> bool:
        """Queue text that might have started a stop string. Whether anything other than text may follow."""
        self._append(self._stop.finish())
        return not self.is_stopped

    def _append(self, event: Event | _PartialToolCall) -> None:
        if event == "":
            return
        if isinstance(event, _SAMPLED):
            self._assigned = len(self._tokens)
        self._waiting.append((event, self._assigned))

    def _find_call(self, place: Any, given: str, name: str) -> _PartialToolCall | None:
        """The last call of a place; without an index the id decides. What has no name is no new call."""
        here = [call for call in self._calls if call.place == place]
        among = self._calls if not _is_index(place) or not (here or name) else here
        known = [call for call in among if given and call.id == given]
        found = known or here or ([] if name else self._calls)
        return found[-1] if found else None

    # -- taking ------------------------------------------------------------------------------------------------------

    def take_new(self, done: bool = False) -> list[Event]:
        """The events that can be written since the last call, with texts of one kind that follow each other as one; all
        that are left once the source is `done`."""
        new: list[tuple[Event, int]] = []
        if done:
            self._flush_text()
        while self._waiting:
            first, end = self._waiting[0]
            if isinstance(first, _PartialToolCall):
                if not (done or first.is_complete or (len(self._waiting) > 1 and first.has_complete_arguments())):
                    break
                first = self._whole_call(first)
            self._waiting.popleft()
            new.append((first, end))
        events: list[Event] = []
        for _, run in groupby(new, lambda each: type(each[0])):
            found, ends = zip(*run, strict=True)
            joined = _join(found)
            events += joined
            self._event_ends += ends[-len(joined) :]
        self.events += events
        return events

    def _whole_call(self, call: _PartialToolCall) -> ToolCall:
        """A call with the provider's id, unless another call of the answer has that."""
        id = call.id
        if self.call_prefix and (not id or any(id == each.id for each in self.tool_calls)):
            id = self.call_prefix + secrets.token_hex(12)
        self.tool_calls.append(call.whole(len(self.tool_calls), id))
        if call.extra:
            self.blocks.append({"type": CHAT_TURN, "provider": self.provider, "calls": {id: call.extra}})
        return self.tool_calls[-1]

    # -- the whole answer --------------------------------------------------------------------------------------------

    @property
    def content(self) -> str:
        said = [event.text if isinstance(event, RefusalDelta) else event for event in self.events]
        return "".join([text for text in said if isinstance(text, str)])

    @property
    def reasoning(self) -> str:
        return "".join([event.text for event in self.events if isinstance(event, ReasoningDelta)])

    @property
    def message(self) -> Message:
        """As an assistant message in terms of chat completions."""
        content, calls = self.content, self.tool_calls
        message: Message = {"role": "assistant", "content": content or None if calls else content}
        if calls:
            message["tool_calls"] = [call.wire() for call in calls]
        if reasoning := self.reasoning:
            message["reasoning_content"] = reasoning
        return message

    def parts(self) -> list[Event]:
        """The whole answer in order, with texts of one kind that follow each other as one."""
        return [part for _, run in groupby(self.events, type) for part in _join(list(run))]

    @property
    def is_stopped(self) -> bool:
        """Whether the answer was ended here, at a stop string."""
        return self._stop.found is not None

    @property
    def is_finished(self) -> bool:
        """Whether its source finished it, or a stop string ended it here."""
        return self.is_stopped or finished_reason(self.given_reason) is not None

    @property
    def recorded_reason(self) -> str:
        """Chat completions' name for the reason, or the provider's for one that finishes nothing."""
        return "stop" if self.is_stopped else finished_reason(self.given_reason) or self.given_reason or "error"

    @property
    def finish_reason(self) -> str:
        """One of stop, length, tool_calls and content_filter; any other: it is not finished."""
        reason = self.recorded_reason
        return "tool_calls" if self.tool_calls and reason == "stop" else reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stop.found or self.given_stop

    @property
    def stops_after_tool_call(self) -> bool:
        """Whether sampling ends with the first tool call."""
        return False

    # -- log-probabilities, as chat completions shows them -----------------------------------------------------------

    def next_logprobs(self) -> list[Json]:
        """Of the next event to be written."""
        return self._write_logprobs(self._event_ends.popleft()) if self._event_ends else []

    def remaining_logprobs(self) -> list[Json]:
        """Of the tokens that belong to no event."""
        self._event_ends.clear()
        return self._write_logprobs(len(self._all_tokens()))

    def all_logprobs(self) -> list[Json]:
        return self._shown(self._all_tokens())

    def take_token_ids(self) -> list[int]:
        """The tokens of the log-probabilities returned last, once. None of a provider's are known to be shown."""
        return []

    def _all_tokens(self) -> list[Any]:
        return self._tokens

    def _write_logprobs(self, end: int) -> list[Json]:
        begin, self._written = self._written, max(end, self._written)
        return self._shown(self._tokens[begin:end])

    def _shown(self, tokens: Sequence[Any]) -> list[Json]:
        return [
            _token(entry) | {"top_logprobs": [_token(top) for top in logprob_entries(entry.get("top_logprobs"))]}
            for entry in tokens
        ]


def _join(events: Sequence[Event]) -> Sequence[Event]:
    """Events of one kind, texts as one."""
    first = events[0]
    if len(events) == 1 or isinstance(first, ToolCall | HostedCall):
        return events
    text = "".join([event if isinstance(event, str) else getattr(event, "text", "") for event in events])
    return [text if isinstance(first, str) else type(first)(text)]


def _is_index(place: Any) -> bool:
    return isinstance(place, int) and place >= 0


def _token(given: Json) -> Json:
    text = given.get("token")
    text = text if isinstance(text, str) else ""
    known = given.get("bytes")
    return {"token": text, "logprob": given["logprob"], "bytes": list(text.encode()) if known is None else known}


NOT_JSON: Final = object()


def json_of(text: str) -> Any:
    """The value of a JSON text; NOT_JSON for any other text."""
    try:
        return loads(text)
    except orjson.JSONDecodeError:
        return NOT_JSON


def objects(value: Any) -> list[Json]:
    """The objects of a list; none if it is no list."""
    listed = cast("list[Any]", value) if isinstance(value, list) else ()
    return [each for each in listed if isinstance(each, dict)]


def object_of(data: Json, name: str) -> Json:
    """The object in a field; {} for any other value."""
    value = data.get(name)
    return cast("Json", value) if isinstance(value, dict) else {}


def logprob_entries(listed: Any) -> list[Json]:
    """The well-formed entries of a list of log-probabilities."""
    return [entry for entry in objects(listed) if "logprob" in entry]


# -- the response of a provider ----------------------------------------------------------------------------------------

MALFORMED: Final = (AttributeError, KeyError, TypeError, ValueError, IndexError)
"""What reading JSON raises that is not structured as its format says."""


class ProviderResponse:
    """Everything that was received for one call. There is a subclass for each format; it reads a whole answer or the
    events of a stream, for the record and for callers of another dialect alike. It never fails on an answer that is not
    as its format says: what cannot be read is skipped."""

    id = ""
    model = ""
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    """Of all choices, which share their prompt."""
    error: str | None = None
    """What the provider reported as an error, possibly in the middle of a stream."""

    def __init__(self) -> None:
        self.choices: dict[int, Answer] = {}

    def read(self, data: Any) -> None:
        """Add a whole answer or one stream event."""
        if isinstance(data, dict):
            with suppress(*MALFORMED):
                self._read(cast("Json", data))

    def merge(self, events: bytes) -> Json | None:
        """The data of the events of a stream that may be read and shown as one; None for all others."""
        return None

    def _read(self, data: Json) -> None:
        """May raise on what is malformed, after adding what came before."""
        raise NotImplementedError

    def choice(self, index: int = 0) -> Answer:
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = Answer(index, keeps_entries=False)
        return found

    def _identify(self, response: Json) -> None:
        id, model = (each if isinstance(each := response.get(name), str) else "" for name in ("id", "model"))
        self.id, self.model = self.id or id, self.model or model

    def _add_usage(self, usage: Usage) -> None:
        if usage.tokens or self.usage is None:
            self.usage = usage
