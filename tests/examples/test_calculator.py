"""The same agent in Python, Node.js and bash: each runs as it is, is recorded to the token, and trains."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.attempt_variables import attempt_environment
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.span import CONTINUES, PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import ScriptedEngine

HERE = Path(__file__).parents[2] / "examples" / "calculator"
AGL = Path(sys.executable).parent / "agl"
SCRIPT = [
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3 * 14"}}\n</tool_call>',
    "So: ### ANSWER: 42 ###",
]
TASK = {"question": "What is 3 * 14?", "answer": 42}
COMMANDS = {
    "openai": [sys.executable, "openai_agent.py"],
    "anthropic": [sys.executable, "anthropic_agent.py"],
    "bash": ["bash", "agent.sh"],
    "node": ["node", "openai_agent.mjs"],
}


@pytest.fixture(scope="session")
def node_directory(tmp_path_factory):
    """The agents, with what npm installs for the one in Node.js."""
    if shutil.which("npm") is None:
        pytest.skip("needs Node.js and npm")
    directory = tmp_path_factory.mktemp("node") / "calculator"
    shutil.copytree(HERE, directory)
    if not (directory / "node_modules").exists():
        installed = subprocess.run(["npm", "install", "--no-audit", "--no-fund"], cwd=directory, capture_output=True)
        if installed.returncode:
            pytest.skip(f"npm cannot install the openai package: {installed.stderr[-300:]}")
    return directory


def directory_of(name, request):
    if name == "node":
        return request.getfixturevalue("node_directory")
    for program in ("jq", "curl") if name == "bash" else ():
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    return HERE


async def run(command, directory, environment):
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=directory, env={**os.environ, **environment}, stdout=pipe, stderr=pipe
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["bash", *(pytest.param(name, marks=SLOW) for name in ("openai", "anthropic", "node"))]
)
async def test_an_agent_runs_as_it_is_and_is_recorded_to_the_token(name, request):
    directory = directory_of(name, request)
    store, engine = InMemoryLightningStore(), ScriptedEngine(SCRIPT)
    gateway = Gateway(store, {"scripted": engine}, secret="s", require_key=True, accept_any_model=True)
    async with Server(store, gateway, secret="s") as server:
        started = await store.start_rollout(TASK)
        ids = started.rollout_id, started.attempt.attempt_id
        environment = attempt_environment(server.url, "s", *ids) | {"AGL_TASK": json.dumps(TASK)}
        said = await run(COMMANDS[name], directory, environment)
    assert said == "So: ### ANSWER: 42 ###\n"
    assert "42" in engine.chat.decode(engine.calls[1][0][len(engine.calls[0][0]) :])
    first, second = await store.query_spans(*ids)
    assert second.attributes[CONTINUES] == first.span_id
    heard = first.attributes[PROMPT_TOKEN_IDS] + first.attributes[RESPONSE_TOKEN_IDS]
    assert second.attributes[PROMPT_TOKEN_IDS][: len(heard)] == heard
    await store.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_an_agent_trains(name, request, tmp_path):
    directory = directory_of(name, request)
    tasks = [{"question": f"Tom has {n} boxes of 14 pens. How many pens?", "answer": 14 * n} for n in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    program, file = COMMANDS[name]
    small = ["algorithm.steps=1", "algorithm.tasks_per_step=2", "algorithm.group_size=2", "policy.max_context=256"]
    command = [AGL, "train", "--agent", f"{program} {directory / file}", "--reward", f"{directory}/reward.py:score"]
    command += ["--data", "tasks.jsonl", "--json", "--run", "run", "evaluation.every=0", *small]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MAX_TOKENS": "24"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["rollouts"], report["failed_rollouts"]) == (4, 0), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", COMMANDS)
def test_an_agent_is_run_once_with_a_model_of_ones_own(name, request, tmp_path):
    from tests.support.models import tiny_checkpoint

    directory = directory_of(name, request)
    model = tiny_checkpoint(tmp_path / "model", context_length=512)
    program, file = COMMANDS[name]
    command = [AGL, "run", "--json", "--model", model, "--task", json.dumps(TASK), "--timeout", "60"]
    command += ["--reward", f"{directory}/reward.py:score", "--", program, directory / file]
    environment = {**os.environ, "MAX_TOKENS": "24"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["calls"] >= 1
    assert summary["output_tokens"] > 0
    assert summary["reward"] == 0.0
