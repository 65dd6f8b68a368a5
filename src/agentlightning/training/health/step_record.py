"""The numbers of a finished step that the run itself uses: for signs of trouble, its progress bar and its result; and
how those of a batch of rollouts are measured.

A line of `metrics.jsonl` holds these and all other metrics of the algorithm. This is the only place that knows the
names of metrics; `StepRecord.read` makes a typed record of a line.
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final, cast

from msgspec import Struct

from agentlightning.algorithms.training import Collected
from agentlightning.assemble import AUTOMATIC_REWARDS, SEEDED_CALLS
from agentlightning.credit import group_trajectories
from agentlightning.credit.base import SMALLEST_SPREAD, spread
from agentlightning.credit.rejection import count_reasons
from agentlightning.errors import RewardError
from agentlightning.policy.base import Metrics
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.trajectory import Trajectory
from agentlightning.util.json_values import dumps

DIMENSION = "reward_of_"
"""The metric of a named dimension of the reward begins with it."""
VALIDATION = "validation_"
"""The metric of a validation by mode begins with it."""
REJECTED = "rejected_"
"""The count of rejected rollouts by reason begins with it."""
UPDATE_METRICS = ("loss", "entropy", "grad_norm", "approx_kl", "ratio", "clip_fraction", "ref_kl")
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
        # Of numbers so large that a sum of them is infinite, nothing can be said.
        numbers = {name: each for name, each in line.items() if isinstance(each, int | float) and abs(each) < 1e100}
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

    def progress(self) -> Metrics:
        """What the progress bar shows."""
        if self.reward is not None:
            return {"reward": self.reward, "tokens_per_second": self.tokens_per_second}
        return {} if self.loss is None else {"loss": self.loss}


_KINDS = {"int": int, "float": float, "float | None": float}
_NUMBERS = {name: _KINDS[kind] for name, kind in StepRecord.__annotations__.items() if kind in _KINDS}


def _with_prefix(numbers: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}


# -- batch -----------------------------------------------------------------------------------------------------------

# What a batch of rollouts shows of a policy's health, as plain numbers for `metrics.jsonl`. Pure; bounded work.
#
# Outputs are compared as tokens, so nothing is decoded. A group of n identical outputs of probability p each is chance
# if p^(n-1), the probability that the others equal the first, is not tiny; else something repeats them.

LOG_CHANCE = math.log(1e-9)
"""Identical outputs less probable than this are repeated and no chance: once in a billion groups."""
NGRAM = 4
"""Tokens of an n-gram: shorter ones repeat in any text."""
LEAST_TOKENS = 16
"""Shorter outputs have too few n-grams to repeat one."""
MOST_OUTPUTS = 64
"""The number of outputs whose n-grams are counted, evenly spread over the batch ..."""
MOST_TOKENS = 1024
"""... and of the tokens of each, the last ones."""

CAUSES: Final[tuple[str, ...]] = ("repeated", "certain", "failed", "solved", "constant")
"""Why a group teaches nothing: the metric `groups_CAUSE` counts them."""

Output = tuple[tuple[int, ...], ...]
"""The sampled tokens of a rollout, call by call."""


def batch_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Metrics of a batch, with the names of `StepRecord`. Whatever cannot be computed is left out."""
    if not trajectories:
        return {}
    groups = group_trajectories(trajectories)
    rewards = [list(map(score_of, group)) for group in groups]
    known = [[each for each in group if each is not None and math.isfinite(each)] for group in rewards]
    batch = [reward for group in known for reward in group]
    found: dict[str, float] = {f"groups_{cause}": 0.0 for cause in CAUSES}
    for group, own in zip(groups, known, strict=True):
        if (cause := _cause(group, own, batch)) is not None:
            found[f"groups_{cause}"] += 1
    found["calls_seeded"] = float(sum(each.metadata.get(SEEDED_CALLS, 0) for each in trajectories))
    if batch:
        found |= {"reward_lowest": min(batch), "reward_highest": max(batch)}
    if spreads := [statistics.pstdev(own) for own in known if len(own) > 1]:
        found["reward_std"] = statistics.fmean(spreads)
    first = {each.group: each for each in reversed(trajectories) if each.transitions}
    prompts = [(each.task, each.transitions[0].input_messages or "") for each in list(first.values())[:MOST_PROMPTS]]
    if (share := answers_in_prompts(prompts)) is not None:
        found["answers_in_prompt"] = share
    return {**found, **_named(trajectories), **_outputs(trajectories, groups)}


def score_of(trajectory: Trajectory) -> float | None:
    """The reward of a rollout as one number; None where it is missing, or cannot be made one."""
    try:
        return trajectory.score
    except RewardError:
        return None


def _named(trajectories: Sequence[Trajectory]) -> Metrics:
    """The mean of each named dimension, and of the intermediate rewards of a rollout."""
    named: defaultdict[str, list[float]] = defaultdict(list)
    for each in trajectories:
        for name, value in each.reward.items() if isinstance(each.reward, dict) else ():
            named[f"{DIMENSION}{name}"].append(value)
    steps = [call.reward for each in trajectories for call in each.transitions if call.reward is not None]
    found = {name: statistics.fmean(values) for name, values in named.items()}
    if steps:
        sums = (sum(each.values()) if isinstance(each, dict) else each for each in steps)
        found["intermediate_reward"] = math.fsum(sums) / len(trajectories)
    return found


def _cause(group: Sequence[Trajectory], own: Sequence[float], batch: Sequence[float]) -> str | None:
    """Why the rollouts of a group cannot be told apart; None where they can."""
    if len(group) > 1 and output_of(group[0]) and len(set(map(output_of, group))) == 1:
        logprob = sum(sum(call.logprobs) for call in group[0].transitions)
        return "repeated" if (len(group) - 1) * logprob < LOG_CHANCE else "certain"
    if len(own) < 2 or spread(own) > SMALLEST_SPREAD:
        return None
    if spread(batch) > SMALLEST_SPREAD:
        for cause, limit in (("failed", min(batch)), ("solved", max(batch))):
            if math.isclose(own[0], limit, abs_tol=SMALLEST_SPREAD):
                return cause
    return "constant"


def output_of(trajectory: Trajectory) -> Output:
    return tuple([call.response_token_ids for call in trajectory.transitions])


def _outputs(trajectories: Sequence[Trajectory], groups: Sequence[Sequence[Trajectory]]) -> Metrics:
    calls = [call for each in trajectories for call in each.transitions]
    tokens = sum(len(call.response_token_ids) for call in calls)
    if not tokens:
        return {}
    found = {
        "response_tokens": tokens / len(trajectories),
        "truncated": sum(call.finish_reason == "length" for call in calls) / len(calls),
        "sampling_entropy": -sum(sum(call.logprobs) for call in calls) / tokens,
    }
    chosen = [call.response_token_ids for call in calls[:: max(1, len(calls) // MOST_OUTPUTS)]]
    if long := [output for output in chosen if len(output) >= LEAST_TOKENS][:MOST_OUTPUTS]:
        found["repeated_ngrams"] = statistics.fmean(map(repeated_ngrams, long))
    if len(groups) > 1:  # the share of groups in which the most frequent output of all occurs
        count = Counter(output for group in groups for output in set(map(output_of, group)) if output)
        found["common_output"] = max(count.values(), default=0) / len(groups)
    return found


def repeated_ngrams(tokens: Sequence[int]) -> float:
    """The share of n-grams that occurred before in the same output.

    >>> repeated_ngrams([1, 2, 3, 4, 5]), repeated_ngrams([7] * 13)
    (0.0, 0.9)
    """
    tokens = tokens[-MOST_TOKENS:]
    ngrams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


# -- step -----------------------------------------------------------------------------------------------------------


def step_line(state: RunState, collected: Collected, metrics: Metrics) -> dict[str, Any]:
    """A line of `metrics.jsonl`: the algorithm's metrics, and what the run knows of the step's rollouts."""
    reasons, tokens = count_reasons(collected.rejected), collected.sampled_tokens
    automatic = defaultdict[str, float](float)
    for trajectory in collected.trajectories:
        for rule, value in trajectory.metadata.get(AUTOMATIC_REWARDS, {}).items():
            automatic[f"air_{rule}"] += value
            automatic["air_reward"] += value
    place = {"step": state.step, "revision": state.revision, "stage": len(state.stages)}
    return {
        **{name: number for name, number in place.items() if number},
        **batch_metrics(collected.trajectories),
        **metrics,
        "rollouts": state.rollouts,
        "failed": len(collected.failed),
        "timeouts": collected.timeouts,
        "rejected": len(collected.rejected),
        **{f"rejected_{reason}": count for reason, count in reasons.items()},
        **collected.metrics,
        **{name: value / len(collected.trajectories) for name, value in automatic.items()},
        "sampled_tokens": tokens,
        "tokens_per_second": (tokens - collected.sampled_before) / max(collected.seconds, 1e-9),
        "collect_seconds": collected.seconds,
    }


# -- guard -----------------------------------------------------------------------------------------------------------

# What a reward guard measures in a batch, and the signs of its violations (settings: `[guard]`). Pure functions.
#
#     drift          sup_x |F_now(x) - F_before(x)|, the distance of Kolmogorov and Smirnov between the rewards of a
#                    batch and those of the batches before
#     disagreement   discordant / (discordant + concordant) over the pairs of one group's rollouts: (1 - gamma) / 2 of
#                    Goodman and Kruskal (Journal of the American Statistical Association 49, 1954)
#
# Learning moves rewards slowly; a change of half of all rewards from one step to the next is that of a reward function,
# a judge or an environment. Pairs are of one group, because only differences within a group are learned from.

STEPS_BEFORE = 5
"""The number of earlier steps that a batch is compared with ..."""
LEAST_REWARDS = 8
"""... and the fewest rewards on either side: fewer show no distribution."""
LEAST_PAIRS = 10
"""Fewer pairs show no disagreement."""


def distance(now: Sequence[float], before: Sequence[float]) -> float | None:
    """The Kolmogorov-Smirnov distance; None for too few rewards."""
    if min(len(now), len(before)) < LEAST_REWARDS:
        return None
    first, second = sorted(now), sorted(before)
    return max(
        abs(bisect_right(first, value) / len(first) - bisect_right(second, value) / len(second))
        for value in {*first, *second}
    )


def discordance(groups: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """The share of pairs that two scores order differently, ties left out; None for too few pairs.

    >>> discordance([[(0.0, 1.0), (0.1, 0.9), (0.2, 0.8), (0.3, 0.7), (0.4, 0.6)]])
    1.0
    """
    products = [(a[0] - b[0]) * (a[1] - b[1]) for group in groups for a, b in combinations(group, 2)]
    ordered = [product for product in products if product != 0]
    return sum(product < 0 for product in ordered) / len(ordered) if len(ordered) >= LEAST_PAIRS else None


# -- leak ------------------------------------------------------------------------------------------------------------

# Whether the agent is shown the answer that its reward compares with. Pure.
#
# An answer is the text in a field of the task that says so (`ANSWER_FIELDS`). It is given away where it stands as a
# word in the prompt of the first call of a rollout and in no other field of the task: a passage or choices that hold it
# are what the task is about. Answers of other tasks that stand in the same prompt are chance, or labels that the prompt
# lists, and count against it.

LEAK_SHARE = 0.5
"""The share of tasks whose prompts give the answer away, from which on there is a sign."""
ANSWER_FIELDS = frozenset(
    {"answer", "answers", "expected", "expected_answer", "expected_output", "final_answer", "gold", "gold_answer"}
    | {"ground_truth", "label", "solution", "target", "correct_answer"}
)
LEAST_ANSWERS = 3
"""Different answers in a batch: with fewer, one cannot be told from a label that every prompt lists."""
MOST_PROMPTS = 16
"""Prompts that are read, of as many tasks."""
MOST_TEXT = 8_000
"""Characters of a prompt that are read."""


def answers_in_prompts(prompts: Sequence[tuple[Any, str]]) -> float | None:
    """The share of (task, prompt) whose answer the prompt gives away, less the share in which it holds the answer of
    another task. None: unknown, for tasks without an answer or with too few different ones.

    >>> tasks = [{"question": f"{number} squared", "answer": number**2} for number in (11, 12, 13)]
    >>> answers_in_prompts([(task, f"What is {task['question']}, {task['answer']}?") for task in tasks])
    1.0
    """
    known = [(answer, text[:MOST_TEXT]) for task, text in prompts if (answer := _answer(task)) is not None]
    different = {answer for answer, _ in known}
    if len(different) < LEAST_ANSWERS:
        return None
    own = sum(_holds(text, answer) for answer, text in known) / len(known)
    others = [_holds(text, other) for answer, text in known for other in different if other != answer]
    return max(0.0, own - sum(others) / len(others))


def _answer(task: Any) -> str | None:
    """The answer of a task; None where it has none, or another of its fields holds it, too."""
    if not isinstance(task, Mapping):
        return None
    fields = cast("Mapping[str, Any]", task)
    for name, value in fields.items():
        if str(name).lower() in ANSWER_FIELDS and isinstance(value, str | int | float) and str(value).strip():
            answer = str(value).strip()
            rest = {key: each for key, each in fields.items() if str(key).lower() not in ANSWER_FIELDS}
            return None if _holds(dumps(rest, default=repr).decode(), answer) else answer
    return None


def _holds(text: str, answer: str) -> bool:
    """Whether a text holds an answer as a word of its own, in any case."""
    written = re.escape(dumps(answer).decode()[1:-1])  # as it stands in JSON
    return re.search(rf"(?<![\w.]){written}(?![\w]|\.\d)", text, re.IGNORECASE) is not None
