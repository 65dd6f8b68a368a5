"""The runner: claims rollouts from the store, has them executed, and reports.

It promises that all spans of an attempt, its reward included, are in the store before the attempt is `succeeded`; that
every attempt it has claimed ends in exactly one report, unless the store has meanwhile given the rollout to somebody
else or cancelled it (then the attempt is stopped and nobody reports); and that stopping it loses no rollout: what is
not finished is queued again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from agentlightning.errors import (
    AgentError,
    AgentTimeoutError,
    ConfigError,
    ConflictError,
    Failure,
    NotFoundError,
    StoreFullError,
)
from agentlightning.resources import NamedResources
from agentlightning.rollouts import AttemptedRollout, AttemptStatus, attempt_environment
from agentlightning.runner.inject import first_llm
from agentlightning.runner.pool import HostPool
from agentlightning.runner.spec import AgentLike
from agentlightning.runner.writer import SpanWriter
from agentlightning.span import (
    EXCEPTION,
    EXCEPTION_MESSAGE,
    EXCEPTION_STACKTRACE,
    EXCEPTION_TYPE,
    Span,
    new_span_id,
    new_trace_id,
)
from agentlightning.store.base import LightningStoreBase

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunnerStatistics:
    """What a runner has done so far, in attempts."""

    claimed: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    timeout: int = 0
    discarded: int = 0
    """Stopped, or ended without a report, because the store had moved on."""
    requeued: int = 0
    """Given back when the runner stopped."""
    crashes: int = 0
    """Agent processes that died."""


@dataclass(slots=True)
class _Open:
    """An attempt between claim and report."""

    claimed: AttemptedRollout
    task: asyncio.Task[None]
    reporting: bool = False
    """It has ended; only its record is under way."""


class Runner:
    """Executes an agent on the rollouts of a store.

    `agent` and `reward` are what `runner/agent.py` and `runner/reward.py` say. `concurrency` attempts run at once,
    spread over `hosts` processes. `env` maps environment variables to the fields of a dict task they hold; `cwd` is
    where the agent runs; `log` takes what it prints. `server_url` and `secret` make each attempt's addresses; the URL
    may be given to `start` instead, after `start_hosts` has long begun to import the agent. Without `redirect`, the
    agent's model calls go where they always go. A store that is full is tried again for `patience` seconds.
    `poll_seconds` is how long one claim waits, and so the longest an idle runner takes to stop.
    """

    def __init__(
        self,
        store: LightningStoreBase,
        agent: AgentLike,
        *,
        secret: str,
        server_url: str | None = None,
        redirect: bool = True,
        reward: Callable[..., Any] | str | None = None,
        concurrency: int = 32,
        hosts: int = 1,
        worker_id: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        log: str | Path | None = None,
        grace: float = 2.0,
        heartbeat_seconds: float = 2.0,
        poll_seconds: float = 0.5,
        patience: float = 30.0,
    ) -> None:
        self.store = store
        self.server_url = server_url
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.pool = HostPool(
            agent,
            reward=reward,
            concurrency=concurrency,
            hosts=hosts,
            env=env,
            cwd=cwd,
            log=log,
            grace=grace,
            on_change=self._wake_up,
            on_broken=self._fail,
        )
        self.error: BaseException | None = None
        """Why the runner ended by itself."""
        self._secret, self._redirect = secret, redirect
        self._loaded = False
        self._concurrency = concurrency
        self._heartbeat_seconds, self._poll_seconds, self._patience = heartbeat_seconds, poll_seconds, patience
        self._counts = RunnerStatistics()
        self._open: dict[str, _Open] = {}
        self._writer = SpanWriter(store, self._patiently, self._discard)
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._stopping = False
        self._started = False
        self._claiming: asyncio.Task[None] | None = None
        self._helpers: list[asyncio.Task[None]] = []

    # -- life --------------------------------------------------------------------------------------------------------

    def start_hosts(self) -> None:
        """Begin to import the agent in another process; returns at once, needs neither a loop nor a server URL."""
        self.pool.spawn()

    async def load(self) -> None:
        """Wait until the agent is imported and a host is ready; `start` does it too. Raises AgentError."""
        if self._loaded:
            return
        try:
            await self.pool.start()
        except BaseException:
            await self.pool.close()
            raise
        self._loaded = True

    async def start(self, server_url: str | None = None) -> None:
        """Begin to work. Raises AgentError where the agent cannot be had, ConfigError without a server URL."""
        self.server_url = server_url or self.server_url
        if self.server_url is None:
            raise ConfigError("the runner needs server_url, where agents reach the gateway; give it to start()")
        await self.load()
        self._started = True
        self._claiming = self._supervised(self._claim())
        self._helpers = [self._supervised(self._heartbeat()), self._supervised(self._writer.run())]

    async def stop(self, drain_seconds: float = 5.0) -> None:
        """Claim nothing more, give what runs `drain_seconds` to end, queue the rest again, end all processes.

        Raises the error the runner ended with, if it did. Safe to call twice.
        """
        self._stopping = True
        self._wake.set()
        started, self._started = self._started, False
        try:
            if started:
                await self._drain(drain_seconds)
        finally:
            for task in self._helpers:
                task.cancel()
            await self.pool.close()
            self._ended.set()
        if self.error is not None and started:
            raise self.error

    async def wait(self) -> None:
        """Wait until the runner has ended. Raises the error it ended with."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    async def __aenter__(self) -> Runner:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def statistics(self) -> RunnerStatistics:
        return replace(self._counts, running=len(self._open), crashes=self.pool.crashes)

    def _count(self, what: str, by: int = 1) -> None:
        self._counts = replace(self._counts, **{what: getattr(self._counts, what) + by})

    async def _drain(self, seconds: float) -> None:
        if self._claiming is not None:
            await asyncio.wait([self._claiming])
        if self._open and self.error is None:
            await asyncio.wait([attempt.task for attempt in self._open.values()], timeout=seconds)
        left = list(self._open.values())
        for attempt in left:
            if self.error is not None or not attempt.reporting:
                attempt.task.cancel()
        if left:
            await asyncio.wait([attempt.task for attempt in left])
        if self.error is None:
            await self._give_back([attempt.claimed for attempt in left if attempt.task.cancelled()])
            await self._writer.written()

    async def _give_back(self, claimed: Sequence[AttemptedRollout]) -> None:
        """Queue again what is still ours."""
        ids = [rollout.rollout_id for rollout in claimed]
        for rollout in await self.store.query_rollouts(rollout_id_in=ids, status_in=("preparing", "running")):
            latest = await self.store.get_latest_attempt(rollout.rollout_id)
            if latest is not None and latest.worker_id == self.worker_id:
                reason = f"the runner {self.worker_id} was stopped"
                await self._patiently(lambda r=rollout, why=reason: self.store.requeue_rollout(r.rollout_id, why))
                self._count("requeued")

    # -- what ends a runner ------------------------------------------------------------------------------------------

    def _supervised(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._supervise)
        return task

    def _supervise(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Nothing more can be done: claim nothing, stop everything. What is open stays so in the store, whose clock
        queues it again."""
        if self.error is not None:
            return
        logger.error("the runner %s ends: %s: %s", self.worker_id, type(error).__name__, error)
        self.error = error
        self._stopping = True
        self._wake.set()
        for attempt in self._open.values():
            attempt.task.cancel()
        self._ended.set()

    async def _patiently(self, operation: Callable[[], Awaitable[T]]) -> T:
        """The operation's result; a store that is full is given time."""
        deadline = time.monotonic() + self._patience
        delay = 0.05
        while True:
            try:
                return await operation()
            except StoreFullError as error:
                if time.monotonic() + delay > deadline:
                    raise
                logger.warning("the store is full, trying again in %.2g s: %s", delay, error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, 5.0)

    # -- claiming ----------------------------------------------------------------------------------------------------

    def _wake_up(self) -> None:
        self._wake.set()

    async def _claim(self) -> None:
        while not self._stopping:
            room = min(self._concurrency, self.pool.capacity) - len(self._open)
            if room <= 0:
                await self._wake.wait()
                self._wake.clear()
                continue
            claimed = await self._patiently(
                lambda room=room: self.store.dequeue_many_rollouts(room, self.worker_id, self._poll_seconds)
            )
            if self._stopping:
                await self._give_back(claimed)
            elif claimed:
                await self._launch(claimed)

    async def _launch(self, claimed: Sequence[AttemptedRollout]) -> None:
        versions: dict[str | None, NamedResources | None] = {}
        for rollout in claimed:
            if rollout.resources_id not in versions:
                versions[rollout.resources_id] = await self._resources(rollout.resources_id)
            task = self._supervised(self._attempt(rollout, versions[rollout.resources_id]))
            attempt_id = rollout.attempt.attempt_id
            self._open[attempt_id] = _Open(rollout, task)
            task.add_done_callback(lambda _, attempt_id=attempt_id: self._closed(attempt_id))
        self._count("claimed", len(claimed))

    def _closed(self, attempt_id: str) -> None:
        self._open.pop(attempt_id, None)
        self._wake.set()

    async def _resources(self, resources_id: str | None) -> NamedResources | None:
        """The version asked for; None where the store does not have it."""
        if resources_id is None:
            latest = await self.store.get_latest_resources()
            return {} if latest is None else latest.resources
        version = await self.store.get_resources_by_id(resources_id)
        return None if version is None else version.resources

    # -- one attempt -------------------------------------------------------------------------------------------------

    async def _attempt(self, claimed: AttemptedRollout, resources: NamedResources | None) -> None:
        status, metadata = await self._execute(claimed, resources)
        attempt = self._open.get(claimed.attempt.attempt_id)
        if attempt is not None:
            attempt.reporting = True
        await self._writer.written()
        await self._report(claimed, status, metadata)

    async def _execute(
        self, claimed: AttemptedRollout, resources: NamedResources | None
    ) -> tuple[AttemptStatus, dict[str, Any]]:
        """How the attempt ended, and what is to be kept of it."""
        seconds = claimed.config.timeout_seconds
        try:
            if resources is None:
                raise AgentError(f"the rollout asks for the resources {claimed.resources_id!r}, which the store lacks")
            done = await self._run(claimed, resources)
        except TimeoutError:
            late = AgentTimeoutError(f"the agent did not end within its {seconds:g} s and was stopped")
            return "timeout", self._failed(claimed, late)
        except AgentError as error:
            return "failed", self._failed(claimed, error)
        if done.failure is not None:
            return "failed", {"error": asdict(done.failure)}
        return "succeeded", {} if done.output is None else {"output": done.output}

    async def _run(self, claimed: AttemptedRollout, resources: NamedResources) -> Any:
        url = self.server_url or ""
        ids = claimed.rollout_id, claimed.attempt.attempt_id
        environment = attempt_environment(url, self._secret, *ids, redirect=self._redirect)
        if self._redirect and (llm := first_llm(resources)) is not None:
            environment["AGL_MODEL"] = llm.model
        return await self.pool.run(
            claimed, resources, url, environment, self._writer.put, claimed.config.timeout_seconds
        )

    def _failed(self, claimed: AttemptedRollout, error: AgentError) -> dict[str, Any]:
        """A failure the agent's process could not record itself."""
        failure = Failure.of(error.with_traceback(None))  # where the runner noticed says nothing about the agent
        now = time.time()
        attributes = {
            EXCEPTION_TYPE: failure.type,
            EXCEPTION_MESSAGE: failure.message,
            EXCEPTION_STACKTRACE: failure.traceback,
        }
        span = Span(
            claimed.rollout_id,
            claimed.attempt.attempt_id,
            EXCEPTION,
            now,
            now,
            trace_id=new_trace_id(),
            span_id=new_span_id(),
            status_code="ERROR",
            status_message=failure.message,
            attributes=attributes,
        )
        self._writer.put([span])
        return {"error": asdict(failure)}

    async def _report(self, claimed: AttemptedRollout, status: AttemptStatus, metadata: dict[str, Any]) -> None:
        ids = (claimed.rollout_id, claimed.attempt.attempt_id)
        try:
            attempt = await self._patiently(lambda: self.store.update_attempt(*ids, status=status, metadata=metadata))
        except NotFoundError:
            self._count("discarded")
        except ConflictError:
            await self._report_late(ids, status, metadata)
        else:
            self._count("discarded" if attempt.metadata.get("superseded") else status)

    async def _report_late(self, ids: tuple[str, str], status: AttemptStatus, metadata: dict[str, Any]) -> None:
        """The store has ended the attempt itself; where it too saw a timeout, it lacks only the record of it."""
        attempt = await self._patiently(lambda: self.store.update_attempt(*ids, metadata=metadata))
        self._count(status if attempt.status == status else "discarded")

    # -- staying in touch --------------------------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        while True:
            stats = asdict(self.statistics)
            await self._patiently(lambda stats=stats: self.store.update_worker(self.worker_id, stats))
            await self._discard_fenced()
            await asyncio.sleep(self._heartbeat_seconds)

    async def _discard_fenced(self) -> None:
        """Stop the attempts of rollouts that were cancelled, finished or queued again behind our back."""
        ids = [attempt.claimed.rollout_id for attempt in self._open.values() if not attempt.reporting]
        if not ids:
            return
        rollouts = await self.store.query_rollouts(rollout_id_in=ids)
        open_still = {rollout.rollout_id for rollout in rollouts if rollout.status in ("preparing", "running")}
        for attempt_id, attempt in list(self._open.items()):
            if attempt.claimed.rollout_id in ids and attempt.claimed.rollout_id not in open_still:
                self._discard(attempt_id)

    def _discard(self, attempt_id: str) -> None:
        attempt = self._open.get(attempt_id)
        if attempt is not None and not attempt.reporting and attempt.task.cancel():
            self._count("discarded")
