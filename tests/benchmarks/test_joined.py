"""`benchmarks/studies/joined.py` prints what it says, of two real trainers and a real server."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk: apt-get install wrk")
def test_both_arms_answer_every_call_at_rest_and_during_updates():
    options = ["--rounds", "1", "--seconds", "1", "--hidden", "64", "--check"]
    command = [sys.executable, str(ROOT / "benchmarks" / "studies" / "joined.py"), *options]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout
    assert "0 calls failed" in output
    rows = [line.split() for line in output.splitlines() if ", updating, " in line and "(" not in line]
    assert len(rows) == 4
    for row in rows:
        rate, p50, p99, cpu, updates = map(float, row[-6:-1])
        assert min(rate, p50, p99, cpu, updates) > 0
