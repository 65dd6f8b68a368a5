"""What an export holds, whatever its format: the shapes, how they become what the contract speaks of, and the
interface of a format.

An export holds the resources, the one published last at the end, and then the rollouts in order of creation, each with
its attempts and spans. It leaves out what belongs to the running store: workers, limits of queues, the version numbers
and times of resources. An import publishes the resources anew, in that order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast

import msgspec
from msgspec import Struct
from pydantic import ValidationError

from agentlightning.resources import NamedResources, named_resources
from agentlightning.rollouts import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutMode, RolloutStatus
from agentlightning.span import Span, SpanEvent
from agentlightning.store.types import RolloutRecord

FORMAT: Final = "agentlightning.export"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export_store` has written."""

    resources: int
    rollouts: int
    spans: int
    bytes: int
    """Size of the file."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What `import_store` has found in a file."""

    resources: int
    rollouts: int
    """New ones."""
    known: int
    """Rollouts that the store had already; they were left as they are."""


@dataclass(frozen=True, slots=True)
class ResourcesRecord:
    """One version of the resources, as it is exported."""

    resources_id: str
    resources: NamedResources


Item = ResourcesRecord | RolloutRecord


class Writer(Protocol):
    """Writes an export. Called from any one thread at a time."""

    def write(self, items: Sequence[Item]) -> int:
        """Returns how large they are, in bytes, about."""
        ...

    def finish(self) -> None:
        """Write the end, without which the file is known to be cut off, and close it."""
        ...

    def abandon(self) -> None:
        """Close the file as it is."""
        ...


class Reader(Protocol):
    """Reads an export. Raises DatasetError where it is none; it names the file and the line or row."""

    def items(self) -> Generator[tuple[Item, int]]:
        """Each with its size in bytes, about. A DatasetError raised on the way leaves what came before valid."""
        ...


# -- shapes ----------------------------------------------------------------------------------------------------------


class EventShape(Struct, forbid_unknown_fields=True):
    name: str
    timestamp: float
    attributes: dict[str, Any] = {}


class SpanShape(Struct, forbid_unknown_fields=True):
    attempt_id: str
    span_id: str
    sequence_id: int
    name: str
    start_time: float
    end_time: float | None = None
    trace_id: str = ""
    parent_id: str | None = None
    status_code: str = "UNSET"
    status_message: str | None = None
    attributes: dict[str, Any] = {}
    events: list[EventShape] = []
    resource: dict[str, Any] = {}


class AttemptShape(Struct, forbid_unknown_fields=True):
    attempt_id: str
    sequence_id: int
    start_time: float
    status: AttemptStatus
    end_time: float | None = None
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: dict[str, Any] = {}


class HeaderLine(Struct, tag_field="type", tag="header"):
    format: str
    version: int


class ResourcesLine(Struct, tag_field="type", tag="resources", forbid_unknown_fields=True):
    resources_id: str
    resources: dict[str, Any]


class RolloutLine(Struct, tag_field="type", tag="rollout", forbid_unknown_fields=True):
    rollout_id: str
    input: Any
    start_time: float
    status: RolloutStatus
    mode: RolloutMode | None = None
    resources_id: str | None = None
    end_time: float | None = None
    config: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    queue: str = "default"
    priority: int = 0
    attempts: list[AttemptShape] = []
    spans: list[SpanShape] = []


class EndLine(Struct, tag_field="type", tag="end"):
    resources: int
    rollouts: int


Line = HeaderLine | ResourcesLine | RolloutLine | EndLine
BadShape = (msgspec.MsgspecError, ValidationError, UnicodeDecodeError)
"""What reading one of these raises."""

# -- there and back --------------------------------------------------------------------------------------------------


def rollout_shape(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "input": rollout.input,
        "start_time": rollout.start_time,
        "status": rollout.status,
        "mode": rollout.mode,
        "resources_id": rollout.resources_id,
        "end_time": rollout.end_time,
        "config": rollout.config.model_dump(mode="json"),
        "metadata": rollout.metadata,
        "queue": rollout.queue,
        "priority": rollout.priority,
    }


def attempt_shape(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt_id": attempt.attempt_id,
        "sequence_id": attempt.sequence_id,
        "start_time": attempt.start_time,
        "status": attempt.status,
        "end_time": attempt.end_time,
        "worker_id": attempt.worker_id,
        "last_heartbeat_time": attempt.last_heartbeat_time,
        "metadata": attempt.metadata,
    }


def span_shape(span: Span) -> dict[str, Any]:
    return {
        "attempt_id": span.attempt_id,
        "span_id": span.span_id,
        "sequence_id": span.sequence_id,
        "name": span.name,
        "start_time": span.start_time,
        "end_time": span.end_time,
        "trace_id": span.trace_id,
        "parent_id": span.parent_id,
        "status_code": span.status_code,
        "status_message": span.status_message,
        "attributes": span.attributes,
        "events": span.events,
        "resource": span.resource,
    }


def resources_shape(record: ResourcesRecord) -> dict[str, Any]:
    dumped = cast("dict[str, Any]", named_resources.dump_python(record.resources, mode="json"))
    return {"resources_id": record.resources_id, "resources": dumped}


def to_resources(line: ResourcesLine) -> ResourcesRecord:
    return ResourcesRecord(line.resources_id, named_resources.validate_python(line.resources))


def to_record(line: RolloutLine) -> RolloutRecord:
    rollout = Rollout(
        rollout_id=line.rollout_id,
        input=line.input,
        start_time=line.start_time,
        status=line.status,
        mode=line.mode,
        resources_id=line.resources_id,
        end_time=line.end_time,
        config=RolloutConfig.model_validate(line.config),
        metadata=line.metadata,
        queue=line.queue,
        priority=line.priority,
    )
    return RolloutRecord(
        rollout,
        tuple([_to_attempt(line.rollout_id, attempt) for attempt in line.attempts]),
        tuple([_to_span(line.rollout_id, span) for span in line.spans]),
    )


def _to_attempt(rollout_id: str, shape: AttemptShape) -> Attempt:
    return Attempt(
        rollout_id=rollout_id,
        attempt_id=shape.attempt_id,
        sequence_id=shape.sequence_id,
        start_time=shape.start_time,
        status=shape.status,
        end_time=shape.end_time,
        worker_id=shape.worker_id,
        last_heartbeat_time=shape.last_heartbeat_time,
        metadata=shape.metadata,
    )


def _to_span(rollout_id: str, shape: SpanShape) -> Span:
    return Span(
        rollout_id=rollout_id,
        attempt_id=shape.attempt_id,
        name=shape.name,
        start_time=shape.start_time,
        end_time=shape.end_time,
        sequence_id=shape.sequence_id,
        trace_id=shape.trace_id,
        span_id=shape.span_id,
        parent_id=shape.parent_id,
        status_code=shape.status_code,
        status_message=shape.status_message,
        attributes=shape.attributes,
        events=tuple([SpanEvent(event.name, event.timestamp, event.attributes) for event in shape.events]),
        resource=shape.resource,
    )


def explain(error: Exception) -> str:
    """The first line of what is wrong with a shape."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{first['msg']} - at `{'.'.join(map(str, first['loc']))}`"
    return str(error)


Kind = Literal["resources", "rollout", "attempt", "span"]


# -- how large a record may be -----------------------------------------------------------------------------------------

_USUAL_BYTES: Final = 64 * 1024 * 1024
_MOST_COMPRESSED: Final = 100
"""Text of agents becomes a tenth, where much of it repeats a hundredth; what is made to fill memory, a thousandth."""


def largest_item(path: Path) -> int:
    """Bytes that one record of this file may have, inflated."""
    return max(_USUAL_BYTES, _MOST_COMPRESSED * path.stat().st_size)


def too_large(path: Path, what: str, limit: int) -> str:
    """Why a record is refused."""
    return f"{path}: {what} has more than {limit:,} bytes, too many for a file of {path.stat().st_size:,} bytes"
