"""Agents of real frameworks are recorded to the token, by nothing but the environment variables of their attempt.

Each is a script in `agents` that calls a tool and answers. The frameworks are installed by `setup.sh`, apart from ours
and from one another; what is not installed is skipped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentlightning import span as names
from agentlightning.assemble import calls as answered

AGENTS = Path(__file__).with_name("agents")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Case:
    environment: str
    agent: str
    continues: bool = True
    """False where the framework tells another story than it was told."""
    calls: int = 2
    tool: str = "calculator"


CASES = [
    Case("modern", "openai_chat"),
    Case("modern", "openai_responses"),
    Case("modern", "anthropic_runner"),
    Case("modern", "langchain_agent"),
    Case("modern", "langgraph_agent"),
    Case("modern", "deepagents_agent"),
    Case("modern", "openai_agents"),
    Case("modern", "autogen_agent"),
    Case("modern", "agent_framework_agent"),
    Case("modern", "pydantic_ai_openai"),
    Case("modern", "pydantic_ai_chat"),
    Case("modern", "pydantic_ai_anthropic"),
    Case("modern", "smolagents_agent", continues=False),
    Case("crewai", "crewai_agent"),
    Case("crewai", "llama_index_agent"),
    Case("adk", "adk_agent"),
]


def tool_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(messages: list[dict[str, Any]]) -> str:
    """A tool call, and when its result is there, the answer."""
    done = any("42" in message["content"] for message in messages if message["role"] in ("tool", "user"))
    if not done:
        return tool_call("calculator", expression="6*7")
    asked = messages[0]["content"]
    return tool_call("final_answer", answer="It is 42.") if "final_answer" in asked else "It is 42."


async def recorded(service: Any, calls: int, continues: bool) -> None:
    """Every call that was answered is there with its tokens, and the second goes on in those of the first where it
    can. Anthropic's tool runner is refused a thread first, and then sends everything."""
    kept = [span.attributes for span in answered(await service.calls())]
    assert len(kept) == calls
    for call, (prompt, _) in zip(kept, service.engine.calls, strict=True):
        assert call[names.PROMPT_TOKEN_IDS] == prompt
        assert len(call[names.RESPONSE_TOKEN_IDS]) == len(call[names.LOGPROBS]) > 0
    first, second = kept[0], kept[1]
    known = first[names.PROMPT_TOKEN_IDS] + first[names.RESPONSE_TOKEN_IDS]
    assert (second[names.PROMPT_TOKEN_IDS][: len(known)] == known) == continues


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.agent)
async def test_an_agent_finishes_and_every_token_of_it_is_recorded(
    serve: Any, programs: Any, tmp_path: Path, case: Case
) -> None:
    python = programs(case.environment) / "python"
    service = await serve(answers)
    ended = await service.run([python, AGENTS / f"{case.agent}.py"], tmp_path)
    assert ended.code == 0, ended.stderr
    assert "It is 42." in ended.stdout, ended.stderr
    await recorded(service, case.calls, case.continues)
