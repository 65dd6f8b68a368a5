"""What models a provider says it serves: asked for where any of them may be called, and remembered for a while.

Called by `gateway.models_api`. It asks one server of the provider, once for all callers that come together, and costs
nobody more than a few seconds: a provider that does not answer, or not in one of the two usual shapes, has no names.
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
"""For so long a list is not asked for again."""
RETRY_SECONDS: Final = 30.0
"""For so long a provider that gave none is left alone."""
TIMEOUT_SECONDS: Final = 3.0
"""For the whole of a list."""
_MAX_PAGES: Final = 20
_MAX_NAMES: Final = 10_000


class UpstreamModels:
    """The models of one provider."""

    def __init__(self, pool: ServerPool, clock: Callable[[], float] = time.monotonic) -> None:
        self._backends = pool
        self._clock = clock
        self._models: list[Json] = []
        self._until = 0.0
        self._one = asyncio.Lock()

    async def models(self) -> list[Json]:
        """As the provider describes them, each with an `id`; the last that were heard of where it does not answer."""
        if self._clock() >= self._until:
            async with self._one:
                if self._clock() >= self._until:
                    await self._refresh()
        return self._models

    async def _refresh(self) -> None:
        provider, seconds = self._backends.provider, CACHE_SECONDS
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                self._models = await self._pages()
        except (TransportError, TimeoutError, ConfigError, ValueError) as error:
            seconds = RETRY_SECONDS
            said = str(error) or f"no answer within {TIMEOUT_SECONDS:g} s"
            logger.info("the provider %r does not say what models it has: %s", provider.name, said)
        self._until = self._clock() + seconds

    async def _pages(self) -> list[Json]:
        """Anthropic's come a thousand at a time, OpenAI's all at once."""
        anthropic = self._backends.provider.dialect == "anthropic"
        found, query = list[Json](), "?limit=1000" if anthropic else ""
        for _ in range(_MAX_PAGES):
            page = await self._page(query)
            models = read_models(page)
            found += models
            if not (anthropic and isinstance(page, dict) and cast("Json", page).get("has_more") is True and models):
                break
            query = "?limit=1000&after_id=" + quote(models[-1]["id"], safe="")
        return list({model["id"]: model for model in found[:_MAX_NAMES]}.values())

    async def _page(self, query: str) -> Any:
        """Raises TransportError, and ValueError where it is refused or no JSON."""
        pool, provider = self._backends, self._backends.provider
        server = pool.choose("")
        answer = await pool.transport.send(
            "GET",
            provider.url(server.url, "models") + query,
            server.headers,
            connect_seconds=provider.connect_seconds,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        async with answer:
            body = await answer.read()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}")
        return orjson.loads(pool.redactor.redact_body(body))


def read_models(page: Any) -> list[Json]:
    """The models of a list in the shape of OpenAI's, Anthropic's, or of neither's envelope; what has no name is left
    out."""
    data = cast("Json", page).get("data") if isinstance(page, dict) else page
    models = cast("list[Any]", data) if isinstance(data, list) else []
    return [cast("Json", model) for model in models if isinstance(model, dict) and _is_name(cast("Json", model))]


def _is_name(model: Json) -> bool:
    name = model.get("id")
    return isinstance(name, str) and 0 < len(name) <= 256 and name.isprintable()


def openai_model(model: Json) -> Json:
    """A provider's model as OpenAI describes one; whatever else it says of it stays."""
    created = model.get("created")
    if not isinstance(created, int):
        created = _seconds(model.get("created_at"))
    own = {name: value for name, value in model.items() if name not in ("type", "display_name", "created_at")}
    return {"owned_by": "unknown"} | own | {"object": "model", "created": created}


def anthropic_model(model: Json) -> Json:
    """A provider's model as Anthropic describes one; whatever else it says of it stays."""
    stamp, name = model.get("created_at"), model.get("display_name")
    if not isinstance(stamp, str):
        stamp = rfc3339(model.get("created"))
    own = {name: value for name, value in model.items() if name not in ("object", "created", "owned_by")}
    shown = name if isinstance(name, str) else model["id"]
    return own | {"type": "model", "display_name": shown, "created_at": stamp}


def rfc3339(seconds: Any) -> str:
    """Seconds since 1970 as RFC 3339 has them; the beginning of time for what is no such number."""
    try:
        return datetime.fromtimestamp(float(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (TypeError, ValueError, OverflowError, OSError):
        return "1970-01-01T00:00:00Z"


def _seconds(stamp: Any) -> int:
    try:
        return int(datetime.fromisoformat(stamp).timestamp())
    except (TypeError, ValueError, OverflowError):
        return 0
