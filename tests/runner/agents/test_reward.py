from __future__ import annotations

from typing import Any

import pytest

from agentlightning.errors import AgentError
from agentlightning.runner.agents.arguments import RewardFunction

pytestmark = pytest.mark.integration


def test_a_reward_function_is_called_by_the_names_of_its_parameters(make_call: Any) -> None:
    def score(answer: int, output: str, task: Any, rollout: Any, scale: float = 2.0) -> Any:
        return answer, output, task, rollout.rollout_id, scale

    got = RewardFunction.of(score).start(make_call({"answer": 42}), "said")
    assert got == (42, "said", {"answer": 42}, "ro-1", 2.0)


def test_a_reward_function_names_the_parameter_nothing_fits(make_call: Any) -> None:
    with pytest.raises(AgentError, match=r"'expected' of .*Available here: answer, output"):
        RewardFunction.of(lambda expected: 1.0).start(make_call({"answer": 42}), "said")
