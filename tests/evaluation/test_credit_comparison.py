"""Credit rules compared on recorded groups: their order is that of a world whose order is known."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from agentlightning.credit import CreditRule
from agentlightning.credit.base import Credit
from agentlightning.errors import DatasetError
from agentlightning.evaluation.credit_comparison import CreditComparison, compare_credit
from agentlightning.trajectory import Trajectory, Transition

GO, STAY = 1, 2


def call(rollout: str, place: int, state: int, action: int, agent: str | None = None) -> Transition:
    return Transition(
        rollout_id=rollout,
        attempt_id=rollout,
        span_id=f"{rollout}-{place}",
        sequence_id=place,
        prompt_token_ids=(10 + place, 50 + state),
        response_token_ids=(action,),
        logprobs=(math.log(0.5),),
        agent=agent,
    )


def corridor(groups: int, seed: int = 0, size: int = 8, length: int = 6, noise: float = 0.0) -> list[list[Trajectory]]:
    """Only the step in the middle decides, and the states after it show how; all others are noise."""
    rng = random.Random(seed)
    found: list[list[Trajectory]] = []
    for group in range(groups):
        rollouts: list[Trajectory] = []
        for member in range(size):
            name, state = f"{group}-{member}", 0
            calls: list[Transition] = []
            for place in range(length):
                action = rng.choice((GO, STAY))
                calls.append(call(name, place, state, action))
                if place == length // 2:
                    state = action
            reward = float(state == GO) if rng.random() >= noise else float(rng.random() < 0.5)
            rollouts.append(Trajectory(name, name, tuple(calls), reward, str(group)))
        found.append(rollouts)
    return found


def by_rule(found: CreditComparison) -> dict[str, Any]:
    return {each.rule: each for each in found.signals}


class OnlyNoise(CreditRule):
    """Advantages that have nothing to do with what happened."""

    type: str = "only_noise"

    def advantages(self, group: Any) -> Any:
        rng = random.Random(group[0].rollout_id)
        return [tuple(rng.gauss(0, 1) for _ in each.transitions) for each in group]


class OnlyDecisive(CreditRule):
    """The true credit of the corridor."""

    type: str = "only_decisive"

    def advantages(self, group: Any) -> Any:
        middle = len(group[0].transitions) // 2
        return [tuple(each.reward - 0.5 if i == middle else 0.0 for i in range(6)) for each in group]


class NotHere(CreditRule):
    type: str = "not_here"

    def assign(self, groups: Any, context: Any) -> Any:
        context.of_call("values", groups[0][0].transitions[0])
        return [Credit([]) for _ in groups]


def test_a_rule_that_finds_the_decisive_step_has_more_signal_than_uniform_credit_and_noise_has_none() -> None:
    found = by_rule(compare_credit(corridor(60), ["group_relative", OnlyDecisive(), OnlyNoise()]))
    assert found["only_decisive"].interval[0] > found["group_relative"].interval[1]
    assert found["group_relative"].interval[0] > found["only_noise"].interval[1]
    assert found["only_noise"].interval[0] <= 0 <= found["only_noise"].interval[1]
    assert found["only_noise"].rollouts_interval[1] == math.inf


def test_the_best_rule_comes_first() -> None:
    found = compare_credit(corridor(40), [OnlyNoise(), "group_relative", OnlyDecisive()])
    assert [each.rule for each in found.signals] == ["only_decisive", "group_relative", "only_noise"]
    assert (found.groups, found.rollouts) == (40, 320)


def test_state_values_and_graph_distances_are_found_to_be_better_than_uniform_and_gigpo() -> None:
    rules = ["group_relative", "group_step", "state_value", "graph"]
    found = by_rule(compare_credit(corridor(48), rules))
    assert min(found["state_value"].snr, found["graph"].snr) > 2 * found["group_relative"].snr
    assert found["group_step"].snr < found["state_value"].snr


def test_rollouts_to_signal_to_noise_one_agree_with_the_gradient_of_a_softmax() -> None:
    """By hand: with one decision of two actions and the true credit, g = +-1/2 on the two weights of one state in each
    rollout, whatever the action."""
    groups = [
        [
            Trajectory(name, name, (call(name, 0, 0, action),), float(action == GO), str(group))
            for member in range(8)
            for name, action in [(f"{group}-{member}", random.Random(group * 8 + member).choice((GO, STAY)))]
        ]
        for group in range(64)
    ]

    class Exact(CreditRule):
        type: str = "exact"

        def advantages(self, group: Any) -> Any:
            return [(each.reward - 0.5,) for each in group]

    (signal,) = compare_credit(groups, [Exact()]).signals
    assert signal.snr > 100


def test_a_rule_that_rewards_the_wrong_action_disagrees_with_the_return() -> None:
    class Upside(OnlyDecisive):
        type: str = "upside"

        def advantages(self, group: Any) -> Any:
            return [tuple(-a for a in own) for own in super().advantages(group)]

    found = by_rule(compare_credit(corridor(60), [OnlyDecisive(), Upside()]))
    assert found["upside"].snr == pytest.approx(found["only_decisive"].snr)
    assert found["only_decisive"].agreement > 0.5 > -0.5 > found["upside"].agreement


def test_more_groups_narrow_the_interval() -> None:
    few, many = (compare_credit(corridor(n), ["group_relative"]).signals[0].interval for n in (12, 96))
    assert many[1] - many[0] < few[1] - few[0]


def test_the_same_data_give_the_same_figures() -> None:
    one, other = (compare_credit(corridor(12), ["group_relative", "state_value"]) for _ in range(2))
    assert one == other


def test_a_constant_advantage_is_no_signal() -> None:
    class Constant(CreditRule):
        type: str = "constant"

        def advantages(self, group: Any) -> Any:
            return [(1.0,) * len(each.transitions) for each in group]

    (signal,) = compare_credit(corridor(60), [Constant()]).signals
    assert signal.interval[0] <= 0.01


def test_rules_that_cannot_use_the_data_are_listed_with_the_reason() -> None:
    found = compare_credit(corridor(8), ["group_relative", NotHere(), "no_such_rule"])
    assert [each.rule for each in found.signals] == ["group_relative"]
    assert "values" in found.unusable["not_here"]
    assert "no credit rule" in found.unusable["no_such_rule"]


def test_groups_without_spread_are_named_as_the_reason() -> None:
    groups = [[Trajectory(t.rollout_id, "a", t.transitions, 1.0, t.group) for t in each] for each in corridor(8)]
    found = compare_credit(groups, ["group_relative"])
    assert not found.signals
    assert "same reward" in found.unusable["group_relative"]


def test_only_the_agent_that_is_asked_for_counts() -> None:
    groups = corridor(8)
    with pytest.raises(DatasetError, match="nobody"):
        compare_credit(groups, ["group_relative"], target_agent="nobody")


def test_rollouts_without_a_reward_and_groups_of_one_are_left_out_and_counted() -> None:
    groups = corridor(8)
    groups[0][0] = Trajectory("0-0", "0-0", groups[0][0].transitions, None, "0")
    groups.append([groups[1][0]])
    found = compare_credit(groups, ["group_relative"], left_out={"malformed_spans": 2})
    assert found.left_out == {"malformed_spans": 2, "missing_reward": 1, "groups_of_one": 1}
    assert found.groups == 8


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [each[:1] for each in corridor(8)],
        [[Trajectory(t.rollout_id, "a", t.transitions, None, t.group) for t in each] for each in corridor(8)],
    ],
    ids=["empty", "groups of one", "no rewards"],
)
def test_too_little_data_is_refused_in_words(groups: list[list[Trajectory]]) -> None:
    with pytest.raises(DatasetError, match="comparing credit rules needs at least 4"):
        compare_credit(groups, ["group_relative"])


def test_named_dimensions_need_weights() -> None:
    groups = [
        [Trajectory(t.rollout_id, "a", t.transitions, {"right": float(t.reward or 0)}, t.group) for t in each]  # type: ignore[arg-type]
        for each in corridor(8)
    ]
    with pytest.raises(DatasetError, match="64 bad reward"):
        compare_credit(groups, ["group_relative"])
    weighed = compare_credit(
        [[replace(t, weights={"right": 1.0}) for t in each] for each in groups], ["group_relative"]
    )
    assert weighed.signals == compare_credit(corridor(8), ["group_relative"]).signals


def test_infinite_numbers_are_null_in_json() -> None:
    found = compare_credit(corridor(8), [OnlyNoise()]).as_json()
    assert found["rules"][0]["rollouts_interval"][1] is None
