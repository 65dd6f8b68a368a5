"""What a user is told where an agent of a real framework cannot be trained as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.frameworks.service import EXAMPLES, starting_models

from agentlightning import span as names
from agentlightning.resources import LLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Programs = Callable[[str], Path]
TASK = '{"question": "What is 6173 times 8291?"}\n'
NEEDS_A_SESSION = """
import json, sys
from agents import Agent, Runner, SQLiteSession
agent = Agent(name="math", model="gpt-4o-mini")
print(Runner.run_sync(agent, json.load(sys.stdin)["question"], session=SQLiteSession("a")).final_output)
"""
FIXED_ADDRESS = """
import json, sys
from agents import Agent, OpenAIChatCompletionsModel, Runner
from openai import AsyncOpenAI
client = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
agent = Agent(name="math", model=OpenAIChatCompletionsModel("gpt-4o-mini", client))
try:
    print(Runner.run_sync(agent, json.load(sys.stdin)["question"]).final_output)
except Exception:
    print("I do not know.")
"""
TOOL = """
import json, sys
from agents import Agent, Runner, function_tool


@function_tool(failure_error_function={handler})
def multiply(a: int, b: int) -> int:
    {body}


agent = Agent(name="math", instructions="Use the tool to multiply.", model="gpt-4o-mini", tools=[multiply])
print(Runner.run_sync(agent, json.load(sys.stdin)["question"], max_turns={turns}).final_output)
"""
MCP_AGENT = """
import asyncio, json, sys
from agents import Agent, Runner
from agents.mcp import MCPServerStdio


async def main():
    server = MCPServerStdio({"command": sys.executable, "args": ["server.py"]}, client_session_timeout_seconds=20)
    async with server:
        agent = Agent(name="math", model="gpt-4o-mini", mcp_servers=[server])
        result = await Runner.run(agent, json.load(sys.stdin)["question"], max_turns=4)
        print(result.final_output)


asyncio.run(main())
"""
MCP_SERVER = """
import os
from mcp.server.fastmcp import FastMCP
server = FastMCP("math")


@server.tool()
def multiply(a: int, b: int) -> int:
    os._exit(1)


server.run()
"""


def trial(folder: Path, command: str, *changes: str, **variables: str) -> dict[str, Any]:
    """The checks of `agl train --dry-run`, by name, and its rollouts."""
    tasks = [json.dumps({"question": f"What is {number} times 3?"}) for number in range(40)]
    folder.joinpath("tasks.jsonl").write_text("\n".join(tasks))
    folder.joinpath("reward.py").write_text("def score(output):\n    return float('It is' in output)\n")
    program = [str(Path(sys.executable).with_name("agl")), "train", "--dry-run", "--json", "--model", "tiny"]
    given = ["--data", "tasks.jsonl", "--reward", "reward.py:score", "--agent", command, "runner.concurrency=4"]
    environment = {**os.environ, **variables, "HOME": str(folder)}
    done = subprocess.run([*program, *given, *changes], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {each["name"]: each for each in found["checks"]} | {"all": found["rollouts"]}


def test_a_missing_package_is_named_with_what_to_install(programs: Programs, tmp_path: Path) -> None:
    python = programs("modern") / "python"
    found = trial(tmp_path, f"{python} {EXAMPLES / 'crewai' / 'agent.py'}")["rollouts"]
    assert found["outcome"] == "failed"
    assert f"the package 'crewai' is not installed for {python}; run: {python} -m pip install crewai" in found["text"]


def test_a_version_that_is_too_old_is_named_with_what_to_install(programs: Programs, tmp_path: Path) -> None:
    python = programs("modern") / "python"
    (old,) = programs("old").parent.glob("lib/python3*/site-packages")
    (tmp_path / "agent.py").write_text(NEEDS_A_SESSION)
    found = trial(tmp_path, f"{python} agent.py", PYTHONPATH=str(old))["rollouts"]
    assert (
        f"the version of 'agents' installed for {python} has no agents.SQLiteSession, so it is too old" in found["text"]
    )
    assert f"{python} -m pip install --upgrade openai-agents" in found["text"]


def test_an_agent_that_ignores_its_address_is_told_what_to_look_for(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(FIXED_ADDRESS)
    found = trial(tmp_path, f"{programs('modern') / 'python'} agent.py")
    assert found["rollouts"]["outcome"] == "ok", "the agent hides that nothing answers it"
    assert found["calls"]["outcome"] == "failed"
    assert found["calls"]["text"] == "the agent made no call to the model that is to learn"
    for looked_for in ("base_url=", ".env", "OPENAI_BASE_URL", "catches"):
        assert looked_for in found["calls"]["advice"]


async def run(
    serve: Any, programs: Programs, folder: Path, agent: str, max_calls: int | None = None
) -> tuple[Any, Any]:
    """What became of one run of an agent, whose model calls `multiply` until it knows the product, and its calls."""
    (folder / "agent.py").write_text(agent)
    service = await serve(starting_models().teacher(guesses=False))
    llm = LLM(endpoint=service.server.url, model="policy", max_calls=max_calls)
    given = await service.store.add_resources({"llm": llm})
    service.attempted = await service.store.start_rollout(json.loads(TASK), resources_id=given.resources_id)
    ended = await service.run([programs("modern") / "python", "agent.py"], folder, given=TASK)
    return ended, await service.calls()


async def test_a_tool_that_raises_is_shown_to_the_model_and_recorded(
    serve: Any, programs: Programs, tmp_path: Path
) -> None:
    body = 'raise ValueError("the calculator is broken")'
    agent = TOOL.format(handler="lambda _, error: f'error: {error}'", body=body, turns=3)
    ended, calls = await run(serve, programs, tmp_path, agent)
    assert len(calls) == 3
    assert "the calculator is broken" in str(calls[1].attributes[names.INPUT_MESSAGES])
    assert ended.code != 0
    assert "Max turns (3) exceeded" in ended.stderr


async def test_a_tool_that_ends_the_agent_is_a_failure_with_its_traceback(
    serve: Any, programs: Programs, tmp_path: Path
) -> None:
    body = 'raise ValueError("the calculator is broken")'
    ended, calls = await run(serve, programs, tmp_path, TOOL.format(handler=None, body=body, turns=3))
    assert len(calls) == 1
    assert ended.code != 0
    assert "the calculator is broken" in ended.stderr


async def test_an_mcp_server_that_dies_does_not_leave_the_agent_hanging(
    serve: Any, programs: Programs, tmp_path: Path
) -> None:
    (tmp_path / "server.py").write_text(MCP_SERVER)
    ended, calls = await run(serve, programs, tmp_path, MCP_AGENT)
    assert calls, "the tool was called"
    assert ended.code != 0
    assert "ClosedResourceError" in ended.stderr, "why it ended is what the user reads"


async def test_a_loop_that_does_not_end_is_refused_a_call_after_the_budget(
    serve: Any, programs: Programs, tmp_path: Path
) -> None:
    agent = TOOL.format(handler=None, body="return 0", turns=1000)
    ended, calls = await run(serve, programs, tmp_path, agent, max_calls=4)
    answered = [call for call in calls if names.RESPONSE_TOKEN_IDS in call.attributes]
    assert len(answered) == 4
    assert ended.code != 0
    assert "runner.max_calls" in ended.stderr
