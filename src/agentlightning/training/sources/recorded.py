"""Recorded rollouts: batches of rollouts that finished earlier, from the agent's own use for example.

Nothing runs. Rollouts of the same task form a group, in the order of their first rollout. Each step takes the next
groups, and starts again at the first when all were used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentlightning.algorithms.training import Collected, RolloutRequest
from agentlightning.errors import DatasetError
from agentlightning.rollouts import Rollout, RolloutMode
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import task_key
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.sources.reader import TrajectoryReader

PAGE = 1000
"""Rollouts in one request to the store."""


@dataclass(frozen=True, slots=True)
class RecordedQuery:
    """Which finished rollouts to learn from; None: any."""

    rollout_id_contains: str | None = None
    modes: Sequence[RolloutMode] | None = None
    finished_before: float | None = None
    """A time in seconds since the epoch. With one, a resumed run sees the same rollouts."""


@dataclass(slots=True)
class RecordedSource:
    """Returns finished rollouts of a store, `group_size` of each task at most."""

    reader: TrajectoryReader
    state: RunState
    query: RecordedQuery = field(default_factory=RecordedQuery)
    _groups: list[tuple[str, list[str]]] | None = None
    """(group, ids of its rollouts), once read."""

    async def next(self, request: RolloutRequest) -> Collected:
        """The groups of the step. Raises DatasetError where the store has no such rollout."""
        started = time.monotonic()
        if self._groups is None:
            self._groups = await find_groups(self.reader.store, self.query)
        if not self._groups:
            raise DatasetError("the store has no finished rollout to learn from; record some, or change the query")
        start = self.state.step * request.tasks
        chosen = [self._groups[(start + index) % len(self._groups)] for index in range(request.tasks)]
        groups = {rollout_id: group for group, ids in dict(chosen).items() for rollout_id in ids[: request.group_size]}
        trajectories, rejected = await self.reader.read(groups, request.check)
        return Collected(trajectories, rejected=rejected, seconds=time.monotonic() - started)


async def find_groups(store: LightningStoreBase, query: RecordedQuery) -> list[tuple[str, list[str]]]:
    """(group, rollout ids) of the succeeded rollouts that match: by the `group` in their metadata, else by task."""
    groups: dict[str, list[str]] = {}
    for rollout in await _finished(store, query):
        group = rollout.metadata.get("group")
        groups.setdefault(group if isinstance(group, str) else task_key(rollout.input), []).append(rollout.rollout_id)
    return list(groups.items())


async def _finished(store: LightningStoreBase, query: RecordedQuery) -> list[Rollout]:
    """In the order of their creation."""
    found: list[Rollout] = []
    page: list[Rollout] = []
    while not found or len(page) == PAGE:
        page = await store.query_rollouts(
            status_in=["succeeded"],
            rollout_id_contains=query.rollout_id_contains,
            mode_in=query.modes,
            after=page[-1].rollout_id if page else None,
            limit=PAGE,
        )
        found += page
        if not page:
            break
    before = query.finished_before
    return [each for each in found if before is None or (each.end_time or 0.0) < before]
