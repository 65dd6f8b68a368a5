"""Writes a request of any dialect as the body for a provider of another one, with one module for each path. Pure."""

from collections.abc import Callable, Mapping
from typing import Final

from agentlightning.gateway.answer import Json
from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.dialects.content_parts import object_of
from agentlightning.gateway.errors import bad_request
from agentlightning.gateway.translation.chat import chat_body, chat_extras
from agentlightning.gateway.translation.common import Extras, TurnLookup, UnsupportedContentError, Write
from agentlightning.gateway.translation.messages import messages_body, messages_extras
from agentlightning.gateway.translation.responses import responses_body, responses_extras
from agentlightning.gateway.upstream.provider import Provider

_WRITERS: Final[Mapping[str, Write]] = {
    "chat/completions": chat_body,
    "messages": messages_body,
    "responses": responses_body,
}
_EXTRAS: Final[Mapping[str, Callable[[Request, str], Extras]]] = {
    "chat/completions": chat_extras,
    "messages": messages_extras,
    "responses": responses_extras,
}
"""By the path at the provider."""


def body_of(
    path: str, request: Request, provider: Provider, model: str, params: Json, find_turn: TurnLookup
) -> tuple[Json, tuple[str, ...]]:
    """(body for a path, names of the fields that were dropped). Raises ApiError 400 naming a field that must not be
    dropped."""
    extras, taken = _EXTRAS[path](request, model)
    try:
        written = _WRITERS[path](request, provider, model, params, find_turn)
    except UnsupportedContentError as error:
        raise bad_request("messages" if "messages" in request.raw else "input", str(error)) from None
    body = _merged(written, extras)
    if "max_tokens" not in params:  # Reasoning counts as output: its budget comes on top of our default limit.
        budget = object_of(body, "thinking").get("budget_tokens")
        body |= {"max_tokens": body["max_tokens"] + budget} if type(budget) is int and budget > 0 else {}
    dropped = tuple(name for name in request.ignored_fields if name not in taken)
    return body, dropped + _dropped_inside(path, request)


def _merged(body: Json, extras: Json) -> Json:
    """`body` with `extras`; objects with the same name are merged."""
    for name, value in extras.items():
        known = body.get(name)
        body[name] = {**value, **known} if isinstance(known, dict) else value
    return body


def _dropped_inside(path: str, request: Request) -> tuple[str, ...]:
    """Nested fields that were dropped from fields that were sent."""
    dropped: list[str] = []
    if path != "messages" and "effort" in object_of(request.raw, "output_config"):
        dropped.append("output_config.effort")
    if path != "chat/completions" and any("name" in message for message in request.messages):
        dropped.append("messages.name")
    return tuple(dropped)
