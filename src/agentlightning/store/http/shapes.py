"""The JSON shapes of the REST API, and their conversion to and from the types of the store contract.

Most shapes are those types themselves. Where the published 0.x API has another shape (spans, workers, resources), it
is defined here once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, cast, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from agentlightning.resources import NamedResources, ResourcesUpdate
from agentlightning.rollouts import Attempt, EnqueueRolloutRequest, Rollout
from agentlightning.span import Span, SpanEvent
from agentlightning.store.types import Retention, RolloutRecord, Worker

Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that the database can hold."""


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


def _body_type(kind: Any, name: str) -> type[Struct]:
    """A msgspec type for a dataclass; it rejects unknown fields."""
    types = get_type_hints(kind)
    fields: list[Any] = []
    for field in dataclasses.fields(kind):
        given = () if field.default is dataclasses.MISSING else (field.default,)
        fields.append((field.name, Integer if types[field.name] is int else types[field.name], *given))
    return msgspec.defstruct(name, fields, module=kind.__module__, kw_only=True, forbid_unknown_fields=True)


EnqueueBody: Final = _body_type(EnqueueRolloutRequest, "EnqueueRolloutRequest")
RetentionBody: Final = _body_type(Retention, "Retention")


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
    fields = {field.name: getattr(worker, field.name) for field in dataclasses.fields(worker)}
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
"""Types of the contract that have another shape in the REST API: the shape and the function that makes it."""
INPUTS: Final[dict[Any, Any]] = {
    NamedResources: Resources,
    EnqueueRolloutRequest: EnqueueBody,
    Retention: RetentionBody,
}
"""Types of arguments that are decoded as another shape, in the REST API and in batches."""
_FROM_WIRE: Final[dict[Any, Callable[[Any], Any]]] = {
    SpanBody: span_of,
    RecordBody: record_of,
    Resources: dict,
    EnqueueBody: lambda body: EnqueueRolloutRequest(**msgspec.structs.asdict(body)),
    RetentionBody: lambda body: Retention(**msgspec.structs.asdict(body)),
}


_STARTED: Final = time.monotonic()


def statistics_body(counts: Mapping[str, int]) -> dict[str, int | float | str]:
    """The counts, with what 0.x clients expect: a name, the totals and the uptime of the server in seconds."""
    names = ("attempts", "spans", "resources", "workers")
    totals = {f"total_{name}": counts[name] for name in names if name in counts}
    rollouts = sum(number for name, number in counts.items() if name.startswith("rollouts."))
    uptime = time.monotonic() - _STARTED
    return {**counts, "total_rollouts": rollouts, **totals, "name": "LightningStore", "uptime": uptime}


def to_rest(value: Any) -> Any:
    """Convert a result of the contract to its shape in the REST API."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [to_rest(item) for item in items]
    shape = BODIES.get(type(value))
    return value if shape is None else shape[1](value)


def from_wire(value: Any) -> Any:
    """Convert a decoded argument to the type that the contract takes."""
    if isinstance(value, list):
        items = cast("list[Any]", value)
        convert = _FROM_WIRE.get(type(items[0])) if items else None
        return items if convert is None else [convert(item) for item in items]
    convert = _FROM_WIRE.get(type(value))
    return value if convert is None else convert(value)
