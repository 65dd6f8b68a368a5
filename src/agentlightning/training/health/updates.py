"""Signs in the updates: gradients, entropy, divergences, clipping, age, and numbers that are not finite."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

from agentlightning.training.health.sign import (
    WINDOW,
    Records,
    Sign,
    best_reward,
    deviations,
    mean_of,
    mean_reward,
    values_of,
)
from agentlightning.training.health.step_record import StepRecord

ENTROPY_FACTOR: Final = 3.0
"""A policy whose entropy has grown or shrunk by more behaves differently ..."""
REWARD_SHARE: Final = 0.5
"""... and is broken if its reward is below this share of its best."""
LEARNED_SHARE: Final = 0.9
"""A policy with this share of the highest reward may be certain: it has learned the task."""
ENTROPY_LEFT: Final = 0.1
"""The share of its first entropy below which a policy explores next to nothing."""
SPIKE_HISTORY: Final = 8
"""Gradient norms that the next one is compared with, at least ..."""
LONGEST_HISTORY: Final = 50
"""... and at most: norms drift over a run."""
SPIKE_DEVIATIONS: Final = 10.0
"""Robust standard deviations above the median: norms have heavy tails, and six occur in healthy runs ..."""
SPIKE_FACTOR: Final = 4.0
"""... and a multiple of the median, for runs whose norms hardly vary."""
SPIKES: Final = 2
"""Spikes within `SPIKE_RECENT` steps: one alone is one odd batch, and is clipped."""
SPIKE_RECENT: Final = 10
LEAST_DEVIATION: Final = 0.1
"""Gradient norms within a tenth of their median do not differ."""
KL_LIMIT: Final = 0.1
"""Nats a token that one update may move: implementations of PPO stop at 0.01 to 0.05."""
REF_KL_LIMIT: Final = 1.0
"""Nats a token from the reference model: e times less probable on average."""
CLIP_LIMIT: Final = 0.3
"""Share of clipped tokens: those have no gradient; 0.05 to 0.2 is usual."""
MISMATCH_LIMIT: Final = 0.01
"""Nats a token between sampler and trainer with the same weights: 1e-4 to 1e-3 is usual between bf16 engines."""
STALE_LIMIT: Final = 8.0
"""Updates: AReaL (arXiv:2505.24298, table 2) loses accuracy at 8 and more."""

LOWER_LR: Final = "lower algorithm.optimizer.lr"


def broken(records: Records) -> Sign | None:
    """A reward that has fallen, of a policy whose entropy is far from its first value, or whose groups no longer differ
    in reward. Without the second condition, noise of a small batch would look the same."""
    entropies = [record.entropy for record in records if record.entropy is not None]
    if len(records) <= WINDOW or not entropies:
        return None
    best, reward = best_reward(records), mean_reward(records[-WINDOW:])
    trained = any(record.entropy is not None for record in records[-WINDOW:])
    steady = trained and entropies[0] / ENTROPY_FACTOR < entropies[-1] < entropies[0] * ENTROPY_FACTOR
    if steady or not reward < REWARD_SHARE * best:
        return None
    sign = "no group has rewards that differ any more"
    if trained:
        sign = f"its entropy went from {entropies[0]:.3g} to {entropies[-1]:.3g} nats a token"
    return Sign(
        "policy_broken",
        f"the policy looks broken: its reward fell from {best:.3g} to {reward:.3g}, and {sign}",
        f"the learning rate {learning_rate(records):.2g} is probably too high: start again with a tenth of it"
        " (algorithm.optimizer.lr)",
        is_collapse=True,
    )


def learning_rate(records: Records) -> float:
    """The newest; NaN where none is known."""
    return next((record.lr for record in reversed(records) if record.lr is not None), math.nan)


def entropy_gone(records: Records) -> Sign | None:
    """Hardly any entropy is left, and the reward is not where it could be: nothing new will be tried."""
    known = values_of(records, lambda record: record.certainty)
    if len(known) < 2 * WINDOW:
        return None
    first, last = statistics.fmean(known[:WINDOW]), statistics.fmean(known[-WINDOW:])
    highest = max(values_of(records, lambda record: record.reward_highest), default=math.nan)
    if last >= ENTROPY_LEFT * first or not mean_reward(records[-WINDOW:]) < LEARNED_SHARE * highest:
        return None
    return Sign(
        "entropy_gone",
        f"the entropy fell from {first:.3g} to {last:.3g} nats a token, and the reward is"
        f" {mean_reward(records[-WINDOW:]):.3g} where {highest:.3g} was reached",
        f"{LOWER_LR}, raise algorithm.loss clip_high or algorithm.temperature, or use a loss with an entropy bonus",
    )


def gradient_spikes(records: Records) -> Sign | None:
    """Norms of the gradient far above those of the run so far, more than once."""
    norms = values_of(records, lambda record: record.grad_norm)
    recent = range(max(SPIKE_HISTORY, len(norms) - SPIKE_RECENT), len(norms))
    spikes = [norms[i] for i in recent if _is_spike(norms[i], norms[max(0, i - LONGEST_HISTORY) : i])]
    if len(spikes) < SPIKES or records[-1].grad_norm is None:
        return None
    usual = statistics.median(norms[-LONGEST_HISTORY:])
    return Sign(
        "gradient_spikes",
        f"the norm of the gradient spiked {len(spikes)} times in {SPIKE_RECENT} steps, up to {max(spikes):.3g} where"
        f" {usual:.3g} is usual",
        f"{LOWER_LR} or algorithm.optimizer.clip_norm, and look for odd rollouts in these steps",
    )


def _is_spike(norm: float, history: Sequence[float]) -> bool:
    above = norm > SPIKE_FACTOR * statistics.median(history)
    return above and deviations(norm, history, LEAST_DEVIATION) > SPIKE_DEVIATIONS


def divergence(records: Records) -> Sign | None:
    """Updates that move the policy far at once, or have moved it far from its reference."""
    window = records[-WINDOW:]
    kl = mean_of(window, lambda record: record.approx_kl)
    reference = mean_of(window, lambda record: record.ref_kl)
    if kl > KL_LIMIT and not _is_old(window):
        return Sign(
            "large_updates",
            f"an update moves the policy by {kl:.3g} nats a token (approx_kl); below {KL_LIMIT:g} is safe",
            f"{LOWER_LR} or algorithm.minibatches",
        )
    if reference > REF_KL_LIMIT:
        return Sign(
            "far_from_reference",
            f"the policy is {reference:.3g} nats a token from its reference (ref_kl)",
            "raise the coefficient of the KL to the reference, or stop earlier",
        )
    return None


def clipping(records: Records) -> Sign | None:
    """So many tokens are clipped that much of the data is not learned from."""
    share = mean_of(records[-WINDOW:], lambda record: record.clip_fraction)
    if not share > CLIP_LIMIT:
        return None
    return Sign(
        "much_clipping",
        f"{share:.0%} of the tokens are clipped and not learned from",
        f"{LOWER_LR} or algorithm.minibatches; with older rollouts, lower run.max_staleness",
    )


def mismatch(records: Records) -> Sign | None:
    """With the very weights that sampled them, the trainer gives tokens other probabilities than the sampler did."""
    kl = mean_of(records[-WINDOW:], _mismatch)
    if not kl > MISMATCH_LIMIT:
        return None
    return Sign(
        "sampler_mismatch",
        f"sampler and trainer disagree by {kl:.3g} nats a token on the same weights",
        "let both use the same dtype (float32 shows whether that is it), check that the servers have the newest"
        " weights, or correct for it in the loss (truncated importance sampling)",
    )


def _mismatch(record: StepRecord) -> float | None:
    """None where the weights have changed since the tokens were sampled."""
    if record.staleness:
        return None
    if record.mismatch_kl is not None:
        return record.mismatch_kl
    return record.approx_kl if record.optimizer_steps == 1 else None


def _is_old(window: Records) -> bool:
    return any(record.staleness for record in window)


def staleness(records: Records) -> Sign | None:
    """Rollouts were sampled by weights of many updates ago."""
    age = mean_of(records[-WINDOW:], lambda record: record.staleness)
    if not age > STALE_LIMIT:
        return None
    return Sign(
        "stale_rollouts",
        f"the trained tokens are {age:.3g} updates old on average",
        "lower run.max_staleness, or give rollouts more machines",
    )


def skipped(records: Records) -> Sign | None:
    """The last update was skipped, or changed weights with numbers that are not finite."""
    record = records[-1]
    if record.skipped_steps:
        what = f"{record.skipped_steps} updates were skipped: the loss or its gradient was not finite"
        return Sign("updates_skipped", what, f"if it happens again, {LOWER_LR}")
    if record.not_finite:
        what = f"metrics of the last update are not finite: {', '.join(record.not_finite)}"
        return Sign("not_finite", what, f"{LOWER_LR}, and look at rewards and log-probabilities of that step")
    return None
