"""The contract of a dialect, and what dialects share.

A dialect reads requests into a `Request`, writes answers as its official SDK expects them, and reads what providers
answer. It knows its wire format and nothing else: not who calls, not what the engine samples from, not what is
recorded. A new dialect is one module that makes a `Dialect`.

Shared are readers for the fields of a request, each of which gives a value of the right kind or an ApiError 400 naming
the field; the sampling parameters of requests and of LLM resources: their names, ranges and precedence; for OpenAI's
dialects function tools, tool choice, response formats, errors and chunks; and server-sent events in every dialect.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, Literal, Protocol, cast

import jsonschema_rs
import orjson

from agentlightning.chat.base import Message
from agentlightning.engine.base import RANGES, SamplingParams, out_of_range
from agentlightning.errors import AgentLightningError
from agentlightning.gateway.answer import NOT_JSON, Answer, Event, ProviderResponse, Usage, json_of, object_of
from agentlightning.gateway.dialects.response_store import Attempt, ResponseLookup, ResponseStore
from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.gateway.http import parse
from agentlightning.tracing.agent_spans import valid_text
from agentlightning.util.json_values import Json, dumps, loads

ApiPath = Literal["chat/completions", "completions", "responses", "embeddings", "messages"]
"""Paths of the API that are model calls."""


# -- constraints on the answer -----------------------------------------------------------------------------------------

# Constraints that a request puts on the form of its answer, and whether an answer meets them.
#
# Constrained sampling changes probabilities: tokens that a grammar forbids are never sampled, and the others become
# more likely. The recorded log-probabilities are those of the constrained distribution, whereas a trainer computes the
# policy's own, and the two cannot be compared: a token that the grammar forces has probability 1, however unlikely the
# policy finds it. A policy that is always constrained also never learns the form by itself. So answers that may be
# trained on are sampled freely and then checked; all others are constrained where the engine supports it
# (`gateway.sampling`). Constrained answers carry `agentlightning.reshaped` on their span, and losses reject
# them by that attribute. The span also has the verdict (`agentlightning.constraint`):
#
#     enforced    the answer could not violate it: sampling was constrained, or ended with the first tool call
#     checked     the answer was free to violate it, and meets it
#     violated    it does not; `agentlightning.constraint.violations` names the fields of the request that it violates
#
# The caller gets the answer whatever the verdict. The content of an answer that calls tools is not checked: the content
# that the constraint requires is still to come.

Verdict = Literal["enforced", "checked", "violated"]
Check = Callable[[str], bool]
"""Whether a text meets a constraint."""

NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
MAX_SCHEMA_BYTES: Final = 120_000
"""Limit in bytes for a JSON schema: compiling one holds the interpreter lock. OpenAI has the same limit."""
_MATCHING: Final = jsonschema_rs.FancyRegexOptions(backtrack_limit=100_000)


@dataclass(frozen=True, slots=True)
class OutputSchema:
    """A JSON schema that the content must match."""

    schema: str
    """The schema as JSON text."""
    check: Check
    given: Json = field(default_factory=lambda: {"type": "json_object"})
    """In terms of chat completions."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The constraints on one answer; by default none."""

    requires_tool_call: bool = False
    names: frozenset[str] | None = None
    """The only tools that may be called; None: any."""
    single_tool_call: bool = False
    """At most one tool call."""
    arguments: Mapping[str, Check] = field(default_factory=dict)
    """The checks of strict tools, by name."""
    content: OutputSchema | None = None
    content_field: str = "response_format"
    """The field of the request that sets `content`."""

    def __bool__(self) -> bool:
        return self.can_be_violated()

    def can_be_violated(self, stops_after_call: bool = False) -> bool:
        """Whether there are answers that violate it; with `stops_after_call`, of those that end with their first tool
        call."""
        others = self.requires_tool_call or self.names is not None or self.arguments or self.content
        return bool(others) or (self.single_tool_call and not stops_after_call)

    def evaluate(self, answer: Answer) -> tuple[Verdict, list[str]]:
        """(verdict, fields of the request that the answer violates)."""
        calls, names, strict = answer.tool_calls, self.names, self.arguments
        holds = {
            "tool_choice": (calls or not self.requires_tool_call)
            and all(names is None or call.name in names for call in calls),
            "parallel_tool_calls": not self.single_tool_call or len(calls) <= 1,
            "tools": all(strict[call.name](call.arguments) for call in calls if call.name in strict),
            self.content_field: calls or self.content is None or self.content.check(answer.prefill + answer.content),
        }
        if failed := [name for name, is_met in holds.items() if not is_met]:
            return "violated", failed
        is_free = self.can_be_violated(answer.stops_after_tool_call) and not answer.is_constrained
        return "checked" if is_free else "enforced", []


JSON_OBJECT: Final = OutputSchema('{"type":"object"}', lambda text: isinstance(json_of(text), dict))
"""Any JSON object."""


def json_schema(where: str, schema: Any) -> OutputSchema:
    """Compile a JSON schema. Raises ApiError 400, naming `where`, if it is none."""
    if not isinstance(schema, dict):
        raise bad_request(where, f"{where} must be a JSON schema, which is an object")
    try:
        # Unsorted: a constrained answer has its keys in this order.
        written = dumps(schema).decode()
        if len(written) > MAX_SCHEMA_BYTES:
            raise ValueError(f"it has {len(written)} bytes, and at most {MAX_SCHEMA_BYTES} can be compiled")
        valid = _validator(dumps(schema, option=orjson.OPT_SORT_KEYS)).is_valid
    except (ValueError, TypeError, jsonschema_rs.ReferencingError) as error:
        reason = str(error).partition("\n")[0]
        raise bad_request(where, f"{where} is no JSON schema that can be checked: {reason}") from None

    def check(text: str) -> bool:
        value = json_of(text)
        return value is not NOT_JSON and valid(value)

    return OutputSchema(written, check)


@lru_cache(maxsize=512)
def _validator(schema: bytes) -> jsonschema_rs.Validator:
    """Cached, since agents send the same schema with every call. References to other documents are never fetched."""
    return jsonschema_rs.validator_for(loads(schema), offline=True, pattern_options=_MATCHING)


def strict_arguments(tools: Sequence[Json] | None) -> dict[str, Check]:
    """The checks of the tools with `strict`, by name. Raises ApiError 400 for a schema that cannot be checked."""
    functions = [tool["function"] for tool in tools or ()]
    return {
        function["name"]: json_schema("tools.parameters", function["parameters"]).check
        for function in functions
        if function.get("strict") is True and function.get("parameters") is not None
    }


# -- the contract ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """One request, in terms that all dialects share."""

    model: str | None
    params: SamplingParams
    messages: list[Message] = field(default_factory=list)
    """The conversation; empty if the request has `prompts`."""
    prompts: tuple[str | list[int], ...] = ()
    """Raw prompts, as text or as token ids, each of which gets `n` answers."""
    tools: list[Json] | None = None
    forbidden_tools: list[Json] | None = None
    """Tools that must not be called (`tool_choice` none). An engine is not shown them; a provider is."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the tools whose input is free text: `tools` has them as functions (`answer.CUSTOM_INPUT`)."""
    n: int = 1
    stream: bool = False
    logprobs: bool = False
    constraint: Constraint = field(default_factory=Constraint)
    num_instructions: int = 0
    """How many of the first messages belong to this request alone, and not to the conversation that later ones
    continue."""
    prefill: str = ""
    """The beginning of the answer, written by the caller, who wants the rest."""
    token_ids: bool = False
    """The reply includes the token ids, as vLLM's does (`return_token_ids`)."""
    template: Json = field(default_factory=Json)
    """Variables for the chat template."""
    ignored_fields: tuple[str, ...] = ()
    """Names of the fields that were ignored."""
    raw: Json = field(default_factory=Json)
    """The request as received."""


@dataclass
class ReplyWriter:
    """Writes the reply to one request: either `body`, or `more` with the events as they come, and then `end`."""

    request: Request
    id: str
    model: str
    created: int
    """Seconds since the epoch."""
    usage: Usage
    """Of all prompts, each counted once. A provider reports it at the end of its answer. `num_output_tokens` tells the
    output."""
    _is_open = False

    def __post_init__(self) -> None:
        """Where a dialect has state of its own, it is made here."""

    def more(self, answers: Sequence[Answer], events: Sequence[tuple[Answer, Event]] = ()) -> bytes:
        """More of a stream, from its start on."""
        opening = b"" if self._is_open else self.start(answers)
        self._is_open = True
        return opening + b"".join([self.event(*each) for each in events])

    def body(self, answers: Sequence[Answer]) -> bytes:
        """The reply as one object."""
        raise NotImplementedError

    def start(self, answers: Sequence[Answer]) -> bytes:
        """The stream up to the first event."""
        raise NotImplementedError

    def event(self, answer: Answer, event: Event) -> bytes:
        """One more event of an answer."""
        raise NotImplementedError

    def end(self, answers: Sequence[Answer]) -> bytes:
        """The stream after the last event: why each answer ended, and the usage."""
        raise NotImplementedError

    def store(
        self, store: ResponseStore, attempt: Attempt, answer: Answer, body: bytes = b"", digests: Sequence[bytes] = ()
    ) -> None:
        """Store a reply that later requests may refer to. `body`: as it was sent, unless it was streamed; `digests`:
        those of the request's messages, if they are known."""


class ReadRequest(Protocol):
    """Reads a request."""

    def __call__(self, data: Json, recall: ResponseLookup, attachments: bool = False) -> Request:
        """Thread-safe. With `attachments`, images and files become parts of the messages (`content_parts`); otherwise
        they are rejected. Raises ApiError 400, naming the field, for an object that is no request or asks for what is
        not supported."""
        ...


def _error_body(api_error: ApiError) -> bytes:
    return dumps({"error": api_error.error_object()})


def _error_event(api_error: ApiError) -> bytes:
    """The official SDK raises APIError on it."""
    return encode_event({"error": api_error.error_object()})


@dataclass(frozen=True, slots=True)
class Dialect:
    """One wire format."""

    id_prefix: str
    """Prefix of the ids of replies."""
    read: ReadRequest
    reply: type[ReplyWriter]
    response: type[ProviderResponse]
    """Reads what a provider answers."""
    operation: str = "chat"
    """OpenTelemetry's name for the operation."""
    call_prefix: str = "call_"
    """Prefix of the ids of tool calls."""
    error_body: Callable[[ApiError], bytes] = _error_body
    """The body of an error reply."""
    error_event: Callable[[ApiError], bytes] = _error_event
    """An error in the middle of a stream."""
    ping: bytes = b": keep-alive\n\n"
    """What is sent while a stream is silent; the official SDKs skip it."""

    def new_reply(self, request: Request, model: str, usage: Usage) -> ReplyWriter:
        """Begins the reply to a request that `model` answers, with an id of its own."""
        return self.reply(request, self.id_prefix + secrets.token_hex(12), model, int(time.time()), usage)


def num_output_tokens(answers: Sequence[Answer]) -> int:
    """Sampled tokens of all answers."""
    return sum(answer.num_tokens for answer in answers)


# -- fields of a request -----------------------------------------------------------------------------------------------

MAX_TOP_LOGPROBS: Final = 20


def read_json(body: bytes) -> Json:
    """The body as a JSON object. Raises ApiError 400 if it is none."""
    try:
        data = parse(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"the body is a JSON {type(data).__name__}, not an object", code="invalid_json")
    return data


def given_messages(data: Json) -> list[Any]:
    """The messages of a request, at least one."""
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages", "messages must be a list with at least one message")
    return cast("list[Any]", messages)


def reject_unsupported(data: Json, fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Reject fields that would change the answer and are not supported. `fields` maps each to the values that change
    nothing; null is always one of them."""
    for name, neutral in fields.items():
        if name in data and data[name] is not None and data[name] not in neutral:
            raise bad_request(name, f"{name}={shorten(data[name])} cannot be honoured here; leave it out")


def optional(data: Json, name: str, kind: type) -> Any:
    """The value of a field; None if it is absent or null."""
    return None if data.get(name) is None else require_type(name, data[name], kind)


def require_type(where: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise bad_request(where, f"{where}={shorten(value)} must be a {kind.__name__}")
    return value


def kind_of(value: Any) -> str | None:
    """The `type` of an object."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def integer(data: Json, name: str, low: int, high: int) -> int | None:
    value = data.get(name)
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise bad_request(name, f"{name}={shorten(value)} must be a whole number from {low} to {high}")
    return value


def top_logprobs(data: Json, name: str = "top_logprobs") -> int:
    """How many of the likeliest tokens are reported at each position."""
    return integer(data, name, 0, MAX_TOP_LOGPROBS) or 0


def shorten(value: Any) -> str:
    """A value as JSON, short enough for an error message."""
    text = dumps(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."


# -- sampling parameters ----------------------------------------------------------------------------------------------

Readers = Mapping[str, tuple[str, Callable[[Any], Any]]]
"""Name in a request -> (field of `SamplingParams`, parser that raises ValueError)."""


def sampling_params(data: Json, readers: Readers, base: SamplingParams, source: str) -> SamplingParams:
    """`base` with the values that `data` sets. Raises ApiError 400 naming an invalid value; `source` says where it was
    set."""
    values: Json = {}
    for name, (target, read) in readers.items():
        if data.get(name) is None:
            continue
        try:
            values[target] = read(data[name])
        except (TypeError, ValueError) as error:
            raise bad_request(name, f"{source} sets {name}={shorten(data[name])}; {error}") from None
    return replace(base, **values) if values else base


def read_shared(
    data: Json,
    readers: Readers,
    base: SamplingParams,
    known: Container[str],
    unsupported: Mapping[str, tuple[Any, ...]],
) -> Request:
    """What a request has in every dialect: model, sampling parameters, stream, and the names of ignored fields, which
    are in none of `readers`, `known` and `unsupported`. Raises ApiError 400 as `reject_unsupported` does."""
    reject_unsupported(data, unsupported)
    return Request(
        model=optional(data, "model", str),
        params=sampling_params(data, readers, base, "the request"),
        stream=bool(optional(data, "stream", bool)),
        ignored_fields=tuple(
            name for name in data if name not in known and name not in unsupported and name not in readers
        ),
        raw=data,
    )


def apply_resource_params(params: SamplingParams, resource: str, forced: Json) -> SamplingParams:
    """Apply the sampling parameters of the trainer's LLM resource, which take precedence over the request's.

    Raises ApiError 400 for a name that is not supported."""
    unknown = sorted(set(forced) - set(OPENAI_PARAMS))
    if unknown:
        known = ", ".join(sorted(OPENAI_PARAMS))
        message = f"the LLM resource {resource!r} sets {', '.join(unknown)}, which cannot be honoured; known: {known}"
        raise bad_request("sampling_parameters", message)
    return sampling_params(forced, OPENAI_PARAMS, params, f"the LLM resource {resource!r}")


def _within(name: str) -> tuple[str, Callable[[Any], float]]:
    def read(value: Any) -> float:
        if remedy := out_of_range(name, value):
            raise ValueError(remedy)
        return value if isinstance(RANGES[name][0], int) else float(value)

    return name, read


def _top_k(value: Any) -> float:
    return 0 if value == -1 else _within("top_k")[1](value)


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("use a string or a list of strings, none of them empty")
    return tuple(stops)


def _bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or not all(str(token).isascii() and str(token).isdigit() for token in value):
        raise ValueError("use an object from token ids to numbers")
    read = _within("logit_bias")[1]
    return tuple((int(token), read(bias)) for token, bias in value.items())


def is_token_list(value: Any) -> bool:
    """Whether it is a list of token ids."""
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not is_token_list(value):
        raise ValueError("use a list of token ids")
    return tuple(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("use true or false")
    return value


SHARED_PARAMS: Final = {
    **{name: _within(name) for name in ("temperature", "top_p", "max_tokens")},
    "top_k": ("top_k", _top_k),
}
OPENAI_PARAMS: Final = {
    **SHARED_PARAMS,
    **{name: _within(name) for name in RANGES if name not in (*SHARED_PARAMS, "logit_bias")},
    "max_completion_tokens": _within("max_tokens"),
    "stop": ("stop", _stop),
    "logit_bias": ("logit_bias", _bias),
    "stop_token_ids": ("stop_token_ids", _token_ids),
    "ignore_eos": ("ignore_eos", _flag),
}
MESSAGES_PARAMS: Final = {**SHARED_PARAMS, "stop_sequences": ("stop", _stop)}
RESPONSES_PARAMS: Final = {**OPENAI_PARAMS, "max_output_tokens": _within("max_tokens")}

OPENAI_UNSUPPORTED: Final = {
    "length_penalty": (1,),
    "typical_p": (1,),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Sampling fields of OpenAI's and compatible servers that are not supported, for `reject_unsupported`."""


# -- tools and formats -------------------------------------------------------------------------------------------------

Choice = tuple[bool, frozenset[str] | None] | None
"""(whether a tool call is required, of which tools; None: any); None: the tools must not be called."""


def with_tools(
    request: Request,
    as_function: Callable[[Any], Any],
    choice: Choice,
    parallel: bool,
    content: OutputSchema | None,
    content_field: str,
) -> Request:
    """A request with its tools, and the constraint on its answer. `as_function`: a tool as chat completions has it;
    other kinds are ignored, since only a hosted service offers them."""
    tools, dropped = list[Json](), list[str]()
    for index, given in enumerate(optional(request.raw, "tools", list) or ()):
        kind = kind_of(tool := as_function(given))
        if kind is None:
            raise bad_request("tools", f"tools[{index}] must be an object with the type function")
        if kind != "function":
            dropped.append(f"tools.{kind}")
        elif not isinstance(object_of(tool, "function").get("name"), str):
            raise bad_request("tools", f"tools[{index}] must have a function with a name")
        else:
            tools.append(tool)
    requires_tool_call, names = choice or (False, None)
    offered, forbidden = (None, tools) if choice is None else (tools, None)
    known = {tool["function"]["name"] for tool in offered or ()}
    if requires_tool_call and not offered:
        raise bad_request("tool_choice", "tool_choice asks for a tool call, and the request offers no function tools")
    if missing := sorted((names or frozenset()) - known):
        raise bad_request(
            "tool_choice", f"tool_choice names {', '.join(missing)}, which is not among the request's tools"
        )
    constraint = Constraint(
        requires_tool_call=requires_tool_call,
        names=names,
        single_tool_call=not parallel and bool(offered),
        arguments=strict_arguments(offered),
        content=content,
        content_field=content_field,
    )
    return replace(
        request,
        tools=offered or None,
        forbidden_tools=forbidden or None,
        constraint=constraint,
        ignored_fields=(*request.ignored_fields, *dropped),
    )


def tool_choice(data: Json, nested: bool) -> tuple[Choice, bool]:
    """(the choice for `with_tools`, whether several calls are allowed). `nested`: chat completions nests the details of
    a choice below the name of its kind, responses does not."""
    return _choice(data.get("tool_choice"), nested), optional(data, "parallel_tool_calls", bool) is not False


def _choice(value: Any, nested: bool) -> Choice:
    if value == "none":
        return None
    if value in (None, "auto"):
        return False, None
    if value == "required":
        return True, None
    kind = kind_of(value)
    details = object_of(value, kind) if nested and kind else value
    if kind in (("function",) if nested else ("function", "custom")) and isinstance(details.get("name"), str):
        return True, frozenset({details["name"]})
    if kind == "allowed_tools" and details.get("mode") in ("auto", "required"):
        tools = require_type("tool_choice.tools", details.get("tools"), list)
        named = [require_type("tool_choice.tools", tool, dict) for tool in tools]
        names = [(object_of(tool, "function") or tool).get("name") for tool in named]
        return details["mode"] == "required", frozenset(
            require_type("tool_choice.tools.name", name, str) for name in names
        )
    raise bad_request(
        "tool_choice", f"tool_choice={shorten(value)} cannot be honoured here; use auto, none, required or a function"
    )


def text_format(where: str, value: Any, nested: bool) -> OutputSchema | None:
    """The schema that a `response_format` or `text.format` asks for; None for plain text. `nested` as in
    `tool_choice`."""
    kind = kind_of(value)
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    details = (value.get(kind) if nested else value) if kind == "json_schema" else None
    if isinstance(details, dict):
        known = {
            key: details[key] for key in ("name", "schema", "strict", "description") if details.get(key) is not None
        }
        given = value if nested else {"type": kind, "json_schema": {"name": "answer", "strict": True} | known}
        return replace(json_schema(f"{where}.schema", details.get("schema")), given=given)
    raise bad_request(
        where, f"{where}={shorten(value)} cannot be honoured here; use the type text, json_object or json_schema"
    )


VLLM_FORMAT_FIELDS = ("structured_outputs", "guided_json")
"""vLLM's fields for the format of the content."""
FORMAT_UNSUPPORTED: Final = {**dict.fromkeys(VLLM_FORMAT_FIELDS, ()), "chat_template_kwargs": ({},)}
"""Fields that only our own engines support, and only in chat completions, for `reject_unsupported`."""


def content_format(data: Json) -> tuple[OutputSchema | None, str]:
    """(schema of the content, the field that sets it): `response_format`, or what vLLM's clients send instead. Raises
    ApiError 400 for formats that are not supported."""
    guided, outputs = data.get("guided_json"), optional(data, "structured_outputs", dict) or {}
    details = {name: value for name, value in outputs.items() if value is not None and value is not False}
    if other := sorted(details.keys() - {"json", "json_object"}):
        raise bad_request("structured_outputs", f"structured_outputs.{other[0]} cannot be honoured here; use json")
    if guided is None and not details:
        return text_format("response_format", data.get("response_format"), nested=True), "response_format"
    name, schema = ("guided_json", guided) if guided is not None else ("structured_outputs", details.get("json"))
    if schema is None:
        return JSON_OBJECT, name
    return json_schema(f"{name}.json", json_of(schema) if isinstance(schema, str) else schema), name


# -- server-sent events ------------------------------------------------------------------------------------------------

MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""Limit for one event. The last event of a response repeats all of it, including images in base64."""
DONE: Final = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams of chunks."""
_BOM: Final = b"\xef\xbb\xbf"
_LINE_END: Final = rb"(?:\r\n|\n|\r(?=[^\n]))"
_END: Final = re.compile(_LINE_END * 2)
"""The blank line that ends an event. A CR at the end of the data may be the first half of a CRLF."""
_OVERLAP: Final = 4


class EventTooLongError(AgentLightningError):
    """An event of a stream that does not end."""


class SSEDecoder:
    """Finds the events in the bytes of a stream, in time linear in the bytes however they are chunked."""

    def __init__(self, limit: int = MAX_EVENT_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._searched = 0
        """The end of an event may start here, and not before."""
        self._has_cr = False

    def feed(self, more: bytes) -> bytes:
        """The events completed by `more`, with the blank lines that end them. Raises EventTooLongError."""
        self._buffer += more
        self._has_cr |= b"\r" in more
        if self._has_cr:
            end = max((match.end() for match in _END.finditer(self._buffer, self._searched)), default=0)
        else:
            place = self._buffer.rfind(b"\n\n", self._searched)
            end = 0 if place < 0 else place + 2
        found = bytes(self._buffer[:end])
        del self._buffer[:end]
        self._searched = max(0, len(self._buffer) - _OVERLAP)
        if len(self._buffer) > self._limit:
            raise EventTooLongError(f"an event of its stream has more than {self._limit} bytes")
        return found

    @property
    def rest(self) -> bytes:
        """The received part of the next event."""
        return bytes(self._buffer)


def split_events(events: bytes) -> list[bytes]:
    """Each event, with the blank line that ends it."""
    ends = [0, *(match.end() for match in _END.finditer(events)), len(events)]
    return [events[start:end] for start, end in pairwise(ends) if end > start]


def encode_event(data: Json, event: str = "") -> bytes:
    """One event with JSON data, named `event` in the dialects that name their events."""
    name = b"event: %b\n" % event.encode() if event else b""
    return b"%bdata: %b\n\n" % (name, dumps(data))


def event_data(event: bytes) -> Any:
    """The JSON of an event; None for events without JSON, such as `[DONE]` and comments. An event without data, or with
    `null`, is an object without fields."""
    try:
        if event.startswith(b"data: {") and event.find(b"\n") == len(event) - 2:  # nearly all
            return loads_tolerantly(event[6:])
        lines = [line[5:].strip() for line in event.removeprefix(_BOM).splitlines() if line.startswith(b"data:")]
        data = b"\n".join(lines)
        return (loads_tolerantly(data) if data else None) or {} if lines else None
    except ValueError:
        return None


def loads_tolerantly(data: bytes) -> Any:
    """Parse a provider's JSON, also after a byte order mark. Half a surrogate pair, which orjson rejects, becomes
    U+FFFD. Raises ValueError."""
    data = data.removeprefix(_BOM)
    try:
        return loads(data)
    except orjson.JSONDecodeError:
        if b"\\u" not in data:
            raise
    try:
        text = json.dumps(json.loads(data), ensure_ascii=False, allow_nan=False)
        return loads(valid_text(text).encode())
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None
