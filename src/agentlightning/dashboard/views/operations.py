"""What happens now: workers, queues, counts of the store, the newest calls and rollouts."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Final

from agentlightning.dashboard.data.run_data import DashboardData
from agentlightning.dashboard.query import Query

MOST_WORKERS: Final = 1000


async def list_workers(data: DashboardData, query: Query) -> dict[str, Any]:
    """The workers, those that are lost included."""
    run = await data.run(query.part("run"))
    workers = await run.store.query_workers(limit=MOST_WORKERS)
    return {"workers": [asdict(each) for each in workers], "now": time.time(), "limit": MOST_WORKERS}


async def list_queues(data: DashboardData, query: Query) -> dict[str, Any]:
    """The queues, with the rollouts that wait in each and those that are open."""
    run = await data.run(query.part("run"))
    return {"queues": [asdict(each) for each in await run.store.query_queues()]}


async def show_live(data: DashboardData, query: Query) -> dict[str, Any]:
    """Counts of the store, the calls that ended last, what is running, and the rollouts that were created last."""
    run = await data.run(query.part("run"))
    return await run.live.shown(run.source.run_id if run.shares_store else None)
