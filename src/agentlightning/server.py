"""One server: the store's routes and the gateway in one ASGI application, on one port, in the running loop.

Wiring and nothing else. The trainer starts it; it handles no signals and writes no access log.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Self

import uvicorn
from starlette.applications import Starlette

from agentlightning.errors import ServerError
from agentlightning.gateway.app import Gateway
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.routes import store_routes


class Server:
    """Serves a store, and a gateway where one is given.

    `port` 0 takes a free one; `url` then says which. `secret` is the one the attempts' keys are made with.
    """

    def __init__(
        self,
        store: LightningStoreBase,
        gateway: Gateway | None = None,
        *,
        secret: str,
        host: str = "127.0.0.1",
        port: int = 0,
        grace_seconds: int = 10,
    ) -> None:
        routes = [*store_routes(store, secret), *(gateway.routes() if gateway else [])]
        self.app = Starlette(routes=routes)
        self.host = host
        self.port = port
        self._grace = grace_seconds
        self._uvicorn: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where agents reach it. A server that listens on every address is reached on this machine's own."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def start(self) -> Self:
        """Listen. Raises ServerError where the address cannot be had."""
        if self._serving is not None:
            raise ServerError(f"the server is already listening at {self.url}; stop it first")
        listener = _listen(self.host, self.port)
        self.port = listener.getsockname()[1]
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                self.app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                log_level="warning",
                timeout_keep_alive=120,
                timeout_graceful_shutdown=self._grace,
                server_header=False,
                date_header=False,
            )
        )
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[listener]))
        ready = asyncio.create_task(self._uvicorn.ready.wait())
        await asyncio.wait({ready, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            ready.cancel()
            await self.stop()
            raise ServerError(f"the server at {self.url} ended while it started")
        return self

    async def stop(self) -> None:
        """Finish what is under way (for at most `grace_seconds`), then close. Safe to call twice."""
        if self._serving is None or self._uvicorn is None:
            return
        self._uvicorn.leave()
        serving, self._serving = self._serving, None
        await serving

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class _Uvicorn(uvicorn.Server):
    """uvicorn as a guest: it says when it listens, leaves when told, and leaves signals to the host."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        """Its ten ticks a second serve only the Date header, which we do not send."""
        await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServerError(
            f"cannot listen on {host}:{port}: {error}; stop what uses it, or choose another port (0 takes a free one)"
        ) from error
    return listener
