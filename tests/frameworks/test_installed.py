"""The agents of the packages that the tests' own environment has are recorded to the token, and read by the gateway.

`test_packages.py` does the same for all frameworks, each in an environment of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.frameworks.examples import BY_NAME, Example
from tests.frameworks.measuring import speech

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


class Installed(Example):
    """An example that the Python of the tests runs."""

    @property
    def programs(self) -> Path:
        return Path(sys.executable).parent


@pytest.mark.parametrize("name", ["openai_chat", "openai_responses", "langgraph", "openai_agents"])
async def test_an_agent_answers_through_the_gateway_and_every_token_is_kept(name: str, tmp_path: Path) -> None:
    found = await speech(Installed(**vars(BY_NAME[name])), tmp_path)
    assert found.tokens == "2 of 2"
    assert found.continues
    assert found.tool_calls
    assert found.one_key
    assert found.endpoint == ("responses" if name in {"openai_responses", "openai_agents"} else "chat completions")
