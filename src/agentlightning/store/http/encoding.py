"""What travels between a store's server and its clients: the shapes, and how they are written and read.

The shapes are those of the contract's own types. Where the published 0.x API has another one (spans, workers,
resources), it is stated here once, with the way there and back. Bodies are read with msgspec: types are checked while
the JSON is read, and nothing of a body that does not fit is used.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, cast, get_type_hints

import msgspec
import orjson
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from pydantic import BaseModel, TypeAdapter, ValidationError

from agentlightning.errors import ConfigError
from agentlightning.resources import NamedResources, ResourcesUpdate, named_resources
from agentlightning.rollouts import Attempt, EnqueueRolloutRequest, Rollout, RolloutConfig
from agentlightning.span import LOGPROBS, Span, SpanEvent
from agentlightning.store.base import Retention, RolloutRecord, Worker
from agentlightning.store.http.errors import refusal
from agentlightning.store.sql.tables import mapping

BASE: Final = "/v1/agl"
PROTOCOL: Final = 1
"""Of `POST /v1/agl/calls`. A server and a client of different numbers do not understand each other."""
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""What databases hold."""


def version() -> str:
    """Of this installation."""
    return importlib.metadata.version("agentlightning")


# -- shapes of 0.x ---------------------------------------------------------------------------------------------------


class Resources(dict[str, Any]):
    """Named resources as a body: a dict of LLM and PromptTemplate by name."""


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
    """A span as 0.x has it. `trace_id`, `parent_id` and the times win over `context` and `parent`."""

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
    """A worker as 0.x has it; a lost one is `unknown` there, and `lost`."""

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


class ResourcesBody(Struct, kw_only=True):
    resources_id: str
    version: int
    create_time: float
    update_time: float
    resources: Resources


class RolloutBody(Rollout, frozen=True, kw_only=True):
    """A rollout as lists have it: `attempt` is its latest one, and absent where it has none."""

    attempt: Attempt | UnsetType = UNSET


class RecordBody(Struct, kw_only=True):
    rollout: Rollout
    attempts: list[Attempt] = []
    spans: list[SpanBody] = []


def _input(kind: Any, name: str) -> type[Struct]:
    """A dataclass as a body that refuses fields it does not know."""
    types = get_type_hints(kind)
    fields: list[Any] = []
    for field in dataclasses.fields(kind):
        given = () if field.default is dataclasses.MISSING else (field.default,)
        fields.append((field.name, Integer if types[field.name] is int else types[field.name], *given))
    return msgspec.defstruct(name, fields, module=kind.__module__, kw_only=True, forbid_unknown_fields=True)


EnqueueBody: Final = _input(EnqueueRolloutRequest, "EnqueueRolloutRequest")
RetentionBody: Final = _input(Retention, "Retention")


def span_body(span: Span) -> SpanBody:
    parent = SpanContext(trace_id=span.trace_id, span_id=span.parent_id) if span.parent_id else None
    return SpanBody(
        rollout_id=span.rollout_id,
        attempt_id=span.attempt_id,
        sequence_id=span.sequence_id,
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_id=span.parent_id,
        name=span.name,
        status=SpanStatus(cast("Any", span.status_code), span.status_message),
        attributes=span.attributes,
        events=[EventBody(event.name, event.attributes, event.timestamp) for event in span.events],
        start_time=span.start_time,
        end_time=span.end_time,
        context=SpanContext(trace_id=span.trace_id, span_id=span.span_id),
        parent=parent,
        resource=SpanResource(span.resource),
    )


def span_of(body: SpanBody) -> Span:
    start = time.time() if body.start_time is None else body.start_time
    context, parent = body.context, body.parent
    return Span(
        rollout_id=body.rollout_id,
        attempt_id=body.attempt_id,
        name=body.name,
        start_time=start,
        end_time=body.end_time,
        sequence_id=body.sequence_id,
        trace_id=body.trace_id or (context.trace_id if context else ""),
        span_id=body.span_id or (context.span_id if context else ""),
        parent_id=body.parent_id or (parent.span_id if parent else None),
        status_code=body.status.status_code,
        status_message=body.status.description,
        attributes=body.attributes,
        events=tuple(
            SpanEvent(event.name, start if event.timestamp is None else event.timestamp, event.attributes or {})
            for event in body.events
        ),
        resource=body.resource.attributes,
    )


def worker_body(worker: Worker) -> WorkerBody:
    return WorkerBody(
        worker_id=worker.worker_id,
        status="unknown" if worker.status == "lost" else worker.status,
        lost=worker.status == "lost",
        heartbeat_stats=worker.stats,
        last_heartbeat_time=worker.last_heartbeat_time,
        current_rollout_id=worker.current_rollout_id,
        current_attempt_id=worker.current_attempt_id,
        open_attempts=worker.open_attempts,
        lease_seconds=worker.lease_seconds,
        last_error=worker.last_error,
    )


def resources_body(update: ResourcesUpdate) -> ResourcesBody:
    return ResourcesBody(
        resources_id=update.resources_id,
        version=update.version,
        create_time=update.create_time,
        update_time=update.create_time if update.update_time is None else update.update_time,
        resources=Resources(update.resources),
    )


def record_body(record: RolloutRecord) -> RecordBody:
    return RecordBody(
        rollout=record.rollout, attempts=list(record.attempts), spans=[span_body(span) for span in record.spans]
    )


def record_of(body: RecordBody) -> RolloutRecord:
    return RolloutRecord(body.rollout, tuple(body.attempts), tuple(span_of(span) for span in body.spans))


BODIES: Final[dict[Any, tuple[Any, Callable[[Any], Any]]]] = {
    Span: (SpanBody, span_body),
    Worker: (WorkerBody, worker_body),
    ResourcesUpdate: (ResourcesBody, resources_body),
    RolloutRecord: (RecordBody, record_body),
}
"""Types of the contract whose shape in the REST API is another: that shape, and the way there."""
INPUTS: Final[dict[Any, Any]] = {
    NamedResources: Resources,
    EnqueueRolloutRequest: EnqueueBody,
    Retention: RetentionBody,
}
"""Types of arguments that are read as another shape, everywhere."""
_back: dict[Any, Callable[[Any], Any]] = {
    SpanBody: span_of,
    RecordBody: record_of,
    Resources: dict,
    EnqueueBody: lambda body: EnqueueRolloutRequest(**msgspec.structs.asdict(body)),
    RetentionBody: lambda body: Retention(**msgspec.structs.asdict(body)),
}


_STARTED: Final = time.monotonic()


def statistics_body(counts: Mapping[str, int]) -> dict[str, int | float | str]:
    """With what 0.x clients look for: a name, the totals, and for how many seconds the server's process has run."""
    names = ("attempts", "spans", "resources", "workers")
    totals = {f"total_{name}": counts[name] for name in names if name in counts}
    rollouts = sum(number for name, number in counts.items() if name.startswith("rollouts."))
    uptime = time.monotonic() - _STARTED
    return {**counts, "total_rollouts": rollouts, **totals, "name": "LightningStore", "uptime": uptime}


def rendered(value: Any) -> Any:
    """A result of the contract in the shape of the REST API."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [rendered(item) for item in items]
    shape = BODIES.get(type(value))
    return value if shape is None else shape[1](value)


def argument(value: Any) -> Any:
    """What was read from a body as an argument of the contract."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        back = _back.get(type(items[0])) if items else None
        return items if back is None else [back(item) for item in items]
    back = _back.get(type(value))
    return value if back is None else back(value)


# -- writing and reading ---------------------------------------------------------------------------------------------


def _write_hook(value: Any) -> Any:
    if isinstance(value, RolloutConfig):
        return _config_fields(cast("Hashable", value))
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


@lru_cache(maxsize=256)
def _config_fields(config: Hashable) -> Raw:
    return Raw(cast("RolloutConfig", config).model_dump_json().encode())


def read_hook(kind: type, value: Any) -> Any:
    """Types of ours that msgspec does not know."""
    if kind is RolloutConfig:
        return _config(orjson.dumps(value))
    if kind is Resources:
        try:
            return Resources(named_resources.validate_python(value, strict=True))
        except ValidationError as error:
            raise ConfigError(f"these resources are no dict of LLM and PromptTemplate by name: {error}") from None
    raise NotImplementedError(f"{kind} cannot be read")


@lru_cache(maxsize=256)
def _config(text: bytes) -> RolloutConfig:
    try:
        return RolloutConfig.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError(f"this is no configuration of a rollout: {error}") from None


_encoder = msgspec.json.Encoder(enc_hook=_write_hook)
encode: Final = _encoder.encode


def decoder(kind: Any) -> Callable[[bytes | Raw], Any]:
    """A function that reads JSON of this type, and raises RequestError where it does not fit."""
    read = msgspec.json.Decoder(kind, dec_hook=read_hook).decode

    def decode(data: bytes | Raw) -> Any:
        try:
            return read(data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ConfigError) as error:
            raise refusal(error, bytes(data)) from None

    return decode


def result_reader(kind: Any) -> Callable[[bytes | Raw], Any]:
    """Reads what `encode` made of a result of the contract."""
    if "ResourcesUpdate" in repr(kind):  # a union of pydantic models, which msgspec cannot read
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        return lambda data: adapter.validate_json(bytes(data))
    return msgspec.json.Decoder(kind, dec_hook=read_hook).decode


# -- arguments, as a client writes them ------------------------------------------------------------------------------

_ANY: Final = frozenset({"input", "metadata", "stats", "attributes", "resource", "last_error"})
"""Fields and arguments that hold JSON of any shape."""


def written(value: Any, name: str) -> Any:
    """An argument in a form that `encode` writes. Raises ConfigError, naming it, where JSON cannot hold it."""
    if name in _ANY:
        return None if value is None else Raw(mapping.dump(value, name).encode())
    if isinstance(value, Span):
        return span_fields(value, value.span_id)
    if isinstance(value, str | int | BaseModel) or value is None:
        return value
    if isinstance(value, float):
        return _finite(value, name)
    if isinstance(value, Mapping):
        return Raw(mapping.dump_resources(cast("Any", value)).encode())
    if isinstance(value, Sequence):
        return [written(item, name) for item in cast("Sequence[Any]", value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    raise ConfigError(f"{name} is {type(value).__name__}, which the store does not take")


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: written(getattr(value, field.name), field.name) for field in dataclasses.fields(value)}


def _finite(value: float, name: str) -> float:
    if not math.isfinite(value):
        raise ConfigError(f"{name} is {value}, which JSON cannot hold; use a finite number")
    return value


def span_fields(span: Span, span_id: str) -> dict[str, Any]:
    """A span as it is written, under this id, without what has its default: half of a small span."""
    fields: dict[str, Any] = {
        "rollout_id": span.rollout_id,
        "attempt_id": span.attempt_id,
        "name": span.name,
        "start_time": _finite(span.start_time, "start_time"),
        "span_id": span_id,
        "status_code": span.status_code,
    }
    if span.end_time is not None:
        fields["end_time"] = _finite(span.end_time, "end_time")
    if span.sequence_id:
        fields["sequence_id"] = span.sequence_id
    if span.trace_id:
        fields["trace_id"] = span.trace_id
    if span.parent_id is not None:
        fields["parent_id"] = span.parent_id
    if span.status_message is not None:
        fields["status_message"] = span.status_message
    if span.attributes:
        _check_logprobs(span.attributes.get(LOGPROBS))
        fields["attributes"] = Raw(mapping.dump(span.attributes, "span attributes").encode())
    if span.events:
        fields["events"] = [_fields(event) for event in span.events]
    if span.resource:
        fields["resource"] = Raw(mapping.dump(span.resource, "span resource").encode())
    return fields


def as_kept(sent: Span, span_id: str, told: int | Span) -> Span:
    """The span as the store keeps it: told in full only where that is not as it was sent."""
    if isinstance(told, Span):
        return told
    return Span(  # dataclasses.replace takes three times as long
        sent.rollout_id,
        sent.attempt_id,
        sent.name,
        sent.start_time,
        sent.end_time,
        told,
        sent.trace_id,
        span_id,
        sent.parent_id,
        sent.status_code,
        sent.status_message,
        sent.attributes,
        sent.events,
        sent.resource,
    )


def _check_logprobs(logprobs: Any) -> None:
    if isinstance(logprobs, list | tuple):
        for index, number in enumerate(cast("Sequence[Any]", logprobs)):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{LOGPROBS}[{index}] is {number}; a log-probability is a finite number")
