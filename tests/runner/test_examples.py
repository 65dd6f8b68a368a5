"""The example agents run as their README says, against a server that speaks chat completions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parents[2] / "examples"
TASK = {"question": "What is 3 * 14?", "answer": 42}


def calls(expression: str) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


SCRIPT = [calls("3 * 14"), {"content": "So: ### ANSWER: 42 ###"}]


def tool_results(gateway: Any) -> list[str]:
    messages = gateway.requests[1]["body"]["messages"]
    return [message["content"] for message in messages if message["role"] == "tool"]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
async def test_an_agent_in_node_is_run_and_scored(
    start: Any, roll: Any, gateway: Any, rewards_of: Any, attempt_of: Any
) -> None:
    gateway.script = SCRIPT
    reward = f"{EXAMPLES}/node_agent/reward.py:score"
    await start(f"node {EXAMPLES}/node_agent/agent.mjs", reward=reward, server_url=gateway.url)
    [right] = await roll(TASK)
    assert (await attempt_of(right)).metadata.get("output") == "So: ### ANSWER: 42 ###\n"
    assert await rewards_of(right) == [1.0]
    assert tool_results(gateway) == ["42"]
    gateway.script = [{"content": "### ANSWER: 41 ###"}]
    [wrong] = await roll(TASK)
    assert await rewards_of(wrong) == [0.0]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
async def test_an_agent_in_node_that_throws_shows_its_stack(
    start: Any, roll: Any, gateway: Any, attempt_of: Any
) -> None:
    await start(f"node {EXAMPLES}/node_agent/agent.mjs", server_url="http://127.0.0.1:9")
    [ended] = await roll(TASK)
    error = (await attempt_of(ended)).metadata["error"]
    assert "ended with exit code 1" in error["message"]
    assert "fetch failed" in error["traceback"]


async def test_an_agent_class_posts_its_reward(start: Any, roll: Any, gateway: Any, rewards_of: Any) -> None:
    gateway.script = SCRIPT
    await start(f"{EXAMPLES}/agent_class/agent.py:Agent", server_url=gateway.url)
    right, wrong = await roll(TASK, {**TASK, "answer": 43})
    assert [await rewards_of(right), await rewards_of(wrong)] == [[1.0], [0.0]]
    assert tool_results(gateway) == ["42"] or len(gateway.requests) == 6
