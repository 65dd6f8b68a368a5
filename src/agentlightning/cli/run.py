"""`agl run`: runs any command, unchanged, as one recorded rollout."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import orjson
import typer
from rich.console import Console

from agentlightning.attempt_address import attempt_path, attempt_secret
from agentlightning.cli.options import (
    Database,
    Models,
    Routes,
    Token,
    database_name,
    file_beside_store,
    has_model,
    hide_token,
    open_engines,
    open_store,
    read_routing,
)
from agentlightning.cli.output import Result, agl, plain_console
from agentlightning.errors import AgentError, AgentTimeoutError, ConfigError, Failure, RewardError, StoreError
from agentlightning.util.event_loop import in_background
from agentlightning.util.json_values import dumps, loads

if TYPE_CHECKING:
    from agentlightning.rollouts import AttemptedRollout, AttemptStatus
    from agentlightning.runner.agents.reward import RewardFunction
    from agentlightning.server.app import Server
    from agentlightning.span import Span
    from agentlightning.store.base import LightningStoreBase
    from agentlightning.trajectory import Reward as RewardValue


LEASE_SECONDS: Final = 30.0
"""If no heartbeat arrives for this long (because the process was killed, say), the rollout fails."""
HEARTBEAT_SECONDS: Final = 5.0
SECRET_ENDINGS: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD")
CALLS: Final = "model calls: "
NOT_REDIRECTED: Final = (
    f"{CALLS}none recorded: give --model or --routes, or the key of a provider (OPENAI_API_KEY, ANTHROPIC_API_KEY)"
)
NO_CALLS: Final = (
    f"{CALLS}none reached the gateway: look for an address in the code or its configuration (base_url=, api_base=, a"
    " .env file that overrides the environment), a cache of answers, or an error before the first call"
)
NO_REWARD: Final = "no reward was recorded: give --reward file.py:function, or a number"

Mode = Literal["train", "val", "test"] | None
Reward = Annotated[
    str | None, typer.Option(help="A number, or module:name or path/file.py:name of (task, output) -> number.")
]


def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.", show_default=False)],
    models: Models = None,
    routes: Routes = None,
    server: Annotated[
        str | None,
        typer.Option("--server", help="A server that records the rollout and answers its calls.", show_default=False),
    ] = None,
    token: Token = None,
    store: Database = None,
    task: Annotated[
        str | None, typer.Option(help="The task of the rollout: JSON or text; also in AGL_TASK.", show_default=False)
    ] = None,
    task_file: Annotated[
        Path | None, typer.Option("--input", help="A file that holds the task.", show_default=False)
    ] = None,
    reward: Reward = None,
    mode: Annotated[Mode, typer.Option(help="The mode of the rollout.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds after which the command is terminated.")
    ] = None,
) -> Result:
    """Run a command as one recorded rollout: agl run -- COMMAND ...

    Its model calls go where --model or --routes say; without them, to the providers whose keys or URLs its environment
    has. Terminal, input, output, signals and exit code are those of the command; the summary is on stderr.

    \b
    Examples:
      agl run -- python agent.py
      agl run --model smollm2-135m --task '{"n": 3}' --reward reward.py:score -- node agent.mjs
    """
    import uvloop

    hide_token()
    given = _task(task, task_file)
    score = None if reward is None else _reward(reward)
    if server is None:
        open_target = partial(_open_own, models or (), routes, store)
    elif models or routes or store:
        raise ConfigError("--server has its own store and models; leave out --model, --routes and --store")
    else:
        open_target = partial(_open_remote, server.rstrip("/"), token or None)
    logging.getLogger("agentlightning").setLevel(logging.CRITICAL)  # the terminal belongs to the command
    summary = uvloop.run(_run(command, open_target, given, score, mode, timeout))
    sys.stdout.flush()
    errors = plain_console(stderr=True)
    return Result(asdict(summary), lambda _: _print_summary(summary, errors), status=summary.exit_code)


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of a run."""

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
    """At the configured prices of the providers."""
    agents: list[str]
    reward: RewardValue | None
    store: str
    redirected: bool
    """Whether the model calls of the command went to our gateway."""
    error: str | None = None
    advice: list[str] = field(default_factory=list[str])
    """What the rollout lacks for training, and what to do about it."""


def _task(text: str | None, file: Path | None) -> Any:
    if text is not None and file is not None:
        raise ConfigError("--task and --input both give the task; leave out one of them")
    if file is not None:
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--input {file} cannot be read: {error}") from error
    if text is None:
        return None
    try:
        return loads(text)
    except orjson.JSONDecodeError:
        return text


def _reward(text: str) -> float | RewardFunction:
    from agentlightning.runner.agents.agent import load_object
    from agentlightning.runner.agents.reward import RewardFunction
    from agentlightning.runner.agents.spec import function_spec
    from agentlightning.tracing.rewards import check_reward

    try:
        number = float(text)
    except ValueError:
        return RewardFunction.of(load_object(function_spec(text), "reward"))
    checked = check_reward(number, "--reward")
    assert isinstance(checked, float)
    return checked


# -- the recording target ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordingTarget:
    """The store that records the rollout, and the gateway for its model calls."""

    store: LightningStoreBase
    url: str
    secret: str
    name: str
    """The name of the store in messages."""
    redirect: bool
    """Whether the model calls of the command go to `url`."""
    model: str | None = None
    """The model name that the command should use; None: the one it uses anyway."""
    server: Server | None = None
    """The server, if it is ours."""


async def _open_remote(url: str, token: str | None, stack: AsyncExitStack) -> RecordingTarget:
    from agentlightning.store.http.client import LightningStoreClient

    store = LightningStoreClient(url, token, patience=5.0)
    stack.push_async_callback(store.close)
    await store.query_queues()
    return RecordingTarget(store, url, attempt_secret(token), url, await has_model(url, token))


async def _open_own(
    models: Sequence[str], routes: Path | None, place: str | None, stack: AsyncExitStack
) -> RecordingTarget:
    """A store, and a private server: it can be used only with its random token or the key of an attempt."""
    from agentlightning.gateway.config import GatewayConfig
    from agentlightning.server.serve import serve
    from agentlightning.training.environment_providers import inherited_config

    config = None if models else inherited_config(os.environ)
    if routes is not None:
        config = read_routing(routes)
    engines = await open_engines(models, config or GatewayConfig(), stack)
    first = next(iter(engines), None)
    store = open_store(place)
    stack.push_async_callback(store.close)
    token = secrets.token_urlsafe(24)
    secret = attempt_secret(token)
    spent = file_beside_store(place, ".spent")
    serving = serve(store, engines, secret=secret, token=token, routing=config, budget_file=spent, grace_seconds=5)
    server = await stack.enter_async_context(serving)
    redirect = first is not None or config is not None
    return RecordingTarget(store, server.url, secret, database_name(place), redirect, first, server)


# -- the rollout -------------------------------------------------------------------------------------------------------


async def _run(
    command: Sequence[str],
    open_target: Callable[[AsyncExitStack], Awaitable[RecordingTarget]],
    task: Any,
    reward: float | RewardFunction | None,
    mode: Mode,
    timeout: float | None,
) -> Summary:
    if shutil.which(command[0]) is None:
        raise AgentError(f"there is no program {command[0]!r} on the PATH; nothing was run")
    async with AsyncExitStack() as stack:
        target = await open_target(stack)
        worker_id = f"run-{socket.gethostname()}-{secrets.token_hex(8)}"
        shown_command = _without_secrets(command, os.environ)
        started = await target.store.start_rollout(
            {"command": shown_command} if task is None else task,
            mode,
            metadata={"source": "agl run", "command": shlex.join(shown_command)},
            worker_id=worker_id,
        )
        await target.store.update_worker(worker_id, lease_seconds=LEASE_SECONDS)
        await stack.enter_async_context(in_background(_send_heartbeats(target.store, worker_id)))
        ids = started.rollout_id, started.attempt.attempt_id
        child = ChildProcess(
            _redirected(command, target, *ids) if target.redirect else command,
            _environment(target, *ids, worker_id, task),
            keep_output=reward is not None and not isinstance(reward, float | int),
        )
        return await _execute(child, target, started, reward, timeout)


async def _send_heartbeats(store: LightningStoreBase, worker_id: str) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        with suppress(StoreError):  # the server may be away for as long as the lease
            await store.update_worker(worker_id, lease_seconds=LEASE_SECONDS)


async def _execute(
    child: ChildProcess,
    target: RecordingTarget,
    started: AttemptedRollout,
    reward: float | RewardFunction | None,
    timeout: float | None,
) -> Summary:
    ids = started.rollout_id, started.attempt.attempt_id
    started_at = time.monotonic()
    error: AgentError | None = None
    try:
        code = await child.run(timeout)
        error = _failure(child, timeout)
        reward_error = await _record_reward(reward, target.store, started, child, error)
    except AgentError as failure:
        code, error, reward_error = 127, failure, None
    if target.server is not None:
        await target.server.stop()  # so that every call is recorded
    if reward_error is not None and error is None:
        error, code = reward_error, code or 1
    metadata: dict[str, Any] = {"exit_code": code}
    if error is not None:
        metadata["error"] = asdict(Failure.of(error.with_traceback(None)))
    status: AttemptStatus = "timeout" if child.timed_out else "failed" if error is not None else "succeeded"
    await target.store.update_attempt(*ids, status=status, metadata=metadata)
    spans = await target.store.query_spans(*ids)
    return _summary(spans, ids, status, code, time.monotonic() - started_at, target, error)


def _failure(child: ChildProcess, timeout: float | None) -> AgentError | None:
    name = child.words[0]
    if child.timed_out:
        return AgentTimeoutError(f"{name} did not end within its {timeout:g} s and was stopped")
    if not child.returncode:
        return None
    from agentlightning.runner.agents.command import describe_exit

    return AgentError(f"{name} {describe_exit(child.returncode)}")


async def _record_reward(
    reward: float | RewardFunction | None,
    store: LightningStoreBase,
    started: AttemptedRollout,
    child: ChildProcess,
    error: AgentError | None,
) -> AgentError | None:
    """Record the reward of --reward. A command that failed has none, unless --reward is a number. Returns the error if
    there is no reward."""
    if reward is None or (error is not None and not isinstance(reward, float | int)):
        return None
    from agentlightning.ingest.agent_events import read_event
    from agentlightning.runner.agents.arguments import Invocation
    from agentlightning.tracing.rewards import check_reward

    if isinstance(reward, float | int):
        value: RewardValue = reward
    else:
        call = Invocation(started, {}, {}, started.input)
        try:
            # In a thread: a function that calls a model must not block the heartbeat and our server.
            result = await asyncio.to_thread(reward.start, call, child.output.decode(errors="replace"))
            value = check_reward(await result if inspect.isawaitable(result) else result, reward.source)
        except (AgentError, RewardError) as failure:
            return AgentError(str(failure))
        except Exception as failure:  # noqa: BLE001  the boundary to a user's function
            return AgentError(f"{reward.source} raised {type(failure).__name__}: {failure}")
    event = dumps({"event_type": "reward", "data": {"value": value}})
    await store.add_span(read_event(event, started.rollout_id, started.attempt.attempt_id))
    return None


def _environment(
    target: RecordingTarget, rollout_id: str, attempt_id: str, worker_id: str, task: Any
) -> dict[str, str]:
    from agentlightning.attempt_variables import attempt_environment, telemetry_opt_outs, worker_environment
    from agentlightning.gateway.callers import keep_keys

    environment = {name: value for name, value in os.environ.items() if name != "AGL_TOKEN"}
    environment |= telemetry_opt_outs(environment)
    environment |= attempt_environment(target.url, target.secret, rollout_id, attempt_id, redirect=target.redirect)
    if target.redirect:
        environment |= worker_environment(target.url, target.secret, worker_id)
        keep_keys(environment, target.url, os.environ)
        if target.model is not None:
            environment["AGL_MODEL"] = target.model
    if task is not None:
        environment["AGL_TASK"] = dumps(task).decode()
    return environment


def _redirected(command: Sequence[str], target: RecordingTarget, rollout_id: str, attempt_id: str) -> tuple[str, ...]:
    """The command, with the arguments that Codex needs, as it reads no variables, unless it has a provider already."""
    if Path(command[0]).name != "codex" or any("model_provider" in word or "base_url" in word for word in command):
        return tuple(command)
    base_url = f"{target.url}{attempt_path(rollout_id, attempt_id)}/v1"
    provider = f'{{name="Agent Lightning", base_url="{base_url}", env_key="AGL_KEY", wire_api="responses"}}'
    settings = ('model_provider="agentlightning"', f"model_providers.agentlightning={provider}")
    return (command[0], *(word for setting in settings for word in ("-c", setting)), *command[1:])


def _without_secrets(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command with the values of secret environment variables replaced by the names of these variables."""
    hidden = {
        value: name for name, value in environment.items() if len(value) >= 8 and name.upper().endswith(SECRET_ENDINGS)
    }
    result = list(words)
    for value, name in hidden.items():
        result = [word.replace(value, f"${name}") for word in result]
    return result


# -- output ------------------------------------------------------------------------------------------------------------


def _summary(
    spans: Sequence[Span],
    ids: tuple[str, str],
    status: str,
    code: int,
    seconds: float,
    target: RecordingTarget,
    error: AgentError | None,
) -> Summary:
    from agentlightning import span as names
    from agentlightning.tracing.rewards import find_final_reward

    calls = [span for span in spans if names.ATTRIBUTION in span.attributes]
    agents = {span.attributes[names.AGENT_NAME]: None for span in calls if names.AGENT_NAME in span.attributes}

    def total(name: str) -> Any:
        return sum(span.attributes.get(name) or 0 for span in calls)

    reward, message = find_final_reward(spans), None if error is None else str(error)
    failed = sum(span.status_code == "ERROR" for span in calls)
    advice = run_advice(
        error=message, redirected=target.redirect, calls=len(calls), failed_calls=failed, rewarded=reward is not None
    )
    return Summary(
        *ids,
        status,
        code,
        round(seconds, 3),
        len(calls),
        failed,
        total(names.INPUT_TOKENS),
        total(names.OUTPUT_TOKENS),
        float(total(names.COST)),
        list(agents),
        reward,
        target.name,
        target.redirect,
        message,
        advice,
    )


def run_advice(*, error: str | None, redirected: bool, calls: int, failed_calls: int, rewarded: bool) -> list[str]:
    """What a recorded rollout lacks for training, the first cause first; empty where it lacks nothing."""
    found: list[str] = []
    if not redirected:
        found.append(NOT_REDIRECTED)
    elif not calls:  # before the error, which it often causes
        found.append(NO_CALLS)
    elif failed_calls:
        found.append(f"{failed_calls} of {calls} model calls failed; `agl store show` has their messages")
    if error is not None:
        found.append(f"{error}; run the command by itself to see why")
    if not rewarded and error is None:
        found.append(NO_REWARD)
    return found


def _print_summary(summary: Summary, console: Console) -> None:
    failed = f" ({summary.failed_calls} failed)" if summary.failed_calls else ""
    cost = f", ${summary.dollars:.4f}" if summary.dollars else ""
    calls = f"{summary.calls}{failed}, {summary.input_tokens} tokens in, {summary.output_tokens} out{cost}"
    if not summary.redirected:
        calls = NOT_REDIRECTED.removeprefix(CALLS)
    elif not summary.calls:
        calls = NO_CALLS.removeprefix(CALLS)
    place = {} if summary.store == database_name(None) else {"store": summary.store}
    if summary.store.startswith("http"):
        place = {"server": summary.store}
    lines = {
        "rollout": f"{summary.rollout_id} {summary.status} in {summary.seconds:.1f} s, in {summary.store}",
        "calls": calls,
        "agents": ", ".join(summary.agents),
        "reward": "none" if summary.reward is None else str(summary.reward),
        "error": summary.error or "",
        "see": agl("store", "show", summary.rollout_id, **place),
    }
    for name, text in lines.items():
        if text:
            console.print(f"agl: {name:<8} {text}")


# -- the command ------------------------------------------------------------------------------------------------------
#
# The command stays in our process group, as a program that reads from the terminal must.


_NAMES: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FORWARDED: Final = tuple(signal.Signals[name] for name in _NAMES if name in signal.Signals.__members__)
"""Windows has only two of them."""
FROM_TERMINAL: Final = frozenset(number for number in FORWARDED if number.name in ("SIGINT", "SIGQUIT"))
"""A terminal sends these to the whole process group, so that the command has them already."""
GRACE_SECONDS: Final = 5.0
"""Time between SIGTERM and SIGKILL for a command that timed out."""
OUTPUT_BYTES: Final = 1_000_000
"""How much of the end of the output is kept."""


class ChildProcess:
    """A command. Call `run` once."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], *, keep_output: bool = False) -> None:
        self.words = tuple(words)
        self.output = b""
        """The end of its stdout, with `keep_output`; stdout is then a pipe whose data is passed on at once."""
        self.timed_out = False
        self.returncode = 0
        """After the end: its exit code, or the negative number of the signal that ended it."""
        self._environment = dict(environment)
        self._keep_output = keep_output
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, timeout: float | None = None) -> int:
        """The exit code; if a signal ended the command, 128 plus its number, as in a shell. The command is terminated
        after `timeout` seconds. Raises AgentError if it cannot be started."""
        if sys.platform == "win32":
            raise AgentError("commands run on Linux and macOS only; on Windows, use WSL")
        loop = asyncio.get_running_loop()
        stdout = asyncio.subprocess.PIPE if self._keep_output else None
        for number in FORWARDED:
            loop.add_signal_handler(number, self._forward, number)
        try:
            self._process = await asyncio.create_subprocess_exec(*self.words, env=self._environment, stdout=stdout)
            code = self.returncode = await self._wait(self._process, timeout)
        except OSError as error:
            raise AgentError(f"{self.words[0]!r} cannot be started: {error.strerror or error}") from error
        finally:
            for number in FORWARDED:
                loop.remove_signal_handler(number)
        return 128 - code if code < 0 else code

    async def _wait(self, process: asyncio.subprocess.Process, timeout: float | None) -> int:
        copying = asyncio.create_task(self._copy_output(process.stdout)) if process.stdout else None
        try:
            async with asyncio.timeout(timeout):
                code = await process.wait()
        except TimeoutError:
            self.timed_out = True
            code = await _terminate(process)
        if copying is not None:  # processes that it has left behind may keep the pipe open
            await asyncio.wait({copying}, timeout=1.0)
            copying.cancel()
        return code

    async def _copy_output(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(65536):
            self.output = (self.output + data)[-OUTPUT_BYTES:]
            with suppress(BrokenPipeError):  # our reader is gone, which is no concern of the command
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()

    def _forward(self, number: signal.Signals) -> None:
        process = self._process
        if process is None or (number in FROM_TERMINAL and _has_terminal()):
            return
        with suppress(ProcessLookupError):
            process.send_signal(number)


async def _terminate(process: asyncio.subprocess.Process) -> int:
    """Terminate the command and its descendants: SIGTERM, and SIGKILL after the grace period."""
    tree = descendants(process.pid)
    _signal([process.pid, *tree], signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(GRACE_SECONDS):
            await process.wait()
    alive = [process.pid, *descendants(process.pid)] if process.returncode is None else []
    _signal({*alive, *(pid for pid in tree if pid in _parents())}, signal.SIGKILL)
    return await process.wait()


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """The descendants of a process; none where the system has no /proc."""
    parents = _parents()
    tree = [pid]
    for ancestor in tree:
        tree += [child for child, parent in parents.items() if parent == ancestor]
    return tree[1:]


def _parents() -> dict[int, int]:
    """The parent of each process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # the process has ended
            fields = entry.read_text().rpartition(")")[2].split()
            parents[int(entry.parent.name)] = int(fields[1])
    return parents


def _has_terminal() -> bool:
    """Whether we are in the foreground of a terminal, so that Ctrl-C goes to our whole process group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
