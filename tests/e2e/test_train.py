"""`agl train` and `agl eval`, as their user runs them."""

import json
import re
import signal
import subprocess
import time

import pytest


def last_line(output: str) -> dict:
    return json.loads(output.strip().splitlines()[-1])


def test_a_run_trains_reports_and_leaves_a_model_that_transformers_loads(job):
    done = job.run(job.command("--run-dir", "run", "--json", "algorithm.steps=2"))
    assert done.returncode == 0, done.stderr
    report = last_line(done.stdout)
    assert report["steps"] == 2
    assert report["rollouts"] == 2 * 4 * 4
    assert report["failed_rollouts"] == 0
    assert set(report["held_out"]) == {"greedy", "sampled"}
    for gain in report["held_out"].values():
        assert gain["gain"] == pytest.approx(gain["after"] - gain["before"])
        assert gain["interval"][0] <= gain["gain"] <= gain["interval"][1]
        assert gain["tasks"] == 2
    assert (job.directory / report["curve"]).read_bytes().startswith(b"\x89PNG")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = job.directory / report["checkpoint"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.vocab_size >= len(tokenizer)

    measured = job.run([job.command()[0], "eval", "--run", "run", "--json"])
    assert measured.returncode == 0, measured.stderr
    assert last_line(measured.stdout)["reward"] == pytest.approx(report["held_out"]["greedy"]["after"])

    again = job.run(job.command("--run-dir", "run"))
    assert again.returncode == 2
    assert "--resume" in again.stderr


def test_ctrl_c_says_how_to_go_on_and_the_run_goes_on(job):
    process = subprocess.Popen(
        job.command("--run-dir", "run", "algorithm.steps=6"),
        cwd=job.directory, env=job.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_step(job.directory / "run", 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "agl train --resume run" in errors
    done = job.run([job.command()[0], "train", "--resume", "run", "--json"])
    assert done.returncode == 0, done.stderr
    assert last_line(done.stdout)["steps"] == 6
    assert last_line(done.stdout)["rollouts"] == 6 * 4 * 4


def wait_for_step(run_dir, step: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        state = run_dir / "state.json"
        if state.exists() and json.loads(state.read_bytes())["step"] >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never reached")


BAD_INPUT = {
    "an agent module that does not exist": (["--agent", "nowhere:agent"], "nowhere"),
    "an agent name that does not exist": (["--agent", "agent.py:sya"], "say"),
    "a reward that does not exist": (["--reward", "reward.py:leters"], "letters"),
    "a dataset that does not exist": (["--dataset", "none.jsonl"], "none.jsonl"),
    "a dataset line that is no JSON": (["--dataset", "broken.jsonl"], "broken.jsonl.*line 2"),
    "a model path that does not exist": (["--model", "no/such/model"], "no/such/model"),
    "a model without a tokenizer": (["--model", "bare"], "tokenizer"),
    "a group of one": (["algorithm.group_size=1"], "group_size=1 leaves no baseline"),
    "an unknown setting": (["algorithm.grup_size=4"], "algorithm.group_size"),
    "a setting of the wrong type": (["algorithm.steps=many"], "algorithm.steps"),
    "a run to resume that is none": (["--resume", "nothing"], "nothing"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gives_one_clear_message(job, name):
    arguments, expected = BAD_INPUT[name]
    (job.directory / "broken.jsonl").write_text('{"word": "red"}\n{"word": \n')
    (job.directory / "bare").mkdir()
    command = job.command("--run-dir", "run", *arguments)
    if "--resume" in arguments:
        command = [command[0], "train", *arguments]
    done = job.run(command)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr.replace("Traceback (most recent call last)", "", 1)
    assert re.search(expected, done.stderr, re.DOTALL), done.stderr


def test_a_dry_run_prints_settings_that_can_be_read_back(job):
    done = job.run(job.command("--dry-run", "algorithm.steps=7"))
    assert done.returncode == 0, done.stderr
    (job.directory / "settings.toml").write_text(done.stdout)
    again = job.run([job.command()[0], "train", "--config", "settings.toml", "--dry-run"])
    assert again.stdout == done.stdout
    assert "steps = 7" in done.stdout
