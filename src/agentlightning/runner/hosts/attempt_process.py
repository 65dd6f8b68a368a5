"""The runner's side of one host: sends it attempts, receives spans and results, and knows when it has to be killed.

Its life: forked, ready, retired (it takes no further attempt), exited. An attempt occupies its slot until the process
has said that it has ended, though its caller may have gone. One that does not end when it is stopped retires the
process, which is killed as soon as only such attempts are left in it, or at once if its event loop is blocked.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from msgspec.structs import replace

from agentlightning.errors import AgentError
from agentlightning.runner.agents.command import describe_exit, signal_group
from agentlightning.runner.hosts.messages import (
    Cancel,
    Done,
    Exited,
    FrameDecoder,
    FromHost,
    Job,
    MessageError,
    Program,
    Ready,
    Spans,
    Started,
    Stopping,
    encode,
)
from agentlightning.span import Span
from agentlightning.tracing.agent_spans import agent_span

OnSpans = Callable[[Sequence[Span]], None]
READ_SECONDS = 0.5
"""How long what an exited process had sent is read: a child of it may keep the socket open."""


class AgentCrashedError(AgentError):
    """The process that an attempt ran in has exited."""

    def __init__(self, exited: Exited, killed: str | None = None) -> None:
        memory = " (out of memory?)" if exited.status == -9 else ""
        super().__init__(f"the process the agent ran in {killed or describe_exit(exited.status) + memory}")
        if exited.traceback:
            self.add_note(exited.traceback)


class LostAttemptError(AgentError):
    """The attempt was lost for no fault that is known to be its own: it is to be repeated, and if `alone`, in a process
    of its own, which then tells whose fault it was."""

    def __init__(self, message: str, alone: bool) -> None:
        super().__init__(message)
        self.alone = alone


@dataclass(slots=True)
class RunningAttempt:
    """An attempt in a process, until that has said that it has ended."""

    job: Job
    done: asyncio.Future[Done]
    on_spans: OnSpans
    started: bool = False
    stopped: bool = False
    """Its caller waits no longer."""
    acknowledged: bool = False
    """The process knows that it is to be stopped, so its event loop is alive."""
    program: int = 0
    """The process group of the program that it runs; 0 for none."""

    def forward(self, spans: Sequence[Span]) -> None:
        """Forward spans as spans of this attempt, whatever ids they carry."""
        rollout_id, attempt_id = self.job.rollout.rollout_id, self.job.rollout.attempt.attempt_id
        self.on_spans([agent_span(replace(each, rollout_id=rollout_id, attempt_id=attempt_id)) for each in spans])


class AttemptProcess(asyncio.Protocol):
    """One process. `kill` kills it and its process group; `on_change` is called when it may take more or fewer
    attempts."""

    def __init__(
        self, slots: int, *, alone: bool, grace: float, kill: Callable[[], None], on_change: Callable[[], None]
    ) -> None:
        self.alone = alone
        """One attempt at a time, on its main thread."""
        self.attempts: dict[int, RunningAttempt] = {}
        self.ready = False
        self.retired = False
        self.ending = False
        """It is closed, or killed for what one of its attempts did to others: no crash."""
        self.exited: Exited | None = None
        self._slots, self._grace, self._kill, self._on_change = slots, grace, kill, on_change
        self._killed: str | None = None
        """Why it was killed while attempts ran in it, for their error message."""
        self._transport: asyncio.Transport | None = None
        self._frames: FrameDecoder[FromHost] = FrameDecoder(FromHost)
        self._outbox: list[bytes] = []

    @property
    def stopped(self) -> int:
        """How many attempts keep a slot that nobody waits for."""
        return sum(each.stopped for each in self.attempts.values())

    @property
    def capacity(self) -> int:
        """How many attempts that are waited for it can have."""
        return max(0, self._slots - self.stopped) if self.ready and self.usable else 0

    @property
    def free(self) -> int:
        return self._slots - len(self.attempts) if self.usable else 0

    @property
    def usable(self) -> bool:
        blocked = any(each.stopped and not each.acknowledged for each in self.attempts.values())
        return not (self.retired or blocked or self._killed or self.exited)

    # -- attempts ----------------------------------------------------------------------------------------------------

    async def call(self, job: Job, on_spans: OnSpans, timeout: float | None) -> Done:
        """Run one attempt until it ends. Cancelling stops it. Raises TimeoutError after `timeout` seconds, MessageError
        for a task that cannot be encoded, AgentCrashedError or LostAttemptError when the process exits."""
        data = encode(job)
        attempt = RunningAttempt(job, asyncio.get_running_loop().create_future(), on_spans)
        self.attempts[job.job_id] = attempt
        self._send(data)
        try:
            async with asyncio.timeout(timeout):
                return await attempt.done
        except (TimeoutError, asyncio.CancelledError):
            self._stop(attempt)
            raise

    def _stop(self, attempt: RunningAttempt) -> None:
        attempt.stopped = True
        if self.exited is None:
            self._send(encode(Cancel(attempt.job.job_id)))
            asyncio.get_running_loop().call_later(self._grace + 0.5, self._on_grace_over, attempt)
        self._on_change()

    def _on_grace_over(self, attempt: RunningAttempt) -> None:
        """Retire a process whose stopped attempt still runs. If its event loop is blocked, its other attempts cannot
        end either: kill it at once."""
        if attempt.job.job_id not in self.attempts or self.exited is not None or self._killed is not None:
            return
        if not attempt.acknowledged:
            self.ending = True
            self._kill_because("another attempt blocked its event loop and did not end at its timeout")
            self._fail_all(lambda _: LostAttemptError(f"the process the agent ran in {self._killed}", alone=False))
        self.retire()

    def retire(self) -> None:
        """Give it no further attempt, and end it once nobody waits for one."""
        self.retired = True
        if not self.attempts:
            self.close()
        elif self.stopped == len(self.attempts) and self.exited is None:
            self.ending = True
            self._kill()
        self._on_change()

    def close(self) -> None:
        """Close the connection; the process then exits."""
        self.retired = self.ending = True
        if self._transport is not None:
            self._transport.close()

    def _kill_because(self, why: str) -> None:
        self._killed = f"was killed: {why}"
        self._kill()

    def _send(self, data: bytes) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._write)
        self._outbox.append(data)

    def _write(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._outbox))
            self._outbox.clear()

    # -- answers -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.ending:
            transport.close()
        self._write()

    def data_received(self, data: bytes) -> None:
        if self._killed is not None:
            return
        try:
            for message in self._frames.feed(data):
                self._handle(message)
        except MessageError as error:
            self._kill_because(str(error))
            self._on_change()

    def _handle(self, message: FromHost) -> None:
        if isinstance(message, Ready):
            self.ready = True
            return self._on_change()
        attempt = self.attempts.get(message.job_id)
        if attempt is None:
            return
        if isinstance(message, Started):
            attempt.started = True
        elif isinstance(message, Program):
            attempt.program = message.group
        elif isinstance(message, Spans):
            if not attempt.stopped:
                attempt.forward(message.spans)
        elif isinstance(message, Stopping):
            attempt.acknowledged = True
            self._on_change()
        else:
            self._on_done(attempt, message)

    def _on_done(self, attempt: RunningAttempt, done: Done) -> None:
        del self.attempts[done.job_id]
        if not attempt.done.done():
            attempt.done.set_result(done)
        if self.retired or done.last:
            self.retire()
        elif attempt.stopped:
            self._on_change()

    # -- its end -----------------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.exited is not None:
            self._fail(self.exited)

    def on_exit(self, exited: Exited) -> None:
        """The process has exited: fail its attempts after the messages it had sent are read."""
        self.exited = exited
        if self._transport is None:
            self._fail(exited)
        else:
            asyncio.get_running_loop().call_later(READ_SECONDS, self._fail, exited)

    def _fail(self, exited: Exited) -> None:
        if self._transport is not None:
            self._transport.close()
        self.kill_programs()
        suspects = sum(each.stopped or each.started for each in self.attempts.values())
        self._fail_all(lambda attempt: self._error_of(attempt, exited, suspects - 1))
        self.attempts.clear()

    def _fail_all(self, error_of: Callable[[RunningAttempt], AgentError]) -> None:
        for attempt in self.attempts.values():
            if not attempt.done.done():
                attempt.done.set_exception(error_of(attempt))

    def kill_programs(self) -> None:
        """Kill the programs that the process has left: each has a process group of its own."""
        for attempt in self.attempts.values():
            if attempt.program > 1:
                signal_group(attempt.program, signal.SIGKILL)

    def _error_of(self, attempt: RunningAttempt, exited: Exited, others: int) -> AgentError:
        """Whose fault an exit was is known only where one attempt ran."""
        crash = AgentCrashedError(exited, self._killed)
        if not attempt.started:
            return LostAttemptError(str(crash), alone=False)
        return crash if others < 1 else LostAttemptError(f"{crash}, which {others} other attempts shared", alone=True)
