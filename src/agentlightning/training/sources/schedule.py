"""Which groups of rollouts a training step takes: the first that are complete, none too old, no slow one left behind.

Weights change once a step, and a group may be learned from at most `max_staleness` updates after it began. With so many
groups under way as that allows, some steps must take the groups that began first, or these would be too old later. A
step therefore takes, in order of completion, the earliest deadlines as far as the capacity of the coming steps demands
it (earliest deadline first: Liu and Layland 1973, section 7), and then whatever is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Scheduled(Protocol):
    """A group of rollouts that is under way or complete."""

    @property
    def completed(self) -> int | None:
        """Its place in the order of completion; None while a rollout of it runs."""
        ...

    @property
    def deadline(self) -> int:
        """The last update that may learn from it."""
        ...


G = TypeVar("G", bound=Scheduled)


def choose(groups: Sequence[G], count: int, update: int) -> list[G] | None:
    """The `count` groups that update number `update` learns from; None while the ones it needs still run.

    Of the groups whose deadline is `update + i` or earlier, the updates after this one can take `i * count`; this one
    takes the rest. A group whose deadline has passed binds no step: it is taken when it completes, or found too old.
    """
    complete = sorted(
        (group for group in groups if group.completed is not None), key=lambda group: group.completed or 0
    )
    if len(complete) < count:
        return None
    chosen: list[G] = []
    for deadline in sorted({group.deadline for group in groups if group.deadline >= update}):
        due = [group for group in groups if update <= group.deadline <= deadline]
        missing = min(count, len(due) - (deadline - update) * count) - len(chosen)
        if missing <= 0:
            continue
        ready = [group for group in complete if update <= group.deadline <= deadline and group not in chosen]
        if len(ready) < missing:
            return None
        chosen += ready[:missing]
    rest = [group for group in complete if group not in chosen]
    return chosen + rest[: count - len(chosen)]
