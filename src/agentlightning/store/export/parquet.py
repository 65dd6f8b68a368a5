"""Writes exports as Parquet tables, for DuckDB, pandas and other programs. They are not imported again.

The `type` of a row is `resources`, `rollout`, `attempt` or `span`; a rollout is followed by its attempts and spans.
Columns that a type does not have are null. Arbitrary JSON values (`input`, `metadata`, `attributes`, `config`,
`events`, `resource`) are JSON text; token ids and log-probabilities are lists of int32 and float32. Times are seconds
since 1970.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from agentlightning.errors import MissingExtraError
from agentlightning.span import LOGPROBS, PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, Span
from agentlightning.store.export.jsonl import FORMAT, VERSION, Item, ResourcesRecord, fields_of, resources_fields
from agentlightning.store.sql import pack
from agentlightning.util.json_values import dumps

try:
    import pyarrow
    import pyarrow.parquet
except ImportError as error:
    raise MissingExtraError("pyarrow", "parquet") from error

JSON_COLUMNS: Final = frozenset({"input", "config", "metadata", "resources", "attributes", "events", "resource"})
LISTS: Final = {"prompt_token_ids": PROMPT_TOKEN_IDS, "response_token_ids": RESPONSE_TOKEN_IDS, "logprobs": LOGPROBS}
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
    """Writes rows; see `jsonl.JsonlWriter`."""

    def __init__(self, path: Path) -> None:
        self._file = pyarrow.parquet.ParquetWriter(path, SCHEMA, compression="zstd")

    def write(self, items: Sequence[Item]) -> int:
        table = pyarrow.Table.from_pylist([row for item in items for row in _rows(item)], schema=SCHEMA)
        self._file.write_table(table)
        return table.nbytes

    def finish(self) -> None:
        self._file.close()

    close = finish


def _rows(item: Item) -> Iterator[dict[str, Any]]:
    if isinstance(item, ResourcesRecord):
        yield _row("resources", resources_fields(item))
        return
    rollout_id = item.rollout.rollout_id
    yield _row("rollout", fields_of(item.rollout))
    for attempt in item.attempts:
        yield _row("attempt", {"rollout_id": rollout_id, **fields_of(attempt)})
    for span in item.spans:
        yield _row("span", {"rollout_id": rollout_id, **_span_columns(span)})


def _row(kind: Literal["resources", "rollout", "attempt", "span"], fields: dict[str, Any]) -> dict[str, Any]:
    columns = {name: dumps(value).decode() if name in JSON_COLUMNS else value for name, value in fields.items()}
    return {"type": kind, **columns}


def _span_columns(span: Span) -> dict[str, Any]:
    """The fields of a span, with token attributes in their own columns if they are lists of numbers."""
    columns, attributes = fields_of(span), dict(span.attributes)
    for column, name in LISTS.items():
        value = attributes.get(name)
        packed = pack.pack_logprobs(name, value) if name == LOGPROBS else pack.pack_ids(value)
        if packed is not None:
            read = pack.read_logprobs if name == LOGPROBS else pack.read_ids
            columns[column] = read(packed)
            del attributes[name]
    return {**columns, "attributes": attributes}
