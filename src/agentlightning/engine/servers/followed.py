"""The policy of a training run elsewhere: an engine over model servers whose weights another process replaces.

A gateway that a run has joined samples from it (`server.joining`). It never changes weights: the trainer announces each
version before any server has it, and a server samples once it reports weights that were announced. Adapters are
announced once servers have them, and the trainer unloads a replaced version once no gateway uses it any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.adapter_view import AdapterTable
from agentlightning.engine.base import (
    ConstraintKind,
    EngineUnavailableError,
    OnTokens,
    Sample,
    SamplingParams,
)
from agentlightning.engine.servers.base import ModelServerError, SampleRequest
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.engine.servers.joining import AnnounceRequest, JoinRequest
from agentlightning.engine.servers.open import open_servers
from agentlightning.engine.servers.pool import PooledEngine, ReplicaPool
from agentlightning.errors import AgentLightningError, ConfigError

PROBE_PROMPT = (1, 2, 3)
"""A prompt that every vocabulary contains."""


async def open_followed(request: JoinRequest, model: str, chat: ChatFormat) -> ReplicaPool:
    """Join the servers that a run names. Raises ConfigError for servers that cannot be sampled from here,
    ModelServerError for one that does not answer, and where none has the run's weights."""
    config = ServersConfig(
        urls=request.urls,
        retries=request.retries,
        wait_seconds=request.wait_seconds,
        timeout_seconds=request.timeout_seconds,
    )
    pool = await open_servers(
        config,
        chat,
        kind=request.kind,
        name=model,
        max_context=request.context_length,
        token=request.server_token,
    )
    try:
        _announce(pool, request)
        async with pool.lock:
            await pool.update_replicas()
        if not any(replica.up for replica in pool.replicas):
            raise ModelServerError("; ".join(replica.failure for replica in pool.replicas), retryable=True)
        if request.crosses_updates and request.label is not None:
            await _check_reports(pool)
    except BaseException:
        await pool.close()
        raise
    return pool


def _announce(pool: ReplicaPool, request: JoinRequest | AnnounceRequest) -> None:
    if request.label is not None:
        pool.announce_weights(request.label, request.version)
    for each in request.adapters:
        pool.announce_adapter(each.name, each.served_name, each.version)


async def _check_reports(pool: ReplicaPool) -> None:
    """Raises ConfigError for a server that does not report which weights sampled which tokens."""
    for server in (replica.server for replica in pool.replicas):
        probe = SampleRequest((await server.model_info()).model, PROBE_PROMPT, SamplingParams(), 1, frozenset())
        if not (await server.sample(probe, lambda chunk: None, stream=False)).weights:
            raise ConfigError(
                f"{server.url} does not report which weights sampled which tokens, so answers cannot go on"
                " across an update; start it with --enable-scale-out, or leave policy.in_flight and"
                " policy.drain_seconds out"
            )


class FollowedPolicy(PooledEngine):
    """An engine over the servers of a run, which joined with `request`, and over its adapters."""

    def __init__(self, request: JoinRequest, pool: ReplicaPool) -> None:
        self.model = pool.model
        self.unavailable: str | None = None
        """Why it samples nothing; None: it does."""
        self.calls = self.tokens = self.failed = 0
        self._follow(request, pool)

    def _follow(self, request: JoinRequest, pool: ReplicaPool) -> None:
        self.request, self.servers = request, pool
        self.table = request.adapter_routes or AdapterTable()

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`."""
        return self.unavailable is None and await super().can_enforce(text, kind)

    def announce(self, request: AnnounceRequest) -> None:
        """Accept new weights, or adapters. Raises ConfigError for those that the run did not join with."""
        if request.label is not None and self.request.label is None:
            raise ConfigError("the run has joined with adapters, and announces other weights below them")
        if request.adapters and self.request.adapter_routes is None:
            raise ConfigError("the run has joined without adapters, and announces some")
        _announce(self.servers, request)

    async def sample_adapter(
        self,
        adapter: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `AgentEngines.sample_adapter`. Raises EngineUnavailableError once the run has ended. An answer that
        `move` cuts off begins again on the new servers, unless it is streamed."""
        while True:
            servers = self.servers
            try:
                if self.unavailable is not None:
                    raise EngineUnavailableError(self.unavailable)
                sample = await super().sample_adapter(adapter, prompt_token_ids, params, on_tokens, affinity=affinity)
            except AgentLightningError as error:
                moved = servers is not self.servers or self.unavailable is not None
                if moved and on_tokens is None and not isinstance(error, EngineUnavailableError):
                    continue
                self.failed += 1
                raise
            self.calls += 1
            self.tokens += len(sample.token_ids)
            return sample

    async def move(self, request: JoinRequest, pool: ReplicaPool) -> None:
        """Sample from these servers: the trainer was started again."""
        old = self.servers
        self._follow(request, pool)
        self.__dict__.pop("views", None)
        self.unavailable = None
        await old.close()

    def end(self, reason: str) -> None:
        """Sample nothing from now on."""
        self.unavailable = reason

    async def close(self) -> None:
        await self.servers.close()
