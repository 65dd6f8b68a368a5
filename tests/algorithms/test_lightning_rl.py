"""LightningRL asks for groups, turns them into samples, and says why it stops."""

import pytest
from pydantic import ValidationError

from agentlightning.algorithms.lightning_rl import LightningRL, LightningRLConfig
from agentlightning.errors import TrainingStopped, UnknownTokensError
from agentlightning.source import Collected
from agentlightning.trajectory import Trajectory, Transition


def rollout(name, group, reward, calls=1):
    transitions = tuple(Transition(name, "a", f"{name}-{n}", n, (1, 2, n), (3, 4), (-0.1, -0.2)) for n in range(calls))
    return Trajectory(name, "a", transitions, reward=reward, group=group)


class FakeTraining:
    """Hands out the same rollouts at every step, and writes down what it is asked to do."""

    def __init__(self, *trajectories):
        self.collected = Collected(trajectories)
        self.step = 0
        self.asked, self.updates, self.figures = [], [], []

    async def collect(self, **wish):
        self.asked.append(wish)
        return self.collected

    async def update(self, samples, **options):
        self.updates.append((samples, options))
        return {"loss": 0.5}

    async def finish_step(self, collected, figures):
        self.step += 1
        self.figures.append(figures)


GOOD_AND_BAD = (rollout("r1", "g", 1.0), rollout("r2", "g", 0.0))


async def test_every_step_asks_updates_and_finishes():
    training = FakeTraining(*GOOD_AND_BAD)
    await LightningRL(steps=3, tasks_per_step=1, group_size=2, minibatches=2, temperature=0.7).run(training)
    assert training.asked == [{"tasks": 1, "group_size": 2, "temperature": 0.7}] * 3
    assert [options["minibatches"] for _, options in training.updates] == [2, 2, 2]
    assert [figures["reward"] for figures in training.figures] == [0.5, 0.5, 0.5]


async def test_a_resumed_run_does_only_what_is_left():
    training = FakeTraining(*GOOD_AND_BAD)
    training.step = 2
    await LightningRL(steps=3, group_size=2).run(training)
    assert len(training.updates) == 1


async def test_groups_without_spread_are_counted_and_train_nothing():
    training = FakeTraining(rollout("r1", "g", 1.0), rollout("r2", "g", 1.0))
    await LightningRL(steps=1, group_size=2).run(training)
    assert training.updates == []
    assert training.figures[0]["groups_without_spread"] == 1


async def test_the_better_rollout_gets_the_higher_advantage():
    training = FakeTraining(*GOOD_AND_BAD)
    await LightningRL(steps=1, group_size=2).run(training)
    (samples, _), = training.updates  # fmt: skip
    advantages = {
        node.rollout_id: values[0]
        for node, values in zip(samples[0].tree.nodes, samples[0].advantages, strict=True)
        if values
    }
    assert advantages["r1"] > 0 > advantages["r2"]


async def test_rollouts_without_any_reward_stop_training_with_the_ways_to_give_one():
    training = FakeTraining(rollout("r1", "g", None), rollout("r2", "g", None))
    with pytest.raises(TrainingStopped, match="emit_reward"):
        await LightningRL(steps=1, group_size=2).run(training)


async def test_rollouts_that_never_call_the_policy_stop_training():
    training = FakeTraining(rollout("r1", "g", 1.0, calls=0), rollout("r2", "g", 0.0, calls=0))
    with pytest.raises(TrainingStopped, match="OPENAI_BASE_URL"):
        await LightningRL(steps=1, group_size=2).run(training)


def test_a_group_of_one_is_refused_by_name():
    with pytest.raises(ValidationError, match="group_size=1 leaves no baseline"):
        LightningRLConfig(group_size=1)
    assert LightningRLConfig(group_size=1, credit="reinforce").group_size == 1


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValidationError):
        LightningRL(grup_size=2)


async def test_calls_without_tokens_are_refused_with_what_to_do():
    metadata = {"untrainable_calls": 1, "other_models": 2}
    told = [
        Trajectory(name, "a", (), reward=float(name == "r1"), group="g", metadata=metadata) for name in ("r1", "r2")
    ]
    with pytest.raises(
        UnknownTokensError, match=r"none of the 6 model calls .* 4 were answered by other models .* routes"
    ):
        await LightningRL(steps=1, group_size=2).run(FakeTraining(*told))
