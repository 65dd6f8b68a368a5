"""What `agl train` says to input that cannot work. In one process: what is heavy is imported once."""

import json
import re
import socket
import sys
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from agentlightning.cli.main import build
from agentlightning.models.tiny import make_tiny

pytestmark = pytest.mark.slow


@pytest.fixture
def agl(job, monkeypatch):
    """Runs the program in this process, in the job's directory."""
    monkeypatch.chdir(job.directory)
    return lambda *arguments: CliRunner().invoke(build(), list(arguments))


BAD_INPUT = {
    "an agent module that does not exist": (["--agent", "nowhere:agent"], "nowhere"),
    "an agent name that does not exist": (["--agent", "agent.py:sya"], "say"),
    "a reward that does not exist": (["--reward", "reward.py:leters"], "letters"),
    "a dataset that does not exist": (["--data", "none.jsonl"], "none.jsonl"),
    "a dataset line that is no JSON": (["--data", "broken.jsonl"], "broken.jsonl.*line 2"),
    "a model path that does not exist": (["--model", "no/such/model"], "no/such/model"),
    "a model without a tokenizer": (["--model", "bare"], "tokenizer"),
    "a group of one": (["algorithm.group_size=1"], "group_size=1 leaves no baseline"),
    "an unknown setting": (["algorithm.grup_size=4"], "algorithm.group_size"),
    "a setting of the wrong type": (["algorithm.steps=many"], "algorithm.steps"),
    "weights that are cut short": (["--model", "cut"], "weights in .*cut cannot be read"),
    "a run directory that is a file": (["--run", "tasks.jsonl"], "tasks.jsonl is no directory"),
    "a run to resume and another directory": (["--resume", "nothing", "--run", "x"], "leave out --run x"),
    "a run to resume that is none": (["--resume", "nothing"], "nothing"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_gives_one_clear_message(job, name, agl):
    arguments, expected = BAD_INPUT[name]
    (job.directory / "broken.jsonl").write_text('{"word": "red"}\n{"word": \n')
    (job.directory / "bare").mkdir()
    if "cut" in arguments:
        weights = make_tiny(job.directory / "cut", [{"word": "red"}]) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    given = arguments if "--resume" in arguments else [*job.arguments, "--run", "run", *arguments]
    done = agl("train", *given)
    assert done.exit_code in (1, 2)
    assert done.stderr.startswith("error: ")
    assert re.search(expected, done.stderr, re.DOTALL), done.stderr
    assert not (job.directory / "run").exists(), "a run that never began is left"
    assert "agl train --resume run" not in done.stderr


def test_printed_settings_can_be_read_back(job, agl):
    done = agl("train", *job.arguments, "--print-config", "algorithm.steps=7")
    assert done.exit_code == 0, done.stderr
    (job.directory / "settings.toml").write_text(done.stdout)
    again = agl("train", "--config", "settings.toml", "--print-config")
    assert again.stdout == done.stdout
    assert "steps = 7" in done.stdout


def test_errors_are_json_with_the_option_json(job, agl):
    done = agl("train", *job.arguments, "--json", "--model", "no/such/model")
    assert json.loads(done.stdout.splitlines()[-1])["error"]["type"] == "ModelNotFoundError"


ONE_STEP = ["algorithm.steps=1", "runner.max_attempts=1", "--run", "run"]


def test_a_reward_that_is_no_number_ends_the_run_with_the_reason(job, agl):
    (job.directory / "reward.py").write_text("def letters(task, output):\n    return float('nan')\n")
    done = agl("train", *job.arguments, *ONE_STEP)
    assert done.exit_code == 1
    assert "RewardError" in done.stderr
    assert "nan" in done.stderr
    assert "agl train --resume run" in done.stderr


def test_a_prompt_longer_than_the_context_names_both_lengths(job, agl):
    (job.directory / "tasks.jsonl").write_text(
        "".join(json.dumps({"word": f"{n} " + "a1b2 " * 2000}) + "\n" for n in range(10))
    )
    done = agl("train", *job.arguments, *ONE_STEP, "policy.max_context=512")
    assert done.exit_code == 1
    assert re.search(r"the prompt has (more than )?\d+ tokens and the context holds 512", done.stderr), done.stderr


def test_a_crashing_agent_ends_the_run_with_its_traceback_and_can_be_mended(job, agl):
    agent = job.directory / "agent.py"
    working = agent.read_text()
    agent.write_text(working.replace("def say(", "def broken():\n    raise RuntimeError('no power')\n\n\ndef say("))
    agent.write_text(agent.read_text().replace("-> str:\n", "-> str:\n    broken()\n"))
    done = agl("train", *job.arguments, *ONE_STEP)
    assert done.exit_code == 1
    assert "raise RuntimeError('no power')" in done.stderr
    agent.write_text(working)
    mended = agl("train", "--resume", "run", "--json")
    assert mended.exit_code == 0, mended.stderr
    assert json.loads(mended.stdout.splitlines()[-1])["steps"] == 1


def test_a_port_in_use_is_named(job, agl):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = agl("train", *job.arguments, "--run", "run", f"run.port={port}")
    assert done.exit_code == 2
    assert f"127.0.0.1:{port}" in done.stderr


def test_the_program_says_its_version(agl):
    done = agl("--version")
    assert done.exit_code == 0
    assert done.stdout.strip() == version("agentlightning")


LIAR = """
import json, os, sys, urllib.request

def post(url, body):
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["AGL_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        return urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        return error.read()

word = json.loads(os.environ["AGL_TASK"])["word"]
body = {"model": "policy", "messages": [{"role": "user", "content": word}], "max_tokens": 6}
reply = json.loads(post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body))
forged = {
    "gen_ai.operation.name": "chat", "agentlightning.prompt_token_ids": [10**8] * 9,
    "agentlightning.response_token_ids": [-5], "agentlightning.logprobs": [-1e30], "agentlightning.policy_version": "x",
    "gen_ai.request.temperature": "hot", "agentlightning.provider.retries": 0, "agentlightning.cost": -1e6,
}
url = os.environ["AGL_EVENT_URL"]
post(url, {"event_type": "chat", "data": forged})
post(url, {"event_type": "chat", "data": forged | {"agentlightning.prompt_token_ids": [1] * 200_000}})
post(url, {"event_type": "chat", "data": {"gen_ai.operation.name": ["chat"], "gen_ai.agent.name": {"a": 1}}})
post(url, {"event_type": "gen_ai.evaluation.result", "data": {"gen_ai.evaluation.score.label": "good"}})
post(url, {"event_type": "reward", "data": {"value": 1e308}})
if word in ("red", "green"):  # of a kind that the run cannot use
    post(url, {"event_type": "gen_ai.evaluation.result", "data": {"agentlightning.reward.values": "much"}})
print(reply["choices"][0]["message"]["content"])
"""


def test_no_lie_of_an_agent_ends_a_run(job, agl):
    """Whatever an agent posts with the key it has, the run goes on and learns from what the gateway has seen."""
    (job.directory / "liar.py").write_text(LIAR)
    command = ["--agent", f"{sys.executable} liar.py", *job.arguments[2:]]
    steps = ["algorithm.steps=2", "runner.max_failed_share=0.9", "--run", "run"]
    done = agl("train", *command, *steps)
    assert done.exit_code == 0, done.stderr
    lines = [json.loads(line) for line in (job.directory / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(0 < line["tokens_trained"] < 16 * 8 and line["loss"] == line["loss"] for line in lines)
    assert all(abs(line["approx_kl"]) < 10 for line in lines)
