"""`agl eval`: every option reaches the evaluation, and what it prints is what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.algorithms.training import Collected
from agentlightning.cli.main import build
from agentlightning.util.progress import Progress

AGENT = """
def solve(task):
    if task.get("fails"):
        raise ValueError("no luck")
    return float(task["n"] % 2 == 0)

def better(task):
    return 1.0

def prompted(task, prompt_template):
    return float(prompt_template.format(**task) == f"even {task['n']}")
"""


def run(*arguments: str, status: int = 0) -> Any:
    done = CliRunner().invoke(build(), ["eval", "--json", *arguments])
    assert done.exit_code == status, done.output
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(AGENT)
    tasks = [{"n": n, "level": "easy" if n < 8 else "hard", **({"fails": True} if n == 9 else {})} for n in range(10)]
    Path("tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return ["--data", "tasks.jsonl"]


@pytest.mark.slow
def test_every_option_reaches_the_evaluation(job: list[str]) -> None:
    options = ["--repeats", "2", "--slice", "level", "--failed", "1", "--cache", "cache", "--concurrency", "2"]
    first = run("--agent", "agent.py:solve", *job, *options, "--out", "first.json")
    assert (first["repeats"], first["missing_rollouts"], first["reasons"]) == (2, 2, {"failed": 2})
    assert first["score"] == 0.6
    assert first["pass_at_k"]["2"] == 0.6
    assert {value: part["tasks"] for value, part in first["slices"]["level"].items()} == {"easy": 8, "hard": 2}
    again = run("--agent", "agent.py:solve", *job, *options, "--compare", "first.json", "--aa")
    assert (again["repeats"], again["cached"]) == (4, 18)
    assert (again["comparison"]["gain"], again["comparison"]["significant"]) == (0.0, False)
    assert (again["aa"]["rollouts"], again["aa"]["difference"], again["aa"]["noise"]) == (2, 0.0, 0.0)
    assert again["aa"]["smallest_gain"] == pytest.approx(0.6)


@pytest.mark.slow
def test_what_people_read_names_the_gain(job: list[str]) -> None:
    run("--agent", "agent.py:solve", *job, "--out", "first.json", "--failed", "0")
    arguments = [*job, "--compare", "first.json", "--failed", "0", "--aa", "--slice", "level"]
    done = CliRunner().invoke(build(), ["eval", "--agent", "agent.py:better", *arguments])
    assert "gain +0.500" in done.output
    assert "5 better, 0 worse" in done.output
    assert "no difference is shown" in done.output
    assert "level=hard: 1.000" in done.output
    assert "the agent against itself: +0.000" in done.output
    assert "pass@2 1.000   pass^2 1.000" in done.output


def test_bounds_reach_the_interval_and_the_file(job: list[str]) -> None:
    found = run("--agent", "agent.py:solve", *job, "--bounds", "0", "100", "--out", "first.json")
    assert found["interval"][1] > 10
    assert json.loads(Path("first.json").read_text())["bounds"] == [0, 100]


TASK_OF_THE_ENVIRONMENT = """
import json, os, urllib.request
class ChatAgent:
    async def run(self):
        value = float(os.environ["QUESTION"] == os.environ["ANSWER"])
        body = json.dumps({"event_type": "reward", "data": {"value": value}}).encode()
        headers = {"Authorization": "Bearer " + os.environ["AGL_KEY"], "Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(os.environ["AGL_EVENT_URL"], body, headers)).close()
"""


@pytest.mark.slow
def test_an_agent_that_reads_its_task_from_the_environment_is_measured(job: list[str]) -> None:
    Path("chat_agent.py").write_text(TASK_OF_THE_ENVIRONMENT)
    Path("pairs.jsonl").write_text("".join(json.dumps({"q": n, "a": n % 2}) + "\n" for n in range(4)))
    env = 'runner.env={QUESTION = "q", ANSWER = "a"}'
    found = run("--agent", "chat_agent.py:ChatAgent", "--data", "pairs.jsonl", env)
    assert (found["reward"], found["missing_rollouts"]) == (0.5, 0)


@pytest.mark.slow
def test_settings_of_the_runner_reach_the_agent(job: list[str]) -> None:
    Path("slow.py").write_text("import time\ndef solve(task):\n    time.sleep(task['n'])\n    return 1.0\n")
    Path("two.jsonl").write_text('{"n": 0}\n{"n": 30}\n')
    options = ["runner.timeout_seconds=0.5", "runner.max_attempts=1", "runner.max_failed_share=1.0"]
    found = run("--agent", "slow.py:solve", "--data", "two.jsonl", *options)
    assert (found["measured"], found["reasons"]) == (1, {"failed": 1})


def test_an_environment_brings_its_tasks_and_is_refused_by_name_where_it_is_unknown(job: list[str]) -> None:
    assert "is no address of an environment" in run("--env", "nothing:here", status=2)["error"]["message"]
    assert "--env" in run(status=2)["error"]["message"]


SETTINGS = """
agent = "agent.py:solve"
[data]
train = "tasks.jsonl"
held_out = "two.jsonl"
"""


def test_without_a_run_the_settings_of_the_current_directory_say_what_is_measured(job: list[str]) -> None:
    Path("agl.toml").write_text(SETTINGS)
    Path("two.jsonl").write_text('{"n": 0}\n{"n": 2}\n')
    done = CliRunner().invoke(build(), ["eval", "--json"])
    assert done.exit_code == 0, done.output
    assert "settings: agl.toml" in done.stderr
    assert "evaluating agent.py:solve on two.jsonl, model: tiny\n" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["reward"] == 1.0
    assert run(*job, "--limit", "2", "runner.concurrency=1")["reward"] == 0.5, "options change the settings"


def test_the_settings_of_the_current_directory_are_not_used_for_another_agent_or_run(job: list[str]) -> None:
    Path("agl.toml").write_text("agent = 3")
    assert run("--agent", "agent.py:better", *job)["reward"] == 1.0
    assert "runs/none holds no run" in run("--run", "runs/none", status=2)["error"]["message"]
    assert "agent = 3 (from agl.toml)" in run(status=2)["error"]["message"]


def test_a_prompt_search_is_measured_with_the_agents_own_model_its_prompts_and_weights(job: list[str]) -> None:
    Path("dimensions.py").write_text("def score(task, output):\n    return {'right': output, 'short': 0.0}\n")
    Path("agent.py").write_text(
        "def say(task, prompt_template):\n    return float(prompt_template.format() == 'even')\n"
    )
    Path("agl.toml").write_text(
        'agent = "agent.py:say"\nreward = "dimensions.py:score"\nprompts = {it = "even"}\n'
        'data = {train = "tasks.jsonl"}\n'
        '[algorithm]\ntype = "apo"\ncritic = {model = "m"}\nreward_weights = {right = 0.5, short = 0.5}\n'
    )
    done = CliRunner().invoke(build(), ["eval", "--json"])
    assert "model: its own" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["reward"] == 0.5


def test_weights_of_dimensions_are_those_of_the_option(job: list[str]) -> None:
    Path("dimensions.py").write_text("def score(task, output):\n    return {'right': output, 'short': 1.0}\n")
    weights = ["--reward-weights", '{"right": 0.0, "short": 0.25}']
    found = run("--agent", "agent.py:better", "--reward", "dimensions.py:score", *job, *weights)
    assert found["reward"] == 0.25


def test_tasks_that_were_trained_on_are_refused(job: list[str]) -> None:
    found = run("--agent", "agent.py:solve", *job, "--trained-on", "tasks.jsonl", status=2)
    assert "10 evaluation tasks are training tasks, too: rows 1 (= 1), 2 (= 2)" in found["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--failed", "highest"], "failed='highest' is not"),
        (["--bounds", "1", "0"], "bounds=(1.0, 0.0) are not the lowest and the highest"),
        (["algorithm.steps=3"], "algorithm.steps=3 is no setting of an evaluation"),
        (["runner.timeout=3"], "runner.timeout"),
        (["--slice", "colour"], "no task has a field 'colour' to slice by"),
        (["--out", "agent.py/new.json"], "the evaluation cannot be written to agent.py/new.json"),
        (["--out", "."], "the evaluation cannot be written to .: [Errno 21] Is a directory"),
        (["--compare", "missing.json"], "no evaluation can be read from missing.json"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_runs(
    job: list[str], arguments: list[str], complaint: str
) -> None:
    Path("agent.py").write_text("open('ran', 'w')\n" + AGENT)
    assert complaint in run("--agent", "agent.py:solve", *job, *arguments, status=2)["error"]["message"]
    assert not Path("ran").exists()


@pytest.mark.integration
def test_a_run_whose_agent_was_an_object_asks_for_the_agent_and_not_for_the_run(job: list[str]) -> None:
    class Waits(agl.Algorithm):
        total_steps = 1
        learns_weights = False

        async def run(self, training: agl.Training) -> None:
            await training.finish_step(Collected(()), {})

    trainer = agl.Trainer(algorithm=Waits(), run_dir="run", progress=Progress(enabled=False))
    trainer.fit(
        lambda task: task["n"] / 10, [json.loads(line) for line in Path("tasks.jsonl").read_text().splitlines()]
    )
    told = run("--run", "run", status=2)["error"]["message"]
    assert "the agent of run was given as an object" in told
    assert "--run" not in told
    assert run("--run", "run", "--agent", "agent.py:better")["reward"] == 1.0
    seen = CliRunner().invoke(build(), ["eval", "--run", "run", "--agent", "agent.py:better", "--data", "tasks.jsonl"])
    assert "evaluation tasks are training tasks, too: rows " in seen.stderr
    assert "run has learned from them, so the result promises too much" in seen.stderr
    Path("run/data/train.jsonl").unlink()
    assert run("--run", "run", "--agent", "agent.py:better", "--data", "tasks.jsonl")["reward"] == 1.0


def test_a_prompt_is_a_setting(job: list[str]) -> None:
    found = [run("--agent", "agent.py:prompted", *job, f"prompts.it={text} {{n}}") for text in ("even", "odd")]
    assert [each["reward"] for each in found] == [1.0, 0.0]
    refused = run("--agent", "agent.py:prompted", *job, "policy.model=tiny", status=2)
    assert "prompts.NAME=TEXT" in refused["error"]["message"]
