"""What a batch of rollouts shows of a policy's health, as plain numbers for `metrics.jsonl`. Pure; bounded work.

Outputs are compared as tokens, so nothing is decoded. A group of n identical outputs of probability p each is *chance*
if p^(n-1), the probability that the others equal the first, is not tiny; else something repeats them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final

from agentlightning.assemble import SEEDED_CALLS
from agentlightning.credit import group_trajectories
from agentlightning.credit.agent_rewards import team_score
from agentlightning.credit.base import SMALLEST_SPREAD, spread
from agentlightning.errors import RewardError
from agentlightning.training.health.signs import answer_metrics
from agentlightning.training.health.step_record import DIMENSION
from agentlightning.trajectory import Reward, Trajectory

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
    rewards = {each.rollout_id: _reward(each, reward_weights) for each in trajectories}
    groups = group_trajectories(trajectories)
    return {
        **_rewards(groups, rewards),
        **_dimensions(trajectories),
        **_causes(groups, rewards),
        **_outputs(trajectories, groups),
        **answer_metrics(trajectories),
    }


def _reward(trajectory: Trajectory, weights: Mapping[str, float] | None) -> float | None:
    try:
        number = team_score(trajectory, weights)
    except RewardError:
        return None
    return number if number is not None and math.isfinite(number) else None


# -- rewards -----------------------------------------------------------------------------------------------------------


def _rewards(groups: Sequence[Sequence[Trajectory]], rewards: Mapping[str, float | None]) -> dict[str, float]:
    known = [reward for reward in rewards.values() if reward is not None]
    if not known:
        return {}
    spreads = [statistics.pstdev(own) for group in groups if len(own := _known(group, rewards)) > 1]
    found = {"reward_lowest": min(known), "reward_highest": max(known)}
    return {**found, "reward_std": statistics.fmean(spreads)} if spreads else found


def _known(group: Sequence[Trajectory], rewards: Mapping[str, float | None]) -> list[float]:
    return [reward for each in group if (reward := rewards[each.rollout_id]) is not None]


def _dimensions(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each named dimension, and of the intermediate rewards of a rollout."""
    named: defaultdict[str, list[float]] = defaultdict(list)
    intermediate: list[float] = []
    for each in trajectories:
        for name, value in each.reward.items() if isinstance(each.reward, dict) else ():
            named[name].append(value)
        intermediate.append(sum(_total(call.reward) for call in each.transitions))
    found = {f"{DIMENSION}{name}": statistics.fmean(values) for name, values in named.items()}
    has_steps = any(call.reward is not None for each in trajectories for call in each.transitions)
    return {**found, "intermediate_reward": statistics.fmean(intermediate)} if has_steps else found


def _total(reward: Reward | None) -> float:
    return sum(reward.values()) if isinstance(reward, dict) else float(reward or 0.0)


# -- groups without spread, and why ------------------------------------------------------------------------------------


def _causes(groups: Sequence[Sequence[Trajectory]], rewards: Mapping[str, float | None]) -> dict[str, float]:
    known = [reward for reward in rewards.values() if reward is not None]
    found: dict[str, int] = dict.fromkeys(CAUSES, 0)
    for group in groups:
        if len(group) > 1 and (cause := _cause(group, _known(group, rewards), known)):
            found[cause] += 1
    seeded = sum(each.metadata.get(SEEDED_CALLS, 0) for group in groups for each in group)
    return {**{f"groups_{cause}": float(count) for cause, count in found.items()}, "calls_seeded": float(seeded)}


def _cause(group: Sequence[Trajectory], own: Sequence[float], batch: Sequence[float]) -> str | None:
    """Why the rollouts of a group cannot be told apart; None where they can."""
    if len({output_of(each) for each in group}) == 1 and output_of(group[0]):
        return "repeated" if (len(group) - 1) * _logprob(group[0]) < LOG_CHANCE else "certain"
    if len(own) < 2 or spread(own) > SMALLEST_SPREAD:
        return None
    if spread(batch) <= SMALLEST_SPREAD:
        return "constant"
    if math.isclose(own[0], min(batch), abs_tol=SMALLEST_SPREAD):
        return "failed"
    return "solved" if math.isclose(own[0], max(batch), abs_tol=SMALLEST_SPREAD) else "constant"


def output_of(trajectory: Trajectory) -> Output:
    return tuple(call.response_token_ids for call in trajectory.transitions)


def _logprob(trajectory: Trajectory) -> float:
    return sum(sum(call.logprobs) for call in trajectory.transitions)


# -- outputs -----------------------------------------------------------------------------------------------------------


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
    step = max(1, len(calls) // MOST_OUTPUTS)
    long = (call.response_token_ids for call in calls[::step] if len(call.response_token_ids) >= LEAST_TOKENS)
    shares = [repeated_ngrams(output) for output in islice(long, MOST_OUTPUTS)]
    if shares:
        found["repeated_ngrams"] = statistics.fmean(shares)
    if len(groups) > 1:
        found["common_output"] = common_output(groups)
    return found


def repeated_ngrams(tokens: Sequence[int]) -> float:
    """The share of n-grams that occurred before in the same output.

    >>> repeated_ngrams([1, 2, 3, 4, 5]), repeated_ngrams([7] * 13)
    (0.0, 0.9)
    """
    tokens = tokens[-MOST_TOKENS:]
    ngrams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def common_output(groups: Sequence[Sequence[Trajectory]]) -> float:
    """The share of groups in which the most frequent output of all occurs."""
    count = Counter(output for group in groups for output in {output_of(each) for each in group} if output)
    return max(count.values(), default=0) / len(groups)
