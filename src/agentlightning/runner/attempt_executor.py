"""Executes a claimed attempt on an agent host and reports its end to the store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from agentlightning.attempt_variables import PATIENCE, attempt_environment, worker_environment
from agentlightning.errors import AgentError, AgentTimeoutError, ConflictError, Failure, NotFoundError
from agentlightning.resources import LLM, NamedResources, ProxyLLM
from agentlightning.rollouts import AttemptedRollout, AttemptStatus
from agentlightning.runner.agents.arguments import first_llm
from agentlightning.runner.hosts.attempt_process import LostAttemptError
from agentlightning.runner.hosts.host_pool import HostPool
from agentlightning.runner.hosts.messages import Done
from agentlightning.runner.span_writer import SpanWriter, failure_span
from agentlightning.span import ERROR_TYPE, TURN_LIMIT_REACHED
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.outbox import Retry


class AttemptExecutor:
    """Runs the attempts of one worker. `server_url` and `redirect` have the meaning they have for `Runner`."""

    def __init__(
        self,
        store: LightningStoreBase,
        pool: HostPool,
        writer: SpanWriter,
        retry: Retry,
        *,
        worker_id: str,
        secret: str,
        server_url: str | None,
        redirect: bool | None,
        patience: float,
    ) -> None:
        self.server_url, self.redirect, self._patience = server_url, redirect, patience
        self._store, self._pool, self._writer, self._retry = store, pool, writer, retry
        self._worker_id, self._secret = worker_id, secret

    async def execute(
        self, claimed: AttemptedRollout, resources: NamedResources | None, alone: bool = False
    ) -> tuple[AttemptStatus, dict[str, Any]]:
        """Run an attempt until it ends: its status, and the metadata to store with it. One that fails because it has
        had all the answers that it may have has not failed by itself: what it did until then is its rollout. Raises
        LostAttemptError for one that is to be repeated. `alone`: in a process of its own."""
        status, metadata = await self._execute(claimed, resources, alone)
        if status == "failed" and await self._ended_at_turn_limit(claimed, resources or {}):
            return "succeeded", {**metadata, TURN_LIMIT_REACHED: True}
        return status, metadata

    async def _execute(
        self, claimed: AttemptedRollout, resources: NamedResources | None, alone: bool
    ) -> tuple[AttemptStatus, dict[str, Any]]:
        seconds = claimed.config.timeout_seconds
        try:
            if resources is None:
                raise AgentError(f"the rollout asks for the resources {claimed.resources_id!r}, which the store lacks")
            done = await self._run(claimed, resources, alone)
        except LostAttemptError:
            raise
        except TimeoutError:
            timeout = AgentTimeoutError(f"the agent did not end within its {seconds:g} s and was stopped")
            return "timeout", self._record_failure(claimed, timeout)
        except AgentError as error:
            return "failed", self._record_failure(claimed, error)
        if done.failure is not None:
            return "failed", {"error": asdict(done.failure)}
        return "succeeded", {} if done.output is None else {"output": done.output}

    async def _ended_at_turn_limit(self, claimed: AttemptedRollout, resources: NamedResources) -> bool:
        """Whether a call was refused because of the limit on answers."""
        if not any(isinstance(each, LLM) and each.max_calls is not None for each in resources.values()):
            return False
        ids = claimed.rollout_id, claimed.attempt.attempt_id
        spans = await self._retry(lambda: self._store.query_spans(*ids))
        return any(span.attributes.get(ERROR_TYPE) == TURN_LIMIT_REACHED for span in spans)

    async def _run(self, claimed: AttemptedRollout, resources: NamedResources, alone: bool) -> Done:
        url = self.server_url or ""
        ids = claimed.rollout_id, claimed.attempt.attempt_id
        llm = first_llm(resources)
        proxy_url = llm.root_url if isinstance(llm, ProxyLLM) else None
        redirect = self.redirect or (self.redirect is None and proxy_url is not None)
        environment = attempt_environment(url, self._secret, *ids, redirect=redirect, model_url=proxy_url)
        environment[PATIENCE] = f"{self._patience:g}"
        if redirect:
            environment |= worker_environment(proxy_url or url, self._secret, self._worker_id)
        if redirect and llm is not None:
            environment["AGL_MODEL"] = llm.model
        timeout = claimed.config.timeout_seconds
        return await self._pool.run(claimed, resources, url, environment, self._writer.put, timeout, alone)

    def _record_failure(self, claimed: AttemptedRollout, error: AgentError) -> dict[str, Any]:
        """Record a failure that the agent's process could not record itself."""
        failure = Failure.of(error.with_traceback(None))  # the runner's own frames say nothing about the agent
        self._writer.put([failure_span(claimed, failure)])
        return {"error": asdict(failure)}

    async def report(self, claimed: AttemptedRollout, status: AttemptStatus, metadata: dict[str, Any]) -> str:
        """Report the end of an attempt to the store. Returns its status, or "discarded" if the store had moved on."""
        ids = (claimed.rollout_id, claimed.attempt.attempt_id)
        try:
            attempt = await self._retry(lambda: self._store.update_attempt(*ids, status=status, metadata=metadata))
        except NotFoundError:
            return "discarded"
        except ConflictError:  # the store has ended it; if that was the same timeout, only the metadata is missing
            attempt = await self._retry(lambda: self._store.update_attempt(*ids, metadata=metadata))
            return status if attempt.status == status else "discarded"
        return "discarded" if attempt.metadata.get("superseded") else status
