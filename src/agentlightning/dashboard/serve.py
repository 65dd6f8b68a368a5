"""Serves a dashboard by itself, read-only: of a run that is over, a database, or two recorded runs."""

from __future__ import annotations

import re
import socket
import tarfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.responses import RedirectResponse
from starlette.routing import BaseRoute, Route

from agentlightning.dashboard.app import PATH
from agentlightning.server.http import OriginGuard, RequestTracker
from agentlightning.store.clock import Clock
from agentlightning.store.export.copy import import_store
from agentlightning.store.sql.store import SqlStore


def dashboard_app(routes: Sequence[BaseRoute], host: str) -> RequestTracker:
    """The ASGI application, which rejects pages of other sites as the server does."""
    app = Starlette(routes=[*routes, Route("/", RedirectResponse(PATH))])
    app.router.redirect_slashes = False
    return RequestTracker(app, guard=OriginGuard((host,), any_host=True))


async def serve_dashboard(app: RequestTracker, listener: socket.socket) -> None:
    """Serve until cancelled. Signals are the caller's."""
    config = uvicorn.Config(
        app, lifespan="off", ws="none", log_config=None, access_log=False, server_header=False, date_header=False
    )
    await _Server(config).serve(sockets=[listener])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


# -- two recorded runs ------------------------------------------------------------------------------------------------
#
# `recorded.tar.xz` has of each run what the pages show: files, and an export of the store for each version of its
# resources. Times are seconds before the end of the run. `python -m tools.record_demo`, in a checkout, writes it.


RECORDED = Path(__file__).with_name("recorded.tar.xz")
EXPORTS = "exports"
TIME = re.compile(rb'(time":)(-?[\d.]+)')


class ThenClock(Clock):
    """Says what time it was."""

    def __init__(self, then: float) -> None:
        super().__init__()
        self._then = then

    def wall(self) -> float:
        return self._then


async def write_demo(root: Path) -> None:
    """Write the directories of both runs below another one, as if they had just ended."""
    for export in _unpack(root):
        first = TIME.search(export.read_bytes())
        assert first is not None
        store = SqlStore(export.parents[1] / "store.db", ThenClock(float(first[2])))
        try:
            await import_store(store, export)
        finally:
            await store.close()


def _unpack(root: Path) -> list[Path]:
    """Write all files; returns the exports, in order."""
    now = time.time()
    with tarfile.open(RECORDED) as recorded:
        for member in recorded:
            path, content = root / member.name, recorded.extractfile(member)
            assert content is not None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(TIME.sub(lambda found: b"%b%.3f" % (found[1], now + float(found[2])), content.read()))
    return sorted(root.glob(f"*/{EXPORTS}/*.jsonl"))
