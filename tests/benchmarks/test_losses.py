"""The comparison of losses: every loss is an arm or has a reason why not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.policy.losses import LOSSES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "studies"
sys.path.insert(0, str(BENCHMARKS))
try:
    import losses
    from tasks.calculator import CalculatorRun
finally:
    sys.path.remove(str(BENCHMARKS))


def test_every_loss_is_trained_or_has_a_reason_why_not() -> None:
    named = {name.removeprefix("ppo + ") for name in losses.arms()}
    assert {*LOSSES} <= {*named, *losses.OTHERS}


def test_every_arm_is_a_configuration_of_the_algorithm() -> None:
    for settings in losses.arms().values():
        LightningRLConfig.model_validate(settings)


def test_an_arm_that_has_not_arrived_is_marked_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    arrived, late = CalculatorRun(1024, True, 20.0, [0.5, 0.95]), CalculatorRun(2304, False, 30.0, [0.5, 0.8])
    losses.show({"ppo": losses.row([arrived]), "gspo": losses.row([late])})
    out = capsys.readouterr().out
    assert ">2304" in out
    assert "MISSED  gspo" in out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_comparison_trains_the_calculator_from_a_warm_start(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "losses.py"), "--quick", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=880)
    assert done.stdout, done.stderr
    row = json.loads(done.stdout)["measured"]["ppo"]
    assert row["runs"] == 1
    assert row["rollouts"] == 4 * 16 * 8 or row["arrived"]
