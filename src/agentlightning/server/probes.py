"""Health checks for orchestrators and load balancers: `/livez` and `/readyz`.

`/livez` says that the process answers, and nothing about the database: a new process would not repair that. `/readyz`
says whether to send requests here: from the moment the store has answered once, until the server begins to drain. Later
outages of the store do not change it, because calls wait for the store, and all servers that share it would leave at
once. `/health` of the store's routes asks the store each time.
"""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.errors import AgentLightningError
from agentlightning.server.request_tracker import RequestTracker
from agentlightning.store.base import LightningStoreBase


class Probes:
    """The two routes. `tracker` is set once the application that contains them is wrapped."""

    def __init__(self, store: LightningStoreBase) -> None:
        self.tracker: RequestTracker | None = None
        self._store = store
        self._has_answered = False

    def routes(self) -> list[Route]:
        return [Route("/livez", self._live, methods=["GET"]), Route("/readyz", self._ready, methods=["GET"])]

    async def _live(self, request: Request) -> Response:
        return _status(200, "ok")

    async def _ready(self, request: Request) -> Response:
        if self.tracker is not None and self.tracker.draining:
            return _status(503, "the server is about to stop")
        if not self._has_answered:
            try:
                await self._store.check_health()
            except AgentLightningError as error:
                return _status(503, str(error))
            self._has_answered = True
        return _status(200, "ok")


def _status(code: int, text: str) -> Response:
    return Response(orjson.dumps({"status": text}), code, media_type="application/json")
