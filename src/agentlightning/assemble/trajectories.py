"""The trajectory of one attempt: its transitions, its rewards and its other steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from agentlightning import span as names
from agentlightning.assemble.agent_steps import steps
from agentlightning.assemble.call_validation import NO_LIMITS, TokenLimits
from agentlightning.assemble.model_calls import calls, known_transitions, model_of, untrainable_calls, void_calls
from agentlightning.assemble.rewards import automatic_rewards, link_rewards, read_reward
from agentlightning.errors import RolloutRejectedError
from agentlightning.span import Span, counts
from agentlightning.trajectory import Status, Trajectory

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
    metadata: Mapping[str, Any] | None = None,
    model: str | None = None,
    limits: TokenLimits = NO_LIMITS,
    status: Status = "succeeded",
) -> Trajectory:
    """The trajectory of one attempt, which ended with `status`, without the spans of other attempts. With a `model`,
    calls that another model answered are left out, too: a frozen reference or a provider teaches the policy nothing.
    Adapters of the model (`MODEL:ADAPTER`) count as it.

    A call whose record cannot be true (tokens beyond the `limits`, say) is left out. `metadata` gains the counts
    `untrainable_calls`, `other_models`, `overridden_calls`, `seeded_calls`, `turn_limit_reached`, `replayed_calls`,
    `replay_mismatches`, `void_calls` and `unlinked_rewards` where they are not zero, the `turn_limit`, the defect of
    the first void call, and the sums of `automatic_rewards`. Whatever an agent has written, only two errors are raised:
    RewardError as `link_rewards` does, and RolloutRejectedError if every call with tokens is void or a span is damaged.
    """
    own = [span for span in spans if span.rollout_id == rollout_id and span.attempt_id == attempt_id]
    for span in own:
        if span.name == names.DAMAGED:
            raise RolloutRejectedError("damaged_spans", str(span.status_message))
    others = {span.span_id for span in calls(own) if model is not None and not _answers(model_of(span), model)}
    own = [span for span in own if span.span_id not in others] if others else own
    void = void_calls(own, limits)
    learned = known_transitions([span for span in own if span.span_id not in void] if void else own)
    if void and not learned:
        span_id, why = next(iter(void.items()))
        message = f"none of the {len(void)} model calls of rollout {rollout_id} can be true; of span {span_id}: {why}"
        raise RolloutRejectedError("void_calls", message)
    links = link_rewards(own)
    found = {
        UNTRAINABLE_CALLS: len(untrainable_calls(own)),
        OTHER_MODELS: len(others),
        OVERRIDDEN_CALLS: sum(names.OVERRIDDEN in span.attributes for span in calls(own)),
        SEEDED_CALLS: sum(span.attributes.get(names.REQUEST_SEED) is not None for span in calls(own)),
        TURN_LIMIT: max((_turn_limit(span) for span in own), default=0),
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
        status=status,
        metadata={**(metadata or {}), **{name: value for name, value in found.items() if value}},
    )


def _automatic(spans: Iterable[Span]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for span in automatic_rewards(span for span in spans if counts(span)):
        value = read_reward(span)
        rule = str(span.attributes[names.AIR_RULE])
        sums[rule] = sums.get(rule, 0.0) + (sum(value.values()) if isinstance(value, dict) else value)
    return sums


def _turn_limit(span: Span) -> int:
    limit = span.attributes.get(names.TURN_LIMIT)
    return limit if isinstance(limit, int) else 0


def _answers(found: str | None, model: str) -> bool:
    """Whether the model that answered a call is `model`, one of its adapters, or not known."""
    return found is None or found == model or found.startswith(f"{model}:")
