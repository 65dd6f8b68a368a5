"""`Hook` of 0.x: code around each attempt, in the process that runs the agent."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.resources import NamedResources
from agentlightning.rollouts import AttemptedRollout
from agentlightning.runner.agents.agent import load_agent
from agentlightning.runner.agents.arguments import Invocation
from agentlightning.runner.agents.litagent import LitAgent
from agentlightning.runner.agents.spec import CommandLine, agent_spec
from agentlightning.span import Span
from agentlightning.tracing.scope import SpanSink, current_scope, enter_scope
from agentlightning.util.event_loop import run_sync


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


@dataclass(slots=True)
class _Trace:
    """What hooks see as `tracer`; also the sink that notes what is recorded."""

    sink: SpanSink
    spans: list[Span] = field(default_factory=list[Span])

    def put(self, spans: Sequence[Span]) -> None:
        self.spans.extend(spans)
        self.sink.put(spans)

    def get_last_trace(self) -> list[Span]:
        return list(self.spans)


@dataclass(frozen=True, slots=True)
class _RunnerView:
    """What hooks see as `runner`."""

    worker_id: str | None

    def get_worker_id(self) -> str | None:
        return self.worker_id


class HookedAgent(LitAgent[Any]):
    """An agent with hooks around each attempt."""

    def __init__(self, agent: Any, hooks: Sequence[Hook]) -> None:
        super().__init__(trained_agents=getattr(agent, "trained_agents", None))
        self.agent, self.hooks = agent, tuple(hooks)

    def __reduce__(self) -> tuple[Any, ...]:
        return HookedAgent, (self.agent, self.hooks)

    def rollout(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """In a thread, as agents that block are run."""
        return run_sync(self._attempt(task, resources, rollout))

    async def _attempt(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        inside = current_scope()
        if inside is None:
            raise RuntimeError("an attempt runs inside a scope")
        shared: dict[str, Any] = {"agent": self.agent, "runner": _RunnerView(rollout.attempt.worker_id)}
        shared["rollout"] = rollout
        trace = _Trace(inside.sink)
        await self._call("on_rollout_start", **shared)
        try:
            with enter_scope(replace(inside, sink=trace)):
                await self._call("on_trace_start", tracer=trace, **shared)
                try:
                    return await self._run(Invocation(rollout, resources, task=task))
                finally:
                    await self._call("on_trace_end", tracer=trace, **shared)
        finally:
            await self._call("on_rollout_end", spans=list(trace.spans), **shared)

    async def _run(self, invocation: Invocation) -> Any:
        found = load_agent(self.agent).start(invocation)
        return await found if inspect.isawaitable(found) else found

    async def _call(self, name: str, **arguments: Any) -> None:
        for hook in self.hooks:
            found = getattr(hook, name)(**arguments)
            if inspect.isawaitable(found):
                await found


def with_hooks(agent: Any, hooks: Hook | Sequence[Hook] | None) -> Any:
    """The agent with hooks around each attempt. Raises ConfigError for what is no hook, and for commands, which run in
    a process of their own."""
    chosen = () if hooks is None else (hooks,) if isinstance(hooks, Hook) else tuple(hooks)
    if not chosen or agent is None:
        return agent
    for each in chosen:
        if not isinstance(each, Hook):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"hooks={each!r} is no hook; give objects of subclasses of agl.Hook")
    if isinstance(agent_spec(agent), CommandLine):
        raise ConfigError(f"hooks run in the process of a Python agent, and {agent!r} is a command; leave them out")
    return HookedAgent(agent, chosen)
