"""The numbers of a finished step that the run itself uses: for signs of trouble, its progress bar and its result.

A line of `metrics.jsonl` holds these and all other metrics of the algorithm. This is the only place that knows the
names of metrics; `StepRecord.read` makes a typed record of a line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

DIMENSION: Final = "reward_of_"
"""The metric of a named dimension of the reward begins with it."""
VALIDATION: Final = "validation_"
"""The metric of a validation by mode begins with it."""
REJECTED: Final = "rejected_"
"""The count of rejected rollouts by reason begins with it."""
UPDATE_METRICS: Final = ("loss", "entropy", "grad_norm", "approx_kl", "ratio", "clip_fraction", "ref_kl")
"""Metrics of an update that are finite as long as the weights are."""


class StepRecord(Struct, frozen=True):
    """One step. Fields have the names of the metrics; None or 0: not reported. All numbers are finite.

    >>> StepRecord.read({"step": 3, "reward": 0.5, "anything": 1}).reward
    0.5
    """

    step: int = 0
    revision: int = 0
    """The number of changes of what rewards mean, before this step."""
    stage: int = 0
    """The number of its stage, in a run of several algorithms."""

    reward: float | None = None
    """Mean reward of the batch."""
    reward_std: float | None = None
    """Standard deviation of the reward within a group, mean over groups."""
    reward_lowest: float | None = None
    reward_highest: float | None = None
    intermediate_reward: float | None = None
    """Sum of the intermediate rewards of a rollout, mean over rollouts."""
    dimensions: Mapping[str, float] = {}
    """Mean of each named dimension of the reward."""
    validation: Mapping[str, float] = {}
    """Mean reward of the validation tasks, by mode."""

    guard_out_of_range: float | None = None
    """Rollouts, where the reward guard does not allow their reward."""
    guard_missing: float | None = None
    """Share of rollouts without a reward, where the reward guard allows fewer; as the next two."""
    guard_drift: float | None = None
    guard_disagreement: float | None = None

    groups: int = 0
    groups_trained: int = 0
    groups_without_spread: int = 0
    """Groups whose rollouts all had the same reward."""
    groups_repeated: int = 0
    """Groups of identical outputs, too improbable to be chance: a fixed seed, or answers from a cache."""
    groups_certain: int = 0
    """Groups of identical outputs of a policy that is almost certain of them."""
    groups_failed: int = 0
    """Groups of different outputs, all with the lowest reward of the batch."""
    groups_solved: int = 0
    """Groups of different outputs, all with the highest reward of the batch."""
    groups_constant: int = 0
    """Groups of different outputs with one reward, in a batch without any other, or between its lowest and highest."""
    calls_seeded: int = 0
    """Calls that were sampled with a seed."""

    loss: float | None = None
    entropy: float | None = None
    """Mean entropy of the trained tokens, in nats."""
    sampling_entropy: float | None = None
    """Mean of -log p over all sampled tokens: an estimate of the entropy, also of steps without an update."""
    lr: float | None = None
    grad_norm: float | None = None
    """Norm of the gradient before clipping."""
    approx_kl: float | None = None
    """KL(sampled || trained) of the update, in nats a token."""
    ref_kl: float | None = None
    """KL to the reference model, in nats a token."""
    clip_fraction: float | None = None
    """Share of tokens whose importance ratio was clipped."""
    mismatch_kl: float | None = None
    """`approx_kl` before the first change of the weights: what sampler and trainer disagree about."""
    staleness: float | None = None
    """Mean age of the trained tokens, in updates."""
    optimizer_steps: int = 0
    skipped_steps: int = 0
    """Updates skipped because the loss or its gradient was not finite."""
    not_finite: tuple[str, ...] = ()
    """Metrics of the update that were NaN or infinite."""

    response_tokens: float | None = None
    """Sampled tokens of a rollout, mean."""
    truncated: float | None = None
    """Share of calls that ended at the limit of tokens."""
    repeated_ngrams: float | None = None
    """Share of the n-grams of an output that occurred in it before, mean over outputs."""
    common_output: float | None = None
    """Share of the groups in which the most frequent output of the batch occurs."""

    answers_in_prompt: float | None = None
    """Share of the tasks whose answer the prompt gives away."""

    rollouts_trained: int = 0
    failed: int = 0
    timeouts: int = 0
    rejected: Mapping[str, int] = {}
    """Rollouts that succeeded and could not be used, by reason."""
    tokens_per_second: float = 0.0

    rolled_back: int = 0
    """1: after this step the run returned to an earlier checkpoint."""
    stopped: int = 0
    """1: this step showed a collapse that ended the run."""

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> StepRecord:
        """The record of a line of metrics. Unknown metrics, and numbers that are not finite, are ignored; of the
        latter, the names of `UPDATE_METRICS` are kept."""
        numbers = {name: value for name, value in line.items() if _is_finite(value)}
        known: dict[str, Any] = {name: kind(numbers[name]) for name, kind in _NUMBERS.items() if name in numbers}
        return cls(
            **known,
            dimensions=_with_prefix(numbers, DIMENSION),
            validation=_with_prefix(numbers, VALIDATION),
            rejected={name: int(count) for name, count in _with_prefix(numbers, REJECTED).items()},
            not_finite=tuple(name for name in UPDATE_METRICS if name in line and name not in numbers),
        )

    @property
    def skipped_groups(self) -> int:
        """Groups whose rewards taught nothing."""
        return self.groups - self.groups_trained

    @property
    def certainty(self) -> float | None:
        """The entropy of the update, or without an update that of sampling."""
        return self.entropy if self.entropy is not None else self.sampling_entropy

    @property
    def reward_size(self) -> float | None:
        """The size of the largest reward."""
        if self.reward_lowest is None or self.reward_highest is None:
            return None
        return max(abs(self.reward_lowest), abs(self.reward_highest))

    @property
    def fresh_kl(self) -> float | None:
        """`approx_kl` of an update by rollouts of the present weights."""
        return None if self.staleness else self.approx_kl

    @property
    def mismatch(self) -> float | None:
        """What sampler and trainer disagree about, with the very weights that sampled. None where these have changed
        since."""
        if self.mismatch_kl is not None and not self.staleness:
            return self.mismatch_kl
        return self.fresh_kl if self.optimizer_steps == 1 else None

    @property
    def is_last_of_history(self) -> bool:
        """Whether later steps begin from other weights, so that they are not judged together with this one."""
        return bool(self.rolled_back or self.stopped)

    def progress(self) -> dict[str, float]:
        """What the progress bar shows."""
        if self.reward is not None:
            return {"reward": self.reward, "tokens_per_second": self.tokens_per_second}
        return {} if self.loss is None else {"loss": self.loss}


_KINDS: Final = {"int": int, "float": float, "float | None": float}
_NUMBERS: Final = {name: _KINDS[kind] for name, kind in StepRecord.__annotations__.items() if kind in _KINDS}


def _is_finite(value: Any) -> bool:
    """Of numbers so large that a sum of them is infinite, nothing can be said."""
    return isinstance(value, int | float) and abs(value) < 1e100


def _with_prefix(numbers: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}
