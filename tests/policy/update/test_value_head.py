"""The value head: what it sees, what it learns, and that the policy does not notice it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models import tiny_model

from agentlightning.errors import PolicyError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import OptimizerConfig, ValueHeadConfig
from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.updater import Updater
from agentlightning.policy.update.value_head import FILE, ValueHead
from agentlightning.trajectory import Node, TokenTree, TrainingSample

pytestmark = pytest.mark.integration

torch.set_num_threads(1)  # more threads cost more than they bring at this size

PROMPT = (1, 2, 3)
ANSWERS = ((7, 9, 4), (8, 9), (11, 5, 6, 7))
RETURNS = (1.0, 0.0, 0.5)


def updater(architecture: Any = "llama", lr: float = 1e-3, **head: Any) -> Updater:
    model = tiny_model(architecture)
    return Updater(model, OptimizerConfig(lr=lr), value_head=ValueHead.of(model, ValueHeadConfig(**head)))


def with_a_view(updater: Updater) -> ValueHead:
    """The updater's head, with values that are not all 0."""
    assert updater.value_head is not None
    torch.nn.init.normal_(list(updater.value_head.parameters())[-2])
    return updater.value_head


def sample(values: Sequence[Any] | None = None) -> TrainingSample:
    """Three answers to one prompt, each with the return of its own."""
    sampled = [Node(0, a, True, (-2.0,) * len(a), f"r{i}", f"c{i}") for i, a in enumerate(ANSWERS)]
    tree = TokenTree((Node(-1, PROMPT), *sampled))
    lengths = [len(answer) for answer in ANSWERS]
    columns: dict[str, Sequence[Any]] = {
        "advantages": [(), *((r - 0.5,) * n for r, n in zip(RETURNS, lengths, strict=True))],
        "weights": [(), *((1 / 3 / n,) * n for n in lengths)],
        "returns": [(), *((r,) * n for r, n in zip(RETURNS, lengths, strict=True))],
        "values": values or [(), *((0.0,) * n for n in lengths)],
    }
    return TrainingSample(tree, columns=columns)


def gradient(updater: Updater, loss: Any, **plan: Any) -> torch.Tensor:
    updater.zero_grad()
    updater.accumulate(updater.forward.plan([sample()], **plan), loss)
    return torch.cat([p.grad.flatten() for p in updater.optimizer.parameters if p.grad is not None])


def values_of(updater: Updater) -> list[list[float]]:
    (column,) = updater.forward.score([sample().tree], {"values"}, value_head=updater.value_head)["values"]
    return [each.tolist() for each in column[1:]]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_value_sees_the_tokens_before_its_own_and_no_more(architecture: Any) -> None:
    learner = updater(architecture)
    head = with_a_view(learner)
    found = values_of(learner)
    assert found[0][0] == pytest.approx(found[1][0]) == pytest.approx(found[2][0]), "all have the same prompt before"
    base: Any = learner.model.get_decoder()
    with torch.no_grad():
        hidden = base(torch.tensor([[*PROMPT, *ANSWERS[0]]])).last_hidden_state[0, len(PROMPT) - 1 : -1]
        assert found[0] == pytest.approx(head(hidden).tolist(), abs=1e-5)


@pytest.mark.parametrize("head", [{"type": "linear"}, {"type": "mlp", "hidden_size": 16}])
def test_a_detached_critic_leaves_the_gradient_and_the_step_of_the_policy_as_they_are(head: dict[str, Any]) -> None:
    with_critic, without = updater(**head), Updater(tiny_model(), OptimizerConfig(lr=1e-3))
    for plan in ({"sharing": "shared"}, {"sharing": "merged"}):
        assert torch.equal(gradient(with_critic, ["ppo", "value"], **plan), gradient(without, ["ppo"], **plan))
    for _ in range(3):
        critic = with_critic.step([sample()], UpdateOptions(loss=["ppo", "value"]))
        plain = without.step([sample()], UpdateOptions(loss=["ppo"]))
        assert critic["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-6), "by which it is clipped"
        assert critic["value_grad_norm"] > 0
    for mine, theirs in zip(with_critic.model.parameters(), without.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)  # A step is 1e-3; sums round by their order.


def test_a_critic_that_trains_the_body_changes_its_gradient() -> None:
    learner = updater(trains_body=True)
    with_a_view(learner)
    plain = gradient(learner, "ppo")
    assert not torch.allclose(gradient(learner, ["ppo", "value"]), plain)
    single, double = (gradient(learner, ["ppo", {"type": "value", "coefficient": c}]) for c in (1.0, 2.0))
    torch.testing.assert_close(double - plain, 2 * (single - plain), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", [{"type": "linear", "lr": 0.02}, {"type": "mlp", "hidden_size": 16, "lr": 0.02}])
def test_values_approach_the_returns_and_explain_more_of_their_variance(head: dict[str, Any]) -> None:
    learner = updater(**head)
    explained: list[float] = []
    for _ in range(60):
        old = learner.forward.score([sample().tree], {"values"}, value_head=learner.value_head)["values"][0]
        explained.append(learner.step([sample(old)], UpdateOptions(loss="value"))["explained_variance"])
    assert explained[0] == pytest.approx(0.0, abs=1e-6), "the head starts at 0"
    assert explained[-1] > 0.5, "the first token of each answer has no more than the prompt before it"
    found = values_of(learner)
    assert found[0][-1] > found[1][-1] + 0.5


def test_the_learning_rate_is_its_own_and_follows_the_schedule_and_the_factor_of_the_policy() -> None:
    model = tiny_model()
    config = OptimizerConfig(type="muon", lr=1e-3, schedule="linear", total_steps=4, weight_decay=0.1)
    learner = Updater(model, config, value_head=ValueHead.of(model, ValueHeadConfig(lr=0.5)))
    rates = [learner.step([sample()], UpdateOptions(loss=["ppo", "value"]))["value_lr"] for _ in range(2)]
    assert rates == [0.5, 0.375]
    slowed = learner.step([sample()], UpdateOptions(loss=["ppo", "value"], lr_factor=0.1))
    assert [slowed["lr"], slowed["value_lr"]] == pytest.approx([0.5e-4, 0.025])
    default = ValueHead.of(model, ValueHeadConfig()).optimizer_config(config)
    assert (default.lr, default.type, default.weight_decay) == (0.1 / 32, "adamw", 0.0)


@pytest.mark.parametrize("recomputes", [False, True])
def test_chunked_logits_change_no_gradient_of_policy_critic_and_entropy(
    recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = ["ppo", "value", {"type": "entropy", "coefficient": 0.1}]
    model = tiny_model()
    head = ValueHead.of(model, ValueHeadConfig(trains_body=True))
    forward = Forward(model, gradient_checkpointing=recomputes)
    learner = Updater(model, OptimizerConfig(lr=1e-3), value_head=head, forward=forward)
    with_a_view(learner)
    whole = gradient(learner, losses)
    monkeypatch.setattr("agentlightning.policy.update.forward.CHUNK_LOGITS", 2 * learner.forward.head.vocabulary)
    torch.testing.assert_close(gradient(learner, losses), whole, atol=1e-6, rtol=1e-4)


def test_a_step_that_is_skipped_leaves_the_critic_as_it_is() -> None:
    learner = updater()
    assert learner.value_head is not None
    before = {name: value.clone() for name, value in learner.value_head.state_dict().items()}
    broken = sample([(), *((float("nan"),) * len(answer) for answer in ANSWERS)])
    assert learner.step([broken], UpdateOptions(loss=["ppo", "value"]))["optimizer_steps"] == 0
    assert all(torch.equal(before[name], value) for name, value in learner.value_head.state_dict().items())


def test_the_loss_without_a_head_names_the_setting() -> None:
    plain = Updater(tiny_model())
    with pytest.raises(PolicyError, match=r'loss "value" trains a critic.*set policy\.value_head = "linear"'):
        plain.step([sample()], UpdateOptions(loss=["ppo", "value"]))
    bare = TrainingSample(sample().tree, weights=sample().weights)
    with pytest.raises(PolicyError, match="returns"):
        updater().step([bare], UpdateOptions(loss="value"))


def test_a_saved_head_is_read_by_a_head_of_the_same_shape_only(tmp_path: Path) -> None:
    model = tiny_model()
    saved, same = (ValueHead.of(model, ValueHeadConfig(type="mlp"), seed=seed) for seed in (1, 2))
    saved.save_pretrained(tmp_path)
    weights = same.read(tmp_path)
    assert weights is not None
    assert all(torch.equal(weights[name], value) for name, value in saved.state_dict().items())
    with pytest.raises(PolicyError, match=r"another value head: layers\.0\.bias and 3 more weights"):
        ValueHead.of(model, ValueHeadConfig()).read(tmp_path)
    (tmp_path / FILE).write_bytes(b"cut")
    with pytest.raises(PolicyError, match="cannot be read"):
        same.read(tmp_path)
    assert same.read(tmp_path / "elsewhere") is None


@pytest.mark.parametrize("what", [("logprobs", "entropy", "values"), ("values", "entropy", "logprobs")])
def test_processes_join_columns_in_one_order(what: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a set differs from process to process."""
    made, joined = updater(), list[float]()
    monkeypatch.setattr(made.forward, "joint", lambda found: joined.append(float(found.sum())) or found)
    made.forward.score([sample().tree], dict.fromkeys(what).keys(), value_head=with_a_view(made))
    entropy, logprobs, values = joined
    assert entropy > 0 > logprobs
    assert values not in (entropy, logprobs)
