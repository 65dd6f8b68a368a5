from __future__ import annotations

import inspect
from typing import Any

import pytest
from tests.support import agents

from agentlightning.errors import AgentError
from agentlightning.resources import LLM
from agentlightning.runner.agents.litagent import LitAgent, llm_rollout, method_for, prompt_rollout, rollout


@pytest.mark.parametrize(("mode", "method"), [("train", "training_rollout_async"), ("val", "validation_rollout")])
def test_a_rollout_runs_the_method_for_its_mode(mode: str, method: str) -> None:
    assert method_for(agents.ByMode(), mode).__name__ == method


def test_an_agent_without_a_method_for_the_mode_says_what_it_has() -> None:
    class OnlyTraining(LitAgent[Any]):
        def training_rollout(self, task: Any, resources: Any, rollout: Any) -> float:
            return 1.0

    with pytest.raises(AgentError, match="OnlyTraining has no method for mode 'val': it defines training_rollout"):
        method_for(OnlyTraining(), "val")


def test_a_decorated_function_can_still_be_called() -> None:
    @rollout
    def double(task: int, factor: int = 2) -> int:
        "Doubles."
        return task * factor

    assert double(4) == 8
    assert double.__doc__ == "Doubles."
    assert inspect.signature(double).parameters.keys() == {"task", "factor"}


async def test_a_decorated_function_runs_as_a_litagent(make_call: Any) -> None:
    @llm_rollout(strip_proxy=False)
    async def ask(task: str, llm: LLM) -> str:
        return f"{llm.model}: {task}"

    resources: Any = {"main": LLM(endpoint="http://x", model="m")}
    assert await ask.rollout_async("hello", resources, make_call("hello").rollout) == "m: hello"


@pytest.mark.parametrize(("decorator", "name"), [(llm_rollout, "llm"), (prompt_rollout, "prompt_template")])
def test_a_decorator_names_the_parameter_that_is_missing(decorator: Any, name: str) -> None:
    def forgot(task: Any) -> None: ...

    with pytest.raises(AgentError, match=rf"forgot\(task\) has no parameter '{name}'"):
        decorator(forgot)
