"""API errors: an HTTP status and OpenAI's error object, which the caller's SDK understands.

`to_api_error` maps every exception to one. Messages never contain keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from agentlightning.engine.base import EngineUnavailableError, PromptTokensError
from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    ContextLengthError,
    PolicyError,
    StoreClosedError,
    StoreError,
    StoreFullError,
    StoreLostError,
)
from agentlightning.util.json_values import Json


@dataclass(eq=False, repr=False)
class ApiError(AgentLightningError):
    """An error reply: the status and the fields of the error object."""

    status: int
    message: str
    _: KW_ONLY
    code: str | None = None
    param: str | None = None
    retry: bool | None = None
    """Value of `x-should-retry`; None leaves it to the SDK, which retries 408, 409, 429 and 5xx."""
    retry_after: float | None = None
    """Value of `Retry-After`, in seconds."""
    details: Mapping[str, str] = field(default_factory=dict)
    """Further fields of Anthropic's error object."""

    def __post_init__(self) -> None:
        super().__init__(self.message)

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def error_object(self) -> Json:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


STORE_UNAVAILABLE = (StoreFullError, StoreClosedError, StoreLostError)
"""The store cannot write now; the message says why."""

_TOO_DEEP = "Recursion limit reached"
"""orjson's message for values nested more than 254 deep; it parses up to 1,024."""


_ERRORS = (
    (ContextLengthError, 400, "{}", "context_length_exceeded", "messages"),
    (PromptTokensError, 400, "{}", None, "prompt"),
    (ConfigError, 400, "{}", None, "messages"),
    (STORE_UNAVAILABLE, 503, "the store of this server cannot be used now: {}", "store_unavailable", None),
    (StoreError, 500, "the store of this server failed: {}", "store_error", None),
    (EngineUnavailableError, 503, "{}", "policy_unavailable", None),
    (PolicyError, 500, "the engine failed: {}", "engine_error", None),
)
"""(kind of the exception, status, message, code, param), the first that fits."""


def to_api_error(error: BaseException) -> ApiError:
    """The API error for an exception."""
    if isinstance(error, ApiError):
        return error
    for kind, status, message, code, param in _ERRORS:
        if isinstance(error, kind):
            return ApiError(status, message.format(error), code=code, param=param)
    if isinstance(error, RecursionError) or (isinstance(error, TypeError) and str(error) == _TOO_DEEP):
        return ApiError(400, "the request is nested too deeply; send flatter values", code="nested_too_deeply")
    return ApiError(500, f"the gateway failed: {type(error).__name__}: {error}", code="internal_error")


def bad_request(where: str, message: str) -> ApiError:
    """A 400 for a value in the request; it names the top-level field of a path such as `messages[0].content`."""
    return ApiError(400, message, param=where.partition("[")[0].partition(".")[0])


def bad_key(message: str) -> ApiError:
    """A 401 for a wrong or missing key."""
    return ApiError(401, message, code="invalid_api_key")


def conflict(code: str, message: str) -> ApiError:
    """A 409 that SDKs do not repeat."""
    return ApiError(409, message, code=code, retry=False)
