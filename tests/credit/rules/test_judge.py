"""Judged steps: scores from spans or a function; a judge that fails costs its rollout and nothing else."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest

from agentlightning.credit import rejections, training_samples
from agentlightning.credit.base import CreditContext, credit_rule
from agentlightning.credit.rules import JudgeCredit
from agentlightning.errors import ConfigError


def test_each_call_has_its_score_relative_to_the_group_beside_the_final_reward(make: Any) -> None:
    group = [make("a", 1.0, "xyz", [3.0, None, 1.0]), make("b", 0.0, "x", [2.0])]
    (credit,) = JudgeCredit(weight=0.5).assign([group], CreditContext())
    assert credit is not None
    spread = math.sqrt(2 / 3)
    first = 0.5 * (3 - 2) / spread
    assert credit.advantages[0] == pytest.approx([1 + first, 1.0, 1 - first])
    assert credit.advantages[1] == pytest.approx([-1.0])
    assert JudgeCredit().assign([[make("a", 1.0, "x", [1.0]), make("b", 1.0, "x", [1.0])]], CreditContext()) == [None]


def test_a_rollout_without_scores_is_rejected_by_name(make: Any) -> None:
    (found,) = rejections([make("a", 1.0, "xy"), make("b", 1.0, "x", [0.0])], "judge")
    assert (found.rollout_id, found.reason) == ("a", "bad_reward")
    assert "no call of rollout a has a score" in found.message


@pytest.fixture
def judges(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def length(trajectory: Any) -> list[float]:
        return [float(len(call.observation[0]["parts"][0]["content"])) for call in trajectory.transitions]

    def careless(trajectory: Any) -> list[float]:
        if trajectory.rollout_id == "raises":
            raise ConnectionError("the judge is down")
        wrong = {"short": [], "nan": [math.nan, 1.0]}
        return wrong.get(trajectory.rollout_id, length(trajectory))

    module = ModuleType("my_judges")
    module.__dict__.update(length=length, careless=careless)
    monkeypatch.setitem(sys.modules, "my_judges", module)
    return module


def test_a_function_scores_the_calls_of_a_trajectory(make: Any, judges: ModuleType) -> None:
    group = [make("a", 1.0, ["long text", "no"]), make("b", 1.0, ["no"])]
    (credit,) = credit_rule({"type": "judge", "scorer": "my_judges:length"}).assign([group], CreditContext())
    assert credit is not None
    assert credit.advantages[0][0] == pytest.approx(math.sqrt(2))
    assert rejections(group, {"type": "judge", "scorer": "my_judges:length"}) == []


@pytest.mark.parametrize("bad", ["raises", "short", "nan"])
def test_a_rollout_that_cannot_be_judged_is_left_out_logged_and_counted(
    make: Any, judges: ModuleType, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    group = [make("a", 1.0, ["long text", "no"]), make("b", 0.0, ["no"]), make(bad, 1.0, ["no", "x"])]
    samples, report = training_samples([group], {"type": "judge", "scorer": "my_judges:careless"})
    weights = {
        n.rollout_id: w.sum() for n, w in zip(samples[0].tree.nodes, samples[0].weights, strict=True) if n.sampled
    }
    assert weights[bad] == 0 < weights["a"]
    assert report.metrics()["credit_judge_failed"] == 1
    assert f"rollout {bad}" in caplog.text.replace("calls of rollout", "rollout")


@pytest.mark.parametrize("scorer", ["my_judges", ":length", "no_such_module:score", "my_judges:absent"])
def test_a_scorer_that_is_no_function_is_an_error_of_the_settings(judges: ModuleType, make: Any, scorer: str) -> None:
    with pytest.raises(ConfigError, match=r"names no function|cannot be imported"):
        credit_rule({"type": "judge", "scorer": scorer}).assign([[make("a", 1.0, "x")]], CreditContext())
