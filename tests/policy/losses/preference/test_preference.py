"""DPO, IPO, KTO and SimPO against literal transcriptions of their papers in float64, value and gradient."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.policy.losses import PreferenceLoss, TokenBatch, token_losses

BETA = 0.3


@dataclass(frozen=True)
class Token:
    now: float
    ref: float


Sequence_ = Sequence[Token]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def ratio(tokens: Sequence_) -> float:
    """log of pi(y) over pi_ref(y), the probabilities multiplied out."""
    return math.log(math.prod(math.exp(t.now) for t in tokens) / math.prod(math.exp(t.ref) for t in tokens))


def dpo(chosen: Sequence_, rejected: Sequence_) -> float:
    """arXiv:2305.18290, equation 7."""
    return -math.log(sigmoid(BETA * ratio(chosen) - BETA * ratio(rejected)))


def cautious_dpo(chosen: Sequence_, rejected: Sequence_) -> float:
    x = BETA * ratio(chosen) - BETA * ratio(rejected)
    return -0.9 * math.log(sigmoid(x)) - 0.1 * math.log(sigmoid(-x))


def ipo(chosen: Sequence_, rejected: Sequence_) -> float:
    """arXiv:2310.12036, equation 17."""
    return (ratio(chosen) / len(chosen) - ratio(rejected) / len(rejected) - 1 / (2 * BETA)) ** 2


def simpo(chosen: Sequence_, rejected: Sequence_) -> float:
    """arXiv:2405.14734, equation 6."""
    means = [sum(t.now for t in each) / len(each) for each in (chosen, rejected)]
    return -math.log(sigmoid(BETA * means[0] - BETA * means[1] - 0.5))


PAIRED: dict[str, tuple[dict[str, float], Callable[[Sequence_, Sequence_], float]]] = {
    "dpo": ({}, dpo),
    "dpo, smoothed": ({"label_smoothing": 0.1}, cautious_dpo),
    "ipo": ({}, ipo),
    "simpo": ({"gamma": 0.5}, simpo),
}


def drawn(seed: int) -> tuple[list[Token], list[Token]]:
    draw = random.Random(seed)
    chosen, rejected = (
        [Token(draw.uniform(-3, -0.01), draw.uniform(-3, -0.01)) for _ in range(draw.randint(1, 5))] for _ in range(2)
    )
    return chosen, rejected


def loss_of(name: str) -> PreferenceLoss:
    (loss,) = token_losses({"type": name.partition(",")[0], "beta": BETA, **PAIRED.get(name, ({}, None))[0]})
    assert isinstance(loss, PreferenceLoss)
    return loss


def batch(sequences: Sequence[tuple[Sequence_, float]], margin: float) -> TokenBatch:
    """Sequences with the factor of each of their tokens."""
    tokens = [t for each, _ in sequences for t in each]
    columns = {
        "weights": [1.0] * len(tokens),
        "preference_margin": [margin] * len(tokens),
        "preference_factor": [factor for each, factor in sequences for _ in each],
        "preference_tokens": [float(len(tokens))] * len(tokens),
    }
    named = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    now = torch.tensor([t.now for t in tokens], dtype=torch.float64).requires_grad_()
    which = torch.arange(len(tokens))
    return TokenBatch(now, named, call=which, rollout=which)


def pair(loss: PreferenceLoss, chosen: Sequence_, rejected: Sequence_) -> TokenBatch:
    factors = [1 / len(each) if loss.mean else 1.0 for each in (chosen, rejected)]
    margin = sum(
        sign * factor * sum(t.now - (t.ref if loss.reference else 0.0) for t in each)
        for each, factor, sign in zip((chosen, rejected), factors, (1, -1), strict=True)
    )
    return batch([(chosen, factors[0]), (rejected, -factors[1])], margin)


@pytest.mark.parametrize("name", sorted(PAIRED))
@given(seed=st.integers(0, 10_000))
def test_the_tokens_of_a_pair_add_up_to_the_formula(name: str, seed: int) -> None:
    chosen, rejected = drawn(seed)
    loss = loss_of(name)
    assert loss(pair(loss, chosen, rejected)).loss.item() == pytest.approx(
        PAIRED[name][1](chosen, rejected), rel=1e-9, abs=1e-9
    )


@pytest.mark.parametrize("name", sorted(PAIRED))
@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_is_that_of_the_formula(name: str, seed: int) -> None:
    sides = drawn(seed)
    loss, width = loss_of(name), 1e-5
    made = pair(loss, *sides)
    loss(made).loss.backward()
    assert made.trained_logprobs.grad is not None
    found = made.trained_logprobs.grad.tolist()
    for side in (0, 1):
        for index, token in enumerate(sides[side]):
            values = []
            for step in (width, -width):
                moved = [list(sides[0]), list(sides[1])]
                moved[side][index] = replace(token, now=token.now + step)
                values.append(PAIRED[name][1](*moved))
            expected = (values[0] - values[1]) / 2 / width
            assert found[index + side * len(sides[0])] == pytest.approx(expected, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("good", [True, False])
@given(seed=st.integers(0, 10_000), baseline=st.floats(0, 2))
def test_kto_is_its_formula_for_good_and_bad_answers(good: bool, seed: int, baseline: float) -> None:
    """arXiv:2402.01306, equation 8: lambda_D for good answers, lambda_U for bad ones."""
    tokens, _ = drawn(seed)
    (loss,) = token_losses({"type": "kto", "beta": BETA, "desirable_weight": 1.5, "undesirable_weight": 0.7})
    r = ratio(tokens)
    if good:
        expected, margin = 1.5 * (1 - sigmoid(BETA * (r - baseline))), r - baseline
    else:
        expected, margin = 0.7 * (1 - sigmoid(BETA * (baseline - r))), baseline - r
    made = batch([(tokens, 1.0 if good else -1.0)], margin)
    value = loss(made)
    assert value.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    value.loss.backward()
    assert made.trained_logprobs.grad is not None
    assert (made.trained_logprobs.grad[0] < 0).item() is good  # good answers become more probable


def test_a_pair_in_two_micro_batches_has_the_same_gradient() -> None:
    chosen, rejected = drawn(3)
    loss = loss_of("dpo")
    whole = pair(loss, chosen, rejected)
    loss(whole).loss.backward()
    parts = []
    for keep in (slice(0, len(chosen)), slice(len(chosen), None)):
        now = whole.trained_logprobs.detach()[keep].clone().requires_grad_()
        columns = {name: column[keep] for name, column in whole.columns.items()}
        loss(TokenBatch(now, columns, call=whole.call[keep], rollout=whole.rollout[keep])).loss.backward()
        assert now.grad is not None
        parts += now.grad.tolist()
    assert whole.trained_logprobs.grad is not None
    assert parts == whole.trained_logprobs.grad.tolist()
