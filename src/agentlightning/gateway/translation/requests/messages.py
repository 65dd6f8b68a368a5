"""The body for Anthropic's messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from agentlightning.chat.base import Message
from agentlightning.gateway.dialects.anthropic.reply import RAW_ARGUMENTS
from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.dialects.content_parts import has_attachments
from agentlightning.gateway.dialects.message_digest import same_meaning
from agentlightning.gateway.dialects.signed_reasoning import turn_key
from agentlightning.gateway.errors import bad_request
from agentlightning.gateway.translation.attachments import as_blocks, as_text
from agentlightning.gateway.translation.requests.base import (
    Extras,
    Json,
    TurnLookup,
    foreign,
    object_of,
    reject_unsupported,
    shape_of,
    split_stops,
    turns_of,
)
from agentlightning.gateway.upstream.provider import Provider

_EFFORTS: Final[Mapping[str, tuple[str, int]]] = {
    "minimal": ("low", 1024),
    "low": ("low", 2048),
    "medium": ("medium", 8192),
    "high": ("high", 16384),
    "xhigh": ("xhigh", 32768),
    "max": ("max", 32768),
}
"""How hard to think -> Anthropic's word for it, and the tokens of thoughts that models get who know no word."""
_ANTHROPICS_OWN: Final = ("thinking", "output_config", "cache_control")
"""Fields that callers of other dialects send who know whom they talk to."""
_THINKS_BY_TOKENS: Final = re.compile(r"claude-(3-7-|(opus|sonnet|haiku)-4(-[015])?(-\d{8}|-latest)?$)")
"""Models from before adaptive thinking."""
_THINKS_NOT: Final = re.compile(r"claude-(2|instant|3-(opus|sonnet|haiku|5)-)")
_LEAST_THOUGHT: Final = 1024
"""Tokens; Anthropic takes no smaller budget."""


def messages_body(request: Request, provider: Provider, model: str, params: Json, blocks: TurnLookup) -> Json:
    """The body of POST /v1/messages. Raises ApiError 400 naming what Anthropic cannot be asked."""
    _refuse_foreign(request, provider, params)
    system, messages = _turns(turns_of(request.messages), blocks)
    if messages and messages[-1]["role"] == "assistant":
        messages.append(_asked_on(messages[-1], request, provider))
    most = params.get("max_tokens") or provider.max_output_tokens
    body: Json = {"model": model, "messages": messages, "max_tokens": most}
    shape = shape_of(request.raw)
    if shape is not None and shape["type"] == "json_object":
        system, shape = "\n\n".join(filter(None, (system, _AS_JSON))), None
    if system:
        body["system"] = system
    body |= {name: params[name] for name in ("temperature", "top_p", "top_k") if name in params}
    if stops := split_stops("messages", params.get("stop") or ())[0]:
        body["stop_sequences"] = list(stops)
    body |= _tools(request)
    if shape is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": shape["json_schema"].get("schema")}}
    if request.stream:
        body["stream"] = True
    return body


_GO_ON: Final = "Continue."
"""Said by the user after a turn of the assistant's: elsewhere such a conversation is answered with another turn, and
here the last one would be gone on with, which later models refuse."""
_AS_JSON: Final = "Answer with one JSON object and nothing else: no text around it, and no code fence."
"""Anthropic knows JSON only with a schema that names all its fields."""


def _asked_on(last: Json, request: Request, provider: Provider) -> Json:
    """The turn after the last one, which is the assistant's. Raises ApiError 400 where it calls tools whose results are
    not there."""
    if any(block.get("type") == "tool_use" for block in last["content"]):
        name = "messages" if "messages" in request.raw else "input"
        message = "the last message calls tools, and their results do not follow"
        raise bad_request(name, f"{message}, as the provider {provider.name!r} demands; add them")
    return {"role": "user", "content": [{"type": "text", "text": _GO_ON}]}


_ANTHROPICS: Final = frozenset({"max_tokens", "temperature", "top_p", "top_k", "stop"})
"""Sampling parameters it has a word for."""


def _refuse_foreign(request: Request, provider: Provider, params: Json) -> None:
    shape = shape_of(request.raw)
    asked: list[tuple[str, Any, bool]] = [
        ("n", request.n, request.n == 1),
        ("logprobs", request.logprobs, not request.logprobs),
        ("temperature", params.get("temperature"), (params.get("temperature") or 0) <= 1),
        ("response_format", shape, shape is None or shape["type"] in ("json_schema", "json_object")),
    ]
    reject_unsupported([*asked, *foreign(params, _ANTHROPICS)], request, provider, "messages")


def _turns(messages: Sequence[Message], blocks: TurnLookup) -> tuple[str, list[Json]]:
    """(the system prompt, turns of user and assistant by turns). Results of tools are the user's; what the system says
    later on is told by the user."""
    system: list[str] = []
    turns: list[Json] = []
    for index, message in enumerate(messages):
        if message["role"] == "system" and not turns:
            system.append(as_text(message.get("content") or "", "the system prompt"))
            continue
        if message["role"] == "assistant":
            previous = messages[index - 1] if index else None
            role, content = "assistant", _said(message, blocks(turn_key(previous, message)))
        else:
            role, content = "user", _heard(message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += content
        elif content:
            turns.append({"role": role, "content": [*content]})  # A turn that is kept is not to grow.
    return "\n\n".join(filter(None, system)), turns


def _heard(message: Message) -> list[Json]:
    content = message.get("content") or ""
    if message["role"] != "tool":
        return as_blocks(content)
    result: Any = as_blocks(content) if has_attachments(content) else content
    return [{"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": result}]


def _said(message: Message, before: list[Json]) -> list[Json]:
    """A turn of the assistant: as the provider said it, where it is still the same; else with its thoughts first."""
    if before and same_meaning(_message_of(before)) == same_meaning(message):
        return before
    thoughts = [block for block in before if block["type"] in _THOUGHTS] or message.get("sealed") or []
    content = as_blocks(message.get("content") or "")
    return [*thoughts, *content, *(_tool_use(call) for call in message.get("tool_calls") or ())]


_THOUGHTS: Final = ("thinking", "redacted_thinking")


def _message_of(blocks: Sequence[Json]) -> Message:
    """Anthropic's blocks as a message: its words and its calls."""
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    uses = [block for block in blocks if block["type"] == "tool_use"]
    calls = [
        {"id": use["id"], "function": {"name": use["name"], "arguments": orjson.dumps(use["input"]).decode()}}
        for use in uses
    ]
    return {"role": "assistant", "content": "".join(texts), "tool_calls": calls}


def _tool_use(call: Json) -> Json:
    function = call["function"]
    try:
        given = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        given = None
    arguments = given if isinstance(given, dict) else {RAW_ARGUMENTS: function["arguments"]}
    return {"type": "tool_use", "id": call.get("id"), "name": function["name"], "input": arguments}


def _tools(request: Request) -> Json:
    if request.forbidden_tools:
        tools = [_tool(tool["function"]) for tool in request.forbidden_tools]
        return {"tools": tools, "tool_choice": {"type": "none"}}
    if not request.tools:
        return _tools_of_old(request.messages)
    constraint = request.constraint
    tools = [tool["function"] for tool in request.tools]
    if constraint.names is not None:
        tools = [tool for tool in tools if tool["name"] in constraint.names]
    choice: Json = {"type": "any" if constraint.requires_tool_call else "auto"}
    if constraint.requires_tool_call and len(tools) == 1:
        choice = {"type": "tool", "name": tools[0]["name"]}
    if constraint.single_tool_call:
        choice["disable_parallel_tool_use"] = True
    asked = {"tool_choice": choice} if choice != {"type": "auto"} else {}
    return {"tools": [_tool(tool) for tool in tools]} | asked


def _tools_of_old(messages: Sequence[Message]) -> Json:
    """A conversation in which tools were called must name them, even where none may be called now."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = dict.fromkeys(call["function"]["name"] for call in calls)
    if not names:
        return {}
    return {"tools": [_tool({"name": name}) for name in names], "tool_choice": {"type": "none"}}


def _tool(function: Mapping[str, Any]) -> Json:
    schema = {"type": "object"} | (function.get("parameters") or {})
    tool: Json = {"name": function["name"], "input_schema": schema}
    return tool | {key: function[key] for key in ("description", "strict") if function.get(key) is not None}


# -- beside the conversation -------------------------------------------------------------------------------------------


def messages_extras(request: Request, model: str) -> Extras:
    """For Anthropic's messages, of a request for a chat completion or a response. Raises ApiError 400 for an effort
    that is not known."""
    asked = request.raw
    body: Json = {}
    taken: set[str] = set()
    for name in ("safety_identifier", "user"):
        if isinstance(user := asked.get(name), str) and user and "metadata" not in body:
            body["metadata"] = {"user_id": user}
            taken.add(name)
    tier = asked.get("service_tier")
    if tier in ("auto", "default"):
        taken.add("service_tier")
        body |= {"service_tier": "standard_only"} if tier == "default" else {}
    for name in _ANTHROPICS_OWN:
        if isinstance(value := asked.get(name), dict):
            body[name] = value
            taken.add(name)
    name, effort = _effort(asked)
    if effort is not None:
        thinking = _thinking(name, effort, request, model)
        taken |= {name} if thinking else set()
        body = {**body, **{field: {**value, **body.get(field, {})} for field, value in thinking.items()}}
    return body, frozenset(taken)


def _effort(asked: Mapping[str, Any]) -> tuple[str, Any]:
    """(the field that says how hard to think, what it says)."""
    if asked.get("reasoning_effort") is not None:
        return "reasoning_effort", asked["reasoning_effort"]
    return "reasoning", object_of(asked, "reasoning").get("effort")


def _thinking(name: str, effort: Any, request: Request, model: str) -> Json:
    """How hard to think, as the model knows it: later ones by a word, earlier ones by tokens, the earliest not at all.
    Anthropic refuses thoughts before a tool call that is demanded."""
    if effort != "none" and (not isinstance(effort, str) or effort not in _EFFORTS):
        raise bad_request(name, f"{name}={effort!r} is not known; use none, {', '.join(_EFFORTS)}")
    if _THINKS_NOT.match(model):
        return {}
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    word, most = _EFFORTS[effort]
    free = not request.constraint.requires_tool_call
    if not _THINKS_BY_TOKENS.match(model):
        return ({"thinking": {"type": "adaptive"}} if free else {}) | {"output_config": {"effort": word}}
    if (limit := request.params.max_tokens) is not None:
        most = min(most, limit - 1)
    return {"thinking": {"type": "enabled", "budget_tokens": most}} if free and most >= _LEAST_THOUGHT else {}
