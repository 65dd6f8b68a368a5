"""A group without success is joined by recent successes at its task, which are bounded, aged, counted and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentlightning.algorithms.lightning_rl import LightningRL, LightningRLConfig, Replay, ReplayBuffer
from agentlightning.algorithms.training import Collected
from agentlightning.errors import ConfigError, ResumeError
from agentlightning.trajectory import Trajectory, Transition
from agentlightning.util.settings import dump_toml, load_settings


def rollout(name: str, reward: float | None, task: str = "t", group: str = "") -> Trajectory:
    call = Transition(name, "a", name, 1, (1, 2), (3, 4), (-0.1, -0.7))
    return Trajectory(name, "a", (call,), reward=reward, group=group or f"{name[0]}-{task}", task={"task": task})


class Training:
    """Gives the batches it was made with, and remembers every rollout as a store does."""

    target_agent = None
    learner = None

    def __init__(self, *batches: Sequence[Trajectory], old: Sequence[str] = ()) -> None:
        self.batches, self.old, self.step = list(batches), old, 0
        self.stored = {each.rollout_id: each for batch in batches for each in batch}
        self.requested: list[int] = []
        self.max_ages: list[int] = []
        self.samples: list[list[Any]] = []
        self.metrics: list[dict[str, float]] = []

    async def collect(self, *, tasks: int, **request: Any) -> Collected:
        self.requested.append(tasks)
        return Collected(tuple(self.batches.pop(0)))

    async def recall(
        self, groups: Mapping[str, str], *, tasks: Mapping[str, Any], max_age: int, check: Any
    ) -> tuple[Trajectory, ...]:
        self.max_ages.append(max_age)
        found = tuple(
            replace(self.stored[name], group=group, task=tasks[name])
            for name, group in groups.items()
            if name not in self.old
        )
        rejected = {each.rollout_id for each in check(found)}
        return tuple(each for each in found if each.rollout_id not in rejected)

    async def update(self, samples: list[Any], options: Any) -> dict[str, float]:
        self.samples.append(list(samples))
        return {}

    async def finish_step(self, collected: Collected, metrics: dict[str, float]) -> None:
        self.step += 1
        self.metrics.append(metrics)


SUCCESS = (rollout("1a", 1.0), rollout("1b", 0.0))
FAILURE = (rollout("2a", 0.0), rollout("2b", 0.0))


async def trained(training: Training, algorithm: LightningRL | None = None, **settings: Any) -> LightningRL:
    algorithm = algorithm or LightningRL(tasks_per_step=1, group_size=2, **{"replay": {}, "steps": 2, **settings})
    await algorithm.run(training)  # type: ignore[arg-type]
    return algorithm


def advantages(samples: Sequence[Any]) -> dict[str, float]:
    """By rollout, the advantage of its tokens."""
    return {
        node.rollout_id: float(own[0])
        for sample in samples
        for node, own in zip(sample.tree.nodes, sample.advantages, strict=True)
        if node.sampled
    }


async def test_a_group_without_success_learns_from_an_earlier_one_of_its_task() -> None:
    training = Training(SUCCESS, FAILURE)
    await trained(training)
    found = advantages(training.samples[1])
    assert found["1a"] > 0 > found["2a"] == found["2b"]
    (logprobs,) = {
        node.logprobs for sample in training.samples[1] for node in sample.tree.nodes if node.rollout_id == "1a"
    }
    assert logprobs == (-0.1, -0.7), "the ratio of a loss is against the weights that sampled it"
    assert [line["replayed_rollouts"] for line in training.metrics] == [0, 1]
    assert [line["replay_size"] for line in training.metrics] == [1, 1]
    assert [line["reward"] for line in training.metrics] == [0.5, 0.0], "replayed rewards are not those of the step"


async def test_without_the_setting_nothing_is_kept_or_counted() -> None:
    training = Training(SUCCESS, FAILURE)
    algorithm = await trained(training, replay=None)
    assert len(training.samples) == 1
    assert training.max_ages == []
    assert not {"replayed_rollouts", "replay_dropped", "replay_size"} & training.metrics[1].keys()
    assert algorithm.state_dict() == {}


@pytest.mark.parametrize(
    "second", [(rollout("2a", 0.0, "other"), rollout("2b", 0.0, "other")), (rollout("2a", 1.0), rollout("2b", 0.0))]
)
async def test_groups_of_other_tasks_and_those_with_a_success_are_left_as_they_are(
    second: tuple[Trajectory, ...],
) -> None:
    training = Training(SUCCESS, second)
    await trained(training)
    assert training.metrics[1]["replayed_rollouts"] == 0


async def test_what_is_too_old_is_dropped_and_counted_once() -> None:
    training = Training(SUCCESS, FAILURE, (rollout("3a", 0.0), rollout("3b", 0.0)), old=["1a"])
    await trained(training, steps=3, replay={"max_age": 7})
    assert set(training.max_ages) == {7}
    assert [line["replay_dropped"] for line in training.metrics] == [0, 1, 0]
    assert [line["replay_size"] for line in training.metrics] == [1, 0, 0]
    assert [line["replayed_rollouts"] for line in training.metrics] == [0, 0, 0]


async def test_a_rollout_joins_one_group_of_a_step() -> None:
    twice = (*FAILURE, rollout("3a", 0.0), rollout("3b", 0.0))
    training = Training(SUCCESS, twice)
    await trained(training)
    assert training.metrics[1]["replayed_rollouts"] == 1


async def test_dynamic_sampling_replaces_only_groups_that_no_success_joined() -> None:
    other = (rollout("4a", 0.0, "other"), rollout("4b", 0.0, "other"))
    training = Training(SUCCESS, FAILURE, other, (rollout("5a", 0.0), rollout("5b", 0.0)))
    await trained(training, steps=3, dynamic_sampling=1)
    assert training.requested == [1, 1, 1, 1]
    assert [line["groups_resampled"] for line in training.metrics] == [0, 0, 1]
    assert training.metrics[2]["replayed_rollouts"] == 1, "the group that was sampled in place of another is joined too"


async def test_a_resumed_run_learns_what_one_that_was_not_interrupted_learns() -> None:
    whole = Training(SUCCESS, FAILURE)
    await trained(whole)
    first = Training(SUCCESS)
    state = (await trained(first, steps=1)).state_dict()
    rest = Training(FAILURE)
    rest.step, rest.stored = 1, whole.stored
    algorithm = LightningRL(tasks_per_step=1, group_size=2, steps=2, replay={})
    algorithm.load_state_dict(state)
    await trained(rest, algorithm)
    assert advantages(rest.samples[0]) == advantages(whole.samples[1])


def test_the_oldest_are_forgotten_and_a_task_keeps_no_more_than_can_join_a_group() -> None:
    buffer = ReplayBuffer(Replay(capacity=3, rollouts=2))
    for n in range(3):
        buffer.add([rollout(f"{n}{name}", 1.0, f"t{n}") for name in "abc"])
    assert sorted(each for ids in buffer.state_dict().values() for each in ids) == ["1c", "2b", "2c"]
    small = ReplayBuffer(Replay(capacity=1))
    small.load_state_dict(buffer.state_dict())
    assert small.size == 1, "a run may be resumed with less room"


def test_only_successes_are_kept() -> None:
    buffer = ReplayBuffer(Replay(success=0.5, rollouts=9))
    timed_out = replace(rollout("1e", 1.0), status="timeout")
    buffer.add([rollout("1a", 0.4), rollout("1b", None), rollout("1c", 0.5), rollout("1d", 2.0), timed_out])
    assert list(buffer.state_dict().values()) == [["1c", "1d"]]


def test_what_cannot_be_read_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ResumeError, match="start a new run"):
        ReplayBuffer(Replay()).load_state_dict({"task": 3})


def test_replay_is_a_table_of_settings(tmp_path: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text("replay = { capacity = 8, max_age = 2, success = 0.5, rollouts = 3 }\n")
    config = load_settings(LightningRLConfig, toml=path)
    assert config.replay == Replay(capacity=8, max_age=2, success=0.5, rollouts=3)
    path.write_text(dump_toml(config))
    assert load_settings(LightningRLConfig, toml=path) == config
    with pytest.raises(ConfigError, match=r"replay\.capacity"):
        LightningRL(replay={"capacity": 0})
