"""Training whose agents run elsewhere: a server, runners in processes of their own, and a trainer."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import AGL, Job

AGENT = """
import os
from openai import OpenAI


def say(word: str) -> str:
    client = OpenAI()
    answer = client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": f"say {word}"}], max_tokens=6
    )
    return answer.choices[0].message.content or ""
"""
TRAINER = """
import json, sys
import agentlightning as agl
from agentlightning.config import EvaluationConfig, RunnerConfig, TrainConfig

def letters(task, output):
    return sum(character.isalpha() for character in output) / max(1, len(output))

url, n_runners, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
tasks = [json.loads(line) for line in open("tasks.jsonl")]
settings = TrainConfig(evaluation=EvaluationConfig(every=0, modes=("greedy",)), runner=RunnerConfig(timeout_seconds=60))
algorithm = agl.LightningRL(steps=2, tasks_per_step=4, group_size=4, optimizer={"lr": 1e-3})
store = agl.LightningStoreClient(url)
own = {"reward": letters} if n_runners else {}
trainer = agl.Trainer(
    settings, algorithm=algorithm, model="tiny", store=store, n_runners=n_runners, run_dir=out, **own
)
result = trainer.fit("agent.py:say" if n_runners else None, tasks)
print(json.dumps(result.as_json()))
"""


class Programs:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.started: list[subprocess.Popen[str]] = []
        (job.directory / "agent.py").write_text(AGENT)
        (job.directory / "trainer.py").write_text(TRAINER)

    def start(self, *command: str, token: str = "hub-token") -> subprocess.Popen[str]:
        program = subprocess.Popen(
            command, cwd=self.job.directory, env={**self.job.environment, "AGL_TOKEN": token, "NO_PROXY": "127.0.0.1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(program)
        return program

    def hub(self) -> str:
        program = self.start(AGL, "serve", "--port", "0", "--store", "hub.db", "--json")
        assert program.stdout is not None
        return json.loads(program.stdout.readline())["url"]

    def train(self, url: str, n_runners: int, out: str = "run") -> subprocess.Popen[str]:
        return self.start(str(Path(AGL).parent / "python"), "trainer.py", url, str(n_runners), out)

    def end(self) -> None:
        for program in self.started:
            program.terminate()
        for program in self.started:
            program.communicate(timeout=60)


@pytest.fixture
def programs(job: Job):
    running = Programs(job)
    yield running
    running.end()


def report_of(trainer: subprocess.Popen[str]) -> dict[str, object]:
    output, errors = trainer.communicate(timeout=500)
    assert trainer.returncode == 0, errors
    return json.loads(output.strip().splitlines()[-1])


@pytest.mark.slow
def test_a_trainer_without_runners_learns_from_what_runners_of_its_server_do(programs: Programs):
    url = programs.hub()
    trainer = programs.train(url, 0)
    runners = [
        programs.start(
            AGL, "runner", "--server", url, "--agent", "agent.py:say", "--reward", "reward.py:letters", "--json"
        )
        for _ in range(2)
    ]
    report = report_of(trainer)
    assert (report["rollouts"], report["failed_rollouts"], report["rejected_rollouts"]) == (32, 0, {})
    done = 0
    for runner in runners:
        runner.terminate()
        output, errors = runner.communicate(timeout=60)
        record = json.loads(output.strip().splitlines()[-1])
        assert record["failed"] == 0, errors
        done += record["succeeded"]
    assert done == 32 + 2 * 2, "and what was measured before and after"


@pytest.mark.slow
def test_runners_of_the_server_with_another_agent_leave_a_run_with_its_own_runner_alone(programs: Programs, job: Job):
    (job.directory / "other.py").write_text("def fail(task):\n    raise RuntimeError('not mine')\n")
    url = programs.hub()
    stranger = programs.start(AGL, "runner", "--server", url, "--agent", "other.py:fail", "--json")
    report = report_of(programs.train(url, 1))
    assert (report["rollouts"], report["failed_rollouts"]) == (32, 0)
    stranger.terminate()
    output, _ = stranger.communicate(timeout=60)
    record = json.loads(output.strip().splitlines()[-1])
    assert record["failed"] == record["succeeded"] == 0


@pytest.mark.slow
def test_a_run_that_waits_for_runners_says_how_to_start_one(programs: Programs):
    url = programs.hub()
    trainer = programs.train(url, 0)
    assert trainer.stderr is not None
    deadline = time.monotonic() + 200
    line = ""
    while "no runner works on them" not in line and time.monotonic() < deadline:
        line = trainer.stderr.readline()
    assert f"in the queue 'test' and no runner works on them; start one: agl runner --server {url} --agent" in line
