"""Reinforcement learning, supervised learning and distillation share a batch, each with its own weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.models import tiny_model

from agentlightning.credit import training_samples
from agentlightning.errors import ConfigError, PolicyError, UnfaithfulSampleError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import OptimizerConfig
from agentlightning.policy.losses import token_losses
from agentlightning.policy.mismatch import corrections
from agentlightning.policy.update.updater import Updater, corrected, for_losses, normalized
from agentlightning.trajectory import Node, TokenTree, TrainingSample, Trajectory, Transition

torch.set_num_threads(1)  # more threads cost more than they bring at this size


@pytest.fixture
def updater() -> Updater:
    return Updater(tiny_model(), OptimizerConfig(lr=1e-3))


def pair() -> TrainingSample:
    """Two rollouts of one task, one of them rewarded."""
    calls = {
        name: Transition(name, "at", name, 1, (1, 2, 3), answer, (-3.0,) * len(answer))
        for name, answer in (("good", (7, 8, 9)), ("bad", (10, 11)))
    }
    group = [Trajectory(n, "at", (call,), reward) for (n, call), reward in zip(calls.items(), (1.0, 0.0), strict=True)]
    (sample,) = training_samples([group])[0]
    return sample


def example(*answer: int, temperature: float = 1.0) -> TrainingSample:
    """A conversation to imitate."""
    nodes = (Node(-1, (4, 5)), Node(0, answer, True, (0.0,) * len(answer), temperature=temperature))
    return TrainingSample(TokenTree(nodes), cross_entropy_weights=((), (1.0,) * len(answer)))


def column(sample: TrainingSample, value: float) -> list[Any]:
    return [np.full(len(n.token_ids) if n.sampled else 0, value, np.float32) for n in sample.tree.nodes]


def gradient(updater: Updater, samples: Sequence[TrainingSample], loss: Any) -> torch.Tensor:
    losses = token_losses(loss)
    prepared = normalized(for_losses(samples, losses), losses)
    updater.optimizer.zero_grad()
    updater.accumulate(updater.forward.plan(prepared, token_budget=64), losses)
    return torch.cat([p.grad.flatten() for p in updater.optimizer.parameters if p.grad is not None])


def test_each_stream_has_its_own_tokens_and_denominator(updater: Updater) -> None:
    """loss = sum_rl / N_rl + sum_ce / N_ce + sum_kl / N_kl"""
    rl, one, two = pair(), example(20, 21, 22), example(30)
    rl = replace(rl, columns={**rl.columns, "ref_logprobs": column(rl, -2.0), "reference_kl_weights": column(rl, 3.0)})
    found = gradient(updater, [one, rl, two], ["ppo", "nll", {"type": "kl", "coefficient": 0.5}])

    alone = gradient(updater, [rl], "ppo")
    imitated = sum(gradient(updater, [TrainingSample(s.tree, weights=column(s, 1.0))], "nll") for s in (one, two)) / 4
    weighed_by_1 = replace(rl, columns={**rl.columns, "reference_kl_weights": column(rl, 1.0)})
    held = gradient(updater, [weighed_by_1], {"type": "kl", "coefficient": 0.5})
    mean = TrainingSample(rl.tree, weights=column(rl, 1 / 5), ref_logprobs=column(rl, -2.0))
    assert torch.allclose(held, 0.5 * gradient(updater, [mean], {"type": "kl", "coefficient": 1.0}), atol=1e-6)
    expected = alone + imitated + 3 * held
    assert ((found - expected).norm() / expected.norm()).item() < 1e-5


def test_metrics_are_means_over_the_tokens_of_their_stream(updater: Updater) -> None:
    metrics = updater.step([pair(), example(20, 21, 22)], UpdateOptions(loss=["importance", "nll"]))
    own = Updater(tiny_model()).step([pair()], UpdateOptions(loss="importance"))
    assert metrics["tokens_trained"] == 8
    assert metrics["ratio"] == pytest.approx(own["ratio"], rel=1e-5), "the three imitated tokens have no ratio"
    assert metrics["nll"] == pytest.approx(
        Updater(tiny_model()).step([example(20, 21, 22)], UpdateOptions(loss="nll"))["nll"], rel=1e-5
    )


def test_a_sample_needs_the_columns_of_the_streams_it_has_a_part_in(updater: Updater) -> None:
    updater.step([pair(), example(20)], UpdateOptions(loss=["ppo", "nll"]))  # an example needs no advantages
    with pytest.raises(PolicyError, match=r'loss "kl" needs the columns \[\'ref_logprobs\'\]'):
        updater.step([pair()], UpdateOptions(loss=["ppo", "kl"]))
    with pytest.raises(PolicyError, match="has no column of weights"):
        updater.step([TrainingSample(pair().tree)], UpdateOptions(loss="ppo"))
    greedy = example(20, temperature=0.0)
    greedy = TrainingSample(greedy.tree, advantages=column(greedy, 1), weights=column(greedy, 1))
    with pytest.raises(UnfaithfulSampleError, match="temperature=0"):
        updater.step([greedy], UpdateOptions(loss="ppo"))


def test_imitated_answers_may_be_greedy_and_are_trained_at_temperature_1(updater: Updater) -> None:
    expected = gradient(updater, [pair(), example(20)], ["ppo", "nll"])
    assert torch.equal(gradient(updater, [pair(), example(20, temperature=0.0)], ["ppo", "nll"]), expected)


def test_a_correction_changes_the_weights_of_decoupled_losses_and_is_reported(updater: Updater) -> None:
    sample = pair()
    proximal = [np.array([-3.0 + np.log(r) for r in ratios[: len(n.token_ids)]], np.float32) if n.sampled else []
                for n, ratios in zip(sample.tree.nodes, ([], [4.0, 1.0, 0.5], [1.0, 1.0]), strict=True)]  # fmt: skip
    sample = replace(sample, columns={**sample.columns, "proximal_logprobs": proximal})
    losses = token_losses(["ppo"])
    found, metrics = corrected(for_losses([sample], losses), corrections("truncate"))
    factors = found.columns["corrected_weights"] / found.columns["weights"]
    assert factors.tolist() == pytest.approx([2.0, 1.0, 0.5, 1.0, 1.0])
    assert metrics == pytest.approx(
        {"mismatch_ratio": 7.5 / 5, "mismatch_weight": 5.5 / 5, "mismatch_masked": 0.0, "proximal_differs": 2 / 5,
         "mismatch_kl": (3 - np.log(4) - 0.5 - np.log(0.5)) / 5}, rel=1e-5
    )  # fmt: skip
    metrics = updater.step([sample], UpdateOptions(loss="ppo", mismatch="icepop"))
    assert metrics["mismatch_masked"] == pytest.approx(1 / 5)
    assert updater.step([sample], UpdateOptions(loss="ppo"))["mismatch_weight"] == pytest.approx(5.5 / 5), (
        "the default truncates"
    )
    assert "mismatch_weight" not in updater.step([sample], UpdateOptions(loss="ppo", mismatch="off"))
    assert "mismatch_weight" not in updater.step([sample], UpdateOptions(loss="dppo")), "it has a correction of its own"


def test_a_correction_that_cannot_act_is_refused(updater: Updater) -> None:
    with pytest.raises(PolicyError, match='needs the column "proximal_logprobs"'):
        updater.step([pair()], UpdateOptions(loss="ppo", mismatch="icepop"))
    with pytest.raises(ConfigError, match=r'mismatch corrects the ratios of other losses than "dppo"'):
        updater.step([pair()], UpdateOptions(loss="dppo", mismatch="icepop"))
    updater.step([pair()], UpdateOptions(loss="ppo", mismatch="off"))


def test_the_entropy_bonus_raises_entropy_and_only_it_costs_a_gradient(updater: Updater) -> None:
    seen: list[bool] = []
    original = updater.forward.logprobs

    def recorded(*arguments: Any) -> Any:
        logprobs, entropy = original(*arguments)
        seen.append(entropy.requires_grad)
        return logprobs, entropy

    updater.forward.logprobs = recorded  # type: ignore[method-assign]
    updater.step([pair()], UpdateOptions(loss="ppo"))
    entropies = [
        updater.step([pair()], UpdateOptions(loss={"type": "entropy", "coefficient": 1.0}))["entropy"] for _ in range(6)
    ]
    assert entropies[-1] > entropies[0]
    assert seen == [False, *[True] * 6]


def test_the_mean_entropy_of_earlier_steps_survives_a_resume(updater: Updater) -> None:
    assert updater.entropy[1] == 0
    first = updater.step([pair()])["entropy"]
    second = updater.step([pair()])["entropy"]
    assert updater.entropy[0] == pytest.approx((first + second) / 2)
    other = Updater(tiny_model(), OptimizerConfig(lr=1e-3))
    other.load_state_dict(updater.state_dict())
    assert other.entropy == updater.entropy
    older = updater.state_dict()
    del older["entropy"]
    other.load_state_dict(older)
    assert other.entropy[1] == 0
