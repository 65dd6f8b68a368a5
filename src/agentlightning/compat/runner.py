"""How 0.x ran agents: `Hook`, `OtelTracer`, `AgentOpsTracer` and `LitAgentRunner`.

Agents are always traced with OpenTelemetry here, so that a trainer has nothing to choose; `agl.Runner` is what training
runs use.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

from opentelemetry import trace

from agentlightning.attempt_address import attempt_secret
from agentlightning.config import HOOKS
from agentlightning.errors import AgentError, ConfigError
from agentlightning.resources import NamedResources
from agentlightning.rollouts import PRIVATE_QUEUE, AttemptedRollout, Rollout, RolloutConfig, RolloutMode
from agentlightning.runner import Runner
from agentlightning.runner.agents.agent import CommandLine, agent_spec, load_agent
from agentlightning.runner.agents.arguments import Invocation
from agentlightning.runner.agents.litagent import LitAgent
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.scope import SpanSink, current_scope, enter_scope, scope
from agentlightning.tracing.tracer import install_globally, tracer_provider
from agentlightning.util.event_loop import result_of, run_sync


class Hook:
    """Code around each attempt. Override what is needed; every method may be left out. It runs in the process of the
    agent, so it is pickled; an exception in it fails the attempt.

    `spans` and `tracer.get_last_trace()` are what this process has recorded so far. Model calls, which the gateway
    records, are in the store.

        >>> class Print(agl.Hook):
        ...     async def on_rollout_start(self, *, agent, runner, rollout):
        ...         print(rollout.rollout_id)
    """

    async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: AttemptedRollout) -> None:
        """Before the attempt."""

    async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: AttemptedRollout) -> None:
        """Before the agent begins, when what is emitted is recorded."""

    async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: AttemptedRollout) -> None:
        """After the agent has ended, while what is emitted is still recorded."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: AttemptedRollout, spans: list[Span]) -> None:
        """After the attempt, also where the agent has failed."""


class OtelTracer:
    """Records what a block of your own code traces or emits: `async with tracer.trace_context(): ...`, and then
    `tracer.get_last_trace()`. A trainer traces every attempt in this way, with this argument or without it.

        >>> tracer = agl.OtelTracer()
        >>> async def record():
        ...     async with tracer.trace_context():
        ...         agl.emit_reward(0.5)
        >>> asyncio.run(record())
        >>> agl.find_final_reward(tracer.get_last_trace())
        0.5
    """

    def __init__(self) -> None:
        self._last: list[Span] = []
        self._sink: SpanSink | None = None
        """Where the spans it is given go on to."""

    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStoreBase | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncGenerator[trace.Tracer]:
        """The spans of the block are those of an attempt of `store`, to which they are written at its end; without a
        store they are only remembered. Yields an OpenTelemetry tracer called `name`. Raises ConfigError where some of
        store, rollout_id and attempt_id are given, and not all of them."""
        given = {"store": store, "rollout_id": rollout_id, "attempt_id": attempt_id}
        missing = [key for key, value in given.items() if value is None]
        if missing and len(missing) < len(given):
            raise ConfigError(f"{', '.join(missing)} not given: spans are written with all of {', '.join(given)}")
        install_globally()
        collected = OtelTracer()
        try:
            with scope(
                rollout_id or f"ro-{secrets.token_hex(8)}", attempt_id or f"at-{secrets.token_hex(8)}", collected
            ):
                yield tracer_provider().get_tracer(name or "agentlightning")
        finally:
            self.remember(collected.get_last_trace())
            if store is not None and (spans := collected.get_last_trace()):
                await store.add_many_spans(spans)

    def get_last_trace(self) -> list[Span]:
        """The spans of the last block, or of the last step of a `LitAgentRunner` with this tracer."""
        return list(self._last)

    def put(self, spans: Sequence[Span]) -> None:
        """Take spans that were recorded."""
        self._last.extend(spans)
        if self._sink is not None:
            self._sink.put(spans)

    def remember(self, spans: Sequence[Span]) -> None:
        """Make these the last trace."""
        self._last = list(spans)

    def get_langchain_handler(self) -> None:
        """None: LangChain needs no callback handler, as the gateway records its model calls."""
        return None


class AgentOpsTracer(OtelTracer):
    """An `OtelTracer`. What AgentOps recorded, model calls, the gateway of a training run and `agl run` record. Where
    an agent calls a provider directly, `agl.track_all()` does; a `LitAgentRunner` says so.

    >>> agl.AgentOpsTracer().get_last_trace()
    []
    """


def check_tracer(tracer: Any) -> None:
    """Raises ConfigError for a tracer other than an OtelTracer, which says what is done anyway."""
    kind = tracer if isinstance(tracer, type) else type(tracer)
    if tracer is not None and kind.__name__ not in ("OtelTracer", "AgentOpsTracer"):
        raise ConfigError(
            f"tracer={tracer!r} has no place here: attempts are traced with OpenTelemetry, whatever records the spans."
            " Leave it out; instrument libraries in the agent, or export spans with OTEL_EXPORTER_OTLP_ENDPOINT"
            " (docs/guides/operations/opentelemetry.md)"
        )


class HookedAgent(LitAgent[Any]):
    """An agent with hooks around each attempt."""

    def __init__(self, agent: Any, hooks: Sequence[Hook | str]) -> None:
        super().__init__(trained_agents=getattr(agent, "trained_agents", None))
        self.agent, self.given = agent, tuple(hooks)
        self.hooks: list[Hook] = [HOOKS.find(each)() if isinstance(each, str) else each for each in self.given]

    def __reduce__(self) -> tuple[Any, ...]:
        return HookedAgent, (self.agent, self.given)

    def rollout(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """In a thread, as agents that block are run."""
        return run_sync(self._attempt(task, resources, rollout))

    async def _attempt(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        inside = current_scope()
        assert inside is not None, "an attempt runs inside a scope"
        runner = SimpleNamespace(get_worker_id=lambda: rollout.attempt.worker_id)
        shared: dict[str, Any] = {"agent": self.agent, "runner": runner, "rollout": rollout}
        tracer = OtelTracer()
        tracer._sink = inside.sink  # pyright: ignore[reportPrivateUsage]
        await self._call("on_rollout_start", **shared)
        try:
            with enter_scope(replace(inside, sink=tracer)):
                await self._call("on_trace_start", tracer=tracer, **shared)
                try:
                    return await result_of(load_agent(self.agent)(Invocation(rollout, resources, task=task))())
                finally:
                    await self._call("on_trace_end", tracer=tracer, **shared)
        finally:
            await self._call("on_rollout_end", spans=tracer.get_last_trace(), **shared)

    async def _call(self, name: str, **arguments: Any) -> None:
        for hook in self.hooks:
            await result_of(getattr(hook, name)(**arguments))


def with_hooks(agent: Any, hooks: Hook | Sequence[Hook] | None, named: Sequence[str] = ()) -> Any:
    """The agent with hooks around each attempt, objects and `named` ones. Raises ConfigError for what is no hook, and
    for commands, which run in a process of their own."""
    given = () if hooks is None else (hooks,) if isinstance(hooks, Hook) else hooks
    chosen = tuple(each() if isinstance(each, type) else each for each in (*named, *given))
    if not chosen or agent is None:
        return agent
    for each in chosen:
        if not isinstance(each, Hook | str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"hooks={each!r} is no hook; give objects of subclasses of agl.Hook")
    if isinstance(agent_spec(agent), CommandLine):
        raise ConfigError(f"hooks run in the process of a Python agent, and {agent!r} is a command; leave them out")
    return HookedAgent(agent, chosen)


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
        if self._agent is None or self._store is None:
            raise ConfigError("the runner has no agent or no store; call init(agent) and init_worker(id, store) first")
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
