"""Evaluation: the rewards of an agent on tasks, their mean and its confidence interval.

A task whose rollout failed or gave no reward is part of the result: it is counted by its reason, never as 0.0, and the
interval covers any reward it could have had. Where one number must decide (a comparison, the choice of a checkpoint),
such a task counts as the lowest reward, so that an agent that crashes never beats one that answers; or as `failed_as`
says. Where tasks have several rollouts, the task is the unit: its rewards are averaged first.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import total_ordering
from math import comb
from pathlib import Path
from typing import Any, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from agentlightning.credit.rejection import FAILED, describe_reasons
from agentlightning.errors import ConfigError, DatasetError, RewardError
from agentlightning.evaluation.intervals import (
    Comparison,
    FailedAs,
    Gain,
    Rewards,
    check_bounds,
    check_failed_as,
    compare_tasks,
    known,
    mean,
    mean_interval,
    paired_gain,
    task_mean,
    widened,
)
from agentlightning.evaluation.sequential import NullTest, null_test
from agentlightning.util.json_values import dumps

# -- pass at k -------------------------------------------------------------------------------------------------------

# How often an agent solves a task in k rollouts: in at least one of them, or in all. Pure.
#
# From n rollouts of a task, c of them solved, without bias:
#
#     pass@k = 1 - C(n - c, k) / C(n, k)     one of k solves it    (Chen et al. 2021, arXiv:2107.03374, equation 1)
#     pass^k = C(c, k) / C(n, k)             all k solve it        (Yao et al. 2024, arXiv:2406.12045, section 3)


def pass_at_k(rollouts: int, solved: int, k: int) -> float:
    """The probability that at least one of k rollouts solves the task, where `solved` of `rollouts` have."""
    return 1.0 - comb(rollouts - solved, k) / comb(rollouts, k)


def pass_hat_k(rollouts: int, solved: int, k: int) -> float:
    """The probability that all of k rollouts solve the task."""
    return comb(solved, k) / comb(rollouts, k)


# -- evaluation file -------------------------------------------------------------------------------------------------

# Evaluations on disk: one JSON object with the rewards of each task's rollouts.

VERSION = 1
Members: TypeAlias = dict[str, dict[str, tuple[int, ...]]]


class EvaluationRecord(BaseModel):
    """What a file holds."""

    model_config = ConfigDict(extra="forbid")

    agentlightning_evaluation: int
    """The version of the format."""
    rollouts: list[list[float | None]]
    seconds: float = 0.0
    reasons: dict[str, int] = {}
    failed_as: str | float = "lowest"
    tasks: tuple[str, ...] = ()
    members: Members = {}
    cached: int = 0
    bounds: tuple[float, float] | None = None


WITHOUT_REWARD = (
    "return a number from the agent, call agl.emit_reward, or give a reward function (reward=..., --reward)"
)


@total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The reward of each task. Compares and prints like its `score`.

    >>> agl.Evaluation(rewards=(1.0, 0.0, None)).mean
    0.5
    """

    rewards: tuple[float | None, ...]
    """One for each task, in the order of the tasks: the mean of its rollouts. None: all failed, or gave no usable
    reward."""
    seconds: float = 0.0
    reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of rollouts without a reward by reason: `failed`, `missing_reward`, `bad_reward` ..."""
    rollouts: tuple[tuple[float | None, ...], ...] = ()
    """The rewards of each task's rollouts. Empty: one rollout each, with the task's reward."""
    failed_as: FailedAs = "lowest"
    """How a rollout without a reward counts in `score` and in comparisons: as the lowest reward, as a given one, or not
    at all (`exclude`)."""
    tasks: tuple[str, ...] = ()
    """A digest of each task's content, by which evaluations are paired. Empty: they are paired in order."""
    members: Mapping[str, Mapping[str, tuple[int, ...]]] = field(
        default_factory=dict[str, Mapping[str, tuple[int, ...]]]
    )
    """Field of tasks -> value -> positions of the tasks that have it."""
    cached: int = 0
    """Rollouts that were not run, because the cache had them."""
    comparison: Comparison | None = None
    """With the evaluation that `agl.evaluate(compare=...)` was given."""
    bounds: tuple[float, float] | None = None
    """The lowest and highest reward possible. None: 0 and 1 if all rewards lie in between, else those seen, which makes
    intervals too narrow where the extremes are rare."""

    def __post_init__(self) -> None:
        check_failed_as(self.failed_as)
        check_bounds(self.bounds)

    @classmethod
    def of_rollouts(cls, rollouts: Sequence[Rewards], **fields: Any) -> Evaluation:
        """An evaluation of tasks with several rollouts, from the rewards of each task's rollouts."""
        rewards = tuple(mean(known(each)) if known(each) else None for each in rollouts)
        return cls(rewards, rollouts=tuple(map(tuple, rollouts)), **fields)

    # -- one number --------------------------------------------------------------------------------------------------

    @property
    def known(self) -> list[float]:
        """The rewards of the tasks that have one."""
        return known(self.rewards)

    @property
    def missing(self) -> int:
        """Tasks without a reward, those whose rollout failed included."""
        return len(self.rewards) - len(self.known)

    @property
    def missing_rollouts(self) -> int:
        """Rollouts without a reward; each task has one rollout or several."""
        return sum(reward is None for each in self._rollouts for reward in each)

    @property
    def failed(self) -> int:
        """Rollouts that failed."""
        return self.reasons.get(FAILED, 0)

    @property
    def mean(self) -> float:
        """The mean reward over the tasks that have one. Raises RewardError if none has."""
        if not self.known:
            counted = f" ({describe_reasons(self.reasons)})" if self.reasons else ""
            raise RewardError(f"none of {len(self.rewards)} tasks has a reward{counted}; {WITHOUT_REWARD}")
        return sum(self.known) / len(self.known)

    @property
    def score(self) -> float:
        """The mean with rollouts without a reward counted as `failed_as` says. The lowest possible reward is that of
        `bounds`, else 0 if rewards lie between 0 and 1, else the lowest one seen. Equals `mean` if every rollout has a
        reward. Raises RewardError if none has."""
        return comparable_scores([self])[0] if self.missing_rollouts and self.known else self.mean

    @property
    def interval(self) -> tuple[float, float]:
        """95% confidence interval of the mean over all tasks, for any rewards that rollouts without one could have had;
        of the score, where `failed_as` says how these count."""
        bounds = low, high = widened(self.bounds, self._known_rollouts, self.failed_as)
        if self.failed_as == "exclude":
            return mean_interval(self.known, bounds=bounds)
        if not isinstance(self.failed_as, str):
            low = high = self.failed_as
        least, most = (
            mean_interval([task_mean(each, filler) for each in self._rollouts], bounds=bounds) for filler in (low, high)
        )
        return least[0], most[1]

    # -- several rollouts --------------------------------------------------------------------------------------------

    @property
    def repeats(self) -> int:
        """Rollouts of each task; of that with the fewest, where they differ."""
        return min(map(len, self._rollouts), default=0)

    def pass_at_k(self, k: int, solved: float = 1.0) -> float:
        """The probability that at least one of k rollouts of a task has a reward of `solved` or more, over tasks. A
        rollout without a reward has not solved it, or does not count (`failed_as="exclude"`)."""
        return self._pass(pass_at_k, k, solved)

    def pass_hat_k(self, k: int, solved: float = 1.0) -> float:
        """pass^k: the probability that all of k rollouts of a task have a reward of `solved` or more, over tasks."""
        return self._pass(pass_hat_k, k, solved)

    def null_test(self, alpha: float = 0.05) -> NullTest:
        """Compare the first half of each task's rollouts with the second: what chance alone makes."""
        half = self.repeats // 2
        if not half:
            raise ConfigError("one rollout of each task cannot be compared with another; use repeats=2 or more")
        first = [each[:half] for each in self._rollouts]
        second = [each[half : 2 * half] for each in self._rollouts]
        return null_test(first, second, self.failed_as, alpha)

    # -- comparisons -------------------------------------------------------------------------------------------------

    def compare(self, before: Evaluation, alpha: float = 0.05) -> Comparison:
        """The paired gain over an evaluation of the same tasks. Tasks are paired by content where both evaluations know
        it, else in order. Raises RewardError where there are no pairs."""
        pairs = [(each, each) for each in range(len(self.rewards))]
        if before.tasks and self.tasks:
            places: dict[str, list[int]] = defaultdict(list)
            for position, task in enumerate(before.tasks):
                places[task].append(position)
            pairs = [(places[task].pop(0), place) for place, task in enumerate(self.tasks) if places[task]]
            if not pairs:
                raise DatasetError("the two evaluations share no task; measure the same tasks")
        elif len(before.rewards) != len(self.rewards):
            raise RewardError(
                f"{len(before.rewards)} tasks before and {len(self.rewards)} after make no pairs;"
                " measure the same tasks"
            )
        first, second = [before._rollouts[b] for b, _ in pairs], [self._rollouts[a] for _, a in pairs]
        unpaired = len(before.rewards) + len(self.rewards) - 2 * len(pairs)
        return compare_tasks(first, second, self.failed_as, alpha, unpaired, self.bounds)

    def beats(self, before: Evaluation, alpha: float = 0.05) -> bool:
        """Whether a gain over `before` is shown: the p-value is below alpha, and the interval of the gain above 0."""
        found = self.compare(before, alpha)
        return found.gain > 0 and found.significant

    @property
    def slices(self) -> Mapping[str, Mapping[str, Evaluation]]:
        """Field of tasks -> value -> the evaluation of the tasks that have it."""
        return {
            name: {value: self._part(positions) for value, positions in values.items()}
            for name, values in self.members.items()
        }

    def _part(self, positions: Sequence[int]) -> Evaluation:
        return Evaluation(
            rewards=tuple(self.rewards[each] for each in positions),
            rollouts=tuple(self._rollouts[each] for each in positions),
            failed_as=self.failed_as,
            bounds=self.bounds,
            tasks=tuple(self.tasks[each] for each in positions) if self.tasks else (),
        )

    # -- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file, whole or not at all, for `load` and `agl.evaluate(compare=path)`. Raises ConfigError
        where nothing can be written."""
        names = ("seconds", "reasons", "failed_as", "tasks", "members", "cached", "bounds")
        record = {"agentlightning_evaluation": VERSION, "rollouts": self._rollouts}
        with written(Path(path)) as unfinished:
            unfinished.write_bytes(dumps(record | {name: getattr(self, name) for name in names}) + b"\n")
            unfinished.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Evaluation:
        """The evaluation in a file of `save`. Raises ConfigError where there is none."""
        try:
            record = EvaluationRecord.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(
                f"no evaluation can be read from {path}: {error}; write one with --out or save()"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "content"
            raise ConfigError(
                f"{path} holds no evaluation ({where}: {first['msg']}); give a file of `agl eval --out` or"
                " Evaluation.save"
            ) from error
        if record.agentlightning_evaluation != VERSION:
            raise ConfigError(f"{path} has format {record.agentlightning_evaluation}; this version reads {VERSION}")
        return cls.of_rollouts(**record.model_dump(exclude={"agentlightning_evaluation"}))

    # -- as a number -------------------------------------------------------------------------------------------------

    def __float__(self) -> float:
        return self.score

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Evaluation):
            return self._comparable == other._comparable
        return isinstance(other, float | int) and self._comparable == other

    def __lt__(self, other: Evaluation | float) -> bool:
        return float(self) < float(other)

    def __hash__(self) -> int:
        return hash(self._comparable)

    @property
    def _comparable(self) -> float | tuple[float | None, ...]:
        return self.score if self.known else self.rewards

    @property
    def _rollouts(self) -> tuple[tuple[float | None, ...], ...]:
        return self.rollouts or tuple((reward,) for reward in self.rewards)

    def _score(self, low: float) -> float:
        """The score, with the lowest reward of several evaluations."""
        if self.failed_as == "exclude":
            return self.mean if self.known else -math.inf
        filler = low if isinstance(self.failed_as, str) else self.failed_as
        return mean([task_mean(each, filler) for each in self._rollouts]) if self.rewards else -math.inf

    def _pass(self, estimate: Callable[[int, int, int], float], k: int, solved: float) -> float:
        if k < 1 or k > self.repeats:
            raise ConfigError(
                f"k={k} needs {max(k, 1)} rollouts of each task, and there are {self.repeats}; use repeats="
            )
        rollouts: Sequence[Rewards] = self._rollouts
        if self.failed_as == "exclude":
            rollouts = [known(each) for each in rollouts if len(known(each)) >= k]
        if not rollouts:
            raise RewardError(f"no task has {k} rollouts with a reward; give more repeats, or count failures")
        missing = -math.inf if isinstance(self.failed_as, str) else self.failed_as
        counts = [sum((missing if x is None else x) >= solved for x in each) for each in rollouts]
        return mean([estimate(len(each), count, k) for each, count in zip(rollouts, counts, strict=True)])

    def __str__(self) -> str:
        low, high = self.interval
        each = f", {self.repeats} rollouts each" if self.repeats > 1 else ""
        scale = self._scale
        if not self.missing_rollouts:
            return f"{self.mean:.3f} (95% interval {low:.3f} to {high:.3f}, {len(self.known)} tasks{each}{scale})"
        why = describe_reasons(self.reasons) or f"{self.missing_rollouts} missing"
        those = {"lowest": "those at the lowest reward", "exclude": "those left out"}
        counted = those.get(str(self.failed_as), f"those at {self.failed_as}")
        return (
            f"{self.mean:.3f} on {len(self.known)} of {len(self.rewards)} tasks{each}, {why}; {self.score:.3f} with"
            f" {counted} (95% interval {low:.3f} to {high:.3f}{scale})"
        )

    @property
    def _known_rollouts(self) -> list[float]:
        return [reward for each in self._rollouts for reward in known(each)]

    @property
    def _scale(self) -> str:
        """What the interval takes for the range of rewards, where nobody has said it or it was wrong."""
        low, high = widened(self.bounds, self._known_rollouts, self.failed_as)
        if self.bounds is None:
            return "" if (low, high) == (0.0, 1.0) else f"; for rewards from {low:g} to {high:g}, as seen: give bounds"
        return "" if (low, high) == self.bounds else f"; rewards from {low:g} to {high:g} are out of the given bounds"


def comparable_scores(evaluations: Sequence[Evaluation]) -> list[float]:
    """The score of each, where the lowest reward is that of all of them: 0 if all rewards lie between 0 and 1, else the
    lowest one seen. -inf for one without tasks, and for all if there is no reward."""
    rewards = [x for each in evaluations for x in each._known_rollouts]  # pyright: ignore[reportPrivateUsage]
    if not rewards:
        return [-math.inf] * len(evaluations)
    low, _ = widened(evaluations[0].bounds, rewards)
    return [each._score(low) for each in evaluations]  # pyright: ignore[reportPrivateUsage]


def compare(before: Evaluation, after: Evaluation) -> Gain:
    """The paired gain over the tasks that have a reward in both; its interval covers the others."""
    return paired_gain(before.rewards, after.rewards)


def gain_of(before: Evaluation, after: Evaluation) -> Gain:
    """Like `compare`, but with NaN instead of an error if no task can be compared."""
    if any(b is not None and a is not None for b, a in zip(before.rewards, after.rewards, strict=True)):
        return compare(before, after)
    return Gain(math.nan, math.nan, math.nan, (math.nan, math.nan), 0, before.missing, after.missing)


# -- slices ----------------------------------------------------------------------------------------------------------

# Which tasks have which value of a field, so that an evaluation can be read slice by slice. Pure.

NO_VALUE = "(none)"
"""Of tasks without the field."""


def slice_members(tasks: Sequence[Any], field: str) -> dict[str, tuple[int, ...]]:
    """Value -> positions of the tasks that have it. Raises ConfigError for a field that no task has."""
    found: dict[str, list[int]] = defaultdict(list)
    names: set[str] = set()
    for position, task in enumerate(tasks):
        record = cast("dict[str, Any]", task) if isinstance(task, dict) else {}
        names |= record.keys()
        found[_text(record[field]) if field in record else NO_VALUE].append(position)
    if field not in names:
        known = f"their fields are {', '.join(sorted(names))}" if names else "they are no objects with fields"
        raise ConfigError(f"no task has a field {field!r} to slice by; {known}")
    return {value: tuple(positions) for value, positions in sorted(found.items())}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


@contextmanager
def written(target: Path) -> Generator[Path]:
    """The file to write and put in place of `target`, gone afterwards if it is not. Raises ConfigError where none can
    be written."""
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        unfinished.touch()
        try:
            yield unfinished
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"the evaluation cannot be written to {target}: {error}") from error
