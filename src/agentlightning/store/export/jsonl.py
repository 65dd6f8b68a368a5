"""Writes and reads exports as lines of JSON, plain or gzipped.

    {"type": "header", "format": "agentlightning.export", "version": 1}
    {"type": "resources", "resources_id": "rs-...", "resources": {"main": {...}}}
    {"type": "rollout", "rollout_id": "ro-...", "input": ..., "attempts": [{...}], "spans": [{...}]}
    {"type": "end", "resources": 1, "rollouts": 1}

A file without the last line is truncated. Several exports, concatenated, are one export.
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
from msgspec import Struct

from agentlightning.errors import DatasetError
from agentlightning.store.export.schema import (
    FORMAT,
    VERSION,
    InvalidShape,
    Item,
    ResourcesRecord,
    ResourcesShape,
    RolloutShape,
    decode_resources,
    decode_rollout,
    encode_item,
    explain,
    max_item_bytes,
    too_large,
)
from agentlightning.util.json_values import dumps

HEADER_BYTES: Final = 4096
"""Maximum length of the first line: a file that is not an export may have no line ends."""
GZIP_LEVEL: Final = 5


class HeaderLine(Struct, tag_field="type", tag="header"):
    format: str
    version: int


class EndLine(Struct, tag_field="type", tag="end"):
    resources: int
    rollouts: int


_decode: Final = msgspec.json.Decoder[Any](HeaderLine | ResourcesShape | RolloutShape | EndLine).decode


class JsonlWriter:
    """Writes lines; see `schema.Writer`."""

    def __init__(self, path: Path, compress: bool) -> None:
        raw = path.open("wb")
        # Without a name and a time, equal stores give equal files.
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
            return {"type": "resources", **encode_item(item)}
        self._rollouts += 1
        attempts = [encode_item(attempt) for attempt in item.attempts]
        spans = [encode_item(span) for span in item.spans]
        return {"type": "rollout", **encode_item(item.rollout), "attempts": attempts, "spans": spans}

    def _line(self, record: dict[str, Any]) -> int:
        return self._file.write(dumps(record, option=orjson.OPT_APPEND_NEWLINE))


class JsonlReader:
    """Reads lines. Raises DatasetError, with the number of the line, if the file is not a valid export."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._complete = False
        """Whether the last line so far was an end."""
        self._counts = [0, 0]

    def items(self) -> Generator[tuple[Item, int]]:
        """The items with their approximate size in bytes. Those before a DatasetError are valid."""
        number = 0
        try:
            for number, line in enumerate(self._lines(), start=1):
                item = self._item(line, number)
                if item is not None:
                    yield item, len(line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._truncated(number + 1) from error
        except OSError as error:
            raise DatasetError(f"{self._path} cannot be read: {error.strerror}") from error
        if not self._complete:
            raise self._truncated(number + 1)

    def _lines(self) -> Iterator[bytes]:
        with self._path.open("rb") as raw:
            compressed = raw.peek(2)[:2] == b"\x1f\x8b"
            lines: BinaryIO = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if compressed else raw
            first = lines.readline(HEADER_BYTES)
            self._check_header(first)
            yield first
            yield from self._limited(lines)

    def _limited(self, lines: BinaryIO) -> Iterator[bytes]:
        """The lines, up to a maximum length: a few kilobytes of gzip may hold a line of gigabytes."""
        limit = max_item_bytes(self._path)
        for number in count(2):
            line = lines.readline(limit)
            if not line:
                return
            if len(line) == limit and not line.endswith(b"\n"):
                raise DatasetError(too_large(self._path, f"line {number}", limit))
            yield line

    def _check_header(self, line: bytes) -> None:
        try:
            header = _decode(line)
        except InvalidShape:
            header = None
        if not isinstance(header, HeaderLine) or header.format != FORMAT:
            raise DatasetError(
                f"{self._path} is not an export of a store: its first line is not "
                f'{{"type": "header", "format": "{FORMAT}", ...}}'
            )

    def _item(self, line: bytes, number: int) -> Item | None:
        if line.isspace():
            return None
        self._complete = False
        try:
            return self._decode_line(_decode(line), number)
        except InvalidShape as error:
            if not line.endswith(b"\n"):
                raise self._truncated(number) from error
            raise DatasetError(f"line {number} of {self._path}: {explain(error)}") from error

    def _decode_line(self, line: Any, number: int) -> Item | None:
        if isinstance(line, ResourcesShape):
            self._counts[0] += 1
            return decode_resources(line)
        if isinstance(line, RolloutShape):
            self._counts[1] += 1
            return decode_rollout(line)
        if isinstance(line, HeaderLine):
            self._check_version(line)
            self._counts = [0, 0]
        elif isinstance(line, EndLine):
            self._complete = True
            if self._counts != [line.resources, line.rollouts]:
                raise DatasetError(
                    f"line {number} of {self._path}: {line.rollouts} rollouts were exported and "
                    f"{self._counts[1]} are here; lines have been removed or added"
                )
        return None

    def _check_version(self, header: HeaderLine) -> None:
        if header.version != VERSION:
            raise DatasetError(
                f"{self._path} is an export of version {header.version}, and this release reads version "
                f"{VERSION}; import it with the release that wrote it, or a later one"
            )

    def _truncated(self, number: int) -> DatasetError:
        return DatasetError(f"{self._path} is truncated at line {number}: its end is missing")
