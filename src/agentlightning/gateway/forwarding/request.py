"""Rewrites a request for its provider: the model, the parameters of the attempt's resources, what the record needs.

All other fields pass unchanged, unknown ones included. What the caller did not ask for is removed from the response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from agentlightning.gateway.answer import Json, objects
from agentlightning.gateway.dialects.base import ApiPath
from agentlightning.gateway.dialects.content_parts import object_of
from agentlightning.gateway.dialects.raw_request import LIMITS, num_sampled
from agentlightning.gateway.dialects.sse import encode_event
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.forwarding.record import ProviderRecord
from agentlightning.gateway.upstream.call import UpstreamRequest
from agentlightning.gateway.upstream.provider import Provider
from agentlightning.util.json_values import dumps

_PASSED_HEADERS: Final = frozenset({"anthropic-beta", "openai-beta", "openai-organization", "openai-project"})


def encode_request(request: Mapping[str, Any]) -> bytes:
    """Serialize a request. Raises ApiError 400 if it is nested too deeply."""
    try:
        return dumps(request)
    except TypeError as error:
        raise ApiError(400, f"the request cannot be passed on: {error}", code="invalid_json") from None


@dataclass(slots=True)
class AddedFields:
    """Fields that were requested for the record, and are removed from the response."""

    usage: bool = False
    token_ids: bool = False
    logprobs: bool = False

    def __bool__(self) -> bool:
        return self.usage or self.token_ids or self.logprobs

    def request(self, path: ApiPath, body: Json, provider: Provider) -> None:
        """Add them to a request for completions, as far as it has none."""
        options = object_of(body, "stream_options")
        if body.get("stream") is True and not options.get("include_usage"):
            body["stream_options"] = options | {"include_usage": True}
            self.usage = True
        if not provider.token_ids:
            return
        if not body.get("return_token_ids"):
            self.token_ids = body["return_token_ids"] = True
        chat = path == "chat/completions"
        if body.get("logprobs") in (None, False) and (chat or body.get("logprobs") is None):
            body["logprobs"] = True if chat else 0
            self.logprobs = True

    def remove_from(self, response: Any) -> bool:
        """Remove the fields from a response or an event in place. Returns whether it had any."""
        if not isinstance(response, dict) or not (self.token_ids or self.logprobs):
            return False
        body = cast("Json", response)
        changed = self.token_ids and body.pop("prompt_token_ids", None) is not None
        for choice in objects(body.get("choices")):
            if self.token_ids:
                changed |= choice.pop("token_ids", None) is not None
                changed |= choice.pop("prompt_token_ids", None) is not None
            if self.logprobs and choice.get("logprobs") is not None:
                choice["logprobs"] = None
                changed = True
        return changed

    def filter_event(self, event: bytes, data: Json) -> bytes:
        """An event for the caller; b"" for one that only has the usage."""
        if self.usage and data.get("usage") and not data.get("choices"):
            return b""
        return encode_event(data) if self.remove_from(data) else event


def upstream_request(record: ProviderRecord, headers: Mapping[str, str], added: AddedFields) -> UpstreamRequest:
    """The request of a call. Raises ApiError 400 for one that cannot be sent."""
    path, route, attempt = record.path, record.route, record.caller.attempt
    assert route.provider is not None
    body = record.data | {"model": route.send_model}
    for name, value in record.forced.items():
        if name == "max_tokens":  # A request with two limits is rejected.
            body = {key: own for key, own in body.items() if key not in LIMITS}
        body[_name_of(name, path, record.data, route.provider)] = value
    if path in ("chat/completions", "completions"):
        added.request(path, body, route.provider)
    passed = [(name, value) for name, value in headers.items() if name in _PASSED_HEADERS and value]
    limits = [limit for name in LIMITS if isinstance(limit := body.get(name), int) and limit > 0]
    longest = max(limits, default=route.provider.max_output_tokens)
    return UpstreamRequest(
        path,
        encode_request(body),
        body.get("stream") is True,
        [(name.encode(), value.encode("latin-1")) for name, value in passed],
        "/".join(attempt) if attempt else "",
        attempt[0] if attempt else "",
        0 if path == "embeddings" else longest * num_sampled(body),
        route.price,
        route.send_model,
    )


def _name_of(name: str, path: ApiPath, data: Json, provider: Provider) -> str:
    """The name of a sampling parameter in a request."""
    if name == "stop" and path == "messages":
        return "stop_sequences"
    if name != "max_tokens":
        return name
    if path == "responses":
        return "max_output_tokens"
    if path != "chat/completions":
        return name
    return "max_completion_tokens" if "max_completion_tokens" in data else provider.limit_name
