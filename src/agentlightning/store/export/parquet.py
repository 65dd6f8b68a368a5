"""Writes and reads exports as Parquet tables, for DuckDB, pandas and other programs.

The `type` of a row is `resources`, `rollout`, `attempt` or `span`; a rollout is followed by its attempts and spans.
Columns that a type does not have are null. Arbitrary JSON values (`input`, `metadata`, `attributes`, `config`,
`events`, `resource`) are JSON text; token ids and log-probabilities are lists of int32 and float32. Times are seconds
since 1970.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import orjson

from agentlightning.errors import DatasetError, MissingExtraError
from agentlightning.span import LOGPROBS, PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, Span
from agentlightning.store.export.schema import (
    FORMAT,
    VERSION,
    AttemptShape,
    InvalidShape,
    Item,
    Kind,
    ResourcesRecord,
    ResourcesShape,
    RolloutShape,
    SpanShape,
    decode_resources,
    decode_rollout,
    encode_item,
    explain,
    max_item_bytes,
    too_large,
)
from agentlightning.store.sql.spans import token_blocks
from agentlightning.store.types import RolloutRecord

try:
    import pyarrow
    import pyarrow.parquet
except ImportError as error:
    raise MissingExtraError("pyarrow", "parquet") from error

GROUP_BYTES: Final = 8 << 20
"""Approximate size of a row group, which is held in memory until it is written."""
BATCH_ROWS: Final = 512
JSON_COLUMNS: Final = frozenset({"input", "config", "metadata", "resources", "attributes", "events", "resource"})
LISTS: Final = {
    "prompt_token_ids": PROMPT_TOKEN_IDS,
    "response_token_ids": RESPONSE_TOKEN_IDS,
    "logprobs": LOGPROBS,
}
"""Columns that hold attributes of spans."""

_text, _names = pyarrow.string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
SCHEMA: Final = pyarrow.schema(
    {
        "type": _names,
        "rollout_id": _text,
        "attempt_id": _text,
        "span_id": _text,
        "sequence_id": pyarrow.int64(),
        "name": _names,
        "status": _names,
        "start_time": pyarrow.float64(),
        "end_time": pyarrow.float64(),
        "mode": _names,
        "queue": _names,
        "priority": pyarrow.int64(),
        "resources_id": _text,
        "worker_id": _text,
        "last_heartbeat_time": pyarrow.float64(),
        "trace_id": _text,
        "parent_id": _text,
        "status_code": _names,
        "status_message": _text,
        "prompt_token_ids": pyarrow.list_(pyarrow.int32()),
        "response_token_ids": pyarrow.list_(pyarrow.int32()),
        "logprobs": pyarrow.list_(pyarrow.float32()),
        **dict.fromkeys(sorted(JSON_COLUMNS), _text),
    },
    metadata={FORMAT: str(VERSION)},
)


# -- writing ---------------------------------------------------------------------------------------------------------


class ParquetWriter:
    """Writes rows; see `schema.Writer`."""

    def __init__(self, path: Path) -> None:
        self._file = pyarrow.parquet.ParquetWriter(path, SCHEMA, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._size = 0

    def write(self, items: Sequence[Item]) -> int:
        total = 0
        for item in items:
            for row in _rows(item):
                size = _size(row)
                self._rows.append(row)
                self._size += size
                total += size
                if self._size >= GROUP_BYTES:
                    self._flush()
        return total

    def finish(self) -> None:
        self._flush()
        self.abandon()

    def abandon(self) -> None:
        self._file.close()

    def _flush(self) -> None:
        if self._rows:
            self._file.write_table(pyarrow.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows, self._size = [], 0


def _rows(item: Item) -> Iterator[dict[str, Any]]:
    if isinstance(item, ResourcesRecord):
        yield _row("resources", encode_item(item))
        return
    rollout_id = item.rollout.rollout_id
    yield _row("rollout", encode_item(item.rollout))
    for attempt in item.attempts:
        yield _row("attempt", {"rollout_id": rollout_id, **encode_item(attempt)})
    for span in item.spans:
        yield _row("span", {"rollout_id": rollout_id, **_span_columns(span)})


def _row(kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
    columns = {name: _json(value) if name in JSON_COLUMNS else value for name, value in fields.items()}
    return {"type": kind, **columns}


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _span_columns(span: Span) -> dict[str, Any]:
    """The fields of a span, with token attributes in their own columns if they are lists of numbers."""
    columns, attributes = encode_item(span), dict(span.attributes)
    for column, name in LISTS.items():
        value = attributes.get(name)
        packed = token_blocks.pack_logprobs(name, value) if name == LOGPROBS else token_blocks.pack_ids(value)
        if packed is not None:
            read = token_blocks.read_logprobs if name == LOGPROBS else token_blocks.read_ids
            columns[column] = read(packed)
            del attributes[name]
    return {**columns, "attributes": attributes}


def _size(row: dict[str, Any]) -> int:
    """The approximate size in memory."""
    return 200 + sum(
        8 * len(value) if isinstance(value, list) else len(value)
        for value in row.values()
        if isinstance(value, str | list)
    )


# -- reading ---------------------------------------------------------------------------------------------------------


class ParquetReader:
    """Reads rows; see `schema.Reader`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def items(self) -> Generator[tuple[Item, int]]:
        rollout: dict[str, Any] | None = None
        size, number, limit = 0, 0, max_item_bytes(self._path)
        try:
            for number, row in enumerate(self._read(), start=1):
                kind, bytes_of_row = row["type"], _size(row)
                if kind in ("attempt", "span"):
                    self._add(rollout, kind, _fields(row), number)
                    size += bytes_of_row
                    if size > limit:
                        raise DatasetError(too_large(self._path, f"the rollout of row {number}", limit))
                    continue
                if rollout is not None:
                    yield self._record(rollout, number - 1), size
                rollout, size = None, bytes_of_row
                if kind == "resources":
                    yield decode_resources(msgspec.convert(_fields(row), ResourcesShape)), size
                elif kind == "rollout":
                    rollout = _fields(row) | {"attempts": [], "spans": []}
                else:
                    raise self._error(number, f"type {kind!r} is not resources, rollout, attempt or span")
        except (*InvalidShape, orjson.JSONDecodeError) as error:
            raise self._error(number, explain(error)) from error
        if rollout is not None:
            yield self._record(rollout, number), size

    def _read(self) -> Iterator[dict[str, Any]]:
        try:
            with pyarrow.parquet.ParquetFile(self._path) as file:
                self._check(file.schema_arrow)
                for group in range(file.num_row_groups):  # one at a time: a batch must not span several
                    for batch in file.iter_batches(BATCH_ROWS, row_groups=[group]):
                        if batch.nbytes > max_item_bytes(self._path):  # a dictionary may hold one value for all rows
                            what = f"the content of {batch.num_rows} rows"
                            raise DatasetError(too_large(self._path, what, max_item_bytes(self._path)))
                        yield from cast("list[dict[str, Any]]", batch.to_pylist())
        except (pyarrow.ArrowException, OSError) as error:
            raise DatasetError(f"{self._path} is not a Parquet file, or is truncated: {error}") from error

    def _check(self, schema: Any) -> None:
        found = (schema.metadata or {}).get(FORMAT.encode())
        if found is None:
            raise DatasetError(
                f"{self._path} is not an export of a store: its schema does not name {FORMAT!r}, which is lost "
                "when another program rewrites the table"
            )
        if found != str(VERSION).encode():
            raise DatasetError(
                f"{self._path} is an export of version {found.decode()}, and this release reads version "
                f"{VERSION}; import it with the release that wrote it, or a later one"
            )

    def _add(self, rollout: dict[str, Any] | None, kind: str, fields: dict[str, Any], number: int) -> None:
        if rollout is None or fields.pop("rollout_id", None) != rollout["rollout_id"]:
            raise self._error(number, f"this {kind} does not follow its rollout; the rows have been reordered")
        rollout["attempts" if kind == "attempt" else "spans"].append(
            msgspec.convert(fields, AttemptShape if kind == "attempt" else SpanShape)
        )

    def _record(self, rollout: dict[str, Any], number: int) -> RolloutRecord:
        try:
            return decode_rollout(msgspec.convert(rollout, RolloutShape))
        except InvalidShape as error:
            raise self._error(number, explain(error)) from error

    def _error(self, number: int, what: str) -> DatasetError:
        return DatasetError(f"row {number} of {self._path}: {what}")


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row, without those that are null."""
    fields = {
        name: orjson.loads(value) if name in JSON_COLUMNS else value
        for name, value in row.items()
        if value is not None and name != "type"
    }
    for column, name in LISTS.items():
        if column in fields:
            fields["attributes"][name] = fields.pop(column)
    return fields
