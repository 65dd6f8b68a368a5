"""`agl run`: runs any command, unchanged, as one recorded rollout."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from typer import Argument, Context, Option

from agentlightning.attempt_address import attempt_path, attempt_secret
from agentlightning.attempt_variables import agent_process_environment, attempt_environment, worker_environment
from agentlightning.cli.options import SERVERS, Serving, database_name, has_model, hide_token
from agentlightning.cli.output import Result, agl, plain_console
from agentlightning.errors import AgentError, AgentTimeoutError, ConfigError, Failure, RewardError, StoreError
from agentlightning.ingest.agent_events import read_event
from agentlightning.rollouts import AttemptedRollout, AttemptStatus, RolloutMode
from agentlightning.runner.agents.agent import function_spec, load_object
from agentlightning.runner.agents.arguments import Invocation, RewardFunction
from agentlightning.runner.agents.command import describe_exit, task_variable
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.rewards import check_reward, find_final_reward
from agentlightning.trajectory import Reward as RewardValue
from agentlightning.util.event_loop import in_background, result_of
from agentlightning.util.json_values import dumps, loads

if TYPE_CHECKING:
    from agentlightning.server.app import Server


LEASE_SECONDS = 30.0
"""If no heartbeat arrives for this long (because the process was killed, say), the rollout fails."""
HEARTBEAT_SECONDS = 5.0
SECRET_ENDINGS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
CALLS = "model calls: "
NOT_REDIRECTED = (
    f"{CALLS}none recorded: give --model or --routes, or the key of a provider (OPENAI_API_KEY, ANTHROPIC_API_KEY)"
)
NO_CALLS = (
    f"{CALLS}none reached the gateway: look for an address in the code or its configuration (base_url=, api_base=, a"
    " .env file that overrides the environment), a cache of answers, or an error before the first call"
)
NO_REWARD = "no reward was recorded: give --reward file.py:function, or a number"


@dataclass(frozen=True)
class TargetOptions(Serving):
    """Where the rollout is recorded, and who answers its calls."""

    server: str | None = None
    """A server that records the rollout and answers its calls."""

    async def open(self, stack: AsyncExitStack) -> RecordingTarget:
        """A server elsewhere, or a store and a private server: it can be used only with its random token or the key of
        an attempt."""
        if self.server is not None:
            from agentlightning.store.http.client import LightningStoreClient

            url, token = self.server.rstrip("/"), self.token or None
            remote = LightningStoreClient(url, token, patience=5.0)
            stack.push_async_callback(remote.close)
            await remote.query_queues()
            return RecordingTarget(remote, url, attempt_secret(token), url, await has_model(url, token))
        from agentlightning.gateway.config import GatewayConfig
        from agentlightning.server.serve import serve
        from agentlightning.training.environment_providers import inherited_config

        inherited = None if self.models else inherited_config(os.environ)
        config = inherited if self.routes is None else self.routing
        engines = await self.open_engines(config or GatewayConfig(), stack)
        first, token = next(iter(engines), None), secrets.token_urlsafe(24)
        store, secret = self.open_store(), attempt_secret(token)
        stack.push_async_callback(store.close)
        spent = self.beside_store(".spent")
        serving = serve(store, engines, secret=secret, token=token, routing=config, budget_file=spent, grace_seconds=5)
        server = await stack.enter_async_context(serving)
        redirect = first is not None or config is not None
        return RecordingTarget(store, server.url, secret, database_name(self.store), redirect, first, server)


def run(
    ctx: Context,
    *,
    command: list[str] = Argument(),
    target: TargetOptions,
    task: str | None = None,
    task_file: Path | None = Option(None, "--input"),
    reward: str | None = None,
    mode: RolloutMode | None = None,
    timeout: float | None = Option(None, min=0.001),
) -> Result:
    """Run a command as one recorded rollout: agl run -- COMMAND ...

    Its model calls go where --model or --routes say; without them, to the providers whose keys or URLs its environment
    has. Terminal, input, output, signals and exit code are those of the command; the summary is on stderr.

    command: The command and its arguments, after --.
    task: The task of the rollout: JSON or text; also in AGL_TASK.
    task_file: A file that holds the task.
    reward: A number, or module:name or path/file.py:name of (task, output) -> number.
    mode: The mode of the rollout.
    timeout: Seconds after which the command is terminated.

    \b
    Examples:
      agl run -- python agent.py
      agl run --model smollm2-135m --task '{"n": 3}' --reward reward.py:score -- node agent.mjs
    """
    hide_token()
    given = _task(task, task_file)
    score = None if reward is None else _reward(reward)
    if target.server is not None and (target.models or target.routes or target.store):
        raise ConfigError("--server has its own store and models; leave out --model, --routes and --store")
    logging.getLogger("agentlightning").setLevel(logging.CRITICAL)  # the terminal belongs to the command
    record = uvloop.run(_run(command, target, given, score, mode, timeout))
    sys.stdout.flush()
    ctx.obj.console = plain_console(stderr=True)
    return Result(record, _summary_lines(record), status=record["exit_code"])


def _task(text: str | None, file: Path | None) -> Any:
    if file is not None:
        if text is not None:
            raise ConfigError("--task and --input both give the task; leave out one of them")
        try:
            text = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--input {file} cannot be read: {error}") from error
    try:
        return None if text is None else loads(text)
    except ValueError:
        return text


def _reward(text: str) -> RewardValue | RewardFunction:
    try:
        number = float(text)
    except ValueError:
        return RewardFunction.of(load_object(function_spec(text), "reward"))
    return check_reward(number, "--reward")


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


# -- the rollout -------------------------------------------------------------------------------------------------------


async def _run(
    command: Sequence[str],
    where: TargetOptions,
    task: Any,
    reward: RewardValue | RewardFunction | None,
    mode: RolloutMode | None,
    timeout: float | None,
) -> dict[str, Any]:
    if shutil.which(command[0]) is None:
        raise AgentError(f"there is no program {command[0]!r} on the PATH; nothing was run")
    async with AsyncExitStack() as stack:
        target = await where.open(stack)
        store, worker_id = target.store, f"run-{socket.gethostname()}-{secrets.token_hex(8)}"
        shown_command = _without_secrets(command, os.environ)
        started = await store.start_rollout(
            {"command": shown_command} if task is None else task,
            mode,
            metadata={"source": "agl run", "command": shlex.join(shown_command)},
            worker_id=worker_id,
        )
        await store.update_worker(worker_id, lease_seconds=LEASE_SECONDS)
        await stack.enter_async_context(in_background(_send_heartbeats(store, worker_id)))
        words = _redirected(command, target, *started.ids) if target.redirect else command
        environment, has_function = _environment(target, started, worker_id), isinstance(reward, RewardFunction)
        if task is not None:
            environment |= task_variable(task)
        began = time.monotonic()
        code, error, output = await run_command(words, environment, timeout, keep_output=has_function)
        if reward is not None and (error is None or not has_function):
            try:
                await record_reward(reward, store, started, output)
            except AgentError as failure:
                code, error = code or 1, error or failure
        seconds = time.monotonic() - began
        if target.server is not None:
            await target.server.stop()  # so that every call is recorded
        metadata: dict[str, Any] = {"exit_code": code}
        if error is not None:
            metadata["error"] = asdict(Failure.of(error.with_traceback(None)))
        timed_out = isinstance(error, AgentTimeoutError)
        status: AttemptStatus = "succeeded" if error is None else "timeout" if timed_out else "failed"
        await store.update_attempt(*started.ids, status=status, metadata=metadata)
        found = {
            "rollout_id": started.rollout_id,
            "attempt_id": started.attempt.attempt_id,
            "status": status,
            "exit_code": code,
            "seconds": round(seconds, 3),
            **_recorded(await store.query_spans(*started.ids)),
            "store": target.name,
            "redirected": target.redirect,
            "error": None if error is None else str(error),
        }
        return found | {"advice": run_advice(found)}


async def _send_heartbeats(store: LightningStoreBase, worker_id: str) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        with suppress(StoreError):  # the server may be away for as long as the lease
            await store.update_worker(worker_id, lease_seconds=LEASE_SECONDS)


async def record_reward(
    reward: RewardValue | RewardFunction, store: LightningStoreBase, started: AttemptedRollout, output: bytes
) -> None:
    """Record the reward of --reward. Raises AgentError where a function gives none."""
    if isinstance(reward, RewardFunction):
        try:
            # In a thread: a function that calls a model must not block the heartbeat and our server.
            call = Invocation(started, task=started.input)
            given = await asyncio.to_thread(reward.start, call, output.decode(errors="replace"))
            reward = check_reward(await result_of(given), reward.source)
        except (AgentError, RewardError) as failure:
            raise AgentError(str(failure)) from None
        except Exception as failure:  # noqa: BLE001  the boundary to a user's function
            raise AgentError(f"{reward.source} raised {type(failure).__name__}: {failure}") from None
    event = dumps({"event_type": "reward", "data": {"value": reward}})
    await store.add_span(read_event(event, *started.ids))


def _environment(target: RecordingTarget, started: AttemptedRollout, worker_id: str) -> dict[str, str]:
    from agentlightning.gateway.callers import keep_keys

    environment = agent_process_environment(os.environ)
    environment |= attempt_environment(target.url, target.secret, *started.ids, redirect=target.redirect)
    if target.redirect:
        environment |= worker_environment(target.url, target.secret, worker_id)
        keep_keys(environment, target.url, os.environ)
        if target.model is not None:
            environment["AGL_MODEL"] = target.model
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
    result = list(words)
    for name, value in environment.items():
        if len(value) >= 8 and name.upper().endswith(SECRET_ENDINGS):
            result = [word.replace(value, f"${name}") for word in result]
    return result


# -- output ------------------------------------------------------------------------------------------------------------


def _recorded(spans: Sequence[Span]) -> dict[str, Any]:
    """What was recorded."""
    from agentlightning import span as names

    calls = [span for span in spans if names.ATTRIBUTION in span.attributes]

    def total(name: str) -> Any:
        return sum(span.attributes.get(name) or 0 for span in calls)

    return {
        "calls": len(calls),
        "failed_calls": sum(span.status_code == "ERROR" for span in calls),
        "input_tokens": total(names.INPUT_TOKENS),
        "output_tokens": total(names.OUTPUT_TOKENS),
        "dollars": float(total(names.COST)),
        "agents": list(dict.fromkeys(filter(None, (span.attributes.get(names.AGENT_NAME) for span in calls)))),
        "reward": find_final_reward(spans),
    }


def run_advice(found: Mapping[str, Any]) -> list[str]:
    """What a recorded rollout lacks for training, the first cause first; empty where it lacks nothing."""
    advice: list[str] = []
    if not found["redirected"]:
        advice.append(NOT_REDIRECTED)
    elif not found["calls"]:  # before the error, which it often causes
        advice.append(NO_CALLS)
    elif found["failed_calls"]:
        advice.append(
            f"{found['failed_calls']} of {found['calls']} model calls failed; `agl store show` has their messages"
        )
    if found["error"] is not None:
        advice.append(f"{found['error']}; run the command by itself to see why")
    elif found["reward"] is None:
        advice.append(NO_REWARD)
    return advice


def _summary_lines(found: Mapping[str, Any]) -> Iterator[str]:
    failed = f" ({found['failed_calls']} failed)" if found["failed_calls"] else ""
    cost = f", ${found['dollars']:.4f}" if found["dollars"] else ""
    calls = f"{found['calls']}{failed}, {found['input_tokens']} tokens in, {found['output_tokens']} out{cost}"
    if (first := next(iter(found["advice"]), "")).startswith(CALLS):
        calls = first.removeprefix(CALLS)
    place = found["store"]
    option = "server" if place.startswith(SERVERS) else "store"
    lines = {
        "rollout": f"{found['rollout_id']} {found['status']} in {found['seconds']:.1f} s, in {place}",
        "calls": calls,
        "agents": ", ".join(found["agents"]),
        "reward": "none" if found["reward"] is None else str(found["reward"]),
        "error": found["error"],
        "see": agl("store", "show", found["rollout_id"], **{option: None if place == database_name(None) else place}),
    }
    yield from (f"agl: {name:<8} {text}" for name, text in lines.items() if text)


# -- the command ------------------------------------------------------------------------------------------------------
#
# The command stays in our process group, as a program that reads from the terminal must.


_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FORWARDED = tuple(number for number in signal.Signals if number.name in _NAMES)
"""Windows has only two of them."""
FROM_TERMINAL = frozenset(number for number in FORWARDED if number.name in ("SIGINT", "SIGQUIT"))
"""A terminal sends these to the whole process group, so that the command has them already."""
GRACE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL for a command that timed out."""
OUTPUT_BYTES = 1_000_000
"""How much of the end of the output is kept."""


async def run_command(
    words: Sequence[str], environment: Mapping[str, str], timeout: float | None, *, keep_output: bool
) -> tuple[int, AgentError | None, bytes]:
    """Run a command, and terminate it after `timeout` seconds. To keep its output, its stdout is a pipe whose data is
    passed on at once.

    Returns its exit code as a shell gives it (128 plus its number if a signal ended the command, 127 if it could not be
    started), why it failed, and the end of its stdout, if it was kept."""
    if sys.platform == "win32":
        raise AgentError("commands run on Linux and macOS only; on Windows, use WSL")
    loop, output = asyncio.get_running_loop(), bytearray()
    process: asyncio.subprocess.Process | None = None
    error: AgentError | None = None

    def forward(number: signal.Signals) -> None:
        if process is not None and not (number in FROM_TERMINAL and _has_terminal()):
            with suppress(ProcessLookupError):
                process.send_signal(number)

    async def pass_on(stream: asyncio.StreamReader) -> None:
        while data := await stream.read(65536):
            output.extend(data)
            del output[:-OUTPUT_BYTES]
            with suppress(BrokenPipeError):  # our reader is gone, which is no concern of the command
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()

    for number in FORWARDED:
        loop.add_signal_handler(number, forward, number)
    try:
        stdout = asyncio.subprocess.PIPE if keep_output else None
        process = await asyncio.create_subprocess_exec(*words, env=environment, stdout=stdout)
        passing = asyncio.create_task(pass_on(process.stdout)) if process.stdout else None
        try:
            async with asyncio.timeout(timeout):
                code = await process.wait()
        except TimeoutError:
            error = AgentTimeoutError(f"{words[0]} did not end within its {timeout:g} s and was stopped")
            code = await _terminate(process)
        if passing is not None:  # processes that it has left behind may keep the pipe open
            await asyncio.wait({passing}, timeout=1.0)
            passing.cancel()
    except OSError as failure:
        return 127, AgentError(f"{words[0]!r} cannot be started: {failure.strerror or failure}"), b""
    finally:
        for number in FORWARDED:
            loop.remove_signal_handler(number)
    if code and error is None:
        error = AgentError(f"{words[0]} {describe_exit(code)}")
    return 128 - code if code < 0 else code, error, bytes(output)


async def _terminate(process: asyncio.subprocess.Process) -> int:
    """Terminate the command and its descendants: SIGTERM, and SIGKILL after the grace period."""
    tree = {process.pid}
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        tree.update(descendants(process.pid))
        for pid in tree:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await process.wait()
    return await process.wait()


def descendants(pid: int) -> list[int]:
    """The descendants of a process; none where the system has no /proc."""
    parents = dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # the process has ended
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    tree = [pid]
    for ancestor in tree:
        tree += [child for child, parent in parents.items() if parent == ancestor]
    return tree[1:]


def _has_terminal() -> bool:
    """Whether we are in the foreground of a terminal, so that Ctrl-C goes to our whole process group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
