"""How many tokens the prompt of a call would have at a provider that does not count Anthropic's messages.

Claude Code and others shorten their conversations by this number, and some refuse to work without one: so there always
is one. Servers like vLLM say it exactly at `/tokenize`; for all others it is an estimate, and a header of the answer
says so. Called by `forwarding.service` for `/v1/messages/count_tokens`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import orjson

from agentlightning.errors import ConfigError
from agentlightning.gateway.asgi import ResponseWriter
from agentlightning.gateway.dialects.anthropic.reply import count_reply
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.gateway.upstream.token_bound import estimate_prompt_tokens
from agentlightning.transport import TransportError

logger = logging.getLogger(__name__)

HEADER: Final = b"x-agentlightning-count"
"""Of an answer: `tokenizer` or `estimate`."""
SKIP_SECONDS: Final = 300.0
"""For so long a provider that has no tokenizer to ask is not asked again."""
TIMEOUT_SECONDS: Final = 5.0
_OF_THIS_REQUEST: Final = frozenset({400, 413, 422})
_NO_SUCH_PATH: Final = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of a prompt."""

    tokens: int
    source: Literal["tokenizer", "estimate"]

    async def send(self, writer: ResponseWriter) -> None:
        """Answer as Anthropic does."""
        writer.extra_headers = [(HEADER, self.source.encode())]
        await writer.send_json(200, count_reply(self.tokens))


class TokenCounter:
    """Counts for all providers, and remembers who has no tokenizer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._skipped_until: dict[str, float] = {}
        """Providers without one, by name -> until when."""

    async def count(self, pool: ServerPool, asked: Mapping[str, Any]) -> TokenCount:
        """`asked` is a request of chat completions or for a response; a tokenizer is asked for the first only."""
        name = pool.provider.name
        if "messages" in asked and self._clock() >= self._skipped_until.get(name, 0.0):
            try:
                status, tokens = await _tokenize(pool, asked)
            except (TransportError, ConfigError) as error:
                logger.info("the provider %r does not count tokens: %s", name, error)
                status, tokens = 0, None
            if tokens is not None:
                return TokenCount(tokens, "tokenizer")
            if status not in _OF_THIS_REQUEST:
                self._skipped_until[name] = self._clock() + SKIP_SECONDS
        return TokenCount(estimate_prompt_tokens(asked), "estimate")


def estimate_if_unsupported(api_error: ApiError, asked: Mapping[str, Any]) -> TokenCount:
    """Of a request in Anthropic's dialect, whose provider speaks it and does not count. Raises `problem` where it is
    another."""
    if api_error.status not in _NO_SUCH_PATH or "model" in api_error.message.lower():
        raise api_error
    return TokenCount(estimate_prompt_tokens(asked), "estimate")


async def _tokenize(pool: ServerPool, asked: Mapping[str, Any]) -> tuple[int, int | None]:
    """(status, tokens), None where the server does not say."""
    server, provider = pool.choose(""), pool.provider
    sent = {name: asked[name] for name in ("model", "messages", "tools") if asked.get(name)}
    answer = await pool.transport.send(
        "POST",
        f"{server.url.removesuffix('/v1')}/tokenize",
        server.headers,
        orjson.dumps(sent),
        connect_seconds=min(provider.connect_seconds, TIMEOUT_SECONDS),
        timeout_seconds=TIMEOUT_SECONDS,
    )
    async with answer:
        body = await answer.read()
    try:
        said = orjson.loads(body) if answer.status == 200 else None
    except orjson.JSONDecodeError:
        said = None
    count = cast("dict[str, Any]", said).get("count") if isinstance(said, dict) else None
    return answer.status, count if isinstance(count, int) and count >= 0 else None
