"""The export of a selection of rollouts, named one by one or by the filters of the table.

rollouts   as `agl store import` reads them
sft        {"messages": [...], "tools": [...]}, as `agl sft --data` reads them
dpo        {"prompt": [...], "chosen": [...], "rejected": [...]}, as `agl dpo --data` reads them
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, cast

import orjson

from agentlightning.dashboard.actions import ids_in
from agentlightning.dashboard.data.catalog import Catalog
from agentlightning.dashboard.data.run_data import RunData
from agentlightning.dashboard.data.selection import Filters, select
from agentlightning.dashboard.query import Query
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.rollouts import Rollout
from agentlightning.store.export.jsonl import end_line, header_line, item_line
from agentlightning.training.export import DatasetForm, Selection, dataset_records

ROLLOUTS: Final = "rollouts"
DATASETS: Final[Mapping[str, DatasetForm]] = {"sft": "openai-jsonl", "dpo": "dpo-jsonl"}
RECORDS_HEADER: Final = "x-agl-records"
SKIPPED_HEADER: Final = "x-agl-skipped"
"""JSON: how many gave no record, by reason."""
MOST_EXPORTED: Final = 20_000
"""Rollouts that filters may select."""
PAGE: Final = 500
CHUNK: Final = 50


async def export(data: Catalog, name: str, body: Any) -> tuple[AsyncIterator[bytes], dict[str, str]]:
    """The lines, and headers that say how many records there are and what gave none. Raises ConfigError."""
    fields: Mapping[str, Any] = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    form = fields.get("form", ROLLOUTS)
    if form != ROLLOUTS and form not in DATASETS:
        raise ConfigError(f"form={form!r:.80} is none of: {', '.join((ROLLOUTS, *DATASETS))}")
    run = await data.run(name)
    filters = fields.get("filters")
    rollouts = await run.by_ids(ids_in(body)) if filters is None else await _matching(run, filters)
    if form == ROLLOUTS:
        return _lines_of_store(run, [each.rollout_id for each in rollouts]), {RECORDS_HEADER: str(len(rollouts))}
    selection = Selection(reward_weights=run.weights)
    try:
        records, skipped = await dataset_records(run.store, rollouts, DATASETS[form], selection)
    except DatasetError as error:
        raise ConfigError(str(error)) from error
    headers = {RECORDS_HEADER: str(len(records)), SKIPPED_HEADER: orjson.dumps(skipped).decode()}
    return _lines(records), headers


async def _matching(run: RunData, given: Any) -> list[Rollout]:
    """All rollouts that match the filters of a table, oldest first."""
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in cast("dict[str, Any]", given).values()):
        raise ConfigError('filters is no object of texts; send {"filters": {"state": "succeeded"}}')
    filters = Filters.of(Query({}, cast("dict[str, str]", given)))
    found, cursor = list[str](), None
    while True:
        page = await select(run, filters, sort=None, descending=False, cursor=cursor, limit=PAGE)
        found += [row.rollout_id for row in page.rows]
        if len(found) > MOST_EXPORTED:
            raise ConfigError(
                f"the filters select more than {MOST_EXPORTED:,} rollouts; narrow them, or use agl export"
            )
        if page.next is None:
            return await run.by_ids(found)
        cursor = page.next


async def _lines(records: Sequence[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    for start in range(0, len(records), CHUNK):
        yield b"".join(orjson.dumps(each) + b"\n" for each in records[start : start + CHUNK])


async def _lines_of_store(run: RunData, ids: Sequence[str]) -> AsyncIterator[bytes]:
    yield header_line()
    count = 0
    for start in range(0, len(ids), CHUNK):
        for record in await run.store.read_records(ids[start : start + CHUNK]):
            count += 1
            yield item_line(record)
    yield end_line(0, count)
