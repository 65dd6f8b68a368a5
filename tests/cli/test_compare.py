"""`agl compare`: whether a configuration is better than another is said over their seeds."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentlightning.cli.main import build
from agentlightning.config import RunConfig, TrainConfig
from agentlightning.evaluation.intervals import mean_of_seeds, seed_difference
from agentlightning.training.persistence.run_dir import RunDir, RunState
from agentlightning.util.settings import dump_toml


def finished(
    folder: Path,
    seed: int,
    after: float,
    *,
    steps: int = 100,
    tasks: str = "1\n",
    digest: str = "",
    algorithm: Any = None,
    rewards: Sequence[float | None] = (),
) -> str:
    run = folder / f"{steps}-{seed}"
    opened = RunDir.create(run)
    extensions = {"algorithm.loss=mine.py:Loss": {"file": "mine.py", "sha256": digest}} if digest else {}
    opened.write_state(RunState("r", extensions=extensions, evaluations={"after-greedy": [*rewards]}))
    opened.close()
    algorithm: Any = algorithm or {"type": "lightning_rl", "steps": steps}
    config = TrainConfig(algorithm=algorithm, run=RunConfig(seed=seed, port=seed))
    (run / "config.toml").write_text(dump_toml(config))
    (run / "data").mkdir()
    (run / "data" / "held_out.jsonl").write_text(tasks)
    (run / "report.json").write_text(json.dumps({"held_out": {"greedy": {"after": after, "gain": after - 0.1}}}))
    return str(run)


def compared(*runs: str) -> Any:
    done = CliRunner().invoke(build(), ["compare", *runs, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["configurations"]


def test_runs_that_differ_in_the_seed_are_one_configuration_with_an_interval_over_seeds(tmp_path: Path) -> None:
    (one,) = compared(*(finished(tmp_path, seed, 0.1 * (seed + 1)) for seed in range(5)))
    assert (one["seeds"], one["settings"]) == ([0, 1, 2, 3, 4], {})
    assert one["after"]["greedy"]["mean"] == pytest.approx(0.3)
    # 2.7764 * sqrt(0.025 / 5), Student's quantile for four degrees of freedom.
    assert one["after"]["greedy"]["interval"] == pytest.approx([0.1037, 0.4963], abs=1e-4)
    assert one["gain"]["greedy"]["mean"] == pytest.approx(0.2)


@pytest.mark.parametrize(("reward", "bounded"), [(1.0, True), (1.5, False)])
def test_no_interval_exceeds_what_rewards_between_0_and_1_can_be(tmp_path: Path, reward: float, bounded: bool) -> None:
    runs = [
        finished(tmp_path, seed, after, steps=steps, rewards=[0.0, None, reward])
        for steps, means in ((100, (0.6, 1.0)), (200, (0.0, 0.9)), (300, (0.0, 0.7, 1.0)))
        for seed, after in enumerate(means)
    ]
    rows = compared(*runs)
    for row in rows:
        low, high = row["after"]["greedy"]["interval"]
        assert (low >= 0 and high <= 1) is bounded
        for name in ("gain", "difference"):
            if name in row:
                low, high = row[name]["greedy"]["interval"]
                assert (low >= -1 and high <= 1) is bounded
                assert low <= row[name]["greedy"]["mean"] <= high


def test_another_configuration_is_compared_seed_by_seed(tmp_path: Path) -> None:
    runs = [finished(tmp_path, seed, 0.1 * (seed + 1)) for seed in range(3)]
    runs += [finished(tmp_path, seed, 0.1 * (seed + 1) + 0.05 + 0.01 * seed, steps=200) for seed in range(3)]
    first, other = compared(*runs)
    assert "difference" not in first
    assert other["settings"] == {"algorithm.steps": 200}
    found = other["difference"]["greedy"]
    assert (found["paired"], found["seeds"], found["mean"]) == (True, 3, pytest.approx(0.06))
    assert found["interval"][0] > 0, "seeds differ by more than configurations, and pairs show it"
    shown = CliRunner().invoke(build(), ["compare", *runs]).output
    assert "100-0 and 2 more (seeds 0, 1, 2): the first configuration" in shown
    assert "200-0 and 2 more (seeds 0, 1, 2): algorithm.steps=200" in shown
    assert "difference +0.060 (" in shown


def test_another_algorithm_is_named_without_the_settings_that_it_does_not_have(tmp_path: Path) -> None:
    other = finished(tmp_path / "b", 0, 0.6, algorithm={"type": "rejection", "steps": 7})
    settings = compared(finished(tmp_path / "a", 0, 0.5), other)[1]["settings"]
    assert (settings["algorithm.type"], settings["algorithm.steps"]) == ("rejection", 7)
    assert None not in settings.values()
    assert "algorithm.loss.clip_low" not in settings


def test_a_configuration_is_called_by_the_end_of_a_path_that_no_other_run_has(tmp_path: Path) -> None:
    first = finished(tmp_path / "a", 0, 0.5)
    other = Path(finished(tmp_path / "b", 0, 0.5, steps=7))
    assert [each["label"] for each in compared(first, str(other))] == ["100-0", "7-0"]
    same = other.rename(other.with_name("100-0"))
    assert [each["label"] for each in compared(first, str(same))] == ["a/100-0", "b/100-0"]


def test_different_seeds_are_compared_by_their_means(tmp_path: Path) -> None:
    runs = [finished(tmp_path, seed, 0.1 * seed) for seed in range(3)]
    runs += [finished(tmp_path, seed, 0.1 * seed, steps=200) for seed in range(2, 5)]
    found = compared(*runs)[1]["difference"]["greedy"]
    assert (found["paired"], found["mean"]) == (False, pytest.approx(0.2))
    assert found["interval"][0] < 0


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    run = finished(tmp_path, 0, 0.5)
    assert compared(run)[0]["after"]["greedy"]["interval"] is None
    assert "one seed: no interval" in CliRunner().invoke(build(), ["compare", run]).output


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    def refused(*runs: str) -> str:
        done = CliRunner().invoke(build(), ["compare", *runs])
        assert done.exit_code == 2, done.output
        return done.output

    first = finished(tmp_path / "a", 0, 0.5)
    assert "one configuration with one seed (0)" in refused(first, finished(tmp_path / "b", 0, 0.6))
    other = finished(tmp_path / "b", 0, 0.5, steps=7, tasks="2\n")
    assert "different held-out tasks" in refused(first, other)
    changed = [finished(tmp_path / "c", seed, 0.5, digest=f"v{seed}") for seed in range(2)]
    assert "another version of algorithm.loss=mine.py:Loss" in refused(*changed)
    (Path(other) / "report.json").unlink()
    assert "the run is not finished" in refused(first, other)
    assert "holds no run" in refused(first, str(tmp_path / "none"))


def test_intervals_over_seeds_hold_what_they_say() -> None:
    """Of 2,000 experiments with five seeds each, about 95% of the intervals contain the difference that there is."""
    rng, inside = random.Random(7), [0, 0]
    for _ in range(2000):
        first = {seed: rng.gauss(0.5, 0.1) for seed in range(5)}
        other = {seed: value + rng.gauss(0.05, 0.05) for seed, value in first.items()}
        later = {seed + 5: rng.gauss(0.55, 0.05) for seed in range(5)}
        for number, found in enumerate((seed_difference(first, other), seed_difference(first, later))):
            assert found.interval is not None
            inside[number] += found.interval[0] <= 0.05 <= found.interval[1]
    assert 0.93 < inside[0] / 2000 < 0.97
    assert 0.93 < inside[1] / 2000 < 0.995, "no shorter than it should be"
    assert mean_of_seeds({}).mean is None
    assert mean_of_seeds({0: 0.5, 1: 0.5}).interval == (0.5, 0.5)
