"""What credit rules need reaches them: columns of the policy, what they remember, and the settings around them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from agentlightning.algorithms.lightning_rl import CreditAssigner, LightningRL, LightningRLConfig, check_critic
from agentlightning.algorithms.training import Collected
from agentlightning.config import TrainConfig
from agentlightning.credit import Assignment
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy.losses import LossValue, TokenBatch, TokenLoss
from agentlightning.trajectory import Trajectory, Transition
from agentlightning.util.settings import dump_toml, load_settings


def rollout(name: str, reward: Any, states: str, **more: Any) -> Trajectory:
    """A call in each state; states are prompts."""
    calls = tuple(
        Transition(name, "at", f"{name}-{t}", t, (ord(state), 1), (5, 6), (-0.1, -0.2))
        for t, state in enumerate(states)
    )
    return Trajectory(name, "at", calls, reward, "g", **more)


class Learner:
    """Scores every sampled token with a number of its own, and records what was asked."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses, self.asked = refuses, []
        self.chat = SimpleNamespace(encode=lambda text: [ord(letter) for letter in text])

    async def score(self, trees: Any, what: Any, *, reference: Any = None) -> Any:
        if self.refuses:
            raise PolicyError("there is no value head; set policy.value_head")
        self.asked.append((tuple(sorted(what)), trees))
        column = [
            tuple(np.full(len(n.token_ids) if n.sampled else 0, -0.5, np.float32) for n in tree.nodes) for tree in trees
        ]
        return dict.fromkeys(what, column)


class Training:
    """Gives each step the next batch of rollouts."""

    def __init__(self, *batches: tuple[Trajectory, ...], step: int = 0, learner: Any = None) -> None:
        self.batches, self.step, self.learner, self.target_agent = batches, step, learner or Learner(), None
        self.advantages: list[Any] = []
        self.metrics: list[Any] = []

    async def collect(self, check: Any, **request: Any) -> Collected:
        batch = self.batches[self.step]
        rejected = tuple(check(batch))
        left_out = {each.rollout_id for each in rejected}
        return Collected(tuple(each for each in batch if each.rollout_id not in left_out), (), rejected)

    async def update(self, samples: Any, options: Any) -> Any:
        self.advantages.append([[own.tolist() for own in sample.advantages] for sample in samples])
        return {}

    async def finish_step(self, collected: Any, metrics: Any) -> None:
        self.step += 1
        self.metrics.append(metrics)


BATCHES = tuple(
    (rollout(f"{n}a", 1.0, "sxy", task={"id": 1}), rollout(f"{n}b", float(n == 1), "sxz", task={"id": 1}))
    for n in range(3)
)


async def test_a_resumed_run_gives_the_advantages_of_one_that_was_not_interrupted() -> None:
    settings = {"steps": 3, "group_size": 2, "credit": "state_value"}
    whole = Training(*BATCHES)
    await LightningRL(**settings).run(whole)

    first, begun = LightningRL(**{**settings, "steps": 2}), Training(*BATCHES)
    await first.run(begun)
    saved = json.loads(json.dumps(first.state_dict()))
    second, resumed = LightningRL(**settings), Training(*BATCHES, step=2)
    second.load_state_dict(saved)
    await second.run(resumed)
    assert [*begun.advantages, *resumed.advantages] == whole.advantages

    forgetful = Training(*BATCHES, step=2)
    await LightningRL(**settings).run(forgetful)
    assert forgetful.advantages[-1] != whole.advantages[-1], "without its memory the third step is another one"


def test_an_algorithm_that_remembers_nothing_has_no_state() -> None:
    assert LightningRL(group_size=2).state_dict() == {}
    algorithm = LightningRL(group_size=2, credit="state_value")
    algorithm.load_state_dict({"credit_memory": {"tables": {"t": {"s": [1.0, 0.5]}}}})
    assert algorithm.state_dict()["credit_memory"]["tables"] == {"t": {"s": [1.0, 0.5]}}
    algorithm.load_state_dict({})
    assert algorithm.state_dict() == {}


async def test_the_values_a_rule_needs_are_asked_of_the_policy() -> None:
    learner = Learner()
    assigner = CreditAssigner(Assignment.of({"type": "value", "lam": 1.0}))
    samples, _ = await assigner.samples(Training(learner=learner), BATCHES[0], None)
    assert [what for what, _ in learner.asked] == [("values",)]
    node = next(i for i, n in enumerate(samples[0].tree.nodes) if n.sampled and n.rollout_id == "0a")
    assert samples[0].advantages[node].tolist() == [1.5, 1.5]
    assert samples[0].columns["values"][node].tolist() == [-0.5, -0.5]
    assert samples[0].columns["returns"][node].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("trained", "asked"), [(True, 1), (False, 0)])
async def test_values_that_a_rule_could_use_are_asked_for_where_a_loss_trains_them(trained: bool, asked: int) -> None:
    learner = Learner()
    await CreditAssigner(Assignment.of("hierarchical"), trains_values=trained).samples(
        Training(learner=learner), BATCHES[0], None
    )
    assert len(learner.asked) == asked


async def test_a_policy_without_what_a_rule_needs_is_an_error_that_names_the_setting() -> None:
    assigner = CreditAssigner(Assignment.of("value"))
    with pytest.raises(ConfigError, match=r'credit rule "value" needs the column \'values\'.*set policy.value_head'):
        await assigner.samples(Training(learner=Learner(refuses=True)), BATCHES[0], None)
    training = Training()
    training.learner = None
    with pytest.raises(ConfigError, match="this run trains none"):
        await assigner.samples(training, BATCHES[0], None)


async def test_the_known_answer_is_scored_behind_every_prompt() -> None:
    learner = Learner()
    batch = (rollout("a", 1.0, "sx", task={"answer": "ok"}), rollout("b", 0.0, "sy", task={"answer": "ok"}))
    assigner = CreditAssigner(Assignment.of("information_gain"))
    _, report = await assigner.samples(Training(learner=learner), batch, None)
    ((what, (tree,)),) = learner.asked
    assert what == ("logprobs",)
    said = [node.token_ids for node in tree.nodes if node.sampled]
    assert said == [(ord("o"), ord("k"))] * 4
    assert report.groups_trained == 1


def test_credit_assignment_is_another_name_of_credit() -> None:
    assert LightningRL(credit_assignment="hierarchical").config.credit == "hierarchical"
    assert LightningRL(credit_assignment="grpo", credit="uniform").config.credit == "group_relative"
    assert LightningRL(LightningRLConfig(steps=3), credit_assignment={"type": "rloo"}).config.credit == {
        "type": "leave_one_out"
    }
    with pytest.raises(ConfigError, match="two names of one setting"):
        LightningRL(credit_assignment="hierarchical", credit="uniform")
    loaded = load_settings(LightningRLConfig, overrides=["credit_assignment=graph"])
    assert loaded.credit == "graph"
    run = load_settings(TrainConfig, overrides=["algorithm.credit_assignment=graph", "algorithm.preset=rloo"])
    assert run.algorithm.credit == "graph"


def test_an_unknown_setting_of_a_rule_names_the_nearest() -> None:
    expected = 'credit rule "group_step" cannot be used: unknown setting omga; the nearest known one is omega'
    with pytest.raises(ConfigError, match=f"{expected}$"):
        LightningRL(credit={"type": "group_step", "omga": 1})


def test_normalisation_and_agents_rewards_survive_a_settings_file(tmp_path: Any) -> None:
    config = LightningRLConfig(
        credit="state_value", normalization={"type": "batch", "center": True}, agent_rewards="own"
    )
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_settings(LightningRLConfig, toml=tmp_path / "config.toml") == config
    assert load_settings(LightningRLConfig, overrides=["normalization=none"]).normalization.type == "none"


def of_calls(training: Training) -> list[float]:
    """The distinct advantages of the tokens of the first update."""
    return sorted({number for sample in training.advantages[0] for own in sample for number in own})


async def test_normalisation_and_agents_rewards_arrive_where_credit_is_assigned() -> None:
    batch = tuple(
        replace(each, transitions=tuple(replace(t, agent="w") for t in each.transitions), agent_rewards={"w": own})
        for each, own in ((rollout("a", 8.0, "s"), 1.0), (rollout("b", 2.0, "s"), 2.0))
    )
    for settings, expected in (
        ({}, [-1.0, 1.0]),
        ({"normalization": "none"}, [-3.0, 3.0]),
        ({"normalization": "none", "agent_rewards": "own"}, [-0.5, 0.5]),
        ({"normalization": "none", "agent_rewards": "difference"}, [-3.5, 3.5]),
    ):
        training = Training(batch)
        await LightningRL(steps=1, group_size=2, **settings).run(training)
        assert of_calls(training) == expected, settings


class Critic(TokenLoss):
    """A loss that learns returns."""

    type: Literal["critic"] = "critic"
    needs = frozenset({"values", "returns"})

    def __call__(self, tokens: TokenBatch) -> LossValue:
        raise NotImplementedError


def test_a_critic_and_a_rule_with_values_need_one_another() -> None:
    with pytest.raises(
        ConfigError, match=r'credit rule "value" needs the values of a trained critic.*loss=\["ppo", "value"'
    ):
        LightningRL(credit="value")
    with pytest.raises(ConfigError, match=r'"group_relative" does not give; use credit="value"'):
        check_critic(Assignment.of("uniform").rule, (Critic(),))
    check_critic(Assignment.of("hierarchical").rule, (Critic(),))


async def test_a_rollout_with_a_bad_reward_is_left_out_and_the_run_goes_on() -> None:
    batch = (*BATCHES[0], rollout("bad", math.nan, "s"))
    training = Training(batch)
    await LightningRL(steps=1, group_size=2, credit="hierarchical").run(training)
    assert training.metrics[0]["rollouts"] == 2
    assert training.metrics[0]["credit_hierarchical_state_value"] == 1
