"""An agent whose framework is missing or has another version fails with a message that says what to install."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path

import pytest

from agentlightning.errors import AgentError
from agentlightning.runner.agents.agent import agent_spec, load_agent
from agentlightning.runner.agents.arguments import Invocation
from agentlightning.runner.agents.command import Command, CommandError, import_advice

OLD = "ImportError: cannot import name 'create_agent' from 'langchain.agents' (/env/langchain/agents/__init__.py)"


@pytest.mark.parametrize(
    ("errors", "program", "advice"),
    [
        ("ModuleNotFoundError: No module named 'crewai'", "/env/bin/python", "/env/bin/python -m pip install crewai"),
        ("ModuleNotFoundError: No module named 'google.adk'", "python3", "pip install google-adk litellm"),
        ("ModuleNotFoundError: No module named 'langchain.agents'", "python", "install --upgrade langchain"),
        (OLD, "python", "no langchain.agents.create_agent, so it is too old for this agent, or too new"),
        ("Error [ERR_MODULE_NOT_FOUND]: Cannot find package '@ai-sdk/openai' imported", "node", "npm install @ai-sdk/"),
        ("ModuleNotFoundError: No module named 'agents'", "uv", "run: pip install openai-agents"),
    ],
)
def test_the_message_says_what_to_install(errors: str, program: str, advice: str) -> None:
    assert advice in str(import_advice(f"Traceback (most recent call last):\n{errors}\n", program))


def test_other_errors_have_no_such_advice() -> None:
    assert import_advice("ValueError: No module named 'crewai'", "python") is None
    assert import_advice("", "python") is None


def test_a_command_without_its_package_fails_with_it(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import crewai_of_nobody\n")
    command = Command((sys.executable, str(tmp_path / "agent.py")))
    with pytest.raises(CommandError) as failed:
        asyncio.run(command.start(Invocation(rollout=None, task={})))  # type: ignore[arg-type]
    assert f"{shlex.quote(sys.executable)} -m pip install crewai-of-nobody" in str(failed.value)


def test_a_python_agent_without_its_package_fails_with_it(tmp_path: Path) -> None:
    (tmp_path / "lonely_agent.py").write_text("import crewai_of_nobody\ndef run(task): ...\n")
    with pytest.raises(AgentError, match="pip install crewai-of-nobody"):
        load_agent(agent_spec(f"{tmp_path}/lonely_agent.py:run"))
