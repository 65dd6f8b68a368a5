"""The example of two agents: trained together they pass what either can reach alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "examples" / "two_agents"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_agents_that_learn_together_pass_each_that_learns_alone(tmp_path: Path) -> None:
    program = f"import json, pathlib, train; print(json.dumps(train.main(pathlib.Path('{tmp_path}'))))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["together"] > max(found["scout alone"], found["guide alone"]) + 0.05, found
