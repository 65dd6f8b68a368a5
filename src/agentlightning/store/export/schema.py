"""The contents of an export, independent of the file format, and the interface of a format.

An export holds the resources, the one published last at the end, and then the rollouts in order of creation, each with
its attempts and spans. It leaves out what belongs to the running store: workers, limits of queues, and the versions and
times of resources. An import publishes the resources again, in that order.
"""

# Fields that have a default elsewhere are required in a file.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct, structs
from pydantic import ValidationError

from agentlightning.resources import NamedResources, named_resources
from agentlightning.rollouts import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutStatus
from agentlightning.span import Span, SpanEvent
from agentlightning.store.types import RolloutRecord

FORMAT: Final = "agentlightning.export"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of `export_store`."""

    resources: int
    rollouts: int
    spans: int
    bytes: int
    """Size of the file."""
    keys_left_out: int = 0
    """Resources whose API key was left out: files are passed on."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of `import_store`."""

    resources: int
    rollouts: int
    """New rollouts."""
    known: int
    """Rollouts that the store already had; they are unchanged."""


@dataclass(frozen=True, slots=True)
class ResourcesRecord:
    """One version of the resources."""

    resources_id: str
    resources: NamedResources


Item = ResourcesRecord | RolloutRecord


class Writer(Protocol):
    """Writes an export. Called from one thread at a time."""

    def write(self, items: Sequence[Item]) -> int:
        """Returns their approximate size in bytes."""
        ...

    def finish(self) -> None:
        """Write the end, without which a reader knows that the file is truncated, and close the file."""
        ...

    def abandon(self) -> None:
        """Close the file as it is."""
        ...


# -- shapes ------------------------------------------------------------------------------------------------------------

# The types of rollouts, attempts and spans in a file. Some fields are required there that have a default here; attempts
# and spans leave out the id of their rollout.


class EventShape(SpanEvent, frozen=True, forbid_unknown_fields=True):
    pass


class AttemptShape(Attempt, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rollout_id: str = ""
    status: AttemptStatus


class SpanShape(Span, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rollout_id: str = ""
    span_id: str
    sequence_id: int
    events: tuple[EventShape, ...] = ()


class RolloutShape(Rollout, frozen=True, kw_only=True, tag_field="type", tag="rollout", forbid_unknown_fields=True):
    status: RolloutStatus
    config: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])  # pyright: ignore
    attempts: tuple[AttemptShape, ...] = ()
    spans: tuple[SpanShape, ...] = ()


class ResourcesShape(Struct, tag_field="type", tag="resources", forbid_unknown_fields=True):
    resources_id: str
    resources: dict[str, Any]


InvalidShape = (msgspec.MsgspecError, ValidationError, UnicodeDecodeError)
"""The errors of decoding a shape."""


def encode_item(value: Rollout | Attempt | Span | ResourcesRecord) -> dict[str, Any]:
    """The fields of a value in a file."""
    if isinstance(value, ResourcesRecord):
        resources = named_resources.dump_python(value.resources, mode="json")
        return {"resources_id": value.resources_id, "resources": resources}
    fields = structs.asdict(value)
    if isinstance(value, Rollout):
        fields["config"] = value.config.model_dump(mode="json")
    else:
        del fields["rollout_id"]
    return fields


def decode_resources(shape: ResourcesShape) -> ResourcesRecord:
    return ResourcesRecord(shape.resources_id, named_resources.validate_python(shape.resources))


def decode_rollout(shape: RolloutShape) -> RolloutRecord:
    owner: dict[str, Any] = {"rollout_id": shape.rollout_id}
    fields: dict[str, Any] = {**structs.asdict(shape), "config": RolloutConfig.model_validate(shape.config)}
    del fields["attempts"], fields["spans"]
    attempts = [Attempt(**{**structs.asdict(each), **owner}) for each in shape.attempts]
    spans = [_decode_span(owner, span) for span in shape.spans]
    return RolloutRecord(Rollout(**fields), tuple(attempts), tuple(spans))


def _decode_span(owner: dict[str, Any], shape: SpanShape) -> Span:
    fields: dict[str, Any] = {**structs.asdict(shape), **owner}
    fields["events"] = tuple([SpanEvent(*structs.astuple(event)) for event in shape.events])
    return Span(**fields)


def explain(error: Exception) -> str:
    """The first line of an error of InvalidShape."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{first['msg']} - at `{'.'.join(map(str, first['loc']))}`"
    return str(error)


# -- the size of records -----------------------------------------------------------------------------------------------

_USUAL_BYTES: Final = 64 * 1024 * 1024
_MAX_COMPRESSION: Final = 100
"""The text of agents is compressed to a tenth, very repetitive text to a hundredth; a decompression bomb to less."""


def max_item_bytes(path: Path) -> int:
    """The maximum size of one record of this file, decompressed."""
    return max(_USUAL_BYTES, _MAX_COMPRESSION * path.stat().st_size)


def too_large(path: Path, what: str, limit: int) -> str:
    """The message for a record that is too large."""
    return f"{path}: {what} has more than {limit:,} bytes, too many for a file of {path.stat().st_size:,} bytes"
