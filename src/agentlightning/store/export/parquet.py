"""An export as a Parquet table, for DuckDB, pandas and their like.

One row for each thing, told apart by `type`: `resources`, `rollout`, `attempt`, `span`; a rollout is followed by its
attempts and its spans. Columns that a type does not have are null. What may be any JSON value (`input`, `metadata`,
`attributes`, `config`, `events`, `resource`) is JSON text; token ids and log-probabilities are lists of int32 and
float32. Times are seconds since 1970.
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
    BadShape,
    Item,
    Kind,
    ResourcesLine,
    ResourcesRecord,
    RolloutLine,
    SpanShape,
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
from agentlightning.store.sql.spans import token_blocks
from agentlightning.store.types import RolloutRecord

try:
    import pyarrow
    import pyarrow.parquet
except ImportError as error:
    raise MissingExtraError("pyarrow", "parquet") from error

GROUP_BYTES: Final = 8 << 20
"""Of rows, about: what is held in memory before it is written as a row group."""
BATCH_ROWS: Final = 512
JSON_COLUMNS: Final = frozenset({"input", "config", "metadata", "resources", "attributes", "events", "resource"})
LISTS: Final = {
    "prompt_token_ids": PROMPT_TOKEN_IDS,
    "response_token_ids": RESPONSE_TOKEN_IDS,
    "logprobs": LOGPROBS,
}
"""Columns that hold an attribute of a span."""

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
    """Writes rows; see `base.Writer`."""

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
        yield _row("resources", resources_shape(item))
        return
    rollout_id = item.rollout.rollout_id
    yield _row("rollout", rollout_shape(item.rollout))
    for attempt in item.attempts:
        yield _row("attempt", {"rollout_id": rollout_id, **attempt_shape(attempt)})
    for span in item.spans:
        yield _row("span", {"rollout_id": rollout_id, **_span_columns(span)})


def _row(kind: Kind, shape: dict[str, Any]) -> dict[str, Any]:
    columns = {name: _json(value) if name in JSON_COLUMNS else value for name, value in shape.items()}
    return {"type": kind, **columns}


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _span_columns(span: Span) -> dict[str, Any]:
    """With the token attributes in columns of their own, as far as they are lists of such numbers."""
    shape, attributes = span_shape(span), dict(span.attributes)
    for column, name in LISTS.items():
        value = attributes.get(name)
        packed = token_blocks.pack_logprobs(name, value) if name == LOGPROBS else token_blocks.pack_ids(value)
        if packed is not None:
            shape[column] = token_blocks.read_logprobs(packed) if name == LOGPROBS else token_blocks.read_ids(packed)
            del attributes[name]
    return {**shape, "attributes": attributes}


def _size(row: dict[str, Any]) -> int:
    """About, in memory."""
    return 200 + sum(
        8 * len(value) if isinstance(value, list) else len(value) for value in row.values() if _long(value)
    )


def _long(value: Any) -> bool:
    return isinstance(value, str | list)


# -- reading ---------------------------------------------------------------------------------------------------------


class ParquetReader:
    """Reads rows; see `base.Reader`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def items(self) -> Generator[tuple[Item, int]]:
        rollout: dict[str, Any] | None = None
        size, number, limit = 0, 0, largest_item(self._path)
        try:
            for number, row in enumerate(self._read(), start=1):
                kind, bytes_of_row = row["type"], _size(row)
                if kind in ("attempt", "span"):
                    self._add(rollout, kind, _shape(row), number)
                    size += bytes_of_row
                    if size > limit:
                        raise DatasetError(too_large(self._path, f"the rollout of row {number}", limit))
                    continue
                if rollout is not None:
                    yield self._record(rollout, number - 1), size
                rollout, size = None, bytes_of_row
                if kind == "resources":
                    yield to_resources(msgspec.convert(_shape(row), ResourcesLine)), size
                elif kind == "rollout":
                    rollout = _shape(row) | {"attempts": [], "spans": []}
                else:
                    raise self._wrong(number, f"type {kind!r} is not resources, rollout, attempt or span")
        except (*BadShape, orjson.JSONDecodeError) as error:
            raise self._wrong(number, explain(error)) from error
        if rollout is not None:
            yield self._record(rollout, number), size

    def _read(self) -> Iterator[dict[str, Any]]:
        try:
            with pyarrow.parquet.ParquetFile(self._path) as file:
                self._check(file.schema_arrow)
                for group in range(file.num_row_groups):  # one by one: a batch must not span several
                    for batch in file.iter_batches(BATCH_ROWS, row_groups=[group]):
                        if batch.nbytes > largest_item(self._path):  # a dictionary may hold one value for all rows
                            what = f"what stands in {batch.num_rows} rows"
                            raise DatasetError(too_large(self._path, what, largest_item(self._path)))
                        yield from cast("list[dict[str, Any]]", batch.to_pylist())
        except (pyarrow.ArrowException, OSError) as error:
            raise DatasetError(f"{self._path} is no Parquet file, or cut off: {error}") from error

    def _check(self, schema: Any) -> None:
        found = (schema.metadata or {}).get(FORMAT.encode())
        if found is None:
            raise DatasetError(
                f"{self._path} is no export of a store: its schema does not name {FORMAT!r}; a table that was "
                "rewritten by another program loses that"
            )
        if found != str(VERSION).encode():
            raise DatasetError(
                f"{self._path} is an export of version {found.decode()}, and this is Agent Lightning for version "
                f"{VERSION}; import it with the release that wrote it, or a later one"
            )

    def _add(self, rollout: dict[str, Any] | None, kind: str, shape: dict[str, Any], number: int) -> None:
        if rollout is None or shape.pop("rollout_id", None) != rollout["rollout_id"]:
            raise self._wrong(number, f"this {kind} does not come after its rollout; the rows have been moved")
        rollout["attempts" if kind == "attempt" else "spans"].append(
            msgspec.convert(shape, AttemptShape if kind == "attempt" else SpanShape)
        )

    def _record(self, rollout: dict[str, Any], number: int) -> RolloutRecord:
        try:
            return to_record(msgspec.convert(rollout, RolloutLine))
        except BadShape as error:
            raise self._wrong(number, explain(error)) from error

    def _wrong(self, number: int, what: str) -> DatasetError:
        return DatasetError(f"row {number} of {self._path}: {what}")


def _shape(row: dict[str, Any]) -> dict[str, Any]:
    """What the row says, without what it does not."""
    shape = {
        name: orjson.loads(value) if name in JSON_COLUMNS else value
        for name, value in row.items()
        if value is not None and name != "type"
    }
    for column, name in LISTS.items():
        if column in shape:
            shape["attributes"][name] = shape.pop(column)
    return shape
