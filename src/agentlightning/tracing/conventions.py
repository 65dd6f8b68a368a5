"""Foreign conventions, read into the one vocabulary of `span.py`.

What others write stays as it is; what it means in our names is added where that name is absent. The tables below say
what is read: OpenTelemetry GenAI (its older names and its span events too), OpenInference, Traceloop (OpenLLMetry),
AgentOps, and Agent Lightning 0.x. Pure. `complete` never raises and never removes an attribute.

Which tables concern a span follows from its keys alone, and spans of one kind share them: the answer is worked out
once for each set of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, cast

import orjson

from agentlightning import span as names
from agentlightning.span import SpanEvent
from agentlightning.tracing import genai_messages

TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_DESCRIPTION: Final = "gen_ai.tool.description"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"
WORKFLOW_NAME: Final = "gen_ai.workflow.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
ORIGINAL_NAME: Final = "agentlightning.original_name"
"""The name of a span that was renamed to what it means."""

Attributes = dict[str, Any]
Step = Callable[[Attributes], None]

# -- the tables ------------------------------------------------------------------------------------------------------

KINDS: Final = ("openinference.span.kind", "traceloop.span.kind", "agentops.span.kind", "llm.request.type")
OPERATIONS: Final = {
    "llm": "chat",
    "chat": "chat",
    "completion": "text_completion",
    "agent": "invoke_agent",
    "tool": "execute_tool",
    "workflow": "invoke_workflow",
    "embedding": "embeddings",
    "embeddings": "embeddings",
    "retriever": "retrieval",
}
"""What a kind of span is as `gen_ai.operation.name`; a kind that is not here has no counterpart."""

ALIASES: Final[dict[str, tuple[str, ...]]] = {
    names.PROVIDER_NAME: ("gen_ai.system", "llm.provider", "llm.system"),
    names.REQUEST_MODEL: ("llm.model_name", "llm.request.model", "embedding.model_name", "reranker.model_name"),
    names.RESPONSE_MODEL: ("llm.response.model",),
    names.RESPONSE_ID: ("llm.response.id", "llm.hosted_vllm.id"),
    names.REQUEST_MAX_TOKENS: ("llm.request.max_tokens", "gen_ai.openai.request.max_tokens"),
    names.REQUEST_TEMPERATURE: ("llm.temperature", "llm.request.temperature"),
    names.REQUEST_TOP_P: ("llm.top_p", "llm.request.top_p"),
    names.REQUEST_TOP_K: ("llm.top_k",),
    names.REQUEST_SEED: ("gen_ai.openai.request.seed",),
    names.AGENT_NAME: ("agent.name",),
    CONVERSATION_ID: ("session.id", "traceloop.association.properties.session_id"),
    TOOL_NAME: ("tool.name", "tool_call.function.name"),
    TOOL_DESCRIPTION: ("tool.description",),
    TOOL_CALL_ID: ("tool_call.id", "tool.id"),
    TOOL_ARGUMENTS: ("tool_call.function.arguments",),
}
"""Our name, and what others call the same thing."""

COUNTS: Final[dict[str, tuple[str, ...]]] = {
    names.INPUT_TOKENS: ("gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
    names.OUTPUT_TOKENS: (
        "gen_ai.usage.completion_tokens",
        "llm.token_count.completion",
        "llm.usage.completion_tokens",
    ),
}
LISTS: Final[dict[str, tuple[str, ...]]] = {
    names.FINISH_REASONS: ("llm.finish_reason", "llm.response.finish_reason", "gen_ai.response.finish_reason"),
    names.REQUEST_STOP: ("llm.chat.stop_sequences",),
}
TOKENS: Final[dict[str, tuple[str, ...]]] = {
    names.PROMPT_TOKEN_IDS: (
        "prompt_token_ids",
        "llm.hosted_vllm.prompt_token_ids",
        "agentlightning.operation.output.prompt_token_ids",
    ),
    names.RESPONSE_TOKEN_IDS: (
        "response_token_ids",
        "llm.hosted_vllm.response_token_ids",
        "agentlightning.operation.output.response_token_ids.0",
        "agentlightning.operation.output.choices.0.token_ids",
    ),
}
"""Lists of integers, or their JSON, or a list of which the first item is one."""

PARAMETERS: Final = {
    "temperature": names.REQUEST_TEMPERATURE,
    "top_p": names.REQUEST_TOP_P,
    "top_k": names.REQUEST_TOP_K,
    "max_tokens": names.REQUEST_MAX_TOKENS,
    "max_completion_tokens": names.REQUEST_MAX_TOKENS,
    "max_output_tokens": names.REQUEST_MAX_TOKENS,
    "seed": names.REQUEST_SEED,
    "stop": names.REQUEST_STOP,
    "stop_sequences": names.REQUEST_STOP,
}
"""Of the JSON object in `llm.invocation_parameters`."""

BY_OPERATION: Final[dict[str, tuple[tuple[str, ...], dict[str, str]]]] = {
    "name": (
        ("traceloop.entity.name", "agentops.entity.name", "operation.name"),
        {
            "invoke_agent": names.AGENT_NAME,
            "execute_tool": TOOL_NAME,
            "invoke_workflow": WORKFLOW_NAME,
            "": names.OPERATION_LABEL,
        },
    ),
    "input": (
        ("traceloop.entity.input", "agentops.entity.input", "agentops.task.input", "input.value", "tool.parameters"),
        {"execute_tool": TOOL_ARGUMENTS, "": names.OPERATION_INPUT},
    ),
    "output": (
        ("traceloop.entity.output", "agentops.entity.output", "agentops.task.output", "output.value", "tool.result"),
        {"execute_tool": TOOL_RESULT, "": names.OPERATION_OUTPUT},
    ),
}
"""What these are called depends on the operation; "" is for any other. Those of a model call are its messages."""
MODEL_CALLS: Final = frozenset({"chat", "text_completion", "generate_content"})

FAMILIES: Final[dict[str, tuple[str, str]]] = {
    "gen_ai.prompt.": (names.INPUT_MESSAGES, "user"),
    "gen_ai.completion.": (names.OUTPUT_MESSAGES, "assistant"),
    "llm.input_messages.": (names.INPUT_MESSAGES, "user"),
    "llm.output_messages.": (names.OUTPUT_MESSAGES, "assistant"),
    "llm.prompts.": (names.INPUT_MESSAGES, "user"),
    "llm.choices.": (names.OUTPUT_MESSAGES, "assistant"),
    "llm.tools.": (names.TOOL_DEFINITIONS, ""),
    "llm.request.functions.": (names.TOOL_DEFINITIONS, ""),
}
"""Prefix of keys that carry an index, what they are together, and the role of a message that names none."""
WHOLE: Final[dict[str, tuple[str, str]]] = {
    "gen_ai.prompt": (names.INPUT_MESSAGES, "user"),
    "gen_ai.completion": (names.OUTPUT_MESSAGES, "assistant"),
    "input.value": (names.INPUT_MESSAGES, "user"),
    "output.value": (names.OUTPUT_MESSAGES, "assistant"),
    "traceloop.entity.input": (names.INPUT_MESSAGES, "user"),
    "traceloop.entity.output": (names.OUTPUT_MESSAGES, "assistant"),
}
"""All messages of a model call in one value: JSON, or plain text."""

EVENTS: Final[dict[str, tuple[str, str]]] = {
    "gen_ai.system.message": (names.INPUT_MESSAGES, "system"),
    "gen_ai.user.message": (names.INPUT_MESSAGES, "user"),
    "gen_ai.assistant.message": (names.INPUT_MESSAGES, "assistant"),
    "gen_ai.tool.message": (names.INPUT_MESSAGES, "tool"),
    "gen_ai.choice": (names.OUTPUT_MESSAGES, "assistant"),
    "gen_ai.content.prompt": (names.INPUT_MESSAGES, "user"),
    "gen_ai.content.completion": (names.OUTPUT_MESSAGES, "assistant"),
}
"""Span events that carry messages."""
EVENT_BODIES: Final = ("gen_ai.event.content", "gen_ai.prompt", "gen_ai.completion", "message", "content")
DETAILS: Final = "gen_ai.client.inference.operation.details"
"""The event whose attributes are those of the span."""
STRUCTURED: Final = (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES, "gen_ai.system_instructions", names.TOOL_DEFINITIONS)

REWARD_FAMILY: Final = "agentlightning.reward."
REWARD_SPANS: Final = frozenset({names.ANNOTATION, "agentlightning.reward"})
"""Spans of 0.x that are a reward where they carry one."""
REWARDING_OUTPUTS: Final = frozenset({"agentops.task.output", "agentops.entity.output"})
"""Where 0.1 kept a reward: as JSON {"type": "reward", "value": ...}."""

# -- reading them ----------------------------------------------------------------------------------------------------

_plans: dict[tuple[str, ...], tuple[Step, ...]] = {}
PLANS: Final = 4096
PLANNED_KEYS: Final = 64
"""Larger sets of keys (conversations, mostly) are not remembered."""


def complete(name: str, attributes: Attributes, events: Sequence[SpanEvent] = ()) -> str:
    """Add to `attributes` what they and the events mean in our vocabulary. Returns the name the span should have: its
    own, but for what 0.x calls an annotation and we call a reward."""
    keys = tuple(attributes)
    plan = _plans.get(keys)
    if plan is None:
        plan = _plan(keys)
        if len(keys) <= PLANNED_KEYS:
            if len(_plans) >= PLANS:
                _plans.clear()
            _plans[keys] = plan
    if not plan and not events:
        return name
    for step in plan:
        step(attributes)
    if events:
        _read_events(attributes, events)
    if names.SCORE_VALUE in attributes and (name in REWARD_SPANS or not REWARDING_OUTPUTS.isdisjoint(keys)):
        attributes.setdefault(ORIGINAL_NAME, name)
        return names.REWARD
    return name


def _plan(keys: tuple[str, ...]) -> tuple[Step, ...]:
    """What there is to do for attributes of these keys."""
    known = frozenset(keys)
    steps: list[Step] = [partial(_read_operation, kind) for kind in KINDS if kind in known]
    for table, read in ((ALIASES, _same), (COUNTS, _count), (LISTS, _list), (TOKENS, _tokens)):
        for target, sources in table.items():
            steps += [partial(_copy, source, target, read) for source in sources if source in known]
    if "llm.invocation_parameters" in known:
        steps.append(_read_parameters)
    for prefix, (target, role) in FAMILIES.items():
        if found := [key for key in keys if key.startswith(prefix)]:
            steps.append(partial(_read_family, tuple(found), prefix, target, role))
    steps += [partial(_read_whole, key, *WHOLE[key]) for key in WHOLE if key in known]
    for sources, targets in BY_OPERATION.values():
        steps += [partial(_read_by_operation, source, targets) for source in sources if source in known]
    steps += [partial(_write_json, key) for key in STRUCTURED if key in known]
    if names.REWARD_VALUES in known:
        steps.append(_read_dimensions)
    if any(key.startswith(REWARD_FAMILY) and key != names.REWARD_VALUES for key in keys):
        steps.append(_read_first_dimension)
    steps += [partial(_read_old_reward, key) for key in ("reward", *sorted(REWARDING_OUTPUTS)) if key in known]
    return tuple(steps)


def _copy(source: str, target: str, read: Callable[[Any], Any], attributes: Attributes) -> None:
    if target not in attributes and (value := read(attributes[source])) is not None:
        attributes[target] = value


def _same(value: Any) -> Any:
    return value


def _count(value: Any) -> int | None:
    number = _finite(value)
    return None if number is None else int(number)


def _list(value: Any) -> list[Any] | None:
    if isinstance(value, str) and value.startswith("["):
        value = parsed(value)
    return value if isinstance(value, list) else None if value is None else [value]


def _tokens(value: Any) -> list[int] | None:
    found = parsed(value) if isinstance(value, str) else value
    if isinstance(found, list) and found and isinstance(found[0], list):
        found = cast("list[Any]", found)[0]
    items = cast("list[Any]", found) if isinstance(found, list) else []
    return items if items and all(type(item) is int for item in items) else None


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def parsed(text: Any) -> Any:
    """The value of a JSON text; None for what is none."""
    try:
        return orjson.loads(text)
    except (orjson.JSONDecodeError, TypeError):
        return None


# -- operations ------------------------------------------------------------------------------------------------------


def _read_operation(source: str, attributes: Attributes) -> None:
    kind = attributes[source]
    operation = OPERATIONS.get(kind.lower()) if isinstance(kind, str) else None
    if operation is not None:
        attributes.setdefault(names.OPERATION_NAME, operation)


def _read_parameters(attributes: Attributes) -> None:
    given = attributes["llm.invocation_parameters"]
    values = parsed(given) if isinstance(given, str) else given
    if not isinstance(values, dict):
        return
    for name, target in PARAMETERS.items():
        value = cast("Attributes", values).get(name)
        if value is not None:
            attributes.setdefault(target, _list(value) if target == names.REQUEST_STOP else value)


def _read_by_operation(source: str, targets: Mapping[str, str], attributes: Attributes) -> None:
    if _is_model_call(attributes):
        return
    operation = attributes.get(names.OPERATION_NAME)
    target = targets.get(operation if isinstance(operation, str) else "", targets[""])
    attributes.setdefault(target, attributes[source])


# -- messages --------------------------------------------------------------------------------------------------------


def _read_family(keys: tuple[str, ...], prefix: str, target: str, role: str, attributes: Attributes) -> None:
    if target in attributes:
        return
    items = genai_messages.unflatten((key[len(prefix) :], attributes[key]) for key in keys)
    found = genai_messages.tools(items) if target == names.TOOL_DEFINITIONS else genai_messages.messages(items, role)
    if found:
        _put_json(target, found, attributes)


def _read_whole(key: str, target: str, role: str, attributes: Attributes) -> None:
    if target in attributes or (not key.startswith("gen_ai.") and not _is_model_call(attributes)):
        return
    if found := genai_messages.messages(attributes[key], role):
        _put_json(target, found, attributes)


def _is_model_call(attributes: Attributes) -> bool:
    operation = attributes.get(names.OPERATION_NAME)
    return isinstance(operation, str) and operation in MODEL_CALLS


def _read_events(attributes: Attributes, events: Iterable[SpanEvent]) -> None:
    found: dict[str, list[Any]] = {}
    for event in events:
        if event.name == DETAILS:
            for key in STRUCTURED:
                if key in event.attributes and key not in attributes:
                    attributes[key] = event.attributes[key]
                    _write_json(key, attributes)
        elif event.name in EVENTS:
            target, role = EVENTS[event.name]
            body = next((event.attributes[key] for key in EVENT_BODIES if key in event.attributes), None)
            found.setdefault(target, []).extend(genai_messages.from_event(body, event.attributes, role))
    for target, read in found.items():
        if read and target not in attributes:
            _put_json(target, read, attributes)


def _write_json(key: str, attributes: Attributes) -> None:
    """Messages are JSON text, as OpenTelemetry has them on spans, however they came."""
    value = attributes[key]
    if isinstance(value, list | dict):
        _put_json(key, value, attributes)


def _put_json(target: str, value: Any, attributes: Attributes) -> None:
    """What is nested too deeply for JSON is left as it came."""
    with suppress(orjson.JSONEncodeError):
        attributes[target] = orjson.dumps(value, default=str).decode()


# -- rewards ---------------------------------------------------------------------------------------------------------


def _read_dimensions(attributes: Attributes) -> None:
    """Our own dimensions, which travel as JSON text."""
    value = attributes[names.REWARD_VALUES]
    found = parsed(value) if isinstance(value, str) else None
    if isinstance(found, dict):
        attributes[names.REWARD_VALUES] = found


def _read_first_dimension(attributes: Attributes) -> None:
    """0.x: `agentlightning.reward.N.name` and `.value`, of which the first is the reward."""
    value = _finite(attributes.get(f"{REWARD_FAMILY}0.value"))
    if value is not None and names.SCORE_VALUE not in attributes:
        attributes[names.SCORE_VALUE] = value
        attributes.setdefault(names.EVALUATION_NAME, attributes.get(f"{REWARD_FAMILY}0.name", "reward"))


def _read_old_reward(source: str, attributes: Attributes) -> None:
    given = attributes[source]
    if source != "reward":
        held = parsed(given) if isinstance(given, str) else given
        is_reward = isinstance(held, dict) and cast("Attributes", held).get("type") == "reward"
        given = cast("Attributes", held).get("value") if is_reward else None
    value = _finite(given)
    if value is not None and names.SCORE_VALUE not in attributes:
        attributes[names.SCORE_VALUE] = value
        attributes.setdefault(names.EVALUATION_NAME, "reward")
