"""The trajectory of one attempt: its transitions, its rewards and its other steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from agentlightning import span as names
from agentlightning.assemble.model_calls import (
    NO_LIMITS,
    TokenLimits,
    calls,
    find_defect,
    has_tokens,
    is_call,
    model_of,
    transition,
)
from agentlightning.errors import RewardError, RolloutRejectedError
from agentlightning.span import MAX_REWARD, Span, counts, usable_reward
from agentlightning.trajectory import Reward, RewardWeights, Step, Trajectory

# -- agent steps -----------------------------------------------------------------------------------------------------

# What an agent did between its model calls: tool calls, and errors.

TOOL_OPERATION = "execute_tool"
"""Value of `gen_ai.operation.name` that means a tool call."""


def steps(spans: Iterable[Span]) -> tuple[Step, ...]:
    """The tool calls and errors that count, by sequence number: failed model calls and recorded exceptions are errors.
    What a reward function recorded is no part of it."""
    own = (span for span in spans if counts(span) and names.JUDGE not in span.attributes)
    found = (_step(span) for span in sorted(own, key=lambda span: span.sequence_id))
    return tuple(step for step in found if step is not None)


def _step(span: Span) -> Step | None:
    error = _error(span)
    attributes = span.attributes
    if attributes.get(names.OPERATION_NAME) == TOOL_OPERATION:
        return Step(
            kind="tool",
            name=str(attributes.get(names.TOOL_NAME, span.name)),
            span_id=span.span_id,
            sequence_id=span.sequence_id,
            arguments=attributes.get(names.TOOL_ARGUMENTS),
            result=attributes.get(names.TOOL_RESULT),
            error=error,
        )
    if error is None or not (is_call(span) or span.name == names.EXCEPTION):
        return None
    return Step(kind="error", name=span.name, span_id=span.span_id, sequence_id=span.sequence_id, error=error)


def _error(span: Span) -> str | None:
    """What went wrong in a span; None where nothing did."""
    attributes = span.attributes
    kind: Any = attributes.get(names.EXCEPTION_TYPE) or attributes.get(names.ERROR_TYPE)
    if kind is None and span.status_code != "ERROR":
        return None
    message = span.status_message or attributes.get(names.EXCEPTION_MESSAGE)
    return str(message or kind or "error")


# -- rewards ---------------------------------------------------------------------------------------------------------

# The rewards among an attempt's spans: what each belongs to, and one number from named dimensions.


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
                parts = {**links, call: add_rewards(links.get(call), value, call)}
        elif is_reward(span) and _is_own(span):
            if call is None:
                unlinked += 1
            else:
                _add(links, call, span, "call")
    for span in automatic_rewards(rewards):
        call = str(span.attributes.get(names.AIR_CALL))
        if call in counted:
            _add(links, call, span, "call")
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
            _add(found, str(agent), span, "agent")
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


def _add(sums: dict[str, Reward], key: str, span: Span, kind: str) -> None:
    sums[key] = add_rewards(sums.get(key), read_reward(span), f"{kind} {key}")


def add_rewards(left: Reward | None, right: Reward, of: str) -> Reward:
    """The sum, of named dimensions name by name. Raises RewardError, which says `of` what, for one of each form."""
    if left is None:
        return right
    if isinstance(left, dict) and isinstance(right, dict):
        return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in left | right}
    if isinstance(left, dict) or isinstance(right, dict):
        raise RewardError(f"{of} has a plain reward and one of named dimensions; give all rewards the same form")
    return left + right


def scalar_reward(reward: Reward | None, weights: RewardWeights = None) -> float | None:
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


UNTRAINABLE_CALLS = "untrainable_calls"
"""Key of `Trajectory.metadata`: how many calls were left out because their tokens or log-probabilities are unknown."""
OTHER_MODELS = "other_models"
"""Key of `Trajectory.metadata`: how many calls were left out because the model that learns did not answer them."""
OVERRIDDEN_CALLS = "overridden_calls"
"""Key of `Trajectory.metadata`: number of calls whose requested sampling parameters were overridden."""
SEEDED_CALLS = "seeded_calls"
"""Key of `Trajectory.metadata`: number of calls that were sampled with a seed."""
UNLINKED_REWARDS = "unlinked_rewards"
"""Key of `Trajectory.metadata`: how many rewards came before the first call and were not the last one."""
AUTOMATIC_REWARDS = "automatic_rewards"
"""Key of `Trajectory.metadata`: by name of the AIR rule, the sum of the rewards it gave in the attempt."""
TURN_LIMIT = "turn_limit"
"""Key of `Trajectory.metadata`: the number of answers that the rollout might be given, where it was limited."""
TURN_LIMIT_REACHED = names.TURN_LIMIT_REACHED
"""Key of `Trajectory.metadata`: number of calls that were refused because of this limit."""
REPLAYED_CALLS = "replayed_calls"
"""Key of `Trajectory.metadata`: number of calls that were given the recorded answers of another rollout."""
REPLAY_MISMATCHES = "replay_mismatches"
"""Key of `Trajectory.metadata`: 1 if a request differed from the recorded ones before all were given."""
VOID_CALLS = "void_calls"
"""Key of `Trajectory.metadata`: how many calls were left out because their record cannot be true."""
VOID_REASON = "void_reason"
"""Key of `Trajectory.metadata`: what is wrong with the first of them."""


def trajectory(
    rollout_id: str,
    attempt_id: str,
    spans: Iterable[Span],
    group: str = "",
    model: str | None = None,
    limits: TokenLimits = NO_LIMITS,
) -> Trajectory:
    """The trajectory of one attempt, without the spans of other attempts. With a `model`,
    calls that another model answered are left out, too: a frozen reference or a provider teaches the policy nothing.
    Adapters of the model (`MODEL:ADAPTER`) count as it.

    A call whose record cannot be true (tokens beyond the `limits`, say) is left out. `metadata` has the counts
    `untrainable_calls`, `other_models`, `overridden_calls`, `seeded_calls`, `turn_limit_reached`, `replayed_calls`,
    `replay_mismatches`, `void_calls` and `unlinked_rewards` where they are not zero, the `turn_limit`, the defect of
    the first void call, and the sums of `automatic_rewards`. Whatever an agent has written, only two errors are raised:
    RewardError as `link_rewards` does, and RolloutRejectedError if every call with tokens is void or a span is damaged.
    """
    own = [span for span in spans if span.rollout_id == rollout_id and span.attempt_id == attempt_id]
    for span in own:
        if span.name == names.DAMAGED:
            raise RolloutRejectedError("damaged_spans", str(span.status_message))
    counted = calls(own)
    others = {span.span_id for span in counted if model is not None and not _answers(model_of(span), model)}
    own = [span for span in own if span.span_id not in others] if others else own
    answered = [span for span in counted if span.span_id not in others]
    known = [span for span in answered if has_tokens(span.attributes)]
    void = {span.span_id: why for span in known if (why := find_defect(span.attributes, limits))}
    learned = [transition(span) for span in known if span.span_id not in void]
    if void and not learned:
        span_id, why = next(iter(void.items()))
        message = f"none of the {len(void)} model calls of rollout {rollout_id} can be true; of span {span_id}: {why}"
        raise RolloutRejectedError("void_calls", message)
    links = link_rewards(own)
    found = {
        UNTRAINABLE_CALLS: len(answered) - len(known),
        OTHER_MODELS: len(others),
        OVERRIDDEN_CALLS: sum(names.OVERRIDDEN in span.attributes for span in answered),
        SEEDED_CALLS: sum(span.attributes.get(names.REQUEST_SEED) is not None for span in answered),
        TURN_LIMIT: max((n for span in own if isinstance(n := span.attributes.get(names.TURN_LIMIT), int)), default=0),
        TURN_LIMIT_REACHED: sum(span.attributes.get(names.ERROR_TYPE) == names.TURN_LIMIT_REACHED for span in own),
        REPLAYED_CALLS: sum(call.replays is not None for call in learned),
        REPLAY_MISMATCHES: sum(names.REPLAY_MISMATCH in span.attributes for span in own),
        VOID_CALLS: len(void),
        VOID_REASON: next(iter(void.values()), ""),
        UNLINKED_REWARDS: links.unlinked,
        AUTOMATIC_REWARDS: _automatic(own),
    }
    return Trajectory(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        transitions=tuple(replace(t, reward=links.intermediate.get(t.span_id)) for t in learned),
        reward=links.final,
        group=group,
        steps=steps(own),
        agent_rewards=links.agents,
        metadata={name: value for name, value in found.items() if value},
    )


def _automatic(spans: Iterable[Span]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for span in automatic_rewards(span for span in spans if counts(span)):
        value = read_reward(span)
        rule = str(span.attributes[names.AIR_RULE])
        sums[rule] = sums.get(rule, 0.0) + (sum(value.values()) if isinstance(value, dict) else value)
    return sums


def _answers(found: str | None, model: str) -> bool:
    """Whether the model that answered a call is `model`, one of its adapters, or not known."""
    return found is None or found == model or found.startswith(f"{model}:")
