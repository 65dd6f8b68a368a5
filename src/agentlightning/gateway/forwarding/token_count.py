"""Counts the prompt tokens of `/v1/messages/count_tokens` for providers without this endpoint.

Claude Code and others decide by this number when to shorten a conversation, and some do not work without it. Servers
like vLLM count exactly at `/tokenize`; for others the number is an estimate, which a response header says.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, cast

import orjson

from agentlightning.errors import ConfigError
from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.dialects.anthropic.reply import count_reply
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.offload import PASSED, offload
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.gateway.upstream.token_bound import estimate_prompt_tokens
from agentlightning.transport import TransportError
from agentlightning.util.json_values import dumps, loads

logger = logging.getLogger(__name__)

HEADER: Final = b"x-agentlightning-count"
"""Response header: `tokenizer` or `estimate`."""
SKIP_SECONDS: Final = 300.0
"""Seconds until `/tokenize` of a provider that lacks it is tried again."""
TIMEOUT_SECONDS: Final = 5.0
_REQUEST_ERRORS: Final = frozenset({400, 413, 422})
_UNSUPPORTED: Final = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The number of prompt tokens, and how it was determined."""

    tokens: int
    source: Literal["tokenizer", "estimate"]

    async def send(self, writer: ResponseWriter) -> None:
        """Send it in Anthropic's format."""
        writer.extra_headers = [(HEADER, self.source.encode())]
        await writer.send_json(200, count_reply(self.tokens))


class TokenCounter:
    """Counts tokens for all providers, and caches which of them have no tokenizer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._skipped_until: dict[str, float] = {}
        """Names of providers without a tokenizer -> when to try again."""

    async def count(self, pool: ServerPool, request: Mapping[str, Any], size: int) -> TokenCount:
        """Count for a request of chat completions or responses of about `size` bytes; the tokenizer serves only the
        former."""
        name = pool.provider.name
        if "messages" in request and self._clock() >= self._skipped_until.get(name, 0.0):
            try:
                status, tokens = await _tokenize(pool, request, size)
            except (TransportError, ConfigError) as error:
                logger.info("the provider %r does not count tokens: %s", name, error)
                status, tokens = 0, None
            if tokens is not None:
                return TokenCount(tokens, "tokenizer")
            if status not in _REQUEST_ERRORS:
                self._skipped_until[name] = self._clock() + SKIP_SECONDS
        return await _estimate(request, size)


async def estimate_if_unsupported(api_error: ApiError, request: Mapping[str, Any], size: int) -> TokenCount:
    """An estimate if the provider speaks Anthropic's dialect without this endpoint; raises any other `api_error`."""
    if api_error.status not in _UNSUPPORTED or "model" in api_error.message.lower():
        raise api_error
    return await _estimate(request, size)


async def _estimate(request: Mapping[str, Any], size: int) -> TokenCount:
    return TokenCount(await offload(size // PASSED, partial(estimate_prompt_tokens, request)), "estimate")


async def _tokenize(pool: ServerPool, request: Mapping[str, Any], size: int) -> tuple[int, int | None]:
    """(status, tokens); None if the server does not report them."""
    server = pool.choose("")
    body = {name: request[name] for name in ("model", "messages", "tools") if request.get(name)}
    url = f"{server.url.removesuffix('/v1')}/tokenize"
    sent = await offload(size // PASSED, partial(dumps, body))
    status, _, data = await pool.fetch("POST", url, server.headers, sent, timeout_seconds=TIMEOUT_SECONDS)
    try:
        response = loads(data) if status == 200 else None
    except orjson.JSONDecodeError:
        response = None
    count = cast("dict[str, Any]", response).get("count") if isinstance(response, dict) else None
    return status, count if isinstance(count, int) and count >= 0 else None
