"""The benchmark of updates runs, at its smallest, and prints the figures of both arms."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "updates.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_measures_a_drained_update_and_one_in_flight(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--json", "--rounds", "1", "--answers", "16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)["measured"]
    assert found["drained"]["drain"] > found["in flight"]["drain"]
    assert found["drained"]["again"] == 0 < found["in flight"]["again"]
