"""`StoreHub`: one server thread that serves the stores of many tests, each at its own URL, at no start-up cost."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any, Self

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore, LightningStoreBase
from agentlightning.store.http.server import store_routes


class StoreHub:
    """Serves any number of stores on one port. A context manager."""

    def __init__(self) -> None:
        self._apps: dict[str, ASGIApp] = {}
        self._url: Future[str] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="agl-hub", daemon=True)

    def serve(self, store: LightningStoreBase, **options: Any) -> str:
        """Serve `store` and return its URL; `options` are those of `store_routes`."""
        name = f"s{len(self._apps)}"
        self._apps[name] = Starlette(routes=store_routes(store, **options))
        return f"{self._url.result(30)}/{name}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._url.result(30)
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        placeholder = InMemoryLightningStore()
        server = Server(placeholder, secret="s")
        server.app.router.routes.insert(0, Route("/{name}/{path:path}", _Apps(self._apps)))
        async with server:
            self._url.set_result(server.url)
            await self._stopped.wait()
        await placeholder.close()


class _Apps:
    """Dispatches requests by the first segment of their path."""

    def __init__(self, apps: dict[str, ASGIApp]) -> None:
        self._apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path_params"]["path"]
        await self._apps[scope["path_params"]["name"]]({**scope, "path": f"/{path}"}, receive, send)
