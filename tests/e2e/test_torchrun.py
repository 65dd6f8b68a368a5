"""torchrun starts the trainer and the processes that train with it, each with the same command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2"]
FSDP = ("policy.kind=fsdp", "policy.processes=2", "policy.device=cpu")
SCRIPT = """
import os, sys
import agentlightning as agl
from agentlightning.policy.fsdp import policy as learner
from agent import say
from reward import letters

if os.environ["RANK"] in sys.argv[1:]:
    learner.PACKAGES = ("torch",)  # As on a machine where something else is installed.
config = agl.TrainConfig(
    policy={"kind": "fsdp", "processes": 2, "device": "cpu"},
    algorithm={"type": "lightning_rl", "steps": 1, "tasks_per_step": 2, "group_size": 2},
    evaluation={"every": 0},
)
tasks = [{"word": "red"}, {"word": "blue"}, {"word": "grey"}, {"word": "gold"}]
result = agl.Trainer(config, reward=letters, run_dir="run").fit(say, tasks)
print("steps:", result.steps)
"""


def torchrun(job: Any, *command: str) -> subprocess.CompletedProcess[str]:
    return job.run([*TORCHRUN, *command])


def steps_of(run_dir: Path) -> int:
    return json.loads((run_dir / "state.json").read_bytes())["step"]


def test_a_command_trains_after_its_warm_start_with_all_ranks(job: Any) -> None:
    words = ("red", "green", "blue")
    talks = [[{"role": "user", "content": f"say {w}"}, {"role": "assistant", "content": w}] for w in words]
    (job.directory / "talks.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in talks))
    warm = ("warm_start.dataset=talks.jsonl", "warm_start.steps=2", "warm_start.batch_size=2")
    command = [*job.command("--run", "run", "--json", "algorithm.steps=2", *FSDP, *warm)[1:]]
    done = torchrun(job, "-m", "--", "agentlightning", *command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2
    assert steps_of(job.directory / "run") == 2


def test_in_a_script_only_the_trainer_goes_on_after_fit(job: Any) -> None:
    (job.directory / "train.py").write_text(SCRIPT)
    done = torchrun(job, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["steps: 1"]


def test_a_rank_with_another_version_is_named(job: Any) -> None:
    (job.directory / "train.py").write_text(SCRIPT)
    done = torchrun(job, "train.py", "1")
    assert done.returncode != 0
    assert "ConfigError: rank 1 has torch" in done.stderr
    assert not (job.directory / "run").exists(), "nothing is left of a run that has not begun"


def test_a_killed_rank_ends_the_run_by_name_and_one_process_continues_it(job: Any) -> None:
    command = job.command("--run", "run", "algorithm.steps=1000", *FSDP)[1:]
    with subprocess.Popen(
        [*TORCHRUN, "-m", "--", "agentlightning", *command],
        cwd=job.directory,
        env=job.environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 300
        while not (job.directory / "run" / "state.json").exists() or not steps_of(job.directory / "run"):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (killed,) = [each for each in psutil.Process(process.pid).children() if each.environ().get("RANK") == "1"]
        killed.kill()
        _, words = process.communicate(timeout=120)
    assert process.returncode != 0
    cause = words.partition("Root Cause")[2]
    assert "rank      : 1" in cause
    assert f"Signal 9 (SIGKILL) received by PID {killed.pid}" in cause
    done = steps_of(job.directory / "run")
    resumed = job.run([*job.command()[:2], "--resume", "run", f"algorithm.steps={done + 1}", "policy.processes=1"])
    assert resumed.returncode == 0, resumed.stderr
    assert steps_of(job.directory / "run") == done + 1
    assert os.path.exists(job.directory / "run" / "checkpoint")
