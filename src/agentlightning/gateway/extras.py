"""What a request says beside its conversation and its sampling, in the words of another dialect: who asks, how hard to
think, which service, which cache.

Pure. What has no word there changes nothing that is said, and is left out; the caller counts it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from agentlightning.gateway.problems import bad

Json = dict[str, Any]
Extras = tuple[Json, frozenset[str]]
"""(fields of the body, names of the request's fields they come from)."""

_LONGEST_USER: Final = 64
"""Characters of an id of a user that OpenAI takes."""
_SAME_AT_OPENAI: Final = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
_EFFORTS: Final[Mapping[str, str]] = {"minimal": "low"} | {
    effort: effort for effort in ("low", "medium", "high", "xhigh", "max")
}
"""How hard to think -> by Anthropic's names."""


def chat_extras(asked: Mapping[str, Any]) -> Extras:
    """For chat completions, of a request for messages or a response."""
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


def messages_extras(asked: Mapping[str, Any]) -> Extras:
    """For Anthropic's messages, of a request for a chat completion or a response. Raises Problem 400 for an effort that
    is not known."""
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
    for name in (
        "thinking",
        "output_config",
        "cache_control",
    ):  # Its own words, from who knows them.
        if isinstance(value := asked.get(name), dict):
            body[name] = value
            taken.add(name)
    for name, effort in (
        ("reasoning_effort", asked.get("reasoning_effort")),
        ("reasoning", _object(asked, "reasoning").get("effort")),
    ):
        if effort is not None:
            body = _thinking(name, effort) | body
            taken.add(name)
    return body, frozenset(taken)


def _thinking(name: str, effort: Any) -> Json:
    if effort == "none":
        return {"thinking": {"type": "disabled"}}
    if not isinstance(effort, str) or effort not in _EFFORTS:
        raise bad(name, f"{name}={effort!r} is not known; use none, {', '.join(_EFFORTS)}")
    return {"thinking": {"type": "adaptive"}, "output_config": {"effort": _EFFORTS[effort]}}


def _object(data: Mapping[str, Any], name: str) -> Json:
    value = data.get(name)
    return cast("Json", value) if isinstance(value, dict) else {}


EXTRAS: Final[Mapping[str, Callable[[Mapping[str, Any]], Extras]]] = {
    "chat/completions": chat_extras,
    "messages": messages_extras,
}
"""By the path that is asked instead."""
