"""Muon in float32: the updates of torch's own, more precise, from and to the same checkpoints."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from agentlightning.policy.update.optimizer import Muon, orthogonalized

SHAPES = [(8, 8), (24, 6), (6, 24)]


def layers() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
def test_its_updates_are_those_of_torch_as_far_as_bfloat16_is_precise(nesterov: bool) -> None:
    ours, theirs, start = layers(), layers(), layers()
    settings = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov}
    steps(Muon(ours, **settings), ours, range(4))
    steps(torch.optim.Muon(theirs, **settings), theirs, range(4))
    for own, other, before in zip(ours, theirs, start, strict=True):
        moved = (other - before).norm()
        assert (own - other).norm() < 0.02 * moved
        assert moved > 0.1


def test_a_checkpoint_of_torchs_muon_continues() -> None:
    ours, theirs = layers(), layers()
    first, second = torch.optim.Muon(theirs, lr=0.02), Muon(ours, lr=0.5)
    steps(first, theirs, range(3))
    second.load_state_dict(deepcopy(first.state_dict()))
    with torch.no_grad():
        for own, other in zip(ours, theirs, strict=True):
            own.copy_(other)
    before = [parameter.detach().clone() for parameter in theirs]
    steps(first, theirs, range(3, 5))
    steps(second, ours, range(3, 5))
    for own, other, start in zip(ours, theirs, before, strict=True):
        assert (own - other).norm() < 0.02 * (other - start).norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_end_near_one_and_directions_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalized(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert found.dtype == torch.float32
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5
    assert values.max() < 1.5
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    rotated = u.T @ found @ v.T
    assert torch.allclose(rotated, torch.diag(rotated.diagonal()), atol=1e-3)


def test_a_parameter_without_a_gradient_stays() -> None:
    parameters = layers()
    before = parameters[0].detach().clone()
    Muon(parameters, lr=0.02).step()
    assert torch.equal(parameters[0], before)
