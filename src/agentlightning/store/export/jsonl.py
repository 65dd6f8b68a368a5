"""The contents of an export, and its form as lines of JSON, plain or gzipped.

    {"type": "header", "format": "agentlightning.export", "version": 1}
    {"type": "resources", "resources_id": "rs-...", "resources": {"main": {...}}}
    {"type": "rollout", "rollout_id": "ro-...", "input": ..., "attempts": [{...}], "spans": [{...}]}
    {"type": "end", "resources": 1, "rollouts": 1}

It holds the resources, the one published last at the end, and then the rollouts in order of creation, each with its
attempts and spans. It leaves out what belongs to the running store: workers, limits of queues, and the versions and
times of resources. A file without the last line is truncated. Several exports, concatenated, are one export.
"""

# Fields that have a default elsewhere are required in a file.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast

import msgspec
import orjson
from msgspec import Struct, structs
from pydantic import ValidationError

from agentlightning.errors import DatasetError
from agentlightning.resources import NamedResources, named_resources
from agentlightning.rollouts import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutStatus
from agentlightning.span import Span, SpanEvent
from agentlightning.store.types import RolloutRecord
from agentlightning.util.json_values import dumps

FORMAT: Final = "agentlightning.export"
VERSION: Final = 1
GZIP_LEVEL: Final = 5
HEADER_BYTES: Final = 4096
"""Maximum length of the first line: a file that is not an export may have no line ends."""
USUAL_BYTES: Final = 64 * 1024 * 1024
MAX_COMPRESSION: Final = 100
"""The text of agents is compressed to a tenth, very repetitive text to a hundredth; a decompression bomb to less."""

T = TypeVar("T", bound=Struct)


@dataclass(frozen=True, slots=True)
class ResourcesRecord:
    """One version of the resources."""

    resources_id: str
    resources: NamedResources


Item = ResourcesRecord | RolloutRecord


# -- writing -----------------------------------------------------------------------------------------------------------


class JsonlWriter:
    """Writes lines. Used from one thread at a time."""

    def __init__(self, path: Path, compress: bool) -> None:
        self._raw = path.open("wb")
        # Without a name and a time, equal stores give equal files.
        compressed = gzip.GzipFile("", "wb", GZIP_LEVEL, self._raw, mtime=0) if compress else self._raw
        self._file = cast("BinaryIO", compressed)
        self._counts = Counter[type[Item]]()
        self._file.write(header_line())

    def write(self, items: Sequence[Item]) -> int:
        """Returns their approximate size in bytes."""
        self._counts.update(map(type, items))
        return sum(self._file.write(item_line(item)) for item in items)

    def finish(self) -> None:
        """Write the end, without which a reader knows that the file is truncated, and close the file."""
        self._file.write(end_line(self._counts[ResourcesRecord], self._counts[RolloutRecord]))
        self.close()

    def close(self) -> None:
        """Close the file as it is. Idempotent."""
        self._file.close()
        self._raw.close()


def header_line() -> bytes:
    return _line("header", {"format": FORMAT, "version": VERSION})


def end_line(resources: int, rollouts: int) -> bytes:
    return _line("end", {"resources": resources, "rollouts": rollouts})


def item_line(item: Item) -> bytes:
    if isinstance(item, ResourcesRecord):
        return _line("resources", resources_fields(item))
    parts = {"attempts": list(map(fields_of, item.attempts)), "spans": list(map(fields_of, item.spans))}
    return _line("rollout", fields_of(item.rollout) | parts)


def _line(kind: str, fields: dict[str, Any]) -> bytes:
    return dumps({"type": kind, **fields}, option=orjson.OPT_APPEND_NEWLINE)


def resources_fields(item: ResourcesRecord) -> dict[str, Any]:
    resources = named_resources.dump_python(item.resources, mode="json")
    return {"resources_id": item.resources_id, "resources": resources}


def fields_of(value: Rollout | Attempt | Span) -> dict[str, Any]:
    """The fields of a rollout; of an attempt or a span, those but the id of its rollout."""
    fields = structs.asdict(value)
    if isinstance(value, Rollout):
        fields["config"] = value.config.model_dump(mode="json")
    else:
        del fields["rollout_id"]
    return fields


# -- reading -----------------------------------------------------------------------------------------------------------

# The types of lines, and of what they hold. Some fields are required there that have a default elsewhere.


class HeaderLine(Struct, tag_field="type", tag="header"):
    version: int


class ResourcesLine(Struct, tag_field="type", tag="resources", forbid_unknown_fields=True):
    resources_id: str
    resources: dict[str, Any]


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


class RolloutLine(Rollout, frozen=True, kw_only=True, tag_field="type", tag="rollout", forbid_unknown_fields=True):
    status: RolloutStatus
    config: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])  # pyright: ignore
    attempts: tuple[AttemptShape, ...] = ()
    spans: tuple[SpanShape, ...] = ()


class EndLine(Struct, tag_field="type", tag="end"):
    resources: int
    rollouts: int


_decode: Final = msgspec.json.Decoder[Any](HeaderLine | ResourcesLine | RolloutLine | EndLine).decode

_HEADER: Final = re.compile(rf'\s*{{(?=.*"type"\s*:\s*"header")(?=.*"format"\s*:\s*"{FORMAT}")'.encode())


def read_items(path: Path) -> Generator[tuple[Item, int]]:
    """The items of a file with their approximate size in bytes. Raises DatasetError, with the number of the line, if it
    is not a valid export; the items before it are valid."""
    number, ended = 0, False
    counts = Counter[type[Any]]()
    try:
        for number, line in enumerate(_lines(path), start=1):
            if number == 1 and not _HEADER.match(line):
                raise DatasetError(f"{path} is not an export of a store: its first line is no header of {FORMAT}")
            if line.isspace():
                continue
            found = _read_line(path, number, line)
            ended = isinstance(found, EndLine)
            if isinstance(found, HeaderLine):
                counts.clear()
            elif not isinstance(found, EndLine):
                counts[type(found)] += 1
                yield found, len(line)
            elif (found.resources, found.rollouts) != (counts[ResourcesRecord], counts[RolloutRecord]):
                raise DatasetError(
                    f"line {number} of {path}: {found.rollouts} rollouts were exported and {counts[RolloutRecord]} are"
                    " here; lines have been removed or added"
                )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _truncated(path, number + 1) from error
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from error
    if not ended:
        raise _truncated(path, number + 1)


def _truncated(path: Path, number: int) -> DatasetError:
    return DatasetError(f"{path} is truncated at line {number}: its end is missing")


def _lines(path: Path) -> Iterator[bytes]:
    """The lines, one at least, up to a maximum length: a few kilobytes of gzip may hold a line of gigabytes."""
    size = path.stat().st_size
    limit = max(USUAL_BYTES, MAX_COMPRESSION * size)
    with path.open("rb") as raw:
        compressed = raw.peek(2)[:2] == b"\x1f\x8b"
        lines = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if compressed else raw
        for number in count(1):
            line = lines.readline(HEADER_BYTES if number == 1 else limit)
            if len(line) == limit and not line.endswith(b"\n"):
                raise DatasetError(
                    f"{path}: line {number} has more than {limit:,} bytes, too many for a file of {size:,} bytes"
                )
            if not line and number > 1:
                return
            yield line


def _read_line(path: Path, number: int, line: bytes) -> Item | HeaderLine | EndLine:
    try:
        found = _decode(line)
        if isinstance(found, ResourcesLine):
            return ResourcesRecord(found.resources_id, named_resources.validate_python(found.resources))
        if isinstance(found, RolloutLine):
            return _record_of(found)
    except (msgspec.MsgspecError, ValidationError, UnicodeDecodeError) as error:
        if not line.endswith(b"\n"):
            raise _truncated(path, number) from error
        first = error.errors()[0] if isinstance(error, ValidationError) else {}
        told = f"{first['msg']} - at `{'.'.join(map(str, first['loc']))}`" if first else error
        raise DatasetError(f"line {number} of {path}: {told}") from error
    if isinstance(found, HeaderLine) and found.version != VERSION:
        raise DatasetError(
            f"{path} is an export of version {found.version}, and this release reads version {VERSION}; import it with"
            " the release that wrote it, or a later one"
        )
    return found


def _record_of(line: RolloutLine) -> RolloutRecord:
    rollout = _value(Rollout, line, config=RolloutConfig.model_validate(line.config))
    attempts = [_value(Attempt, each, rollout_id=line.rollout_id) for each in line.attempts]
    spans = [
        _value(Span, each, rollout_id=line.rollout_id, events=tuple(_value(SpanEvent, event) for event in each.events))
        for each in line.spans
    ]
    return RolloutRecord(rollout, tuple(attempts), tuple(spans))


def _value(kind: type[T], shape: Struct, **changes: Any) -> T:
    """The value of this kind that a shape stands for."""
    return kind(**{name: changes.get(name, getattr(shape, name)) for name in kind.__struct_fields__})
