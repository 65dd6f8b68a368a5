"""`agl store list`: rollouts as a table, by status and mode, newest first or by reward or time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from rich.console import Console

from agentlightning.trajectory import RewardWeights
from agentlightning.util.printable import printable

if TYPE_CHECKING:
    from agentlightning.dashboard.data.summary import RolloutSummary
    from agentlightning.store.base import LightningStoreBase

Order = Literal["newest", "reward", "seconds"]
MOST_READ: Final = 5000
"""Rollouts that are read to sort them by what their spans say, the newest."""


@dataclass(frozen=True, slots=True)
class RolloutTable:
    """Rows, and what they were chosen from."""

    rows: list[RolloutSummary]
    read: int
    matching: int


async def rollout_table(
    store: LightningStoreBase,
    statuses: Sequence[str] | None,
    modes: Sequence[str] | None,
    order: Order,
    limit: int,
    weights: RewardWeights = None,
) -> RolloutTable:
    """The table. To sort by reward or time, the newest `MOST_READ` are read."""
    from agentlightning.dashboard.data.summary import Summaries

    wanted: dict[str, Any] = {"status_in": statuses, "mode_in": modes}
    matching = await store.count_rollouts(**wanted)
    read = limit if order == "newest" else MOST_READ
    found = await Summaries(store, weights).of(await store.query_rollouts(**wanted, newest_first=True, limit=read))
    if order == "reward":
        found.sort(key=lambda row: (row.reward_number is None, row.reward_number or 0.0))
    elif order == "seconds":
        found.sort(key=lambda row: -(row.seconds or 0.0))
    return RolloutTable(found[:limit], len(found), matching)


def print_rollouts(table: RolloutTable, console: Console) -> None:
    """Print a line for each, and how many there are besides."""
    for row in table.rows:
        reward = "-" if row.reward_number is None else f"{row.reward_number:.3f}"
        if isinstance(row.reward, dict) and row.reward_number is None:
            reward = " ".join(f"{name}={value:g}" for name, value in row.reward.items())
        seconds = "" if row.seconds is None else f"{row.seconds:.1f} s"
        failure = "" if row.failure is None else f"  {row.failure_kind or ''}: {row.failure.strip().splitlines()[-1]}"
        text = f"{row.rollout_id}  {row.status:<9} {reward:>7}  {row.calls:>2} calls {seconds:>8}  {row.task}{failure}"
        console.print(printable(text)[:240])
    console.print(f"{len(table.rows)} of {table.matching:,} rollouts")
    if table.read < table.matching and len(table.rows) < table.read:
        console.print(f"sorted among the newest {table.read:,} only")
