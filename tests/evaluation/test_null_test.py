"""The A/A test says what chance makes, and which gain would be seen beyond it."""

from __future__ import annotations

import math
import random

import pytest

from agentlightning.errors import ConfigError
from agentlightning.evaluation.evaluation import Evaluation


def noisy(rng: random.Random, tasks: int, repeats: int, gain: float = 0.0) -> Evaluation:
    return Evaluation.of_rollouts(
        [tuple(float(rng.random() < 0.4 + gain) for _ in range(repeats)) for _ in range(tasks)]
    )


def test_chance_exceeds_the_noise_in_about_5_percent() -> None:
    rng = random.Random(0)
    found = [noisy(rng, 100, 2).null_test() for _ in range(300)]
    assert 0.02 < sum(abs(each.difference) > each.noise for each in found) / 300 < 0.08
    assert found[0].noise == pytest.approx(1.96 * math.sqrt(2 * 0.4 * 0.6 / 100), rel=0.3)


def test_the_smallest_gain_is_shown_in_about_80_percent() -> None:
    rng = random.Random(0)
    gain = sum(noisy(rng, 100, 2).null_test().smallest_gain for _ in range(50)) / 50
    shown = [noisy(rng, 100, 1, gain).beats(noisy(rng, 100, 1)) for _ in range(200)]
    assert 0.68 < sum(shown) / 200 < 0.92


def test_an_agent_without_noise_still_needs_six_tasks_for_a_gain() -> None:
    found = Evaluation.of_rollouts([(1.0, 1.0), (0.0, 0.0)] * 10).null_test()
    assert (found.difference, found.p_value, found.noise) == (0.0, 1.0, 0.0)
    assert found.smallest_gain == pytest.approx(6 / 20)
    assert "no noise to see" in str(found)


def test_too_few_tasks_can_show_nothing() -> None:
    found = Evaluation.of_rollouts([(1.0, 0.0)] * 5).null_test()
    assert math.isinf(found.smallest_gain)
    assert "use at least 6" in str(found)


def test_one_rollout_each_is_refused() -> None:
    with pytest.raises(ConfigError, match="use repeats=2 or more"):
        Evaluation((1.0, 0.0)).null_test()


def test_rollouts_without_a_reward_count_as_the_evaluation_says() -> None:
    rollouts = [(1.0, None)] * 10
    assert Evaluation.of_rollouts(rollouts).null_test().difference == -1.0
    assert Evaluation.of_rollouts(rollouts, failed_as=1.0).null_test().difference == 0.0
    assert Evaluation.of_rollouts([*rollouts, (1.0, 0.5)], failed_as="exclude").null_test().tasks == 1
