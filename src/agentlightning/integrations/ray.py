"""Runners as actors of a Ray cluster.

    import ray
    from agentlightning.integrations.ray import RayRunners

    ray.init("auto")
    with RayRunners("http://hub:4747", "agent.py:solve", count=64, actor={"num_cpus": 1}) as runners:
        runners.wait()

Each actor is a runner of the server at that URL, like `agl runner`, and the agent cannot tell. Ray restarts an actor
that was killed or whose node is gone, as another worker of the store; the rollouts of the one before are given to
others when its lease ends, so give rollouts `max_attempts`. The agent must be importable where the actors run
(`runtime_env`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from typing import Any, Self

from agentlightning.attempt_address import attempt_secret
from agentlightning.errors import MissingExtraError, ServerError
from agentlightning.runner.agents.agent import AgentLike
from agentlightning.runner.runner import Runner
from agentlightning.store.http.client import LightningStoreClient

logger = logging.getLogger(__name__)


class RunnerActor:
    """One runner; an actor of Ray. `settings` are further arguments of `Runner`."""

    def __init__(self, url: str, agent: AgentLike, token: str | None, patience: float, settings: Mapping[str, Any]):
        self._store = LightningStoreClient(url, token, patience=patience)
        self._runner = Runner(
            self._store, agent, secret=attempt_secret(token), server_url=url, patience=patience, **settings
        )

    async def run(self) -> dict[str, Any]:
        """Run until stopped, or until `max_rollouts` are done; the runner's statistics."""
        if _ray().get_runtime_context().was_current_actor_reconstructed:
            logger.warning("a runner was killed; %s continues in its place", self._runner.worker_id)
        await self._runner.start()
        await self._runner.wait()
        return await self.stop(0)

    async def stop(self, drain_seconds: float | None) -> dict[str, Any]:
        await self._runner.stop(drain_seconds)
        await self._store.close()
        return asdict(self._runner.statistics)

    def worker(self) -> dict[str, Any]:
        """The name of this worker in the store, and its process."""
        return {"worker_id": self._runner.worker_id, "pid": os.getpid(), **asdict(self._runner.statistics)}


class RayRunners:
    """`count` runners on the Ray cluster that this program is connected to. Use as `with`.

    `agent` has the forms of `agl runner --agent`. `actor` are options of the actors, such as `num_cpus`, `resources`
    and `runtime_env`; `settings` are arguments of `Runner`: `concurrency`, `queues`, `reward`, `lease_seconds` and
    others. The server may be unreachable for `patience` seconds. Raises MissingExtraError without Ray, ServerError if
    `ray.init` was not called.
    """

    def __init__(
        self,
        url: str,
        agent: AgentLike,
        *,
        count: int,
        token: str | None = None,
        patience: float = 600.0,
        actor: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        ray = _ray()
        if not ray.is_initialized():
            raise ServerError("this program is not connected to Ray; call ray.init first")
        options = {"max_restarts": -1, "max_task_retries": -1, "max_concurrency": 8, **(actor or {})}
        remote = ray.remote(RunnerActor).options(**options)
        self._actors = [remote.remote(url, agent, token, patience, settings) for _ in range(count)]
        self._running = [each.run.remote() for each in self._actors]

    def workers(self) -> list[dict[str, Any]]:
        """Name, process and statistics of each runner that lives now."""
        return _ray().get([each.worker.remote() for each in self._actors])

    def wait(self) -> list[dict[str, Any]]:
        """Wait until all runners have ended; their statistics. Raises the error that ended one."""
        return _ray().get(self._running)

    def stop(self, drain_seconds: float | None = None) -> list[dict[str, Any]]:
        """Let running attempts finish, for at most `drain_seconds`, requeue the rest, and end the actors."""
        ray = _ray()
        try:
            return ray.get([each.stop.remote(drain_seconds) for each in self._actors])
        finally:
            for each in self._actors:
                ray.kill(each)
            self._actors = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, where: object) -> None:
        self.stop(None if error is None else 0)


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError:
        raise MissingExtraError("ray", "ray") from None
