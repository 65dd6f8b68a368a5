"""`agl run` records closed command-line agents as they are: their calls go on to the provider they always used."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import ScriptedEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AGL = Path(sys.executable).parent / "agl"
QUESTION = "What is 6*7? Have the shell work it out."
KEY = "sk-of-the-user-of-this-machine"


@pytest.fixture
async def provider() -> AsyncIterator[str]:
    """The address of somebody who answers as OpenAI and Anthropic would, with a call of the shell and its result."""

    def answer(messages: list[dict[str, Any]]) -> str:
        results = [message["content"] for message in messages if message["role"] == "tool"]
        if results:
            return f"It is {re.findall('[0-9]+', results[-1])[-1]}."
        codex = "exec_command" in messages[0]["content"]
        arguments = {"cmd": "echo $((6*7))"} if codex else {"command": "echo $((6*7))", "description": "Multiply"}
        name = "exec_command" if codex else "Bash"
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    store = InMemoryLightningStore()
    engine = ScriptedEngine(answer, context_length=1_000_000, tokens_per_step=16)
    gateway = Gateway(
        store, {"theirs": engine}, secret="s", default_model="theirs", accept_any_model=True, allow_unattributed=True
    )
    async with Server(store, gateway, secret="s") as server:
        yield server.url
    await store.close()


async def run(command: list[Any], folder: Path, environment: dict[str, str]) -> tuple[str, dict[str, Any], str]:
    """(what the command printed, the summary, stderr)."""
    home = folder / "home"
    home.mkdir()
    path = f"{Path(command[0]).parent}:{os.environ['PATH']}"
    process = await asyncio.create_subprocess_exec(
        *map(str, [AGL, "run", "--json", "--", *command]),
        env={"PATH": path, "HOME": str(home), "LANG": "C.UTF-8", **environment},
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, (stdout + stderr).decode()
    *printed, summary = stdout.decode().splitlines()
    return "\n".join(printed), json.loads(summary), stderr.decode()


async def test_codex_is_led_to_its_attempt_and_on_to_its_provider(programs: Any, provider: str, tmp_path: Path) -> None:
    codex = [programs("commands") / "codex", "exec", "--skip-git-repo-check", "-s", "danger-full-access", "-m", "gpt-5"]
    environment = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{provider}/v1"}
    printed, summary, _ = await run([*codex, QUESTION], tmp_path, environment)
    assert "It is 42." in printed
    assert (summary["calls"], summary["failed_calls"], summary["exit_code"]) == (2, 0, 0)
    assert summary["input_tokens"] > summary["output_tokens"] > 0
    assert all(KEY.encode() not in path.read_bytes() for path in (tmp_path / ".agentlightning").iterdir())


async def test_claude_code_is_recorded_on_its_way_to_its_provider(programs: Any, provider: str, tmp_path: Path) -> None:
    claude = [programs("commands") / "claude", "-p", QUESTION, "--allowedTools", "Bash", "--model", "claude-sonnet-4-5"]
    environment = {
        "ANTHROPIC_API_KEY": KEY,
        "ANTHROPIC_BASE_URL": provider,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }
    printed, summary, _ = await run(claude, tmp_path, environment)
    assert "It is 42." in printed
    assert (summary["calls"], summary["failed_calls"], summary["exit_code"]) == (2, 0, 0)
