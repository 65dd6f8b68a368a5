"""`agl runner`: run an agent on the rollouts of a server."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from agentlightning.cli.access_token import hide_token
from agentlightning.cli.main import Output, reported
from agentlightning.cli.train import Agent, Json, Reward, Token

if TYPE_CHECKING:
    from agentlightning.runner import Runner
    from agentlightning.store.base import LightningStoreBase

logger = logging.getLogger(__name__)

LogFormat = Annotated[Literal["text", "json"], typer.Option(help="How the log on stderr is written.")]


def register(app: typer.Typer) -> None:
    app.command("runner")(runner)


def runner(
    server: Annotated[
        str | None,
        typer.Option(
            envvar="AGL_SERVER",
            help="Where `agl serve` listens: http://HOST:PORT (else AGL_SERVER_HOST and AGL_SERVER_PORT).",
            show_default=False,
        ),
    ] = None,
    agent: Agent = None,
    reward: Reward = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Attempts under way at once.")] = 32,
    hosts: Annotated[int, typer.Option(min=1, help="Processes that run Python agents.")] = 1,
    fresh_process: Annotated[
        bool, typer.Option("--fresh-process", help="A process of its own for every attempt, gone with it.")
    ] = False,
    queue: Annotated[list[str] | None, typer.Option(help="Claim from this queue only; may be given again.")] = None,
    token: Token = None,
    worker_id: Annotated[str | None, typer.Option(help="Its name in the store (default: host and process).")] = None,
    lease: Annotated[
        float, typer.Option(min=1, help="Seconds of silence after which others get this runner's rollouts.")
    ] = 30.0,
    max_rollouts: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="VARIABLE=FIELD: a variable that holds a field of a dict task.")
    ] = None,
    hide: Annotated[
        list[str] | None,
        typer.Option(help="A field of a dict task that only the reward function is given; may be given again."),
    ] = None,
    cwd: Annotated[Path | None, typer.Option(help="Where the agent runs.")] = None,
    log: Annotated[Path | None, typer.Option(help="Where what the agent prints goes (default: stderr).")] = None,
    redirect: Annotated[
        bool | None,
        typer.Option(
            help="Lead the agent's model calls to the server (default: where it has a model; a training run's rollouts "
            "are led to that run)."
        ),
    ] = None,
    drain_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="How long attempts have to end after SIGTERM (default: the time they take)."),
    ] = None,
    patience: Annotated[float, typer.Option(min=0, help="Seconds the server may be away.")] = 600.0,
    log_format: LogFormat = "text",
    as_json: Json = False,
) -> None:
    """Run an agent on the rollouts of a server, until it is told to stop.

    SIGTERM or Ctrl-C: claim no more, let what runs end, report, exit 0. Again: what runs is stopped and queued again.
    """
    output = Output(as_json)
    with reported(output):
        from agentlightning.observability import logs

        logs.configure(log_format, secret=token)
        hide_token()
        options = _Options(
            server=_address(server),
            agent=agent,
            reward=reward,
            token=token or None,
            redirect=redirect,
            drain_seconds=drain_seconds,
            patience=patience,
            runner={
                "concurrency": concurrency,
                "hosts": hosts,
                "fresh_process": fresh_process,
                "queues": queue or None,
                "worker_id": worker_id,
                "lease_seconds": lease,
                "max_rollouts": max_rollouts,
                "env": _fields(env),
                "hide": tuple(hide or ()),
                "cwd": cwd,
                "log": log,
            },
        )
        record = _uvloop_run(options, output)
        output.finish(record, lambda console: _show(record, console))


def _address(server: str | None) -> str:
    """Where the server is. Raises ConfigError where nothing says it."""
    if server:
        return server.rstrip("/")
    host, port = os.environ.get("AGL_SERVER_HOST"), os.environ.get("AGL_SERVER_PORT")
    if not host and not port:
        from agentlightning.errors import ConfigError

        raise ConfigError("which server is meant? Give --server http://HOST:PORT, or set AGL_SERVER")
    return f"http://{host or '127.0.0.1'}:{port or 4747}"


@dataclass(frozen=True, slots=True)
class _Options:
    server: str
    agent: str | None
    reward: str | None
    token: str | None
    redirect: bool | None
    drain_seconds: float | None
    patience: float
    runner: Mapping[str, Any]


def _fields(given: list[str] | None) -> dict[str, str] | None:
    from agentlightning.errors import ConfigError

    fields = dict[str, str]()
    for text in given or []:
        name, equals, key = text.partition("=")
        if not equals or not name or not key:
            raise ConfigError(f"--env {text!r} names no field; write VARIABLE=FIELD")
        fields[name] = key
    return fields or None


def _uvloop_run(options: _Options, output: Output) -> dict[str, Any]:
    import uvloop

    return uvloop.run(_run(options, output))


async def _run(options: _Options, output: Output) -> dict[str, Any]:
    from agentlightning.cli.stop_signals import Signals

    async with AsyncExitStack() as stack:
        signals = Signals()
        signals.install()
        runner = _make(options, stack)
        record = {"worker_id": runner.worker_id}
        if await signals.while_running(_start(options, runner)):
            return record
        signals.on_second(runner.stop_at_once)
        output.console.print(f"{runner.worker_id} runs {runner.pool.agent} for {options.server}", markup=False)
        if await signals.while_running(runner.wait()):
            left = runner.statistics.running
            output.console.print(f"stopping; {left} attempts are under way (again to stop them and queue them again)")
        await runner.stop(options.drain_seconds)
        return {**record, **asdict(runner.statistics)}


def _make(options: _Options, stack: AsyncExitStack) -> Runner:
    from agentlightning.attempt_address import attempt_secret
    from agentlightning.errors import ConfigError
    from agentlightning.runner import Runner
    from agentlightning.store.http.client import LightningStoreClient

    if options.agent is None:
        raise ConfigError("agl runner needs --agent: module:name, path/file.py:name, or a command line")
    store = LightningStoreClient(options.server, options.token)
    stack.push_async_callback(store.close)
    runner = Runner(
        store,
        options.agent,
        secret=attempt_secret(options.token),
        server_url=options.server,
        reward=options.reward,
        redirect=options.redirect,
        poll_seconds=POLL_SECONDS,
        patience=options.patience,
        **options.runner,
    )
    stack.push_async_callback(runner.stop, 0)
    return runner


async def _start(options: _Options, runner: Runner) -> None:
    """Import the agent, and meanwhile see whether there is a server that lets us in."""
    runner.start_hosts(await _leads(options))
    await _find_server(options, runner.store)
    await runner.start(redirect=await _leads(options))


async def _leads(options: _Options) -> bool | None:
    """Whether model calls are led to the server, where nothing was said; None: only where a rollout's resources say."""
    return (options.redirect is None and await has_model(options.server, options.token)) or None


async def _find_server(options: _Options, store: LightningStoreBase) -> None:
    """Raises StoreServerError where there is none within a minute: a mistake in the URL must not take longer."""
    from agentlightning.errors import StoreAuthError, StoreServerError
    from agentlightning.store.http.client import LightningStoreClient

    probe = LightningStoreClient(options.server, options.token, patience=1.0)
    try:
        await probe.query_queues()
    except StoreAuthError:
        raise
    except StoreServerError as error:
        logger.warning("%s; waiting for it", error)
        await store.query_queues()
    finally:
        await probe.close()


POLL_SECONDS = 10.0
"""How long one claim waits: a thousand idle runners then ask a hundred times a second."""


async def has_model(server: str, token: str | None) -> bool:
    """Whether the server, whose access token this is, answers model calls."""
    import httpx

    async with httpx.AsyncClient(timeout=10) as client:
        try:
            reply = await client.get(
                f"{server}/v1/models", headers={"authorization": f"Bearer {token}"} if token else {}
            )
            said = reply.json()
            return reply.status_code == 200 and bool(said.get("data") or said.get("patterns"))
        except (httpx.HTTPError, ValueError, AttributeError):
            return False


def _show(record: Mapping[str, Any], console: Console) -> None:
    counts = ", ".join(f"{number} {name}" for name, number in record.items() if name != "worker_id" and number)
    console.print(f"{record['worker_id']} has stopped: {counts or 'nothing was done'}", markup=False)
