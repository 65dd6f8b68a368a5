"""A host: the process that runs attempts of an agent; and the fork server, which imports the agent and forks hosts.

It runs many attempts at a time (async agents as tasks, commands and rewards in threads), or a single one on its main
thread, where it may change directory and handle signals, and where whatever has no context belongs to it. An attempt
that does so beside others is interrupted, and the runner repeats it in a process of its own. A host sends emitted spans
to the runner immediately, and the end of an attempt after all of its spans. This is the only place where an exception
of an agent becomes a record. The host exits when the runner closes its socket.

The fork server reads a `Load` message, imports the agent, then serves the runner's requests over the same socket. It
stays single-threaded, so that a fork is safe and takes milliseconds, and imports nothing heavy that the agent does not
import. When the runner disconnects, the hosts get SHUTDOWN_SECONDS to exit; then they are killed.

What an agent starts, such as the workers of a pool, ends with its host: a host is the leader of a process group, which
is ended after it. On Linux, processes that have left the group become children of the fork server and end with it.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import inspect
import logging
import math
import os
import re
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from io import TextIOWrapper
from queue import SimpleQueue
from typing import IO, Any, Final, NoReturn, cast

import orjson
from opentelemetry.sdk.trace import ReadableSpan

from agentlightning.attempt_variables import in_process_environment
from agentlightning.errors import AgentError, Failure, MissingRewardError
from agentlightning.resources import named_resources
from agentlightning.runner import attempt_environ
from agentlightning.runner.agents.agent import Agent, load_agent, load_object, user_traceback
from agentlightning.runner.agents.arguments import Invocation, OwnProcessNeededError, RewardFunction, bind_resources
from agentlightning.runner.agents.command import CommandError, signal_group, task_variable, wait_through_cancellation
from agentlightning.runner.hosts.messages import (
    Done,
    Exited,
    Fork,
    FrameDecoder,
    FromHost,
    Job,
    Load,
    MessageError,
    Program,
    Ready,
    Spans,
    Stopping,
    ToForkServer,
    ToHost,
    encode,
)
from agentlightning.span import JUDGE, REWARD_MISSING, Span
from agentlightning.tracing import client_headers
from agentlightning.tracing.agent_spans import sanitize_span
from agentlightning.tracing.emit import emit_annotation, emit_exception, emit_reward
from agentlightning.tracing.outbox import PostingSink, counters
from agentlightning.tracing.rewards import check_reward, looks_like_reward
from agentlightning.tracing.scope import inherited_scope, mark_owner, scope, serve_attempts
from agentlightning.tracing.tracer import flush, install_globally, to_span
from agentlightning.util.json_values import dumps, loads

logger = logging.getLogger(__name__)

OUTPUT_CHARACTERS: Final = 16_384
"""Maximum length of the output that is stored with the attempt."""
NEEDS_PROCESS: Final = (
    "main thread",
    "no current event loop in thread",
    "is bound to a different event loop",
    "attempt_ambiguous",
    "worker_ambiguous",
)
"""Parts of errors that an attempt alone in its process would not have raised."""
BARE: Final = re.compile("(OPENAI|ANTHROPIC|AGL)_(?!PATIENCE)|subprocess")
"""What differs between attempts."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What all hosts of a fork server share."""

    agent: Agent
    reward: RewardFunction | None
    load: Load


@dataclass(slots=True)
class _Sink:
    """Sends the spans of one attempt to the runner."""

    host: Host
    job: Job
    judge: bool = False
    """For the spans of a reward function, in the attempt that it scores: they are marked as not the agent's own."""
    remote: PostingSink | None = None
    """Used in processes forked from this one: two processes cannot write to one socket."""

    def put(self, spans: Sequence[Span]) -> None:
        if self.judge:
            spans = [replace(span, attributes={**span.attributes, JUDGE: True}) for span in spans]
        if os.getpid() == self.host.process:
            if self.job.attempt_id in self.host.running:
                self.host.send(Spans(self.job.attempt_id, tuple(spans)))
            else:
                late = f"Span {spans[0].name!r} has ended after its attempt and is dropped, as later ones are, too"
                counters.note("late", f"{late}; wait in the agent for what it has started")
        else:
            self.remote = self.remote or PostingSink(self.job.server_url, self.job.environment.get("AGL_KEY", ""))
            self.remote.put(spans)


class Host:
    """The single host of this process. `attempt_environ` and the tracer are installed already.

    It runs attempts at the same time, in one event loop and in threads; or `alone` a single one on the main thread,
    where signals and libraries that insist on it work.
    """

    def __init__(self, sock: socket.socket, setup: Setup, alone: bool) -> None:
        self._sock, self._setup, self._alone, self.process = sock, setup, alone, os.getpid()
        self.running: dict[str, Invocation] = {}
        self._sending = threading.Lock()
        self._loop = asyncio.new_event_loop()
        """One for agents and rewards: a client that is made once belongs to it."""
        self._threads = ThreadPoolExecutor(setup.load.slots, thread_name_prefix="agent")
        self._work = SimpleQueue[Coroutine[Any, Any, None]]()
        """Alone: what the main thread runs."""
        self._runner = asyncio.Runner(loop_factory=lambda: self._loop)
        """Alone: runs what it awaits; SIGINT cancels that."""
        serve_attempts(alone=alone, on_doubt=self._separate)
        if not alone:
            attempt_environ.process_state.on_change = self._refuse_change
            attempt_environ.process_state.on_bare_use = self._refuse_bare_use

    def serve(self) -> None:
        threading.Thread(target=self._receive, name="agl-host", daemon=True).start()
        if not self._alone:
            asyncio.set_event_loop(self._loop)
            self._loop.run_forever()
        while True:
            with suppress(StopIteration):
                self._work.get().send(None)  # no loop runs it, so what it awaits does not suspend it: see `_call`

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, message: FromHost) -> None:
        # Called from any thread, sends immediately: a reward is on its way before the agent makes its next call.
        data = _encoded(message)
        with suppress(BrokenPipeError, ConnectionResetError), self._sending:  # disconnected: `_receive` ends all
            self._sock.sendall(data)

    def _receive(self) -> None:
        """Handle messages until the runner disconnects. Then kill the commands and exit without waiting for threads.
        What else was started here, such as the workers of pools, goes with the process group."""
        frames = FrameDecoder[ToHost](ToHost)
        self.send(Ready())
        with suppress(ConnectionResetError):
            while data := self._sock.recv(1 << 18):
                for message in frames.feed(data):
                    self._handle(message)
        for invocation in list(self.running.values()):
            invocation.cancelled = True
            if invocation.group:
                signal_group(invocation.group, signal.SIGKILL)
            if invocation.program is not None:
                invocation.program.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _handle(self, message: ToHost) -> None:
        if isinstance(message, Job):
            task, hidden = message.rollout.input, self._setup.load.hidden
            if hidden and isinstance(task, dict):  # Else the reward function sees what the agent noted in its task.
                items = cast("dict[Any, Any]", task).items()
                task = {key: value for key, value in items if key not in hidden}
            invocation = Invocation(replace(message.rollout, input=task), {}, message.environment, task)
            invocation.on_program = partial(self._on_program, message.attempt_id)
            self.running[message.attempt_id] = invocation
            work = self._attempt(message, invocation)
            if self._alone:
                self._work.put(work)
            else:
                self._loop.call_soon_threadsafe(self._start, invocation, work)
        elif (invocation := self.running.get(message.attempt_id)) is not None:
            invocation.cancelled = True
            self._loop.call_soon_threadsafe(self._cancel, message.attempt_id, invocation)
            if invocation.program is not None:
                invocation.program.terminate()

    def _start(self, invocation: Invocation, work: Coroutine[Any, Any, None]) -> None:
        invocation.awaited = self._loop.create_task(work)

    def _cancel(self, attempt_id: str, invocation: Invocation) -> None:
        """Acknowledge that an attempt is to be stopped, and interrupt what it awaits."""
        self.send(Stopping(attempt_id))  # the loop is alive
        if invocation.awaited is not None:
            self._loop.call_soon(invocation.awaited.cancel)  # after its first step: else it could not end

    def _on_program(self, attempt_id: str, group: int) -> None:
        self.running[attempt_id].group = group
        self.send(Program(attempt_id, group))

    # -- one attempt -------------------------------------------------------------------------------------------------

    async def _attempt(self, job: Job, invocation: Invocation) -> None:
        """Error boundary: every exception of the agent becomes a record."""
        failure: Failure | None = None
        output: Any = None
        sink = _Sink(self, job)
        with scope(*job.rollout.ids, sink, address=job.server_url, key=job.environment.get("AGL_KEY", "")):
            try:
                output = shorten_output(await self._result(job, invocation, sink))
            except BaseException as error:  # noqa: BLE001  the only place where a failure of an agent becomes a record
                error = error.with_traceback(None) if isinstance(error, CommandError) else user_traceback(error)
                failure = Failure.of(error)
                if not self._alone:
                    invocation.needs_process = invocation.needs_process or _needs_process(error)
                if not invocation.cancelled and not invocation.needs_process:
                    emit_exception(error)
            with suppress(Exception, asyncio.CancelledError):  # of the agent's own exporters; the attempt ends anyway
                await self._call(flush)
        del self.running[job.attempt_id]
        self.send(Done(job.attempt_id, failure, output, invocation.needs_process))

    async def _result(self, job: Job, invocation: Invocation, sink: _Sink) -> Any:
        """The agent's return value, unless it was the reward. Rewards are recorded."""
        resources = named_resources.validate_python(job.resources)
        invocation.resources = bind_resources(resources, job.server_url, job.environment)
        fields = attempt_environ.task_variables(invocation.task, self._setup.load.fields)
        invocation.environment = {**fields, **job.environment}  # of a command, in its own process
        variables = fields | in_process_environment(job.environment, job.rollout.attempt.worker_id or "")
        variables |= task_variable(invocation.task)
        with attempt_environ.own_variables(variables) if self._alone else attempt_environ.overlay(variables):
            output = await self._call(self._setup.agent(invocation))
        if invocation.needs_process:
            raise OwnProcessNeededError(invocation.needs_process)
        if self._setup.reward is None:
            return _record_output(output, sink)
        # Outside of the attempt's environment, so that its own model calls are not redirected.
        given = replace(invocation, rollout=job.rollout, task=job.rollout.input, resources=resources)
        reward = self._setup.reward
        with scope(*job.rollout.ids, replace(sink, judge=True), "judge", address=job.server_url, role="judge"):
            try:
                value = check_reward(await self._call(reward.start, given, output), reward.source)
            except MissingRewardError as error:
                value = None
                emit_annotation({REWARD_MISSING: str(error)})
        if value is not None and not invocation.needs_process:
            emit_reward(value)
        return output

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call code of the user, and await what it returns, if that is to be awaited. A coroutine function is called
        here, any other in a thread, alone in this one. Does not return before the thread ends, even if cancelled."""
        if self._alone:
            value, error = _result_or_error(function, *args)
            if error is None and inspect.isawaitable(value):
                asyncio.set_event_loop(self._loop)  # for the reward function; not before, since agents close theirs
                return self._runner.run(self._wait_for(value), context=copy_context())
        elif inspect.iscoroutinefunction(function):
            return await function(*args)
        else:
            future = asyncio.wrap_future(self._threads.submit(_result_or_error, function, *args))
            cancelled = await wait_through_cancellation(future)
            value, error = future.result()
            error = cancelled or error
        if error is not None:
            raise error
        return await value if inspect.isawaitable(value) else value

    async def _wait_for(self, value: Any) -> Any:
        (invocation,) = self.running.values()
        invocation.awaited = asyncio.current_task()
        if invocation.cancelled:
            raise asyncio.CancelledError
        mark_owner()
        return await value

    # -- what attempts share -----------------------------------------------------------------------------------------

    def _separate(self, what: str, attempt_id: str | None = None) -> None:
        """This attempt, or all that run here, need processes of their own."""
        for each, invocation in list(self.running.items()) if os.getpid() == self.process else ():
            if attempt_id in (None, each):
                invocation.needs_process = what

    def _refuse_change(self, what: str) -> None:
        """Called before the state of this process changes. Raises where that is seen by other attempts."""
        if os.getpid() == self.process:
            inside = inherited_scope()
            self._separate(what, inside and inside.attempt_id)
            raise OwnProcessNeededError(f"{what} changes the process that this attempt shares with others")

    def _refuse_bare_use(self, what: str) -> None:
        """Called where code without variables of an attempt reads one of the process, or starts a program with them."""
        own = inherited_scope() is not None or threading.current_thread().name.startswith("agl-")
        if own or not self.running or not (BARE.match(what) or what in self._setup.load.fields):
            return
        self._separate(f"a thread without a context uses {what}")
        raise OwnProcessNeededError(f"{what} is used in a thread that has not the variables of any attempt")


def _encoded(message: FromHost) -> bytes:
    """Encode a message; spans with values that cannot be encoded are sanitized."""
    try:
        return encode(message)
    except MessageError as error:
        if isinstance(message, Spans):
            return encode(Spans(message.attempt_id, tuple(map(sanitize_span, message.spans))))
        if isinstance(message, Done):
            return encode(Done(message.attempt_id, Failure.of(error)))
        raise


def _result_or_error(function: Callable[..., Any], *args: Any) -> tuple[Any, BaseException | None]:
    # A future cannot carry every exception: StopIteration and KeyboardInterrupt would be lost.
    mark_owner()
    try:
        return function(*args), None
    except BaseException as error:  # noqa: BLE001  raised again by `_call`
        return None, error


def _needs_process(error: BaseException | None) -> str:
    """What an error says that an attempt alone in its process would not have raised; "" for others."""
    while error is not None:
        if any(each in str(error) for each in NEEDS_PROCESS):
            return f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__
    return ""


# -- return values ------------------------------------------------------------------------------------------


def _record_output(output: Any, sink: _Sink) -> Any:
    """Record a returned reward, or returned spans as those of the attempt, and return None for them; return any other
    output unchanged."""
    if isinstance(output, list) and output and all(isinstance(each, Span | ReadableSpan) for each in output):
        rollout_id, attempt_id = sink.job.rollout.ids
        given = cast("list[Span | ReadableSpan]", output)
        spans = [each if isinstance(each, Span) else to_span(each, "", "") for each in given]
        sink.put([replace(each, rollout_id=rollout_id, attempt_id=attempt_id) for each in spans])
    elif looks_like_reward(output):
        emit_reward(check_reward(output, "the agent"))
    else:
        return output
    return None


def shorten_output(output: Any) -> Any:
    """The output as a JSON value; the beginning of its text if it exceeds OUTPUT_CHARACTERS."""
    try:
        text = dumps(output, default=repr, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return repr(output)[:OUTPUT_CHARACTERS]
    if len(text) <= OUTPUT_CHARACTERS:
        return loads(text)
    return (output if isinstance(output, str) else text.decode())[:OUTPUT_CHARACTERS]


# -- the fork server --------------------------------------------------------------------------------------------------

SHUTDOWN_SECONDS = 1.0
"""Time that hosts get to exit after the runner has disconnected."""
KILL_SECONDS = 1.0
"""Time between SIGTERM and SIGKILL for what a host has left behind."""
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Serve one runner until it disconnects."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for stream in (sys.stdout, sys.stderr):
        cast(TextIOWrapper, stream).reconfigure(line_buffering=True)  # many agents write lines to one log
    frames, load = FrameDecoder[Load](Load), None
    while load is None:
        load = next(frames.feed(control.recv(1 << 18) or sys.exit()), None)
    sys.path[:] = load.sys_path
    client_headers.install()
    attempt_environ.carry_context()
    for owner, name in attempt_environ.PROCESS_STATE:
        attempt_environ.process_state.watch(owner, name)
    with suppress(OSError, AttributeError):  # on Linux: have the descendants whose parents have exited as children
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        setup = prepare(load)
    except AgentError as error:
        _send(control, Ready(str(error)))
        return
    attempt_environ.install()
    install_globally()
    if not _send(control, Ready()):
        return
    gc.collect()
    gc.freeze()  # keeps loaded pages shared between the hosts: the collector does not touch them
    ForkServer(control, setup).serve()


def _send(control: socket.socket, message: Ready | Exited) -> bool:
    """Send a message to the runner; False if it has disconnected."""
    try:
        control.sendall(encode(message))
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def prepare(load: Load) -> Setup:
    """Import the agent and the reward function. Raises AgentError."""
    with attempt_environ.process_variables(load.variables):
        agent = load_agent(load.agent, grace=load.grace)
    reward = None if load.reward is None else RewardFunction.of(load_object(load.reward, "reward"))
    if threading.active_count() > 1:
        names = ", ".join(t.name for t in threading.enumerate() if t is not threading.main_thread())
        logger.warning("importing %s started threads (%s), which its processes will not have", load.agent, names)
    return Setup(agent, reward, load)


class ForkServer:
    """Forks, kills and reaps agent hosts."""

    def __init__(self, control: socket.socket, setup: Setup) -> None:
        self._control = control
        self._setup = setup
        self._children: dict[int, tuple[int, IO[bytes]]] = {}
        """Process id -> the id of the host, and the file that `faulthandler` writes to when it crashes."""
        self._ended_groups: dict[int, float] = {}
        """Groups of hosts that have exited -> when what is left of them is killed."""
        self._fds = deque[int]()
        self._frames = FrameDecoder[ToForkServer](ToForkServer)
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, _on_sigchld)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        connected = True
        while connected:
            seconds = KILL_SECONDS if self._ended_groups else None
            readable = select.select([self._control, self._wake], [], [], seconds)[0]
            if self._wake in readable:
                self._reap()
            if self._control in readable:
                connected = self._receive()
            self._kill_groups(time.monotonic())
        self._shut_down()

    def _receive(self) -> bool:
        """Read and execute the runner's requests; False when it has disconnected."""
        try:
            data, fds, *_ = socket.recv_fds(self._control, 65536, 16)
        except ConnectionResetError:
            return False
        self._fds.extend(fds)
        for message in self._frames.feed(data):
            self._handle(message)
        return bool(data)

    def _handle(self, message: ToForkServer) -> None:
        if isinstance(message, Fork):
            self._fork(message.host_id, self._fds.popleft(), message.alone)
            return
        for pid, (host_id, _) in self._children.items():
            if host_id == message.host_id:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid cannot belong to another process

    def _fork(self, host_id: int, fd: int, alone: bool) -> None:
        report = tempfile.TemporaryFile()  # noqa: SIM115  closed when the host is reaped
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become_host(socket.socket(fileno=fd), report, alone)
        with suppress(OSError):  # both do it, so that neither has to wait for the other
            os.setpgid(pid, pid)
        os.close(fd)
        self._children[pid] = host_id, report

    def _become_host(self, sock: socket.socket, report: IO[bytes], alone: bool) -> NoReturn:
        code = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._control, self._wake, self._waker):
                end.close()
            faulthandler.enable(report, all_threads=False)
            # Python reseeds `random` in a forked child by itself; NumPy's global generator would repeat in every host.
            if (numpy := cast(Any, sys.modules.get("numpy"))) is not None:
                numpy.random.seed()
            Host(sock, self._setup, alone).serve()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001  a forked child must not return into the fork server's frames
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Collect the exit status of hosts that have exited, and report them."""
        with suppress(BlockingIOError):
            self._wake.recv(4096)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                child = self._children.pop(ended[0], None)  # or an orphan
                if child is not None:
                    self._ended_groups[ended[0]] = time.monotonic() + KILL_SECONDS
                    signal_group(ended[0], signal.SIGTERM)  # which multiprocessing's trackers of resources survive
                    host_id, report = child
                    text = os.pread(report.fileno(), 64_000, 0).decode(errors="replace")
                    report.close()
                    _send(self._control, Exited(host_id, os.waitstatus_to_exitcode(ended[1]), text))

    def _kill_groups(self, now: float) -> None:
        """Kill what is left of groups whose time is over."""
        for group in [group for group, until in self._ended_groups.items() if until <= now]:
            del self._ended_groups[group]
            signal_group(group, signal.SIGKILL)

    def _shut_down(self) -> None:
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while self._children and time.monotonic() < deadline:
            time.sleep(0.01)
            self._reap()
        for pid in self._children:
            signal_group(pid, signal.SIGKILL)
        self._kill_groups(math.inf)
        while (orphans := _child_pids()) and time.monotonic() < deadline + SHUTDOWN_SECONDS:
            for pid in orphans:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.01)


def _child_pids() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _on_sigchld(*_: object) -> None:
    """Empty: with a handler installed, SIGCHLD writes to the wake-up socket."""
