"""What each agent of a rollout trains, and what is said where that cannot be."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from agentlightning.algorithms.lightning_rl import AgentRoles, LightningRL, LightningRLConfig
from agentlightning.config import TrainConfig
from agentlightning.credit import OWN, training_samples
from agentlightning.errors import ConfigError
from agentlightning.policy.config import Lora
from agentlightning.trajectory import Trajectory, Transition
from agentlightning.util.settings import dump_toml, load_settings

AGENTS: dict[str, Any] = {"writer": Lora(r=2), "critic": Lora(), "editor": "frozen", "planner": "shared"}


def call(agent: str | None, model: str | None = "policy", rollout: str = "ro-0", number: int = 0) -> Transition:
    prompt = tuple(range(number + 3))
    return Transition(
        rollout, "at", f"{rollout}-{number}", number, prompt, (7, 8), (-1.0, -1.0), 0, agent=agent, model=model
    )


def trajectory(*calls: Transition, reward: float = 1.0) -> Trajectory:
    return Trajectory(calls[0].rollout_id, "at", calls, reward, "group")


@pytest.mark.parametrize(
    ("agent", "model", "trained"),
    [
        ("writer", "policy:writer", "writer"),
        ("writer", None, "writer"),
        ("editor", "policy:base", None),
        ("planner", "policy", OWN),
        (None, "policy:base", None),
        (None, "policy:writer", "writer"),
        ("planner", "policy:base", None),
        ("planner", "policy:critic", "critic"),
        ("critic", "policy", "critic"),
    ],
)
def test_the_weights_that_answered_learn_from_a_call(agent: str | None, model: str | None, trained: str | None) -> None:
    assert AgentRoles(AGENTS).trains(call(agent, model)) == trained


def test_without_the_setting_all_calls_train_the_policy() -> None:
    assert AgentRoles().trains(call("anyone")) == OWN
    assert AgentRoles().counts([trajectory(call("anyone"))]) == {}


def test_each_adapter_has_a_sample_of_its_own_that_weighs_as_a_whole_batch() -> None:
    def rollout(name: str, reward: float, planner_calls: int) -> Trajectory:
        calls = [call("writer", "policy:writer", name, 0), call("editor", "policy:base", name, 1)]
        more = [call("planner", "policy", name, 2 + number) for number in range(planner_calls)]
        return trajectory(*calls, *more, reward=reward)

    groups = [[rollout("ro-0", 1.0, 1), rollout("ro-1", 0.0, 3)]]
    samples, report = training_samples(groups, trains=AgentRoles(AGENTS).trains)
    assert [sample.adapter for sample in samples] == ["writer", None]
    for sample, agent in zip(samples, ("writer", "planner"), strict=True):
        trained = {node.agent for node, w in zip(sample.tree.nodes, sample.weights, strict=True) if w.any()}
        assert trained == {agent}, "the editor is frozen: its calls carry no loss"
        assert sample.share == pytest.approx(1.0)
        assert sum(float(weights.sum()) for weights in sample.weights) == pytest.approx(1.0)
    assert (report.groups_trained, report.rollouts_trained, report.tokens_trained) == (1, 2, 4 + 8)
    alone, _ = training_samples(groups, trains=AgentRoles(AGENTS).trains, target_agent="writer")
    assert [sample.adapter for sample in alone] == ["writer"], "target_agent selects one"
    for weights, expected in zip(alone[0].weights, samples[0].weights, strict=True):
        assert weights.tolist() == expected.tolist()


def test_calls_that_train_nothing_are_counted_and_unlisted_agents_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    roles = AgentRoles(AGENTS)
    batch = [trajectory(call("editor", "policy:base"), call("stranger", "policy:base"), call(None), call("writer"))]
    with caplog.at_level(logging.WARNING):
        assert roles.counts(batch) == {"calls_frozen": 1.0, "calls_unlisted": 2.0}
        roles.counts(batch)
    assert [record.message for record in caplog.records] == [
        "calls of agents without a name, 'stranger' train nothing, because agents does not list them; they are answered"
        " as frozen agents are"
    ]


def test_an_adapter_of_an_agent_that_nobody_saw_is_refused_with_those_seen() -> None:
    roles = AgentRoles(AGENTS)
    seen = [trajectory(call("critic"), call("writter", "policy:base"), call(None))]
    message = r"adapter to 'writer', and no call of the first 1 rollouts .* 'critic', 'writter', calls without a name"
    with pytest.raises(ConfigError, match=message):
        roles.check_seen(seen, None)
    roles.check_seen(seen, "critic")
    roles.check_seen([trajectory(call("critic"), call(None, "policy:writer"))], None)
    roles.check_seen([], None)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"agents": {"editor": "frozen"}}, "freezes every agent, so there is nothing to train"),
        (
            {"agents": AGENTS, "target_agent": "editor"},
            "selects none of the agents that learn: critic, planner, writer",
        ),
        ({"agents": {"base": {"type": "lora"}}}, "'base' is reserved"),
        ({"agents": {"writer": "thawed"}}, "agents.writer"),
        ({"agents": {"writer": {"type": "lora", "rank": 4}}}, "agents.writer.*rank"),
        ({"agents": {"writer": {"type": "lora", "r": 0}}}, "agents.writer.*r = 0"),
    ],
)
def test_agents_that_cannot_be_are_refused_at_once(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        LightningRL(**settings)


def test_a_file_sets_what_agents_learn(tmp_path: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[algorithm.agents]\neditor = "frozen"\n[algorithm.agents.writer]\ntype = "lora"\nr = 8\n')
    config = load_settings(TrainConfig, toml=path)
    assert isinstance(config.algorithm, LightningRLConfig)
    assert config.algorithm.agents == {"editor": "frozen", "writer": Lora(r=8)}
    path.write_text(dump_toml(config))
    assert load_settings(TrainConfig, toml=path) == config


def test_information_gain_is_refused_where_calls_have_different_weights() -> None:
    lora = {"type": "lora", "r": 2}
    with pytest.raises(ConfigError, match=r"information_gain.*adapter of its own to 'writer'"):
        LightningRL(credit="information_gain", agents={"writer": lora, "editor": "shared"})
    LightningRL(credit="information_gain", agents={"writer": "shared", "editor": "frozen"})
    LightningRL(agents={"writer": lora})
