"""What `agl run` and `agl eval` advise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.cli.evaluate import evaluation_advice
from agentlightning.cli.run import run_advice

WHOLE: dict[str, Any] = {"error": None, "redirected": True, "calls": 2, "failed_calls": 0, "reward": 1.0}


@pytest.mark.parametrize(
    ("lacks", "advice"),
    [
        ({}, []),
        ({"redirected": False, "calls": 0}, ["--model or --routes"]),
        ({"calls": 0}, ["base_url="]),
        ({"failed_calls": 1}, ["1 of 2 model calls failed"]),
        ({"reward": None}, ["--reward"]),
        ({"calls": 0, "reward": None}, ["base_url=", "--reward"]),
        ({"error": "python3 exited with status 3", "reward": None}, ["status 3; run the command by itself"]),
        ({"error": "status 1", "reward": None, "calls": 0}, ["base_url=", "status 1; run the command by itself"]),
        ({"error": "status 1", "reward": None, "failed_calls": 1}, ["1 of 2 model calls", "status 1; run the"]),
    ],
)
def test_a_recorded_rollout_is_told_what_it_lacks(lacks: dict[str, Any], advice: list[str]) -> None:
    found = run_advice({**WHOLE, **lacks})
    assert len(found) == len(advice)
    assert all(part in text for part, text in zip(advice, found, strict=True))


def test_an_evaluation_that_training_can_start_from_needs_no_advice() -> None:
    assert evaluation_advice(agl.Evaluation((0.0, 1.0, 0.5))) == []


def test_equal_rewards_are_named_with_the_way_out() -> None:
    (none,) = evaluation_advice(agl.Evaluation((0.0, 0.0, 0.0)))
    (full,) = evaluation_advice(agl.Evaluation((1.0, 1.0, 1.0)))
    assert "all 3 rewards are 0" in none
    assert "agl sft" in none
    assert "harder tasks" in full


def test_tasks_without_a_reward_are_counted() -> None:
    assert "1 of 3 tasks" in evaluation_advice(agl.Evaluation((1.0, None, 0.0)))[0]


def test_a_comparison_that_shows_nothing_says_so() -> None:
    before = agl.Evaluation((0.0, 1.0) * 6)
    shown = agl.Evaluation((1.0,) * 12)
    assert "no difference is shown" in evaluation_advice(_compared(before, before))[0]
    assert evaluation_advice(_compared(shown, agl.Evaluation((0.0,) * 12))) == []


def _compared(after: agl.Evaluation, before: agl.Evaluation) -> agl.Evaluation:
    return replace(after, comparison=after.compare(before))
