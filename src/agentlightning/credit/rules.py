"""Credit rules: how much of a rollout's reward each of its calls has, each with its formula and source."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, Self, cast

from pydantic import Field, FiniteFloat, field_validator, model_validator

from agentlightning.credit.base import (
    SMALLEST_SPREAD,
    Advantages,
    Credit,
    CreditContext,
    CreditRule,
    Group,
    MemoryTable,
    OutcomeRule,
    discounted,
    final_rewards,
    memory_key,
    monte_carlo_returns,
    of_rollouts,
    plain_reward,
    register,
    returns_to_go,
    spread,
    standardised,
    standardised_calls,
    step_reward,
)
from agentlightning.errors import RewardError
from agentlightning.trajectory import Trajectory, Transition
from agentlightning.util.plugins import load
from agentlightning.util.settings import OpenShare, PositiveShare, Share, ShareBelowOne, Weight

# -- states ----------------------------------------------------------------------------------------------------------

# Which calls of a group were made in the same state.
#
# The state of a call is what its agent had observed last (`Transition.state`). Below a similarity of 1, states whose
# observations have nearly the same words are one: greedily, each joins the most frequent earlier one that is similar
# enough, by the overlap of their words (Dice 1945)
#
#     similarity(a, b) = 2 |a & b| / (|a| + |b|)                     words counted as often as they occur

StateKeys = list[list[str]]
"""For each rollout of a group, the state of each of its calls."""


def state_keys(group: Group, similarity: float = 1.0) -> StateKeys:
    """The states of a group's calls. Those of different agents are different."""
    keys = [[f"{call.agent or ''}/{call.state}" for call in trajectory.transitions] for trajectory in group]
    if similarity >= 1.0:
        return keys
    every = [key for own in keys for key in own]
    calls = (call for trajectory in group for call in trajectory.transitions)
    merged = _merged(Counter(every), dict(zip(every, calls, strict=True)), similarity)
    return [[merged[key] for key in own] for own in keys]


def history_keys(keys: Sequence[str], order: int) -> list[str]:
    """Each state of a rollout together with the `order` states before it; `^` stands for the beginning."""
    if not order:
        return list(keys)
    padded = ["^"] * order + list(keys)
    return [" ".join(padded[place : place + order + 1]) for place in range(len(keys))]


def repeated_states(keys: StateKeys, known: Container[str] = ()) -> tuple[int, int]:
    """Of the calls after the first of each rollout, those whose state two rollouts of the group or more were in, or is
    `known`; and all.

    >>> repeated_states([["start", "a", "b"], ["start", "a", "c"]])
    (2, 4)
    """
    visitors = Counter(key for own in keys for key in set(own))
    later = [key for own in keys for key in own[1:]]
    return sum(visitors[key] > 1 or key in known for key in later), len(later)


def _merged(frequency: Counter[str], calls: Mapping[str, Transition], similarity: float) -> dict[str, str]:
    """By state, the one that stands for it. The order of rollouts makes no difference."""
    found: dict[str, str] = {}
    kept: dict[str, tuple[str | None, Counter[str]]] = {}
    for key in sorted(frequency, key=lambda key: (-frequency[key], key)):
        agent, own = calls[key].agent, _words(calls[key])
        alike = (name for name, (other, words) in kept.items() if other == agent and _alike(own, words, similarity))
        found[key] = next(alike, key)
        if found[key] == key:
            kept[key] = agent, own
    return found


def _alike(left: Counter[str], right: Counter[str], similarity: float) -> bool:
    sizes = left.total(), right.total()
    total = max(1, sum(sizes))
    return 2 * min(sizes) / total >= similarity and 2 * (left & right).total() / total >= similarity


def _words(call: Transition) -> Counter[str]:
    observation = call.observation
    return Counter(json.dumps(_texts(observation)).split() if observation else map(str, call.prompt_token_ids))


def _texts(value: Any) -> Any:
    """The values of JSON tables without their names, which all observations share."""
    if isinstance(value, dict):
        return [_texts(inner) for inner in value.values()]
    return [_texts(inner) for inner in value] if isinstance(value, list) else value


# -- evidence --------------------------------------------------------------------------------------------------------

# Which prediction of returns is better, measured on returns that were not used to make it.
#
# For a call with return G_t, in a rollout i of a group:
#
# - `mean`: the mean return of the group's other rollouts, less the step rewards that i has had before the call;
# - `states`: the mean return of all visits of the state but that of i, earlier groups included; where there are none,
#   `mean`;
# - `critic`: the value of the policy's head, computed before anything is learned from the group.
#
# Their squared errors are added up over the calls after the first of each rollout (all rollouts share the first state),
# and over groups; an error counts `decay` as much one group later. The sums are in the credit memory, so that a
# checkpoint has them. Choosing between predictions by their error on data that neither was fit to: Stone 1974,
# "Cross-validatory choice and assessment of statistical predictions".

EVIDENCE = ("evidence_calls", "evidence_mean", "evidence_states", "evidence_critic")
"""The number of predictions, and the sum of the squared errors of each kind."""
TABLE, ROW = "hierarchical/evidence", "errors"
"""Their place in the memory. One table: a critic is one for all tasks."""
SMALLEST = 1e-6
"""Visits that count for less are none."""


def squared_errors(
    group: Group, keys: StateKeys, earlier: Mapping[str, Sequence[float]], values: Sequence[Sequence[float]]
) -> list[float]:
    """`EVIDENCE` of a group. `earlier`: by state, what the visits of earlier groups count for and their mean return;
    `values`: the critic's, of each call."""
    returns = [returns_to_go(trajectory) for trajectory in group]
    visits = first_visits(keys, returns)
    found = [0.0] * len(EVIDENCE)
    for i, trajectory in enumerate(group):
        others = [own[0] for j, own in enumerate(returns) if j != i and own]
        if not others:
            continue
        mean = sum(others) / len(others)
        for t, call in enumerate(trajectory.transitions):
            if t and call.response_token_ids:  # A call without tokens has no value.
                key, gain = keys[i][t], returns[i][t]
                by_state = _without(i, visits[key], earlier.get(key, (0.0, 0.0)))
                states = mean if by_state is None else by_state
                errors = (1.0, (gain - mean) ** 2, (gain - states) ** 2, (gain - values[i][t]) ** 2)
                found = [a + b for a, b in zip(found, errors, strict=True)]
            mean -= step_reward(call)
    return found


def first_visits(keys: StateKeys, returns: Sequence[Sequence[float]]) -> dict[str, dict[int, float]]:
    """By state, by rollout, the return from its first visit on."""
    found: dict[str, dict[int, float]] = {}
    for i, (own, gains) in enumerate(zip(keys, returns, strict=True)):
        for key, gain in zip(own, gains, strict=True):
            found.setdefault(key, {}).setdefault(i, gain)
    return found


def _without(i: int, visits: Mapping[int, float], earlier: Sequence[float]) -> float | None:
    """The mean return of the visits of a state but those of rollout i; None where there are none."""
    others = [gain for j, gain in visits.items() if j != i]
    count, mean = earlier
    total = len(others) + count
    return (sum(others) + count * mean) / total if total > SMALLEST else None


# -- rules -----------------------------------------------------------------------------------------------------------


@register
class GroupRelativeCredit(OutcomeRule):
    """The rollout's reward against the mean of its group.

    Group-relative credit: every call of a rollout has the rollout's advantage over its group (GRPO).

        A_i = (R_i - mean(R)) / std(R)

    Shao et al. 2024, DeepSeekMath, equation for outcome supervision (arXiv:2402.03300, section 4.1.2), with the
    population standard deviation. Without the division it is the advantage of Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783).
    """

    type: Literal["group_relative"] = "group_relative"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases = ("uniform", "grpo")
    normalize_std: bool = True
    """Divide by the group's standard deviation."""

    def advantages(self, group: Group) -> Advantages | None:
        found = standardised(final_rewards(group), divide=self.normalize_std)
        return None if found is None else of_rollouts(found, group)


@register
class LeaveOneOutCredit(OutcomeRule):
    """The rollout's reward against the mean of the others.

    Leave-one-out credit: a rollout's reward against the mean of the others of its group (RLOO, LOOP).

        A_i = R_i - 1 / (G - 1) sum_{j != i} R_j

    Ahmadian et al. 2024, Back to Basics (arXiv:2402.14740, equation 8), after Kool et al. 2019; it is the advantage of
    LOOP (Chen et al. 2025, arXiv:2502.01600). Unlike the mean of the whole group, the baseline does not depend on the
    rollout itself, so that the gradient is unbiased. Nothing is divided by a standard deviation.
    """

    type: Literal["leave_one_out"] = "leave_one_out"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases = ("rloo", "loop")

    def advantages(self, group: Group) -> Advantages | None:
        rewards = final_rewards(group)
        if spread(rewards) <= SMALLEST_SPREAD:
            return None
        total, others = sum(rewards), len(rewards) - 1
        return of_rollouts([reward - (total - reward) / others for reward in rewards], group)


@register
class ReinforceCredit(OutcomeRule):
    """Every call of a rollout has `reward - baseline`.

    REINFORCE: the reward itself is the advantage, less a constant baseline (Williams 1992).

    It learns from groups of one.
    """

    type: Literal["reinforce"] = "reinforce"  # pyright: ignore[reportIncompatibleVariableOverride]
    min_group = 1
    baseline: float = 0.0
    """A reward that is neither good nor bad."""

    def advantages(self, group: Group) -> Advantages | None:
        return of_rollouts([reward - self.baseline for reward in final_rewards(group)], group)


@register
class DiscountedCredit(CreditRule):
    """The discounted return from a call on, against the mean over the calls of its group.

    Discounted returns: each call has the rewards that come after it, against the mean of the group's.

    With r_k the intermediate reward after call k of n, and R the final reward, which follows the last call,

        G_k = sum_{j=k}^{n} gamma^(j - k) r_j + gamma^(n - k) R        the return of call k
        A_k = (G_k - mean(G)) / std(G)                                 over all calls of the group

    Sutton and Barto, Reinforcement Learning (2nd ed. 2018), equations 3.8 and 13.8. With gamma = 1, no intermediate
    rewards and rollouts of equally many calls it is `group_relative`.
    """

    type: Literal["discounted"] = "discounted"  # pyright: ignore[reportIncompatibleVariableOverride]
    gamma: Share = 0.95
    """What a reward one call later is worth."""
    normalize_std: bool = True
    """Divide by the standard deviation of the group's returns."""

    def advantages(self, group: Group) -> Advantages | None:
        returns = [returns_to_go(trajectory, self.gamma) for trajectory in group]
        found = standardised_calls(returns, divide=self.normalize_std)
        return None if found is None else list(map(tuple, found))


@register
class GroupStepCredit(CreditRule):
    """The rollout against its group plus the call against those in the same state.

    Group-in-group credit: a rollout against its group, and each call against the calls made in the same state (GiGPO).

    With G_t the discounted return of a call, rewards of steps included, and S(s) all calls of the group in state s,

        A_t = A^E + omega A^S_t
        A^E   = (R - mean(R)) / std(R)                          over the rollouts of the group
        A^S_t = (G_t - mean(G)) / std(G)                        over S(s_t); 0 where they are equal or only one

    Feng et al. 2025 (arXiv:2505.10978, sections 4.1 to 4.3), with the return as R where steps have rewards. Where all
    rollouts pass the same states, the noise of all later steps is in G_t, and little is gained over `group_relative`.
    """

    type: Literal["group_step"] = "group_step"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases = ("gigpo",)
    omega: Weight = 1.0
    """The weight of the comparison within states."""
    gamma: Share = 0.95
    """What a reward one call later is worth to a call."""
    similarity: PositiveShare = 1.0
    """States are the same from this similarity of their observations on; 1: only equal ones."""
    normalize_std: bool = True
    """Divide by standard deviations."""

    def advantages(self, group: Group) -> Advantages | None:
        episodes = standardised([sum(returns_to_go(each)[:1]) for each in group], divide=self.normalize_std)
        returns = [returns_to_go(each, self.gamma) for each in group]
        steps = within_states(state_keys(group, self.similarity), returns, divide=self.normalize_std)
        if episodes is None and not any(map(any, steps)):
            return None
        outcomes = episodes or [0.0] * len(group)
        return [
            tuple(outcome + self.omega * step for step in own) for outcome, own in zip(outcomes, steps, strict=True)
        ]


def within_states(keys: StateKeys, numbers: list[list[float]], *, divide: bool) -> list[list[float]]:
    """Each call's number relative to those of all calls in the same state; 0.0 where these are equal."""
    members: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, own in enumerate(keys):
        for t, key in enumerate(own):
            members[key].append((i, t))
    found = [[0.0] * len(own) for own in keys]
    for places in members.values():
        for (i, t), value in zip(places, _relative([numbers[i][t] for i, t in places], divide), strict=True):
            found[i][t] = value
    return found


def _relative(numbers: list[float], divide: bool) -> list[float]:
    """`standardised`, for numbers of any size: what is equal is decided relative to the largest."""
    size = max(map(abs, numbers))
    relative = standardised([number / size for number in numbers], divide=divide) if size else None
    if relative is None:
        return [0.0] * len(numbers)
    return relative if divide else [size * number for number in relative]


GOAL, FAILURE = "goal", "failure"
"""Nodes of the graph that are no state of an agent: those contain a slash."""


@register
class GraphCredit(OutcomeRule):
    """The distance to success after a call, against the other calls in the same state.

    Graph credit: whether a call brought its rollout nearer to a success of the group (GraphGPO).

    All rollouts of a group are merged into one graph: a node for each state, an edge for each call, and the goal behind
    the last call of each success. With d(s) the number of edges on the shortest path from s to the goal,

        G_t = scale * gamma^d(s_{t+1}),  0 where no path leads to the goal
        A_t = (G_t - mean(G)) / std(G)                          over all calls of the group in state s_t

    "Beyond Trajectory-Level Attribution", 2026 (arXiv:2605.26684). It gives credit to steps of failed rollouts that
    lead where others succeeded, and takes a group without a success, or without a failure or detour, as one that
    teaches nothing.
    """

    type: Literal["graph"] = "graph"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases = ("graphgpo",)
    gamma: OpenShare = 0.1
    """What a state is worth that is one call further from the goal."""
    scale: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """The worth of the goal."""
    success: FiniteFloat | None = None
    """Rollouts with this reward or more succeeded. None: those with the highest reward of their group."""
    similarity: PositiveShare = 1.0
    """States are the same from this similarity of their observations on; 1: only equal ones."""
    normalize_std: bool = True
    """Divide by the standard deviation within a state."""

    def advantages(self, group: Group) -> Advantages | None:
        keys = state_keys(group, self.similarity)
        ends = [GOAL if success else FAILURE for success in self._successes(group)]
        after = [[*own[1:], end] for own, end in zip(keys, ends, strict=True)]
        distance = distances(keys, after)
        if GOAL not in ends:
            return None
        worth = [[self._worth(distance.get(state)) for state in own] for own in after]
        found = within_states(keys, worth, divide=self.normalize_std)
        return [tuple(own) for own in found] if any(map(any, found)) else None

    def _successes(self, group: Group) -> list[bool]:
        rewards = final_rewards(group)
        if self.success is None and (not rewards or spread(rewards) <= SMALLEST_SPREAD):
            return [False] * len(rewards)
        threshold = max(rewards, default=0.0) if self.success is None else self.success
        return [reward >= threshold for reward in rewards]

    def _worth(self, distance: int | None) -> float:
        return 0.0 if distance is None else self.scale * self.gamma**distance


def distances(keys: StateKeys, after: StateKeys) -> dict[str, int]:
    """By state, the number of calls on the shortest way to the goal; states without a way are left out."""
    before: dict[str, set[str]] = defaultdict(set)
    for own, following in zip(keys, after, strict=True):
        for source, target in zip(own, following, strict=False):
            before[target].add(source)
    found, waiting = {GOAL: 0}, deque([GOAL])
    while waiting:
        state = waiting.popleft()
        for source in before[state]:
            if source not in found:
                found[source] = found[state] + 1
                waiting.append(source)
    return found


@register
class IntermediateCredit(CreditRule):
    """The sum of the step rewards after a call, and the final reward, each relative to the group.

    Intermediate rewards: each call has the step rewards that come after it, each against the mean of its group's.

    With r_j the reward after call j, where there is one, and R the final reward,

        r~_j = (r_j - mean(r)) / std(r)                over all step rewards of the group
        A_k  = weight * sum_{j >= k} r~_j + (R - mean(R)) / std(R)

    Process supervision of GRPO: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300, section 4.1.3), with the final reward
    beside it as in outcome supervision (section 4.1.2). Equal rewards, of steps or of rollouts, add nothing.
    """

    type: Literal["intermediate"] = "intermediate"  # pyright: ignore[reportIncompatibleVariableOverride]
    weight: Weight = 1.0
    """What step rewards count beside the final reward."""
    normalize_std: bool = True
    """Divide by the standard deviations of the group."""

    def advantages(self, group: Group) -> Advantages | None:
        found = _steps_and_outcomes(group, list(map(_recorded, group)), divide=self.normalize_std)
        if found is None:
            return None
        return [
            tuple(discounted([self.weight * gain for gain in own], 1.0, outcome))
            for own, outcome in zip(*found, strict=True)
        ]


def _steps_and_outcomes(
    group: Group, scores: Sequence[Sequence[float | None]], *, divide: bool
) -> tuple[list[list[float]], list[float]] | None:
    """The scores of calls and the final rewards, each relative to the group; None where neither differ."""
    steps = standardised_calls(scores, divide=divide)
    final = standardised(final_rewards(group), divide=divide)
    if steps is None and final is None:
        return None
    return steps or [[0.0] * len(own) for own in scores], final or [0.0] * len(group)


logger = logging.getLogger(__name__)


@register
class JudgeCredit(CreditRule):
    """The score of each call relative to its group, beside the final reward.

    Judged steps: each call's score by a judge, against those of its group, beside the final reward.

    With q_k the score of call k,

        A_k = weight * (q_k - mean(q)) / std(q) + (R - mean(R)) / std(R)

    over all scored calls, and all rollouts, of the group. The scores are the intermediate rewards that the agent, its
    environment or a rule over spans recorded; or a `scorer`, a function of a trajectory that returns one number for
    each of its calls and may ask a model. A rollout whose scorer fails, or does not give a finite number for each call,
    is not learned from (weight 0) and counted, credit_judge_failed; the first of a batch is logged.

    Step scores relative to the group instead of as returns: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300, section
    4.1.3), with the scores of the step itself in place of their sum.
    """

    type: Literal["judge"] = "judge"  # pyright: ignore[reportIncompatibleVariableOverride]
    scorer: str | None = None
    """The function that scores the calls of a trajectory, as "module:function". None: their intermediate rewards."""
    weight: Weight = 1.0
    """What a call's score counts beside the final reward."""
    normalize_std: bool = True
    """Divide by the standard deviations of the group."""

    @field_validator("scorer")
    @classmethod
    def _check_name(cls, scorer: str | None) -> str | None:
        if scorer is not None and not all(scorer.partition(":")):
            raise ValueError(f'scorer={scorer!r} names no function; write "module:function"')
        return scorer

    def check(self, trajectory: Trajectory) -> None:
        if (
            self.scorer is None
            and trajectory.transitions
            and all(call.reward is None for call in trajectory.transitions)
        ):
            raise RewardError(
                f'no call of rollout {trajectory.rollout_id} has a score, which credit rule "judge" needs: emit '
                'rewards between the calls, or set scorer="module:function"'
            )

    def assign(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
        score = _recorded if self.scorer is None else _scorer(self.scorer)
        failures: list[str] = []
        credits = [self._group(group, [_scores(score, each, failures) for each in group]) for group in groups]
        if failures:
            logger.warning("%d rollouts could not be judged and are not learned from: %s", len(failures), failures[0])
        return credits

    def _group(self, group: Group, scores: list[list[float | None] | None]) -> Credit | None:
        known = [own or [None] * len(each.transitions) for own, each in zip(scores, group, strict=True)]
        found = _steps_and_outcomes(group, known, divide=self.normalize_std)
        if found is None:
            return None
        advantages = [[outcome + self.weight * step for step in own] for own, outcome in zip(*found, strict=True)]
        weights = of_rollouts([float(own is not None) for own in scores], group)
        return Credit(advantages, weights, counts={"judge_failed": float(scores.count(None))})


Scorer = Callable[[Trajectory], Sequence[Any]]


@cache
def _scorer(name: str) -> Scorer:
    return load(name)


def _recorded(trajectory: Trajectory) -> list[float | None]:
    return [None if call.reward is None else step_reward(call) for call in trajectory.transitions]


def _scores(score: Scorer, trajectory: Trajectory, failures: list[str]) -> list[float | None] | None:
    """One score for each call, None for a call without; None where the scorer failed."""
    try:
        found = [None if each is None else float(each) for each in score(trajectory)]
    except RewardError:
        raise
    except Exception as error:  # noqa: BLE001  The boundary of the user's function, which may raise anything.
        failures.append(f"the scorer failed on rollout {trajectory.rollout_id}: {error!r}")
        return None
    calls = len(trajectory.transitions)
    if len(found) == calls and all(each is None or math.isfinite(each) for each in found):
        return found
    wrong = "a score that is not finite" if len(found) == calls else f"{len(found)} scores for {calls} calls"
    failures.append(f"the scorer gave rollout {trajectory.rollout_id} {wrong}")
    return None


ANSWER_LOGPROBS = "answer_logprobs"
"""By call, log p of each token of the known answer, said in place of what the call sampled."""


@register
class InformationGainCredit(OutcomeRule):
    """The rise of p(answer) from one call to the next, and the final reward at the last.

    Information gain: each call has the rise of the policy's probability of the known answer that it brought (IGPO).

    With a the answer of L tokens, s_k the history that call k saw, and n calls,

        p_k = exp( 1/L sum_j log pi(a_j | s_k, a_{<j}) )
        r_k = p_{k+1} - p_k  for k < n,   r_n = R
        A_k = sum_{j >= k} gamma^(j - k) (r_j - mean(r)) / std(r)        over all calls of the group

    A call whose p is not known, because it sampled no token, neither gains nor loses: p stays what it was.

    Wang et al. 2025 (arXiv:2510.14967, section 3), with the final reward R at the last call. The answer is a field of
    the task; the policy scores it after the prompt of each call, which is one forward pass over the prompts.
    """

    type: Literal["information_gain"] = "information_gain"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases = ("igpo",)
    needs = frozenset({ANSWER_LOGPROBS})
    answer: str = "answer"
    """The field of the task that holds the answer."""
    answer_format: str = "{answer}"
    """How the policy would say it: `{answer}` stands for the answer."""
    gamma: Share = 1.0
    """What a gain one call later is worth."""
    normalize_std: bool = True
    """Divide by the standard deviation of the group's gains."""

    @field_validator("answer_format")
    @classmethod
    def _check_format(cls, text: str) -> str:
        if "{answer}" not in text:
            raise ValueError(f'answer_format={text!r} does not contain "{{answer}}"')
        return text

    def check(self, trajectory: Trajectory) -> None:
        self.answer_text(trajectory)
        super().check(trajectory)

    def answer_text(self, trajectory: Trajectory) -> str:
        """The known answer as the policy would say it. Raises RewardError where the task has none."""
        task = cast("Mapping[str, Any]", trajectory.task) if isinstance(trajectory.task, Mapping) else {}
        known = task.get(self.answer)
        if known is None or not str(known):
            raise RewardError(
                f'the task of rollout {trajectory.rollout_id} has no {self.answer!r}, which credit rule "{self.type}" '
                f"needs; it has {sorted(task) or 'no fields'}. Set credit.answer to the field with the known answer"
            )
        return self.answer_format.replace("{answer}", str(known))

    def assign(self, groups: Sequence[Group], context: CreditContext) -> list[Credit | None]:
        return [self.of_group(group, context) for group in groups]

    def of_group(self, group: Group, context: CreditContext) -> Credit | None:
        found = standardised_calls([self._gains(each, context) for each in group], divide=self.normalize_std)
        return None if found is None else Credit([discounted(own, self.gamma) for own in found])

    def _gains(self, trajectory: Trajectory, context: CreditContext) -> list[float]:
        columns = [context.of_call(ANSWER_LOGPROBS, call) for call in trajectory.transitions]
        chances = [math.exp(float(sum(own)) / len(own)) if len(own) else None for own in columns]
        known = [chance for chance in chances if chance is not None]
        gains, before = list[float](), known[0] if known else 0.0
        for chance in chances[1:]:
            gains.append(0.0 if chance is None else chance - before)
            before = before if chance is None else chance
        return [*gains, plain_reward(trajectory)] if chances else []


VALUES = "values"
SHARED_VISITS = 2.0
"""With as many visits a state's own mean is its value."""
FAINT = 0.05
"""Visits that count less than this are forgotten."""


@register
class StateValueCredit(CreditRule):
    """The change of the group's mean return from one state to the next.

    State values: each call has the change of the value of its state, measured by the group's own rollouts.

    With G_t the return of a rollout from call t on (step rewards r and the final reward), and N(s) the rollouts of the
    group that were in state s, each counted once, at its first visit,

        V(s)  = mean of G over N(s)
        A_t   = r_t + V(s_{t+1}) - V(s_t),        V after the last call = the final reward
        sum_t A_t = G_0 - V(s_0)                  exactly: all that happened between the states is told apart

    The difference of Monte Carlo state values (Sutton and Barto 2018, section 5.1, as a critic in section 13.5) without
    a critic: what came before a call and what came after it are averaged over all rollouts that share the state, so
    that neither is noise in its advantage.

    - `history` k > 0: V is a weighted mean over the last 0 to k states being the same as well, of those orders with two
      visits or more, with weights (order + 1)^history_power (HGPO, arXiv:2602.22817).
    - `pool` d > 0: visits of earlier groups of the task count d per group that has passed: n' = n + d c and
      V = (n mean(G) + d c m) / n', which are then remembered as c and m: a moving mean.
    - A state with less than two visits, earlier ones included, has V = (n mean(G) + k prior) / (n + k), k =
    `prior_visits`:
      the prior is the learned value of the state if the policy has a value head, else the value of the state before it.
    """

    type: Literal["state_value"] = "state_value"  # pyright: ignore[reportIncompatibleVariableOverride]
    uses = frozenset({VALUES})
    gives_returns = True
    similarity: PositiveShare = 1.0
    """States are the same from this similarity of their observations on; 1: only equal ones."""
    history: int = Field(default=0, ge=0, le=8)
    """Number of earlier states that may have to be the same, too."""
    history_power: Weight = 1.0
    """How much more a longer common history counts."""
    pool: ShareBelowOne = 0.8
    """What a visit counts one group of the same task later; 0: each group stands for itself."""
    prior_visits: Weight = 1.0
    """How many visits the prior counts for in the value of a state that was visited once."""

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        if self.similarity < 1 and self.pool and "pool" in self.model_fields_set:
            raise ValueError(
                f"similarity={self.similarity:g} compares observations within a group only; set pool=0, or similarity=1"
            )
        return self

    def of_group(self, group: Group, context: CreditContext) -> Credit | None:
        return self.of_states(group, state_keys(group, self.similarity), context)

    def of_states(self, group: Group, keys: StateKeys, context: CreditContext) -> Credit | None:
        """The credit of one group whose states are known."""
        values = self._values(group, keys, context)
        found = [_differences(trajectory, own) for trajectory, own in zip(group, values, strict=True)]
        size = max((abs(plain_reward(each)) for each in group), default=0.0)
        largest = max((abs(advantage) for own in found for advantage in own), default=0.0)
        repeated, later = repeated_states(keys)
        counts = {"states": float(later), "states_repeated": float(repeated)}
        return _with_returns(found if largest > SMALLEST_SPREAD * max(1.0, size) else None, group, context, counts)

    def _values(self, group: Group, keys: StateKeys, context: CreditContext) -> list[list[float]]:
        """V of each state of each rollout."""
        returns = [returns_to_go(trajectory) for trajectory in group]
        orders = self._orders(keys)
        visits = self.remember(group, keys, context)
        start = sum(own[0] for own in returns if own) / max(1, sum(map(bool, returns)))
        learned = context if VALUES in context.columns else None
        return [
            self._along(each.transitions, [order[i] for order in orders], visits, start, learned)
            for i, each in enumerate(group)
        ]

    def remembered(self, group: Group, context: CreditContext) -> Mapping[str, Sequence[float]]:
        """The visits of earlier groups of the task, by state: how many they count for, and their mean return."""
        return context.memory.read(memory_key(group)) if self.pool > 0 and self.similarity >= 1 else {}

    def remember(self, group: Group, keys: StateKeys, context: CreditContext) -> MemoryTable:
        """The visits of this group together with the remembered ones, which they join."""
        now = _visits(self._orders(keys), [returns_to_go(trajectory) for trajectory in group])
        visits = _pooled(now, self.remembered(group, context), self.pool)
        if self.pool > 0 and self.similarity >= 1:
            context.memory.write(memory_key(group), visits)
        return visits

    def _orders(self, keys: StateKeys) -> list[StateKeys]:
        return [[history_keys(own, order) for own in keys] for order in range(self.history + 1)]

    def _along(
        self,
        calls: Sequence[Transition],
        orders: Sequence[Sequence[str]],
        visits: MemoryTable,
        start: float,
        learned: CreditContext | None,
    ) -> list[float]:
        """V of the states of one rollout, in order: a state seen once leans on the one before it."""
        values: list[float] = []
        for t, call in enumerate(calls):
            found = [visits[order[t]] for order in orders]
            shared = [
                ((order + 1) ** self.history_power, mean)
                for order, (count, mean) in enumerate(found)
                if count >= SHARED_VISITS
            ]
            if shared:
                values.append(sum(weight * mean for weight, mean in shared) / sum(weight for weight, _ in shared))
                continue
            before = values[-1] if values else start
            own: Any = () if learned is None else learned.of_call(VALUES, call)
            prior = float(own[0]) if len(own) else before
            count, mean = found[0]
            values.append((count * mean + self.prior_visits * prior) / (count + self.prior_visits))
        return values


def _differences(trajectory: Trajectory, values: list[float]) -> tuple[float, ...]:
    after = [*values[1:], plain_reward(trajectory)]
    return tuple(
        step_reward(call) + following - value
        for call, value, following in zip(trajectory.transitions, values, after, strict=False)
    )


def _visits(orders: list[StateKeys], returns: list[list[float]]) -> MemoryTable:
    """By state, the number of rollouts that were in it, and the mean of their returns from their first visit on."""
    found = {key: list(own.values()) for keys in orders for key, own in first_visits(keys, returns).items()}
    return {key: [float(len(gains)), sum(gains) / len(gains)] for key, gains in found.items()}


def _with_returns(
    advantages: Advantages | None, group: Group, context: CreditContext, counts: Mapping[str, float]
) -> Credit | None:
    """The credit of a group; None where no call was better than another, unless a value head learns the returns."""
    if VALUES not in context.columns:
        return None if advantages is None else Credit(advantages, counts=counts)
    returns = monte_carlo_returns([returns_to_go(each) for each in group], group)
    return Credit(advantages or of_rollouts([0.0] * len(group), group), returns=returns, counts=counts)


def _pooled(now: MemoryTable, earlier: Mapping[str, Sequence[float]], decay: float) -> MemoryTable:
    """Visits of this group and of earlier ones; states that have not been visited for long are forgotten."""
    found = {
        key: [decay * count, mean] for key, (count, mean) in earlier.items() if decay * count > FAINT or key in now
    }
    for key, (count, mean) in now.items():
        before, earlier_mean = found.get(key, (0.0, 0.0))
        total = count + before
        found[key] = [total, (count * mean + before * earlier_mean) / total]
    return found


@register
class ValueCredit(CreditRule):
    """Generalised advantage estimation with the values of the policy's value head, by call and by token.

    Learned values: generalised advantages over the calls of a rollout, and below them over the tokens of each call.

    V_k is the value that the policy's value head gives the state of call k, before its first token, r_k the reward
    after the call and R the final reward, behind the last call:

        delta_k = r_k + gamma V_{k+1} - V_k,             V_{n+1} = R
        A_k     = sum_{l >= 0} (gamma lambda)^l delta_{k+l}

    Schulman et al. 2016 (arXiv:1506.02438, equation 16), with a call as one action. Within a call of tokens 1..J with
    values v_1 = V_k, ..., v_J, what the call led to, V_k + A_k, stands behind its last token:

        d_j = v_{j+1} - v_j,  v_{J+1} = V_k + A_k;       a_j = sum_{l >= 0} token_lambda^l d_{j+l}

    Two levels as in VAGEN (Wang et al. 2025, arXiv:2510.16907, section 3), with another anchor of a turn. There the
    value of a turn is the one behind the last token of its answer, and A_k starts the token level at that token. Here
    it is the one before the first token, and what the answer itself changed is in A_k, too: with token_lambda = 1 the
    first token has A_k. One token then has no more lambda than a call has: rewards reach the first of a hundred calls
    undamped by their length. The head learns a_j + v_j.
    """

    type: Literal["value"] = "value"  # pyright: ignore[reportIncompatibleVariableOverride]
    aliases = ("gae",)
    min_group = 1
    needs = frozenset({VALUES})
    gives_returns = True
    gamma: Share = 1.0
    """What a reward one call later is worth."""
    lam: Share = 0.95
    """How much of what lies behind the next call counts; 0: values alone, 1: rewards alone."""
    token_lam: Share = 1.0
    """The same for the tokens of a call."""

    def of_group(self, group: Group, context: CreditContext) -> Credit:
        found = [self._rollout(trajectory, context) for trajectory in group]
        return Credit(
            [[advantage for advantage, _ in own] for own in found],
            returns=[[target for _, target in own] for own in found],
            counts={"value_groups": 1.0},
        )

    def _rollout(self, trajectory: Trajectory, context: CreditContext) -> list[tuple[Any, Any]]:
        """(advantages, returns) of the tokens of each call."""
        import numpy as np

        values = [np.asarray(context.of_call(VALUES, call), np.float64) for call in trajectory.transitions]
        states = [float(own[0]) if len(own) else 0.0 for own in values]
        gains = self._calls(trajectory, states)
        tokens = [self._tokens(own, state + gain) for own, state, gain in zip(values, states, gains, strict=True)]
        return [(advantage, advantage + own) for advantage, own in zip(tokens, values, strict=True)]

    def _calls(self, trajectory: Trajectory, states: list[float]) -> list[float]:
        rewards = [step_reward(call) for call in trajectory.transitions]
        following = [*(self.gamma * state for state in states[1:]), plain_reward(trajectory)]
        gains = [a + b - c for a, b, c in zip(rewards, following, states, strict=False)]
        return discounted(gains, self.gamma * self.lam)

    def _tokens(self, values: Any, end: float) -> Any:
        import numpy as np

        return np.array(discounted(np.append(values[1:], end)[: len(values)] - values, self.token_lam))


@register
class HierarchicalCredit(StateValueCredit):
    """`state_value` where states repeat, else `uniform`; with a value head the better predictor of returns.

    Hierarchical credit: for each group the rule that there is evidence for.

    Without a value head the group's own rollouts are the evidence:

        share = calls, after the first of each rollout, in a state that another rollout was in / all such calls

    Other rollouts are those of the group, and of earlier groups of the task that are remembered (`pool`).

    - share >= `repeated`: `state_value`, which needs no critic;
    - else the return of the rollout against the mean of its group, the same for every call: `uniform`.

    With a value head that is trained (the loss "value"), the evidence is how well state values and the critic have
    predicted returns of earlier groups that neither was fit to (`squared_errors`):

    - `state_value` where the states' mean squared error is below the critic's by the share `margin`, by default
      a tenth;
    - else `value`, also where the mean of the group's other rollouts predicts as well: the critic is a baseline for
      groups without spread, too.

    The first group, of which nothing is known, is decided as without a head. Whatever is chosen, the critic learns from
    every group.

    The metrics of a step count the groups of each kind: credit_hierarchical_state_value, credit_hierarchical_value,
    credit_hierarchical_uniform; and, over the groups, add up what the errors were measured on and the errors
    themselves: credit_evidence_calls, credit_evidence_mean, credit_evidence_states, credit_evidence_critic. The episode
    level of LightningRL: Luo et al. 2025, arXiv:2508.03680, section 3.
    """

    type: Literal["hierarchical"] = "hierarchical"  # pyright: ignore[reportIncompatibleVariableOverride]
    repeated: PositiveShare = 0.25
    """Without a value head: the share of repeated states from which on they decide."""
    margin: ShareBelowOne = 0.1
    """With a value head: how much smaller the error of state values has to be than that of the critic."""
    evidence: ShareBelowOne = 0.97
    """What an error counts one group later; 0: the last group alone."""
    gamma: Share = 1.0
    """Of `value`: what a reward one call later is worth."""
    lam: Share = 0.95
    """Of `value`: how much of what lies behind the next call counts."""

    @model_validator(mode="before")
    @classmethod
    def _read_pool(cls, given: Any) -> Any:
        """Settings of earlier versions name the pool of `state_value` by None."""
        return {k: v for k, v in given.items() if v is not None or k != "pool"} if isinstance(given, dict) else given

    def of_group(self, group: Group, context: CreditContext) -> Credit | None:
        keys = state_keys(group, self.similarity)
        earlier = self.remembered(group, context)
        repeated, later = repeated_states(keys, earlier)
        chosen = "state_value" if later and repeated >= self.repeated * later else "uniform"
        counts = {"states": float(later), "states_repeated": float(repeated)}
        if VALUES in context.columns:
            known = context.memory.read(TABLE).get(ROW, (0.0,) * len(EVIDENCE))
            found = squared_errors(group, keys, _weighed(earlier, self.pool), _values(group, context))
            faded = [self.evidence * before + now for before, now in zip(known, found, strict=True)]
            context.memory.write(TABLE, {ROW: faded})
            calls, _, by_states, by_critic = known
            if calls:
                chosen = "state_value" if by_states <= (1 - self.margin) * by_critic else "value"
            counts |= dict(zip(EVIDENCE, found, strict=True))
        if chosen == "state_value":
            credit = self.of_states(group, keys, context)
        else:
            if repeated:
                self.remember(group, keys, context)
            gains = standardised([sum(returns_to_go(each)[:1]) for each in group], divide=False)
            uniform = None if gains is None else of_rollouts(gains, group)
            by_value = ValueCredit(gamma=self.gamma, lam=self.lam) if chosen == "value" else None
            credit = by_value.of_group(group, context) if by_value else _with_returns(uniform, group, context, {})
        return None if credit is None else replace(credit, counts={**counts, f"hierarchical_{chosen}": 1.0})


def _weighed(earlier: Mapping[str, Sequence[float]], pool: float) -> dict[str, tuple[float, float]]:
    """Remembered visits as they count in this group."""
    return {key: (pool * count, mean) for key, (count, mean) in earlier.items()}


def _values(group: Group, context: CreditContext) -> list[list[float]]:
    """The critic's value of the state of each call; 0 for one without tokens."""
    found: list[list[float]] = []
    for trajectory in group:
        own: list[Any] = [context.of_call(VALUES, call) for call in trajectory.transitions]
        found.append([float(each[0]) if len(each) else 0.0 for each in own])
    return found
