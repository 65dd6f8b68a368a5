"""Writes the body for a server of chat completions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from agentlightning.chat.base import Message
from agentlightning.gateway.answer import Json
from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.dialects.chat import ECHOED
from agentlightning.gateway.dialects.content_parts import Content, object_of
from agentlightning.gateway.dialects.message_digest import turn_key
from agentlightning.gateway.translation.common import (
    Extras,
    TurnLookup,
    as_chat,
    openai_tools,
    response_format_of,
    results_first,
    split_attachments,
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
    """What this provider wants back with a turn that it wrote (`signed_reasoning.CHAT_TURN`)."""
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
