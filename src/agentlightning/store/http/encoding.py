"""What travels between the store's server and its clients as JSON: the shapes of the REST API, how any value of the
store contract is decoded and encoded, and its errors as HTTP responses and back.

Most shapes are the types of the contract themselves. Where the published 0.x API has another shape (spans, workers,
resources), it is defined here once. Bodies are decoded with msgspec, which checks the types while it parses: a body of
the wrong shape is rejected whole.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import re
import time
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache, partial
from typing import Annotated, Any, Final, Literal, cast

import msgspec
import orjson
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from pydantic import BaseModel, ValidationError

from agentlightning import errors
from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ConflictError,
    NotFoundError,
    RewardError,
    StoreAuthError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreServerError,
)
from agentlightning.resources import NamedResources, ResourcesUpdate, named_resources
from agentlightning.rollouts import Attempt, Rollout, RolloutConfig
from agentlightning.span import Span, SpanEvent
from agentlightning.store.types import RolloutRecord, Worker
from agentlightning.tracing import conventions

logger = logging.getLogger(__name__)

BASE_PATH: Final = "/v1/agl"
PROTOCOL_VERSION: Final = 1
"""Version of `POST /v1/agl/calls`; server and client must have the same."""
PROTOCOL_HEADER: Final = {"agl-protocol": str(PROTOCOL_VERSION)}
MAX_BODY_BYTES: Final = 64 * 1024 * 1024

Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that the database can hold."""


def version() -> str:
    """The version of the installed package."""
    return importlib.metadata.version("agentlightning")


# -- shapes ----------------------------------------------------------------------------------------------------------


class Resources(dict[str, Any]):
    """A body of named resources: LLM and PromptTemplate by name."""


class SpanStatus(Struct, frozen=True):
    status_code: Literal["UNSET", "OK", "ERROR"] = "UNSET"
    description: str | None = None


class SpanContext(Struct, frozen=True):
    trace_id: str
    span_id: str
    is_remote: bool = False
    trace_state: dict[str, str] = {}


class EventBody(Struct):
    name: str
    attributes: dict[str, Any] | None = None
    timestamp: float | None = None


class LinkBody(Struct):
    context: SpanContext
    attributes: dict[str, Any] | None = None


class SpanResource(Struct, frozen=True):
    attributes: dict[str, Any] = {}
    schema_url: str = ""


class SpanBody(Struct, kw_only=True):
    """A span in the 0.x shape. `trace_id`, `span_id` and `parent_id` take precedence over `context` and `parent`."""

    rollout_id: str
    attempt_id: str
    sequence_id: Integer = 0
    trace_id: str = ""
    span_id: str = ""
    parent_id: str | None = None
    name: str
    status: SpanStatus = SpanStatus()
    attributes: dict[str, Any] = {}
    events: list[EventBody] = []
    links: list[LinkBody] = []
    start_time: float | None = None
    end_time: float | None = None
    context: SpanContext | None = None
    parent: SpanContext | None = None
    resource: SpanResource = SpanResource()


class WorkerBody(Struct, kw_only=True):
    """A worker in the 0.x shape, where a lost worker has status `unknown`; `lost` is our addition."""

    worker_id: str
    status: Literal["idle", "busy", "unknown"]
    lost: bool
    heartbeat_stats: dict[str, Any]
    last_heartbeat_time: float | None
    current_rollout_id: str | None
    current_attempt_id: str | None
    open_attempts: int
    lease_seconds: float | None
    last_error: dict[str, Any] | None


class UpdateWorkerRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    stats: dict[str, Any] | UnsetType = msgspec.field(default=UNSET, name="heartbeat_stats")
    lease_seconds: float | UnsetType | None = UNSET


class ResourcesBody(Struct, kw_only=True):
    resources_id: str
    version: int
    create_time: float
    update_time: float
    resources: Resources


class RolloutBody(Rollout, frozen=True, kw_only=True):
    """A rollout in a list. `attempt` is its latest attempt, left out if it has none."""

    attempt: Attempt | UnsetType = UNSET


class RecordBody(Struct, kw_only=True):
    rollout: Rollout
    attempts: list[Attempt] = []
    spans: list[SpanBody] = []


# -- conversion ------------------------------------------------------------------------------------------------------


_STARTED: Final = time.monotonic()
_SAME_IN_SPANS: Final = (
    *("rollout_id", "attempt_id", "sequence_id", "trace_id", "span_id", "parent_id"),
    *("name", "attributes", "start_time", "end_time"),
)
"""Fields that a span has in both shapes."""


def span_body(span: Span) -> SpanBody:
    same = {name: getattr(span, name) for name in _SAME_IN_SPANS}
    return SpanBody(
        **same,
        status=SpanStatus(cast("Any", span.status_code), span.status_message),
        events=[EventBody(event.name, event.attributes, event.timestamp) for event in span.events],
        links=[*map(_link_body, conventions.links_of(span.attributes))],
        context=_context(span.trace_id, span.span_id, span.attributes.get(conventions.TRACE_STATE)),
        parent=SpanContext(span.trace_id, span.parent_id) if span.parent_id else None,
        resource=SpanResource(span.resource),
    )


def span_of(body: SpanBody) -> Span:
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME_IN_SPANS}
    start = fields["start_time"] = time.time() if body.start_time is None else body.start_time
    if body.context is not None:
        fields["trace_id"] = body.trace_id or body.context.trace_id
        fields["span_id"] = body.span_id or body.context.span_id
    if body.parent is not None:
        fields["parent_id"] = body.parent_id or body.parent.span_id
    conventions.add_extra_fields(body.attributes, state=_state_of(body.context), links=[*map(_link_of, body.links)])
    events = [
        SpanEvent(event.name, start if event.timestamp is None else event.timestamp, event.attributes or {})
        for event in body.events
    ]
    return Span(
        **fields,
        status_code=body.status.status_code,
        status_message=body.status.description,
        events=tuple(events),
        resource=body.resource.attributes,
    )


def _link_of(body: LinkBody) -> dict[str, Any]:
    """A link as an attribute of its span holds it."""
    context, state = body.context, _state_of(body.context)
    found = {"trace_id": context.trace_id, "span_id": context.span_id, "attributes": body.attributes or {}}
    return found | {"trace_state": state} if state else found


def _link_body(link: Mapping[str, Any]) -> LinkBody:
    return LinkBody(_context(link["trace_id"], link["span_id"], link["trace_state"]), link["attributes"])


def _state_of(context: SpanContext | None) -> str:
    return ",".join(f"{key}={value}" for key, value in context.trace_state.items()) if context else ""


def _context(trace_id: str, span_id: str, state: Any) -> SpanContext:
    """state: as in the W3C header."""
    entries = dict(each.strip().split("=", 1) for each in str(state).split(",") if "=" in each)
    return SpanContext(trace_id, span_id, trace_state=entries)


def _complete(span: Span) -> Span:
    """The span with our attributes added where it uses other conventions, such as those of 0.x for rewards."""
    name = conventions.complete(span.name, span.attributes, span.events)
    return span if name == span.name else msgspec.structs.replace(span, name=name)


def statistics_body(counts: Mapping[str, int]) -> dict[str, int | float | str]:
    """The counts, with what 0.x clients expect: a name, the totals and the uptime of the server in seconds."""
    names = ("attempts", "spans", "resources", "workers")
    totals = {f"total_{name}": counts[name] for name in names if name in counts}
    rollouts = sum(number for name, number in counts.items() if name.startswith("rollouts."))
    uptime = time.monotonic() - _STARTED
    return {**counts, "total_rollouts": rollouts, **totals, "name": "LightningStore", "uptime": uptime}


def worker_body(worker: Worker) -> WorkerBody:
    fields = dataclasses.asdict(worker)
    fields["heartbeat_stats"] = fields.pop("stats")
    fields["status"] = "unknown" if worker.status == "lost" else worker.status
    return WorkerBody(lost=worker.status == "lost", **fields)


def resources_body(update: ResourcesUpdate) -> ResourcesBody:
    return ResourcesBody(
        resources_id=update.resources_id,
        version=update.version,
        create_time=update.create_time,
        update_time=update.create_time if update.update_time is None else update.update_time,
        resources=Resources(update.resources),
    )


def record_body(record: RolloutRecord) -> RecordBody:
    return RecordBody(rollout=record.rollout, attempts=list(record.attempts), spans=[*map(span_body, record.spans)])


BODIES: Final[dict[Any, Any]] = {
    dict[str, int]: dict[str, int | float | str],
    Span: SpanBody,
    Worker: WorkerBody,
    ResourcesUpdate: ResourcesBody,
    RolloutRecord: RecordBody,
}
"""Types of the contract that have another shape in the REST API."""
INPUTS: Final[dict[Any, Any]] = {NamedResources: Resources}
"""Types of arguments that are decoded as another shape, in the REST API and in batches."""
_TO_REST: Final[dict[Any, Callable[[Any], Any]]] = {
    dict: statistics_body,
    Span: span_body,
    Worker: worker_body,
    ResourcesUpdate: resources_body,
    RolloutRecord: record_body,
}
_FROM_WIRE: Final[dict[Any, Callable[[Any], Any]]] = {
    SpanBody: lambda body: _complete(span_of(body)),
    RecordBody: lambda body: RolloutRecord(body.rollout, tuple(body.attempts), tuple(map(span_of, body.spans))),
    Resources: dict,
}


def _convert(conversions: Mapping[Any, Callable[[Any], Any]], value: Any) -> Any:
    """Convert a value, or each item of a list, all of which have the same type."""
    if isinstance(value, list):
        items: list[Any] = value
        convert = conversions.get(type(items[0])) if items else None
        return items if convert is None else [convert(item) for item in items]
    convert = conversions.get(type(value))
    return value if convert is None else convert(value)


from_wire: Final = partial(_convert, _FROM_WIRE)
"""Converts a decoded argument to the type that the contract takes."""
to_rest: Final = partial(_convert, _TO_REST)
"""Converts a result of the contract to its shape in the REST API."""


def arguments_of(request: Struct) -> dict[str, Any]:
    """The arguments of a method in a decoded request, without those that were not given, as the contract takes them."""
    given = {name: getattr(request, name) for name in request.__struct_fields__}
    return {name: from_wire(value) for name, value in given.items() if value is not UNSET}


# -- decoding and encoding -------------------------------------------------------------------------------------------


def _encode_unknown(value: Any) -> Any:
    if isinstance(value, RolloutConfig):
        return _encode_config(cast("Hashable", value))
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


@lru_cache(maxsize=256)
def _encode_config(config: Hashable) -> Raw:
    return Raw(cast("RolloutConfig", config).model_dump_json().encode())


encode: Final = msgspec.json.Encoder(enc_hook=_encode_unknown).encode


def decode_unknown(kind: type, value: Any) -> Any:
    """msgspec's hook for types that it cannot decode itself."""
    if kind is RolloutConfig:
        return _decode_config(orjson.dumps(value))
    if kind is Resources:
        return Resources(check_resources(value, strict=True))
    raise NotImplementedError(f"{kind} cannot be read")


@lru_cache(maxsize=256)
def _decode_config(text: bytes) -> RolloutConfig:
    try:
        return RolloutConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError(f"this is not the configuration of a rollout: {error}") from None


def check_resources(value: Any, strict: bool = False) -> NamedResources:
    try:
        return named_resources.validate_python(value, strict=strict)
    except ValidationError as error:
        raise ConfigError(f"resources must be a dict of LLM and PromptTemplate by name: {error}") from None


def decoder(kind: Any) -> Callable[[bytes | Raw], Any]:
    """A function that decodes JSON of this type. It raises RequestError, which says what is wrong and where."""
    read = msgspec.json.Decoder(kind, dec_hook=decode_unknown).decode

    def decode(data: bytes | Raw) -> Any:
        try:
            return read(data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ConfigError) as error:
            raise decode_error(error, bytes(data)) from None

    return decode


# -- errors ---------------------------------------------------------------------------------------------------------


class RequestError(ConfigError):
    """An invalid request: malformed, of the wrong type, or too large."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


_STATUS: Final[tuple[tuple[type[AgentLightningError], int], ...]] = (
    (ConfigError, 400),
    (RewardError, 400),
    (NotFoundError, 404),
    (ConflictError, 409),
    (StoreFullError, 507),
    (StoreClosedError, 503),
    (StoreAuthError, 401),
    (StoreServerError, 502),
)
_TYPES: Final = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, AgentLightningError) and "__init__" not in vars(kind)
}


def status_of(error: AgentLightningError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


class ErrorBody(Struct):
    type: str
    message: str


class Refusal(Struct):
    """The response body of every request that fails."""

    error: ErrorBody
    detail: str
    """The message again, for 0.x clients."""


def error_response(error: AgentLightningError) -> Refusal:
    return Refusal(ErrorBody(type(error).__name__.lstrip("_"), str(error)), str(error))


def error_of(error: Exception) -> AgentLightningError:
    """The error to respond with, for any exception that a call has raised."""
    if isinstance(error, AgentLightningError):
        return error
    if isinstance(error, OverflowError | UnicodeError):
        return ConfigError(f"a value cannot be stored: {error}")
    logger.error("a call of the store failed", exc_info=error)
    return StoreError(f"the server failed: {type(error).__name__}; see its log")


def error_from(body: ErrorBody) -> AgentLightningError:
    """The exception for an error that a server responded with."""
    kind = _TYPES.get(body.type, ConfigError if body.type == RequestError.__name__ else StoreError)
    return kind(body.message)


_place = re.compile(r" - at `\$(.*)`$")
_step = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def decode_error(error: Exception, data: bytes) -> RequestError:
    """The error for a body that could not be decoded: it says where, and what is there."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ConfigError):
        return RequestError(str(error))
    if isinstance(error, RecursionError):
        return RequestError("the body is nested too deeply; send flatter values")
    if not isinstance(error, msgspec.ValidationError):
        return RequestError(f"the body is not JSON in UTF-8: {error}; NaN and Infinity are not JSON either")
    text = str(error)
    place = _place.search(text)
    path = place[1] if place else ""
    complaint = text[: place.start()] if place else text
    if "Number out of range" in complaint:
        return RequestError(f"a number in the body is out of range{path and f', in {path}'}; use finite numbers")
    shown = _describe_value(data, path)
    hint = "; times are seconds since the epoch (UTC), as a number" if "_time" in path or "timestamp" in path else ""
    return RequestError(f"{path.lstrip('.') or 'the body'}{shown}: {complaint[:1].lower()}{complaint[1:]}{hint}")


def _describe_value(data: bytes, path: str) -> str:
    """` is VALUE` for the value at `path`; "" if it cannot be found."""
    try:
        value = orjson.loads(data)
        for name, index in _step.findall(path):
            value = value[name] if name else value[int(index)]
        text = orjson.dumps(value).decode()
    except (ValueError, LookupError, TypeError):
        return ""
    return f" is {text if len(text) <= 80 else text[:77] + '...'}"
