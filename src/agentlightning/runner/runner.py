"""The runner: claims rollouts from the store, has them executed, and reports.

It promises that all spans of an attempt, its reward included, are in the store before the attempt is `succeeded`; that
every attempt it has claimed ends in exactly one report, unless the store has meanwhile given the rollout to somebody
else or cancelled it (then the attempt is stopped and nobody reports); and that stopping it loses no rollout: what is
not finished is queued again. Killed, it loses none either: its lease runs out, and the store gives its rollouts to
others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from agentlightning.errors import (
    AgentError,
    AgentTimeoutError,
    ConfigError,
    ConflictError,
    Failure,
    NotFoundError,
    StoreError,
)
from agentlightning.observability.logs import about
from agentlightning.resources import NamedResources, ProxyLLM
from agentlightning.rollouts import (
    AttemptedRollout,
    AttemptStatus,
    attempt_environment,
    import_environment,
    worker_environment,
)
from agentlightning.runner.agents.arguments import first_llm
from agentlightning.runner.agents.spec import AgentLike
from agentlightning.runner.heartbeat import Heart
from agentlightning.runner.hosts.host_pool import HostPool
from agentlightning.runner.retry import Patience
from agentlightning.runner.span_writer import SpanWriter, failure_span
from agentlightning.runner.tally import RunnerStatistics
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.ids import new_id

logger = logging.getLogger(__name__)

GIVE_BACK_SECONDS = 10.0
"""How long a runner that is to stop at once waits for the store; what it cannot give back is left to the lease."""


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
    spread over `hosts` processes. `env` maps environment variables to the fields of a dict task they hold, and
    `hide` names the fields that the agent is not given (only the reward function is); `cwd` is where the agent
    runs; `log` takes what it prints. `server_url` and `secret` make each attempt's addresses; the URL may be given
    to `start` instead, after `start_hosts` has long begun to import the agent. With `redirect` the agent's model
    calls are led to that server; with None only to a proxy that the rollout's resources name (a `ProxyLLM`, as a
    training run's are); without it they go where they always go. A store that is full, or whose server is away, is
    tried again for `patience` seconds. `poll_seconds` is how long one claim waits.

    `queues` are the only ones claimed from (None: all), and after `max_rollouts` the runner ends. Silent for longer
    than `lease_seconds`, the runner is lost to the store, which gives its rollouts to others (None: only each
    rollout's own limits hold); it speaks every `heartbeat_seconds`, and looks as often whether an attempt was taken
    from it. With `fresh_process` every attempt runs in a process of its own, forked from one that has imported the
    agent, and gone with the attempt; `hosts` then means nothing.
    """

    def __init__(
        self,
        store: LightningStoreBase,
        agent: AgentLike,
        *,
        secret: str,
        server_url: str | None = None,
        redirect: bool | None = True,
        reward: Callable[..., Any] | str | None = None,
        concurrency: int = 32,
        hosts: int = 1,
        fresh_process: bool = False,
        queues: Sequence[str] | None = None,
        max_rollouts: int | None = None,
        worker_id: str | None = None,
        env: Mapping[str, str] | None = None,
        hide: Sequence[str] = (),
        cwd: str | Path | None = None,
        log: str | Path | None = None,
        grace: float = 2.0,
        lease_seconds: float | None = 30.0,
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
            fresh=fresh_process,
            env=env,
            hide=hide,
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
        self._queues = None if queues is None else tuple(queues)
        self._claims_left = max_rollouts
        self._heartbeat_seconds, self._poll_seconds = _heartbeat(heartbeat_seconds, lease_seconds), poll_seconds
        self._lease_seconds = lease_seconds
        self._patiently = Patience(patience)
        self._heart = Heart(
            store,
            self.worker_id,
            lease_seconds=lease_seconds,
            interval=self._heartbeat_seconds,
            stats=lambda: asdict(self.statistics),
        )
        self._counts = RunnerStatistics()
        self._open: dict[str, _Open] = {}
        self._writer = SpanWriter(store, self._patiently, self._discard)
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._hurried = asyncio.Event()
        self._stopping = False
        self._started = False
        self._claiming: asyncio.Task[None] | None = None
        self._asking: asyncio.Future[list[AttemptedRollout]] | None = None
        """A claim that the store has not answered yet."""
        self._helpers: list[asyncio.Task[None]] = []

    # -- life --------------------------------------------------------------------------------------------------------

    def start_hosts(self, redirect: bool | None = None) -> None:
        """Begin to import the agent in another process; returns at once, needs neither a loop nor a server URL. With
        both a URL and `redirect`, a client that the agent makes while it is imported leads there too."""
        self._redirect = self._redirect if redirect is None else redirect
        led = self._redirect and self.server_url is not None
        self.pool.spawn(import_environment(self.server_url or "", self._secret, self.worker_id) if led else None)

    async def load(self) -> None:
        """Wait until the agent is imported and a host is ready; `start` does it too. Raises AgentError."""
        if self._loaded:
            return
        self.start_hosts()
        try:
            await self.pool.start()
        except BaseException:
            await self.pool.close()
            raise
        self._loaded = True

    async def start(self, server_url: str | None = None, redirect: bool | None = None) -> None:
        """Begin to work. Raises AgentError where the agent cannot be had, ConfigError without a server URL."""
        self.server_url = server_url or self.server_url
        self._redirect = self._redirect if redirect is None else redirect
        if self.server_url is None:
            raise ConfigError("the runner needs server_url, where agents reach the gateway; give it to start()")
        await self.load()
        await self._patiently(self._register)
        self._started = True
        self._heart.start()
        self._claiming = self._supervised(self._claim())
        self._helpers = [self._supervised(self._watch()), self._supervised(self._writer.run())]

    async def _register(self, **more: Any) -> None:
        stats = asdict(self.statistics) | more
        await self.store.update_worker(self.worker_id, stats, lease_seconds=self._lease_seconds)

    def hurry(self) -> None:
        """Have `stop` wait for no attempt any longer: what still runs is queued again."""
        self._hurried.set()

    async def stop(self, drain_seconds: float | None = 5.0) -> None:
        """Claim nothing more, give what runs `drain_seconds` to end (None: all the time it takes), queue the rest
        again, end all processes.

        Raises the error the runner ended with, if it did. Safe to call twice.
        """
        self._stopping = True
        self._wake.set()
        if self._asking is not None:
            self._asking.cancel()  # the store takes back what nobody has heard of
            await asyncio.wait({self._asking})
        started, self._started = self._started, False
        try:
            if started:
                await self._drain(drain_seconds)
        finally:
            for task in self._helpers:
                task.cancel()
            await self._heart.stop()
            await self.pool.close()
            self._ended.set()
        if self.error is not None and started:
            raise self.error

    async def wait(self) -> None:
        """Wait until the runner has ended, or has done all it was to do. Raises the error it ended with."""
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

    async def _drain(self, seconds: float | None) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        if self._claiming is not None:
            await self._finished([self._claiming], until)
            self._claiming.cancel()  # no sooner, as it may have claimed what has yet to be begun or given back
        await self._finished([attempt.task for attempt in self._open.values()], until)
        left = list(self._open.values())
        for attempt in left:
            if self.error is not None or not attempt.reporting or self._hurried.is_set():
                attempt.task.cancel()
        if left:
            await asyncio.wait([attempt.task for attempt in left])
        if self.error is None:
            await self._part([attempt.claimed for attempt in left if attempt.task.cancelled()])

    async def _finished(self, tasks: Sequence[asyncio.Task[None]], until: float | None) -> None:
        """Wait for the tasks, until then (monotonic seconds), until somebody hurries us, or until nothing can be done
        any more."""
        if not tasks or self.error is not None:
            return
        hurried = asyncio.ensure_future(self._hurried.wait())
        ended = asyncio.ensure_future(asyncio.wait(tasks))
        seconds = None if until is None else max(0.0, until - time.monotonic())
        await asyncio.wait({hurried, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in (hurried, ended):
            task.cancel()

    async def _part(self, left: Sequence[AttemptedRollout]) -> None:
        """Tell the store the last things. In a hurry, it is not waited for long."""
        parting = asyncio.get_running_loop().create_task(self._sign_off(left))
        await self._finished([parting], None)
        await asyncio.wait({parting}, timeout=GIVE_BACK_SECONDS)
        if not parting.done():
            parting.cancel()
            logger.warning("the store does not answer; %d rollouts are left to the lease", len(left))

    async def _sign_off(self, left: Sequence[AttemptedRollout]) -> None:
        try:
            await self._give_back(left)
            await self._writer.written()
            await self._patiently(lambda: self._register(stopped=True))
        except StoreError as error:
            logger.warning("the runner %s could not sign off: %s", self.worker_id, error)

    async def _give_back(self, claimed: Sequence[AttemptedRollout]) -> None:
        """Queue again what is still ours."""
        ours = {rollout.rollout_id: rollout.attempt.attempt_id for rollout in claimed}
        if not ours:
            return
        reason = f"the runner {self.worker_id} was stopped"
        going = await self._patiently(
            lambda: self.store.query_rollouts(rollout_id_in=list(ours), status_in=("preparing", "running"))
        )
        for rollout in going:
            latest = await self._patiently(lambda r=rollout: self.store.get_latest_attempt(r.rollout_id))
            if latest is not None and latest.attempt_id == ours[rollout.rollout_id]:
                await self._patiently(lambda r=rollout: self.store.requeue_rollout(r.rollout_id, reason))
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

    # -- claiming ----------------------------------------------------------------------------------------------------

    def _wake_up(self) -> None:
        self._wake.set()

    async def _claim(self) -> None:
        while not self._stopping:
            room = self._room()
            if room <= 0:
                if self._claims_left == 0 and not self._open:
                    self._ended.set()
                    return
                await self._wake.wait()
                self._wake.clear()
                continue
            claimed = await self._claim_some(room)
            if self._stopping:
                await self._give_back(claimed)
            elif claimed:
                await self._launch(claimed)

    def _room(self) -> int:
        room = min(self._concurrency, self.pool.capacity) - len(self._open)
        return room if self._claims_left is None else min(room, self._claims_left)

    async def _claim_some(self, room: int) -> list[AttemptedRollout]:
        """Up to `room` rollouts. An answer that was lost on its way is asked for again under the same id."""
        claim_id, poll = new_id("cl"), self._poll_seconds
        self._asking = asyncio.ensure_future(
            self._patiently(
                lambda: self.store.dequeue_many_rollouts(
                    room, self.worker_id, poll, queues=self._queues, claim_id=claim_id
                )
            )
        )
        try:
            claimed = await self._asking
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            return []
        if self._claims_left is not None:
            self._claims_left -= len(claimed)
        return claimed

    async def _launch(self, claimed: Sequence[AttemptedRollout]) -> None:
        versions: dict[str | None, NamedResources | None] = {}
        for rollout in claimed:
            if rollout.resources_id not in versions:
                versions[rollout.resources_id] = await self._patiently(
                    lambda wanted=rollout.resources_id: self._resources(wanted)
                )
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
        with about(rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id, worker_id=self.worker_id):
            status, metadata = await self._execute(claimed, resources)
            attempt = self._open.get(claimed.attempt.attempt_id)
            if attempt is not None:
                attempt.reporting = True
            await self._writer.written()
            await self._report(claimed, status, metadata)
            if status != "succeeded":
                logger.info("an attempt ended as %s: %s", status, metadata["error"]["message"])

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
        llm = first_llm(resources)
        elsewhere = llm.root_url if isinstance(llm, ProxyLLM) else None
        redirect = self._redirect or (self._redirect is None and elsewhere is not None)
        environment = attempt_environment(url, self._secret, *ids, redirect=redirect, model_url=elsewhere)
        if redirect:
            environment |= worker_environment(elsewhere or url, self._secret, self.worker_id)
        if redirect and llm is not None:
            environment["AGL_MODEL"] = llm.model
        return await self.pool.run(
            claimed, resources, url, environment, self._writer.put, claimed.config.timeout_seconds
        )

    def _failed(self, claimed: AttemptedRollout, error: AgentError) -> dict[str, Any]:
        """A failure the agent's process could not record itself."""
        failure = Failure.of(error.with_traceback(None))  # where the runner noticed says nothing about the agent
        self._writer.put([failure_span(claimed, failure)])
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

    async def _watch(self) -> None:
        """Stop the attempts of rollouts that were cancelled, finished or given to somebody else behind our back."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            self._heart.turned()
            going = [attempt for attempt in self._open.values() if not attempt.reporting]
            for attempt, gone in zip(going, await asyncio.gather(*map(self._is_gone, going)), strict=True):
                if gone:
                    self._discard(attempt.claimed.attempt.attempt_id)

    async def _is_gone(self, attempt: _Open) -> bool:
        """Whether an attempt is no longer ours. One the store thought lost, and gave to nobody yet, is back."""
        ids = attempt.claimed.rollout_id, attempt.claimed.attempt.attempt_id
        try:
            latest = await self._patiently(lambda: self.store.get_latest_attempt(ids[0]))
            if latest is None or latest.attempt_id != ids[1]:
                return True
            if latest.status != "unresponsive":
                return latest.status not in ("preparing", "running")
            back = await self._patiently(lambda: self.store.update_attempt(*ids, last_heartbeat_time=time.time()))
        except NotFoundError:
            return True
        return bool(back.metadata.get("superseded"))

    def _discard(self, attempt_id: str) -> None:
        attempt = self._open.get(attempt_id)
        if attempt is not None and not attempt.reporting and attempt.task.cancel():
            self._count("discarded")


def _heartbeat(seconds: float, lease: float | None) -> float:
    """Often enough that a beat or two may be late."""
    if lease is None:
        return seconds
    if lease <= 0:
        raise ConfigError(f"lease_seconds={lease:g}: a lease lasts more than no time; use None for no lease")
    return min(seconds, lease / 4)
