"""`agl serve`: store, gateway and OpenTelemetry traces on one port."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import sys
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.main import Output, reported
from agentlightning.cli.runner import LogFormat
from agentlightning.cli.train import Json
from agentlightning.cli.units import read_size, retention_from

if TYPE_CHECKING:
    from agentlightning.engine.base import Engine
    from agentlightning.gateway.config import GatewayConfig
    from agentlightning.observability.logs import SlowLog
    from agentlightning.observability.metrics import Metrics
    from agentlightning.policy.base import Policy
    from agentlightning.server.app import Server
    from agentlightning.store.base import LightningStoreBase
    from agentlightning.store.sql.store import SqlStore
    from agentlightning.store.types import Retention

logger = logging.getLogger(__name__)

DEFAULT_DB = ".agentlightning/store.db"
PRUNE_SECONDS = 300.0
"""How often a server looks for what it need not keep."""


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    host: Annotated[str, typer.Option(envvar="AGL_SERVER_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, envvar="AGL_SERVER_PORT", help="Port to listen on; 0 takes a free one."),
    ] = 4747,
    db: Annotated[
        str | None,
        typer.Option(help="A SQLite file, or postgresql://... (default: .agentlightning/store.db)", show_default=False),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="AGL_TOKEN", help="Access token that clients and runners present.", show_default=False),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let everybody in who can reach an address that is not loopback.")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            envvar="AGL_ALLOWED_HOSTS",
            help="Without a token: a further name this server is reached under; may be given again.",
            show_default=False,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            envvar="AGL_ALLOWED_ORIGINS",
            help="A site whose pages may use this server (CORS), as https://NAME[:PORT]; may be given again.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="[NAME=]DIR: a model for agents to call; may be given again.")
    ] = None,
    routes: Annotated[
        Path | None,
        typer.Option(help="TOML or JSON: which calls go to which model or provider, and budgets.", show_default=False),
    ] = None,
    otlp_export: Annotated[str | None, typer.Option(help="Send every span on to this OTLP/HTTP endpoint.")] = None,
    adopt_traces: Annotated[
        bool, typer.Option("--adopt-traces", help="Keep traces of unknown programs as rollouts of their own.")
    ] = False,
    keep_days: Annotated[float | None, typer.Option(min=0, help="Forget rollouts that finished earlier.")] = None,
    keep_rollouts: Annotated[int | None, typer.Option(min=0, help="Forget the oldest beyond so many.")] = None,
    keep_size: Annotated[str | None, typer.Option(help="Forget the oldest beyond so much, such as 10GB.")] = None,
    max_body: Annotated[str, typer.Option(help="Largest request to store and traces, such as 64MiB.")] = "64MiB",
    log_format: LogFormat = "text",
    slow_ms: Annotated[float, typer.Option(min=0, help="Log what takes longer, in milliseconds.")] = 250.0,
    as_json: Json = False,
) -> None:
    """Serve a store to clients, runners and agents, until told to stop (SIGTERM, Ctrl-C)."""
    output = Output(as_json)
    with reported(output):
        import uvloop

        from agentlightning.observability import logs

        logs.configure(log_format, secret=token)
        options = Options(
            host=host,
            port=port,
            db=db,
            token=token or None,
            no_token=no_token,
            allowed_hosts=tuple(allow_host or ()),
            allowed_origins=tuple(allow_origin or ()),
            models=tuple(model or ()),
            routing=read_routing(routes),
            otlp_export=otlp_export,
            adopt_traces=adopt_traces,
            retention=_retention(keep_days, keep_rollouts, keep_size),
            max_body_bytes=read_size(max_body),
            slow_seconds=slow_ms / 1000,
        )
        uvloop.run(_serve(options, output))


@dataclass(frozen=True, slots=True)
class Options:
    """What `agl serve` was told."""

    host: str
    port: int
    db: str | None
    token: str | None
    no_token: bool
    allowed_hosts: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    models: tuple[str, ...]
    routing: GatewayConfig
    otlp_export: str | None
    adopt_traces: bool
    retention: Retention | None
    max_body_bytes: int
    slow_seconds: float


async def _serve(options: Options, output: Output) -> None:
    from agentlightning.cli.stop_signals import Signals
    from agentlightning.errors import ServerError

    signals = Signals()
    signals.install()
    async with AsyncExitStack() as stack:
        server = await _open(options, stack)
        _announce(server, options, output)
        _collect_less()
        if not await signals.while_running(server.wait()):
            raise ServerError(f"the server at {server.url} ended by itself")
        logger.info("stopping (again to stop at once)")


def _collect_less() -> None:
    """What a server has made by now stays, and what a request makes is gone with it: looking for cycles in all of it
    every few hundred objects took a fifth of the server's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


# -- the parts -------------------------------------------------------------------------------------------------------


async def _open(options: Options, stack: AsyncExitStack) -> Server:
    """A server that listens, and all it stands on; the stack ends them in order."""
    from agentlightning.attempt_address import attempt_secret
    from agentlightning.gateway.recording import raw_exchange
    from agentlightning.gateway.recording.packer_process import Scribe
    from agentlightning.observability.logs import ChangeLog, SlowLog
    from agentlightning.observability.metrics import Metrics, counters
    from agentlightning.server.serve import serve
    from agentlightning.store.instrumented import Observer, observed
    from agentlightning.store.journal.store import journaled
    from agentlightning.tracing.otlp.exporter import OtlpExporter

    _refuse_strangers(options)
    bare = open_store(options.db)
    stack.push_async_callback(bare.close)
    metrics, slow = Metrics(bare), SlowLog(options.slow_seconds)
    observers: list[Observer] = [metrics, slow, ChangeLog()]
    bare.observe = partial(_took, metrics, slow)
    if options.otlp_export is not None:
        exporter = OtlpExporter(options.otlp_export)
        stack.push_async_callback(asyncio.to_thread, exporter.close)
        metrics.add_source(lambda: counters("otlp_export", "Spans sent on", asdict(exporter.counts)))
        observers.append(exporter)
    store = observed(bare, observers)
    if bare.path is not None:
        packer = Scribe() if options.otlp_export is None else None  # what is sent on is needed as spans, here
        store = await stack.enter_async_context(journaled(store, bare.path, raw_exchange.read, packer))
    serving = serve(
        store,
        await open_engines(options.models, options.routing, stack),
        secret=attempt_secret(options.token),
        token=options.token,
        routing=options.routing,
        require_key=options.token is not None,
        budget_file=beside(options.db, ".spent"),
        metrics=metrics,
        slow=slow,
        adopt_traces=options.adopt_traces,
        max_body_bytes=options.max_body_bytes,
        host=options.host,
        port=options.port,
        allowed_hosts=options.allowed_hosts,
        allowed_origins=options.allowed_origins,
    )
    server = await stack.enter_async_context(serving)
    if options.retention is not None:
        await stack.enter_async_context(_pruning(bare, options.retention))
    return server


def _took(metrics: Metrics, slow: SlowLog, method: str, waited: float, decided: float, together: int) -> None:
    metrics.took(method, waited, decided, together)
    slow.took(method, waited, decided, together)


def _refuse_strangers(options: Options) -> None:
    from agentlightning.errors import ConfigError
    from agentlightning.server.app import is_loopback

    token = options.token or ""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("the access token holds characters that cannot be sent; use printable ASCII without spaces")
    if options.token is None and not options.no_token and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} can be reached from other machines, and without a token everybody there could read "
            "and change everything: set AGL_TOKEN (or --token), or insist with --no-token"
        )


def open_store(db: str | None) -> SqlStore:
    """Raises ConfigError: a store that cannot be opened is a mistake in what was given."""
    from agentlightning.errors import ConfigError, StoreError
    from agentlightning.store.sql.store import SqlStore

    try:
        return SqlStore(db)
    except StoreError as error:
        raise ConfigError(str(error)) from error


def read_routing(path: Path | None) -> GatewayConfig:
    from agentlightning.gateway.config import GatewayConfig
    from agentlightning.util.settings import load_settings

    return load_settings(GatewayConfig, toml=path)


def beside(db: str | None, suffix: str) -> Path:
    """A file of the server's own beside its store; where that is no file, in the directory it was started in."""
    given = db or DEFAULT_DB
    is_file = "://" not in given and given != ":memory:"
    path = Path(given if is_file else DEFAULT_DB)
    return path.with_name(path.name + suffix)


async def open_model(given: str) -> Policy:
    """The model of `[NAME=]DIR`; its name is the directory's where none is given."""
    from agentlightning.policy.open import open_frozen

    name, equals, path = given.partition("=")
    return await open_frozen(name, path) if equals else await open_frozen(Path(given).name, given)


async def open_engines(given: Iterable[str], routing: GatewayConfig, stack: AsyncExitStack) -> dict[str, Engine]:
    """The models of `--model`, and those that the routes file names; the stack closes them."""
    engines: dict[str, Engine] = {}
    for model in given:
        policy = await open_model(model)
        stack.push_async_callback(policy.close)
        engines[policy.model] = policy
    if not routing.models:
        return engines
    from agentlightning.policy.open import open_models

    return engines | await open_models(routing.models, stack)


# -- retention -------------------------------------------------------------------------------------------------------


def _retention(days: float | None, rollouts: int | None, size: str | None) -> Retention | None:
    if days is None and rollouts is None and size is None:
        return None
    return retention_from(None if days is None else f"{days:f}d", rollouts, size)


@asynccontextmanager
async def _pruning(store: LightningStoreBase, retention: Retention) -> AsyncGenerator[None]:
    """Inside, the store forgets what it need not keep, now and every few minutes."""
    work = asyncio.create_task(prune_regularly(store, retention))
    try:
        yield
    finally:
        work.cancel()
        await asyncio.wait({work})


async def prune_regularly(
    store: LightningStoreBase, retention: Retention, every_seconds: float = PRUNE_SECONDS
) -> None:
    """Until cancelled. A store that is full or busy is tried again the next time."""
    from agentlightning.errors import StoreError

    while True:
        try:
            pruned = await store.prune(retention)
            if pruned.rollouts:
                logger.info("pruned %d rollouts with %d spans, %d bytes", pruned.rollouts, pruned.spans, pruned.bytes)
        except StoreError as error:
            logger.warning("could not prune, trying again in %g s: %s", every_seconds, error)
        await asyncio.sleep(every_seconds)


# -- what its user reads ---------------------------------------------------------------------------------------------


def _announce(server: Server, options: Options, output: Output) -> None:
    if output.as_json:
        store = without_password(options.db or DEFAULT_DB)
        record = {"url": server.url, "pid": os.getpid(), "store": store, "token": options.token is not None}
        output.finish(record, lambda console: None)
        sys.stdout.flush()
        return
    console, token = output.console, " (set AGL_TOKEN there too)" if options.token else ""
    whose = {None: "", "anthropic": ", for /v1/messages", "openai": ", but for /v1/messages"}
    led = [f"{rule.model} ({rule.provider}{whose[rule.dialect]})" for rule in options.routing.routes if rule.provider]
    served = [*options.models, *led]
    models = ", ".join(served) or "none; give one with --model DIR, or --routes FILE"
    for name, value in (
        ("serving", f"{without_password(options.db or DEFAULT_DB)} at {server.url}"),
        ("client", f'agentlightning.LightningStoreClient("{server.url}"){token}'),
        ("runner", f"agl runner --server {server.url} --agent module:name{token}"),
        ("traces", f"OTEL_EXPORTER_OTLP_ENDPOINT={server.url}"),
        ("metrics", f"{server.url}/metrics"),
        ("models", models),
    ):
        console.print(f"{name:<8} {value}", markup=False)


def without_password(url: str) -> str:
    return re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1@", url)
