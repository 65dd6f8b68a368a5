"""Translates the attributes of other tracing conventions to the vocabulary of `span.py`.

Original attributes stay; their equivalents are added where absent. The tables below define the translation for
OpenTelemetry GenAI (including its older names and its span events), OpenInference, Traceloop (OpenLLMetry), AgentOps
and Agent Lightning 0.x. Pure. `complete` never raises and never removes an attribute.

The keys of a span determine which tables apply, and spans of one kind share their keys, so a plan is computed once per
set of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, Final, cast

import orjson

from agentlightning import span as names
from agentlightning.span import SpanEvent
from agentlightning.tracing import messages
from agentlightning.util.json_values import dumps

TOOL_DESCRIPTION: Final = "gen_ai.tool.description"
WORKFLOW_NAME: Final = "gen_ai.workflow.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
ORIGINAL_NAME: Final = "agentlightning.original_name"
"""The original name of a renamed span."""
SCOPE_NAME: Final = "otel.scope.name"
SCOPE_VERSION: Final = "otel.scope.version"
SPAN_KIND: Final = "span.kind"
"""client, server, producer or consumer; absent for internal spans."""
LINKS: Final = "otel.links"
TRACE_STATE: Final = "w3c.tracestate"

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
"""Span kind -> `gen_ai.operation.name`; other kinds have no equivalent."""

ALIASES: Final = {
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
    names.TOOL_NAME: ("tool.name", "tool_call.function.name"),
    TOOL_DESCRIPTION: ("tool.description",),
    names.TOOL_CALL_ID: ("tool_call.id", "tool.id"),
    names.TOOL_ARGUMENTS: ("tool_call.function.arguments",),
}
"""Our attribute -> equivalent names in other conventions."""

COUNTS: Final = {
    names.INPUT_TOKENS: ("gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
    names.OUTPUT_TOKENS: (
        "gen_ai.usage.completion_tokens",
        "llm.token_count.completion",
        "llm.usage.completion_tokens",
    ),
}
LISTS: Final = {
    names.FINISH_REASONS: ("llm.finish_reason", "llm.response.finish_reason", "gen_ai.response.finish_reason"),
    names.REQUEST_STOP: ("llm.chat.stop_sequences",),
}
TOKENS: Final = {
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
"""Our attribute -> names of lists of integers, given as a list, as JSON, or nested in a list."""

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
"""Keys of the JSON object `llm.invocation_parameters` -> our attributes."""

BY_OPERATION: Final = (
    (
        ("traceloop.entity.name", "agentops.entity.name", "operation.name"),
        {
            "invoke_agent": names.AGENT_NAME,
            "execute_tool": names.TOOL_NAME,
            "invoke_workflow": WORKFLOW_NAME,
            "": names.OPERATION_LABEL,
        },
    ),
    (
        ("traceloop.entity.input", "agentops.entity.input", "agentops.task.input", "input.value", "tool.parameters"),
        {"execute_tool": names.TOOL_ARGUMENTS, "": names.OPERATION_INPUT},
    ),
    (
        ("traceloop.entity.output", "agentops.entity.output", "agentops.task.output", "output.value", "tool.result"),
        {"execute_tool": names.TOOL_RESULT, "": names.OPERATION_OUTPUT},
    ),
)
"""Attributes whose equivalent depends on the operation ("": any other). For model calls they are the messages."""
MODEL_CALLS: Final = frozenset({"chat", "text_completion", "generate_content"})

PROMPT: Final = (names.INPUT_MESSAGES, "user")
ANSWER: Final = (names.OUTPUT_MESSAGES, "assistant")
"""The attribute with messages, and their role where they do not say it."""
FAMILIES: Final = {
    "gen_ai.prompt.": PROMPT,
    "gen_ai.completion.": ANSWER,
    "llm.input_messages.": PROMPT,
    "llm.output_messages.": ANSWER,
    "llm.prompts.": PROMPT,
    "llm.choices.": ANSWER,
    "llm.tools.": (names.TOOL_DEFINITIONS, ""),
    "llm.request.functions.": (names.TOOL_DEFINITIONS, ""),
}
"""Prefix of indexed keys -> the attribute they form, and the default role of its messages."""
WHOLE: Final = {
    "gen_ai.prompt": PROMPT,
    "gen_ai.completion": ANSWER,
    "input.value": PROMPT,
    "output.value": ANSWER,
    "traceloop.entity.input": PROMPT,
    "traceloop.entity.output": ANSWER,
}
"""Attributes that hold all messages of a model call, as JSON or plain text."""

EVENTS: Final = {
    "gen_ai.system.message": (names.INPUT_MESSAGES, "system"),
    "gen_ai.user.message": PROMPT,
    "gen_ai.assistant.message": (names.INPUT_MESSAGES, "assistant"),
    "gen_ai.tool.message": (names.INPUT_MESSAGES, "tool"),
    "gen_ai.choice": ANSWER,
    "gen_ai.content.prompt": PROMPT,
    "gen_ai.content.completion": ANSWER,
}
"""Span events with messages."""
EVENT_BODIES: Final = ("gen_ai.event.content", "gen_ai.prompt", "gen_ai.completion", "message", "content")
DETAILS: Final = "gen_ai.client.inference.operation.details"
"""The event whose attributes belong to the span."""
STRUCTURED: Final = (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES, "gen_ai.system_instructions", names.TOOL_DEFINITIONS)

REWARD_FAMILY: Final = "agentlightning.reward."
REWARD_SPANS: Final = frozenset({names.ANNOTATION, "agentlightning.reward"})
"""Names of 0.x spans that may carry a reward."""
REWARDING_OUTPUTS: Final = frozenset({"agentops.task.output", "agentops.entity.output"})
"""Attributes in which 0.1 stored a reward, as JSON {"type": "reward", "value": ...}."""

# -- fields of OpenTelemetry that a `Span` lacks -----------------------------------------------------------------------


def add_extra_fields(
    attributes: Attributes,
    scope: tuple[str, str] = ("", ""),
    kind: str = "",
    state: str = "",
    links: Sequence[Attributes] = (),
) -> None:
    """Add them as attributes, so that a round trip loses nothing. `scope`: its name and version; `links`: as
    `links_of` returns them."""
    given = {SCOPE_NAME: scope[0], SCOPE_VERSION: scope[1], SPAN_KIND: kind, TRACE_STATE: state, LINKS: list(links)}
    attributes.update({name: value for name, value in given.items() if value})


def link(trace_id: str, span_id: str, attributes: Attributes, state: str = "") -> Attributes:
    """A link as an attribute of its span holds it."""
    found = {"trace_id": trace_id, "span_id": span_id, "attributes": attributes}
    return found | {"trace_state": state} if state else found


def links_of(attributes: Attributes) -> list[Attributes]:
    """The links among the attributes of a span, each with trace_id, span_id, trace_state and attributes."""
    given = attributes.get(LINKS)
    items = cast("list[Any]", given) if isinstance(given, list) else []
    found: list[Attributes] = []
    for each in (cast("Attributes", item) for item in items if isinstance(item, dict)):
        own = each.get("attributes")
        texts = {name: str(each.get(name, "")) for name in ("trace_id", "span_id", "trace_state")}
        found.append({**texts, "attributes": own if isinstance(own, dict) else {}})
    return found


# -- translation -----------------------------------------------------------------------------------------------------

PLANS: Final = 4096
PLANNED_KEYS: Final = 64
"""Plans of larger sets of keys (mostly conversations) are not cached."""


def complete(name: str, attributes: Attributes, events: Sequence[SpanEvent] = ()) -> str:
    """Add the equivalents of `attributes` and events in our vocabulary. Returns the name of the span, which changes
    only for 0.x annotations that are rewards."""
    keys = tuple(attributes)
    plan = _cached_plan(keys) if len(keys) <= PLANNED_KEYS else _plan(keys)
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
    """The translation steps for attributes with these keys."""
    known = frozenset(keys)
    families = (
        partial(_read_family, tuple(found), prefix, target, role)
        for prefix, (target, role) in FAMILIES.items()
        if (found := [key for key in keys if key.startswith(prefix)])
    )
    return (*families, *(step for key, step in STEPS if key in known))


_cached_plan = lru_cache(PLANS)(_plan)


def _copy(source: str, target: str, read: Callable[[Any], Any], attributes: Attributes) -> None:
    if target not in attributes and (value := read(attributes[source])) is not None:
        attributes[target] = value


def _unchanged(value: Any) -> Any:
    return value


def _count(value: Any) -> int | None:
    number = _finite(value)
    return None if number is None else int(number)


def _list(value: Any) -> list[Any] | None:
    found = messages.parse_json(value)
    return found if isinstance(found, list) else None if value is None else [value]


def _tokens(value: Any) -> list[int] | None:
    found = messages.parse_json(value)
    if isinstance(found, list) and found and isinstance(found[0], list):
        found = cast("list[Any]", found)[0]
    return found if isinstance(found, list) and found and {*map(type, cast("list[Any]", found))} == {int} else None


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


# -- operations ------------------------------------------------------------------------------------------------------


def _read_operation(source: str, attributes: Attributes) -> None:
    kind = attributes[source]
    operation = OPERATIONS.get(kind.lower()) if isinstance(kind, str) else None
    if operation is not None:
        attributes.setdefault(names.OPERATION_NAME, operation)


def _read_parameters(attributes: Attributes) -> None:
    given = messages.parse_json(attributes["llm.invocation_parameters"])
    values = cast("Attributes", given) if isinstance(given, dict) else {}
    for name, target in PARAMETERS.items():
        if (value := values.get(name)) is not None:
            attributes.setdefault(target, _list(value) if target == names.REQUEST_STOP else value)


def _read_by_operation(source: str, targets: Mapping[str, str], attributes: Attributes) -> None:
    operation = _operation(attributes)
    if operation not in MODEL_CALLS:
        attributes.setdefault(targets.get(operation, targets[""]), attributes[source])


# -- messages --------------------------------------------------------------------------------------------------------


def _read_family(keys: tuple[str, ...], prefix: str, target: str, role: str, attributes: Attributes) -> None:
    if target in attributes:
        return
    items = messages.unflatten((key[len(prefix) :], attributes[key]) for key in keys)
    found = messages.tools(items) if target == names.TOOL_DEFINITIONS else messages.recorded_messages(items, role)
    if found:
        _put_json(target, found, attributes)


def _read_whole(key: str, target: str, role: str, attributes: Attributes) -> None:
    if target in attributes or (not key.startswith("gen_ai.") and _operation(attributes) not in MODEL_CALLS):
        return
    if found := messages.recorded_messages(attributes[key], role):
        _put_json(target, found, attributes)


def _operation(attributes: Attributes) -> str:
    operation = attributes.get(names.OPERATION_NAME)
    return operation if isinstance(operation, str) else ""


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
            found.setdefault(target, []).extend(messages.event_messages(body, event.attributes, role))
    for target, read in found.items():
        if read and target not in attributes:
            _put_json(target, read, attributes)


def _write_json(key: str, attributes: Attributes) -> None:
    """Convert structured messages to JSON text, as on OpenTelemetry spans."""
    value = attributes[key]
    if isinstance(value, list | dict):
        _put_json(key, value, attributes)


def _put_json(target: str, value: Any, attributes: Attributes) -> None:
    """Set an attribute to JSON text; values nested too deeply are skipped."""
    with suppress(orjson.JSONEncodeError):
        attributes[target] = dumps(value, default=str).decode()


# -- rewards ---------------------------------------------------------------------------------------------------------


def _read_dimensions(attributes: Attributes) -> None:
    """Decode our own reward dimensions from JSON text."""
    attributes[names.REWARD_VALUES] = messages.parse_json(attributes[names.REWARD_VALUES])


def _read_first_dimension(attributes: Attributes) -> None:
    """0.x: the first of `agentlightning.reward.N.name` and `.value` is the reward."""
    name = attributes.get(f"{REWARD_FAMILY}0.name", "reward")
    _set_reward(attributes.get(f"{REWARD_FAMILY}0.value"), name, attributes)


def _read_old_reward(source: str, attributes: Attributes) -> None:
    given = attributes[source]
    if source != "reward":
        found = messages.parse_json(given)
        given = messages.field(found, "value") if messages.field(found, "type") == "reward" else None
    _set_reward(given, "reward", attributes)


def _set_reward(given: Any, name: str, attributes: Attributes) -> None:
    value = _finite(given)
    if value is not None and names.SCORE_VALUE not in attributes:
        attributes[names.SCORE_VALUE] = value
        attributes.setdefault(names.EVALUATION_NAME, name)


STEPS: Final[Sequence[tuple[str, Step]]] = (
    *((kind, partial(_read_operation, kind)) for kind in KINDS),
    *(
        (source, partial(_copy, source, target, read))
        for table, read in ((ALIASES, _unchanged), (COUNTS, _count), (LISTS, _list), (TOKENS, _tokens))
        for target, sources in table.items()
        for source in sources
    ),
    ("llm.invocation_parameters", _read_parameters),
    *((key, partial(_read_whole, key, target, role)) for key, (target, role) in WHOLE.items()),
    *(
        (source, partial(_read_by_operation, source, targets))
        for sources, targets in BY_OPERATION
        for source in sources
    ),
    *((key, partial(_write_json, key)) for key in STRUCTURED),
    (names.REWARD_VALUES, _read_dimensions),
    (f"{REWARD_FAMILY}0.value", _read_first_dimension),
    *((key, partial(_read_old_reward, key)) for key in ("reward", *sorted(REWARDING_OUTPUTS))),
)
"""What the tables say, in the order in which it is done: an attribute that is there, and the step that reads it."""
