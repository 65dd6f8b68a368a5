"""Rewards of a group become one advantage for each call."""

from __future__ import annotations

import statistics
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.credit import CreditRule, base
from agentlightning.credit.base import CreditContext, credit_rule, register
from agentlightning.credit.rules import GroupRelativeCredit, ReinforceCredit
from agentlightning.errors import ConfigError, RewardError
from agentlightning.trajectory import Trajectory, Transition


def group(*rewards: float | dict[str, float] | None, calls: int = 1, step: float | None = None) -> list[Trajectory]:
    return [
        Trajectory(
            f"ro-{i}",
            "at",
            tuple(Transition(f"ro-{i}", "at", f"s{c}", c, (1,), (2,), (-1.0,), reward=step) for c in range(calls)),
            reward,
        )
        for i, reward in enumerate(rewards)
    ]


def test_every_call_of_a_rollout_gets_its_distance_from_the_mean_in_standard_deviations() -> None:
    assert GroupRelativeCredit().advantages(group(0.0, 1.0, calls=2)) == [(-1.0, -1.0), (1.0, 1.0)]
    assert GroupRelativeCredit(normalize_std=False).advantages(group(0.0, 1.0)) == [(-0.5,), (0.5,)]


@given(st.lists(st.integers(-100, 100).map(float), min_size=2, max_size=9))
def test_uniform_advantages_are_standardised(rewards: list[float]) -> None:
    found = GroupRelativeCredit().advantages(group(*rewards))
    if len(set(rewards)) == 1:
        assert found is None
    else:
        assert found is not None
        flat = [advantage for (advantage,) in found]
        assert statistics.fmean(flat) == pytest.approx(0.0, abs=1e-9)
        assert statistics.pstdev(flat) == pytest.approx(1.0)


def test_rounding_is_no_spread_at_any_size_of_rewards() -> None:
    assert GroupRelativeCredit().advantages(group(0.1 + 0.2, 0.3)) is None
    assert GroupRelativeCredit().advantages(group(1e12, 1e12 + 1)) is None


def test_a_group_of_one_has_no_baseline_and_the_message_says_the_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        GroupRelativeCredit().check_group_size(1)
    assert str(caught.value) == 'group_size=1 leaves no baseline; use at least 2 or credit="reinforce"'
    GroupRelativeCredit().check_group_size(2)
    credit_rule("reinforce").check_group_size(1)


def test_reinforce_learns_from_one_rollout() -> None:
    assert ReinforceCredit(baseline=0.25).advantages(group(1.0, calls=2)) == [(0.75, 0.75)]
    assert ReinforceCredit().advantages(group(0.0, 0.0)) == [(0.0,), (0.0,)], "below the mean of a batch, maybe"


@pytest.mark.parametrize("rule", [GroupRelativeCredit(), ReinforceCredit()])
def test_intermediate_rewards_are_refused_unless_they_are_to_be_ignored(rule: CreditRule) -> None:
    with pytest.raises(RewardError, match=rf'call s0 of rollout ro-0.*rule "{rule.type}".*intermediate="ignore"'):
        rule.assign([group(0.0, 1.0, step=0.5)], CreditContext())
    assert credit_rule({"type": rule.type, "intermediate": "ignore"}).assign(
        [group(0.0, 1.0, step=0.5)], CreditContext()
    )[0]


def test_named_dimensions_are_refused_by_rules() -> None:
    with pytest.raises(RewardError, match="ro-1 has reward"):
        GroupRelativeCredit().advantages(group(0.0, {"a": 1.0}))


def test_rules_are_found_by_name_or_configuration() -> None:
    assert credit_rule("uniform") == GroupRelativeCredit()
    assert credit_rule({"type": "uniform", "normalize_std": False}) == GroupRelativeCredit(normalize_std=False)
    assert credit_rule(ReinforceCredit()) == ReinforceCredit()
    with pytest.raises(
        ConfigError, match=r"no credit rule 'unifrom'; did you mean 'uniform'\? Known: discounted, .*grpo, "
    ):
        credit_rule("unifrom")
    with pytest.raises(ConfigError, match="normalise"):
        credit_rule({"type": "uniform", "normalise": False})
    with pytest.raises(ConfigError, match=r"without a type name no credit rule\. Known: "):
        credit_rule({"normalize_std": False})


def test_a_rule_of_ones_own_is_registered_under_its_type_and_its_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.RULES, "aliases", dict(base.RULES.aliases))
    monkeypatch.setitem(base.RULES, "first_call", None)

    @register
    class FirstCallCredit(CreditRule):
        type: str = "first_call"
        aliases: ClassVar[tuple[str, ...]] = ("opening",)

    assert credit_rule("first_call") == credit_rule("opening") == FirstCallCredit()
    with pytest.raises(NotImplementedError, match="FirstCallCredit defines neither `advantages` nor `assign`"):
        FirstCallCredit().assign([group(0.0, 1.0)], CreditContext())
