"""A request, read in any dialect, as the body that a provider of another one takes: a module for each it may be.

Called by `gateway.translate`. Pure.
"""

from collections.abc import Callable, Mapping
from typing import Final

from agentlightning.gateway.dialects.base import Request
from agentlightning.gateway.errors import bad_request
from agentlightning.gateway.translation.attachments import UnsupportedContentError
from agentlightning.gateway.translation.requests.base import Extras, Json, TurnLookup, Write, object_of
from agentlightning.gateway.translation.requests.chat import chat_body, chat_extras
from agentlightning.gateway.translation.requests.messages import messages_body, messages_extras
from agentlightning.gateway.translation.requests.responses import responses_body, responses_extras
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
"""By the path that is asked instead."""


def body_of(
    path: str, request: Request, provider: Provider, model: str, params: Json, blocks: TurnLookup
) -> tuple[Json, tuple[str, ...]]:
    """(the body for a path, the names of what was left out of it). Raises ApiError 400 naming what cannot be left
    out."""
    extras, taken = _EXTRAS[path](request, model)
    try:
        written = _WRITERS[path](request, provider, model, params, blocks)
    except UnsupportedContentError as error:
        raise bad_request("messages" if "messages" in request.raw else "input", str(error)) from None
    body = _with(written, extras)
    if "max_tokens" not in params:  # Thoughts are part of an answer: they come on top of the limit that is ours.
        budget = object_of(body, "thinking").get("budget_tokens")
        body |= {"max_tokens": body["max_tokens"] + budget} if type(budget) is int and budget > 0 else {}
    lost = tuple(name for name in request.ignored_fields if name not in taken)
    return body, lost + _lost_inside(path, request)


def _with(body: Json, extras: Json) -> Json:
    """Objects of one name are put together."""
    for name, value in extras.items():
        known = body.get(name)
        body[name] = {**value, **known} if isinstance(known, dict) else value
    return body


def _lost_inside(path: str, request: Request) -> tuple[str, ...]:
    """What is not passed on of fields that are."""
    lost: list[str] = []
    if path != "messages" and "effort" in object_of(request.raw, "output_config"):
        lost.append("output_config.effort")
    if path != "chat/completions" and any("name" in message for message in request.messages):
        lost.append("messages.name")
    return tuple(lost)
