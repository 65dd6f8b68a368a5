"""An error of the store as an HTTP answer, and back: its status, its body, and what is said about a bad body."""

from __future__ import annotations

import re
from typing import Final

import msgspec
import orjson
from msgspec import Struct

from agentlightning import errors
from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ConflictError,
    NotFoundError,
    RewardError,
    StoreAuthError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreServerError,
)


class RequestError(ConfigError):
    """A request that cannot be understood, or is not allowed to be that large."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


_STATUS: Final[tuple[tuple[type[AgentLightningError], int], ...]] = (
    (ConfigError, 400),
    (RewardError, 400),
    (NotFoundError, 404),
    (ConflictError, 409),
    (StoreFullError, 507),
    (StoreClosedError, 503),
    (StoreAuthError, 401),
    (StoreServerError, 502),
)
_KINDS: Final = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, AgentLightningError) and "__init__" not in vars(kind)
}


def status_of(error: AgentLightningError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, RequestError):
        return error.status
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


class ErrorBody(Struct):
    type: str
    message: str


class Refusal(Struct):
    """What every refused request is answered."""

    error: ErrorBody
    detail: str
    """The message again, where 0.x clients look for it."""


def refusal_of(error: AgentLightningError) -> Refusal:
    return Refusal(ErrorBody(type(error).__name__.lstrip("_"), str(error)), str(error))


def error_of(body: ErrorBody, status: int | None = None) -> AgentLightningError:
    """The error a server answered, in this process."""
    kind = _KINDS.get(body.type)
    if kind is None:
        kind = next((kind for kind, known in _STATUS if known == status), None)
    if kind is None:
        kind = ConfigError if body.type == "RequestError" or 400 <= (status or 0) < 500 else StoreError
    return kind(body.message)


_place = re.compile(r" - at `\$(.*)`$")
_step = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def refusal(error: Exception, data: bytes) -> RequestError:
    """What is wrong with a body, where, and what stands there instead."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, ConfigError):
        return RequestError(str(error))
    if isinstance(error, RecursionError):
        return RequestError("the body is nested too deeply; send flatter values")
    if not isinstance(error, msgspec.ValidationError):
        return RequestError(f"the body is not JSON in UTF-8: {error}; NaN and Infinity are not JSON either")
    text = str(error)
    place = _place.search(text)
    path = place[1] if place else ""
    said = text[: place.start()] if place else text
    if "Number out of range" in said:
        return RequestError(f"a number in the body is out of range{path and f', in {path}'}; use finite numbers")
    shown = _shown(data, path)
    hint = "; times are seconds since the epoch (UTC), as a number" if "_time" in path or "timestamp" in path else ""
    return RequestError(f"{path.lstrip('.') or 'the body'}{shown}: {said[:1].lower()}{said[1:]}{hint}")


def _shown(data: bytes, path: str) -> str:
    """` is VALUE` of what stands at `path`; "" where it cannot be found."""
    try:
        value = orjson.loads(data)
        for name, index in _step.findall(path):
            value = value[name] if name else value[int(index)]
        text = orjson.dumps(value).decode()
    except (ValueError, LookupError, TypeError):
        return ""
    return f" is {text if len(text) <= 80 else text[:77] + '...'}"
