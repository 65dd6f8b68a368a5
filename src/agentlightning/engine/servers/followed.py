"""The policy of a training run elsewhere: an engine over model servers whose weights another process replaces.

A gateway that a run has joined samples from it (`server.joining`). It never changes weights: the trainer announces each
version before any server has it, and a server samples once it reports weights that were announced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.base import (
    ConstraintKind,
    EngineUnavailableError,
    OnTokens,
    Sample,
    SamplingParams,
)
from agentlightning.engine.servers.base import ModelServerError, SampleRequest
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.engine.servers.joining import JoinRequest
from agentlightning.engine.servers.open import open_servers
from agentlightning.engine.servers.pool import ReplicaPool
from agentlightning.engine.servers.replica import Replica
from agentlightning.engine.servers.weights import FollowedWeights, PoolWeights
from agentlightning.errors import AgentLightningError, ConfigError

PROBE_PROMPT = (1, 2, 3)
"""A prompt that every vocabulary contains."""


@dataclass(frozen=True, slots=True, eq=False)
class FollowedServers:
    """The servers of a run, and the weights that its trainer gives them."""

    pool: ReplicaPool
    weights: FollowedWeights

    @classmethod
    async def open(cls, request: JoinRequest, model: str, chat: ChatFormat) -> FollowedServers:
        """Join the servers that a run names. Raises ConfigError for servers that cannot be sampled from here,
        ModelServerError for one that does not answer, and where none has the run's weights."""
        config = ServersConfig(
            urls=request.urls,
            retries=request.retries,
            wait_seconds=request.wait_seconds,
            timeout_seconds=request.timeout_seconds,
        )
        made: list[FollowedWeights] = []

        def follow(replicas: Sequence[Replica]) -> PoolWeights:
            made.append(FollowedWeights(replicas))
            made[0].announce(request.label, request.version)
            return made[0]

        pool = await open_servers(
            config,
            chat,
            kind=request.kind,
            name=model,
            max_context=request.context_length,
            token=request.server_token,
            follow=follow,
        )
        servers = cls(pool, made[0])
        try:
            await servers._check(crosses_updates=request.crosses_updates)
        except BaseException:
            await pool.close()
            raise
        return servers

    async def _check(self, *, crosses_updates: bool) -> None:
        async with self.weights.lock:
            await self.pool.update_replicas()
        if not any(replica.up for replica in self.pool.replicas):
            raise ModelServerError("; ".join(replica.failure for replica in self.pool.replicas), retryable=True)
        for replica in self.pool.replicas if crosses_updates else ():
            name = (await replica.server.model_info()).model
            request = SampleRequest(name, PROBE_PROMPT, SamplingParams(), 1, frozenset())
            completion = await replica.server.sample(request, lambda chunk: None, stream=False)
            if not completion.weights:
                raise ConfigError(
                    f"{replica.server.url} does not report which weights sampled which tokens, so answers cannot go on"
                    " across an update; start it with --enable-scale-out, or leave policy.in_flight and"
                    " policy.drain_seconds out"
                )


class FollowedPolicy:
    """An `Engine` over the servers of a run."""

    def __init__(self, model: str, chat: ChatFormat, servers: FollowedServers) -> None:
        self.model, self.chat, self.servers = model, chat, servers
        self.unavailable: str | None = None
        """Why it samples nothing; None: it does."""
        self.calls = self.tokens = self.failed = 0

    @property
    def context_length(self) -> int:
        return self.servers.pool.context_length

    @property
    def policy_version(self) -> int:
        return self.servers.pool.policy_version

    @property
    def supported_params(self) -> frozenset[str]:
        return self.servers.pool.supported_params

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`."""
        return self.unavailable is None and await self.servers.pool.can_enforce(text, kind)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`. Raises EngineUnavailableError once the run has ended."""
        try:
            sample = await self._sample(prompt_token_ids, params, on_tokens, affinity)
        except AgentLightningError:
            self.failed += 1
            raise
        self.calls += 1
        self.tokens += len(sample.token_ids)
        return sample

    async def _sample(
        self, prompt: Sequence[int], params: SamplingParams, on_tokens: OnTokens | None, affinity: str
    ) -> Sample:
        """An answer that `move` cuts off begins again on the new servers, unless it is streamed."""
        while True:
            if self.unavailable is not None:
                raise EngineUnavailableError(self.unavailable)
            servers = self.servers
            try:
                return await servers.pool.sample(prompt, params, on_tokens, affinity=affinity)
            except AgentLightningError:
                moved = servers is not self.servers or self.unavailable is not None
                if not moved or on_tokens is not None:
                    raise

    async def move(self, chat: ChatFormat, servers: FollowedServers) -> None:
        """Sample from these servers: the trainer was started again."""
        old, self.servers, self.chat = self.servers, servers, chat
        self.unavailable = None
        await old.pool.close()

    def end(self, reason: str) -> None:
        """Sample nothing from now on."""
        self.unavailable = reason

    async def close(self) -> None:
        await self.servers.pool.close()
