"""What a batch of rollouts shows of a policy's health, as plain numbers for `metrics.jsonl`. Pure; bounded work.

Outputs are compared as tokens, so nothing is decoded. A group of n identical outputs of probability p each is *chance*
if p^(n-1), the probability that the others equal the first, is not tiny; else something repeats them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from agentlightning.assemble import SEEDED_CALLS
from agentlightning.credit import group_trajectories
from agentlightning.credit.agent_rewards import team_score
from agentlightning.credit.base import SMALLEST_SPREAD, spread
from agentlightning.errors import RewardError
from agentlightning.training.health.signs import answer_metrics
from agentlightning.training.health.step_record import DIMENSION
from agentlightning.trajectory import Trajectory

LOG_CHANCE: Final = math.log(1e-9)
"""Identical outputs less probable than this are repeated and no chance: once in a billion groups."""
NGRAM: Final = 4
"""Tokens of an n-gram: shorter ones repeat in any text."""
LEAST_TOKENS: Final = 16
"""Shorter outputs have too few n-grams to repeat one."""
MOST_OUTPUTS: Final = 64
"""The number of outputs whose n-grams are counted, evenly spread over the batch ..."""
MOST_TOKENS: Final = 1024
"""... and of the tokens of each, the last ones."""

CAUSES: Final[tuple[str, ...]] = ("repeated", "certain", "failed", "solved", "constant")
"""Why a group teaches nothing: the metric `groups_CAUSE` counts them."""

Output = tuple[tuple[int, ...], ...]
"""The sampled tokens of a rollout, call by call."""


def batch_metrics(
    trajectories: Sequence[Trajectory], reward_weights: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Metrics of a batch, with the names of `StepRecord`. Whatever cannot be computed is left out."""
    if not trajectories:
        return {}
    groups = group_trajectories(trajectories)
    rewards = [[score_of(each, reward_weights) for each in group] for group in groups]
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
    return {**found, **_named(trajectories), **_outputs(trajectories, groups), **answer_metrics(trajectories)}


def score_of(trajectory: Trajectory, weights: Mapping[str, float] | None) -> float | None:
    """The reward of a rollout as one number; None where it is missing, or cannot be made one."""
    try:
        return team_score(trajectory, weights)
    except RewardError:
        return None


def _named(trajectories: Sequence[Trajectory]) -> dict[str, float]:
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


def _outputs(trajectories: Sequence[Trajectory], groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
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
