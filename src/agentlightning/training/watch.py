"""Watches the rollouts of a run while it works: counts them for the display, and names agents that hang.

It only reads, every few seconds, and a store that does not answer ends nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from msgspec import Struct

from agentlightning.assemble import calls, text_of
from agentlightning.errors import AgentLightningError
from agentlightning.rollouts import Rollout, RolloutStatus
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.sources.collector import cause_of_failure
from agentlightning.util.progress import Progress, RolloutCounts

logger = logging.getLogger(__name__)

SECONDS = 2.0
RUNNING: Final[tuple[RolloutStatus, ...]] = ("preparing", "running")
MOST_RUNNING = 200
"""Running rollouts that are looked at for hanging ones, the oldest."""
HANGING_SHARE = 0.5
"""The share of its time limit after which a rollout is said to hang."""
MOST_NAMED = 3
"""Hanging rollouts that are named; further ones are counted."""
MOST_TEXT = 120


async def watch_rollouts(
    store: LightningStoreBase, run_id: str, progress: Progress, timeout_seconds: float, *, own_store: bool
) -> None:
    """Until cancelled. `own_store`: no other run's rollouts are in it, so that attempts can be counted."""
    watch = _Watch(store, progress, timeout_seconds, {} if own_store else {"rollout_id_contains": run_id})
    while True:
        try:
            await watch.look()
        except AgentLightningError as error:
            logger.info("the rollouts of %s cannot be counted: %s", run_id, error)
        await asyncio.sleep(SECONDS)


class _Watch(Struct):
    store: LightningStoreBase
    progress: Progress
    timeout: float
    own: dict[str, Any]
    """What limits a search to the rollouts of this run; empty where all of the store are its own."""
    named: set[str] = set()
    """Hanging attempts that were named."""
    since: dict[str, float] = {}
    """Since when an attempt is known to run, on the clock of this process: that of the store may be another."""
    failed: int = 0
    cause: str | None = None
    """Why the last one failed."""

    async def look(self) -> None:
        running = await running_rollouts(self.store, **self.own)
        await self._name_hanging([each.rollout_id for each in running[-MOST_RUNNING:]])
        waiting, succeeded = await self._count("queuing", "requeuing"), await self._count("succeeded")
        failed = await self._count("failed")
        if failed != self.failed:
            self.failed = failed
            newest = await self.store.query_rollouts(status_in=["failed"], **self.own, newest_first=True, limit=1)
            attempt = await self.store.get_latest_attempt(newest[0].rollout_id) if newest else None
            self.cause = attempt and cause_of_failure(attempt)[:MOST_TEXT]
        retried = 0
        if not self.own:
            counts = await self.store.statistics()
            begun = sum(
                n for name, n in counts.items() if name.startswith("rollouts.") and not name.endswith("queuing")
            )
            retried = max(0, counts.get("attempts", 0) - begun)
        self.progress.rollouts(RolloutCounts(waiting, len(running), succeeded, failed, retried, self.cause))

    async def _count(self, *status: RolloutStatus) -> int:
        return await self.store.count_rollouts(status_in=status, **self.own)

    async def _name_hanging(self, running: list[str]) -> None:
        attempts = await self.store.get_latest_attempts(running) if running else []
        now = time.monotonic()
        self.since = {each.attempt_id: self.since.get(each.attempt_id, now) for each in attempts}
        for attempt in attempts:
            seconds = now - self.since[attempt.attempt_id]
            if seconds < HANGING_SHARE * self.timeout or attempt.attempt_id in self.named:
                continue
            self.named.add(attempt.attempt_id)
            if len(self.named) > MOST_NAMED:
                continue
            rollout = await self.store.get_rollout_by_id(attempt.rollout_id)
            task = "" if rollout is None else f" on task {text_of(rollout.input)[:MOST_TEXT]}"
            answers = len(calls(await self.store.query_spans(attempt.rollout_id, attempt.attempt_id)))
            further = " Further ones are not named" if len(self.named) == MOST_NAMED else ""
            self.progress.note(
                f"warning: rollout {attempt.rollout_id} hangs: it has run for {seconds:.0f} s{task}, and got {answers}"
                f" {'answer' if answers == 1 else 'answers'} of a model; it is stopped"
                f" after {self.timeout:g} s (runner.timeout_seconds).{further}"
            )


async def running_rollouts(
    store: LightningStoreBase, *, rollout_id_contains: str | None = None, most: int | None = None
) -> list[Rollout]:
    """The rollouts that run, the newest first, at most `most`. The store keeps their number: no more are asked for than
    there are, since a search for one more would read every rollout."""
    number = await store.count_rollouts(status_in=RUNNING)
    if not number:
        return []
    return await store.query_rollouts(
        status_in=RUNNING,
        rollout_id_contains=rollout_id_contains,
        newest_first=True,
        limit=number if most is None else min(most, number),
    )
