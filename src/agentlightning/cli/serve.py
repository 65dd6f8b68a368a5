"""`agl serve`: serves the store, model calls and OpenTelemetry traces on one port. `agl runner`: runs an agent on the
rollouts of a server."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import typer
import uvloop
from typer import Context, Option

from agentlightning.attempt_address import attempt_secret
from agentlightning.cli.options import (
    DATABASES,
    Agent,
    LogFormat,
    Reward,
    Serving,
    Token,
    database_name,
    has_model,
    hide_token,
    open_named,
    read_size,
    retention_from,
    store_file,
)
from agentlightning.cli.output import Output, Result, agl, open_output
from agentlightning.errors import ConfigError, ServerError, StoreAuthError, StoreError, StoreServerError
from agentlightning.observability.logs import ChangeLog, SlowLog, about
from agentlightning.runner.agents.agent import CommandLine, agent_spec
from agentlightning.store.base import LightningStoreBase, store_url
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.types import Retention
from agentlightning.util.event_loop import in_background
from agentlightning.util.plugins import load_plugin

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from agentlightning.runner import AgentLike, Runner
    from agentlightning.server.app import Server
    from agentlightning.server.processes import ServerProcess


logger = logging.getLogger(__name__)

PRUNE_SECONDS = 300.0
"""Time between two prunings of the store."""


@dataclass(frozen=True)
class ServerOptions:
    """The options of `agl serve` that are those of the server."""

    host: str = Option("127.0.0.1", envvar="AGL_SERVER_HOST")
    """Address to listen on."""
    port: int = Option(4747, min=0, max=65535, envvar="AGL_SERVER_PORT")
    """Port to listen on; 0 takes a free one."""
    allowed_hosts: list[str] = Option([], "--allow-host", envvar="AGL_ALLOWED_HOSTS")
    """Without a token: another host name of this server; repeatable."""
    allowed_origins: list[str] = Option([], "--allow-origin", envvar="AGL_ALLOWED_ORIGINS")
    """A site whose pages may call this server (CORS), as https://NAME[:PORT]; repeatable."""
    allow_unattributed: bool = False
    """Also answer calls that belong to no rollout, without recording them: for agents that are to use a model, and not
    to be measured."""
    adopt_traces: bool = False
    """Store traces of unknown programs as rollouts of their own."""
    grace_seconds: int = Option(10, min=0)
    """Time for requests in progress to finish before the server exits."""


@dataclass(frozen=True)
class Options(ServerOptions, Serving):
    """What is served, where, and for how long."""

    workers: int = Option(1, min=1)
    """Processes that serve the port; for providers and the store, not for --model. Linux."""
    no_token: bool = False
    """Listen without a token on an address that other machines can reach."""
    tinker: list[str] = Option([], envvar="AGL_TINKER")
    """Let programs written for the Tinker API train and sample this model: [NAME=]DIR; repeatable."""
    tinker_weights: Path | None = None
    """Where weights that these programs save go; by default beside the store."""
    otlp_export: str | None = None
    """Export all spans to this OTLP/HTTP endpoint."""
    keep_days: float | None = Option(None, min=0, max=1e6)
    """Delete rollouts that finished longer ago."""
    keep_rollouts: int | None = Option(None, min=0)
    """Delete the oldest finished rollouts beyond this number."""
    keep_size: str | None = None
    """Delete the oldest finished rollouts beyond this size, such as 10GB."""
    runs: Path | None = Option(None, envvar="AGL_RUNS")
    """A directory of runs, which the dashboard shows, too."""
    max_body: str = "64MiB"
    """Largest request to the store and of traces, such as 64MiB."""
    drain_seconds: float = Option(0.0, min=0)
    """Time between SIGTERM and the end of listening, in which /readyz responds 503: for load balancers."""
    log_format: LogFormat = "text"
    slow_ms: float = Option(250.0, min=0)
    """Log operations other than model calls that take longer, in milliseconds."""

    @cached_property
    def retention(self) -> Retention | None:
        seconds = None if self.keep_days is None else self.keep_days * 86400
        return retention_from(seconds, self.keep_rollouts, self.keep_size)

    @cached_property
    def max_body_bytes(self) -> int:
        return read_size(self.max_body)

    def check(self) -> None:
        """Raises ConfigError for what cannot be served, or has to be held by one process and there are several."""
        from agentlightning.server.app import is_loopback

        token = self.token
        if token and (not token.isascii() or not token.isprintable() or " " in token):
            raise ConfigError("the access token has characters that cannot be sent; use printable ASCII without spaces")
        if not token and not self.no_token and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, and without a token anybody there could read "
                "and change everything: set AGL_TOKEN (or --token), or allow that with --no-token"
            )
        routing, _ = self.routing, (self.retention, self.max_body_bytes)  # once, before there are several processes
        if self.workers == 1:
            return

        in_memory = store_file(self.store) is None and not str(store_url(self.store)).startswith(DATABASES)
        served = "serve it with vLLM or SGLang, and name that in --routes as a provider with token_ids"
        for what, is_given, otherwise in (
            ("a store in memory", in_memory, "give a file or a PostgreSQL database"),
            ("--model", self.models, served),
            ("models of the routes file", routing.models, served),
            ("--tinker", self.tinker, "start a server of its own for it"),
            ("a budget", routing.budget, "set it in a server of its own, or leave it out"),
        ):
            if is_given:
                raise ConfigError(
                    f"--workers {self.workers} cannot share {what}, which one process has to hold: {otherwise}; or"
                    " leave --workers out"
                )
        routing.divided(1, self.workers)


def serve(ctx: Context, options: Options) -> None:
    """Serve a store to clients, runners and agents, until stopped (SIGTERM, Ctrl-C).

    \b
    Examples:
      agl serve --store hub.db --model support=models/current --keep-days 30
      agl serve --model runs/first/checkpoint --allow-unattributed
      AGL_TOKEN=... agl serve --host 0.0.0.0 --store postgresql://agl@db/agl
    """
    from agentlightning.observability import logs

    logs.configure(options.log_format, secret=options.token)
    options.check()
    if options.workers > 1:
        raise typer.Exit(_serve_in_processes(options, ctx.obj))
    uvloop.run(_serve(options, ctx.obj))


async def _serve(options: Options, output: Output, process: ServerProcess | None = None) -> None:
    """Serve until stopped. `process`: as one of several, which their parent announces."""
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        server = await _open(options, stack, process)
        if process is None:
            _announce(server.url, options, output)
        else:
            process.ready()
        gc.collect()
        gc.freeze()  # and collect less often: it took a fifth of the server's time, and found little to free
        gc.set_threshold(20_000, 10, 10)
        if not await signals.while_running(server.wait()):
            raise ServerError(f"the server at {server.url} ended by itself")
        logger.info("stopping (repeat the signal to stop at once)")
        server.drain()
        await asyncio.sleep(options.drain_seconds)


# -- several processes -----------------------------------------------------------------------------------------------


def _serve_in_processes(options: Options, output: Output) -> int:
    """Serve in several processes until stopped; the exit status."""
    from agentlightning.server.app import url_of
    from agentlightning.server.processes import Processes

    def work(process: ServerProcess) -> int:
        try:
            with open_output(output.as_json) as errors, about(process=str(process.number)):
                uvloop.run(_serve(options, errors, process))
        except typer.Exit as end:
            return end.exit_code
        return 0

    def announce(port: int) -> None:
        _announce(url_of(options.host, port), options, output)

    return Processes(options.workers, options.host, options.port, work, announce).run()


# -- the parts -------------------------------------------------------------------------------------------------------


async def _open(options: Options, stack: AsyncExitStack, process: ServerProcess | None = None) -> Server:
    """Open the store, the models and the server; the stack closes them."""
    from agentlightning.dashboard.app import dashboard_routes
    from agentlightning.dashboard.data.run_data import Catalog
    from agentlightning.observability.metrics import Metrics, counters
    from agentlightning.server.serve import serve
    from agentlightning.store.instrumented import Observer, instrument
    from agentlightning.tracing.otlp.exporter import OtlpExporter

    database = options.open_store()
    stack.push_async_callback(database.close)
    metrics, slow = Metrics(database), SlowLog(options.slow_ms / 1000)
    observers: list[Observer] = [metrics, slow, ChangeLog()]
    database.observe = metrics.took
    if options.otlp_export is not None:
        exporter = OtlpExporter(options.otlp_export)
        stack.push_async_callback(asyncio.to_thread, exporter.close)
        metrics.add_source(lambda: counters("otlp_export", "Spans sent on", asdict(exporter.counts)))
        observers.append(exporter)
    store = instrument(database, observers)
    data = Catalog(store, roots=() if options.runs is None else [options.runs], writable=True)
    stack.push_async_callback(data.close)
    token, routing = options.token or None, options.routing
    if process is not None:
        await stack.enter_async_context(process.sharing(metrics))
        routing = routing.divided(process.number, options.workers)
    serving = serve(
        store,
        await options.open_engines(routing, stack),
        secret=attempt_secret(token),
        token=token,
        routing=routing,
        require_key=token is not None,
        budget_file=options.beside_store(".spent"),
        accepts_runs=process is None,
        metrics=metrics,
        slow=slow,
        pages=[*await _tinker_routes(options, stack), *dashboard_routes(data, token)],
        max_body_bytes=options.max_body_bytes,
        listener=process and process.listener,
        shared=process and process.directory,
        **{each.name: getattr(options, each.name) for each in fields(ServerOptions)},
    )
    server = await stack.enter_async_context(serving)
    if options.retention is not None and (process is None or process.number == 1):
        await stack.enter_async_context(in_background(prune_regularly(database, options.retention)))
    return server


async def _tinker_routes(options: Options, stack: AsyncExitStack) -> list[BaseRoute]:
    """The routes of the Tinker API for the models of `--tinker`; none without."""
    if not options.tinker:
        return []

    weights = options.tinker_weights or options.beside_store(".tinker")
    open_routes = load_plugin("server_routes", "tinker")
    routes = open_routes(tuple(options.tinker), weights, options.token or None, options.max_body_bytes)
    return await stack.enter_async_context(routes)


# -- retention -------------------------------------------------------------------------------------------------------


async def prune_regularly(
    store: LightningStoreBase, retention: Retention, every_seconds: float = PRUNE_SECONDS
) -> None:
    """Prune until cancelled. If the store is full or busy, try again the next time."""
    while True:
        try:
            pruned = await store.prune(retention)
            if pruned.rollouts:
                logger.info("pruned %d rollouts with %d spans, %d bytes", pruned.rollouts, pruned.spans, pruned.bytes)
        except StoreError as error:
            logger.warning("could not prune, trying again in %g s: %s", every_seconds, error)
        await asyncio.sleep(every_seconds)


# -- output ----------------------------------------------------------------------------------------------------------


def _announce(url: str, options: Options, output: Output) -> None:
    store, workers = database_name(options.store), options.workers
    record = {"url": url, "pid": os.getpid(), "store": store, "token": bool(options.token), "workers": workers}
    dialects = {None: "", "anthropic": ", for /v1/messages", "openai": ", but for /v1/messages"}
    rules = [rule for rule in options.routing.routes if rule.provider]
    routed = [f"{rule.model} ({rule.provider}{dialects[rule.dialect]})" for rule in rules]
    models = ", ".join([*(options.models or ()), *routed])
    token = " (set AGL_TOKEN there too)" if options.token else ""
    lines = {
        "serving": f"{store} at {url}{f' in {workers} processes' if workers > 1 else ''}",
        "client": f'agentlightning.LightningStoreClient("{url}"){token}',
        "runner": f"agl runner --server {url} --agent module:name{token}",
        "traces": f"OTEL_EXPORTER_OTLP_ENDPOINT={url}",
        "metrics": f"{url}/metrics",
        "dashboard": f"{url}/dashboard",
        "models": models or "none; add one with --model MODEL or --routes FILE",
    }
    if models and options.allow_unattributed:
        lines["openai"] = f"OPENAI_BASE_URL={url}/v1"
    output.show(Result(record, [f"{name:<9} {value}" for name, value in lines.items()]))
    sys.stdout.flush()


# -- signals ----------------------------------------------------------------------------------------------------------

STOPPING = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """The first signal sets `requested`, the next ones call `actions`, and each further one exits the process."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.requested = asyncio.Event()
        self._actions = chain((self.requested.set, *actions), repeat(exit_now))

    def __enter__(self) -> Self:
        """Install the handlers in the running event loop, which must be that of the main thread."""
        for number in STOPPING:
            asyncio.get_running_loop().add_signal_handler(number, lambda: next(self._actions)())
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the default handlers: those of a closed loop would ignore Ctrl-C."""
        for number in STOPPING:
            asyncio.get_running_loop().remove_signal_handler(number)

    async def while_running(self, work: Awaitable[Any]) -> bool:
        """Wait until `work` is done or a stop is requested, which cancels `work`. Returns whether a stop was requested.
        Raises what `work` raises."""
        tasks = working, _ = asyncio.ensure_future(work), asyncio.ensure_future(self.requested.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return self.requested.is_set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def exit_now() -> NoReturn:
    """Exit the process at once. What the store has acknowledged is safe."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(130)


# -- agl runner -------------------------------------------------------------------------------------------------------


POLL_SECONDS = 10.0
"""How long one claim waits: with a thousand idle runners, the server gets a hundred claims a second."""


@dataclass(frozen=True)
class RunnerOptions:
    """The options of `agl runner` that are those of `Runner`."""

    reward: Reward = None
    concurrency: int = Option(32, min=1)
    """Concurrent attempts."""
    hosts: int = Option(1, min=1)
    """Processes that run Python agents."""
    fresh_process: bool = False
    """Run every attempt in a new process."""
    queues: list[str] | None = Option(None, "--queue")
    """Claim only from this queue; repeatable."""
    worker_id: str | None = None
    """Name of the worker in the store (default: host and process)."""
    lease_seconds: float = Option(30.0, "--lease", min=1)
    """Seconds without a heartbeat after which other runners get the rollouts."""
    max_rollouts: int | None = Option(None, min=1)
    """Exit after this number of rollouts."""
    hide: list[str] = Option([])
    """A field of a dict task that only the reward function receives; repeatable."""
    cwd: Path | None = None
    """Working directory of the agent."""
    log: Path | None = None
    """File for what the agent prints (default: stderr)."""
    redirect: bool | None = None
    """Redirect the agent's model calls to the server (default: if it has a model; rollouts of a training run are
    redirected to that run)."""
    patience: float = Option(600.0, min=0)
    """Seconds for which the server may be unreachable."""


async def runner(
    ctx: Context,
    *,
    server: str | None = Option(None, envvar="AGL_SERVER"),
    agent: Agent = None,
    options: RunnerOptions,
    token: Token = None,
    variables: list[str] = Option([], "--variable"),
    drain_seconds: float | None = Option(None, min=0),
    job: Path | None = None,
    job_api: str | None = None,
    job_start_seconds: float = Option(600.0, min=1),
    log_format: LogFormat = "text",
) -> Result:
    """Run an agent on the rollouts of a server, until stopped.

    SIGTERM or Ctrl-C: claim no more rollouts, let running attempts finish, report, exit 0. Again: stop running attempts
    and requeue them.

    server: The URL of `agl serve`: http://HOST:PORT (else AGL_SERVER_HOST and AGL_SERVER_PORT).
    variables: VARIABLE=FIELD: an environment variable with a field of a dict task; repeatable.
    drain_seconds: Time for attempts to finish after SIGTERM (default: unlimited).
    job: Run each attempt in a Kubernetes Job made from this manifest (YAML or JSON); --agent is then the command of its
        container, by default that of the image.
    job_api: The URL of the Kubernetes API server, as that of `kubectl proxy`; by default that of this pod's cluster.
    job_start_seconds: Time in which the container of a Job has to start.

    \b
    Examples:
      agl runner --server http://hub:4747 --agent agent.py:solve --reward reward.py:score
      agl runner --server http://hub:4747 --agent "node agent.mjs" --variable QUESTION=question --concurrency 8
    """
    from agentlightning.observability import logs
    from agentlightning.runner import Runner

    output: Output = ctx.obj
    logs.configure(log_format, secret=token)
    hide_token()
    url = _server_url(server)
    given = agent if job is None else _job_template(job, agent, job_api, job_start_seconds)
    if given is None:
        raise ConfigError("agl runner needs --agent: module:name, path/file.py:name, or a command line, or --job")
    async with AsyncExitStack() as stack:
        store = LightningStoreClient(url, token or None)
        stack.push_async_callback(store.close)
        made = Runner(
            store,
            given,
            secret=attempt_secret(token or None),
            server_url=url,
            poll_seconds=POLL_SECONDS,
            env=_fields(variables),
            **vars(options),
        )
        signals = stack.enter_context(StopSignals(made.stop_at_once))
        stack.push_async_callback(made.stop, 0)
        found: dict[str, int] = {}
        if not await signals.while_running(_start_runner(made, store)):
            output.console.print(f"{made.worker_id} runs {made.pool.agent} for {url}")
            if await signals.while_running(made.wait()):
                running = made.statistics.running
                output.console.print(f"stopping; {running} attempts are running (again to stop and requeue them)")
            await made.stop(drain_seconds)
            found = asdict(made.statistics)
    counts = ", ".join(f"{number} {name}" for name, number in found.items() if number) or "no attempts"
    text = f"{made.worker_id} has stopped: {counts}"
    return Result({"worker_id": made.worker_id, **found}, text, [agl("store", "list", server=url)])


def _server_url(server: str | None) -> str:
    """The URL of the server. Raises ConfigError if neither option nor environment has one."""
    if server:
        return server.rstrip("/")
    host, port = os.environ.get("AGL_SERVER_HOST"), os.environ.get("AGL_SERVER_PORT")
    if not host and not port:
        raise ConfigError("there is no server; give --server http://HOST:PORT, or set AGL_SERVER")
    return f"http://{host or '127.0.0.1'}:{port or 4747}"


def _job_template(path: Path, agent: str | None, api: str | None, start_seconds: float) -> AgentLike:
    """The agent whose attempts are Jobs. Raises ConfigError."""
    command = None if agent is None else agent_spec(agent)
    if command is not None and not isinstance(command, CommandLine):
        raise ConfigError(f"--agent {agent} is Python; with --job it is the command of the container, in any language")
    return load_plugin("agents", "kubernetes").template(
        path, () if command is None else command.words, api, start_seconds
    )


def _fields(texts: Sequence[str]) -> dict[str, str]:
    if wrong := [text for text in texts if not all(text.partition("="))]:
        raise ConfigError(f"--variable {wrong[0]!r} has no field; write VARIABLE=FIELD")
    return dict(text.split("=", 1) for text in texts)


async def _start_runner(runner: Runner, store: LightningStoreClient) -> None:
    """Import the agent, and at the same time check that the server is there and accepts the token. Where nothing was
    said, model calls are redirected to the server if it has a model, else only if the resources of a rollout say so.
    Raises StoreServerError if no server answers within a minute, so that a wrong URL is noticed soon."""

    async def set_redirect() -> None:
        if runner.redirect is None:
            runner.redirect = await has_model(store.url, store.token) or None

    await set_redirect()
    runner.start_hosts()
    try:
        async with open_named(store.url, store.token) as probe:
            await probe.query_queues()
    except StoreAuthError:
        raise
    except StoreServerError as error:
        logger.warning("%s; waiting for it", error)
        await store.query_queues()
    await set_redirect()
    await runner.start()
