"""`agl run`: any command, run as it always is, as one recorded rollout."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import orjson
import typer
from rich.console import Console

from agentlightning.cli.access_token import hide_token
from agentlightning.cli.child_process import Child
from agentlightning.cli.main import Output, reported

if TYPE_CHECKING:
    from agentlightning.errors import AgentError
    from agentlightning.gateway.config import GatewayConfig
    from agentlightning.rollouts import AttemptedRollout, AttemptStatus
    from agentlightning.runner.agents.reward import Reward as RewardValue
    from agentlightning.runner.agents.reward import RewardFunction
    from agentlightning.server.app import Server
    from agentlightning.span import Span
    from agentlightning.store.base import LightningStoreBase

LEASE_SECONDS: Final = 30.0
"""Silent for longer (because it was killed, say), the rollout has failed."""
BEAT_SECONDS: Final = 5.0
SECRET_ENDINGS: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def register(app: typer.Typer) -> None:
    app.command("run", context_settings={"allow_interspersed_args": False})(run)


def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.", show_default=False)],
    model: Annotated[
        list[str] | None, typer.Option(help="[NAME=]DIR: a model to answer its calls; may be given again.")
    ] = None,
    routes: Annotated[
        Path | None,
        typer.Option(help="TOML or JSON: which calls go to which model or provider, and budgets.", show_default=False),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="Record at this server, which answers the calls.", show_default=False)
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="AGL_TOKEN", help="The server's access token.", show_default=False)
    ] = None,
    db: Annotated[
        str | None,
        typer.Option(help="A SQLite file, or postgresql://... (default: .agentlightning/store.db)", show_default=False),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="What the rollout is about: JSON or text, in AGL_TASK too.", show_default=False)
    ] = None,
    task_file: Annotated[
        Path | None, typer.Option("--input", help="A file that holds the task.", show_default=False)
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="A number, or module:name or path/file.py:name of (task, output) -> number."),
    ] = None,
    mode: Annotated[Literal["train", "val", "test"] | None, typer.Option(help="The rollout's mode.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0.001, help="Seconds after which the command is ended.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, as the last line.")] = False,
) -> None:
    """Run a command as one recorded rollout: agl run -- COMMAND ...

    Its model calls go where --model or --routes say; without them, to the providers that its environment has keys or
    URLs of. Terminal, input, output, signals and exit code are the command's own; the summary is on stderr.
    """
    output = Output(as_json)
    with reported(output):
        import uvloop

        hide_token()
        options = Options(
            command=tuple(command),
            models=tuple(model or ()),
            routes=routes,
            server=None if server is None else server.rstrip("/"),
            token=token or None,
            db=db,
            task=_task(task, task_file),
            reward=None if reward is None else _reward(reward),
            mode=mode,
            timeout=timeout,
        )
        logging.getLogger("agentlightning").setLevel(logging.CRITICAL)  # the terminal is the command's
        summary = uvloop.run(_run(options))
        sys.stdout.flush()
        if as_json:
            output.finish(asdict(summary), lambda console: None)
        else:
            _show(summary, Console(stderr=True, highlight=False, soft_wrap=True))
    raise typer.Exit(summary.exit_code)


@dataclass(frozen=True, slots=True)
class Options:
    """What `agl run` was told."""

    command: tuple[str, ...]
    models: tuple[str, ...]
    routes: Path | None
    server: str | None
    token: str | None
    db: str | None
    task: Any
    """None: there is none."""
    reward: float | RewardFunction | None
    mode: Literal["train", "val", "test"] | None
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of it."""

    rollout_id: str
    attempt_id: str
    status: str
    exit_code: int
    seconds: float
    calls: int
    failed_calls: int
    input_tokens: int
    output_tokens: int
    dollars: float
    """At the prices the providers are configured with."""
    agents: list[str]
    reward: RewardValue | None
    store: str
    redirected: bool
    """Whether the command was led here with its model calls."""
    error: str | None = None


def _task(text: str | None, file: Path | None) -> Any:
    from agentlightning.errors import ConfigError

    if text is not None and file is not None:
        raise ConfigError("--task and --input both give the task; leave one out")
    if file is not None:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--input {file} cannot be read: {error}") from error
    if text is None:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _reward(given: str) -> float | RewardFunction:
    from agentlightning.runner.agents.agent import load_object
    from agentlightning.runner.agents.reward import RewardFunction, check_reward
    from agentlightning.runner.agents.spec import function_spec

    try:
        number = float(given)
    except ValueError:
        return RewardFunction.of(load_object(function_spec(given), "reward"))
    checked = check_reward(number, "--reward")
    assert isinstance(checked, float)
    return checked


# -- where it is recorded ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rollout is recorded, and who answers its calls."""

    store: LightningStoreBase
    url: str
    secret: str
    name: str
    """What people call the store."""
    redirect: bool
    """Whether the command's model calls go to `url`."""
    model: str | None = None
    """What the command may ask for; None: what it always asks for."""
    server: Server | None = None
    """Our own."""


async def _open(options: Options, stack: AsyncExitStack) -> Place:
    from agentlightning.errors import ConfigError

    if options.server is None:
        return await _open_own(options, stack)
    if options.models or options.routes or options.db:
        raise ConfigError("--server records and answers by itself; leave out --model, --routes and --db")
    return await _open_remote(options.server, options.token, stack)


async def _open_remote(url: str, token: str | None, stack: AsyncExitStack) -> Place:
    from agentlightning.attempt_address import attempt_secret
    from agentlightning.cli.runner import has_model
    from agentlightning.store.http.client import LightningStoreClient

    store = LightningStoreClient(url, token, patience=5.0)
    stack.push_async_callback(store.close)
    await store.query_queues()
    return Place(store, url, attempt_secret(token), url, await has_model(url, token))


async def _open_own(options: Options, stack: AsyncExitStack) -> Place:
    """A store, and a server that only the command knows of: without its token or an attempt's id nobody can use it."""
    from agentlightning.attempt_address import attempt_secret
    from agentlightning.cli.serve import DEFAULT_DB, beside, open_engines, open_store, read_routing, without_password
    from agentlightning.gateway.config import GatewayConfig
    from agentlightning.gateway.recording import raw_exchange
    from agentlightning.server.serve import serve
    from agentlightning.store.journal.store import take_over

    config = _config(options, read_routing)
    engines = await open_engines(options.models, config or GatewayConfig(), stack)
    first = next(iter(engines), None)
    store = open_store(options.db)
    stack.push_async_callback(store.close)
    await take_over(store, raw_exchange.read)
    token = secrets.token_urlsafe(24)
    secret = attempt_secret(token)
    spent = beside(options.db, ".spent")
    serving = serve(store, engines, secret=secret, token=token, routing=config, budget_file=spent, grace_seconds=5)
    server = await stack.enter_async_context(serving)
    redirect = first is not None or config is not None
    return Place(store, server.url, secret, without_password(options.db or DEFAULT_DB), redirect, first, server)


def _config(options: Options, read: Any) -> GatewayConfig | None:
    from agentlightning.cli.environment_providers import inherited_config

    if options.routes is not None:
        return read(options.routes)
    return None if options.models else inherited_config(os.environ)


# -- the rollout -------------------------------------------------------------------------------------------------------


async def _run(options: Options) -> Summary:
    from agentlightning.errors import AgentError

    if shutil.which(options.command[0]) is None:
        raise AgentError(f"there is no program {options.command[0]!r} on the PATH; nothing was run")
    async with AsyncExitStack() as stack:
        place = await _open(options, stack)
        worker_id = f"run-{socket.gethostname()}-{secrets.token_hex(8)}"
        shown = _without_secrets(options.command, os.environ)
        started = await place.store.start_rollout(
            {"command": shown} if options.task is None else options.task,
            options.mode,
            metadata={"source": "agl run", "command": shlex.join(shown)},
            worker_id=worker_id,
        )
        await _keep_alive(place.store, worker_id, stack)
        return await _execute(options, place, started, worker_id)


async def _keep_alive(store: LightningStoreBase, worker_id: str, stack: AsyncExitStack) -> None:
    import asyncio

    async def beat() -> None:
        from agentlightning.errors import StoreError

        while True:
            with suppress(StoreError):  # it is away for a moment; the lease says for how long it may be
                await store.update_worker(worker_id, lease_seconds=LEASE_SECONDS)
            await asyncio.sleep(BEAT_SECONDS)

    await store.update_worker(worker_id, lease_seconds=LEASE_SECONDS)
    beating = asyncio.create_task(beat())
    stack.callback(beating.cancel)


async def _execute(options: Options, place: Place, started: AttemptedRollout, worker_id: str) -> Summary:
    from agentlightning.errors import AgentError, Failure

    ids = started.rollout_id, started.attempt.attempt_id
    began = time.monotonic()
    child = Child(
        _led(options.command, place, *ids) if place.redirect else options.command,
        _environment(options, place, *ids, worker_id),
        keep_output=options.reward is not None and not isinstance(options.reward, float | int),
    )
    error: AgentError | None = None
    try:
        code = await child.run(options.timeout)
        error = _failure(options, child)
        judged = await _judge(options, place.store, started, child, error)
    except AgentError as failure:
        code, error, judged = 127, failure, None
    if place.server is not None:
        await place.server.stop()  # once it has, every call is recorded
    if judged is not None and error is None:
        error, code = judged, code or 1
    metadata: dict[str, Any] = {"exit_code": code}
    if error is not None:
        metadata["error"] = asdict(Failure.of(error.with_traceback(None)))
    status: AttemptStatus = "timeout" if child.timed_out else "failed" if error is not None else "succeeded"
    await place.store.update_attempt(*ids, status=status, metadata=metadata)
    spans = await place.store.query_spans(*ids)
    return _summary(spans, ids, status, code, time.monotonic() - began, place, error)


def _failure(options: Options, child: Child) -> AgentError | None:
    from agentlightning.errors import AgentError, AgentTimeoutError
    from agentlightning.runner.agents.command import describe_exit

    name = options.command[0]
    if child.timed_out:
        return AgentTimeoutError(f"{name} did not end within its {options.timeout:g} s and was stopped")
    return AgentError(f"{name} {describe_exit(child.returncode)}") if child.returncode else None


async def _judge(
    options: Options, store: LightningStoreBase, started: AttemptedRollout, child: Child, error: AgentError | None
) -> AgentError | None:
    """Record the reward that was asked for. A command that failed has none, unless a number was given for it. Returns
    why there is none."""
    import asyncio
    import inspect

    from agentlightning.errors import AgentError, RewardError
    from agentlightning.ingest.agent_events import read_event
    from agentlightning.runner.agents.arguments import Invocation
    from agentlightning.runner.agents.reward import check_reward

    judge = options.reward
    if judge is None or (error is not None and not isinstance(judge, float | int)):
        return None
    if isinstance(judge, float | int):
        value: RewardValue = judge
    else:
        call = Invocation(started, {}, {}, started.input)
        try:
            # In a thread: one that asks a model must not hold up the heartbeat, nor our own server.
            found = await asyncio.to_thread(judge.start, call, child.output.decode(errors="replace"))
            value = check_reward(await found if inspect.isawaitable(found) else found, judge.source)
        except (AgentError, RewardError) as failure:
            return AgentError(str(failure))
        except Exception as failure:  # noqa: BLE001  the boundary to a user's function
            return AgentError(f"{judge.source} raised {type(failure).__name__}: {failure}")
    event = orjson.dumps({"event_type": "reward", "data": {"value": value}})
    await store.add_span(read_event(event, started.rollout_id, started.attempt.attempt_id))
    return None


def _environment(options: Options, place: Place, rollout_id: str, attempt_id: str, worker_id: str) -> dict[str, str]:
    from agentlightning.attempt_variables import attempt_environment, telemetry_opt_outs, worker_environment

    own = {name: value for name, value in os.environ.items() if name != "AGL_TOKEN"}
    own |= telemetry_opt_outs(own)
    own |= attempt_environment(place.url, place.secret, rollout_id, attempt_id, redirect=place.redirect)
    if place.redirect:
        own |= worker_environment(place.url, place.secret, worker_id)
        if "ANTHROPIC_AUTH_TOKEN" in own:  # Claude Code takes it before the key
            own["ANTHROPIC_AUTH_TOKEN"] = own["AGL_KEY"]
        if place.model is not None:
            own["AGL_MODEL"] = place.model
    if options.task is not None:
        own["AGL_TASK"] = orjson.dumps(options.task).decode()
    return own


def _led(command: Sequence[str], place: Place, rollout_id: str, attempt_id: str) -> tuple[str, ...]:
    """The command, with what it takes to lead one that reads no variable: Codex, unless it is told its provider."""
    from agentlightning.attempt_address import attempt_path

    if Path(command[0]).name != "codex" or any("model_provider" in word or "base_url" in word for word in command):
        return tuple(command)
    base_url = f"{place.url}{attempt_path(rollout_id, attempt_id)}/v1"
    provider = f'{{name="Agent Lightning", base_url="{base_url}", env_key="AGL_KEY", wire_api="responses"}}'
    settings = ('model_provider="agentlightning"', f"model_providers.agentlightning={provider}")
    return (command[0], *(word for setting in settings for word in ("-c", setting)), *command[1:])


def _without_secrets(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command as it may be kept: what the environment holds as a key or a token is named instead."""
    hidden = {
        value: name for name, value in environment.items() if len(value) >= 8 and name.upper().endswith(SECRET_ENDINGS)
    }
    kept = list(words)
    for value, name in hidden.items():
        kept = [word.replace(value, f"${name}") for word in kept]
    return kept


# -- what its user reads -----------------------------------------------------------------------------------------------


def _summary(
    spans: Sequence[Span],
    ids: tuple[str, str],
    status: str,
    code: int,
    seconds: float,
    place: Place,
    error: AgentError | None,
) -> Summary:
    from agentlightning import span as names
    from agentlightning.tracing.rewards import find_final_reward

    calls = [span for span in spans if names.ATTRIBUTION in span.attributes]
    agents = {span.attributes[names.AGENT_NAME]: None for span in calls if names.AGENT_NAME in span.attributes}

    def total(name: str) -> Any:
        return sum(span.attributes.get(name) or 0 for span in calls)

    return Summary(
        *ids,
        status,
        code,
        round(seconds, 3),
        len(calls),
        sum(span.status_code == "ERROR" for span in calls),
        total(names.INPUT_TOKENS),
        total(names.OUTPUT_TOKENS),
        float(total(names.COST)),
        list(agents),
        find_final_reward(spans),
        place.name,
        place.redirect,
        None if error is None else str(error),
    )


def _where(store: str) -> str:
    from agentlightning.cli.serve import DEFAULT_DB

    if store == DEFAULT_DB:
        return ""
    return f" --server {store}" if store.startswith("http") else f" --store {store}"


def _show(summary: Summary, console: Console) -> None:
    failed = f" ({summary.failed_calls} failed)" if summary.failed_calls else ""
    cost = f", ${summary.dollars:.4f}" if summary.dollars else ""
    calls = f"{summary.calls}{failed}, {summary.input_tokens} tokens in, {summary.output_tokens} out{cost}"
    if not summary.redirected:
        calls = "none recorded: give --model or --routes, or the key of a provider (OPENAI_API_KEY, ANTHROPIC_API_KEY)"
    lines = {
        "rollout": f"{summary.rollout_id} {summary.status} in {summary.seconds:.1f} s, in {summary.store}",
        "calls": calls,
        "agents": ", ".join(summary.agents),
        "reward": "none" if summary.reward is None else str(summary.reward),
        "error": summary.error or "",
        "see": f"agl store show {summary.rollout_id}{_where(summary.store)}",
    }
    for name, text in lines.items():
        if text:
            console.print(f"agl: {name:<8} {text}", markup=False)
