"""Watches the rollouts of a run while it works: counts them for the display, and names agents that hang.

It only reads, every few seconds, and a store that does not answer ends nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from agentlightning.errors import AgentLightningError
from agentlightning.rollouts import Attempt, Rollout, RolloutStatus
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.sources.collector import describe_failure
from agentlightning.training.sources.transcripts import said, text_of, transcript_of
from agentlightning.util.progress import Progress, RolloutCounts

logger = logging.getLogger(__name__)

SECONDS: Final = 2.0
RUNNING: Final[tuple[RolloutStatus, ...]] = ("preparing", "running")
KEY_SECONDS: Final = 0.2
"""How soon a key is answered."""
MOST_RUNNING: Final = 200
"""Running rollouts that are looked at for hanging ones, the oldest."""
HANGING_SHARE: Final = 0.5
"""The share of its time limit after which a rollout is said to hang."""
MOST_NAMED: Final = 3
"""Hanging rollouts that are named; further ones are counted."""
MOST_TEXT: Final = 120


async def watch_rollouts(
    store: LightningStoreBase, run_id: str, progress: Progress, timeout_seconds: float, *, own_store: bool
) -> None:
    """Until cancelled. `own_store`: no other run's rollouts are in it, so that attempts can be counted."""
    watch = _Watch(store, run_id, progress, timeout_seconds, own_store)
    while True:
        try:
            await watch.look()
        except AgentLightningError as error:
            logger.info("the rollouts of %s cannot be counted: %s", run_id, error)
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(KEY_SECONDS)
            if progress.wants_transcript:
                await watch.show_transcript()


class _Watch:
    def __init__(
        self, store: LightningStoreBase, run_id: str, progress: Progress, timeout_seconds: float, own_store: bool
    ) -> None:
        self._store, self._progress = store, progress
        self._timeout, self._own_store = timeout_seconds, own_store
        self._own: dict[str, Any] = {} if own_store else {"rollout_id_contains": run_id}
        """What limits a search to the rollouts of this run."""
        self._named: set[str] = set()
        self._since: dict[str, float] = {}
        """Since when an attempt is known to run, on the clock of this process: that of the store may be another."""
        self._cause: str | None = None
        self._failed = 0

    async def look(self) -> None:
        own = self._own
        running = await running_rollouts(self._store, **own)
        await self._name_hanging([each.rollout_id for each in running[-MOST_RUNNING:]])
        failed = await self._store.count_rollouts(status_in=["failed"], **own)
        if failed != self._failed:
            self._failed = failed
            self._cause = await self._last_cause(own)
        waiting = await self._store.count_rollouts(status_in=["queuing", "requeuing"], **own)
        succeeded = await self._store.count_rollouts(status_in=["succeeded"], **own)
        retried = 0
        if self._own_store:
            counts = await self._store.statistics()
            begun = sum(
                n for name, n in counts.items() if name.startswith("rollouts.") and not name.endswith("queuing")
            )
            retried = max(0, counts.get("attempts", 0) - begun)
        self._progress.rollouts(RolloutCounts(waiting, len(running), succeeded, failed, retried, self._cause))

    async def _last_cause(self, own: dict[str, Any]) -> str | None:
        found = await self._store.query_rollouts(status_in=["failed"], **own, newest_first=True, limit=1)
        attempt = await self._store.get_latest_attempt(found[0].rollout_id) if found else None
        return describe_failure(attempt).splitlines()[-1][:MOST_TEXT] if found else None

    async def _name_hanging(self, running: list[str]) -> None:
        attempts: list[Attempt] = await self._store.get_latest_attempts(running) if running else []
        now = time.monotonic()
        self._since = {each.attempt_id: self._since.get(each.attempt_id, now) for each in attempts}
        for attempt in attempts:
            seconds = now - self._since[attempt.attempt_id]
            if seconds < HANGING_SHARE * self._timeout or attempt.attempt_id in self._named:
                continue
            self._named.add(attempt.attempt_id)
            if len(self._named) > MOST_NAMED:
                continue
            rollout = await self._store.get_rollout_by_id(attempt.rollout_id)
            task = "" if rollout is None else f" on task {text_of(rollout.input)[:MOST_TEXT]}"
            further = " Further ones are not named" if len(self._named) == MOST_NAMED else ""
            self._progress.note(
                f"warning: rollout {attempt.rollout_id} hangs: it has run for {seconds:.0f} s{task}; it is stopped"
                f" after {self._timeout:g} s (runner.timeout_seconds).{further}"
            )

    async def show_transcript(self) -> None:
        """That of the newest rollout that ended well."""
        own = self._own
        found = await self._store.query_rollouts(status_in=["succeeded"], **own, newest_first=True, limit=1)
        if not found:
            self._progress.transcript("no rollout has ended yet")
            return
        spans = await self._store.query_spans(found[0].rollout_id)
        lines = [f"{each.get('role', '?')}: {said(each)}" for each in transcript_of(spans)]
        attempt = await self._store.get_latest_attempt(found[0].rollout_id)
        output = None if attempt is None else attempt.metadata.get("output")
        self._progress.transcript("\n".join([found[0].rollout_id, *lines, f"output: {text_of(output)}"]))


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
