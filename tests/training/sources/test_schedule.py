"""Whatever the speed of groups, a step takes the first that are complete, and none is ever too old or left behind."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.training.sources.stream import choose


@dataclass(eq=False)
class Group:
    ends: float
    deadline: int
    completed: int | None = None


def simulate(durations: list[float], per_step: int, staleness: int) -> tuple[list[list[Group]], list[Group], float]:
    """(groups of each step, all groups, end) of a run whose updates take no time."""
    waiting, groups, steps, clock = iter(durations), list[Group](), list[list[Group]](), 0.0
    everything: list[Group] = []
    while True:
        while len(groups) < (staleness + 1) * per_step and (duration := next(waiting, None)) is not None:
            groups.append(Group(clock + duration, len(steps) + staleness))
            everything.append(groups[-1])
        if not groups:
            return steps, everything, clock
        while (chosen := choose(groups, min(per_step, len(groups)), len(steps))) is None:
            running = [group for group in groups if group.completed is None]
            first = min(running, key=lambda group: group.ends)
            clock, first.completed = max(clock, first.ends), len(everything) * 1000 - len(running)
        for group in chosen:
            groups.remove(group)
        steps.append(chosen)


durations = st.lists(st.floats(0.1, 20), min_size=1, max_size=60)


@given(durations, st.integers(1, 4), st.integers(0, 4))
def test_every_group_is_taken_once_and_in_time(durations: list[float], per_step: int, staleness: int) -> None:
    steps, everything, _ = simulate(durations, per_step, staleness)
    taken = [group for step in steps for group in step]
    assert len(taken) == len(set(map(id, taken))) == len(everything) == len(durations)
    assert all(group.deadline - staleness <= step <= group.deadline for step, gs in enumerate(steps) for group in gs)


@given(durations, st.integers(1, 4), st.integers(1, 4))
def test_more_staleness_never_waits_longer_than_none(durations: list[float], per_step: int, staleness: int) -> None:
    assert simulate(durations, per_step, staleness)[2] <= simulate(durations, per_step, 0)[2] + 1e-9


@given(st.permutations(range(6)), st.integers(0, 6))
def test_the_first_to_complete_are_taken_where_no_deadline_demands_others(order: list[int], complete: int) -> None:
    groups = [Group(0, deadline=10) for _ in order]
    for place, index in enumerate(order[:complete]):
        groups[index].completed = place
    expected = [groups[index] for index in order[:2]] if complete >= 2 else None
    assert choose(groups, 2, 5) == expected


def test_a_group_that_the_next_update_could_not_use_is_waited_for() -> None:
    old, young = Group(0, deadline=3), Group(0, deadline=4, completed=1)
    assert choose([old, young], 1, 2) == [young]
    assert choose([old, young], 1, 3) is None
    old.completed = 2
    assert choose([old, young], 1, 3) == [old]


def test_a_group_whose_deadline_has_passed_holds_nobody_up() -> None:
    late, young = Group(0, deadline=1), Group(0, deadline=4, completed=1)
    assert choose([late, young], 1, 2) == [young]
