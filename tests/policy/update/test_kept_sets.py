"""Tokens sampled under top-k or top-p are trained over the recorded sets: the formulas, written out in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from agentlightning.assemble import token_tree
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.losses import LossSetting
from agentlightning.policy.update import forward
from agentlightning.policy.update.forward import Chosen, logprobs_from_linear, logprobs_from_logits
from agentlightning.policy.update.packing import KeptTokens
from agentlightning.policy.update.updater import Updater
from agentlightning.trajectory import TokenTree, TrainingSample, Trajectory, Transition
from agentlightning.util.kept_sets import KeptSets

torch.set_num_threads(1)  # more threads cost more than they bring at this size

N, H, V = 9, 6, 31
SETS = [[int(i) for i in range(row, V, row)] if row % 4 else [] for row in range(1, N + 1)]
"""Of positions 4 and 8 every token is kept."""


def kept() -> KeptTokens:
    sets = KeptSets.of(SETS)
    return KeptTokens(sets.size_array(), sets.id_array())


def literal(logits: Tensor, token: int, temperature: float, own: Sequence[int]) -> tuple[Tensor, Tensor]:
    """log p(token) and the entropy of one distribution over the ids `own`, empty for all."""
    z = [logits[v] / temperature for v in (own or range(len(logits)))]
    log_sum = torch.stack(z).exp().sum().log()
    entropy = -torch.stack([(each - log_sum).exp() * (each - log_sum) for each in z]).sum()
    return logits[token] / temperature - log_sum, entropy


@pytest.mark.parametrize("rows", [1, 2, 10**6], ids=["row by row", "two rows", "one block"])
@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
def test_values_and_gradients_are_those_over_the_sets_to_1e_9(
    entropy: bool, size: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "BLOCK_CPU", rows * V)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((N, H), (V, H)))
    tokens = torch.tensor([own[row % len(own)] if own else row for row, own in enumerate(SETS)])
    temperatures = torch.linspace(0.5, 1.5, N, dtype=torch.float64)
    chosen = Chosen(tokens, temperatures, entropy, kept())
    logits = functional.linear(hidden, weight)
    pairs = [literal(logits[n], int(tokens[n]), float(temperatures[n]), SETS[n]) for n in range(N)]
    expected = tuple(torch.stack(each) for each in zip(*pairs, strict=True))
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)

    def total(found: Any) -> Tensor:
        return (found[0] * weights).sum() + ((found[1] * weights.flip(0)).sum() if entropy else 0)

    wanted = torch.autograd.grad(total(expected), (hidden, weight), retain_graph=True)
    for found in (
        logprobs_from_linear(hidden, weight, None, chosen, size),
        logprobs_from_logits(functional.linear(hidden, weight), chosen),
        tuple(
            torch.cat(each)
            for each in zip(
                *(
                    logprobs_from_logits(functional.linear(hidden[part], weight), chosen.part(part))
                    for part in (slice(start, min(start + size, N)) for start in range(0, N, size))
                ),
                strict=True,
            )
        ),
    ):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(torch.autograd.grad(total(found), (hidden, weight)), wanted, atol=1e-9, rtol=1e-9)


def test_tokens_that_were_not_kept_have_no_gradient() -> None:
    logits = torch.randn(N, V, requires_grad=True)
    tokens = torch.tensor([own[0] if own else 0 for own in SETS])
    logprobs, entropy = logprobs_from_logits(logits, Chosen(tokens, None, True, kept()))
    (logprobs.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    for gradient, own in zip(logits.grad, SETS, strict=True):
        assert torch.isfinite(gradient).all()
        if own:
            assert not gradient[[v for v in range(V) if v not in own]].any()


def test_a_set_of_the_sampled_token_alone_has_the_probability_one() -> None:
    one = KeptTokens(np.array([1]), np.array([5]))
    logprobs, entropy = logprobs_from_logits(torch.randn(1, V), Chosen(torch.tensor([5]), None, False, one))
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)


def test_ids_that_another_model_lacks_are_left_out() -> None:
    tokens, sets = torch.tensor([3, 4]), KeptTokens(np.array([2, 1]), np.array([3, V + 7, 4]))
    logprobs, _ = logprobs_from_logits(torch.randn(2, V), Chosen(tokens, None, False, sets))
    assert logprobs.tolist() == [0.0, 0.0]


# -- a batch --------------------------------------------------------------------------------------------------------


def model(seed: int = 0) -> GPT2LMHeadModel:
    """One without parts that are always computed in float32."""
    torch.manual_seed(seed)
    shape = {"vocab_size": V, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.3)).double().eval()


def sets_with(draw: random.Random, sampled: Sequence[int]) -> KeptSets:
    return KeptSets.of(sorted({token, *draw.sample(range(V), draw.randrange(8))}) for token in sampled)


def group(limited: bool = True) -> list[Trajectory]:
    """Rollouts of two calls that continue one another, the second of which has no sets."""
    draw, other, found = random.Random(3), random.Random(4), list[Trajectory]()
    for rollout in "abc":
        first = tuple(draw.randrange(V) for _ in range(4))
        sets = sets_with(other, first) if limited else None
        calls = [((1, 2, 3), first, sets), ((1, 2, 3, *first, 9), tuple(draw.randrange(V) for _ in range(3)), None)]
        transitions = tuple(
            Transition(rollout, "at", f"{rollout}{i}", i, prompt, sampled, (-1.0,) * len(sampled), kept_sets=own)
            for i, (prompt, sampled, own) in enumerate(calls)
        )
        found.append(Trajectory(rollout, "at", transitions, draw.random()))
    return found


def sample(tree: TokenTree, *names: str) -> TrainingSample:
    draw = random.Random(5)
    columns = {
        name: [
            [draw.uniform(0.5, 1.0) * (-1 if "logprobs" in name else 1) for _ in node.logprobs] for node in tree.nodes
        ]
        for name in ("advantages", "weights", *names)
    }
    return TrainingSample(tree, columns=columns)


def gradient(updater: Updater, batch: Sequence[TrainingSample], loss: LossSetting, **plan: Any) -> Tensor:
    updater.zero_grad()
    updater.accumulate(updater.forward.plan(batch, token_budget=64, **plan), loss)
    return torch.cat([p.grad.flatten() for p in updater.optimizer.parameters if p.grad is not None])


def by_hand(network: nn.Module, batch: TrainingSample, loss: str) -> Tensor:
    """The gradient of a loss, token by token, from whole rows of logits."""
    total: Any = 0.0
    nodes = batch.tree.nodes
    for index, node in enumerate(nodes):
        if not node.sampled:
            continue
        path = [token for each in batch.tree.path(index) for token in nodes[each].token_ids]
        begin = len(path) - len(node.token_ids)
        logits = network(torch.tensor([path])).logits[0]
        sets = node.kept_sets.lists() if node.kept_sets else [[]] * len(node.token_ids)
        for place, token in enumerate(node.token_ids):
            logprob, entropy = literal(logits[begin + place - 1], token, node.temperature, sets[place])
            value = {name: float(column[index][place]) for name, column in batch.columns.items()}
            ratio = (logprob - node.logprobs[place]).exp()
            match loss:
                case "importance":
                    each = -ratio * value["advantages"]
                case "entropy":
                    each = -0.01 * entropy
                case "kl":
                    d = logprob - value["ref_logprobs"]
                    each = 0.001 * ratio * ((-d).exp() - 1 + d)
                case "distill":
                    each = -ratio * (value["teacher_logprobs"] - logprob.detach())
                case _:
                    d = logprob.detach() - value["teacher_logprobs"]
                    each = ratio.detach().clamp(max=2) * d * logprob
            total = total + value["weights"] * each
    found = torch.autograd.grad(total, [*network.parameters()], allow_unused=True)
    return torch.cat([each.flatten() for each in found if each is not None])


@pytest.mark.parametrize("loss", ["importance", "entropy", "kl", "distill", "sdpo"])
def test_the_gradient_of_each_loss_is_that_of_its_formula_over_the_sets_to_1e_9(loss: str) -> None:
    network = model()
    batch = sample(token_tree(group()), "ref_logprobs", "teacher_logprobs")
    found = gradient(Updater(network), [batch], loss)
    network.zero_grad()
    expected = by_hand(network, batch, loss)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-9
    without = sample(token_tree(group(limited=False)), "ref_logprobs", "teacher_logprobs")
    assert float((by_hand(network, without, loss) - expected).abs().max()) > 1e-6 * float(expected.abs().max())


@pytest.mark.parametrize("sharing", ["rows", "merged", "shared"])
def test_sets_stay_with_their_tokens_in_every_plan(sharing: Any) -> None:
    updater, batch = Updater(model()), sample(token_tree(group()))
    expected = gradient(updater, [batch], "importance", sharing="auto")
    torch.testing.assert_close(gradient(updater, [batch], "importance", sharing=sharing), expected)


def test_what_is_scored_by_any_model_is_over_the_same_sets() -> None:
    tree = token_tree(group())
    for network in (model(), model(seed=7)):
        scores = Updater(network).forward.score([tree])["logprobs"][0]
        for index, node in enumerate(tree.nodes):
            if not node.sampled:
                continue
            path = [token for each in tree.path(index) for token in tree.nodes[each].token_ids]
            logits = network(torch.tensor([path])).logits[0].detach()
            sets = node.kept_sets.lists() if node.kept_sets else [[]] * len(node.token_ids)
            begin = len(path) - len(node.token_ids) - 1
            own = [literal(logits[begin + i], t, 1.0, sets[i])[0].item() for i, t in enumerate(node.token_ids)]
            np.testing.assert_allclose(scores[index], own, atol=1e-6)


def test_imitation_is_over_the_whole_vocabulary() -> None:
    updater = Updater(model())
    batches = [sample(token_tree(group(limited))) for limited in (True, False)]
    torch.testing.assert_close(*(gradient(updater, [batch], "nll") for batch in batches))
    assert "tokens_with_kept_sets" not in updater.step([batches[0]], UpdateOptions(loss="nll"))


def test_the_tokens_trained_over_sets_are_counted() -> None:
    tree = token_tree(group())
    sizes = [size for node in tree.nodes if node.kept_sets for size in node.kept_sets.size_array().tolist()]
    metrics = Updater(model()).step([sample(tree)], UpdateOptions(loss="importance", minibatches=1))
    assert metrics["tokens_with_kept_sets"] == len(sizes) == 12
    assert math.isclose(metrics["kept_set_size"], sum(sizes) / len(sizes))
    assert "tokens_with_kept_sets" not in Updater(model()).step(
        [sample(token_tree(group(False)))], UpdateOptions(loss="importance")
    )
