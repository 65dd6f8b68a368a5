"""What happens now: workers, queues, counts of the store, the newest calls and rollouts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from agentlightning import span as names
from agentlightning.assemble.model_calls import has_failed, is_call
from agentlightning.dashboard.data.conversation import message_json, messages_of
from agentlightning.dashboard.data.run_data import DashboardData
from agentlightning.dashboard.data.summary import token_count, version_of
from agentlightning.dashboard.data.text import shortened
from agentlightning.dashboard.query import Query
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.watch import running_rollouts

NEWEST: Final = 30
MOST_WORKERS: Final = 1000
WITH_CALLS: Final = 10
"""Of the newest rollouts those whose calls are read, beside the running ones."""


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
    contains = run.source.run_id if run.shares_store else None
    running = await running_rollouts(run.store, rollout_id_contains=contains, most=NEWEST)
    newest = await run.store.query_rollouts(rollout_id_contains=contains, newest_first=True, limit=NEWEST)
    looked_at = dict.fromkeys(each.rollout_id for each in (*running, *newest[:WITH_CALLS]))
    return {
        "now": time.time(),
        "statistics": await run.store.statistics(),
        "calls": await newest_calls(run.store, list(looked_at)),
        "running": [asdict(each) for each in await run.summaries.of(running)],
        "newest": [asdict(each) for each in await run.summaries.of(newest)],
        "queues": [asdict(each) for each in await run.store.query_queues()],
    }


async def newest_calls(store: LightningStoreBase, rollout_ids: Sequence[str]) -> list[dict[str, Any]]:
    """The model calls of some rollouts that were recorded last, the newest first. A call is recorded when it ends."""
    found: list[Span] = []
    if rollout_ids:
        async for _, spans in store.iter_spans(rollout_ids):
            found += [span for span in spans if is_call(span)]
    found.sort(key=lambda span: -(span.end_time or span.start_time))
    return [call_line(span) for span in found[:NEWEST]]


def call_line(span: Span) -> dict[str, Any]:
    """A model call as a line of a table."""
    attributes = span.attributes
    answer = [part for message in messages_of(span, names.OUTPUT_MESSAGES) for part in message_json(message)["parts"]]
    return {
        "rollout_id": span.rollout_id,
        "span_id": span.span_id,
        "agent": attributes.get(names.AGENT_NAME),
        "model": attributes.get(names.RESPONSE_MODEL) or attributes.get(names.REQUEST_MODEL),
        "version": version_of(span),
        "end_time": span.end_time,
        "seconds": None if span.end_time is None else span.end_time - span.start_time,
        "sampled_tokens": token_count(span, names.OUTPUT_TOKENS, names.RESPONSE_TOKEN_IDS),
        "prompt_tokens": token_count(span, names.INPUT_TOKENS, names.PROMPT_TOKEN_IDS),
        "answer": shortened(" ".join(str(part.get("text") or part.get("name") or "") for part in answer)),
        "failed": has_failed(span),
    }
