"""Optimisers: schedules, Muon on hidden matrices, exact resumes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from agentlightning.errors import ConfigError
from agentlightning.policy.config import OptimizerConfig, default_lr
from agentlightning.policy.update.optimizer import Optimizer

torch.set_num_threads(1)  # more threads cost more than they bring at this size


class Tiny(nn.Module):
    """An embedding, a hidden matrix, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden = nn.Embedding(7, 4), nn.Linear(4, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 7)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.hidden(self.embed(ids))))


def learn(model: Tiny, optimizer: Optimizer, steps: int, scale: float = 1.0) -> list[dict[str, float]]:
    metrics: list[dict[str, float]] = []
    for _ in range(steps):
        (model(torch.arange(7)).logsumexp(-1).sum() * scale).backward()
        metrics.append(optimizer.step())
    return metrics


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_resumed_run_makes_the_very_same_steps(kind: Any) -> None:
    config = OptimizerConfig(type=kind, lr=1e-2, weight_decay=0.1, schedule="cosine", total_steps=8, warmup_steps=2)
    model = Tiny()
    optimizer = Optimizer(model, config)
    learn(model, optimizer, 3)
    twin, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    resumed = Optimizer(twin, config)
    resumed.load_state_dict(state)
    assert learn(model, optimizer, 3) == learn(twin, resumed, 3)
    assert torch.equal(weights(model), weights(twin))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_state_without_master_weights_goes_on_from_the_rounded_weights(kind: Any) -> None:
    """Runs of earlier versions saved none, and their moments in the precision of the weights."""
    config = OptimizerConfig(type=kind, lr=1e-2)
    model = Tiny().bfloat16()
    optimizer = Optimizer(model, config)
    learn(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    del state["masters"]
    for each in state["optimizers"]:
        for moments in each["state"].values():
            moments |= {name: value.bfloat16() for name, value in moments.items() if name != "step"}
    twin = copy.deepcopy(model)
    resumed = Optimizer(twin, config)
    resumed.load_state_dict(state)
    assert all(torch.equal(master, weight) for master, weight in zip(resumed.masters, twin.parameters(), strict=True))
    kept = [value for each in resumed._optimizers for moments in each.state.values() for value in moments.values()]
    assert {value.dtype for value in kept} == {torch.float32}
    before = weights(twin)
    assert [step["optimizer_steps"] for step in learn(twin, resumed, 2)] == [1.0, 1.0]
    assert resumed.steps == 4
    assert not torch.equal(weights(twin), before)


def test_muon_takes_hidden_matrices_and_adamw_the_rest() -> None:
    model = Tiny()
    state = Optimizer(model, OptimizerConfig(type="muon", lr=1e-3)).state_dict()
    muon, adamw = state["optimizers"]
    assert sum(len(group["params"]) for group in muon["param_groups"]) == 1
    assert sum(len(group["params"]) for group in adamw["param_groups"]) == 6
    assert (muon["param_groups"][0]["lr"], adamw["param_groups"][0]["lr"]) == (0.02, 1e-3)


def test_adamw_has_the_configured_betas_and_decays_matrices_alone() -> None:
    (adamw,) = Optimizer(Tiny(), OptimizerConfig(betas=(0.5, 0.6), weight_decay=0.1)).state_dict()["optimizers"]
    decay = [(group["weight_decay"], len(group["params"])) for group in adamw["param_groups"]]
    assert decay == [(0.1, 3), (0.0, 4)], "embedding, hidden and head; not the norm and the biases"
    assert {group["betas"] for group in adamw["param_groups"]} == {(0.5, 0.6)}


def test_muon_steps_are_as_large_as_its_rate_says() -> None:
    model = Tiny()
    before = model.hidden.weight.detach().clone()
    learn(model, Optimizer(model, OptimizerConfig(type="muon", muon_lr=0.1, clip_norm=None)), 1)
    step = before - model.hidden.weight.detach()
    largest = torch.linalg.matrix_norm(step, ord=2).item()
    assert largest == pytest.approx(0.1 * (6 / 4) ** 0.5, rel=0.35), "an orthogonal matrix times sqrt(rows / columns)"


def test_gradients_are_clipped_as_a_whole() -> None:
    model = Tiny()
    optimizer = Optimizer(model, OptimizerConfig(clip_norm=1.0))
    (model(torch.arange(7)).sum() * 1e3).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    metrics = optimizer.step()
    assert metrics["grad_norm"] > 1.0
    assert nn.utils.get_total_norm(gradients).item() == pytest.approx(1.0, rel=1e-4)
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    model = Tiny()
    optimizer = Optimizer(model, OptimizerConfig(lr=1e-2))
    learn(model, optimizer, 1)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["optimizers"])
    (metrics,) = learn(model, optimizer, 1, scale=float("nan"))
    assert (metrics["skipped_steps"], metrics["optimizer_steps"]) == (1.0, 0.0)
    assert torch.equal(before, weights(model))
    assert str(state) == str(optimizer.state_dict()["optimizers"])
    assert learn(model, optimizer, 1)[0]["optimizer_steps"] == 1.0


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_learning_rates_rise_and_fall(schedule: Any, expected: list[float]) -> None:
    model = Tiny()
    config = OptimizerConfig(lr=1.0, schedule=schedule, total_steps=5, warmup_steps=1)
    rates = [metrics["lr"] for metrics in learn(model, Optimizer(model, config), 5)]
    assert rates == pytest.approx(expected, rel=1e-5)
    assert config.factor(99) == (1.0 if schedule == "constant" else 0.0)


def test_impossible_settings_name_the_way_out() -> None:
    with pytest.raises(ConfigError, match='schedule="cosine" needs total_steps'):
        Optimizer(Tiny(), OptimizerConfig(schedule="cosine"))
    with pytest.raises(ValidationError, match=r"optimizer\.warmup_steps=5 must be below total_steps=5; lower it"):
        OptimizerConfig(total_steps=5, warmup_steps=5)
    with pytest.raises(ValidationError, match="learning_rate"):
        OptimizerConfig.model_validate({"learning_rate": 1e-3})
    frozen = Tiny().requires_grad_(False)
    with pytest.raises(ConfigError, match="no weight that requires a gradient"):
        Optimizer(frozen, OptimizerConfig())


def test_a_state_of_another_type_is_refused() -> None:
    muon = Optimizer(Tiny(), OptimizerConfig(type="muon")).state_dict()
    with pytest.raises(ConfigError, match="saved state holds 2 optimisers"):
        Optimizer(Tiny(), OptimizerConfig()).load_state_dict(muon)


def test_the_default_learning_rate_fits_the_size_of_the_model() -> None:
    sizes = (400_000, 10_000_000, 500_000_000, 1_500_000_000, 70_000_000_000)
    assert [default_lr(size) for size in sizes] == [3.2e-4, 3.3e-5, 2.2e-6, 1e-6, 1e-6]
    assert default_lr(1_500_000_000, "supervised") == 1e-5
    model = Tiny()
    rate = default_lr(sum(p.numel() for p in model.parameters()))
    assert learn(model, Optimizer(model, OptimizerConfig()), 1)[0]["lr"] == rate
    assert learn(model, Optimizer(model, OptimizerConfig(lr=2e-5)), 1)[0]["lr"] == 2e-5


def test_settings_are_checked_again_when_the_run_fills_them_in() -> None:
    with pytest.raises(ValidationError, match="warmup_steps=50 must be below total_steps=10"):
        OptimizerConfig(warmup_steps=50).completed(weights=1, objective="reinforcement", total_steps=10)


def test_small_steps_are_lost_in_bfloat16_and_add_up_in_master_weights() -> None:
    """Twenty steps of 1e-6: nearly all weights of bfloat16 round back to where they were; their masters all move."""
    torch.manual_seed(0)
    start, slope = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    alone, mastered = (nn.ParameterList([nn.Parameter(start.clone())]) for _ in range(2))
    plain, optimizer = torch.optim.AdamW(alone, lr=1e-6), Optimizer(mastered, OptimizerConfig(lr=1e-6))
    first = optimizer.masters[0].detach().clone()
    for _ in range(20):
        for (weight,) in (alone, mastered):
            (weight * slope).sum().backward()
        plain.step()
        plain.zero_grad()
        optimizer.step()
    moved = (optimizer.masters[0].detach() - first).abs()
    assert (alone[0] != start).float().mean() < 0.1
    assert moved.median().item() == pytest.approx(20e-6, rel=0.1), "twenty whole steps"


def test_a_first_step_far_below_the_rounding_of_bfloat16_moves_the_weights_by_as_much_on_average() -> None:
    """A step of 1e-4, where neighbours of bfloat16 are 0.0078 apart: one weight in 78 moves, by all of that."""
    model = nn.ParameterList([nn.Parameter(torch.ones(200, 300, dtype=torch.bfloat16) * 1.5)])
    optimizer = Optimizer(model, OptimizerConfig(lr=1e-4))
    assert torch.equal(optimizer.masters[0].bfloat16(), model[0]), "rounded, they are the weights"
    model[0].sum().backward()
    optimizer.step()
    assert (1.5 - model[0].float()).mean().item() == pytest.approx(1e-4, rel=0.2)


@pytest.mark.parametrize("weight", [0.0, -0.0, math.inf, -math.inf, 2.0**-130, 1.0, -2.0, 3.38e38])
def test_a_master_copy_is_rounded_to_its_weight(weight: float) -> None:
    model = nn.ParameterList([nn.Parameter(torch.full((64, 64), weight, dtype=torch.bfloat16))])
    (copies,) = Optimizer(model, OptimizerConfig(lr=1e-4)).masters
    assert torch.equal(copies.bfloat16().view(torch.int16), model[0].view(torch.int16))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_factor_multiplies_all_learning_rates(kind: Any) -> None:
    """A step at a factor of 0.1 is the step of a tenth of the rates."""
    model, twin = Tiny(), Tiny()
    slowed = Optimizer(model, OptimizerConfig(type=kind, lr=1e-2, muon_lr=0.02))
    slowed.lr_factor = 0.1
    slow = Optimizer(twin, OptimizerConfig(type=kind, lr=1e-3, muon_lr=0.002))
    assert learn(model, slowed, 2)[-1]["lr"] == pytest.approx(learn(twin, slow, 2)[-1]["lr"])
    assert torch.allclose(weights(model), weights(twin))
