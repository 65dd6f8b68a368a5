"""`LitAgentRunner` of 0.x: runs an agent in this process's own time. `agl.Runner` is what training runs use."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from agentlightning.attempt_address import attempt_secret
from agentlightning.compat.hooks import Hook, with_hooks
from agentlightning.compat.tracer import AgentOpsTracer, OtelTracer, check_tracer
from agentlightning.errors import AgentError, ConfigError
from agentlightning.resources import NamedResources
from agentlightning.rollouts import PRIVATE_QUEUE, Rollout, RolloutConfig, RolloutMode
from agentlightning.runner import Runner
from agentlightning.store.base import LightningStoreBase

logger = logging.getLogger(__name__)


class LitAgentRunner:
    """Runs one agent on rollouts of a store: `init(agent)`, `init_worker(0, store)`, then `step(task)` or `iter()`.

    Model calls are not redirected; the agent makes them where its resources or its environment say. `tracer` may be an
    `OtelTracer`, whose last trace is then that of the last step, or None. Raises ConfigError for another one, and where
    a method is called too early.

        >>> runner = agl.LitAgentRunner(max_rollouts=3)
        >>> runner.init(lambda task: 1.0)
    """

    def __init__(self, tracer: Any = None, max_rollouts: int | None = None, *, poll_interval: float = 0.5) -> None:
        check_tracer(tracer)
        if isinstance(tracer, AgentOpsTracer):
            logger.warning("AgentOpsTracer: calls to a provider are recorded after agl.track_all(), not by themselves")
        self.tracer, self.max_rollouts, self.poll_interval = tracer, max_rollouts, poll_interval
        self.worker_id: int | None = None
        self._agent: Any = None
        self._store: LightningStoreBase | None = None

    def __class_getitem__(cls, task: Any) -> type[Self]:
        """`LitAgentRunner[Task]`, for annotations."""
        return cls

    def init(self, agent: Any, *, hooks: Hook | Sequence[Hook] | None = None) -> None:
        """Set the agent, and the hooks around each attempt."""
        self._agent = with_hooks(agent, hooks)

    def init_worker(self, worker_id: int, store: LightningStoreBase) -> None:
        """Set the store."""
        self.worker_id, self._store = worker_id, store

    def teardown_worker(self, worker_id: int) -> None:
        """Forget the store."""
        self.worker_id = self._store = None

    def teardown(self) -> None:
        """Forget the agent."""
        self._agent = None

    @contextmanager
    def run_context(
        self,
        *,
        agent: Any,
        store: LightningStoreBase,
        hooks: Hook | Sequence[Hook] | None = None,
        worker_id: int | None = None,
    ) -> Generator[LitAgentRunner]:
        """`init` and `init_worker` for a block."""
        self.init(agent, hooks=hooks)
        self.init_worker(worker_id or 0, store)
        try:
            yield self
        finally:
            self.teardown_worker(worker_id or 0)
            self.teardown()

    async def iter(self) -> None:
        """Run queued rollouts until `max_rollouts` have run; without it, until the task is cancelled."""
        async with self._runner(max_rollouts=self.max_rollouts) as runner:
            await runner.wait()

    async def step(
        self, input: Any, *, resources: NamedResources | None = None, mode: RolloutMode | None = None
    ) -> Rollout:
        """Run one task, and return its finished rollout. Raises AgentError with what failed it."""
        store, queue = self._stored(), f"{PRIVATE_QUEUE}step-{secrets.token_hex(6)}"
        resources_id = None if resources is None else (await store.add_resources(resources)).resources_id
        config = RolloutConfig(max_attempts=1)
        queued = await store.enqueue_rollout(input, mode, resources_id, config, queue=queue)
        async with self._runner(max_rollouts=1, queues=[queue]) as runner:
            await runner.wait()
        rollout = await store.get_rollout_by_id(queued.rollout_id)
        attempt = await store.get_latest_attempt(queued.rollout_id)
        assert rollout is not None
        if isinstance(self.tracer, OtelTracer):
            self.tracer.remember(await store.query_spans(queued.rollout_id))
        if rollout.status != "succeeded":
            error: Any = {} if attempt is None else attempt.metadata.get("error") or {}
            raise AgentError(
                f"rollout {rollout.rollout_id} {rollout.status}: {error.get('message') or 'no reason given'}"
            )
        return rollout

    def _stored(self) -> LightningStoreBase:
        if self._agent is None:
            raise ConfigError("the runner has no agent; call init(agent) first")
        if self._store is None:
            raise ConfigError("the runner has no store; call init_worker(worker_id, store) first")
        return self._store

    def _runner(self, **options: Any) -> Runner:
        return Runner(
            self._stored(),
            self._agent,
            secret=attempt_secret(None),
            server_url="http://127.0.0.1:9",  # Nothing is redirected there.
            redirect=False,
            concurrency=1,
            poll_seconds=self.poll_interval,
            **options,
        )
