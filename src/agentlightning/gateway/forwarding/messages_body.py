"""Writes the body for Anthropic's messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from agentlightning.chat.base import Message
from agentlightning.gateway.answer import Json
from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.dialects.content_parts import has_attachments, object_of
from agentlightning.gateway.dialects.messages import RAW_ARGUMENTS
from agentlightning.gateway.errors import bad_request
from agentlightning.gateway.forwarding.bodies import (
    Extras,
    TurnLookup,
    as_blocks,
    as_text,
    known_turn,
    reject_unsupported,
    response_format_of,
    split_stops,
    turns_of,
    unknown_params,
)
from agentlightning.gateway.upstream.provider import Provider
from agentlightning.util.json_values import loads

_EFFORTS: Final = {"minimal": 1024, "low": 2048, "medium": 8192, "high": 16384, "xhigh": 32768, "max": 32768}
"""Reasoning effort -> the thinking budget for models that take a number of tokens."""
_ANTHROPIC_FIELDS: Final = ("thinking", "output_config", "cache_control")
"""Anthropic's fields that callers of other dialects may send as well."""
_BUDGET_MODELS: Final = re.compile(r"claude-(3-7-|(opus|sonnet|haiku)-4(-[015])?(-\d{8}|-latest)?$)")
"""Models with a thinking budget instead of adaptive thinking."""
_NON_THINKING_MODELS: Final = re.compile(r"claude-(2|instant|3-(opus|sonnet|haiku|5)-)")
_MIN_THINKING_TOKENS: Final = 1024
"""Anthropic's smallest thinking budget."""


def messages_body(request: Request, provider: Provider, model: str, params: Json, find_turn: TurnLookup) -> Json:
    """The body of POST /v1/messages. Raises ApiError 400 naming an unsupported field."""
    _reject_unsupported(request, provider, params)
    system, messages = _turns(turns_of(request.messages), find_turn)
    if messages and messages[-1]["role"] == "assistant":
        messages.append(_continuation(messages[-1], request, provider))
    most = params.get("max_tokens") or provider.max_output_tokens
    body: Json = {"model": model, "messages": messages, "max_tokens": most}
    shape = response_format_of(request.raw)
    if shape is not None and shape["type"] == "json_object":
        system, shape = "\n\n".join(filter(None, (system, _JSON_INSTRUCTION))), None
    if system:
        body["system"] = system
    body |= {name: params[name] for name in ("temperature", "top_p", "top_k") if name in params}
    if stops := split_stops("messages", params.get("stop") or ())[0]:
        body["stop_sequences"] = list(stops)
    body |= _tools(request)
    if shape is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": shape["json_schema"].get("schema")}}
    return body | ({"stream": True} if request.stream else {})


_CONTINUE: Final = "Continue."
"""A user message after a last turn of the assistant: other APIs answer such a conversation with a new turn, whereas
Anthropic's would continue the last one, which later models reject."""
_JSON_INSTRUCTION: Final = "Answer with one JSON object and nothing else: no text around it, and no code fence."
"""Anthropic supports JSON output only with a schema that names all fields."""


def _continuation(last: Json, request: Request, provider: Provider) -> Json:
    """The turn after the last one, which is the assistant's. Raises ApiError 400 where it calls tools whose results are
    not there."""
    if any(block.get("type") == "tool_use" for block in last["content"]):
        message = "the last message calls tools, and their results do not follow, as the provider"
        name = "messages" if "messages" in request.raw else "input"
        raise bad_request(name, f"{message} {provider.name!r} demands; add them")
    return {"role": "user", "content": [{"type": "text", "text": _CONTINUE}]}


_PARAMS: Final = frozenset({"max_tokens", "temperature", "top_p", "top_k", "stop"})
"""The sampling parameters of the API."""


def _reject_unsupported(request: Request, provider: Provider, params: Json) -> None:
    shape, temperature = response_format_of(request.raw), params.get("temperature") or 0
    raw: list[tuple[str, Any, bool]] = [
        ("n", request.n, request.n == 1),
        ("logprobs", request.logprobs, not request.logprobs),
        ("temperature", temperature, temperature <= 1),
        ("response_format", shape, shape is None or shape["type"] in ("json_schema", "json_object")),
        *unknown_params(params, _PARAMS),
    ]
    reject_unsupported(raw, request, provider, "messages")


def _turns(messages: Sequence[Message], find_turn: TurnLookup) -> tuple[str, list[Json]]:
    """(system prompt, alternating turns of user and assistant). Tool results and later system messages become part of
    the user's turns."""
    system: list[str] = []
    turns: list[Json] = []
    for index, message in enumerate(messages):
        if message["role"] == "system" and not turns:
            system.append(as_text(message.get("content") or "", "the system prompt"))
            continue
        if message["role"] == "assistant":
            written, content = known_turn("messages", messages, index, find_turn)
            content += as_blocks(message.get("content") or "")
            content += [_tool_use(call) for call in message.get("tool_calls") or ()]
            role, content = "assistant", written or content
        else:
            role, content = "user", as_blocks(message.get("content") or "")
            if message["role"] == "tool":
                given: Any = content if has_attachments(message.get("content")) else message.get("content") or ""
                content = [{"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": given}]
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += content
        elif content:
            turns.append({"role": role, "content": [*content]})  # A copy: stored turns must not grow.
    return "\n\n".join(filter(None, system)), turns


def _tool_use(call: Json) -> Json:
    function = call["function"]
    try:
        given = loads(function["arguments"])
    except orjson.JSONDecodeError:
        given = None
    arguments = given if isinstance(given, dict) else {RAW_ARGUMENTS: function["arguments"]}
    return {"type": "tool_use", "id": call.get("id"), "name": function["name"], "input": arguments}


def _tools(request: Request) -> Json:
    """A conversation with tool calls must define the tools, even if none may be called now."""
    tools = [tool["function"] for tool in request.forbidden_tools or request.tools or ()]
    if not tools:
        calls = [call for message in request.messages for call in message.get("tool_calls") or ()]
        tools = [{"name": name} for name in dict.fromkeys(call["function"]["name"] for call in calls)]
    if not request.tools:
        return {"tools": [_tool(tool) for tool in tools], "tool_choice": {"type": "none"}} if tools else {}
    constraint = request.constraint
    if constraint.names is not None:
        tools = [tool for tool in tools if tool["name"] in constraint.names]
    choice: Json = {"type": "any" if constraint.requires_tool_call else "auto"}
    if constraint.requires_tool_call and len(tools) == 1:
        choice = {"type": "tool", "name": tools[0]["name"]}
    if constraint.single_tool_call:
        choice["disable_parallel_tool_use"] = True
    return {"tools": [_tool(tool) for tool in tools]} | ({"tool_choice": choice} if choice != {"type": "auto"} else {})


def _tool(function: Mapping[str, Any]) -> Json:
    schema = {"type": "object"} | (function.get("parameters") or {})
    tool: Json = {"name": function["name"], "input_schema": schema}
    return tool | {key: function[key] for key in ("description", "strict") if function.get(key) is not None}


# -- other fields -----------------------------------------------------------------------------------------------------


def messages_extras(request: Request, model: str) -> Extras:
    """For Anthropic's messages, of a request for a chat completion or a response. Raises ApiError 400 for an effort
    that is not known."""
    raw = request.raw
    body: Json = {name: raw[name] for name in _ANTHROPIC_FIELDS if isinstance(raw.get(name), dict)}
    taken = set(body)
    for name in ("user", "safety_identifier"):  # The second, if there are both.
        if isinstance(user := raw.get(name), str) and user:
            body["metadata"] = {"user_id": user}
            taken = taken - {"user"} | {name}
    tier = raw.get("service_tier")
    if tier in ("auto", "default"):
        taken.add("service_tier")
        body |= {"service_tier": "standard_only"} if tier == "default" else {}
    name, effort = "reasoning_effort", raw.get("reasoning_effort")
    if effort is None:
        name, effort = "reasoning", object_of(raw, "reasoning").get("effort")
    thinking = {} if effort is None else _thinking(name, effort, request, model)
    taken |= {name} if thinking else set()
    return body | {field: {**value, **body.get(field, {})} for field, value in thinking.items()}, frozenset(taken)


def _thinking(name: str, effort: Any, request: Request, model: str) -> Json:
    """The reasoning effort as the model takes it: by name, as a number of tokens, or not at all. Anthropic rejects
    thinking before a required tool call."""
    if effort != "none" and (not isinstance(effort, str) or effort not in _EFFORTS):
        raise bad_request(name, f"{name}={effort!r} is not known; use none, {', '.join(_EFFORTS)}")
    if _NON_THINKING_MODELS.match(model):
        return {}
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    free = not request.constraint.requires_tool_call
    if not _BUDGET_MODELS.match(model):
        word = "low" if effort == "minimal" else effort
        return ({"thinking": {"type": "adaptive"}} if free else {}) | {"output_config": {"effort": word}}
    limit = request.params.max_tokens
    most = _EFFORTS[effort] if limit is None else min(_EFFORTS[effort], limit - 1)
    return {"thinking": {"type": "enabled", "budget_tokens": most}} if free and most >= _MIN_THINKING_TOKENS else {}
