"""Recorded rollouts: those that finished earlier, from the agent's own use for example. Those of the same task form a
group, in the order of their first rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.rollouts import Rollout, RolloutMode
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import task_key

PAGE = 1000
"""Rollouts in one request to the store."""


@dataclass(frozen=True, slots=True)
class RecordedQuery:
    """Which finished rollouts to learn from; None: any."""

    rollout_id_contains: str | None = None
    modes: Sequence[RolloutMode] | None = None
    finished_before: float | None = None
    """A time in seconds since the epoch."""


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
