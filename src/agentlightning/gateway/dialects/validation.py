"""Reading the fields of a request: each reader gives a value of the right kind, or a ApiError 400 naming the field."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Final

import orjson

from agentlightning.gateway.errors import ApiError, bad_request
from agentlightning.gateway.json_body import parse
from agentlightning.util.json_values import dumps

MAX_TOP_LOGPROBS: Final = 20


def read_json(body: bytes | dict[str, Any]) -> dict[str, Any]:
    """The body as a JSON object, parsed unless it is one already. Raises ApiError 400 if it is none."""
    try:
        data = body if isinstance(body, dict) else parse(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"the body is a JSON {type(data).__name__}, not an object", code="invalid_json")
    return data


def reject_unsupported(data: Mapping[str, Any], fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Reject fields that would change the answer and are not supported. `fields` maps each to the values that change
    nothing; null is always one of them."""
    for name, neutral in fields.items():
        if name in data and data[name] is not None and data[name] not in neutral:
            raise bad_request(name, f"{name}={shorten(data[name])} cannot be honoured here; leave it out")


def unknown_fields(data: Mapping[str, Any], *known: Container[str]) -> tuple[str, ...]:
    """Names of the fields that no reader knows."""
    return tuple(name for name in data if not any(name in names for names in known))


def optional(data: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of a field; None if it is absent or null."""
    return None if data.get(name) is None else require_type(name, data[name], kind)


def require_type(where: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise bad_request(field_of(where), f"{where}={shorten(value)} must be a {kind.__name__}")
    return value


def kind_of(value: Any) -> str | None:
    """The `type` of an object."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def integer(data: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = data.get(name)
    if value is not None and (type(value) is not int or not low <= value <= high):
        raise bad_request(name, f"{name}={shorten(value)} must be a whole number from {low} to {high}")
    return value


def top_logprobs(data: Mapping[str, Any], name: str = "top_logprobs") -> int:
    """How many of the likeliest tokens are reported at each position."""
    return integer(data, name, 0, MAX_TOP_LOGPROBS) or 0


def field_of(where: str) -> str:
    """The top-level field of a path such as `messages[0].content`."""
    return where.partition("[")[0].partition(".")[0]


def shorten(value: Any) -> str:
    """A value as JSON, short enough for an error message."""
    text = dumps(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."
