"""Errors of the store as HTTP responses, and back. Without a web framework, since clients read them, too."""

from __future__ import annotations

import logging
import re
from typing import Final

import msgspec
import orjson
from msgspec import Struct

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, StoreError

logger = logging.getLogger(__name__)


class RequestError(ConfigError):
    """An invalid request: malformed, of the wrong type, or too large."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


_STATUS: Final[tuple[tuple[type[AgentLightningError], int], ...]] = (
    (ConfigError, 400),
    (errors.RewardError, 400),
    (errors.NotFoundError, 404),
    (errors.ConflictError, 409),
    (errors.StoreFullError, 507),
    (errors.StoreClosedError, 503),
    (errors.StoreAuthError, 401),
    (errors.StoreServerError, 502),
)
_TYPES: Final = {
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
    """The response body of every request that fails."""

    error: ErrorBody
    detail: str
    """The message again, for 0.x clients."""


def error_body(error: AgentLightningError) -> ErrorBody:
    return ErrorBody(type(error).__name__.lstrip("_"), str(error))


def error_of(error: Exception) -> AgentLightningError:
    """The error to respond with, for any exception that a call has raised."""
    if isinstance(error, AgentLightningError):
        return error
    if isinstance(error, OverflowError | UnicodeError):
        return ConfigError(f"a value cannot be stored: {error}")
    logger.error("a call of the store failed", exc_info=error)
    return StoreError(f"the server failed: {type(error).__name__}; see its log")


def error_from(body: ErrorBody) -> AgentLightningError:
    """The exception for an error that a server responded with."""
    kind = _TYPES.get(body.type, ConfigError if body.type == RequestError.__name__ else StoreError)
    return kind(body.message)


_place = re.compile(r" - at `\$(.*)`$")
_step = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")


def decode_error(error: Exception, data: bytes) -> RequestError:
    """The error for a body that could not be decoded: it says where, and what is there."""
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
    complaint = text[: place.start()] if place else text
    if "Number out of range" in complaint:
        return RequestError(f"a number in the body is out of range{path and f', in {path}'}; use finite numbers")
    shown = _describe_value(data, path)
    hint = "; times are seconds since the epoch (UTC), as a number" if "_time" in path or "timestamp" in path else ""
    return RequestError(f"{path.lstrip('.') or 'the body'}{shown}: {complaint[:1].lower()}{complaint[1:]}{hint}")


def _describe_value(data: bytes, path: str) -> str:
    """` is VALUE` for the value at `path`; "" if it cannot be found."""
    try:
        value = orjson.loads(data)
        for name, index in _step.findall(path):
            value = value[name] if name else value[int(index)]
        text = orjson.dumps(value).decode()
    except (ValueError, LookupError, TypeError):
        return ""
    return f" is {text if len(text) <= 80 else text[:77] + '...'}"
