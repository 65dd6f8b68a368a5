"""Each rule gives what its formula says, written out slowly in plain Python; the order of rollouts changes nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.credit.base import CreditContext, credit_rule
from agentlightning.errors import RewardError
from agentlightning.trajectory import Trajectory

# A rollout in the plain terms of the formulas: its final reward, and for each call its state and its step reward.
Plain = tuple[float, list[tuple[str, float | None]]]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def std(numbers: list[float]) -> float:
    return math.sqrt(sum((each - mean(numbers)) ** 2 for each in numbers) / len(numbers))


def relative(number: float, numbers: list[float]) -> float:
    return (number - mean(numbers)) / std(numbers) if std(numbers) > 1e-9 else 0.0


def to_go(rollout: Plain, t: int, gamma: float = 1.0) -> float:
    final, calls = rollout
    steps = [gamma ** (j - t) * (calls[j][1] or 0.0) for j in range(t, len(calls))]
    return sum(steps) + gamma ** (len(calls) - 1 - t) * final


def group_relative(group: list[Plain], i: int, t: int) -> float:
    return relative(group[i][0], [final for final, _ in group])


def leave_one_out(group: list[Plain], i: int, t: int) -> float:
    return group[i][0] - mean([group[j][0] for j in range(len(group)) if j != i])


def discounted(group: list[Plain], i: int, t: int) -> float:
    return relative(to_go(group[i], t, 0.95), [to_go(one, k, 0.95) for one in group for k in range(len(one[1]))])


def intermediate(group: list[Plain], i: int, t: int) -> float:
    every = [step for _, calls in group for _, step in calls if step is not None]
    later = [step for _, step in group[i][1][t:] if step is not None]
    return sum(relative(step, every) for step in later) + group_relative(group, i, t)


def group_step(group: list[Plain], i: int, t: int) -> float:
    state = group[i][1][t][0]
    alike = [to_go(one, k, 0.95) for one in group for k, (other, _) in enumerate(one[1]) if other == state]
    return relative(to_go(group[i], 0), [to_go(one, 0) for one in group]) + relative(to_go(group[i], t, 0.95), alike)


def graph(group: list[Plain], i: int, t: int) -> float:
    best = max(final for final, _ in group)
    edges: list[tuple[str, str]] = []
    own: dict[tuple[int, int], tuple[str, str]] = {}
    for n, (final, calls) in enumerate(group):
        names = [state for state, _ in calls] + ["GOAL" if final == best else f"end {n}"]
        for k in range(len(calls)):
            own[n, k] = names[k], names[k + 1]
            edges.append(own[n, k])
    distance = dict.fromkeys([name for edge in edges for name in edge], math.inf) | {"GOAL": 0.0}
    for _ in edges:  # Bellman and Ford
        for source, target in edges:
            distance[source] = min(distance[source], distance[target] + 1)
    worth = [10 * 0.1 ** distance[target] for source, target in edges if source == own[i, t][0]]
    return relative(10 * 0.1 ** distance[own[i, t][1]], worth)


def state_value(group: list[Plain], i: int, t: int) -> float:
    values: list[float] = []
    calls = group[i][1]
    for state, _ in calls:
        visits = []
        for one in group:
            places = [k for k, (other, _) in enumerate(one[1]) if other == state]
            if places:
                visits.append(to_go(one, places[0]))
        if len(visits) > 1:
            values.append(mean(visits))
        else:
            before = values[-1] if values else mean([to_go(one, 0) for one in group])
            values.append((visits[0] + before) / 2)
    values.append(group[i][0])
    return (calls[t][1] or 0.0) + values[t + 1] - values[t]


FORMULAS: dict[str, Callable[[list[Plain], int, int], float]] = {
    "group_relative": group_relative,
    "leave_one_out": leave_one_out,
    "discounted": discounted,
    "intermediate": intermediate,
    "group_step": group_step,
    "graph": graph,
    "state_value": state_value,
}
ONLY_FINAL = {"group_relative", "leave_one_out", "graph"}

step = st.one_of(st.none(), st.integers(-2, 2).map(float))
plain = st.tuples(
    st.integers(0, 2).map(float), st.lists(st.tuples(st.sampled_from("abcd"), step), min_size=1, max_size=5)
)
groups = st.lists(plain, min_size=2, max_size=6)


def trajectories(make: Any, group: list[Plain], *, steps: bool) -> list[Trajectory]:
    return [
        make(f"r{i}", final, [state for state, _ in calls], [step for _, step in calls] if steps else None)
        for i, (final, calls) in enumerate(group)
    ]


def assign(rule: Any, group: list[Trajectory]) -> list[list[float]] | None:
    (credit,) = credit_rule(rule).assign([group], CreditContext())
    return None if credit is None else [list(own) for own in credit.advantages]


@pytest.mark.parametrize("name", FORMULAS)
@given(group=groups)
def test_a_rule_gives_what_its_formula_says(make: Any, name: str, group: list[Plain]) -> None:
    steps = name not in ONLY_FINAL
    if not steps:
        group = [(final, [(state, None) for state, _ in calls]) for final, calls in group]
    expected = [[FORMULAS[name](group, i, t) for t in range(len(calls))] for i, (_, calls) in enumerate(group)]
    found = assign(name, trajectories(make, group, steps=steps))
    if found is None:
        assert all(abs(each) < 1e-9 for own in expected for each in own) or name == "graph"
        if name == "graph":
            assert len({final for final, _ in group}) == 1 or all(abs(each) < 1e-9 for own in expected for each in own)
    else:
        assert [pytest.approx(own, abs=1e-9, rel=1e-9) for own in expected] == found


@pytest.mark.parametrize("name", FORMULAS)
@given(group=groups, seed=st.integers(0, 9))
def test_the_order_of_rollouts_changes_nothing(make: Any, name: str, group: list[Plain], seed: int) -> None:
    made = trajectories(make, group, steps=name not in ONLY_FINAL)
    order = random.Random(seed).sample(range(len(made)), len(made))
    found, shuffled = assign(name, made), assign(name, [made[i] for i in order])
    if found is None or shuffled is None:
        assert found == shuffled
    else:
        for place, i in enumerate(order):
            assert shuffled[place] == pytest.approx(found[i], abs=1e-9)


@pytest.mark.parametrize("name", sorted(ONLY_FINAL - {"graph"}))
@given(group=groups, split=st.integers(1, 3))
def test_more_calls_of_a_rollout_do_not_change_the_credit_of_any(
    make: Any, name: str, group: list[Plain], split: int
) -> None:
    """What a rollout says in one call or in several is the same to rules that look at final rewards alone."""
    longer = [(final, calls * split if i == 0 else calls) for i, (final, calls) in enumerate(group)]
    found, more = (
        assign(name, trajectories(make, group, steps=False)),
        assign(name, trajectories(make, longer, steps=False)),
    )
    if found is None or more is None:
        assert found == more
    else:
        assert [set(own) for own in found] == [set(own) for own in more]


@pytest.mark.parametrize("name", [*sorted(ONLY_FINAL)])
def test_rules_without_use_for_intermediate_rewards_refuse_them_by_name(make: Any, name: str) -> None:
    group = [make("a", 1.0, "xy", [0.5, None]), make("b", 0.0, "xz")]
    with pytest.raises(RewardError, match=f'call a-0 of rollout a has an intermediate reward.*"{name}"'):
        assign(name, group)
    assert assign({"type": name, "intermediate": "ignore"}, group)


@pytest.mark.parametrize("name", sorted(set(FORMULAS) - ONLY_FINAL))
def test_rules_that_use_intermediate_rewards_need_them_as_one_number(make: Any, name: str) -> None:
    group = [make("a", 1.0, "xy", [{"right": 0.5}, None]), make("b", 0.0, "xz")]
    with pytest.raises(RewardError, match="call a-0 has reward"):
        assign(name, group)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("rloo", "leave_one_out"), ("loop", "leave_one_out"), ("gigpo", "group_step"), ("graphgpo", "graph")],
)
def test_rules_are_found_by_the_names_of_their_papers(alias: str, name: str) -> None:
    assert credit_rule(alias) == credit_rule(name)
