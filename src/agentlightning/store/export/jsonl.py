"""An export as lines of JSON, plain or gzipped.

    {"type": "header", "format": "agentlightning.export", "version": 1}
    {"type": "resources", "resources_id": "rs-...", "resources": {"main": {...}}}
    {"type": "rollout", "rollout_id": "ro-...", "input": ..., "attempts": [{...}], "spans": [{...}]}
    {"type": "end", "resources": 1, "rollouts": 1}

The last line tells a whole file from one that was cut off. Exports put after one another are one export.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Generator, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import msgspec
import orjson

from agentlightning.errors import DatasetError
from agentlightning.store.export.schema import (
    FORMAT,
    VERSION,
    BadShape,
    EndLine,
    HeaderLine,
    Item,
    Line,
    ResourcesLine,
    ResourcesRecord,
    RolloutLine,
    attempt_shape,
    explain,
    largest_item,
    resources_shape,
    rollout_shape,
    span_shape,
    to_record,
    to_resources,
    too_large,
)

HEADER_BYTES: Final = 4096
"""The first line is shorter; what is longer is no export, and perhaps endless."""
GZIP_LEVEL: Final = 5
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class JsonlWriter:
    """Writes lines; see `base.Writer`."""

    def __init__(self, path: Path, compress: bool) -> None:
        raw = path.open("wb")
        # Without a name and a time in it, the same store gives the same file.
        self._file: BinaryIO = cast("BinaryIO", gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0)) if compress else raw
        self._raw = raw
        self._resources = self._rollouts = 0
        self._line({"type": "header", "format": FORMAT, "version": VERSION})

    def write(self, items: Sequence[Item]) -> int:
        return sum(self._line(self._record(item)) for item in items)

    def finish(self) -> None:
        self._line({"type": "end", "resources": self._resources, "rollouts": self._rollouts})
        self.abandon()

    def abandon(self) -> None:
        self._file.close()
        self._raw.close()

    def _record(self, item: Item) -> dict[str, Any]:
        if isinstance(item, ResourcesRecord):
            self._resources += 1
            return {"type": "resources", **resources_shape(item)}
        self._rollouts += 1
        attempts = [attempt_shape(attempt) for attempt in item.attempts]
        spans = [span_shape(span) for span in item.spans]
        return {"type": "rollout", **rollout_shape(item.rollout), "attempts": attempts, "spans": spans}

    def _line(self, record: dict[str, Any]) -> int:
        return self._file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))


class JsonlReader:
    """Reads lines; see `base.Reader`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._whole = False
        """The last line so far was an end."""
        self._counts = [0, 0]

    def items(self) -> Generator[tuple[Item, int]]:
        number = 0
        try:
            for number, line in enumerate(self._lines(), start=1):
                item = self._item(line, number)
                if item is not None:
                    yield item, len(line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._cut(number + 1) from error
        except OSError as error:
            raise DatasetError(f"{self._path} cannot be read: {error.strerror}") from error
        if not self._whole:
            raise self._cut(number + 1)

    def _lines(self) -> Iterator[bytes]:
        with self._path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            lines: BinaryIO = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if packed else raw
            first = lines.readline(HEADER_BYTES)
            self._check_header(first)
            yield first
            yield from self._bounded(lines)

    def _bounded(self, lines: BinaryIO) -> Iterator[bytes]:
        """A few kilobytes of gzip may be one line of gigabytes."""
        limit = largest_item(self._path)
        for number in count(2):
            line = lines.readline(limit)
            if not line:
                return
            if len(line) == limit and not line.endswith(b"\n"):
                raise DatasetError(too_large(self._path, f"line {number}", limit))
            yield line

    def _check_header(self, line: bytes) -> None:
        try:
            header = _decoder.decode(line)
        except BadShape:
            header = None
        if not isinstance(header, HeaderLine) or header.format != FORMAT:
            raise DatasetError(
                f"{self._path} is no export of a store: its first line is not "
                f'{{"type": "header", "format": "{FORMAT}", ...}}'
            )

    def _item(self, line: bytes, number: int) -> Item | None:
        if line.isspace():
            return None
        self._whole = False
        try:
            return self._take(_decoder.decode(line), number)
        except BadShape as error:
            if not line.endswith(b"\n"):
                raise self._cut(number) from error
            raise DatasetError(f"line {number} of {self._path}: {explain(error)}") from error

    def _take(self, line: Line, number: int) -> Item | None:
        match line:
            case ResourcesLine():
                self._counts[0] += 1
                return to_resources(line)
            case RolloutLine():
                self._counts[1] += 1
                return to_record(line)
            case HeaderLine():
                self._check_version(line)
                self._counts = [0, 0]
            case EndLine():
                self._whole = True
                if self._counts != [line.resources, line.rollouts]:
                    raise DatasetError(
                        f"line {number} of {self._path}: {line.rollouts} rollouts were exported and "
                        f"{self._counts[1]} are here; lines have been removed or added"
                    )
        return None

    def _check_version(self, header: HeaderLine) -> None:
        if header.version != VERSION:
            raise DatasetError(
                f"{self._path} is an export of version {header.version}, and this is Agent Lightning for version "
                f"{VERSION}; import it with the release that wrote it, or a later one"
            )

    def _cut(self, number: int) -> DatasetError:
        return DatasetError(f"{self._path} is cut off at line {number}: its end is missing")
