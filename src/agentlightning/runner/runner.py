"""The runner: claims rollouts from the store, executes them and reports their results.

Guarantees: All spans of an attempt, including its reward, are in the store before the attempt is `succeeded`. Every
claimed attempt ends in exactly one report, unless the store has reassigned or cancelled the rollout in the meantime;
then the attempt is stopped without a report. Stopping the runner requeues unfinished rollouts. If it is killed, its
lease expires, and the store gives its rollouts to other runners.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentlightning.attempt_variables import (
    PATIENCE,
    PATIENCE_SECONDS,
    attempt_environment,
    import_environment,
    worker_environment,
)
from agentlightning.errors import (
    AgentError,
    AgentLightningError,
    AgentTimeoutError,
    ConfigError,
    ConflictError,
    Failure,
    NotFoundError,
    StoreClosedError,
    StoreError,
)
from agentlightning.observability.logs import about
from agentlightning.resources import LLM, NamedResources, ProxyLLM, named_resources
from agentlightning.rollouts import Attempt, AttemptedRollout, AttemptStatus
from agentlightning.runner.agents.agent import AgentLike, agent_spec, function_spec
from agentlightning.runner.agents.arguments import first_llm
from agentlightning.runner.attempt_environ import check_variables
from agentlightning.runner.hosts.host_pool import HostPool, LostAttemptError
from agentlightning.runner.hosts.messages import Done, Job, Load
from agentlightning.span import ERROR_TYPE, EXCEPTION, TURN_LIMIT_REACHED, Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.ids import new_id
from agentlightning.tracing.agent_spans import event_span, sanitize_span
from agentlightning.tracing.emit import exception_attributes
from agentlightning.tracing.outbox import Outbox, Retry
from agentlightning.util.json_values import Json

logger = logging.getLogger(__name__)

HUNG_AFTER_SECONDS = 300.0
"""A runner whose event loop has not run for this long hangs, and must lose its attempts."""

# -- spans -----------------------------------------------------------------------------------------------------------


class SpanWriter(Outbox[Span]):
    """An outbox in the runner's event loop, which ends with an error where the store cannot be used for longer than
    `retry` tries: nothing that an agent emits is dropped, but for what the store rejects."""

    rejections = (ConfigError, ConflictError, NotFoundError)

    def __init__(self, store: LightningStoreBase, retry: Retry) -> None:
        super().__init__("the store", patience=retry.patience)
        self._store, self.failed = store, retry.failed

    async def send(self, batch: list[Span]) -> None:
        await self._store.add_many_spans(batch)

    def repair(self, item: Span) -> Span:
        return sanitize_span(item)

    def give_up(self, batch: list[Span], error: Exception) -> None:
        raise error


# -- the runner ------------------------------------------------------------------------------------------------------

STOP_SECONDS = 1.0
"""How long the end of the runner waits for a heartbeat under way."""
SIGN_OFF_SECONDS = 10.0
"""Time limit for requeuing rollouts and deregistering while stopping; afterwards the lease expires instead."""


@dataclass(frozen=True, slots=True)
class RunnerStatistics:
    """Numbers of attempts since the runner was created.

    >>> from agentlightning.runner import RunnerStatistics
    >>> RunnerStatistics(claimed=2, succeeded=1).succeeded
    1
    """

    claimed: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    timeout: int = 0
    discarded: int = 0
    """Stopped or unreported, because the store had cancelled or reassigned the rollout."""
    requeued: int = 0
    """Requeued when the runner stopped, or because the attempt was lost to another one that shared its process, or
    needs a process of its own."""
    crashes: int = 0
    """Agent processes that died."""
    spans_dropped: int = 0
    """Spans of agents that the store rejects in every form."""


@dataclass(slots=True)
class _ActiveAttempt:
    """An attempt between claim and report."""

    claimed: AttemptedRollout
    task: asyncio.Task[None]
    reporting: bool = False
    """The agent has ended; its spans and report are being written."""


class Runner:
    """Executes an agent on the rollouts of a store.

    The forms of `agent` and `reward` are described in `agents/agent.py` and `agents/arguments.py`. `concurrency`
    attempts run at once, spread over `hosts` processes; with `fresh_process`, each attempt runs on the main thread of a
    new process, forked from one that has imported the agent, and `hosts` is ignored. That begins by itself, with a
    warning, once an attempt or a reward changes what its process shares (working directory, signals, redirected
    output), or calls a model from where its attempt cannot be told. An attempt lost to another's crash is repeated in a
    process of its own. Neither counts against `max_attempts`. `env` maps environment variables to the fields of a dict
    task that they hold; the fields in `hide` are given to the reward function only. `cwd` is the working directory of
    the agent, `log` the file for its output.

    `server_url` and `secret` form each attempt's URLs and key; the URL can also be passed to `start`. With
    `redirect=True` the agent's model calls go to that server, with None only to the proxy that the rollout's resources
    name (a `ProxyLLM`, as in training runs), with False they are not redirected.

    The runner claims from `queues` only (None: from all) and ends after `max_rollouts`. One claim waits for up to
    `poll_seconds`. Every `heartbeat_seconds` it renews its lease and checks whether attempts were taken from it; after
    `lease_seconds` without a heartbeat, the store gives its rollouts to others (None: no lease; only the limits of
    each rollout apply). Operations on a store, embedded or on a server, that is full, busy or unreachable are retried
    for `patience` seconds; programs get it as AGL_PATIENCE, so that what they emit waits for the server as long.
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
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.store = store
        self.worker_id = worker_id or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._wake = asyncio.Event()
        scorer = None if reward is None else function_spec(reward)
        self.pool = HostPool(
            Load(agent_spec(agent), scorer, check_variables(env or {}, hide), tuple(hide), grace),
            concurrency=concurrency,
            hosts=hosts,
            fresh=fresh_process,
            cwd=cwd,
            log=log,
            on_change=self._wake.set,
            on_broken=self._fail,
        )
        self.error: BaseException | None = None
        """The error that ended the runner."""
        self.server_url = server_url
        """Where agents reach the gateway; None until it is known."""
        self.redirect = redirect
        self._secret = secret
        self._queues = queues
        self._remaining_claims = math.inf if max_rollouts is None else max_rollouts
        if lease_seconds is not None:
            if lease_seconds <= 0:
                raise ConfigError(f"lease_seconds={lease_seconds:g}: the lease must be positive; use None for no lease")
            heartbeat_seconds = min(heartbeat_seconds, lease_seconds / 4)  # so that a few heartbeats may be late
        self._heartbeat_seconds = heartbeat_seconds
        self._poll_seconds = poll_seconds
        self._lease_seconds = lease_seconds
        self._retry = Retry(patience)
        self._heart = threading.Thread(target=self._beat, name="agl-heartbeat", daemon=True)
        self._heart_ends = threading.Event()
        self._last_alive = time.monotonic()
        self._counts = Counter[str]()
        self._active: dict[str, _ActiveAttempt] = {}
        self._writer = SpanWriter(store, self._retry)
        self._ended = asyncio.Event()
        self._stop_at_once = asyncio.Event()
        self._claiming: asyncio.Task[None] | None = None
        """From `start` to `stop`."""
        self._claimed: list[AttemptedRollout] = []
        """Claimed, and not started yet."""
        self._alone: set[str] = set()
        """Rollouts whose next attempt has a process of its own."""
        self._helpers: list[asyncio.Task[None]] = []

    # -- life --------------------------------------------------------------------------------------------------------

    def start_hosts(self) -> None:
        """Start importing the agent in another process, and return immediately. Needs no event loop and no server URL;
        with both a URL and `redirect`, clients that the agent creates at import time use that server too."""
        url = self.server_url if self.redirect else None
        self.pool.spawn(import_environment(url, self._secret, self.worker_id) if url else {})

    async def load(self) -> None:
        """Wait until the agent is imported and a host is ready; `start` includes this. Raises AgentError."""
        self.start_hosts()
        await self.pool.start()

    async def start(self, server_url: str | None = None) -> None:
        """Load the agent, register and begin to claim rollouts. Raises AgentError, and ConfigError without a URL."""
        self.server_url = server_url or self.server_url
        if self.server_url is None:
            raise ConfigError("the runner needs server_url, where agents reach the gateway; pass it to start()")
        await self.load()
        await self._retry(self._register)
        self._heart.start()
        self._claiming = self._create_supervised_task(self._claim())
        self._helpers = [self._create_supervised_task(self._watch()), self._create_supervised_task(self._writer.run())]

    async def _register(self, **more: Any) -> None:
        counts = asdict(self.statistics)
        await self.store.update_worker(self.worker_id, counts | more, lease_seconds=self._lease_seconds)

    def _beat(self) -> None:
        """Renew the lease, however busy the event loop of the runner is."""
        with asyncio.Runner() as own:
            while not self._heart_ends.wait(self._heartbeat_seconds):
                if time.monotonic() - self._last_alive > HUNG_AFTER_SECONDS:
                    continue
                try:
                    own.run(self._register())
                except StoreClosedError:
                    return
                except AgentLightningError as error:
                    logger.warning("the heartbeat of %s did not reach the store: %s", self.worker_id, error)

    async def _stop_heart(self) -> None:
        self._heart_ends.set()
        if self._heart.is_alive():
            await asyncio.to_thread(self._heart.join, STOP_SECONDS)

    def stop_at_once(self) -> None:
        """End the draining of `stop`: attempts that still run are stopped and their rollouts requeued."""
        self._stop_at_once.set()

    async def stop(self, drain_seconds: float | None = 5.0) -> None:
        """Stop claiming, wait up to `drain_seconds` (None: without limit) for running attempts, requeue the rest, and
        end all processes.

        Raises the error that ended the runner, if any. Idempotent.
        """
        claiming, self._claiming = self._claiming, None
        try:
            if claiming is not None:
                claiming.cancel()  # the store requeues what it had already assigned
                await asyncio.wait({claiming})
                await self._drain(drain_seconds)
        finally:
            for task in self._helpers:
                task.cancel()
            await self._stop_heart()
            await self.pool.close()
            self._ended.set()
        if self.error is not None and claiming is not None:
            raise self.error

    async def wait(self) -> None:
        """Wait until the runner has ended or has done `max_rollouts`. Raises the error that ended it."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    async def __aenter__(self) -> Runner:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def statistics(self) -> RunnerStatistics:
        dropped = self._writer.counts.dropped
        return RunnerStatistics(
            **self._counts, running=len(self._active), crashes=self.pool.crashes, spans_dropped=dropped
        )

    async def _drain(self, seconds: float | None) -> None:
        await self._wait_for([attempt.task for attempt in self._active.values()], seconds)
        left = list(self._active.values())
        for attempt in left:
            if not attempt.reporting or self._stop_at_once.is_set():
                attempt.task.cancel()
        if left:
            await asyncio.wait([attempt.task for attempt in left])
        if self.error is not None:
            return
        unfinished = [*self._claimed, *(each.claimed for each in left if each.task.cancelled())]
        sign_off = asyncio.get_running_loop().create_task(self._sign_off(unfinished))
        await self._wait_for([sign_off], None)
        await asyncio.wait({sign_off}, timeout=SIGN_OFF_SECONDS)
        if sign_off.cancel():
            logger.warning("the store does not answer; %d rollouts are left to the lease", len(unfinished))

    async def _wait_for(self, tasks: Sequence[asyncio.Task[None]], seconds: float | None) -> None:
        """Wait for the tasks, at most so many seconds, and until `stop_at_once` or an error."""
        if tasks:
            waits = [asyncio.ensure_future(each) for each in (self._stop_at_once.wait(), asyncio.wait(tasks))]
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for each in waits:
                each.cancel()

    async def _sign_off(self, left: Sequence[AttemptedRollout]) -> None:
        """Requeue what is left and deregister the worker."""
        try:
            await asyncio.gather(*(self._requeue(each, f"the runner {self.worker_id} was stopped") for each in left))
            await self._writer.written()
            await self._stop_heart()  # it would register the runner again
            await self._retry(self._register, stopped=True)
        except StoreError as error:
            logger.warning("the runner %s could not sign off: %s", self.worker_id, error)

    async def _requeue(self, claimed: AttemptedRollout, reason: str) -> None:
        """Requeue a rollout that is still assigned to this runner. The attempt does not count against its limit."""
        ids, config = claimed.ids, claimed.config
        with suppress(NotFoundError, ConflictError):  # deleted, finished or cancelled meanwhile
            latest = await self._retry(self.store.get_latest_attempt, ids[0])
            if latest is None or latest.attempt_id != ids[1] or latest.status not in ("preparing", "running"):
                return
            if config.max_attempts > 1:
                more = config.model_copy(update={"max_attempts": config.max_attempts + 1})
                await self._retry(self.store.update_rollout, ids[0], config=more)
            await self._retry(self.store.requeue_rollout, ids[0], reason)
            self._counts["requeued"] += 1

    # -- failure -----------------------------------------------------------------------------------------------------

    def _create_supervised_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the runner: stop all attempts without a report. The store requeues them when the lease expires."""
        if self.error is not None:
            return
        logger.error("the runner %s ends: %s: %s", self.worker_id, type(error).__name__, error)
        self.error = error
        self._stop_at_once.set()
        for task in (self._claiming, *(attempt.task for attempt in self._active.values())):
            if task is not None:
                task.cancel()
        self._ended.set()

    # -- claiming ----------------------------------------------------------------------------------------------------

    async def _claim(self) -> None:
        while True:
            free = int(min(self.pool.capacity - len(self._active), self._remaining_claims))
            if free <= 0:
                if self._remaining_claims == 0 and not self._active:
                    self._ended.set()
                    return
                await self._wake.wait()
                self._wake.clear()
                continue
            claim_id = new_id("cl")  # if the response is lost, the claim is repeated under the same id
            self._claimed = await self._retry(
                self.store.dequeue_many_rollouts,
                free,
                self.worker_id,
                self._poll_seconds,
                queues=self._queues,
                claim_id=claim_id,
            )
            self._remaining_claims -= len(self._claimed)
            await self._launch()

    async def _launch(self) -> None:
        """Start what was claimed, with the versions of the resources that it asks for."""
        wanted = {rollout.resources_id for rollout in self._claimed}
        versions = {each: await self._retry(self._resources, each) for each in wanted}
        for rollout in self._claimed:
            task = self._create_supervised_task(self._attempt(rollout, versions[rollout.resources_id]))
            attempt_id = rollout.attempt.attempt_id
            self._active[attempt_id] = _ActiveAttempt(rollout, task)
            task.add_done_callback(partial(self._on_attempt_done, attempt_id))
        self._counts["claimed"] += len(self._claimed)
        self._claimed = []

    def _on_attempt_done(self, attempt_id: str, _: object) -> None:
        self._active.pop(attempt_id, None)
        self._wake.set()

    async def _resources(self, resources_id: str | None) -> NamedResources | None:
        """The given version of the resources, by default the latest; None if the store does not have it."""
        if resources_id is None:
            latest = await self.store.get_latest_resources()
            return {} if latest is None else latest.resources
        version = await self.store.get_resources_by_id(resources_id)
        return version and version.resources

    # -- one attempt -------------------------------------------------------------------------------------------------

    async def _attempt(self, claimed: AttemptedRollout, resources: NamedResources | None) -> None:
        with about(rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id, worker_id=self.worker_id):
            rollout_id = claimed.rollout_id
            outcome = await self._execute(claimed, resources, rollout_id in self._alone)
            attempt = self._active.get(claimed.attempt.attempt_id)
            if attempt is not None:
                attempt.reporting = True
            await self._writer.written()
            if isinstance(outcome, LostAttemptError):
                self._alone.add(rollout_id)
                self._remaining_claims += 1
                logger.info("an attempt is repeated: %s", outcome)
                return await self._requeue(claimed, str(outcome))
            status, metadata = outcome
            if status == "succeeded":
                self._alone.discard(rollout_id)
            self._counts[await self._report(claimed, status, metadata)] += 1
            if status != "succeeded":
                logger.info("an attempt ended as %s: %s", status, metadata["error"]["message"])

    async def _execute(
        self, claimed: AttemptedRollout, resources: NamedResources | None, alone: bool
    ) -> tuple[AttemptStatus, Json] | LostAttemptError:
        """Run an attempt until it ends: its status, and the metadata to store with it. One that fails because it has
        had all the answers that it may have has not failed by itself: what it did until then is its rollout. The error
        of one that was lost for no fault of its own, and is to be repeated. `alone`: in a process of its own."""
        try:
            if resources is None:
                raise AgentError(f"the rollout asks for the resources {claimed.resources_id!r}, which the store lacks")
            done = await self._run(claimed, resources, alone)
        except LostAttemptError as lost:
            return lost
        except TimeoutError:
            said = f"the agent did not end within its {claimed.config.timeout_seconds:g} s and was stopped"
            return "timeout", self._record_failure(claimed, AgentTimeoutError(said))
        except AgentError as error:
            metadata = self._record_failure(claimed, error)
        else:
            if done.failure is None:
                return "succeeded", {} if done.output is None else {"output": done.output}
            metadata = {"error": asdict(done.failure)}
        if await self._ended_at_turn_limit(claimed, resources or {}):
            return "succeeded", {**metadata, TURN_LIMIT_REACHED: True}
        return "failed", metadata

    async def _ended_at_turn_limit(self, claimed: AttemptedRollout, resources: NamedResources) -> bool:
        """Whether a call was refused because of the limit on answers."""
        if not any(isinstance(each, LLM) and each.max_calls is not None for each in resources.values()):
            return False
        spans = await self._retry(self.store.query_spans, *claimed.ids)
        return any(span.attributes.get(ERROR_TYPE) == TURN_LIMIT_REACHED for span in spans)

    async def _run(self, claimed: AttemptedRollout, resources: NamedResources, alone: bool) -> Done:
        url = self.server_url or ""
        llm = first_llm(resources)
        proxy_url = llm.root_url if isinstance(llm, ProxyLLM) else None
        redirect = self.redirect or (self.redirect is None and proxy_url is not None)
        environment = attempt_environment(url, self._secret, *claimed.ids, redirect=redirect, model_url=proxy_url)
        environment[PATIENCE] = f"{self._retry.patience:g}"
        if redirect:
            environment |= worker_environment(proxy_url or url, self._secret, self.worker_id)
        if redirect and llm is not None:
            environment["AGL_MODEL"] = llm.model
        job = Job(claimed, named_resources.dump_python(resources, mode="json"), url, environment)
        return await self.pool.run(job, self._writer.put, alone)

    def _record_failure(self, claimed: AttemptedRollout, error: AgentError) -> Json:
        """Record a failure that the agent's process could not record itself."""
        failure = Failure.of(error.with_traceback(None))  # the runner's own frames say nothing about the agent
        self._writer.put([event_span(*claimed.ids, EXCEPTION, exception_attributes(failure), failure.message)])
        return {"error": asdict(failure)}

    async def _report(self, claimed: AttemptedRollout, status: AttemptStatus, metadata: Json) -> str:
        """Report the end of an attempt to the store. Returns its status, or "discarded" if the store had moved on."""
        try:
            attempt = await self._retry(self.store.update_attempt, *claimed.ids, status=status, metadata=metadata)
        except NotFoundError:
            return "discarded"
        except ConflictError:  # the store has ended it; if that was the same timeout, only the metadata is missing
            attempt = await self._retry(self.store.update_attempt, *claimed.ids, metadata=metadata)
            return status if attempt.status == status else "discarded"
        return "discarded" if attempt.metadata.get("superseded") else status

    # -- watching ----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Stop attempts whose rollouts were cancelled, finished or reassigned in the store."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            self._last_alive = time.monotonic()
            claims = [attempt.claimed for attempt in self._active.values() if not attempt.reporting]
            running = {claimed.attempt.attempt_id: claimed.rollout_id for claimed in claims}
            if not running:
                continue
            latest = await self._retry(self.store.get_latest_attempts, [*running.values()])
            ours = await asyncio.gather(*(self._is_ours(each) for each in latest if each.attempt_id in running))
            for attempt_id in running.keys() - set(ours):
                attempt = self._active.get(attempt_id)
                if attempt is not None and not attempt.reporting and attempt.task.cancel():
                    self._counts["discarded"] += 1

    async def _is_ours(self, attempt: Attempt) -> str | None:
        """The id of an attempt that is still assigned to this runner, as the latest of its rollout. An `unresponsive`
        one that was not reassigned yet is revived by a heartbeat."""
        ids = attempt.rollout_id, attempt.attempt_id
        if attempt.status == "unresponsive":
            try:
                attempt = await self._retry(self.store.update_attempt, *ids, last_heartbeat_time=time.time())
            except NotFoundError:
                return None
        still = attempt.status in ("preparing", "running") and not attempt.metadata.get("superseded")
        return attempt.attempt_id if still else None
