"""The policy of a training run elsewhere: an engine over model servers whose weights another process replaces.

A gateway that a run has joined samples from it (`server.joining`). It never changes weights: the trainer announces each
version before any server has it, and a server samples once it reports weights that were announced. Adapters are
announced once servers have them (`followed_adapters`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.adapter_view import AdapterTable, AgentEngines
from agentlightning.engine.base import (
    ConstraintKind,
    EngineUnavailableError,
    OnTokens,
    Sample,
    SamplingParams,
)
from agentlightning.engine.servers.base import ModelServerError, SampleRequest
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.engine.servers.joining import (
    AdapterVersion,
    AdapterVersions,
    AnnounceRequest,
    JoinRequest,
    ServedAdapter,
)
from agentlightning.engine.servers.open import open_servers
from agentlightning.engine.servers.pool import ReplicaPool
from agentlightning.engine.servers.replica import FollowedWeights, PoolWeights, Replica
from agentlightning.errors import AgentLightningError, ConfigError

# -- followed adapters -----------------------------------------------------------------------------------------------

# The adapters of a training run elsewhere, on servers that its trainer loads them on.
#
# A call keeps the version it began with. The trainer unloads a version that it has replaced once no gateway uses it any
# more (`in_use`).


class FollowedAdapters(AdapterVersions):
    """The newest version of each adapter, and the older ones that calls still use."""

    def __init__(self, pool: ReplicaPool, adapters: Iterable[ServedAdapter]) -> None:
        super().__init__(pool)
        self.announce(adapters)

    def announce(self, adapters: Iterable[ServedAdapter]) -> None:
        """Let calls that begin from now on use these versions, which the servers have."""
        for new in adapters:
            known = self._current.get(new.name)
            if known is None or (known.served_name, known.version) != (new.served_name, new.version):
                self._pool.expect_adapter(new.served_name, new.version)
                self._use(new.name, AdapterVersion(new.served_name, new.version))

    def _drop(self, old: AdapterVersion) -> None:
        self._pool.forget_adapter(old.served_name)


PROBE_PROMPT = (1, 2, 3)
"""A prompt that every vocabulary contains."""


@dataclass(frozen=True, slots=True, eq=False)
class FollowedServers:
    """The servers of a run, and the weights and adapters that its trainer gives them."""

    pool: ReplicaPool
    weights: PoolWeights
    adapters: FollowedAdapters | None
    """None: all weights are trained."""
    table: AdapterTable

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
        made: list[PoolWeights] = []

        def follow(replicas: Sequence[Replica]) -> PoolWeights:
            if request.label is None:
                made.append(PoolWeights(replicas))
            else:
                made.append(followed := FollowedWeights(replicas))
                followed.announce(request.label, request.version)
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
        table = request.adapter_routes
        adapters = None if table is None else FollowedAdapters(pool, request.adapters)
        servers = cls(pool, made[0], adapters, table or AdapterTable())
        try:
            await servers._check(crosses_updates=request.crosses_updates and request.label is not None)
        except BaseException:
            await pool.close()
            raise
        return servers

    def announce(self, request: AnnounceRequest) -> None:
        """Accept new weights, or adapters. Raises ConfigError for those that the run did not join with."""
        if request.label is not None:
            if not isinstance(self.weights, FollowedWeights):
                raise ConfigError("the run has joined with adapters, and announces other weights below them")
            self.weights.announce(request.label, request.version)
        if request.adapters:
            if self.adapters is None:
                raise ConfigError("the run has joined without adapters, and announces some")
            self.adapters.announce(request.adapters)

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


class FollowedPolicy(AgentEngines):
    """An engine over the servers of a run, and over its adapters."""

    def __init__(self, model: str, chat: ChatFormat, servers: FollowedServers) -> None:
        self.model, self.chat, self.servers, self.table = model, chat, servers, servers.table
        self.unavailable: str | None = None
        """Why it samples nothing; None: it does."""
        self.calls = self.tokens = self.failed = 0

    @property
    def context_length(self) -> int:
        return self.servers.pool.context_length

    @property
    def policy_version(self) -> int:
        """See `AgentEngines.version_of`: that of the newest weights."""
        adapters = self.servers.adapters
        return self.servers.pool.policy_version if adapters is None else adapters.newest

    @property
    def supported_params(self) -> frozenset[str]:
        return self.servers.pool.supported_params

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`."""
        return self.unavailable is None and await self.servers.pool.can_enforce(text, kind)

    # -- adapters --------------------------------------------------------------------------------------------------

    def version_of(self, adapter: str | None) -> int:
        """See `AgentEngines.version_of`."""
        if (adapters := self.servers.adapters) is None:
            return self.servers.pool.policy_version
        return adapters.version_of(adapter)

    # -- sampling --------------------------------------------------------------------------------------------------

    async def sample_adapter(
        self,
        adapter: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `AgentEngines.sample_adapter`. Raises EngineUnavailableError once the run has ended."""
        try:
            sample = await self._sample(adapter, prompt_token_ids, params, on_tokens, affinity)
        except AgentLightningError:
            self.failed += 1
            raise
        self.calls += 1
        self.tokens += len(sample.token_ids)
        return sample

    async def _sample(
        self, adapter: str | None, prompt: Sequence[int], params: SamplingParams, on_tokens: OnTokens | None, key: str
    ) -> Sample:
        """An answer that `move` cuts off begins again on the new servers, unless it is streamed."""
        while True:
            if self.unavailable is not None:
                raise EngineUnavailableError(self.unavailable)
            servers = self.servers
            try:
                if servers.adapters is None or adapter is None:
                    return await servers.pool.sample(prompt, params, on_tokens, affinity=key)
                return await servers.adapters.sample(adapter, prompt, params, on_tokens, key)
            except AgentLightningError:
                moved = servers is not self.servers or self.unavailable is not None
                if not moved or on_tokens is not None:
                    raise

    async def move(self, chat: ChatFormat, servers: FollowedServers) -> None:
        """Sample from these servers: the trainer was started again."""
        old, self.servers, self.chat, self.table = self.servers, servers, chat, servers.table
        self.__dict__.pop("views", None)
        self.unavailable = None
        await old.pool.close()

    def end(self, reason: str) -> None:
        """Sample nothing from now on."""
        self.unavailable = reason

    async def close(self) -> None:
        await self.servers.pool.close()
