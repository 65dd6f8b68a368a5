"""LightningRL asks for groups, turns them into samples, and says why it stops."""

import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentlightning.algorithms.base import class_name, make_algorithm, reward_metrics
from agentlightning.algorithms.lightning_rl import LightningRL, LightningRLConfig
from agentlightning.algorithms.sft import SFTConfig
from agentlightning.algorithms.training import Collected
from agentlightning.config import RunConfig
from agentlightning.credit import training_samples
from agentlightning.errors import ConfigError
from agentlightning.trajectory import Trajectory, Transition
from agentlightning.util.settings import dump_toml, load_settings


def rollout(name, group, reward, calls=1):
    transitions = tuple(Transition(name, "a", f"{name}-{n}", n, (1, 2, n), (3, 4), (-0.1, -0.2)) for n in range(calls))
    return Trajectory(name, "a", transitions, reward=reward, group=group)


class FakeTraining:
    """Returns the same rollouts at every step, and records the calls of the algorithm."""

    def __init__(self, *trajectories):
        self.collected = Collected(trajectories)
        self.step = 0
        self.target_agent = None
        self.requests, self.updates, self.metrics = [], [], []

    async def collect(self, check, **request):
        self.requests.append(request)
        rejected = tuple(check(self.collected.trajectories))
        left_out = {each.rollout_id for each in rejected}
        return Collected(tuple(t for t in self.collected.trajectories if t.rollout_id not in left_out), (), rejected)

    async def update(self, samples, options):
        self.updates.append((samples, options))
        return {"loss": 0.5}

    async def finish_step(self, collected, metrics):
        self.step += 1
        self.metrics.append(metrics)


GOOD_AND_BAD = (rollout("r1", "g", 1.0), rollout("r2", "g", 0.0))


@pytest.mark.parametrize("alias", ["uniform", "grpo", {"type": "uniform"}, {"type": "grpo"}])
def test_a_credit_rule_has_one_name_in_the_settings_of_a_run(alias: str | dict[str, str]) -> None:
    expected = "group_relative" if isinstance(alias, str) else {"type": "group_relative"}
    assert LightningRLConfig(credit=alias).credit == expected


def test_several_losses_and_a_constant_length_survive_a_settings_file(tmp_path: Path) -> None:
    config = LightningRLConfig(
        loss=["gspo", {"type": "nll", "coefficient": 0.1}], aggregate={"type": "constant", "length": 64}
    )
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load_settings(LightningRLConfig, toml=tmp_path / "config.toml") == config


async def test_every_step_asks_updates_and_finishes():
    training = FakeTraining(*GOOD_AND_BAD)
    settings = {"steps": 3, "tasks_per_step": 1, "group_size": 2, "minibatches": 2, "temperature": 0.7}
    settings |= {"top_p": 0.9, "top_k": 20}
    await LightningRL(**settings, timeout_reward=-1.0).run(training)
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    assert training.requests == [{"tasks": 1, "group_size": 2, **sampling, "timeout_reward": -1.0}] * 3
    assert [options.minibatches for _, options in training.updates] == [2, 2, 2]
    assert [metrics["reward"] for metrics in training.metrics] == [0.5, 0.5, 0.5]


async def test_a_resumed_run_does_only_what_is_left():
    training = FakeTraining(*GOOD_AND_BAD)
    training.step = 2
    await LightningRL(steps=3, group_size=2).run(training)
    assert len(training.updates) == 1


async def test_groups_without_spread_are_counted_and_train_nothing():
    training = FakeTraining(rollout("r1", "g", 1.0), rollout("r2", "g", 1.0))
    await LightningRL(steps=1, group_size=2).run(training)
    assert training.updates == []
    assert training.metrics[0]["groups_without_spread"] == 1


async def test_the_better_rollout_gets_the_higher_advantage():
    training = FakeTraining(*GOOD_AND_BAD)
    await LightningRL(steps=1, group_size=2).run(training)
    (samples, _), = training.updates  # fmt: skip
    advantages = {
        node.rollout_id: values[0]
        for node, values in zip(samples[0].tree.nodes, samples[0].advantages, strict=True)
        if len(values)
    }
    assert advantages["r1"] > 0 > advantages["r2"]


async def test_a_rollout_that_cannot_be_used_is_named_and_the_others_are_learned_from():
    training = FakeTraining(*GOOD_AND_BAD, rollout("r3", "g", None), rollout("r4", "g", {"right": 1.0}))
    await LightningRL(steps=1, group_size=2).run(training)
    (samples, _), = training.updates  # fmt: skip
    assert {node.rollout_id for node in samples[0].tree.nodes if node.sampled} == {"r1", "r2"}
    found = LightningRL(group_size=2).rejections(training.collected.trajectories)
    assert {each.rollout_id: each.reason for each in found} == {"r3": "missing_reward", "r4": "bad_reward"}
    assert "emit_reward" in found[0].message


async def test_a_step_without_one_usable_rollout_is_finished_without_an_update():
    training = FakeTraining(rollout("r1", "g", None), rollout("r2", "g", None))
    await LightningRL(steps=2, group_size=2).run(training)
    assert training.updates == []
    assert training.step == 2


def test_rollouts_that_never_call_the_policy_are_rejected_with_where_calls_must_go():
    found = LightningRL(group_size=2).rejections([rollout("r1", "g", 1.0, calls=0), rollout("r2", "g", 0.0, calls=0)])
    assert [(each.rollout_id, each.reason) for each in found] == [("r1", "no_policy_calls"), ("r2", "no_policy_calls")]
    for sought in (
        "OPENAI_BASE_URL",
        "ANTHROPIC_BASE_URL",
        "base_url=",
        ".env",
        "Codex",
        "cache",
        "docs/guides/frameworks.md",
    ):
        assert sought in found[0].message
    assert "OPENAI_BASE_URL" in found[0].message


def test_the_agent_to_train_and_the_credit_rule_decide_what_is_rejected():
    def sampled(name, agent, **more):
        made = by(agent, rollout(name, "g", 1.0))
        return replace(made, transitions=tuple(replace(call, **more) for call in made.transitions))

    rollouts = [sampled("cut", "writer", top_p=0.5), sampled("judge", "critic", top_p=0.5), sampled("good", "writer")]
    found = LightningRL(group_size=2).rejections(rollouts, "writer")
    assert [(each.rollout_id, each.reason) for each in found] == [("cut", "unfaithful_sampling")]
    stepwise = [sampled("r1", None, reward=0.5)]
    assert LightningRL(group_size=2, credit="discounted").rejections(stepwise) == []
    assert [each.reason for each in LightningRL(group_size=2).rejections(stepwise)] == ["bad_reward"]


async def test_the_agent_to_train_is_checked_while_rollouts_are_collected():
    training = FakeTraining(*(by("critic", each) for each in GOOD_AND_BAD))
    training.target_agent = "writer"
    await LightningRL(steps=1, group_size=2).run(training)
    assert training.updates == []
    assert training.metrics[0]["rollouts"] == 0, "both were rejected before credit was assigned"


def test_a_batch_has_its_mean_reward_and_counts_of_calls():
    overridden = replace(rollout("r3", "g", None, calls=4), metadata={"overridden_calls": 3})
    collected = Collected((rollout("r1", "g", 1.0), rollout("r2", "g", 0.0), overridden))
    assert reward_metrics(collected) == {"reward": 0.5, "calls_per_rollout": 2.0, "calls_overridden": 3}
    assert reward_metrics(Collected((rollout("r1", "g", 0.0),)))["calls_per_rollout"] == 1.0
    assert math.isnan(reward_metrics(Collected(()))["reward"])
    weighed = replace(rollout("r1", "g", {"right": 1.0, "short": 1.0}), weights={"right": 2.0, "short": 1.0})
    assert reward_metrics(Collected((weighed,)))["reward"] == 3.0


def test_a_rollout_without_calls_beside_others_still_counts_for_the_baseline():
    assert LightningRL(group_size=2).rejections([rollout("r1", "g", 1.0, calls=0), rollout("r2", "g", 0.0)]) == []


def test_a_group_of_one_is_refused_by_name():
    with pytest.raises(ValidationError, match="group_size=1 leaves no baseline"):
        LightningRLConfig(group_size=1)
    assert LightningRLConfig(group_size=1, credit="reinforce").group_size == 1


@pytest.mark.parametrize("config", [SFTConfig(), {"steps": 5}, "grpo"])
def test_a_config_of_another_kind_is_refused(config):
    with pytest.raises(ConfigError, match="is no LightningRLConfig; give one, or its settings"):
        LightningRL(config)


def test_settings_that_cannot_work_are_one_line_each_with_the_way_out():
    with pytest.raises(ConfigError, match=r"unknown setting grup_size .*LightningRL.* nearest known one is group_size"):
        LightningRL(grup_size=2)
    with pytest.raises(ConfigError, match=r"^steps = 0 \(from the arguments of LightningRL\) should be"):
        LightningRL(steps=0)
    with pytest.raises(ConfigError, match="group_size=1 leaves no baseline"):
        LightningRL(group_size=1)


def test_arguments_change_the_settings_they_are_given_with():
    config = LightningRLConfig(steps=100, group_size=4)
    algorithm = LightningRL(config, steps=3, optimizer={"schedule": "cosine"})
    assert (algorithm.total_steps, algorithm.config.group_size) == (3, 4)
    assert algorithm.optimizer == config.optimizer.model_copy(update={"schedule": "cosine"})
    assert config.steps == 100


def test_calls_without_tokens_are_rejected_with_what_to_do():
    metadata = {"untrainable_calls": 1, "other_models": 2}
    rollouts = [
        Trajectory(name, "a", (), reward=float(name == "r1"), group="g", metadata=metadata) for name in ("r1", "r2")
    ]
    found = LightningRL(group_size=2).rejections(rollouts)
    assert [each.reason for each in found] == ["unknown_tokens"] * 2
    assert "none of the 6 model calls" in found[0].message
    assert "4 were answered by other models" in found[0].message
    assert "routes" in found[0].message
    balanced = [replace(each, metadata={"untrainable_calls": 1, "other_models": 1}) for each in rollouts]
    assert {each.reason for each in LightningRL(group_size=2).rejections(balanced)} == {"unknown_tokens"}


def by(agent, trajectory):
    calls = tuple(replace(call, agent=agent, span_id=f"{call.span_id}-{agent}") for call in trajectory.transitions)
    return replace(trajectory, transitions=calls)


@pytest.mark.parametrize(("setting", "said_by_the_agent"), [("writer", None), (None, "writ.*"), ("writer", "critic")])
async def test_only_the_agents_that_are_to_be_trained_learn(setting, said_by_the_agent):
    pairs = [(rollout(name, "g", reward), rollout(name, "g", reward)) for name, reward in (("r1", 1.0), ("r2", 0.0))]
    both = [
        replace(first, transitions=by("writer", first).transitions + by("critic", second).transitions)
        for first, second in pairs
    ]
    training = FakeTraining(*both)
    training.target_agent = said_by_the_agent
    await LightningRL(steps=1, group_size=2, target_agent=setting).run(training)
    (samples, _), = training.updates  # fmt: skip
    trained = {
        node.agent for node, weights in zip(samples[0].tree.nodes, samples[0].weights, strict=True) if any(weights)
    }
    assert trained == {"writer"}


def test_an_agent_to_train_that_never_speaks_is_named_with_those_that_do():
    found = LightningRL(group_size=2).rejections([by("writer", each) for each in GOOD_AND_BAD], "writr")
    assert [(each.rollout_id, each.reason) for each in found] == [("r1", "no_target_calls"), ("r2", "no_target_calls")]
    assert "an agent called 'writr'; there are 'writer'. Change target_agent" in found[0].message
    found = LightningRL(group_size=2).rejections([by("writer", GOOD_AND_BAD[0]), GOOD_AND_BAD[1]], "writr")
    assert "there are 'writer', calls without a name." in found[0].message
    with pytest.raises(ConfigError, match="is no regular expression"):
        LightningRL(target_agent="(")


async def test_credit_is_assigned_in_a_thread_beside_the_event_loop(monkeypatch):
    threads = []

    def recorded(*arguments, **options):
        threads.append(threading.current_thread())
        return training_samples(*arguments, **options)

    monkeypatch.setattr("agentlightning.algorithms.lightning_rl.training_samples", recorded)
    training = FakeTraining(*GOOD_AND_BAD)
    await LightningRL(steps=1, group_size=2).run(training)
    assert len(training.updates) == 1
    assert threads != [threading.main_thread()]


def test_an_algorithm_is_made_from_its_settings_by_their_type():
    assert make_algorithm(LightningRLConfig(steps=3)).total_steps == 3
    assert make_algorithm(SFTConfig(steps=2)).total_steps == 2
    with pytest.raises(ConfigError, match=r"without a type name no algorithm\. Known: apo, dpo, lightning_rl"):
        make_algorithm(RunConfig())


def test_an_algorithm_shows_its_class_and_its_settings():
    algorithm = LightningRL(steps=3)
    assert class_name(algorithm) == "agentlightning.algorithms.lightning_rl:LightningRL"
    assert repr(algorithm) == f"LightningRL({algorithm.config})"
    assert "steps=3" in repr(algorithm)
    del algorithm.config
    assert repr(algorithm) == "LightningRL()"
