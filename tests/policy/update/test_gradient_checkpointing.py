"""Gradient checkpointing stores less and changes nothing else, prefix sharing included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.models import tiny_model
from transformers import PreTrainedModel

from agentlightning.credit import training_samples
from agentlightning.errors import ConfigError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import OptimizerConfig, ValueHeadConfig
from agentlightning.policy.update.forward import Forward, layers_to_recompute
from agentlightning.policy.update.updater import Updater
from agentlightning.policy.update.value_head import ValueHead
from agentlightning.trajectory import TrainingSample, Trajectory, Transition

torch.set_num_threads(1)  # more threads cost more than they bring at this size


def samples(prompt: int = 12, answer: int = 5) -> list[TrainingSample]:
    """Four rollouts from one prompt, two calls each."""
    group: list[Trajectory] = []
    for i in range(4):
        first, second = (tuple(range(20 + 9 * i + k, 20 + 9 * i + k + answer)) for k in (0, 30))
        history = tuple(range(1, prompt + 1))
        calls = [
            Transition(f"r{i}", "at", f"c{i}-{n}", n, p, s, (-5.0,) * len(s))
            for n, p, s in ((1, history, first), (2, (*history, *first, 3, 4), second))
        ]
        group.append(Trajectory(f"r{i}", "at", tuple(calls), float(i)))
    return training_samples([group])[0]


def checkpointed(model: PreTrainedModel) -> Updater:
    return Updater(model, forward=Forward(model, gradient_checkpointing=True))


def gradient(updater: Updater, loss: Any = "ppo", **plan: Any) -> torch.Tensor:
    updater.zero_grad()
    updater.accumulate(updater.forward.plan(samples(), **plan), loss)
    return torch.cat([p.grad.flatten() for p in updater.optimizer.parameters if p.grad is not None])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("sharing", ["merged", "shared"])
@pytest.mark.parametrize("budget", [60, 10_000])
def test_the_gradient_is_the_same_with_and_without_a_shared_prefix(
    architecture: Any, sharing: Any, budget: int
) -> None:
    updater = checkpointed(tiny_model(architecture))
    plain = Updater(tiny_model(architecture))
    expected = gradient(plain, sharing=sharing, token_budget=budget)
    assert torch.allclose(gradient(updater, sharing=sharing, token_budget=budget), expected, atol=1e-6, rtol=1e-5)


def test_layers_run_again_in_the_backward_pass_and_the_last_one_does_not() -> None:
    updater = checkpointed(tiny_model())
    calls: list[int] = []
    for i, layer in enumerate(updater.model.model.layers):
        layer.self_attn.register_forward_hook(lambda *_args, i=i: calls.append(i))
    gradient(updater, sharing="merged", token_budget=10_000)
    assert calls == [0, 1, 0]
    with torch.no_grad():
        updater.forward.score([each.tree for each in samples()])
    assert "forward" not in updater.model.model.layers[0].__dict__


def stored_bytes(model: PreTrainedModel, checkpointing: bool, sharing: Any) -> int:
    """Bytes that the forward pass stores for the backward pass, beside the weights."""
    updater = Updater(model, forward=Forward(model, gradient_checkpointing=checkpointing))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            found[place] = tensor.untyped_storage().nbytes(), tensor
        return tensor

    for batch in updater.forward.plan(samples(prompt=100, answer=30), sharing=sharing):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            updater.forward.states(batch)
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize(("sharing", "most"), [("merged", 0.35), ("shared", 0.55)])
def test_less_than_half_is_stored(sharing: Any, most: float) -> None:
    torch.manual_seed(0)
    config = tiny_model("llama").config
    config.num_hidden_layers = 8
    model = type(tiny_model("llama"))(config)
    assert stored_bytes(model, True, sharing) < most * stored_bytes(model, False, sharing)


def test_a_step_with_a_critic_is_the_same() -> None:
    steps: list[tuple[dict[str, float], torch.Tensor]] = []
    for checkpointing in (False, True):
        model = tiny_model()
        head = ValueHead.of(model, ValueHeadConfig(trains_body=True))
        updater = Updater(
            model,
            OptimizerConfig(lr=1e-3),
            value_head=head,
            forward=Forward(model, gradient_checkpointing=checkpointing),
        )
        zeros = [
            TrainingSample(s.tree, columns={**s.columns, "values": [a * 0 for a in s.weights], "returns": s.advantages})
            for s in samples()
        ]
        metrics = updater.step(zeros, UpdateOptions(loss=["ppo", "value"]))
        steps.append((metrics, torch.cat([p.detach().flatten() for p in model.parameters()])))
    (plain, plain_weights), (again, again_weights) = steps
    assert again == pytest.approx(plain, rel=1e-4, abs=1e-6)
    assert torch.allclose(plain_weights, again_weights, atol=1e-6)


def test_a_model_whose_layers_cannot_be_computed_again_is_refused() -> None:
    model = tiny_model()
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(ConfigError, match=r"policy\.gradient_checkpointing: LlamaForCausalLM has no layers"):
        layers_to_recompute(model)
