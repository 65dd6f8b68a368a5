"""`agl.evaluate`: an agent is run on tasks, with a model or without, and its rewards are counted."""

import os

import httpx
import pytest

import agentlightning as agl
from agentlightning.config import RunnerConfig
from agentlightning.errors import ConfigError, RewardError
from agentlightning.evaluator import evaluate
from agentlightning.policy import open as opening
from agentlightning.testing import ScriptedPolicy
from agentlightning.training import agent_runner


def pry(task: str) -> float:
    """1.0 where the server that runs it lets it read what is not its own."""
    origin = os.environ["AGL_EVENT_URL"].partition("/rollout/")[0]
    return float(httpx.get(f"{origin}/v1/agl/{task}", trust_env=False).status_code != 401)


def test_an_agent_that_is_evaluated_cannot_read_the_store():
    assert evaluate(pry, ["rollouts", "spans", "resources"]).rewards == (0.0, 0.0, 0.0)


def ask(task, llm):
    """The number that the model answers."""
    body = {"model": llm.model, "messages": [{"role": "user", "content": task}], **llm.sampling_parameters}
    reply = httpx.post(f"{llm.base_url}/chat/completions", json=body, trust_env=False)
    return float(reply.json()["choices"][0]["message"]["content"])


def test_a_model_answers_at_the_temperature_of_the_mode(monkeypatch, tmp_path):
    policy = ScriptedPolicy(lambda messages, updates: "0.25")

    async def open_policy(config):
        return policy

    monkeypatch.setattr(opening, "open_policy", open_policy)
    monkeypatch.setattr(agent_runner, "import_module", lambda name: None)
    assert evaluate(agl.llm_rollout(ask), ["a", "b"], model=tmp_path, mode="sampled") == 0.25
    assert {params.temperature for _, params in policy.calls} == {1.0}
    assert policy.closed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"mode": "best"}, "mode='best' is not one of greedy, sampled"),
        ({"limit": 0}, "limit=0 leaves no task"),
        ({"limit": -1}, "limit=-1 leaves no task"),
        ({"model": object()}, "model is a object object"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(arguments, complaint):
    with pytest.raises(ConfigError, match=complaint):
        agl.evaluate(lambda task: 1.0, [{"n": 1}], **arguments)


@pytest.mark.slow
def test_an_evaluation_without_any_reward_is_an_error_that_says_why():
    with pytest.raises(RewardError, match=r"none of 2 tasks has a reward \(2 missing reward\).*emit_reward"):
        agl.evaluate(lambda task: None, [{"n": 0}, {"n": 1}])
    with pytest.raises(RewardError, match=r"none of 1 tasks .*agl eval ... --reward-weights '{\"a\": 1.0}'"):
        agl.evaluate(lambda task: {"a": 1.0}, [{"n": 0}])
    assert agl.evaluate(lambda task: {"a": 1.0}, [{"n": 0}], reward_weights={"a": 0.5}) == 0.5


@pytest.mark.slow
def test_rollouts_that_fail_are_part_of_the_result():
    def agent(task):
        if task["n"] < 4:
            raise ValueError("no luck")
        return 1.0

    evaluation = agl.evaluate(agent, [{"n": n} for n in range(10)], runner=RunnerConfig(max_attempts=1))
    assert (evaluation.mean, evaluation.failed) == (1.0, 4)
    assert evaluation == 0.6


def test_an_agent_without_a_model_is_measured():
    def agent(task):
        return 1.0 if task["n"] % 2 else 0.0

    evaluation = agl.evaluate(agent, [{"n": n} for n in range(4)])
    assert evaluation == 0.5
    assert evaluation.rewards == (0.0, 1.0, 0.0, 1.0)
