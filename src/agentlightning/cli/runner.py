"""`agl runner`: runs an agent on the rollouts of a server."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from agentlightning.cli.opening import has_model
from agentlightning.cli.options import Agent, LogFormat, Reward, Token
from agentlightning.cli.output import Output, Result, agl
from agentlightning.cli.process.access_token import hide_token
from agentlightning.errors import ConfigError, StoreAuthError, StoreServerError

if TYPE_CHECKING:
    from agentlightning.cli.process.stop_signals import StopSignals
    from agentlightning.runner import AgentLike, Runner
    from agentlightning.store.http.client import LightningStoreClient

logger = logging.getLogger(__name__)

POLL_SECONDS = 10.0
"""How long one claim waits: with a thousand idle runners, the server gets a hundred claims a second."""

ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--server",
        envvar="AGL_SERVER",
        help="The URL of `agl serve`: http://HOST:PORT (else AGL_SERVER_HOST and AGL_SERVER_PORT).",
        show_default=False,
    ),
]
Concurrency = Annotated[int, typer.Option(min=1, help="Concurrent attempts.")]
Hosts = Annotated[int, typer.Option(min=1, help="Processes that run Python agents.")]
FreshProcess = Annotated[bool, typer.Option("--fresh-process", help="Run every attempt in a new process.")]
Queues = Annotated[list[str] | None, typer.Option(help="Claim only from this queue; repeatable.")]
WorkerId = Annotated[str | None, typer.Option(help="Name of the worker in the store (default: host and process).")]
Lease = Annotated[
    float, typer.Option(min=1, help="Seconds without a heartbeat after which other runners get the rollouts.")
]
MaxRollouts = Annotated[int | None, typer.Option(min=1, help="Exit after this number of rollouts.")]
Variables = Annotated[
    list[str] | None,
    typer.Option("--variable", help="VARIABLE=FIELD: an environment variable with a field of a dict task; repeatable."),
]
Hide = Annotated[
    list[str] | None,
    typer.Option(help="A field of a dict task that only the reward function receives; repeatable."),
]
Cwd = Annotated[Path | None, typer.Option(help="Working directory of the agent.")]
Log = Annotated[Path | None, typer.Option(help="File for what the agent prints (default: stderr).")]
Redirect = Annotated[
    bool | None,
    typer.Option(
        help="Redirect the agent's model calls to the server (default: if it has a model; rollouts of a training run "
        "are redirected to that run)."
    ),
]
JobFile = Annotated[
    Path | None,
    typer.Option(
        "--job",
        help="Run each attempt in a Kubernetes Job made from this manifest (YAML or JSON); --agent is then the command "
        "of its container, by default that of the image.",
        show_default=False,
    ),
]
JobApi = Annotated[
    str | None,
    typer.Option(
        help="The URL of the Kubernetes API server, as that of `kubectl proxy`; by default that of this pod's cluster.",
        show_default=False,
    ),
]
JobStartSeconds = Annotated[float, typer.Option(min=1, help="Time in which the container of a Job has to start.")]
DrainSeconds = Annotated[
    float | None, typer.Option(min=0, help="Time for attempts to finish after SIGTERM (default: unlimited).")
]
Patience = Annotated[float, typer.Option(min=0, help="Seconds for which the server may be unreachable.")]


async def runner(
    ctx: typer.Context,
    server: ServerUrl = None,
    agent: Agent = None,
    reward: Reward = None,
    concurrency: Concurrency = 32,
    hosts: Hosts = 1,
    fresh_process: FreshProcess = False,
    queue: Queues = None,
    token: Token = None,
    worker_id: WorkerId = None,
    lease: Lease = 30.0,
    max_rollouts: MaxRollouts = None,
    variables: Variables = None,
    hide: Hide = None,
    cwd: Cwd = None,
    log: Log = None,
    redirect: Redirect = None,
    drain_seconds: DrainSeconds = None,
    patience: Patience = 600.0,
    job: JobFile = None,
    job_api: JobApi = None,
    job_start_seconds: JobStartSeconds = 600.0,
    log_format: LogFormat = "text",
) -> Result:
    """Run an agent on the rollouts of a server, until stopped.

    SIGTERM or Ctrl-C: claim no more rollouts, let running attempts finish, report, exit 0. Again: stop running attempts
    and requeue them.

    \b
    Examples:
      agl runner --server http://hub:4747 --agent agent.py:solve --reward reward.py:score
      agl runner --server http://hub:4747 --agent "node agent.mjs" --variable QUESTION=question --concurrency 8
    """
    from agentlightning.attempt_address import attempt_secret
    from agentlightning.cli.process.stop_signals import StopSignals
    from agentlightning.observability import logs
    from agentlightning.runner import Runner
    from agentlightning.store.http.client import LightningStoreClient

    output: Output = ctx.obj
    logs.configure(log_format, secret=token)
    hide_token()
    url = _server_url(server)
    given = agent if job is None else _job_template(job, agent, job_api, job_start_seconds)
    if given is None:
        raise ConfigError("agl runner needs --agent: module:name, path/file.py:name, or a command line, or --job")
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        store = LightningStoreClient(url, token or None)
        stack.push_async_callback(store.close)
        made = Runner(
            store,
            given,
            secret=attempt_secret(token or None),
            server_url=url,
            poll_seconds=POLL_SECONDS,
            patience=patience,
            concurrency=concurrency,
            hosts=hosts,
            fresh_process=fresh_process,
            queues=queue or None,
            worker_id=worker_id,
            lease_seconds=lease,
            max_rollouts=max_rollouts,
            env=_fields(variables or ()),
            hide=hide or (),
            cwd=cwd,
            log=log,
            reward=reward,
            redirect=redirect,
        )
        stack.push_async_callback(made.stop, 0)
        record = await _run(made, store, drain_seconds, signals, output)
    return Result(record, lambda console: _print_summary(record, console), [agl("store", "list", server=url)])


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
    from agentlightning.runner.agents.spec import CommandLine, agent_spec
    from agentlightning.util.plugins import load_plugin

    command = None if agent is None else agent_spec(agent)
    if command is not None and not isinstance(command, CommandLine):
        raise ConfigError(f"--agent {agent} is Python; with --job it is the command of the container, in any language")
    return load_plugin("agents", "kubernetes").template(
        path, () if command is None else command.words, api, start_seconds
    )


def _fields(texts: Sequence[str]) -> dict[str, str]:
    fields = dict[str, str]()
    for text in texts:
        name, equals, key = text.partition("=")
        if not equals or not name or not key:
            raise ConfigError(f"--variable {text!r} has no field; write VARIABLE=FIELD")
        fields[name] = key
    return fields


async def _run(
    runner: Runner, store: LightningStoreClient, drain_seconds: float | None, signals: StopSignals, output: Output
) -> dict[str, Any]:
    record = {"worker_id": runner.worker_id}
    if await signals.while_running(_start(runner, store)):
        return record
    signals.on_second(runner.stop_at_once)
    output.console.print(f"{runner.worker_id} runs {runner.pool.agent} for {store.url}")
    if await signals.while_running(runner.wait()):
        message = f"stopping; {runner.statistics.running} attempts are running (again to stop and requeue them)"
        output.console.print(message)
    await runner.stop(drain_seconds)
    return {**record, **asdict(runner.statistics)}


async def _start(runner: Runner, store: LightningStoreClient) -> None:
    """Import the agent, and at the same time check that the server is there and accepts the token."""
    await _set_redirect(runner, store)
    runner.start_hosts()
    await _check_server(store)
    await _set_redirect(runner, store)
    await runner.start()


async def _set_redirect(runner: Runner, store: LightningStoreClient) -> None:
    """Redirect model calls to the server if it has a model, where nothing was said: else only if the resources of a
    rollout say so."""
    if runner.redirect is None:
        runner.redirect = await has_model(store.url, store.token) or None


async def _check_server(store: LightningStoreClient) -> None:
    """Raises StoreServerError if no server answers within a minute, so that a wrong URL is noticed soon."""
    from agentlightning.store.http.client import LightningStoreClient

    probe = LightningStoreClient(store.url, store.token, patience=1.0)
    try:
        await probe.query_queues()
    except StoreAuthError:
        raise
    except StoreServerError as error:
        logger.warning("%s; waiting for it", error)
        await store.query_queues()
    finally:
        await probe.close()


def _print_summary(record: Mapping[str, Any], console: Console) -> None:
    counts = ", ".join(f"{number} {name}" for name, number in record.items() if name != "worker_id" and number)
    console.print(f"{record['worker_id']} has stopped: {counts or 'no attempts'}")
