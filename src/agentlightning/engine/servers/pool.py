"""An engine over model servers: one, or several replicas of the same model.

Decides which server samples an answer, and what happens when one fails. Calls of one affinity go to one server, whose
cache holds their history. A server that fails is evicted, and returns once it is healthy and has the newest weights;
its running answers continue on another server, from the last token that arrived. The pool never trains, and never
decides when weights change: `policy.served` does.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.adapter_view import AdapterView, AgentEngines, EngineWrapper
from agentlightning.engine.base import ConstraintKind, OnTokens, Sample, SamplingParams, room_for_answer
from agentlightning.engine.servers.clients.http import Completion, ModelServerError, TokenChunk
from agentlightning.engine.servers.config import RetryPolicy
from agentlightning.engine.servers.replica import (
    Adapter,
    Replica,
    ReplicaSet,
    WeightSource,
)
from agentlightning.engine.servers.resumable import ResumableSample, StopStringFound, UnknownWeightsError
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.transport import Transport

log = logging.getLogger(__name__)

MAX_CACHED_CONSTRAINTS = 1000
"""Number of schemas and grammars for which the pool remembers whether servers can enforce them."""
CLOSE_SECONDS = 10.0
"""How long servers that we joined have to unload the adapters at the end."""


class ReplicaPool(ReplicaSet, AgentEngines):
    """An `Engine` over `replicas`, and over their adapters. Create it with `ReplicaPool.open`, in the event loop that
    uses it."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        transport: Transport,
        retry_policy: RetryPolicy,
        chat: ChatFormat,
        *,
        model: str,
        served_name: str,
        context_length: int,
    ) -> None:
        super().__init__(replicas, transport, retry_policy)
        self.chat, self.model, self.context_length = chat, model, context_length
        self._served_name = served_name
        self.is_used_elsewhere: Callable[[str], bool] = lambda served_name: False
        """Whether calls of other processes may use the adapter of this served name."""
        self._removals: set[asyncio.Task[None]] = set()
        self._run = secrets.token_hex(3)
        self._constraints: dict[str, bool] = {}
        """JSON schema or grammar -> whether the servers can enforce it."""

    @classmethod
    async def open(
        cls,
        replicas: Sequence[Replica],
        chat: ChatFormat,
        transport: Transport,
        *,
        model: str | None = None,
        max_context: int | None = None,
        retry_policy: RetryPolicy | None = None,
        weights_change: bool = False,
    ) -> ReplicaPool:
        """A pool of running servers. `model` is the name agents request (default: the servers' own), `max_context` the
        limit of prompt and answer; `weights_change` says that their weights will be replaced.

        Raises ConfigError if they serve different models or were started with unsuitable options, ModelServerError if
        one does not answer. `transport` is closed with the pool."""
        if not replicas:
            raise ConfigError("no model server: give the address of at least one")
        info = [await replica.server.model_info() for replica in replicas]
        served_name = info[0].model
        if any(each.model != served_name for each in info):
            names = ", ".join(f"{r.url}: {each.model}" for r, each in zip(replicas, info, strict=True))
            raise ConfigError(f"the servers serve different models ({names}); give them one --served-model-name")
        for replica in replicas:
            await replica.server.verify(weights_change=weights_change)
            replica.label = await replica.server.weight_label()
        return cls(
            replicas,
            transport,
            retry_policy or RetryPolicy(),
            chat,
            model=model or served_name,
            served_name=served_name,
            context_length=min([each.context_length for each in info] + ([max_context] if max_context else [])),
        )

    @property
    def policy_version(self) -> int:
        """See `AgentEngines.version_of`: that of the newest weights or adapter."""
        return max([self.weight_version, *(each.version for each in self.served.values())])

    @property
    def supported_params(self) -> frozenset[str]:
        """The parameters that all servers support."""
        return frozenset[str].intersection(*(replica.server.supported_params for replica in self.replicas))

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`. Found out by sampling one token, once for each schema or grammar."""
        if kind not in self.supported_params:
            return False
        if text not in self._constraints:
            if len(self._constraints) >= MAX_CACHED_CONSTRAINTS:
                self._constraints.clear()
            params = replace(SamplingParams(temperature=0.0, max_tokens=1), **{kind: text})
            try:
                await self.sample(self.chat.encode("{"), params)
                self._constraints[text] = True
            except ConfigError:
                self._constraints[text] = False
        return self._constraints[text]

    @property
    def in_flight(self) -> int:
        """Number of running answers."""
        return sum(len(replica.requests) for replica in self.replicas)

    async def kv_cache_usage(self) -> float | None:
        """The share of its memory for keys and values that the fullest server uses; None: no server reports it."""
        asked = (replica.server.kv_cache_usage() for replica in self.up)
        found = await asyncio.gather(*asked, return_exceptions=True)
        return max((usage for usage in found if isinstance(usage, float)), default=None)

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
        """See `AgentEngines.sample_adapter`. Raises ConfigError for params that the servers do not support and an
        adapter that is not loaded, PolicyError if they failed more often than calls are repeated."""
        if adapter is None:
            return await self._sample(self._served_name, prompt_token_ids, params, on_tokens, affinity)
        used = self._newest(adapter)
        used.calls += 1
        try:
            sample = await self._sample(used.served_name, prompt_token_ids, params, on_tokens, affinity)
        finally:
            used.calls -= 1
            self.remove_unused()
        return replace(sample, policy_version=used.version, versions=())

    async def sample_from(
        self, replica: Replica, prompt: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> Sample:
        """Sample from this server and no other. Raises as `HttpModelServer.sample` does."""
        model = self._served_name if adapter is None else self._newest(adapter).served_name
        return await self._sample(model, prompt, params, only=replica)

    async def _sample(
        self,
        model: str,
        prompt: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        affinity: str = "",
        only: Replica | None = None,
    ) -> Sample:
        room = room_for_answer(prompt, self.context_length)
        max_tokens = min(room, params.max_tokens or room)
        end_tokens = params.end_tokens(self.chat.eos_token_ids)
        answer = ResumableSample(prompt, params, max_tokens, end_tokens, self.chat.decode, on_tokens)
        tried: list[Replica] = []
        while (reason := answer.finish_reason) is None:
            replica = only or await self._choose(affinity, tried)
            tried.append(replica)
            try:
                completion = await self._run_on(replica, model, answer)
                return answer.sample(completion.finish_reason, replica.version)
            except ModelServerError as error:
                if only or not error.retryable or not answer.can_resume or len(tried) > self._policy.retries:
                    raise
                self.mark_unhealthy(replica, str(error))
        return answer.sample(reason, self.weight_version)

    async def _run_on(self, replica: Replica, model: str, answer: ResumableSample) -> Completion:
        """Sample the rest of `answer` on one server."""

        def on_chunk(chunk: TokenChunk) -> None:
            answer.append(chunk, replica.version)

        request, labels = answer.request(model, model != self._served_name), dict(self.labels)
        task = asyncio.ensure_future(replica.server.sample(request, on_chunk, stream=answer.streamed))
        replica.requests.add(task)
        try:
            completion = await task
            labels |= self.labels
            if any(label not in labels for label, _ in completion.weights):
                async with self.lock:  # The end of an update tells which weights another process has given the servers.
                    labels |= self.labels
            answer.set_versions(completion, labels)
            return completion
        except StopStringFound:
            return Completion("stop")
        except (ModelServerError, ConfigError):
            if model != self._served_name and model in await self.missing_adapters(replica):
                message = f"{replica.url} has no adapter {model!r} any more: it was started again"
                self.evict(replica, message)
                raise ModelServerError(message, retryable=True) from None
            raise
        except UnknownWeightsError as error:
            self.evict(replica, f"it samples with weights that were not given to it ({error})")
            message = f"{replica.url} sampled with weights that were not given to it ({error})"
            raise ModelServerError(message, retryable=answer.rollback()) from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise ModelServerError(f"{replica.url} was evicted: {replica.failure}", retryable=True) from None
        finally:
            replica.requests.discard(task)

    async def _choose(self, affinity: str, tried: Sequence[Replica]) -> Replica:
        """A server that is up, preferably one that has not failed this call."""
        await self.wait_for_up()
        up = [replica for replica in self.in_order(affinity) if replica.up]
        return next((replica for replica in up if replica not in tried), up[0])

    # -- weights and adapters --------------------------------------------------------------------------------------

    async def set_weights(self, weights: Path | WeightSource, version: int) -> None:
        """Give all servers these weights: a directory that they read themselves, or a source. Returns when all that are
        up have them; the others get them from the disk before they sample again. Raises PolicyError if no server
        accepts them."""
        async with self.lock:
            self.set_target(WeightSource(weights) if isinstance(weights, Path) else weights, version)
            await self.update_replicas()
        await self.wait_for_up()

    async def load_adapter(
        self, name: str, directory: Path, version: int | None = None, *, can_fail: bool = False
    ) -> AdapterView:
        """Let calls that begin from now on sample `name` from the LoRA adapter in `directory`. A server that fails, or
        is down, samples nothing until it has loaded it.

        With a `version`, it is an adapter of its own on the servers, named `NAME@VERSION.RUN`, where RUN tells runs on
        one server apart. A call keeps the version it began with, on whichever server it continues, so no token is
        sampled from keys and values of other weights. A replaced version is unloaded, and its files are removed, when
        the last call that uses it ends. Without, it takes the place of what the servers have under the name.

        Raises PolicyError if all servers fail, and ConfigError if the options of one do not let it; if they `can_fail`,
        PolicyError if none has it in time."""
        served_name = name if version is None else f"{name}@{version}.{self._run}"
        if version is None:
            version = self.adapters[name].version + 1 if name in self.adapters else 0
        new = Adapter(name, served_name, version, Path(directory))
        async with self.lock:
            up = self.up
            results = await asyncio.gather(*(replica.load(new) for replica in up), return_exceptions=True)
            failed = [(replica, error) for replica, error in zip(up, results, strict=True) if error is not None]
            for _, error in failed:
                if not can_fail and (isinstance(error, ConfigError) or len(failed) == len(up)):
                    raise error
            self.served[served_name] = new
            for replica, error in failed:
                self.evict(replica, f"it could not load the adapter {served_name}: {error}")
        await self.wait_for_up()
        self.remove_unused()
        return AdapterView(self, name, name)

    def announce_adapter(self, name: str, served_name: str, version: int) -> None:
        """Let calls that begin from now on use this version of an adapter, which another process has loaded on the
        servers, and unloads. A server that lacks it samples nothing until it has it."""
        self.served.setdefault(served_name, Adapter(name, served_name, version))
        self.remove_unused()

    def remove_unused(self) -> None:
        """Unload the replaced versions that no call uses."""
        newest = self.adapters
        for old in [*self.served.values()]:
            if newest[old.name] is old or old.calls or self.is_used_elsewhere(old.served_name):
                continue
            del self.served[old.served_name]
            task = asyncio.create_task(self._remove(old))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    async def _remove(self, old: Adapter) -> None:
        try:
            await self._unload(old)
        except AgentLightningError as error:  # It takes memory until the server ends, and answers no call.
            log.warning("the adapter %s could not be unloaded: %s", old.served_name, error)
        if old.directory is not None:
            await asyncio.to_thread(shutil.rmtree, old.directory, ignore_errors=True)

    async def _unload(self, adapter: Adapter) -> None:
        name = adapter.served_name
        async with self.lock:
            # A server that is down keeps its note of the adapter, and unloads it when it recovers.
            holders = [replica for replica in self.up if replica.adapters.pop(name, None)]
            await asyncio.gather(*(replica.server.unload_adapter(name) for replica in holders))

    async def unload_adapters(self) -> None:
        """Unload all adapters from servers that go on without us."""
        await asyncio.gather(*self._removals, return_exceptions=True)
        current, self.served = [*self.served.values()], {}
        if all(replica.process is not None for replica in self.replicas):
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                for each in current:
                    await self._unload(each)
        except (TimeoutError, AgentLightningError) as error:
            log.warning("the adapters of this run could not be unloaded: %s", error)

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The newest version of each adapter, by name."""
        return {each.name: each for each in self.served.values()}

    def version_of(self, adapter: str | None) -> int:
        """See `AgentEngines.version_of`. Raises ConfigError if none of the name is loaded."""
        return self.weight_version if adapter is None else self._newest(adapter).version

    def _newest(self, name: str) -> Adapter:
        if (adapter := self.adapters.get(name)) is None:
            raise ConfigError(f"no adapter {name!r} is loaded; loaded are {sorted(self.adapters) or 'none'}")
        return adapter

    @property
    def adapters_in_use(self) -> tuple[str, ...]:
        """The served names of the adapters that calls in progress use."""
        return tuple(sorted(each.served_name for each in self.served.values() if each.calls))


class PooledEngine(EngineWrapper, AgentEngines):
    """An engine that samples from the servers of a pool."""

    servers: ReplicaPool

    @property
    def engine(self) -> ReplicaPool:
        return self.servers

    @property
    def policy_version(self) -> int:
        """See `AgentEngines.version_of`: that of the newest weights or adapter."""
        return self.servers.policy_version

    def version_of(self, adapter: str | None) -> int:
        """See `AgentEngines.version_of`."""
        return self.servers.version_of(adapter)

    async def sample_adapter(
        self,
        adapter: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `AgentEngines.sample_adapter`. Raises as `ReplicaPool.sample_adapter` does."""
        return await self.servers.sample_adapter(adapter, prompt_token_ids, params, on_tokens, affinity=affinity)
