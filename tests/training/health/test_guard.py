"""What a reward guard measures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.training.health.signs import signs_of
from agentlightning.training.health.step_record import LEAST_PAIRS, LEAST_REWARDS, StepRecord, discordance, distance

rewards = st.lists(st.floats(0, 1), min_size=LEAST_REWARDS, max_size=40)


@given(rewards, rewards)
def test_the_distance_of_two_batches_is_a_share_and_symmetric(first: list[float], second: list[float]) -> None:
    found = distance(first, second)
    assert found is not None
    assert 0 <= found <= 1
    assert found == distance(second, first)


@given(rewards)
def test_a_batch_is_at_no_distance_from_itself(values: list[float]) -> None:
    assert distance(values, list(reversed(values))) == 0


def test_batches_without_common_values_are_as_far_apart_as_can_be() -> None:
    assert distance([0.0] * 8, [1.0] * 8) == 1.0
    assert distance([0.0] * 4 + [1.0] * 4, [1.0] * 8) == 0.5


def test_few_rewards_have_no_distribution() -> None:
    assert distance([0.0] * 7, [1.0] * 100) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12, unique=True))
def test_a_score_and_its_negative_disagree_about_every_pair(values: list[float]) -> None:
    pairs = len(values) * (len(values) - 1) // 2
    expected = None if pairs < LEAST_PAIRS else 1.0
    opposite = discordance([[(value, -value) for value in values]])
    assert opposite == pytest.approx(expected) or any((a - b) ** 2 == 0 for a in values for b in values if a != b), (
        "differences so small that their product is zero"
    )


def test_ties_are_no_disagreement_and_groups_are_not_mixed() -> None:
    equal = [[(0.0, 1.0)] * 6, [(1.0, 0.0)] * 6]
    assert discordance(equal) is None, "all pairs within a group are ties"
    half = [[(0.0, 0.0), (1.0, 1.0)], [(0.0, 1.0), (1.0, 0.0)]] * 5
    assert discordance(half) == 0.5


@pytest.mark.parametrize(
    ("metric", "sign"),
    [
        ("guard_out_of_range", "reward_out_of_range"),
        ("guard_missing", "rewards_missing"),
        ("guard_drift", "reward_drift"),
        ("guard_disagreement", "reward_disagreement"),
    ],
)
def test_what_a_guard_found_in_the_last_step_is_a_sign(metric: str, sign: str) -> None:
    before, after = StepRecord.read({"step": 1, metric: 0.5}), StepRecord.read({"step": 2})
    assert [each.name for each in signs_of([before])] == [sign]
    assert signs_of([before, after]) == []
