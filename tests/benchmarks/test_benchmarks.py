"""Every benchmark of the hub runs, at its smallest, and prints figures; the peers are left out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def measure(name: str, *options: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--json", *options]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=280)
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "options", "arms"),
    [
        ("store", ("--seconds", "0.2"), 4),
        ("store_http", ("--seconds", "1"), 4),
        ("rollouts", ("--number", "40", "--concurrency", "4"), 2),
        ("memory", ("--spans", "1600"), 2),
    ],
)
def test_a_benchmark_measures_every_arm_of_ours(tmp_path: Path, name: str, options: tuple[str, ...], arms: int) -> None:
    found = measure(name, "--ours", "--rounds", "1", *options, directory=tmp_path)
    assert len(found["measured"]) == arms
    if name != "memory":  # so few spans may need no memory at all
        assert all(arm["median"] > 0 for arm in found["measured"].values())


def test_the_cost_of_each_operation_is_measured_at_each_size(tmp_path: Path) -> None:
    found = measure("scale", "--largest", "10000", directory=tmp_path)
    assert list(found["microseconds"]) == ["1000", "10000"]
    assert found["microseconds"]["1000"].keys() == found["growth"].keys()


def test_a_short_soak_finds_no_error(tmp_path: Path) -> None:
    found = measure("studies/soak", "--minutes", "0.2", "--clients", "2", directory=tmp_path)
    assert found["errors"] == {}
    assert found["cycles"] > 0


def test_a_training_step_is_timed_in_every_way_to_compute_it(tmp_path: Path) -> None:
    found = measure("train_step", "--part", "sharing", "--rounds", "1", "--sizes", "0.4M", directory=tmp_path)
    assert len(found["seconds"]) == 3
    assert all(seconds > 0 for arms in found["seconds"].values() for seconds in arms.values())


def test_generated_tokens_are_timed_beside_transformers(tmp_path: Path) -> None:
    found = measure("generate", "--no-peer", "--runs", "1", directory=tmp_path)
    assert [arms.keys() for arms in found.values()] == [{"ours", "model.generate"}] * 3


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is the load: apt-get install wrk")
def test_the_gateway_answers_records_and_streams(tmp_path: Path) -> None:
    sizes = ("--seconds", "1", "--streams", "100", "--tokens", "100000")
    found = measure("gateway", "--ours", "--rounds", "1", *sizes, directory=tmp_path)
    assert found["measured"].keys() == {"the stub itself", "ours"}
    assert found["kept"]["spans_kept"] >= found["kept"]["calls_answered"] > 0
    assert (found["streams"]["errors"], found["streams"]["tokens_equal"]) == (0, 100000)
