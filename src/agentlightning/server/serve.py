"""Assembles a server: the gateway for some engines and providers, and the HTTP server for it and the store.

Called by the trainer, `agl.evaluate`, `agl serve` and `agl run`, so that all of them serve models in the same way.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.routing import BaseRoute

from agentlightning.engine.base import Engine
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.observability.metrics import Metrics
from agentlightning.server.app import Server
from agentlightning.store.base import LightningStoreBase


@asynccontextmanager
async def serve(
    store: LightningStoreBase,
    engines: Mapping[str, Engine] | None,
    *,
    secret: str,
    token: str | None = None,
    routing: GatewayConfig | None = None,
    accept_any_model: bool | None = None,
    require_key: bool = False,
    allow_unattributed: bool = False,
    budget_file: Path | None = None,
    accepts_runs: bool | None = None,
    metrics: Metrics | None = None,
    pages: Iterable[BaseRoute] = (),
    shared: Path | None = None,
    **options: Any,
) -> AsyncGenerator[Server]:
    """Run a server for `store`, and a gateway for `engines` (model name to engine) and the providers in `routing`.

    `engines=None` means no gateway. The first engine is the default model. It also answers calls for unknown model
    names if `accept_any_model`; by default it does so unless `routing` has routes. With
    `allow_unattributed` calls of no attempt are answered, and not recorded. Training runs elsewhere may join the
    gateway if it `accepts_runs`; with False, as in one of several processes, they are told why not. `metrics`, `pages`,
    `shared` and the other `options` are those of `Server`. The server has stopped when the context ends; the store and
    the engines stay open.
    """
    gateway = None
    if engines is not None:
        default = next(iter(engines), None)
        if accept_any_model is None:
            accept_any_model = default is not None and not (routing and routing.routes)
        gateway = Gateway(
            store,
            engines,
            secret=secret,
            config=routing,
            budget_file=budget_file,
            shared=shared,
            default_model=default,
            accept_any_model=accept_any_model,
            require_key=require_key,
            allow_unattributed=allow_unattributed,
            takes_runs=accepts_runs is not None,
        )
    async with AsyncExitStack() as stack:
        if accepts_runs is not None and gateway is not None:
            from agentlightning.server.joining import JoinedPolicies

            joined = JoinedPolicies(gateway, accepts_runs)
            stack.push_async_callback(joined.close)
            pages = [*joined.routes(token), *pages]
            if metrics is not None:
                metrics.add_source(joined.metrics)
        server = Server(
            store, gateway, secret=secret, token=token, metrics=metrics, pages=pages, shared=shared, **options
        )
        yield await stack.enter_async_context(server)
