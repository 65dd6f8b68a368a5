"""What a user with the token may do: cancel, requeue, retry and annotate rollouts, and export a selection of them.

An action names rollouts by their ids, and answers for each what became of it: one that cannot be changed does not stop
the others. An export names them so, or by the filters of the table, and is written as

rollouts   `agl store import` reads them
sft        {"messages": [...], "tools": [...]}, as `agl sft --data` reads them
dpo        {"prompt": [...], "chosen": [...], "rejected": [...]}, as `agl dpo --data` reads them
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import orjson

from agentlightning.dashboard.data.run_data import RunData
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views.rollouts import MOST_ROWS, Table, select
from agentlightning.errors import AgentLightningError, ConfigError, DatasetError
from agentlightning.recording.feedback import Feedback, add_feedback
from agentlightning.rollouts import Rollout
from agentlightning.store.export.jsonl import end_line, header_line, item_line
from agentlightning.training.export import DatasetForm, Selection, dataset_records
from agentlightning.util.json_values import Json

MOST_IDS = 1000
RETRY_OF = "retry_of"
"""In the metadata of a rollout: the one whose task is run again."""
SOURCE = "dashboard"
"""Who gave feedback, where the user did not say."""
ONLY_READS = "this dashboard only reads; open that of the server, with its access token"
Action = Callable[[RunData, str, Mapping[str, Any]], Awaitable[Json]]


async def act(run: RunData, action: str, body: Any) -> Json:
    """Do something to each rollout of `body["rollout_ids"]`. Raises ConfigError for a request that cannot be."""
    if not run.writable:
        raise ConfigError(ONLY_READS)
    if action not in ACTIONS:
        raise ConfigError(f"action {action!r} is none of: {', '.join(ACTIONS)}")
    ids = ids_in(body)
    results: Json = {}
    for rollout_id in ids:
        try:
            results[rollout_id] = {"done": True, **await ACTIONS[action](run, rollout_id, body)}
        except AgentLightningError as error:
            results[rollout_id] = {"done": False, "error": str(error)}
    run.summaries.forget(await run.by_ids(ids))
    return {"action": action, "results": results, "done": sum(each["done"] for each in results.values())}


def ids_in(body: Any) -> list[str]:
    """The rollouts that a request names. Raises ConfigError."""
    ids: Any = body.get("rollout_ids") if isinstance(body, dict) else None
    if not isinstance(ids, list) or not ids or not all(isinstance(each, str) for each in ids):
        raise ConfigError('the request names no rollouts; send {"rollout_ids": ["..."]}')
    if len(ids) > MOST_IDS:
        raise ConfigError(f"the request names {len(ids)} rollouts; at most {MOST_IDS} are changed at once")
    return list(dict.fromkeys(ids))


async def _cancel(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    return {"status": (await run.store.cancel_rollout(rollout_id)).status}


async def _requeue(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    """The same rollout waits again; a succeeded one cannot."""
    return {"status": (await run.store.requeue_rollout(rollout_id, "requeued from the dashboard")).status}


async def _retry(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    """A new rollout of the same task, which leaves this one as it is."""
    rollout = await run.rollout(rollout_id)
    new = await run.store.enqueue_rollout(
        rollout.input,
        rollout.mode,
        rollout.resources_id,
        rollout.config,
        {RETRY_OF: rollout_id},
        f"ro-{uuid.uuid4().hex[:20]}",
        queue=rollout.queue,
        priority=rollout.priority,
    )
    return {"status": new.status, "rollout_id": new.rollout_id}


async def _annotate(run: RunData, rollout_id: str, body: Mapping[str, Any]) -> Json:
    """Feedback as a span: a score becomes the final reward of the rollout, a label can be filtered by."""
    given = {name: body[name] for name in ("score", "label", "comment") if body.get(name) not in (None, "")}
    source = body.get("source") or SOURCE
    if not isinstance(source, str):
        raise ConfigError(f"source={source!r:.80} is not text")
    span = await add_feedback(run.store, rollout_id, Feedback(**given), source)
    return {"span_id": span.span_id}


ACTIONS: Mapping[str, Action] = {"cancel": _cancel, "requeue": _requeue, "retry": _retry, "annotate": _annotate}


# -- export -----------------------------------------------------------------------------------------------------------


ROLLOUTS = "rollouts"
DATASETS: Mapping[str, DatasetForm] = {"sft": "openai-jsonl", "dpo": "dpo-jsonl"}
RECORDS_HEADER = "x-agl-records"
SKIPPED_HEADER = "x-agl-skipped"
"""JSON: how many gave no record, by reason."""
MOST_EXPORTED = 20_000
"""Rollouts that filters may select."""
CHUNK = 50


async def export(run: RunData, body: Any) -> tuple[AsyncIterator[bytes], dict[str, str]]:
    """The lines, and headers that say how many records there are and what gave none. Raises ConfigError."""
    fields: Mapping[str, Any] = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    form = fields.get("form", ROLLOUTS)
    if form != ROLLOUTS and form not in DATASETS:
        raise ConfigError(f"form={form!r:.80} is none of: {', '.join((ROLLOUTS, *DATASETS))}")
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
    query = {**cast("dict[str, str]", given), "sort": "", "order": "asc", "after": "", "limit": str(MOST_ROWS)}
    rollouts = list[Rollout]()
    while True:
        page = await select(run, Table(Query(query)))
        rollouts += await run.by_ids([row.rollout_id for row in page["rows"]])
        if len(rollouts) > MOST_EXPORTED:
            raise ConfigError(
                f"the filters select more than {MOST_EXPORTED:,} rollouts; narrow them, or use agl export"
            )
        if page["next"] is None:
            return rollouts
        query["after"] = page["next"]


async def _lines(records: Sequence[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    for each in records:
        yield orjson.dumps(each) + b"\n"


async def _lines_of_store(run: RunData, ids: Sequence[str]) -> AsyncIterator[bytes]:
    yield header_line()
    count = 0
    with run.reading():  # the request is over once the first lines are sent
        for start in range(0, len(ids), CHUNK):
            for record in await run.store.read_records(ids[start : start + CHUNK]):
                count += 1
                yield item_line(record)
    yield end_line(0, count)
