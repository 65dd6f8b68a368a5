"""Adapters of 0.x: the spans of an attempt as triplets, or as messages. `adapter(spans)` is `adapter.adapt(spans)`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning import span as names
from agentlightning.assemble import calls
from agentlightning.chat.messages import chat_messages
from agentlightning.errors import ConfigError
from agentlightning.span import Span
from agentlightning.tracing.rewards import get_reward_value
from agentlightning.trajectory import scalar_reward
from agentlightning.util.json_values import recorded_objects

GONE: Final = {
    "llm_call_match": "model calls are found by their attributes, whatever their spans are called",
    "repair_hierarchy": "rewards follow the store's order, so that parents need no repair",
    "exclude_llm_call_in_reward": "calls of reward functions are never recorded as those of the agent",
    "reward_match": "a reward belongs to the call before it",
}
"""Arguments of 0.x without a place here, and why."""


@dataclass(frozen=True, slots=True)
class Triplet:
    """One model call: prompt, response and the reward that followed it.

    >>> agl.Triplet({"token_ids": [1]}, {"token_ids": [2]}, reward=1.0).reward
    1.0
    """

    prompt: Any
    """`token_ids` and `messages`."""
    response: Any
    """`token_ids`, `logprobs` and `messages`."""
    reward: float | None = None
    """The first reward between this call and the next. None: there was none."""
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """`response_id` and `agent_name`."""


class TracerTraceToTriplet:
    """The model calls of an attempt as triplets, in order; with `agent_match`, a regular expression, only those of the
    agents whose name it finds. LightningRL does not need it: it reads token trees.

        >>> agl.TracerTraceToTriplet(agent_match="writer").adapt([])
        []
    """

    def __init__(self, *, agent_match: str | None = None, **gone: Any) -> None:
        for name in gone:
            if name not in GONE:
                raise TypeError(f"TracerTraceToTriplet() got an unexpected keyword argument {name!r}")
            raise ConfigError(f"{name} has no place here: {GONE[name]}; leave it out")
        self.agent_match = agent_match

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        matches = re.compile(self.agent_match or "").search
        found = [span for span in calls(source) if matches(str(span.attributes.get(names.AGENT_NAME) or ""))]
        ends = [*(span.sequence_id for span in found[1:]), math.inf]
        rewards = sorted((span for span in source if span.name == names.REWARD), key=lambda each: each.sequence_id)
        return [
            self._triplet(span, [each for each in rewards if span.sequence_id < each.sequence_id < end])
            for span, end in zip(found, ends, strict=False)
        ]

    __call__ = adapt

    @staticmethod
    def _triplet(call: Span, rewards: Sequence[Span]) -> Triplet:
        attributes = call.attributes
        return Triplet(
            {
                "token_ids": list(attributes.get(names.PROMPT_TOKEN_IDS) or ()),
                "messages": chat_messages(recorded_objects(attributes.get(names.INPUT_MESSAGES))),
            },
            {
                "token_ids": list(attributes.get(names.RESPONSE_TOKEN_IDS) or ()),
                "logprobs": list(attributes.get(names.LOGPROBS) or ()),
                "messages": chat_messages(recorded_objects(attributes.get(names.OUTPUT_MESSAGES))),
            },
            next((reward for reward in map(_number, rewards) if reward is not None), None),
            {"response_id": attributes.get(names.RESPONSE_ID), "agent_name": attributes.get(names.AGENT_NAME)},
        )


class TraceToMessages:
    """The model calls of an attempt as conversations in OpenAI's form: `messages`, and `tools` where there were some.
    `agl export --to openai-jsonl` writes those of a whole run.

        >>> agl.TraceToMessages().adapt([])
        []
    """

    def adapt(self, source: Sequence[Span], /) -> list[dict[str, Any]]:
        return [self._conversation(span) for span in calls(source)]

    __call__ = adapt

    @staticmethod
    def _conversation(span: Span) -> dict[str, Any]:
        before, answer, tools = (
            recorded_objects(span.attributes.get(key))
            for key in (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES, names.TOOL_DEFINITIONS)
        )
        found: dict[str, Any] = {"messages": [*chat_messages(before), *chat_messages(answer)]}
        return {**found, "tools": tools} if tools else found


def _number(span: Span) -> float | None:
    reward = get_reward_value(span)
    return None if isinstance(reward, dict) else scalar_reward(reward)
