"""Every loss against a slow, literal transcription of its formula, token by token in float64, to 1e-9."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.policy.losses import LOSSES, TokenBatch, TokenLoss, token_losses


@dataclass(frozen=True)
class Token:
    """All that a loss may read of one token."""

    now: float
    old: float
    advantage: float
    weight: float
    ref: float
    teacher: float
    entropy: float
    call: int
    rollout: int


Tokens = Sequence[Token]
Past = float | None


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(tokens: Tokens, _: Past) -> float:
    """arXiv:1707.06347, equation 7, with a bound for A < 0 (arXiv:1912.09729, equation 5)."""
    total = 0.0
    for t in tokens:
        r = math.exp(t.now) / math.exp(t.old)
        objective = min(r * t.advantage, clip(r, 0.8, 1.28) * t.advantage)
        if t.advantage < 0:
            objective = max(objective, 1.5 * t.advantage)
        total -= t.weight * objective
    return total


def of_sequence(tokens: Tokens, name: str, low: float, high: float) -> float:
    """arXiv:2507.18071, equations 5 and 7, the sequence being all tokens with the same `name`."""
    total = 0.0
    for t in tokens:
        own = [u for u in tokens if getattr(u, name) == getattr(t, name)]
        likelihood, before = math.prod(math.exp(u.now) for u in own), math.prod(math.exp(u.old) for u in own)
        s = (likelihood / before) ** (1 / len(own))
        total -= t.weight * min(s * t.advantage, clip(s, 1 - low, 1 + high) * t.advantage)
    return total


def whole_rollout(tokens: Tokens, _: Past) -> float:
    """arXiv:2402.14740, section 3: one action, whose ratio is that of the likelihoods of all that was sampled."""
    total = 0.0
    for t in tokens:
        own = [u for u in tokens if u.rollout == t.rollout]
        total -= t.weight * t.advantage * math.prod(math.exp(u.now - u.old) for u in own)
    return total


def cispo(tokens: Tokens, _: Past) -> float:
    """arXiv:2506.13585, equations 4 and 5."""
    return -sum(t.weight * clip(math.exp(t.now - t.old), 0.7, 1.5) * t.advantage * t.now for t in tokens)


def sapo(tokens: Tokens, _: Past) -> float:
    """arXiv:2511.20347."""
    total = 0.0
    for t in tokens:
        tau = 1.0 if t.advantage > 0 else 1.05
        total -= t.weight * t.advantage * 4 / tau / (1 + math.exp(-tau * (math.exp(t.now - t.old) - 1)))
    return total


def dppo(tokens: Tokens, _: Past) -> float:
    """arXiv:2602.04879, the binary total variation mask, with a squared log-ratio."""
    total = 0.0
    for t in tokens:
        p, q = math.exp(t.now), math.exp(t.old)
        masked = p - q > 0.2 if t.advantage > 0 else q - p > 0.2
        total += t.weight * (1e-3 * math.log(p / q) ** 2 - (0.0 if masked else p / q * t.advantage))
    return total


def entropy(tokens: Tokens, past: Past) -> float:
    """An entropy bonus with the band of arXiv:2509.22576."""
    total = 0.0
    for t in tokens:
        penalty = 0.0
        if past is not None:
            penalty = max(0.0, 0.8 * past - t.entropy) + max(0.0, t.entropy - 1.2 * past)
        total -= t.weight * (t.entropy - 0.5 * penalty)
    return total


def kl(estimator: str) -> Callable[[Tokens, Past], float]:
    def total(tokens: Tokens, _: Past) -> float:
        found = 0.0
        for t in tokens:
            ratio = math.exp(t.ref) / math.exp(t.now)
            k3 = ratio - 1 - math.log(ratio)
            values = {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": k3}
            values["unbiased"] = math.exp(t.now) / math.exp(t.old) * k3
            found += t.weight * values[estimator]
        return found

    return total


def distill(tokens: Tokens, _: Past) -> float:
    return sum(t.weight * math.exp(t.now - t.old) * (t.now - t.teacher) for t in tokens)


def sdpo(tokens: Tokens, _: Past) -> float:
    """arXiv:2601.20802, at the sampled tokens, with the truncated ratio."""
    return sum(t.weight * min(math.exp(t.now - t.old), 2.0) * (t.now - t.teacher) * t.now for t in tokens)


def awr(tokens: Tokens, _: Past) -> float:
    """arXiv:1910.00177, equation 3, with the bound of section 4."""
    return -sum(t.weight * min(math.exp(t.advantage / 0.5), 20.0) * t.now for t in tokens)


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Tokens, Past], float]]] = {
    "ppo": ({"dual_clip": 1.5}, ppo),
    "gspo": ({"clip_low": 0.1, "clip_high": 0.2}, lambda tokens, _: of_sequence(tokens, "rollout", 0.1, 0.2)),
    "turn": ({}, lambda tokens, _: of_sequence(tokens, "call", 0.2, 0.28)),
    "cispo": ({"clip_low": 0.3, "clip_high": 0.5}, cispo),
    "sapo": ({}, sapo),
    "dppo": ({}, dppo),
    "importance": ({}, lambda tokens, _: -sum(t.weight * math.exp(t.now - t.old) * t.advantage for t in tokens)),
    "importance, rollout": ({"level": "rollout"}, whole_rollout),
    "awr": ({}, awr),
    "nll": ({}, lambda tokens, _: -sum(t.weight * t.now for t in tokens)),
    "entropy": ({"smoothing": 0.5}, entropy),
    "kl": ({}, kl("unbiased")),
    "kl, k1": ({"estimator": "k1"}, kl("k1")),
    "kl, k2": ({"estimator": "k2"}, kl("k2")),
    "kl, k3": ({"estimator": "k3"}, kl("k3")),
    "distill": ({}, distill),
    "sdpo": ({}, sdpo),
}


def loss_of(name: str) -> TokenLoss:
    (loss,) = token_losses({"type": name.partition(",")[0], **FORMULAS[name][0]})
    return loss


def tokens_of(seed: int) -> list[Token]:
    """Calls of one to four tokens, several in a rollout, in any order."""
    draw = random.Random(seed)
    found: list[Token] = []
    for call in range(draw.randint(1, 5)):
        for _ in range(draw.randint(1, 4)):
            now = draw.uniform(-4, -0.01)
            near = [now + draw.uniform(-0.7, 0.7) for _ in range(3)]
            advantage = draw.choice([draw.uniform(-2, 2), 0.0])
            found.append(Token(now, near[0], advantage, draw.random(), *near[1:], draw.uniform(0, 3), call, call // 2))
    draw.shuffle(found)
    return found


def batch(tokens: Tokens, past: Past = None, **columns: str) -> TokenBatch:
    def vector(name: str) -> torch.Tensor:
        return torch.tensor([getattr(t, name) for t in tokens], dtype=torch.float64)

    named = {"sampled_logprobs": "old", "advantages": "advantage", "weights": "weight", "ref_logprobs": "ref"}
    named |= {"teacher_logprobs": "teacher"} | columns
    return TokenBatch(
        vector("now").requires_grad_(),
        {name: vector(field) for name, field in named.items()},
        call=torch.tensor([t.call for t in tokens]),
        rollout=torch.tensor([t.rollout for t in tokens]),
        entropy=vector("entropy").requires_grad_(),
        past_entropy=past,
    )


def test_every_loss_has_its_formula() -> None:
    assert {name.partition(",")[0] for name in FORMULAS} >= set(LOSSES) - {"value", "dpo", "ipo", "kto", "simpo"}


@pytest.mark.parametrize("name", sorted(FORMULAS))
@given(seed=st.integers(0, 10_000), past=st.sampled_from([None, 0.5, 1.5]))
def test_a_loss_is_its_formula(name: str, seed: int, past: Past) -> None:
    tokens = tokens_of(seed)
    value = loss_of(name)(batch(tokens, past))
    assert value.loss.item() == pytest.approx(FORMULAS[name][1](tokens, past), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    "name", sorted(set(FORMULAS) - {"cispo", "sdpo", "distill", "gspo", "turn", "importance, rollout"})
)
@pytest.mark.parametrize("seed", range(3))
def test_its_gradient_is_that_of_the_formula(name: str, seed: int) -> None:
    """Central differences of the transcription, for losses that stop no gradient."""
    tokens, width = tokens_of(seed), 1e-5
    made = batch(tokens, 1.0)
    loss_of(name)(made).loss.backward()
    field, tensor = ("entropy", made.entropy) if name == "entropy" else ("now", made.trained_logprobs)
    assert tensor is not None
    assert tensor.grad is not None
    for i, token in enumerate(tokens):
        sides = []
        for step in (width, -width):
            moved = Token(**{**token.__dict__, field: getattr(token, field) + step})
            sides.append(FORMULAS[name][1]([*tokens[:i], moved, *tokens[i + 1 :]], 1.0))
        assert tensor.grad[i].item() == pytest.approx((sides[0] - sides[1]) / 2 / width, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["sdpo", "distill"])
def test_distillation_is_a_policy_gradient_with_the_teachers_surprise_as_advantage(name: str) -> None:
    tokens = tokens_of(7)
    made = batch(tokens)
    loss_of(name)(made).loss.backward()
    ratios = [math.exp(t.now - t.old) for t in tokens]
    caps = [min(r, 2.0) for r in ratios] if name == "sdpo" else ratios
    expected = [t.weight * r * (t.now - t.teacher) for t, r in zip(tokens, caps, strict=True)]
    assert made.trained_logprobs.grad is not None
    assert made.trained_logprobs.grad.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("name", "log_ratio"), [("gspo", 0.05), ("turn", 0.05), ("importance, rollout", 0.1)])
def test_tokens_of_one_ratio_learn_by_advantages_of_their_own(name: str, log_ratio: float) -> None:
    """GSPO-token, arXiv:2507.18071, equation 14: the shared ratio is the weight of each token's own gradient."""
    tokens = [Token(-1.0, -1.05, a, 0.5, 0, 0, 0, 0, 0) for a in (1.0, -2.0)]
    made = batch(tokens)
    loss_of(name)(made).loss.backward()
    assert made.trained_logprobs.grad is not None
    ratio = math.exp(log_ratio)
    assert made.trained_logprobs.grad.tolist() == pytest.approx([-0.5 * ratio, ratio], rel=1e-9)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_ratios_are_against_the_proximal_policy_where_samples_have_it(name: str) -> None:
    """Decoupled losses read `proximal_logprobs`; DPPO holds the policy near the sampler."""
    if "sampled_logprobs" not in LOSSES[name].needs or "value" in name:
        return
    tokens = tokens_of(3)
    (loss,) = token_losses(name)
    as_sampled, as_proximal = loss(batch(tokens)), loss(batch(tokens, proximal_logprobs="ref"))
    swapped = loss(batch(tokens, sampled_logprobs="ref", ref_logprobs="ref"))
    if loss.decoupled:
        assert as_proximal.loss.item() == swapped.loss.item() != as_sampled.loss.item()
    elif name in ("dppo", "entropy"):
        assert as_proximal.loss.item() == as_sampled.loss.item()


def test_the_entropy_bonus_follows_its_schedule() -> None:
    (fixed,) = token_losses({"type": "entropy", "coefficient": 0.02})
    (falling,) = token_losses({"type": "entropy", "coefficient": 0.02, "final": 0.0, "steps": 10})
    assert [fixed.coefficient_at(step) for step in (0, 5, 99)] == [0.02] * 3
    assert [falling.coefficient_at(step) for step in (0, 5, 10, 99)] == pytest.approx([0.02, 0.01, 0.0, 0.0])
