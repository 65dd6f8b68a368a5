"""What happens now in a run or store: read at most once a second, however many pages show it.

The model calls are those among the spans that were stored last, so that what they cost does not grow with the rollouts
that run, nor with the calls of one of them. They are read again only if the numbers of the store have changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Final

from agentlightning import span as names
from agentlightning.assemble.model_calls import is_call
from agentlightning.dashboard.data.conversation import message_json, messages_of
from agentlightning.dashboard.data.summary import Summaries, Updates, call_facts
from agentlightning.dashboard.data.text import shortened
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.watch import running_rollouts
from agentlightning.util.json_values import Json

SECONDS: Final = 1.0
"""How long an answer is given to all who ask."""
NEWEST: Final = 30
"""Calls and running rollouts that are shown."""
MOST_WORKERS: Final = 1000
SPANS: Final = 100
SPANS_OF_SHARED: Final = 1000
"""Spans that are read to find the newest calls; more where the store also has rollouts of others."""


class Live:
    """What happens now. `run_id`: only in rollouts whose ids contain it."""

    def __init__(self, store: LightningStoreBase, summaries: Summaries) -> None:
        self._store, self._summaries = store, summaries
        self._lock = asyncio.Lock()
        self._read_at = -SECONDS
        self._shown: Json = {}
        self._statistics: Mapping[str, int] = {}
        self._calls: list[Json] = []

    async def shown(self, run_id: str | None) -> Json:
        async with self._lock:
            if time.monotonic() >= self._read_at + SECONDS:
                self._shown = await self._read(run_id)
                self._read_at = time.monotonic()
            return self._shown

    async def _read(self, run_id: str | None) -> Json:
        store, summaries = self._store, self._summaries
        statistics = await store.statistics()
        running = await running_rollouts(store, rollout_id_contains=run_id, most=NEWEST)
        return {
            "now": time.time(),
            "statistics": statistics,
            "calls": await self._newest_calls(run_id, statistics),
            "running": await summaries.of(running, open_spans=False),
            "queues": await store.query_queues(),
            "workers": await store.query_workers(limit=MOST_WORKERS),
        }

    async def _newest_calls(self, run_id: str | None, statistics: Mapping[str, int]) -> list[Json]:
        """The model calls that were stored last, the newest first. A call is stored when it ends."""
        if statistics != self._statistics:
            spans = await self._store.newest_spans(SPANS if run_id is None else SPANS_OF_SHARED)
            found = [span for span in spans if is_call(span) and (run_id is None or run_id in span.rollout_id)]
            lines = [call_line(span, self._summaries.updates) for span in found[:NEWEST]]
            self._calls = sorted(lines, key=lambda call: -(call["end_time"] or 0.0))
            self._statistics = statistics
        return self._calls


def call_line(span: Span, updates: Updates) -> Json:
    """A model call as a line of a table."""
    answer = [part for message in messages_of(span, names.OUTPUT_MESSAGES) for part in message_json(message)["parts"]]
    return {
        **call_facts(span, updates),
        "rollout_id": span.rollout_id,
        "end_time": span.end_time,
        "answer": shortened(" ".join(str(part.get("text") or part.get("name") or "") for part in answer)),
    }
