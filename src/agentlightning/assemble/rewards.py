"""The rewards among an attempt's spans: what each belongs to, and one number from named dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from agentlightning import span as names
from agentlightning.assemble.model_calls import calls
from agentlightning.errors import RewardError
from agentlightning.span import MAX_REWARD, Span, counts, usable_reward
from agentlightning.trajectory import Reward


@dataclass(frozen=True, slots=True)
class RewardLinks:
    """Where the rewards of one attempt belong."""

    final: Reward | None
    """None: missing."""
    intermediate: dict[str, Reward]
    """By span_id of the call each follows."""
    unlinked: int = 0
    """Earlier rewards that came before the first call."""
    agents: dict[str, Reward] = field(default_factory=dict[str, "Reward"])
    """By name of an agent, the rewards that were emitted for it alone."""
    parts: dict[str, Reward] = field(default_factory=dict[str, "Reward"])
    """By span_id of the last call of each part, the sum of what the attempt emitted between it and the next call, the
    final reward included. Empty where this is one place, and where `agl rescore` gave the final reward."""


def link_rewards(spans: Iterable[Span]) -> RewardLinks:
    """Find what each reward belongs to.

    A reward that names an agent belongs to that agent; several for one agent add up. Of the others, the last reward
    span of an attempt, by sequence number, is the final reward of the rollout. Each earlier one is the intermediate
    reward of the last model call before it; where several follow the same call they add up, named
    dimensions name by name. A reward of `agl rescore` is the final one in place of the attempt's own; one of an AIR
    rule belongs to the call that it names. An earlier reward before the first call belongs to nothing and is counted.
    Superseded spans, those that came after the end of their attempt, and evaluations without a score (a label alone,
    say) do not count. Without a reward span, the final reward is missing (None), which is never 0.0.

    Raises RewardError for a reward that is not a usable number, and where a plain reward and named dimensions follow
    the same call.
    """
    valid = sorted((span for span in spans if counts(span)), key=lambda span: span.sequence_id)
    agents = _agent_rewards(valid)
    valid = [span for span in valid if not (is_reward(span) and names.REWARD_AGENT in span.attributes)]
    rewards = [span for span in valid if is_reward(span)]
    links: dict[str, Reward] = {}
    if not rewards:
        return RewardLinks(final=None, intermediate=links, agents=agents)
    rescored = list(filter(_is_rescored, rewards))
    last = next((span for span in reversed(rewards) if _is_own(span)), None)
    call, unlinked = None, 0
    parts: dict[str, Reward] = {}
    counted = {span.span_id for span in calls(valid)}
    for span in valid:
        if span.span_id in counted:
            call = span.span_id
        elif is_reward(span) and span is last:
            value = read_reward(span)
            if call is not None and isinstance(links.get(call, value), dict) == isinstance(value, dict):
                parts = {**links, call: _sum(links.get(call), value, call)}
        elif is_reward(span) and _is_own(span):
            if call is None:
                unlinked += 1
            else:
                links[call] = _sum(links.get(call), read_reward(span), call)
    for span in automatic_rewards(rewards):
        call = str(span.attributes.get(names.AIR_CALL))
        if call in counted:
            links[call] = _sum(links.get(call), read_reward(span), call)
    final = rescored[-1] if rescored else last
    parts = {} if rescored or len(parts) < 2 else parts
    return RewardLinks(None if final is None else read_reward(final), links, unlinked, agents, parts)


def automatic_rewards(spans: Iterable[Span]) -> list[Span]:
    """The rewards that AIR rules added, by sequence number; of several that one rule gave to one span, the last."""
    newest: dict[tuple[str, str], Span] = {}
    for span in sorted(filter(_is_automatic, spans), key=lambda span: span.sequence_id):
        newest[str(span.attributes[names.AIR_RULE]), str(span.attributes.get(names.AIR_SOURCE))] = span
    return list(newest.values())


def _is_automatic(span: Span) -> bool:
    return names.AIR_RULE in span.attributes


def _is_rescored(span: Span) -> bool:
    return names.RESCORED in span.attributes


def _is_own(span: Span) -> bool:
    """Whether the attempt itself, or its reward function, recorded a reward."""
    return not _is_automatic(span) and not _is_rescored(span)


def _agent_rewards(spans: Iterable[Span]) -> dict[str, Reward]:
    found: dict[str, Reward] = {}
    for span in spans:
        agent = span.attributes.get(names.REWARD_AGENT)
        if is_reward(span) and agent is not None:
            found[str(agent)] = _sum(found.get(str(agent)), read_reward(span), f"of agent {agent!r}")
    return found


def is_reward(span: Span) -> bool:
    """Whether a span is an evaluation with a score; OpenTelemetry also has evaluations with a label alone."""
    scored = names.SCORE_VALUE in span.attributes or names.REWARD_VALUES in span.attributes
    return span.name == names.REWARD and scored


def read_reward(span: Span) -> Reward:
    """The value of a reward span. Raises RewardError unless it is a usable number or usable named numbers."""
    values = span.attributes.get(names.REWARD_VALUES)
    if values is None:
        return _finite(span.attributes.get(names.SCORE_VALUE), span)
    if not isinstance(values, Mapping) or not values:
        raise RewardError(
            f"reward span {span.span_id} of rollout {span.rollout_id} names no dimension; give one number"
        )
    named = cast("Mapping[Any, Any]", values)
    return {str(name): _finite(value, span) for name, value in named.items()}


def _finite(value: Any, span: Span) -> float:
    number = usable_reward(value)
    if number is None:
        raise RewardError(
            f"reward {value!r:.80} of rollout {span.rollout_id} (span {span.span_id}) is not a finite number up to "
            f"{MAX_REWARD:g}; emit a number, or emit none to mark it missing"
        )
    return number


def _sum(left: Reward | None, right: Reward, call: str) -> Reward:
    if left is None:
        return right
    if isinstance(left, dict) and isinstance(right, dict):
        return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in left | right}
    if isinstance(left, dict) or isinstance(right, dict):
        raise RewardError(f"call {call} has a plain reward and one of named dimensions; give all rewards the same form")
    return left + right


def scalar_reward(reward: Reward | None, weights: Mapping[str, float] | None = None) -> float | None:
    """One number: a plain reward as it is, named dimensions as `sum(weights[name] * reward[name])`.

    None where the reward, or a dimension that has a weight, is missing. Raises RewardError for dimensions without a
    weight.
    """
    if reward is None or not isinstance(reward, dict):
        return reward
    weights = weights or {}
    unknown = sorted(set(reward) - set(weights))
    if unknown:
        example = ", ".join(f'"{name}": 1.0' for name in sorted(reward))
        raise RewardError(
            f"no weight for reward dimensions {unknown} (0.0 leaves one out). Set them in Python with"
            f" agl.LightningRL(reward_weights={{{example}}}) or agl.evaluate(..., reward_weights={{{example}}}); on the"
            f" command line with  agl train ... 'algorithm.reward_weights={{{example}}}'  or"
            f"  agl eval|sft|dpo|export ... --reward-weights '{{{example}}}'"
        )
    if set(weights) - set(reward):
        return None
    return sum(weights[name] * value for name, value in reward.items())
