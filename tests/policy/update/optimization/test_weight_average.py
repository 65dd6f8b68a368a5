"""A moving average of the weights follows them, scores tokens, and survives a resume."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.models import tiny_model

from agentlightning.credit import training_samples
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import OptimizerConfig
from agentlightning.policy.update.updater import Updater
from agentlightning.trajectory import TrainingSample, Trajectory, Transition

torch.set_num_threads(1)  # more threads cost more than they bring at this size


def pair() -> list[TrainingSample]:
    calls = [
        Transition(name, "at", name, 1, (1, 2, 3), (token, 9), (-3.0, -3.0)) for name, token in (("a", 7), ("b", 8))
    ]
    group = [Trajectory(c.rollout_id, "at", (c,), reward) for c, reward in zip(calls, (1.0, 0.0), strict=True)]
    return training_samples([group])[0]


def values(updater: Updater) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for p in updater.optimizer.parameters])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_its_formula_and_is_used_within_only(dtype: torch.dtype) -> None:
    updater = Updater(tiny_model().to(dtype), OptimizerConfig(lr=1e-2))
    with updater.average_in_use():
        start = values(updater)
    assert torch.equal(start, values(updater)), "without an average the weights themselves"
    expected = torch.cat([m.detach().flatten() for m in updater.optimizer.masters])
    for _ in range(3):
        updater.step(pair(), UpdateOptions(average=0.05))
        now = torch.cat([m.detach().flatten() for m in updater.optimizer.masters])
        expected = 0.95 * expected + 0.05 * now
    own = values(updater)
    with updater.average_in_use():
        torch.testing.assert_close(values(updater), expected.to(dtype).float(), atol=1e-6, rtol=1e-5)
    assert torch.equal(values(updater), own)
    assert not torch.equal(own, expected.to(dtype).float())


def test_a_resumed_updater_has_the_same_average() -> None:
    one = Updater(tiny_model(), OptimizerConfig(lr=1e-2))
    one.step(pair(), UpdateOptions(average=0.05))
    other = Updater(copy.deepcopy(one.model), OptimizerConfig(lr=1e-2))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for updater in (one, other):
        updater.step(pair(), UpdateOptions(average=0.05))
    with one.average_in_use(), other.average_in_use():
        assert torch.equal(values(one), values(other))
