"""What an algorithm asks of a run arrives at the source of its rollouts or at its learner; recall goes by age."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

from agentlightning.algorithms.training import Check, Collected, RolloutRequest, Want
from agentlightning.policy.base import UpdateOptions
from agentlightning.training.governance import Health, HealthState
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.run import TrainingRun
from agentlightning.training.sources.stream import RolloutStream
from agentlightning.trajectory import Trajectory, Transition


class Source:
    """Keeps what it was asked for."""

    request: RolloutRequest

    async def next(self, request: RolloutRequest) -> Collected:
        self.request = request
        return Collected(())


def run_of(source: Any = None, learner: Any = None, **config: Any) -> TrainingRun:
    """A run of these parts alone."""
    parts: dict[str, Any] = dict.fromkeys(("algorithm", "run_dir", "tasks", "collector", "progress"))
    parts |= {"config": SimpleNamespace(**config), "checkpoints": SimpleNamespace(learner=learner)}
    return TrainingRun(state=RunState("r"), source=source, total_steps=1, **parts)


async def test_every_setting_of_collect_reaches_the_source_of_rollouts() -> None:
    source = Source()
    run = run_of(source)
    check = cast("Check", lambda trajectories: [])
    named = Want(task=3, n=2)
    await run.collect(
        [named], tasks=2, group_size=4, temperature=0.7, check=check, timeout_reward=-1.0, top_p=0.9, top_k=40
    )
    expected = RolloutRequest([named, Want(n=4), Want(n=4)], 0.7, check, -1.0, 0.9, 40)
    for field in fields(RolloutRequest):
        assert getattr(source.request, field.name) == getattr(expected, field.name), field.name


def sampled_by(version: int) -> Trajectory:
    call = Transition(f"ro-{version}", "at", "sp", 1, (1,), (2,), (-0.5,), policy_version=version)
    return Trajectory(f"ro-{version}", "at", (call,), reward=1.0)


async def test_rollouts_are_recalled_until_they_are_older_than_the_given_number_of_updates() -> None:
    async def read(plans: Any, check: Any) -> Any:
        return [sampled_by(int(plan.rollout_id[-1])) for plan in plans], ()

    reader = SimpleNamespace(read=read)
    collector: Any = SimpleNamespace(reader=reader)
    learner: Any = SimpleNamespace(policy_version=5, versions={"policy": 5})
    stream = RolloutStream(collector, [], RunState("r"), cast("Any", None), cast("Any", None), learner)
    found = await run_of(stream, learner=object()).recall({f"ro-{n}": "g" for n in (2, 3, 4, 5)}, tasks={}, max_age=2)
    assert [each.rollout_id for each in found] == ["ro-3", "ro-4", "ro-5"]


async def test_the_learning_rate_that_a_rollback_has_lowered_reaches_the_update() -> None:
    given: list[UpdateOptions] = []

    async def update(samples: Any, options: UpdateOptions) -> dict[str, float]:
        given.append(options)
        return {}

    run = run_of(learner=SimpleNamespace(update=update))
    run.add(health := Health(run))
    health.state = HealthState(lr_factor=0.3)
    await run.update([], UpdateOptions(minibatches=2, lr_factor=0.5))
    assert given == [UpdateOptions(minibatches=2, lr_factor=0.15)]
