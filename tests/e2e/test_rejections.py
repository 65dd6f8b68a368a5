"""One bad rollout never ends a run; a run that its data stopped goes on once its agent is mended."""

import json

import pytest
from typer.testing import CliRunner

from agentlightning.cli.main import build

pytestmark = pytest.mark.slow


@pytest.fixture
def agl(job, monkeypatch):
    monkeypatch.chdir(job.directory)
    return lambda *arguments: CliRunner().invoke(build(), list(arguments))


STEPS = ["algorithm.steps=2", "runner.max_attempts=1", "--run", "run", "evaluation.modes=['greedy']"]
PARTLY = """
import agentlightning as agl

COUNT = 0


def letters(task, output, rollout):
    global COUNT
    if rollout.mode == "train":
        COUNT += 1
        if COUNT % 4 == 1:
            return {"unweighted": 1.0}
    elif task["word"] == "WORD":
        raise RuntimeError("the judge is out")
    return sum(character.isalpha() for character in output) / max(1, len(output))
"""


def test_bad_rollouts_are_named_and_counted_and_the_others_train(job, agl):
    (job.directory / "reward.py").write_text(PARTLY)
    done = agl("train", *job.arguments, *STEPS, "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"] == 2
    assert report["rejected_rollouts"]["bad_reward"] >= 4
    assert "is left out (bad reward): no weight for reward dimensions ['unweighted']" in done.stderr
    metrics = [json.loads(line) for line in (job.directory / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(record["rejected_bad_reward"] for record in metrics) == report["rejected_rollouts"]["bad_reward"]
    assert all(record["rollouts_trained"] for record in metrics)


def test_a_held_out_task_whose_rollout_fails_is_in_the_report(job, agl):
    held_out = job.directory / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"word": word}) + "\n" for word in ("WORD", "one", "two", "three")))
    (job.directory / "reward.py").write_text(PARTLY.replace("COUNT % 4 == 1", "False"))
    done = agl("train", *job.arguments, *STEPS, "data.held_out=held_out.jsonl", "data.validation_share=0")
    assert done.exit_code == 0, done.stderr
    assert "tasks without a reward: 1 failed before; 1 failed after" in done.stdout
    report = json.loads((job.directory / "run" / "report.json").read_bytes())
    gain = report["held_out"]["greedy"]
    assert (gain["tasks"], gain["missing_before"], gain["reasons_after"]) == (3, 1, {"failed": 1})
    again = agl("eval", "--run", "run", "--json")
    assert again.exit_code == 0, again.stderr
    record = json.loads(again.stdout.splitlines()[-1])
    assert (record["tasks"], record["measured"], record["reasons"]) == (4, 3, {"failed": 1})


GONE = """
from pathlib import Path


def letters(task, output, rollout):
    trained = Path("trained")
    if rollout.mode == "train":
        trained.touch()
    elif trained.exists():
        raise RuntimeError("the judge is out")
    return sum(character.isalpha() for character in output) / max(1, len(output))
"""


def test_a_measurement_in_which_everything_failed_is_warned_of(job, agl):
    (job.directory / "reward.py").write_text(GONE)
    done = agl("train", *job.arguments, *STEPS, "data.validation_share=0", "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    gain = report["held_out"]["greedy"]
    assert (gain["tasks"], gain["after"], gain["missing_before"]) == (0, None, 0)
    assert gain["reasons_after"] == {"failed": gain["missing_after"]}
    assert any(each.startswith("no held-out task has a reward both before and after") for each in report["warnings"])


ELSEWHERE = """
def say(task):
    return task["word"]  # as a client with an address of its own would answer, or a cache
"""


def test_an_agent_that_asks_another_model_is_named_before_the_first_step(job, agl):
    (job.directory / "agent.py").write_text(ELSEWHERE)
    done = agl("train", *job.arguments, *STEPS, "--json")
    assert done.exit_code != 0
    warning = "warning: evaluation: none of these"
    assert warning in done.stderr
    for sought in ("OPENAI_BASE_URL", "base_url=", ".env", "cache", "docs/guides/frameworks.md"):
        assert sought in done.stderr.partition(warning)[2].partition("\n")[0]
    assert "rollouts cannot be used (16 no policy calls)" in done.output  # of the first step


def test_a_run_without_rewards_goes_on_once_there_are_some(job, agl):
    working = (job.directory / "reward.py").read_text()
    (job.directory / "reward.py").write_text(working.replace("return sum", "return {'a': 1.0}\n    return sum"))
    stopped = agl("train", *job.arguments, *STEPS)
    assert stopped.exit_code == 1
    assert "algorithm.reward_weights" in stopped.stderr
    assert "agl train --resume run" in stopped.stderr
    (job.directory / "reward.py").write_text(
        working.replace("output):", "output, rollout):").replace(
            "    return", "    if rollout.mode == 'train':\n        return {'a': 1.0}\n    return"
        )
    )
    again = f"reward={job.arguments[job.arguments.index('--reward') + 1]}"  # its file has changed
    stopped = agl("train", "--resume", "run", again)
    assert stopped.exit_code == 1
    assert "16 of 16 rollouts cannot be used (16 bad reward)" in stopped.stderr
    (job.directory / "reward.py").write_text(working)
    done = agl("train", "--resume", "run", again, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2
