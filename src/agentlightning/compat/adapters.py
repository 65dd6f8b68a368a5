"""Adapters of 0.x: the spans of an attempt as triplets, or as messages. `adapter(spans)` is `adapter.adapt(spans)`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agentlightning import span as names
from agentlightning.assemble import calls
from agentlightning.chat.messages import chat_messages
from agentlightning.errors import ConfigError
from agentlightning.span import Span
from agentlightning.tracing.rewards import get_reward_value
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
        own = {span.span_id for span in calls(source) if matches(str(span.attributes.get(names.AGENT_NAME) or ""))}
        found: list[Triplet] = []
        for span in sorted(source, key=lambda each: each.sequence_id):
            reward = get_reward_value(span)
            if span.span_id in own:
                found.append(self._triplet(span))
            elif found and found[-1].reward is None and not isinstance(reward, dict):
                found[-1] = replace(found[-1], reward=reward)
        return found

    __call__ = adapt

    @staticmethod
    def _triplet(call: Span) -> Triplet:
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
            metadata={"response_id": attributes.get(names.RESPONSE_ID), "agent_name": attributes.get(names.AGENT_NAME)},
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
