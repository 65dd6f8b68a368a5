"""The runner's end of one agent host: which attempts run there, and what is said about them."""

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
    Frames,
    FromHost,
    Job,
    Ready,
    Spans,
    Started,
    Stopping,
    WireError,
    encode,
)
from agentlightning.span import Span
from agentlightning.tracing.agent_spans import agent_span

OnSpans = Callable[[Sequence[Span]], None]


class AgentCrashedError(AgentError):
    """The process an attempt ran in has ended."""

    def __init__(self, exited: Exited, killed: str | None = None) -> None:
        memory = " (out of memory?)" if exited.status == -9 else ""
        super().__init__(f"the process the agent ran in {killed or describe_exit(exited.status) + memory}")
        if exited.traceback:
            self.add_note(exited.traceback)


class NotStartedError(AgentError):
    """The process ended before it began the attempt; another can run it."""


@dataclass(slots=True)
class Open:
    """An attempt that runs on a host."""

    job: Job
    done: asyncio.Future[Done]
    on_spans: OnSpans
    started: bool = False

    def take(self, spans: Sequence[Span]) -> None:
        """Spans of the attempt, whatever they say of whose they are: a host speaks for what it runs."""
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


class HostLink(asyncio.Protocol):
    """One host, from the request to fork it to its end."""

    def __init__(self, host_id: int, on_change: Callable[[], None]) -> None:
        self.host_id = host_id
        self.running: dict[int, Open] = {}
        self.stopping: set[int] = set()
        """Jobs nobody waits for any more, which have not ended yet."""
        self.unheard: set[int] = set()
        """Those of them of which the host has not even said that it has heard."""
        self.killed: str | None = None
        """Why we kill it while attempts run in it."""
        self.ready = False
        self.used = False
        """It has been given an attempt."""
        self.retired = False
        self.broken = False
        """It has sent what is no message, and is to be killed."""
        self.exited: Exited | None = None
        self._on_change = on_change
        self._transport: asyncio.Transport | None = None
        self._frames: Frames[FromHost] = Frames(FromHost)
        self._outbox: list[bytes] = []

    @property
    def load(self) -> int:
        return len(self.running) + len(self.stopping)

    @property
    def takes_work(self) -> bool:
        return self.ready and not self.retired and not self.broken and not self.unheard and self.exited is None

    # -- saying ------------------------------------------------------------------------------------------------------

    def start(self, job: Job, on_spans: OnSpans) -> asyncio.Future[Done]:
        """Run a job; the future is its end. Raises AgentError for a task that cannot be sent."""
        data = encode(job)
        done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self.running[job.job_id] = Open(job, done, on_spans)
        self.used = True
        self._send(data)
        return done

    def stop(self, job_id: int) -> None:
        """Stop a job; it keeps its place until it has ended."""
        self.stopping.add(job_id)
        self.unheard.add(job_id)
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
        """Hang up; the host ends."""
        if self._transport is not None:
            self._transport.close()

    # -- hearing -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.broken:
            return
        try:
            for message in self._frames.feed(data):
                self._hear(message)
        except WireError as error:
            self.broken, self.killed = True, f"was killed: {error}"
            self._on_change()

    def _hear(self, message: FromHost) -> None:
        if isinstance(message, Ready):
            self.ready = True
            self._on_change()
            return
        if isinstance(message, Stopping):
            self.unheard.discard(message.job_id)
            self._on_change()
            return
        job = self.running.get(message.job_id)
        if isinstance(message, Started):
            if job is not None:
                job.started = True
            return
        if isinstance(message, Spans):
            if job is not None:
                job.take(message.spans)
            return
        if job is not None and not job.done.done():
            job.done.set_result(message)
        if message.job_id in self.stopping:
            self.stopping.discard(message.job_id)
            self.unheard.discard(message.job_id)
            self._on_change()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.exited is not None:
            self.fail_running(self.exited)

    def has_exited(self, exited: Exited) -> None:
        """The process has ended; what it said before is heard first."""
        self.exited = exited
        self.stopping.clear()
        if self._transport is None:
            self.fail_running(exited)
        else:  # a child the agent forked may hold the socket open for ever
            asyncio.get_running_loop().call_later(0.5, self.fail_running, exited)

    def fail_running(self, exited: Exited) -> None:
        """Everything that ran here has failed with the process."""
        self.close()
        for job in list(self.running.values()):
            if not job.done.done():
                job.done.set_exception(AgentCrashedError(exited, self.killed) if job.started else NotStartedError())
