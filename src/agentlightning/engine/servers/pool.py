"""An engine over model servers: one, or several replicas of the same model.

Decides which server samples an answer, and what happens when one fails. Calls of one affinity go to one server, whose
cache holds their history. A server that fails is evicted, and returns once it is healthy and has the newest weights;
its running answers continue on another server, from the last token that arrived. The pool never trains, and never
decides when weights change: `policy.served` does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.adapter_view import AdapterView, AgentEngines
from agentlightning.engine.base import ConstraintKind, OnTokens, Sample, SamplingParams, room_for_answer
from agentlightning.engine.servers.base import Completion, ModelServerError, ServedModelInfo, TokenChunk
from agentlightning.engine.servers.config import RetryPolicy
from agentlightning.engine.servers.replica import (
    DiskWeights,
    LabeledWeights,
    PoolWeights,
    Replica,
    ServerProcess,
    WeightSource,
)
from agentlightning.engine.servers.resumable import ResumableSample, StopStringFound, UnknownWeightsError
from agentlightning.errors import AgentLightningError, ConfigError, PolicyError
from agentlightning.transport import Transport
from agentlightning.util.rendezvous_hash import weight

# -- adapters --------------------------------------------------------------------------------------------------------

# The LoRA adapters of a pool, loaded on all of its servers.


@dataclass(frozen=True, slots=True)
class Adapter:
    directory: Path | None
    """None: another process loads it on the servers."""
    version: int


class PoolAdapters:
    """The adapters that every replica is to have."""

    def __init__(self) -> None:
        self._adapters: dict[str, Adapter] = {}

    def version(self, name: str) -> int:
        """0 for an adapter as first loaded. Raises ConfigError if none of the name is loaded."""
        if (adapter := self._adapters.get(name)) is None:
            raise ConfigError(f"no adapter {name!r} is loaded; loaded are {sorted(self._adapters) or 'none'}")
        return adapter.version

    async def load(
        self, name: str, directory: Path, replicas: Sequence[Replica], *, can_fail: bool = False
    ) -> dict[Replica, Exception]:
        """Load the adapter, or its next version, on `replicas`; returns the errors of those that failed. Raises the
        first error if all fail, unless all `can_fail` and load it when they recover."""
        version = self._adapters[name].version + 1 if name in self._adapters else 0
        adapter = Adapter(Path(directory), version)
        results = await asyncio.gather(*(_load(replica, name, adapter) for replica in replicas))
        errors = {replica: error for replica, error in zip(replicas, results, strict=True) if error is not None}
        if errors and len(errors) == len(replicas) and not can_fail:
            raise next(iter(errors.values()))
        self._adapters[name] = adapter
        return errors

    def expect(self, name: str, version: int, replicas: Sequence[Replica]) -> None:
        """Sample from an adapter that another process loads. A server that lacks it samples nothing until it has it."""
        self._adapters[name] = Adapter(None, version)
        for replica in replicas:
            replica.adapters[name] = version

    def forget(self, name: str, replicas: Sequence[Replica]) -> None:
        """Undo `expect`."""
        self._adapters.pop(name, None)
        for replica in replicas:
            replica.adapters.pop(name, None)

    async def missing_on(self, replica: Replica) -> list[str]:
        """The adapters that a server no longer has although it loaded them. Raises as `ModelServer.model_info`."""
        expected = set(replica.adapters) & self._adapters.keys()
        if not expected:
            return []
        present = (await replica.server.model_info()).adapters
        return sorted((expected & self._adapters.keys()) - present)

    async def unload(self, name: str, replicas: Sequence[Replica]) -> None:
        """Unload the adapter. Raises ConfigError if none of the name is loaded."""
        self.version(name)
        del self._adapters[name]
        # A server that is down keeps its note of the adapter, and unloads it when it recovers.
        holders = [replica for replica in replicas if replica.up and replica.adapters.pop(name, None) is not None]
        await asyncio.gather(*(replica.server.unload_adapter(name) for replica in holders))

    async def catch_up(self, replica: Replica) -> None:
        """Load on a recovered replica the adapters it lacks, and unload those that are no longer wanted."""
        if not (self._adapters or replica.adapters):
            return
        present = (await replica.server.model_info()).adapters
        for name in replica.adapters.keys() - self._adapters.keys():
            if name in present:
                await replica.server.unload_adapter(name)
            del replica.adapters[name]
        for name, adapter in self._adapters.items():
            if adapter.directory is None and name not in present:
                message = f"{replica.server.url} has no adapter {name!r}: its trainer has not loaded it yet"
                raise ModelServerError(message, retryable=True)
            if adapter.directory is not None and (replica.adapters.get(name) != adapter.version or name not in present):
                await replica.server.load_adapter(name, adapter.directory)
            replica.adapters[name] = adapter.version


async def _load(replica: Replica, name: str, adapter: Adapter) -> Exception | None:
    assert adapter.directory is not None
    try:
        await replica.server.load_adapter(name, adapter.directory)
    except (ModelServerError, ConfigError) as error:
        return error
    replica.adapters[name] = adapter.version
    return None


# -- recovery --------------------------------------------------------------------------------------------------------

# Health of the replicas of a pool: checks them, takes failed ones out, and brings them back with current weights.

log = logging.getLogger(__name__)

MIN_PAUSE, MAX_PAUSE = 0.1, 5.0
"""Seconds between two attempts to recover a server."""
MAX_FAILED_CHECKS = 3
"""Health checks that must fail in a row before a server gets no new requests."""
STALL_SECONDS = 30.0
"""Requests of a server that shows no sign of life for this long continue elsewhere."""


class HealthMonitor:
    """Decides which replicas are up. Create it in the event loop that uses it."""

    def __init__(
        self, replicas: Sequence[Replica], weights: PoolWeights, adapters: PoolAdapters, policy: RetryPolicy
    ) -> None:
        self._replicas = replicas
        self._weights = weights
        self._adapters = adapters
        self._policy = policy
        self._any_up = asyncio.Event()
        self._any_up.set()
        self._closed = False
        self._checks = asyncio.create_task(self._health_loop(), name="model servers")

    async def wait_for_up(self) -> list[Replica]:
        """The replicas that are up, at least one. Raises PolicyError if none is in time."""
        try:
            async with asyncio.timeout(self._policy.wait_seconds):
                while not (up := [replica for replica in self._replicas if replica.up]):
                    await self._any_up.wait()
        except TimeoutError:
            reasons = "; ".join(f"{replica.server.url}: {replica.failure}" for replica in self._replicas)
            raise PolicyError(f"no model server was up for {self._policy.wait_seconds:g} s ({reasons})") from None
        return up

    def mark_unhealthy(self, replica: Replica, reason: str) -> None:
        """Send no new requests to `replica` until it has recovered; its running requests continue."""
        if replica.up and not self._closed:
            log.warning("model server %s failed: %s", replica.server.url, reason)
            replica.up, replica.failure, replica.failed_checks = False, reason, 0
            self._update_any_up()
            replica.recovery = asyncio.create_task(self._recover(replica))

    def evict(self, replica: Replica, reason: str) -> None:
        """As `mark_unhealthy`; its running requests continue on other replicas."""
        self.mark_unhealthy(replica, reason)
        if replica.channel is not None:
            replica.channel.sender.abort()
        replica.version, replica.label, replica.failure = -1, None, reason
        _cancel_requests(replica)

    async def close(self) -> None:
        """Stop all checks and recoveries."""
        self._closed = True
        tasks = [self._checks, *(replica.recovery for replica in self._replicas if replica.recovery)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _health_loop(self) -> None:
        while True:
            await asyncio.sleep(self._policy.health_seconds)
            await asyncio.gather(*(self._check(replica) for replica in self._replicas if replica.up))

    async def _check(self, replica: Replica) -> None:
        if replica.process is not None and replica.process.ended:
            return self.evict(replica, "its process ended")
        updating = self._weights.lock.locked
        try:
            await replica.server.health()
            replica.failed_checks = 0
            label = replica.label if updating() else await replica.server.weight_label()
            missing = [] if updating() else await self._adapters.missing_on(replica)
        except (ModelServerError, ConfigError) as error:
            replica.failed_checks += 1
            if replica.failed_checks >= MAX_FAILED_CHECKS:
                self.mark_unhealthy(replica, str(error))
            return
        if replica.up and label != replica.label and not updating():
            self.evict(replica, f"it has weights {label}, not {replica.label}: it was started again")
        elif replica.up and missing and not updating():
            self.evict(replica, f"it has no adapter {missing[0]!r} any more: it was started again")

    async def _recover(self, replica: Replica) -> None:
        """Retry until the replica is healthy and has the current weights and adapters."""
        pause, since = MIN_PAUSE, time.monotonic()
        while True:
            try:
                # A process that waits for the rest of a transfer may wait forever, so it is restarted.
                if replica.process is not None and (replica.process.ended or replica.transfer_interrupted):
                    await self._restart(replica, replica.process)
                await replica.server.health()
                if replica.transfer_interrupted and replica.channel is not None:
                    await replica.channel.receiver.discard_partial_update()
                async with self._weights.lock:
                    await self._weights.catch_up(replica)
                    await self._adapters.catch_up(replica)
                    replica.up = True
                break
            except Exception as error:  # noqa: BLE001 - whatever the server answers, it is asked again
                replica.failure = str(error) if isinstance(error, AgentLightningError) else repr(error)
            if time.monotonic() - since > STALL_SECONDS:
                _cancel_requests(replica)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)
        log.info("model server %s is back", replica.server.url)
        self._update_any_up()

    async def _restart(self, replica: Replica, process: ServerProcess) -> None:
        replica.adapters.clear()
        replica.version, replica.label = -1, None
        target = self._weights.target
        await process.restart(await target.source.directory() if target else None)
        replica.transfer_interrupted = False

    def _update_any_up(self) -> None:
        if any(replica.up for replica in self._replicas):
            self._any_up.set()
        else:
            self._any_up.clear()


def _cancel_requests(replica: Replica) -> None:
    for task in list(replica.in_flight):
        task.cancel()


log = logging.getLogger(__name__)

OnNewWeights = Callable[[LabeledWeights], Awaitable[None]]
MAX_CACHED_CONSTRAINTS = 1000
"""Number of schemas and grammars for which the pool remembers whether servers can enforce them."""


class ReplicaPool(AgentEngines):
    """An `Engine` over `replicas`. Create it with `ReplicaPool.open`, in the event loop that uses it."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        info: Sequence[ServedModelInfo],
        chat: ChatFormat,
        transport: Transport,
        *,
        model: str | None,
        max_context: int | None,
        retry_policy: RetryPolicy,
        weights: PoolWeights,
    ) -> None:
        self.model = model or info[0].model
        self.chat = chat
        self.context_length = min([each.context_length for each in info] + ([max_context] if max_context else []))
        self.replicas = list(replicas)
        self._served_name = info[0].model
        self._transport = transport
        self._retry_policy = retry_policy
        self._weights = weights
        self.on_new_weights: OnNewWeights | None = None
        """Called with new weights before any server has them."""
        self._adapters = PoolAdapters()
        self._constraints: dict[str, bool] = {}
        """JSON schema or grammar -> whether the servers can enforce it."""
        self._closed = False
        self._monitor = HealthMonitor(self.replicas, self._weights, self._adapters, self._retry_policy)

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
        weights: PoolWeights | None = None,
    ) -> ReplicaPool:
        """A pool of running servers. `model` is the name agents request (default: the servers' own), `max_context` the
        limit of prompt and answer; `weights_change` says that their weights will be replaced. `weights` says which they
        are to have, where another process gives them (`FollowedWeights`).

        Raises ConfigError if they serve different models or were started with unsuitable options, ModelServerError if
        one does not answer. `transport` is closed with the pool."""
        if not replicas:
            raise ConfigError("no model server: give the address of at least one")
        info = [await replica.server.model_info() for replica in replicas]
        if len({each.model for each in info}) > 1:
            names = ", ".join(f"{r.server.url}: {each.model}" for r, each in zip(replicas, info, strict=True))
            raise ConfigError(f"the servers serve different models ({names}); give them one --served-model-name")
        for replica in replicas:
            await replica.server.verify(weights_change=weights_change)
            replica.label = await replica.server.weight_label()
        return cls(
            replicas,
            info,
            chat,
            transport,
            model=model,
            max_context=max_context,
            retry_policy=retry_policy or RetryPolicy(),
            weights=weights or PoolWeights(replicas),
        )

    @property
    def policy_version(self) -> int:
        return self._weights.version

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
        return sum(len(replica.in_flight) for replica in self.replicas)

    async def kv_cache_usage(self) -> float | None:
        """The share of its memory for keys and values that the fullest server uses; None: no server reports it."""
        asked = (replica.server.kv_cache_usage() for replica in self.replicas if replica.up)
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
        version = self.version_of(adapter)
        sample = await self._sample(adapter, prompt_token_ids, params, on_tokens, affinity)
        return replace(sample, policy_version=version, versions=())

    async def sample_from(
        self, replica: Replica, prompt: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> Sample:
        """Sample from this server and no other. Raises as `ModelServer.sample` does."""
        answer = self._new_answer(prompt, params, None)
        completion = await self._run(replica, adapter or self._served_name, answer)
        return answer.sample(completion.finish_reason, replica.version)

    async def _sample(
        self, model: str, prompt: Sequence[int], params: SamplingParams, on_tokens: OnTokens | None, affinity: str
    ) -> Sample:
        answer = self._new_answer(prompt, params, on_tokens)
        tried: list[Replica] = []
        while (reason := answer.finish_reason) is None:
            replica = await self._choose(affinity, tried)
            tried.append(replica)
            try:
                completion = await self._run(replica, model, answer)
                return answer.sample(completion.finish_reason, replica.version)
            except ModelServerError as error:
                if not error.retryable or not answer.can_resume or len(tried) > self._retry_policy.retries:
                    raise
                self._monitor.mark_unhealthy(replica, str(error))
        return answer.sample(reason, self._weights.version)

    def _new_answer(self, prompt: Sequence[int], params: SamplingParams, on_tokens: OnTokens | None) -> ResumableSample:
        room = room_for_answer(prompt, self.context_length)
        max_tokens = min(room, params.max_tokens or room)
        end_tokens = params.end_tokens(self.chat.eos_token_ids)
        return ResumableSample(prompt, params, max_tokens, end_tokens, self.chat.decode, on_tokens)

    async def _run(self, replica: Replica, model: str, answer: ResumableSample) -> Completion:
        """Sample the rest of `answer` on one server."""

        def on_chunk(chunk: TokenChunk) -> None:
            answer.append(chunk, replica.version)

        request, labels = answer.request(model, model != self._served_name), self._weights.labels
        task = asyncio.ensure_future(replica.server.sample(request, on_chunk, stream=answer.streamed))
        replica.in_flight.add(task)
        try:
            completion = await task
            answer.set_versions(completion, {**labels, **self._weights.labels})
            return completion
        except StopStringFound:
            return Completion("stop")
        except (ModelServerError, ConfigError):
            if model != self._served_name and await self._lost_adapter(replica, model):
                message = f"{replica.server.url} has no adapter {model!r} any more: it was started again"
                self._monitor.evict(replica, message)
                raise ModelServerError(message, retryable=True) from None
            raise
        except UnknownWeightsError as error:
            self._monitor.evict(replica, f"it samples with weights that were not given to it ({error})")
            message = f"{replica.server.url} sampled with weights that were not given to it ({error})"
            raise ModelServerError(message, retryable=answer.rollback()) from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise ModelServerError(f"{replica.server.url} was evicted: {replica.failure}", retryable=True) from None
        finally:
            replica.in_flight.discard(task)

    async def _lost_adapter(self, replica: Replica, name: str) -> bool:
        try:
            return name in await self._adapters.missing_on(replica)
        except (ModelServerError, ConfigError):
            return False  # It has failed altogether, and the first error says so.

    async def _choose(self, affinity: str, tried: Sequence[Replica]) -> Replica:
        """A server that is up, preferably one that has not failed this call."""
        up = await self._monitor.wait_for_up()
        candidates = [replica for replica in up if replica not in tried] or up
        if affinity:
            return max(candidates, key=lambda replica: weight(affinity, replica.server.url))
        return min(candidates, key=lambda replica: len(replica.in_flight))

    # -- weights and adapters --------------------------------------------------------------------------------------

    async def set_weights(self, weights: Path | WeightSource, version: int) -> None:
        """Give all servers these weights: a directory that they read themselves, or a source. Returns when all that are
        up have them; the others get them from the disk before they sample again. Raises PolicyError if no server
        accepts them."""
        source = DiskWeights(weights) if isinstance(weights, Path) else weights
        async with self._weights.lock:
            self._weights.set_target(source, version)
            if self.on_new_weights is not None and self._weights.target is not None:
                await self.on_new_weights(self._weights.target)
            await self.update_replicas()
        await self._monitor.wait_for_up()

    async def update_replicas(self) -> None:
        """Give the servers that are up the target weights, while the lock of the weights is held. One that does not
        take them samples nothing until it has them."""
        await asyncio.gather(*(self._update(replica) for replica in self.replicas if replica.up))
        if self._weights.target is not None:
            self._weights.version = self._weights.target.version

    @property
    def weights(self) -> LabeledWeights | None:
        """The weights that all servers are to have; None: those they were started with."""
        return self._weights.target

    async def _update(self, replica: Replica) -> None:
        channel = replica.channel if replica.channel is not None and replica.channel.usable else None
        try:
            await self._weights.load(replica, channel)
        except Exception as error:  # noqa: BLE001 - whatever one server answers, the others go on
            # It may hold a mix of old and new weights, so nobody samples there until it has the new ones.
            self._monitor.evict(replica, str(error) if isinstance(error, AgentLightningError) else repr(error))
            if channel is not None and not channel.usable:
                log.warning("model server %s gets its weights from the disk from now on", replica.server.url)

    async def load_adapter(self, name: str, directory: Path) -> AdapterView:
        """Let all servers serve the LoRA adapter in `directory` as `name`; called again, its next version. A server
        that fails samples nothing until it has loaded it. Raises PolicyError or ConfigError if all fail."""
        async with self._weights.lock:
            up = [replica for replica in self.replicas if replica.up]
            for replica, error in (await self._adapters.load(name, directory, up)).items():
                self._monitor.evict(replica, f"it could not load the adapter {name}: {error}")
        return AdapterView(self, name, name)

    async def set_adapter(self, name: str, directory: Path, *, strict: bool = False) -> dict[Replica, Exception]:
        """`load_adapter`, except that servers may all fail: each samples again once it has loaded the adapter. Returns
        when one has it, with the errors of the others. Raises PolicyError if none does in time. With `strict`, raises
        the error if all fail, and ConfigError if the options of any server do not let it."""
        async with self._weights.lock:
            up = [replica for replica in self.replicas if replica.up]
            errors = await self._adapters.load(name, directory, up, can_fail=not strict)
            if strict and (wrong := [error for error in errors.values() if isinstance(error, ConfigError)]):
                raise wrong[0]
            for replica, error in errors.items():
                self._monitor.evict(replica, f"it could not load the adapter {name}: {error}")
        await self._monitor.wait_for_up()
        return errors

    async def unload_adapter(self, name: str) -> None:
        """Unload the adapter from all servers. Raises ConfigError if none of the name is loaded."""
        async with self._weights.lock:
            await self._adapters.unload(name, self.replicas)

    def expect_adapter(self, name: str, version: int) -> None:
        """Let `sample_adapter` use an adapter that another process loads on the servers, until `forget_adapter`."""
        self._adapters.expect(name, version, self.replicas)

    def forget_adapter(self, name: str) -> None:
        """See `expect_adapter`."""
        self._adapters.forget(name, self.replicas)

    def version_of(self, adapter: str | None) -> int:
        """See `AgentEngines.version_of`: 0 for an adapter as first loaded. Raises ConfigError if none of the name is
        loaded."""
        return self.policy_version if adapter is None else self._adapters.version(adapter)

    async def close(self) -> None:
        """End the health checks and the servers we started, and close the connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._monitor.close()
        for channel in filter(None, (replica.channel for replica in self.replicas)):
            channel.sender.abort()
        await asyncio.gather(*(replica.process.close() for replica in self.replicas if replica.process))
        await self._transport.close()
