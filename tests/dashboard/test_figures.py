"""Figures of the dashboard and `agl status` are possible and those of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentlightning.dashboard.data.run_files import RunFiles, status_record
from agentlightning.dashboard.views.runs import MOST_POINTS, charts_of, window
from agentlightning.training.persistence.run_dir import RunDir, RunState


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([0.9, 0.95, 1.0, 0.92, 0.94], 0.0, 1.0), ([0.0, 0.0, 0.1], 0.0, 1.0), ([1.0, 0.5], 0.0, 1.0)],
)
def test_the_interval_of_rewards_between_0_and_1_stays_there(values: list[float], low: float, high: float) -> None:
    found = window(values)
    assert found is not None
    assert low <= found["low"] <= found["mean"] <= found["high"] <= high


def test_the_interval_of_other_rewards_has_no_bounds() -> None:
    found = window([10.0, 20.0])
    assert found is not None
    assert found["low"] < 0


@pytest.mark.parametrize(("algorithm", "steps"), [(None, 100), ("mine:Algorithm", None)])
def test_the_steps_of_an_algorithm_object_are_not_those_of_the_settings(
    tmp_path: Path, algorithm: str | None, steps: int | None
) -> None:
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.write_state(RunState("r1", algorithm=algorithm, step=4, seconds=8.0))
    (tmp_path / "run" / "config.toml").write_text("[algorithm]\nsteps = 100\n")
    run_dir.close()
    found, _ = status_record(RunFiles(tmp_path / "run"))
    assert found["steps"] == steps
    assert (found["seconds_left"] is None) == (steps is None)
    assert json.dumps(found)


def test_a_chart_that_is_the_same_at_every_step_is_marked() -> None:
    found = charts_of(
        [
            {"step": 1, "reward": 0.5, "clip_fraction": 0.0, "lr": 1e-4, "loss": 0.2},
            {"step": 2, "reward": 0.75, "clip_fraction": 0.0, "lr": 1e-4},
        ]
    )
    assert {chart["name"]: chart["constant"] for chart in found["charts"]} == {
        "reward": False,
        "clip": True,
        "lr": True,
        "loss": False,  # one value is no constant
    }
    assert found["others"] == []


def test_the_curves_of_a_long_run_go_from_its_first_step_to_its_last() -> None:
    found = charts_of([{"step": step, "reward": step / 5000} for step in range(1, 5001)])
    [chart] = found["charts"]
    assert (found["steps"][0], found["steps"][-1], found["thinned"]) == (1, 5000, 5000 - MOST_POINTS)
    assert len(chart["series"][0]["values"]) == len(set(found["steps"])) == MOST_POINTS
    assert chart["series"][0]["values"][-1] == 1.0
