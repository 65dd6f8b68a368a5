"""`benchmarks/studies/hub.py` prints what it says, of a real server and runners in two processes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_claims_every_rollout_once_and_prints_rate_latency_fairness_and_memory():
    sizes = ["--runners", "20", "--processes", "2", "--rollouts", "400"]
    command = [sys.executable, str(ROOT / "benchmarks" / "studies" / "hub.py"), *sizes]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=250).stdout
    found = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert found["rollouts"] == "400"
    assert found["failed_heartbeats"] == "0"
    for name in ("claims_per_second", "p99_ms", "peak_mib"):
        assert float(found[name]) > 0
    assert 1 / 20 <= float(found["jain"]) <= 1
