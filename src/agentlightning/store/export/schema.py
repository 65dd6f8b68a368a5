"""The contents of an export, independent of the file format, and the interface of a format.

An export holds the resources, the one published last at the end, and then the rollouts in order of creation, each with
its attempts and spans. It leaves out what belongs to the running store: workers, limits of queues, and the versions and
times of resources. An import publishes the resources again, in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, get_type_hints

import msgspec
from msgspec import Struct, structs
from pydantic import ValidationError

from agentlightning.resources import NamedResources, named_resources
from agentlightning.rollouts import Attempt, Rollout, RolloutConfig
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


# -- shapes: the types of rollouts, attempts and spans in a file -------------------------------------------------------


def _shape(kind: type[Struct], required: Sequence[str] = (), types: Mapping[str, Any] | None = None, **tag: Any) -> Any:
    """The fields of a type, in order, without the id of the rollout; unknown fields are rejected."""
    hints = {**get_type_hints(kind), **(types or {})}
    fields: list[Any] = []
    for item in structs.fields(kind):
        if item.name == "rollout_id" and not tag:
            continue
        if item.required or item.name in required:
            fields.append((item.name, hints[item.name]))
        elif item.default_factory is not msgspec.NODEFAULT:
            fields.append((item.name, hints[item.name], msgspec.field(default_factory=item.default_factory)))
        else:
            fields.append((item.name, hints[item.name], item.default))
    if tag:
        fields += [(name, hints[name], msgspec.field(default_factory=list)) for name in ("attempts", "spans")]
    return msgspec.defstruct(f"{kind.__name__}Shape", fields, kw_only=True, forbid_unknown_fields=True, **tag)


EventShape: Final = _shape(SpanEvent)
AttemptShape: Final = _shape(Attempt, required=["status"])
SpanShape: Final = _shape(Span, required=["span_id", "sequence_id"], types={"events": list[EventShape]})
RolloutShape: Final = _shape(
    Rollout,
    required=["status"],
    types={"config": dict[str, Any], "attempts": list[AttemptShape], "spans": list[SpanShape]},
    tag_field="type",
    tag="rollout",
)


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


def decode_rollout(shape: Any) -> RolloutRecord:
    fields: dict[str, Any] = structs.asdict(shape) | {"config": RolloutConfig.model_validate(shape.config)}
    del fields["attempts"], fields["spans"]
    return RolloutRecord(
        Rollout(**fields),
        tuple([Attempt(shape.rollout_id, *structs.astuple(attempt)) for attempt in shape.attempts]),
        tuple([_decode_span(shape.rollout_id, span) for span in shape.spans]),
    )


def _decode_span(rollout_id: str, shape: Any) -> Span:
    shape.events = tuple([SpanEvent(*structs.astuple(event)) for event in shape.events])
    return Span(rollout_id, *structs.astuple(shape))


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
