"""Writes the bodies for servers of chat completions, and for OpenAI's responses, for models that no other API serves.

Of responses nothing is stored at the provider (`store` is false): the history is sent whole, with the reasoning items
of earlier turns and their `encrypted_content`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from agentlightning.chat.base import Message
from agentlightning.gateway.answer import Json
from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.dialects.chat import ECHOED
from agentlightning.gateway.dialects.content_parts import Content, object_of, turn_key
from agentlightning.gateway.forwarding.bodies import (
    Extras,
    TurnLookup,
    as_chat,
    as_items,
    as_text,
    known_turn,
    openai_tools,
    reject_unsupported,
    response_format_of,
    results_first,
    split_attachments,
    turns_of,
    unknown_params,
)
from agentlightning.gateway.upstream.provider import Provider

_SAME_AT_OPENAI: Final = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
_MAX_USER_ID: Final = 64
"""OpenAI's limit for a user id, in characters."""


def chat_body(request: Request, provider: Provider, model: str, params: Json, find_turn: TurnLookup) -> Json:
    """The body of POST /v1/chat/completions. Raises ApiError 400 naming an unsupported field, and
    UnsupportedContentError."""
    messages = _chat_messages(request.messages, provider, find_turn)
    body: Json = {"model": model, "messages": messages}
    names = {"max_tokens": provider.limit_name}
    body |= {names.get(name, name): _on_the_wire(name, value) for name, value in params.items()}
    body |= openai_tools(request, lambda tool: tool, nested=True)
    if (shape := response_format_of(request.raw)) is not None:
        body["response_format"] = shape
    if request.n > 1:
        body["n"] = request.n
    if request.logprobs:
        body["logprobs"] = True
        body |= {"top_logprobs": top} if (top := request.params.top_logprobs) else {}
    if request.stream:
        body["stream"] = True
    return body


def _on_the_wire(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return {str(token): bias for token, bias in value}
    return list(value) if name == "stop" else value


def _chat_messages(messages: Sequence[Message], provider: Provider, find_turn: TurnLookup) -> list[Json]:
    """Images in a tool result follow it as a user message, since tool messages hold text only."""
    known = _CHAT_KEYS | ({"reasoning_content"} if provider.token_ids else set())
    previous: Message | None = None
    sent: list[Json] = []
    attachments: list[Json] = []
    for message in results_first(messages):
        if message["role"] != "tool" and attachments:
            sent.append({"role": "user", "content": attachments})
            attachments = []
        content = message.get("content") or ""
        if message["role"] == "tool":
            content, images = split_attachments(content)
            attachments += images
        fields = {key: value for key, value in message.items() if key in known}
        fields |= {"content": _chat_content(message, content)}
        if message["role"] == "assistant":
            blocks = find_turn(turn_key(previous, message)) or message.get("sealed") or ()
            fields |= _echoed(fields, [block for block in blocks if block.get("provider") == provider.name])
        sent.append(fields)
        previous = message
    return [*sent, {"role": "user", "content": attachments}] if attachments else sent


def _echoed(fields: Json, blocks: Sequence[Json]) -> Json:
    """What this provider wants back with a turn that it wrote (`answer.CHAT_TURN`)."""
    found: Json = {}
    for block in blocks:
        for name, value in object_of(block, "message").items():
            both = type(found.get(name)) is type(value) and isinstance(value, str | list)
            found |= {name: found[name] + value if both else value} if name in ECHOED else {}
        if extra := object_of(block, "calls"):
            calls = found.get("tool_calls") or fields.get("tool_calls") or ()
            found["tool_calls"] = [
                call | ({"extra_content": extra[call["id"]]} if call.get("id") in extra else {}) for call in calls
            ]
    return found


_CHAT_KEYS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


def _chat_content(message: Message, content: Content) -> Any:
    return None if not content and message.get("tool_calls") else as_chat(content)


# -- other fields -----------------------------------------------------------------------------------------------------


def chat_extras(request: Request, model: str) -> Extras:
    """The other fields for chat completions, from a request for messages or a response."""
    raw = request.raw
    body: Json = {name: raw[name] for name in _SAME_AT_OPENAI if isinstance(raw.get(name), str)}
    taken = set(body)
    user = object_of(raw, "metadata").get("user_id")
    if "messages" in raw and isinstance(user, str) and user:
        body["user"] = user if len(user) <= _MAX_USER_ID else hashlib.sha256(user.encode()).hexdigest()
        taken.add("metadata")
    if "messages" not in raw:
        for name, (outer, inner) in _RESPONSES.items():
            if isinstance(value := object_of(raw, outer).get(inner), str):
                body[name] = value
                taken.add(outer)
    tier = raw.get("service_tier")
    if isinstance(tier, str):
        taken.add("service_tier")
        named = {"standard_only": "default"}.get(tier, tier)
        body |= {"service_tier": named} if named != "auto" else {}
    return body, frozenset(taken)


_RESPONSES: Final = {"reasoning_effort": ("reasoning", "effort"), "verbosity": ("text", "verbosity")}
"""Field of chat completions -> where a request for a response has it."""


# -- responses ---------------------------------------------------------------------------------------------------------

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
    named = {name for name in _RESPONSES if isinstance(raw.get(name), str)}
    for name in named:
        outer, inner = _RESPONSES[name]
        body[outer] = {inner: raw[name]}
    return body, taken | named
