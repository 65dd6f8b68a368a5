"""What the server of a run or store does now, and what went wrong: failed rollouts by their cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentlightning.dashboard.data.catalog import Catalog
from agentlightning.dashboard.data.summary import RolloutSummary
from agentlightning.dashboard.query import Query
from agentlightning.util.json_values import Json

MOST: Final = 1000
"""Failed rollouts that are read, the newest."""


async def show_server(data: Catalog, query: Query) -> Json:
    """Counts of the store, what is running, queues, workers, and the calls that ended last."""
    run = await data.run(query.part("run"))
    return await run.live.shown(run.in_ids)


async def list_failures(data: Catalog, query: Query) -> Json:
    """The causes, the most frequent first: how often, a message, the newest rollout, the agents."""
    run = await data.run(query.part("run"))
    failed = await run.store.query_rollouts(
        status_in=["failed"], rollout_id_contains=run.in_ids, newest_first=True, limit=MOST
    )
    causes: dict[str, list[RolloutSummary]] = {}
    for row in await run.summaries.of(failed):
        causes.setdefault(row.failure_kind or "", []).append(row)
    rows = [_cause(kind, own) for kind, own in causes.items()]
    rows.sort(key=lambda each: -each["count"])
    return {"causes": rows, "read": len(failed), "all": len(failed) < MOST}


def _cause(kind: str, own: Sequence[RolloutSummary]) -> Json:
    newest = own[0]
    return {
        "cause": kind or None,
        "count": len(own),
        "message": newest.failure,
        "messages": len({row.failure for row in own}),
        "newest": newest.rollout_id,
        "newest_time": newest.end_time,
        "oldest_time": own[-1].end_time,
        "modes": sorted({row.mode for row in own if row.mode}),
        "agents": sorted({agent for row in own for agent in row.agents}),
    }
