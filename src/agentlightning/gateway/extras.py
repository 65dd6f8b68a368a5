"""What a request says beside its conversation and its sampling, in the words of another dialect: who asks, how hard to
think, which service, which cache.

Pure. What has no word there changes nothing that is said, and is left out; the caller counts it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.problems import bad

Json = dict[str, Any]
Extras = tuple[Json, frozenset[str]]
"""(fields of the body, names of the request's fields they come from)."""

_LONGEST_USER: Final = 64
"""Characters of an id of a user that OpenAI takes."""
_SAME_AT_OPENAI: Final = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
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


def chat_extras(request: Request, model: str) -> Extras:
    """For chat completions, of a request for messages or a response."""
    asked = request.asked
    body: Json = {name: asked[name] for name in _SAME_AT_OPENAI if isinstance(asked.get(name), str)}
    taken = set(body)
    user = _object(asked, "metadata").get("user_id")
    if "messages" in asked and isinstance(user, str) and user:
        body["user"] = user if len(user) <= _LONGEST_USER else hashlib.sha256(user.encode()).hexdigest()
        taken.add("metadata")
    if "messages" not in asked:
        for name, (outer, inner) in _RESPONSES.items():
            if isinstance(value := _object(asked, outer).get(inner), str):
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


def messages_extras(request: Request, model: str) -> Extras:
    """For Anthropic's messages, of a request for a chat completion or a response. Raises Problem 400 for an effort that
    is not known."""
    asked = request.asked
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
    return "reasoning", _object(asked, "reasoning").get("effort")


def _thinking(name: str, effort: Any, request: Request, model: str) -> Json:
    """How hard to think, as the model knows it: later ones by a word, earlier ones by tokens, the earliest not at all.
    Anthropic refuses thoughts before a tool call that is demanded."""
    if effort != "none" and (not isinstance(effort, str) or effort not in _EFFORTS):
        raise bad(name, f"{name}={effort!r} is not known; use none, {', '.join(_EFFORTS)}")
    if _THINKS_NOT.match(model):
        return {}
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    word, most = _EFFORTS[effort]
    free = not request.constraint.needs_call
    if not _THINKS_BY_TOKENS.match(model):
        return ({"thinking": {"type": "adaptive"}} if free else {}) | {"output_config": {"effort": word}}
    if (limit := request.params.max_tokens) is not None:
        most = min(most, limit - 1)
    return {"thinking": {"type": "enabled", "budget_tokens": most}} if free and most >= _LEAST_THOUGHT else {}


def _object(data: Mapping[str, Any], name: str) -> Json:
    value = data.get(name)
    return cast("Json", value) if isinstance(value, dict) else {}


EXTRAS: Final[Mapping[str, Callable[[Request, str], Extras]]] = {
    "chat/completions": chat_extras,
    "messages": messages_extras,
}
"""By the path that is asked instead."""
