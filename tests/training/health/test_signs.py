"""Each sign of trouble: the steps that show it, and those that look alike and do not."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.training.health.signs import Sign, comparable, sign_history, signs_of
from agentlightning.training.health.step_record import StepRecord


def steps(count: int = 24, **metrics: Any) -> list[StepRecord]:
    """Steps of a healthy run; a metric is a number, a list, or a function of the step's share of the run (0 to 1)."""
    noise = random.Random(0)
    usual = {
        "reward": lambda x: 0.4 + 0.2 * x,
        "reward_std": 0.3,
        "reward_lowest": 0.0,
        "reward_highest": 1.0,
        "entropy": lambda x: 1.0 - 0.4 * x,
        "grad_norm": 1.0,
        "approx_kl": 0.001,
        "clip_fraction": 0.01,
        "optimizer_steps": 4,
        "groups": 8,
        "groups_trained": 8,
        "rollouts_trained": 64,
        "response_tokens": 100.0,
        "truncated": 0.02,
        "repeated_ngrams": 0.1,
        "common_output": 0.1,
    }
    lines: list[dict[str, Any]] = [{"step": i + 1} for i in range(count)]
    for name, value in {**usual, **metrics}.items():
        for i, line in enumerate(lines):
            number = value[i] if isinstance(value, list) else value(i / (count - 1)) if callable(value) else value
            scale = 1 + noise.uniform(-0.02, 0.02) if isinstance(number, float) and number not in (0.0, 1.0) else 1
            line[name] = None if number is None else number * scale
    return [StepRecord.read(line) for line in lines]


def found(records: list[StepRecord]) -> dict[str, str]:
    return {sign.name: str(sign) for sign in signs_of(records)}


def late(before: float, after: float, at: float = 0.6) -> Any:
    return lambda x: before if x < at else after


def test_a_healthy_run_shows_no_sign_at_any_step():
    assert sign_history(steps(60)) == []
    improving = steps(
        60, reward=lambda x: 0.3 + 0.65 * x, entropy=lambda x: 1.0 - 0.95 * x, reward_std=lambda x: 0.3 - 0.29 * x
    )
    assert sign_history(improving) == [], "less spread and entropy are what learning looks like"


@pytest.mark.parametrize(
    ("name", "metrics", "text"),
    [
        ("gradient_spikes", {"grad_norm": [1.0] * 20 + [9.0, 1.0, 12.0, 1.0]}, "spiked 2 times in 10 steps, up to 12"),
        ("large_updates", {"approx_kl": 0.3}, "approx_kl"),
        ("far_from_reference", {"ref_kl": late(0.01, 2.0)}, "ref_kl"),
        ("much_clipping", {"clip_fraction": late(0.1, 0.5)}, "of the tokens are clipped"),
        ("sampler_mismatch", {"mismatch_kl": 0.05}, "the same weights"),
        ("sampler_mismatch", {"approx_kl": 0.05, "optimizer_steps": 1}, "the same weights"),
        ("stale_rollouts", {"staleness": 12.0}, "updates old"),
        ("entropy_gone", {"entropy": late(1.0, 0.02), "reward": 0.5}, "the entropy fell from 1 to 0.0"),
        ("truncated_outputs", {"truncated": late(0.0, 0.4)}, "ended at the limit of tokens"),
        ("output_length", {"response_tokens": late(100.0, 400.0), "reward": 0.5}, "reward is no higher"),
        ("output_length", {"response_tokens": late(100.0, 20.0), "reward": 0.5}, "giving up early"),
        ("repetitive_outputs", {"repeated_ngrams": late(0.1, 0.7)}, "of the 4-grams"),
        ("same_output_everywhere", {"common_output": late(0.2, 0.9), "reward": late(0.6, 0.3)}, "no longer reads"),
        ("same_output_everywhere", {"common_output": late(0.2, 0.9), "reward": late(0.6, 0.9)}, "ignores the task"),
        ("reward_outliers", {"reward_highest": [1.0] * 23 + [50.0]}, "a reward of size (49|5)"),
        ("rollouts_left_out", {"failed": 10, "rejected_missing_reward": 20}, "60 missing reward, 30 failed"),
        (
            "identical_outputs",
            {"groups_repeated": 6, "calls_seeded": 9},
            "18 of the last 24 groups.*27 calls had a seed",
        ),
        (
            "echo_trap",
            {"grad_norm": late(1.0, 3.0), "reward_std": late(0.3, 0.15), "reward": 0.5},
            "begins to collapse",
        ),
        ("echo_trap", {"grad_norm": late(1.0, 3.0), "entropy": late(1.0, 0.4), "reward": 0.5}, "entropy from 1 to 0.4"),
        ("not_finite", {"entropy": [1.0] * 23 + [float("nan")]}, "entropy"),
        ("updates_skipped", {"skipped_steps": 1}, "not finite"),
    ],
)
def test_a_sign_is_found_with_its_numbers_and_what_to_try(name, metrics, text):
    signs = found(steps(**metrics))
    assert name in signs
    assert re.search(text, signs[name]), signs[name]
    what, _, advice = signs[name].rpartition(". ")
    assert what
    assert advice, "each says what to try"


@pytest.mark.parametrize(
    "metrics",
    [
        {"grad_norm": [1.0] * 20 + [9.0, 1.0, 1.0, 1.0]},
        {"approx_kl": 0.3, "staleness": 3.0},
        {"mismatch_kl": 0.05, "staleness": 1.0},
        {"entropy": late(1.0, 0.02), "reward": late(0.5, 0.97)},
        {"response_tokens": late(100.0, 400.0), "reward": late(0.3, 0.8)},
        {"repeated_ngrams": 0.6},
        {"common_output": 0.9},
        {"grad_norm": late(1.0, 3.0), "reward_std": late(0.3, 0.15), "reward": late(0.5, 0.97)},
        {"grad_norm": late(1.0, 3.0)},
        {"failed": 3},
    ],
)
def test_what_looks_alike_is_no_sign(metrics):
    """One odd batch, old rollouts, a solved task, growth that pays, a task that has always been like that."""
    assert found(steps(**metrics)) == {}


# -- groups without spread: why ----------------------------------------------------------------------------------------

FLAT = {"groups_without_spread": 8, "groups_trained": 0}


def one_reward(reward: Any) -> dict[str, Any]:
    """Steps in each of which all rollouts have one reward."""
    return dict.fromkeys(("reward", "reward_lowest", "reward_highest"), reward)


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"groups_repeated": 8}, "caches answers"),
        ({"groups_certain": 8}, "almost certain"),
        ({"groups_failed": 8, "reward": 0.02}, "all rollouts failed.*easier tasks"),
        ({"groups_solved": 8, "reward": 0.98}, "all rollouts succeeded.*harder tasks"),
        (
            {"groups_constant": 8, "reward": 0.0, "reward_highest": 0.0},
            "since the first step has the reward 0.*agl store show",
        ),
        ({"groups_constant": 8, **one_reward(late(0.5, 1.0))}, "has the reward 1.*harder tasks"),
        ({"groups_constant": 8, **one_reward(late(0.5, 0.0))}, "has the reward 0.*easier tasks"),
        ({}, "Where all fail"),
    ],
)
def test_groups_without_spread_say_why(metrics, text):
    assert re.search(text, found(steps(**FLAT, **metrics))["rewards_without_spread"])


IGNORES = [
    {"groups_failed": 4, "groups_solved": 4},
    {"groups_failed": 6, "groups_solved": 2, "reward": 0.25},
    {"groups_constant": 3, "groups_failed": 3, "groups_solved": 2},
    {"groups_constant": 8, "reward": lambda x: round(40 * x) % 2},
]


@pytest.mark.parametrize("metrics", IGNORES)
def test_a_reward_that_depends_on_the_task_alone_is_said_to_with_its_true_values(metrics):
    limits = {"reward_lowest": 0.0, "reward_highest": 1.0}
    text = found(steps(**FLAT, **limits, **metrics))["rewards_without_spread"]
    assert "the same reward, from 0 to 1 between tasks" in text
    assert "depends on what the model answers" in text
    assert "easier tasks" not in text
    learns = found([*steps(groups_without_spread=4, **limits), *steps(**FLAT, **limits, **metrics)])
    assert "depends on what" not in learns.get("rewards_without_spread", ""), "once rewards differed within groups"


# -- rewards gained in the wrong way -----------------------------------------------------------------------------------


def hacks(**metrics: Any) -> str:
    return found(steps(**metrics)).get("reward_hacking", "")


def test_a_training_reward_that_rises_while_validation_falls_is_an_exploit():
    scores = [0.5 if i % 4 == 3 else None for i in range(24)]
    fallen = [score and (0.5 if i < 8 else 0.25) for i, score in enumerate(scores)]
    assert "validation reward fell from 0.5" in hacks(validation_greedy=fallen)
    assert not hacks(validation_greedy=scores)
    assert not hacks(validation_greedy=fallen, reward=0.5), "both are bad, and nothing is exploited"
    once = [*[None] * 7, 0.5, *[None] * 15, 0.25]
    assert not hacks(validation_greedy=once), "one low validation is noise"


def test_a_second_dimension_that_falls_while_the_reward_rises_is_an_exploit():
    rising = {"reward_of_format": lambda x: 0.2 + 0.7 * x}
    assert "'right' fell from" in hacks(**rising, reward_of_right=lambda x: 0.6 - 0.4 * x)
    assert not hacks(**rising, reward_of_right=lambda x: 0.6 + 0.1 * x)


def test_intermediate_rewards_that_rise_while_the_final_reward_falls_are_an_exploit():
    text = hacks(intermediate_reward=lambda x: 0.5 + 4 * x, reward=lambda x: 0.6 - 0.3 * x)
    assert "intermediate rewards rose" in text
    assert not hacks(intermediate_reward=lambda x: 0.5 + 4 * x)


# -- the history of a run ----------------------------------------------------------------------------------------------


def test_the_history_has_the_first_and_last_step_of_a_sign_and_how_often_it_was_seen():
    [history] = sign_history(steps(truncated=[0.0] * 10 + [0.5] * 6 + [0.0] * 8))
    assert (history.sign.name, history.since, history.until, history.count) == ("truncated_outputs", 12, 17, 6)


def test_steps_before_a_return_to_a_checkpoint_or_a_change_of_rewards_are_not_judged_with_later_ones():
    records = [StepRecord(step=i, revision=i // 8, rolled_back=int(i == 4)) for i in range(12)]
    assert [record.step for record in comparable(records)] == [8, 9, 10, 11]
    assert [record.step for record in comparable(records[:8])] == [5, 6, 7]
    assert [record.step for record in comparable(records[:5])] == [0, 1, 2, 3, 4]
    assert list(comparable([])) == []
    assert signs_of([]) == []


NUMBER = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.integers(-5, 10**6) | st.text(max_size=3)
LINE = st.dictionaries(
    st.sampled_from([*StepRecord.__struct_fields__, "reward_of_x", "validation_greedy", "rejected_stale"]), NUMBER
)


@settings(max_examples=60)
@given(st.lists(LINE, max_size=30))
def test_no_line_of_metrics_is_too_strange_to_be_judged(lines):
    for sign in signs_of([StepRecord.read(line) for line in lines]):
        assert isinstance(sign, Sign)
