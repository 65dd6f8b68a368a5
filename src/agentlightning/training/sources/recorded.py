"""Recorded rollouts: those that finished earlier, from the agent's own use for example. Those of the same task form a
group, in the order of their first rollout."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from agentlightning.rollouts import Rollout, RolloutMode
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import task_key

PAGE = 1000
"""Rollouts in one request to the store."""


async def find_groups(
    store: LightningStoreBase, modes: Sequence[RolloutMode] | None = None
) -> list[tuple[str, list[str]]]:
    """(group, rollout ids) of the succeeded rollouts of some modes: by the `group` in their metadata, else by task."""
    groups: dict[str, list[str]] = {}
    async for rollout in _succeeded(store, modes):
        group = rollout.metadata.get("group")
        groups.setdefault(group if isinstance(group, str) else task_key(rollout.input), []).append(rollout.rollout_id)
    return list(groups.items())


async def _succeeded(store: LightningStoreBase, modes: Sequence[RolloutMode] | None) -> AsyncIterator[Rollout]:
    """In the order of their creation."""
    after: str | None = None
    while page := await store.query_rollouts(status_in=["succeeded"], mode_in=modes, after=after, limit=PAGE):
        for rollout in page:
            yield rollout
        after = page[-1].rollout_id
