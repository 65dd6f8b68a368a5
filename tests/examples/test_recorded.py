"""Learning from recorded sessions: they are recorded by a real server, and each algorithm learns from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "examples" / "recorded"
PROGRAM = """
import argparse, json, random, sys
from pathlib import Path

import train
from agentlightning.models.tiny import make_tiny

folder = Path(sys.argv[1])
model = make_tiny(folder / "model", [each["message"] for each in train.make_tasks("train", 20, 0)])
train.TASKS, train.SESSIONS, train.HELD_OUT, train.STEPS, train.GOOD = 2, 4, 2, 1, 0.0
train.score = lambda task, output: random.random()  # a new model is always wrong
found = {}
for name in train.LR:
    options = argparse.Namespace(algorithm=name, model=str(model), seed=0, directory=folder / "runs")
    result = train.main(options)
    own, tasks = result.recorded, result.held_out["sampled"].tasks
    found[name] = {"method": own.method, "sessions": own.sessions, "tasks": tasks}
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_algorithm_learns_from_the_sessions_that_were_recorded_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, tmp_path]
    ran = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {name: each["method"] for name, each in found.items()} == {
        "sft": None,
        "rejection": "rejection",
        "dpo": None,
    }
    assert found["rejection"]["sessions"] == found["dpo"]["sessions"] == 8
    assert all(each["tasks"] == 2 for each in found.values())
    assert [path.name for path in (tmp_path / "runs").glob("*.db")] == ["sessions-0.db"]
