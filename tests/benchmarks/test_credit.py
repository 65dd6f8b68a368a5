"""The comparison of credit rules by rollouts: its statistics, and that it measures what it prints."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "studies"
sys.path.insert(0, str(BENCHMARKS))
try:
    from tasks.learning import Learned, learn, make_start

    import credit
finally:
    sys.path.remove(str(BENCHMARKS))


def runs(*rollouts: int, arrived: bool = True) -> list[Learned]:
    return [Learned(each, arrived) for each in rollouts]


def test_rank_correlation_of_equal_opposite_and_tied_orders() -> None:
    assert credit.spearman([1, 2, 3], [10, 40, 90]) == pytest.approx(1)
    assert credit.spearman([1, 2, 3], [9, 5, 1]) == pytest.approx(-1)
    assert credit.spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)
    assert credit.spearman([math.inf, 1, 2], [90, 10, 40]) == pytest.approx(1)
    assert math.isnan(credit.spearman([1, 1], [1, 2]))


def test_a_goal_is_met_by_the_ratio_of_medians_and_missed_above_it() -> None:
    found = {"group_relative": runs(900, 1000, 1100), "hierarchical": runs(200, 300, 400)}
    result = credit.summary("corridor 3", found, {"group_relative": 80.0, "hierarchical": 10.0})
    assert result["rules"]["hierarchical"]["ratio"] == pytest.approx(0.3)
    assert result["met"] is True
    assert result["rank_correlation"] == pytest.approx(1)
    worse = {"group_relative": runs(900, 1000, 1100), "hierarchical": runs(400, 500, 600)}
    assert credit.summary("corridor 3", worse, {})["met"] is False


def test_on_the_calculator_only_a_significant_loss_counts() -> None:
    noisy = {"group_relative": runs(500, 1000, 1500), "hierarchical": runs(600, 1100, 1400)}
    assert credit.summary("calculator", noisy, {})["met"] is True
    surely = {"group_relative": runs(500, 510, 520), "hierarchical": runs(900, 910, 920)}
    assert credit.summary("calculator", surely, {})["met"] is False


def test_without_the_default_rule_nothing_is_judged() -> None:
    assert credit.summary("sql", {"group_relative": runs(1, 2)}, {})["met"] is None


def test_a_run_that_has_not_arrived_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"group_relative": runs(4000, 4000, arrived=False), "graph": runs(100, 200)}
    credit.show("corridor 5", credit.summary("corridor 5", found, {}))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "group_relative" in line]
    assert ">4000" in row
    assert "0 of 2" in row


def test_rules_that_this_version_lacks_are_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert credit.known(["group_relative", "no_such_rule"]) == ["group_relative"]
    assert "no_such_rule" in capsys.readouterr().err


def test_a_critic_is_given_to_the_rules_that_use_one_and_only_where_it_is_asked_for() -> None:
    assert credit.critic_of("hierarchical", False) == {}
    assert credit.critic_of("group_relative", True) == {}
    given = credit.critic_of("hierarchical", True)
    assert given["value_head"].type == "mlp"
    assert [each if isinstance(each, str) else each["type"] for each in given["loss"]] == ["ppo", "value"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_critic_changes_what_is_learned_by_a_rule_that_uses_it_and_by_no_other() -> None:
    recipe = replace(credit.RECIPES["corridor 1"], imitation_steps=1, most_rollouts=16, evaluate_every=100)
    start = make_start(recipe, 0)

    def weights(rule: str, **settings: Any) -> torch.Tensor:
        asyncio.run(learn(start, rule, **settings))
        return torch.cat([each.detach().flatten().clone() for each in start.policy.model.parameters()])

    begun = torch.cat([start.weights[name].flatten() for name, _ in start.policy.model.named_parameters()])
    critic = credit.critic_of("hierarchical", True)
    uniform = weights("group_relative")
    assert not torch.equal(uniform, begun)
    assert torch.equal(weights("group_relative", value_head=critic["value_head"]), uniform)
    assert not torch.equal(weights("hierarchical", **critic), weights("hierarchical"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_comparison_measures_and_predicts_every_rule(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "credit.py"), "--quick", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580)
    assert done.stdout, done.stderr
    rules = json.loads(done.stdout)["measured"]["corridor 1"]["rules"]
    assert {"group_relative", "state_value", "group_step", "graph"} <= {*rules}
    assert all(0 < each <= 400 for rule in rules.values() for each in rule["rollouts"])
    assert rules["state_value"]["predicted"] < rules["group_relative"]["predicted"]
