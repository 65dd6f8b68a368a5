"""Lists the models of a provider, for routes that serve any of them, and caches the list.

Concurrent callers share one request, with a timeout of a few seconds. A provider that fails or responds in an unknown
format has an empty list.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, cast
from urllib.parse import quote

import orjson

from agentlightning.errors import ConfigError
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.transport import TransportError

logger = logging.getLogger(__name__)

Json = dict[str, Any]

CACHE_SECONDS: Final = 300.0
"""Seconds that a list is cached."""
RETRY_SECONDS: Final = 30.0
"""Seconds until a failed request is repeated."""
TIMEOUT_SECONDS: Final = 3.0
"""Seconds for the whole list."""
_MAX_PAGES: Final = 20
_MAX_NAMES: Final = 10_000


class UpstreamModels:
    """The models of one provider."""

    def __init__(self, pool: ServerPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._clock = clock
        self._models: list[Json] = []
        self._expires_at = 0.0
        self._lock = asyncio.Lock()

    async def models(self) -> list[Json]:
        """The models as the provider describes them, each with an `id`; after a failure those of the last list."""
        if self._clock() >= self._expires_at:
            async with self._lock:
                if self._clock() >= self._expires_at:
                    await self._refresh()
        return self._models

    async def _refresh(self) -> None:
        provider, seconds = self._pool.provider, CACHE_SECONDS
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                self._models = await self._pages()
        except (TransportError, TimeoutError, ConfigError, ValueError) as error:
            seconds = RETRY_SECONDS
            reason = str(error) or f"no response within {TIMEOUT_SECONDS:g} s"
            logger.info("the models of the provider %r could not be listed: %s", provider.name, reason)
        self._expires_at = self._clock() + seconds

    async def _pages(self) -> list[Json]:
        """All pages of the list: Anthropic has a thousand models per page, OpenAI one page."""
        anthropic = self._pool.provider.dialect == "anthropic"
        listed, query = list[Json](), "?limit=1000" if anthropic else ""
        for _ in range(_MAX_PAGES):
            page = await self._page(query)
            models = read_models(page)
            listed += models
            if not (anthropic and isinstance(page, dict) and cast("Json", page).get("has_more") is True and models):
                break
            query = "?limit=1000&after_id=" + quote(models[-1]["id"], safe="")
        return list({model["id"]: model for model in listed[:_MAX_NAMES]}.values())

    async def _page(self, query: str) -> Any:
        """Raises TransportError, or ValueError for an error response or invalid JSON."""
        pool, provider = self._pool, self._pool.provider
        server = pool.choose("")
        url = provider.url(server.url, "models") + query
        status, _, body = await pool.fetch("GET", url, server.headers, timeout_seconds=TIMEOUT_SECONDS)
        if status != 200:
            raise ValueError(f"status {status}")
        return orjson.loads(pool.redactor.redact_body(body))


def read_models(page: Any) -> list[Json]:
    """The models of a list in OpenAI's or Anthropic's format, or without an envelope; those without a name are left
    out."""
    data = cast("Json", page).get("data") if isinstance(page, dict) else page
    models = cast("list[Any]", data) if isinstance(data, list) else []
    return [cast("Json", model) for model in models if isinstance(model, dict) and _is_name(cast("Json", model))]


def _is_name(model: Json) -> bool:
    name = model.get("id")
    return isinstance(name, str) and 0 < len(name) <= 256 and name.isprintable()


def openai_model(model: Json) -> Json:
    """A model in OpenAI's format; further fields stay."""
    created = model.get("created")
    if not isinstance(created, int):
        created = _seconds(model.get("created_at"))
    own = {name: value for name, value in model.items() if name not in ("type", "display_name", "created_at")}
    return {"owned_by": "unknown"} | own | {"object": "model", "created": created}


def anthropic_model(model: Json) -> Json:
    """A model in Anthropic's format; further fields stay."""
    stamp, name = model.get("created_at"), model.get("display_name")
    if not isinstance(stamp, str):
        stamp = rfc3339(model.get("created"))
    own = {name: value for name, value in model.items() if name not in ("object", "created", "owned_by")}
    shown = name if isinstance(name, str) else model["id"]
    return own | {"type": "model", "display_name": shown, "created_at": stamp}


def rfc3339(seconds: Any) -> str:
    """Seconds since 1970 in RFC 3339 format; 1970-01-01 for an invalid value."""
    try:
        return datetime.fromtimestamp(float(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (TypeError, ValueError, OverflowError, OSError):
        return "1970-01-01T00:00:00Z"


def _seconds(stamp: Any) -> int:
    try:
        return int(datetime.fromisoformat(stamp).timestamp())
    except (TypeError, ValueError, OverflowError):
        return 0
