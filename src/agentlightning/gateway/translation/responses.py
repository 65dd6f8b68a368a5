"""Writes the body for OpenAI's responses, for models that no other API serves.

Nothing is stored at the provider (`store` is false): the history is sent whole, with the reasoning items of earlier
turns and their `encrypted_content`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentlightning.chat.base import Message
from agentlightning.gateway.answer import Json
from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.dialects.content_parts import object_of
from agentlightning.gateway.translation.chat import chat_extras
from agentlightning.gateway.translation.common import (
    Extras,
    TurnLookup,
    as_items,
    as_text,
    known_turn,
    openai_tools,
    reject_unsupported,
    response_format_of,
    turns_of,
    unknown_params,
)
from agentlightning.gateway.upstream.provider import Provider

_NAMES: Final = {"max_tokens": "max_output_tokens", "temperature": "temperature", "top_p": "top_p"}
"""The sampling parameters of the API, by their names in `SamplingParams`."""


def responses_body(request: Request, provider: Provider, model: str, params: Json, find_turn: TurnLookup) -> Json:
    """The body of POST /v1/responses. Raises ApiError 400 naming an unsupported field."""
    known = {*_NAMES, "stop"}  # Stop strings are applied here.
    reject_unsupported(
        [("n", request.n, request.n == 1), *unknown_params(params, known)], request, provider, "responses"
    )
    instructions, items = _items(turns_of(request.messages), find_turn)
    body: Json = {"model": model, "input": items, "store": False}
    if instructions:
        body["instructions"] = instructions
    body |= {_NAMES[name]: value for name, value in params.items() if name in _NAMES}
    body |= openai_tools(request, _tool, nested=False)
    if (shape := response_format_of(request.raw)) is not None:
        inner = object_of(shape, "json_schema")
        body["text"] = {"format": {"type": shape["type"], **inner}}
    if request.logprobs:
        body["include"] = ["message.output_text.logprobs"]
        body |= {"top_logprobs": top} if (top := request.params.top_logprobs) else {}
    if request.stream:
        body["stream"] = True
    return body


def _items(messages: Sequence[Message], find_turn: TurnLookup) -> tuple[str, list[Json]]:
    """(system prompt, items of the conversation)."""
    instructions: list[str] = []
    items: list[Json] = []
    for index, message in enumerate(messages):
        content = message.get("content") or ""
        match message["role"]:
            case "system" if not items:
                instructions.append(as_text(content, "the system prompt"))
            case "assistant":
                written, parts = known_turn("responses", messages, index, find_turn)
                parts += [{"role": "assistant", "content": as_items(content)}] if content else []
                items += written or [*parts, *(_call(call) for call in message.get("tool_calls") or ())]
            case "tool":
                call_id = message.get("tool_call_id")
                items.append({"type": "function_call_output", "call_id": call_id, "output": as_items(content)})
            case role:
                items.append({"role": role, "content": as_items(content)})
    return "\n\n".join(filter(None, instructions)), items


def _call(call: Json) -> Json:
    function = call["function"]
    fields = {"name": function["name"], "arguments": function["arguments"]}
    return {"type": "function_call", "call_id": call.get("id"), **fields}


def _tool(tool: Json) -> Json:
    """Tools default to strict here, unlike in chat completions, so that `strict` is always set."""
    function = tool["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    found: Json = {"type": "function", "strict": bool(function.get("strict")), "parameters": parameters}
    return found | {key: function[key] for key in ("name", "description") if function.get(key) is not None}


# -- other fields -----------------------------------------------------------------------------------------------------


def responses_extras(request: Request, model: str) -> Extras:
    """The other fields: user, reasoning effort, service tier, cache."""
    raw = request.raw
    body, taken = chat_extras(request, model)
    names = set(taken)
    for name, (outer, inner) in (("reasoning_effort", ("reasoning", "effort")), ("verbosity", ("text", "verbosity"))):
        if isinstance(value := raw.get(name), str):
            body[outer] = {inner: value}
            names.add(name)
    return body, frozenset(names)
