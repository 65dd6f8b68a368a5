"""The pool of processes of a runner: has them forked, assigns attempts to them and replaces those that fail.

`spawn()` starts the fork server and returns immediately, so that the agent is imported while the caller does other
work; it needs no event loop. `run` executes one attempt. The least busy of `hosts` processes takes it; when that dies,
the attempt that it ran fails; of several, nobody knows whose fault it was, and each is repeated in a new process of its
own. An attempt that cannot share its process says so (`Done.needs_process`): from then on each has a new one.

The life of a process: forked, ready, retired (it takes no further attempt), exited. An attempt occupies its slot until
the process has said that it has ended, though its caller may have gone. One that does not end when it is stopped
retires the process, which is killed as soon as only such attempts are left in it, or at once if its event loop is
blocked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from msgspec.structs import replace

from agentlightning.attempt_variables import agent_process_environment
from agentlightning.errors import AgentError, ConfigError
from agentlightning.runner.agents.command import describe_exit, signal_group
from agentlightning.runner.hosts.messages import (
    Cancel,
    Done,
    Exited,
    Fork,
    FrameDecoder,
    FromForkServer,
    FromHost,
    Job,
    Kill,
    Load,
    MessageError,
    Program,
    Ready,
    Spans,
    Stopping,
    encode,
)
from agentlightning.span import Span
from agentlightning.tracing.agent_spans import agent_span

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnSpans = Callable[[Sequence[Span]], None]
READ_SECONDS = 0.5
"""How long what an exited process had sent is read: a child of it may keep the socket open."""
LOAD_SECONDS = 600.0
"""Time limit for importing the agent."""
MAX_FAILED_STARTS = 3
"""The pool gives up after this many consecutive processes that died before they were ready."""
CLOSE_SECONDS = 5.0
HOME = str(Path(__file__).resolve().parents[2])
"""Directory of this package; a relative entry of the Python path would not find it from another directory."""
BOOT = "import sys; sys.path.insert(0, sys.argv[2]); from agentlightning.runner.hosts.host import main; main()"


# -- one process -----------------------------------------------------------------------------------------------------


class AgentCrashedError(AgentError):
    """The process that an attempt ran in has exited."""

    def __init__(self, exited: Exited, killed: str | None = None) -> None:
        memory = " (out of memory?)" if exited.status == -9 else ""
        super().__init__(f"the process the agent ran in {killed or describe_exit(exited.status) + memory}")
        if exited.traceback:
            self.add_note(exited.traceback)


class LostAttemptError(AgentError):
    """The attempt was lost for no fault that is known to be its own: it is to be repeated in a process of its own."""


@dataclass(slots=True)
class RunningAttempt:
    """An attempt in a process, until that has said that it has ended."""

    job: Job
    done: asyncio.Future[Done]
    """Cancelled once its caller waits no longer."""
    on_spans: OnSpans
    acknowledged: bool = False
    """The process knows that it is to be stopped, so its event loop is alive."""
    program: int = 0
    """The process group of the program that it runs; 0 for none."""

    @property
    def stopped(self) -> bool:
        return self.done.cancelled()


class AttemptProcess(asyncio.Protocol):
    """The runner's side of one process. `kill` kills it and its process group; `on_change` is called when it may take
    more or fewer attempts."""

    def __init__(self, load: Load, alone: bool, kill: Callable[[], None], on_change: Callable[[], None]) -> None:
        self.alone = alone
        """It runs one attempt, on its main thread."""
        self.attempts: dict[str, RunningAttempt] = {}
        self.connecting: asyncio.Task[Any] | None = None
        """Held, so that it is not collected."""
        self.ready = False
        self.retired = alone
        """It is given no further attempt."""
        self.ending = False
        """It is closed, or killed for what one of its attempts did to others: no crash."""
        self._slots, self._grace = 1 if alone else load.slots, load.grace
        self._kill, self._on_change = kill, on_change
        self._killed: str | None = None
        """Why it was killed while attempts ran in it, for their error message."""
        self._exited: Exited | None = None
        self._transport: asyncio.Transport | None = None
        self._frames = FrameDecoder[FromHost](FromHost)
        self._unsent: list[bytes] = []

    @property
    def stopped(self) -> int:
        """How many attempts keep a slot that nobody waits for."""
        return sum(each.stopped for each in self.attempts.values())

    @property
    def capacity(self) -> int:
        """How many attempts that are waited for it can have."""
        return self._slots - self.stopped if self.usable else 0

    @property
    def free(self) -> int:
        return self._slots - len(self.attempts) if self.usable else 0

    @property
    def usable(self) -> bool:
        blocked = any(each.stopped and not each.acknowledged for each in self.attempts.values())
        return self.ready and not (self.retired or blocked)

    # -- attempts ----------------------------------------------------------------------------------------------------

    async def call(self, job: Job, encoded: bytes, on_spans: OnSpans) -> Done:
        """Run one attempt until it ends. Cancelling stops it. Raises TimeoutError after its time, AgentCrashedError or
        LostAttemptError when the process exits."""
        loop = asyncio.get_running_loop()
        attempt = self.attempts[job.attempt_id] = RunningAttempt(job, loop.create_future(), on_spans)
        self._send(encoded)
        try:
            async with asyncio.timeout(job.rollout.config.timeout_seconds):
                return await attempt.done
        except (TimeoutError, asyncio.CancelledError):
            self._send(encode(Cancel(job.attempt_id)))
            loop.call_later(self._grace + 0.5, self._on_grace_over, attempt)
            self._on_change()
            raise

    def _on_grace_over(self, attempt: RunningAttempt) -> None:
        """Retire a process whose stopped attempt still runs. If its event loop is blocked, its other attempts cannot
        end either: kill it at once."""
        if attempt.job.attempt_id not in self.attempts or self._killed or self._exited:
            return
        if not attempt.acknowledged:
            self.ending = True
            self._kill_because("another attempt blocked its event loop and did not end at its timeout")
        self.retire()

    def retire(self) -> None:
        """Give it no further attempt, and end it once nobody waits for one."""
        self.retired = True
        if not self.attempts:
            self.close()
        elif self.stopped == len(self.attempts):
            self.ending = True
            self._kill()
        self._on_change()

    def close(self) -> None:
        """Close the connection; the process then exits."""
        self.retired = self.ending = True
        if self._transport is not None:
            self._transport.close()

    def _kill_because(self, why: str) -> None:
        self._killed, self.retired = f"was killed: {why}", True
        self._kill()
        self._on_change()

    def _send(self, data: bytes) -> None:
        if self._transport is None:
            self._unsent.append(data)
        elif not self._transport.is_closing():
            self._transport.write(data)

    # -- answers -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.ending:
            transport.close()
        else:
            self._transport.writelines(self._unsent)

    def data_received(self, data: bytes) -> None:
        try:
            for message in () if self._killed else self._frames.feed(data):
                self._handle(message)
        except MessageError as error:
            self._kill_because(str(error))

    def _handle(self, message: FromHost) -> None:
        if isinstance(message, Ready):
            self.ready = True
            return self._on_change()
        attempt = self.attempts.get(message.attempt_id)
        if attempt is None:
            return
        if isinstance(message, Program):
            attempt.program = message.group
        elif isinstance(message, Spans):
            if not attempt.stopped:
                # As spans of this attempt, whatever ids they carry.
                rollout_id, attempt_id = attempt.job.rollout.ids
                own = [replace(each, rollout_id=rollout_id, attempt_id=attempt_id) for each in message.spans]
                attempt.on_spans(list(map(agent_span, own)))
        elif isinstance(message, Stopping):
            attempt.acknowledged = True
            self._on_change()
        else:
            del self.attempts[message.attempt_id]
            if not attempt.done.done():
                attempt.done.set_result(message)
            if self.retired:
                self.retire()
            elif attempt.stopped:
                self._on_change()

    # -- its end -----------------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._exited is not None:
            self._fail(self._exited)

    def on_exit(self, exited: Exited) -> None:
        """The process has exited: fail its attempts after the messages it had sent are read."""
        self._exited, self.retired = exited, True
        if self._transport is None:
            self._fail(exited)
        else:
            asyncio.get_running_loop().call_later(READ_SECONDS, self._fail, exited)

    def _fail(self, exited: Exited) -> None:
        if self._transport is not None:
            self._transport.close()
        self.kill_programs()
        error: AgentError = AgentCrashedError(exited, self._killed)
        others = len(self.attempts) - 1
        if not self.ready:
            error = LostAttemptError(f"{error}, before any attempt began in it")
        elif others > 0:  # nobody knows whose fault it was
            error = LostAttemptError(f"{error}, which {others} other attempts shared")
        for attempt in self.attempts.values():
            if not attempt.done.done():
                attempt.done.set_exception(error)
        self.attempts.clear()

    def kill_programs(self) -> None:
        """Kill the programs that the process has left: each has a process group of its own."""
        for attempt in self.attempts.values():
            if attempt.program > 1:
                signal_group(attempt.program, signal.SIGKILL)


# -- all of them -----------------------------------------------------------------------------------------------------


class HostPool:
    """Processes that run one agent.

    `concurrency` attempts run at once, spread over `hosts` processes; with `fresh`, each attempt has its own process,
    whose main thread runs it and which exits with it. `cwd` is the working directory of the agent, `log` the file that
    its stdout and stderr are appended to (default: this process's stderr). `on_change` is called when capacity may have
    changed, `on_broken` when no process can be started.
    """

    def __init__(
        self,
        load: Load,
        *,
        concurrency: int,
        hosts: int,
        fresh: bool,
        cwd: str | Path | None,
        log: str | Path | None,
        on_change: Callable[[], None],
        on_broken: Callable[[AgentError], None],
    ) -> None:
        if not 1 <= hosts <= concurrency and not fresh:
            raise ConfigError(f"hosts={hosts}, concurrency={concurrency}: use 1 <= hosts <= concurrency")
        self.agent = load.agent
        self.fresh = fresh
        """Each attempt has a new process."""
        self.crashes = 0
        """Number of processes that exited unexpectedly."""
        self._concurrency, self._size = concurrency, hosts
        self._load = replace(load, slots=math.ceil(concurrency / max(hosts, 1)))
        self._on_change, self._on_broken = on_change, on_broken
        self._cwd = Path.cwd() if cwd is None else Path(cwd)
        self._log = None if log is None else Path(log)
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._loaded = False
        self._frames = FrameDecoder[FromForkServer](FromForkServer)
        self._trimming: asyncio.Task[None] | None = None
        self._processes: dict[int, AttemptProcess] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._failed_starts = 0
        self._closing = False
        self._broken: AgentError | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def spawn(self, variables: dict[str, str]) -> None:
        """Start importing the agent in another process; `variables` override this process's environment. Needs no event
        loop. Idempotent. Raises AgentError."""
        if self._fork_server is not None:
            return
        if not self._cwd.is_dir():
            raise AgentError(f"the agent's directory cwd={str(self._cwd)!r} does not exist")
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-c", BOOT, str(theirs.fileno()), HOME]
        # Agents print to the log, or our stderr; never to our stdout, which carries the results of a command.
        with theirs, open(os.dup(2), "wb") if self._log is None else open(self._log, "ab") as output:
            # A new session, so that Ctrl-C reaches only the runner, which decides what happens to the attempts.
            self._fork_server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._cwd,
                env=agent_process_environment(os.environ),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._request(replace(self._load, sys_path=_python_path(self._cwd), variables=variables))

    async def start(self) -> None:
        """Wait until the agent is imported, after `spawn`, and attempts can run. Idempotent. Raises AgentError, after
        which it is closed."""
        if self._loaded:
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control, self._receive)
        if self._log is not None:
            self._trimming = loop.create_task(trim_periodically(self._log))
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await self._wait_for(lambda: self._loaded and (self.fresh or self._least_busy()))
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise AgentError(f"agent {self.agent} was not imported within {LOAD_SECONDS:g} s") from None
            raise

    async def close(self) -> None:
        """End all processes. Idempotent."""
        if self._closing or self._fork_server is None:
            return
        self._closing = True
        for process in self._processes.values():
            process.close()
        if self._trimming is not None:
            self._trimming.cancel()
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        await asyncio.to_thread(_wait_or_kill, self._fork_server)
        for process in self._processes.values():
            process.kill_programs()

    # -- work --------------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of attempts that can run at once at the moment."""
        processes = self._processes.values()
        if self.fresh:
            return self._concurrency - sum(process.stopped for process in processes)
        return min(self._concurrency, sum(process.capacity for process in processes if not process.alone))

    async def run(self, job: Job, on_spans: OnSpans, alone: bool) -> Done:
        """Run one attempt until it ends, in a new process if `alone`. Raises MessageError for a task that cannot be
        encoded, TimeoutError after its time, AgentCrashedError when its process exits, and LostAttemptError where that
        may be another's fault, or it needs a process of its own. Cancelling stops the attempt."""
        encoded = encode(job)  # before there is a process for it
        process = self._fork(alone=True) if alone or self.fresh else await self._wait_for(self._least_busy)
        done = await process.call(job, encoded, on_spans)
        if not done.needs_process:
            return done
        self._separate(done.needs_process)
        raise LostAttemptError(f"the agent needs a process of its own ({done.needs_process})")

    def _separate(self, what: str) -> None:
        """From now on each attempt has a new process."""
        if self.fresh:
            return
        self.fresh = True
        logger.warning(
            "attempts of agent %s cannot share a process (%s): from now on, each one runs in a new process of its own,"
            " and those that this interrupts are repeated; fresh_process=True (--fresh-process) starts like that",
            *(self.agent, what),
        )
        for process in [each for each in self._processes.values() if not each.alone]:
            process.retire()

    def _least_busy(self) -> AttemptProcess | None:
        free = [each for each in self._processes.values() if each.free > 0]
        return max(free, key=lambda process: process.free, default=None)

    async def _wait_for(self, find: Callable[[], T | None]) -> T:
        """Wait until something is found. Raises AgentError where no process can be started."""
        while not (found := find()):
            self._check()
            await self._changed.wait()
        return found

    def _check(self) -> None:
        """Raises AgentError where no process can be started."""
        if self._broken is not None:
            raise self._broken

    # -- processes ---------------------------------------------------------------------------------------------------

    def _fork(self, alone: bool) -> AttemptProcess:
        self._check()
        number, loop = next(self._numbers), asyncio.get_running_loop()
        kill = partial(self._request, Kill(number))
        process = self._processes[number] = AttemptProcess(self._load, alone, kill, self._notify_change)
        ours, theirs = socket.socketpair()
        with theirs:
            self._request(Fork(number, alone), theirs)
        ours.setblocking(False)
        process.connecting = loop.create_task(loop.create_unix_connection(lambda: process, sock=ours))
        return process

    def _notify_change(self) -> None:
        if self._loaded and not (self._closing or self.fresh or self._broken):
            shared = [each for each in self._processes.values() if not (each.alone or each.retired)]
            for _ in range(self._size - len(shared)):  # another one in place of each that takes no more attempts
                self._fork(alone=False)
        self._changed.set()
        self._changed.clear()
        self._on_change()

    def _request(self, message: Load | Fork | Kill, *passed: socket.socket) -> None:
        data = encode(message)
        if self._closing:
            return
        with suppress(BrokenPipeError, ConnectionResetError):  # `_on_fork_server_lost` follows
            sent = socket.send_fds(self._control, [data], [each.fileno() for each in passed]) if passed else 0
            self._control.sendall(data[sent:])

    def _receive(self) -> None:
        """Read what the fork server says."""
        try:
            data = self._control.recv(65536, socket.MSG_DONTWAIT)
            for message in self._frames.feed(data):
                if isinstance(message, Exited):
                    self._on_exit(message)
                elif message.error:
                    self._break(message.error)
                else:
                    self._loaded = True
                    self._notify_change()
        except BlockingIOError:
            return
        except (ConnectionResetError, MessageError):
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._control)
            self._on_fork_server_lost()

    def _on_exit(self, exited: Exited) -> None:
        process = self._processes.pop(exited.host_id)
        process.on_exit(exited)
        if not (self._closing or process.ending):
            self.crashes += 1
            self._failed_starts = 0 if process.ready else self._failed_starts + 1
        if self._closing or self._failed_starts < MAX_FAILED_STARTS:
            return self._notify_change()
        self._break(
            f"the processes that run agent {self.agent} end as soon as they start; the last one "
            f"{describe_exit(exited.status)}\n{exited.traceback}"
        )

    def _on_fork_server_lost(self) -> None:
        if self._closing or self._broken or self._fork_server is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._fork_server.wait(1.0)
        code = self._fork_server.returncode
        exited = Exited(0, -9 if code is None else code, "")
        for process in self._processes.values():
            process.on_exit(exited)
        how, what = describe_exit(exited.status), "starts the processes of"
        if not self._loaded:
            how += f" before it was done; what it printed is {'on stderr' if self._log is None else f'in {self._log}'}"
            what = "imports"
        self._break(f"the process that {what} agent {self.agent} {how}")

    def _break(self, why: str) -> None:
        """No process can be started any more."""
        self._broken = AgentError(why)
        self._notify_change()
        if self._loaded:
            self._on_broken(self._broken)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _python_path(cwd: Path) -> tuple[str, ...]:
    path = [os.path.abspath(entry) for entry in sys.path]
    here = str(cwd.resolve())
    return tuple(path if here in path else [here, *path])


# -- the log of what agents print --------------------------------------------------------------------------------------

# Agent processes append to the file themselves, so that logging survives the runner, which checks its size: the end of
# a file over the limit is moved to `NAME.1`, and the file is truncated.

LIMIT_BYTES: Final = 16 * 1024 * 1024
CHECK_SECONDS: Final = 1.0


async def trim_periodically(path: Path) -> None:
    while True:
        await asyncio.to_thread(trim, path)
        await asyncio.sleep(CHECK_SECONDS)


def trim(path: Path, limit: int = LIMIT_BYTES) -> None:
    """Rotate a file that exceeds the limit. Output written between copying and truncating is lost."""
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size > limit:
                file.seek(size - limit)
                path.with_name(f"{path.name}.1").write_bytes(file.read(limit))
                file.truncate(0)
    except OSError:  # not a regular file, or deleted: nothing to limit
        return
