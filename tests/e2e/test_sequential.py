"""Prompts and weights in one run of the `agl` program, with a real model, killed in each stage."""

import asyncio
import json
import subprocess
import time
from zlib import crc32

import pytest
from tests.support.prompt_worlds import PromptWorld, PromptWorldServer

from agentlightning.store import LightningStore
from agentlightning.training.governance import read_audit

STEPS = 4
AGENT = """
from openai import OpenAI

CLIENT = OpenAI()


def say(word, prompt):
    message = {"role": "user", "content": prompt.format(word=word)}
    answer = CLIENT.chat.completions.create(model="policy", messages=[message], max_tokens=6)
    return answer.choices[0].message.content or ""
"""
SETTINGS = """
agent = "agent.py:say"
reward = "reward.py:letters"

[prompts]
prompt = "Answer.\\nSay {{word}}."

[data]
train = "train.jsonl"
validation_share = 0.2

[policy]
model = "tiny"

[evaluation]
every = 0
modes = ["greedy"]

[gate]
every = 2

[runner]
concurrency = 16

[algorithm]
type = "sequential"

[[algorithm.stages]]
type = "apo"
critic = {{ model = "critic", base_url = "{url}", input_price = 1.0 }}
editor = {{ model = "editor", base_url = "{url}" }}
budget = {{ calls = 60 }}
patience = 4

[[algorithm.stages]]
type = "lightning_rl"
steps = {steps}
tasks_per_step = 4
group_size = 4
optimizer = {{ lr = 1e-3 }}
"""


@pytest.fixture
def server():
    with PromptWorldServer(PromptWorld(0)) as running:
        add = {"op": "add", "after": 1}
        running.models["critic"] = lambda text: "The answers are too short."
        # The same question has the same answer, so that a repeated step tries what it tried before.
        running.models["editor"] = lambda text: json.dumps(
            {"edits": [{**add, "text": f"Say it {crc32(text.encode())} times."}]}
        )
        yield running


def killed_once(job, command, stage: int, steps: int) -> None:
    """Run until so many steps of a stage are done, then kill -9."""
    process = subprocess.Popen(
        command, cwd=job.directory, env=job.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    path, deadline = job.directory / "run" / "state.json", time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        state = json.loads(path.read_bytes()) if path.exists() else {"stages": []}
        if len(state["stages"]) == stage and state["step"] - state["stages"][-1]["first_step"] >= steps:
            break
        time.sleep(0.01)
    process.kill()
    process.wait()


async def finished(run_dir) -> list[str]:
    store = LightningStore(run_dir / "store.db")
    try:
        rollouts = await store.query_rollouts()
        assert {each.status for each in rollouts} == {"succeeded"}
        return [each.rollout_id for each in rollouts]
    finally:
        await store.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_in_each_stage_counts_everything_once(job, server):
    (job.directory / "agent.py").write_text(AGENT)
    (job.directory / "train.jsonl").write_text("".join(json.dumps({"word": f"w{n}"}) + "\n" for n in range(40)))
    (job.directory / "run.toml").write_text(SETTINGS.format(url=server.url, steps=STEPS))
    agl_program = job.command()[0]
    begin = [agl_program, "train", "--config", "run.toml", "--run", "run"]
    resume = [agl_program, "train", "--resume", "run", "--json"]
    killed_once(job, begin, stage=1, steps=1)
    killed_once(job, resume, stage=2, steps=1)
    done = job.run(resume)
    assert done.returncode == 0, done.stderr

    run_dir, result = job.directory / "run", json.loads(done.stdout)
    search, learning = result["stages"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, result["steps"] + 1))
    assert [line["stage"] for line in lines] == [1] * search["steps"] + [2] * STEPS
    ids = asyncio.run(finished(run_dir))
    tried, trained = ([each for each in ids if f"-{purpose}-" in each] for purpose in ("trial", "train"))
    assert lines[search["steps"] - 1]["apo_evaluations"] == search["rollouts"] == len(tried)
    assert learning["rollouts"] == len(trained) == STEPS * 16
    assert result["rollouts"] == len(tried) + len(trained)
    assert result["cost"]["search_money"] > 0
    assert optimizer_steps(run_dir) <= STEPS
    held_out = [each["held_out"]["greedy"] for each in result["stages"]]
    assert held_out[0]["after"] == held_out[1]["before"]
    whole = result["held_out"]["greedy"]
    assert (held_out[0]["before"], held_out[1]["after"]) == (whole["before"], whole["after"])
    judged = [record.step for record in read_audit(run_dir) if record.action != "learned"]
    assert {search["steps"], result["steps"]} <= set(judged), "the end of each stage"
    text = job.run([agl_program, "train", "--resume", "run"]).stdout
    assert "stage 1, apo, greedy" in text
    assert "stage 2, lightning_rl, greedy" in text


def optimizer_steps(run_dir) -> int:
    import torch

    state = json.loads((run_dir / "state.json").read_bytes())
    saved = torch.load(run_dir / state["checkpoint"] / "training_state.pt", weights_only=False)
    return saved["updater"]["steps"]
