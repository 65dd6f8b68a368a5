"""The runner's connection to one agent host: sends jobs, receives spans and results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from msgspec.structs import replace

from agentlightning.errors import AgentError
from agentlightning.runner.agents.command import describe_exit
from agentlightning.runner.hosts.messages import (
    Cancel,
    Done,
    Exited,
    FrameDecoder,
    FromHost,
    Job,
    MessageError,
    Ready,
    Spans,
    Started,
    Stopping,
    encode,
)
from agentlightning.span import Span
from agentlightning.tracing.agent_spans import agent_span

OnSpans = Callable[[Sequence[Span]], None]


class AgentCrashedError(AgentError):
    """The process that an attempt ran in has exited."""

    def __init__(self, exited: Exited, killed: str | None = None) -> None:
        memory = " (out of memory?)" if exited.status == -9 else ""
        super().__init__(f"the process the agent ran in {killed or describe_exit(exited.status) + memory}")
        if exited.traceback:
            self.add_note(exited.traceback)


class NotStartedError(AgentError):
    """The process exited before it started the attempt; another host can run it."""


class LostAttemptError(AgentError):
    """The attempt was lost for no fault that is known to be its own: it is to be repeated, and if `alone`, in a process
    of its own, which then tells whose fault it was."""

    def __init__(self, message: str, alone: bool) -> None:
        super().__init__(message)
        self.alone = alone


@dataclass(slots=True)
class RunningJob:
    """An attempt that is running on a host."""

    job: Job
    done: asyncio.Future[Done]
    on_spans: OnSpans
    started: bool = False

    def forward(self, spans: Sequence[Span]) -> None:
        """Forward spans as spans of this attempt, whatever ids they carry."""
        ids = self.job.rollout.rollout_id, self.job.rollout.attempt.attempt_id
        self.on_spans(
            [
                agent_span(
                    span
                    if (span.rollout_id, span.attempt_id) == ids
                    else replace(span, rollout_id=ids[0], attempt_id=ids[1])
                )
                for span in spans
            ]
        )


class HostConnection(asyncio.Protocol):
    """One host, from its fork request until it exits."""

    def __init__(self, host_id: int, on_change: Callable[[], None], single: bool = False) -> None:
        self.host_id = host_id
        self.single = single
        """For one attempt at a time."""
        self.once = False
        """For one attempt in all."""
        self.running: dict[int, RunningJob] = {}
        self.stopping: set[int] = set()
        """Stopped jobs that have not ended yet."""
        self.unacknowledged: set[int] = set()
        """Stopped jobs whose stop the host has not acknowledged."""
        self.killed: str | None = None
        """Why it is killed while attempts run in it, for their error message."""
        self.ready = False
        self.used = False
        """Whether it was ever given an attempt."""
        self.retired = False
        self.blocked = False
        """It is killed because an attempt, which was stopped, blocks its event loop."""
        self.broken = False
        """It sent invalid data and has to be killed."""
        self.exited: Exited | None = None
        self._on_change = on_change
        self._transport: asyncio.Transport | None = None
        self._frames: FrameDecoder[FromHost] = FrameDecoder(FromHost)
        self._outbox: list[bytes] = []
        self._suspects = 0
        """How many attempts it had started that had not ended when it exited."""

    @property
    def load(self) -> int:
        return len(self.running) + len(self.stopping)

    @property
    def takes_work(self) -> bool:
        unusable = self.single or self.retired or self.broken or self.unacknowledged or self.exited is not None
        return self.ready and not unusable

    # -- sending -----------------------------------------------------------------------------------------------------

    def start(self, job: Job, on_spans: OnSpans) -> asyncio.Future[Done]:
        """Start a job and return the future of its end. Raises AgentError for a task that cannot be encoded."""
        data = encode(job)
        done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self.running[job.job_id] = RunningJob(job, done, on_spans)
        self.used = True
        self._send(data)
        return done

    def stop(self, job_id: int) -> None:
        """Stop a job; it occupies its slot until it has ended."""
        self.stopping.add(job_id)
        self.unacknowledged.add(job_id)
        self._send(encode(Cancel(job_id)))

    def _send(self, data: bytes) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._write)
        self._outbox.append(data)

    def _write(self) -> None:
        data = b"".join(self._outbox)
        self._outbox.clear()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection; the host then exits."""
        if self._transport is not None:
            self._transport.close()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.broken:
            return
        try:
            for message in self._frames.feed(data):
                self._handle(message)
        except MessageError as error:
            self.broken, self.killed = True, f"was killed: {error}"
            self._on_change()

    def _handle(self, message: FromHost) -> None:
        if isinstance(message, Ready):
            self.ready = True
            self._on_change()
            return
        if isinstance(message, Stopping):
            self.unacknowledged.discard(message.job_id)
            self._on_change()
            return
        job = self.running.get(message.job_id)
        if isinstance(message, Started):
            if job is not None:
                job.started = True
            return
        if isinstance(message, Spans):
            if job is not None:
                job.forward(message.spans)
            return
        if job is not None and not job.done.done():
            job.done.set_result(message)
        if message.job_id in self.stopping:
            self.stopping.discard(message.job_id)
            self.unacknowledged.discard(message.job_id)
            self._on_change()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.exited is not None:
            self.fail_running(self.exited)

    def on_exit(self, exited: Exited) -> None:
        """The process has exited: fail its jobs after the messages it had sent are read."""
        self.exited = exited
        self._suspects = len(self.stopping) + sum(job.started for job in self.running.values())
        self.stopping.clear()
        if self._transport is None:
            self.fail_running(exited)
        else:  # a child of the agent may keep the socket open
            asyncio.get_running_loop().call_later(0.5, self.fail_running, exited)

    def fail_running(self, exited: Exited) -> None:
        """Fail every job that was running on this host."""
        self.close()
        for job in list(self.running.values()):
            if not job.done.done():
                job.done.set_exception(self._error_of(job, exited))

    def _error_of(self, job: RunningJob, exited: Exited) -> AgentError:
        """Whose fault an exit was is known only where one attempt ran, or one has blocked the event loop."""
        if not job.started:
            return NotStartedError()
        crash = AgentCrashedError(exited, self.killed)
        if self.blocked:
            return LostAttemptError(str(crash), alone=False)
        others = self._suspects - 1
        return crash if others < 1 else LostAttemptError(f"{crash}, which {others} other attempts shared", alone=True)
