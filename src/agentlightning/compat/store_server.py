"""`LightningStoreServer` of 0.x: a store over HTTP, in this process. `agl serve` does the same for a machine."""

from __future__ import annotations

import asyncio
from typing import Any

from agentlightning.attempt_address import attempt_secret
from agentlightning.server.app import Server
from agentlightning.store.base import LightningStoreBase


class LightningStoreServer:
    """Serves `store` at `endpoint`, to `LightningStoreClient`s and clients of 0.3. The methods of the store can be
    called here, too. `token`: what clients must send; None: nothing, for this machine alone. Raises ServerError where
    the address is taken.

        >>> async def serve():
        ...     server = agl.LightningStoreServer(agl.InMemoryLightningStore(), port=0)
        ...     await server.start()
        ...     rollout = await server.enqueue_rollout({"question": "6 x 7"})
        ...     await server.stop()
        ...     return rollout.status
        >>> asyncio.run(serve())
        'queuing'
    """

    def __init__(
        self, store: LightningStoreBase, host: str = "127.0.0.1", port: int = 4747, *, token: str | None = None
    ) -> None:
        self.store = store
        self._server = Server(store, secret=attempt_secret(token), token=token, host=host, port=port)

    @property
    def endpoint(self) -> str:
        """The URL for clients on this machine."""
        return self._server.url

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """Finish requests in progress and close the server. The store stays open."""
        await self._server.stop()

    async def run_forever(self) -> None:
        """Serve until the task is cancelled."""
        await self.start()
        try:
            await asyncio.Event().wait()
        finally:
            await self.stop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)
