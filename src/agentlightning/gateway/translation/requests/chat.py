"""The body for a server of chat completions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from agentlightning.chat.base import Message
from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.dialects.content_parts import Content
from agentlightning.gateway.dialects.output_constraint import Constraint
from agentlightning.gateway.translation.attachments import as_chat, split_attachments
from agentlightning.gateway.translation.requests.base import (
    Extras,
    Json,
    TurnLookup,
    object_of,
    results_first,
    shape_of,
)
from agentlightning.gateway.upstream.provider import Provider

_NEW_NAME: Final = ("api.openai.com", ".openai.azure.com")
"""Hosts that know `max_tokens` only by its later name; servers of others may know only the first."""
_SAME_AT_OPENAI: Final = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
_LONGEST_USER: Final = 64
"""Characters of an id of a user that OpenAI takes."""


def chat_body(request: Request, provider: Provider, model: str, params: Json, blocks: TurnLookup) -> Json:
    """The body of POST /v1/chat/completions. Raises ApiError 400 naming what it cannot be asked, and
    UnsupportedContentError."""
    messages = _chat_messages(request.messages, thoughts=provider.token_ids)
    body: Json = {"model": model, "messages": messages}
    names = {"max_tokens": _limit_name(provider)}
    body |= {names.get(name, name): _on_the_wire(name, value) for name, value in params.items()}
    body |= _chat_tools(request)
    if (shape := shape_of(request.raw)) is not None:
        body["response_format"] = shape
    if request.n > 1:
        body["n"] = request.n
    if request.logprobs:
        body["logprobs"] = True
        body |= {"top_logprobs": top} if (top := request.params.top_logprobs) else {}
    if request.stream:
        body["stream"] = True
    return body


def _chat_tools(request: Request) -> Json:
    if request.forbidden_tools:
        return {"tools": request.forbidden_tools, "tool_choice": "none"}
    if not request.tools:
        return {}
    found: Json = {"tools": request.tools}
    if (choice := _chat_choice(request.constraint)) is not None:
        found["tool_choice"] = choice
    if request.constraint.single_tool_call:
        found["parallel_tool_calls"] = False
    return found


def _on_the_wire(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return {str(token): bias for token, bias in value}
    return list(value) if name == "stop" else value


def _limit_name(provider: Provider) -> str:
    host = urlsplit(provider.base_urls[0]).hostname or ""
    return "max_completion_tokens" if host.endswith(_NEW_NAME) else "max_tokens"


def _chat_messages(messages: Sequence[Message], thoughts: bool) -> list[Json]:
    """Images in the result of a tool follow it as a message of the user: a tool's message holds text only."""
    known = _CHAT_KEYS | ({"reasoning_content"} if thoughts else set())
    sent: list[Json] = []
    shown: list[Json] = []
    for message in results_first(messages):
        if message["role"] != "tool" and shown:
            sent.append({"role": "user", "content": shown})
            shown = []
        content = message.get("content") or ""
        if message["role"] == "tool":
            content, images = split_attachments(content)
            shown += images
        kept = {key: value for key, value in message.items() if key in known}
        sent.append(kept | {"content": _chat_content(message, content)})
    return [*sent, {"role": "user", "content": shown}] if shown else sent


_CHAT_KEYS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})


def _chat_content(message: Message, content: Content) -> Any:
    return None if not content and message.get("tool_calls") else as_chat(content)


def _chat_choice(constraint: Constraint) -> Any:
    names = sorted(constraint.names) if constraint.names is not None else []
    if constraint.requires_tool_call and len(names) == 1:
        return {"type": "function", "function": {"name": names[0]}}
    if constraint.names is None:
        return "required" if constraint.requires_tool_call else None
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    mode = "required" if constraint.requires_tool_call else "auto"
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


# -- beside the conversation -------------------------------------------------------------------------------------------


def chat_extras(request: Request, model: str) -> Extras:
    """For chat completions, of a request for messages or a response."""
    asked = request.raw
    body: Json = {name: asked[name] for name in _SAME_AT_OPENAI if isinstance(asked.get(name), str)}
    taken = set(body)
    user = object_of(asked, "metadata").get("user_id")
    if "messages" in asked and isinstance(user, str) and user:
        body["user"] = user if len(user) <= _LONGEST_USER else hashlib.sha256(user.encode()).hexdigest()
        taken.add("metadata")
    if "messages" not in asked:
        for name, (outer, inner) in _RESPONSES.items():
            if isinstance(value := object_of(asked, outer).get(inner), str):
                body[name] = value
                taken.add(outer)
    tier = asked.get("service_tier")
    if isinstance(tier, str):
        taken.add("service_tier")
        named = {"standard_only": "default"}.get(tier, tier)
        body |= {"service_tier": named} if named != "auto" else {}
    return body, frozenset(taken)


_RESPONSES: Final = {"reasoning_effort": ("reasoning", "effort"), "verbosity": ("text", "verbosity")}
"""Where a request for a response has what chat completions calls so."""
