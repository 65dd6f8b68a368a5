"""An engine over model servers: one, or several replicas of the same model.

Decides which server samples an answer, which are up, and what weights and adapters each is to have. Calls of one
affinity go to one server, whose cache holds their history. A server that fails is evicted, and samples nothing until it
is healthy and has what it has missed; its running answers continue on another server, from the last token that arrived.
The pool never trains, and never decides when weights change: `policy.served` does, or a trainer in another process,
which says what it has given the servers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shlex
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from agentlightning.chat.base import ChatFormat
from agentlightning.chat.hf import load_chat_format
from agentlightning.engine.base import (
    AdapterView,
    AgentEngines,
    ConstraintKind,
    Engine,
    EngineWrapper,
    FinishReason,
    OnTokens,
    Sample,
    SamplingParams,
    StopScanner,
    TopLogprobs,
    room_for_answer,
    version_runs,
)
from agentlightning.engine.servers.clients.http import (
    Completion,
    HttpModelServer,
    ModelServerError,
    SampleRequest,
    TokenChunk,
)
from agentlightning.engine.servers.clients.vllm import VllmProcess, VllmServer
from agentlightning.engine.servers.config import ENGINES, RetryPolicy, ServedModel, ServersConfig
from agentlightning.errors import AgentLightningError, ConfigError, PolicyError
from agentlightning.models.resolve import resolve_model
from agentlightning.transport import Transport
from agentlightning.transport.servers import Server, ServerSet
from agentlightning.weight_sync.transfer import (
    AUTO,
    DISK,
    SENDERS,
    SERVER_ENVIRONMENT,
    VISIBLE_DEVICES,
    LendWeights,
    WeightSender,
)

log = logging.getLogger(__name__)

MAX_TRANSFER_FAILURES = 1
"""A server whose transfers failed more often gets its weights from the disk for the rest of the run."""
STALL_SECONDS = 30.0
"""Requests of a server that shows no sign of life for this long continue elsewhere."""
MAX_LABELS = 64
"""Labels that are remembered of weights that a trainer elsewhere has replaced: answers may still be under way."""
MAX_CACHED_CONSTRAINTS = 1000
"""Number of schemas and grammars for which the pool remembers whether servers can enforce them."""
CLOSE_SECONDS = 10.0
"""How long servers that we joined have to unload the adapters at the end."""

# -- answer ------------------------------------------------------------------------------------------------------------

# One answer sampled by servers, possibly one after another: a server continues from the tokens of the one before.


class UnknownWeightsError(Exception):
    """A server sampled with weights that it was never given."""


class StopStringFound(Exception):
    """The answer contains a stop string that spans two servers, so that neither could see it."""


@dataclass(eq=False, repr=False)
class ResumableSample:
    """The tokens of one answer so far. `decode` turns tokens into text, for stop strings across servers."""

    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    end_tokens: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    on_tokens: OnTokens | None
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    versions: list[int] = field(default_factory=list[int])
    """One for each token."""
    start: int = 0
    """Number of tokens from earlier servers."""
    scanner: StopScanner | None = None

    @property
    def streamed(self) -> bool:
        """Whether tokens are passed on as they arrive."""
        return self.on_tokens is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set when the answer is complete, whatever a server reports."""
        if self.token_ids and self.token_ids[-1] in self.end_tokens:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None

    @property
    def can_resume(self) -> bool:
        """Whether another server would sample the rest from the same distribution. Penalties count sampled tokens, and
        a schema or grammar begins with the first of them, but the other server sees them as its prompt."""
        params = self.params
        stateful = params.presence_penalty or params.frequency_penalty or params.constraint is not None
        return not self.token_ids or not stateful

    def request(self, model: str, adapter: bool) -> SampleRequest:
        """A request for the rest of the answer."""
        self.start = count = len(self.token_ids)
        params = self.params
        if count:
            # The same seed would repeat the random numbers of the first tokens.
            params = params if params.seed is None else replace(params, seed=params.seed + count)
            params = replace(params, min_tokens=max(0, params.min_tokens - count))
            if params.stop:
                self.scanner = StopScanner(params.stop, self.decode)
                for token in self.token_ids:
                    self.scanner.push(token)
        prompt = [*self.prompt, *self.token_ids]
        return SampleRequest(model, prompt, params, self.max_tokens - count, self.end_tokens, adapter)

    def append(self, chunk: TokenChunk, version: int) -> None:
        """Raises StopStringFound if the answer is complete."""
        chunk, stopped = self._cut_at_stop_string(chunk)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.top_logprobs += chunk.top_logprobs
        self.versions += [version] * len(chunk.token_ids)
        if self.on_tokens is not None and chunk.token_ids:
            logprobs = (chunk.logprobs, chunk.top_logprobs) if self.params.stream_logprobs else ()
            self.on_tokens(chunk.token_ids, *logprobs)
        if stopped:
            raise StopStringFound

    def set_versions(self, completion: Completion, versions: Mapping[str, int]) -> None:
        """Apply the server's report of which weights sampled which tokens; `versions` maps labels. Raises
        UnknownWeightsError."""
        if not completion.weights:
            return
        count = len(self.token_ids) - self.start
        labels = [label for label, tokens in completion.weights for _ in range(tokens)][:count]
        if unknown := [label for label in labels if label not in versions]:
            raise UnknownWeightsError(unknown[0])
        self.versions[self.start : self.start + len(labels)] = [versions[label] for label in labels]

    def rollback(self) -> bool:
        """Drop the tokens of the current server; False if they have been streamed already."""
        if self.streamed and len(self.token_ids) > self.start:
            return False
        for values in (self.token_ids, self.logprobs, self.top_logprobs, self.versions):
            del values[self.start :]
        return True

    def sample(self, finish_reason: FinishReason, version: int) -> Sample:
        return Sample(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=finish_reason,
            policy_version=self.versions[-1] if self.versions else version,
            versions=version_runs(self.versions),
            top_logprobs=tuple(self.top_logprobs),
        )

    def _cut_at_stop_string(self, chunk: TokenChunk) -> tuple[TokenChunk, bool]:
        if self.scanner is None:
            return chunk, False
        for end, token in enumerate(chunk.token_ids, start=1):
            if self.scanner.push(token):
                return TokenChunk(chunk.token_ids[:end], chunk.logprobs[:end], chunk.top_logprobs[:end]), True
        return chunk, False


# -- replicas ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class WeightSource:
    """One version of the weights, as servers can get it."""

    place: Path | Callable[[], Awaitable[Path]] | None
    """Where they are on disk, or what writes them there; None: another process gives them to the servers."""
    lend: LendWeights | None = None
    """Access to them in memory, for servers that receive them without the disk."""
    version: int = 0
    label: str = ""
    """Under which servers report them."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def directory(self) -> Path:
        """The weights on disk, written now unless they are there. Raises PolicyError if they no longer exist."""
        async with self.writing:
            if not isinstance(self.place, Path):
                assert self.place is not None
                self.place = await self.place()
            return self.place


@dataclass(slots=True, eq=False)
class Adapter:
    """One version of a LoRA adapter."""

    name: str
    served_name: str
    """What the servers call this version."""
    version: int
    directory: Path | None = None
    """None: another process loads it on the servers."""
    calls: int = 0
    """Number of calls that use it."""


class Replica(Server):
    """One of the servers of a pool."""

    pauses = 0.1, 5.0

    def __init__(self, server: HttpModelServer, process: VllmProcess | None = None) -> None:
        super().__init__(server.url)
        self.server, self.process = server, process
        self.version = 0
        """Version of its weights."""
        self.label: str | None = None
        self.failure = ""
        """Why it is not up, or its last check failed."""
        self.healthy_at = time.monotonic()
        self.adapters: dict[str, Adapter] = {}
        """Those that we have loaded, by served name."""
        self.sender: WeightSender | None = None
        """Gives it weights without the disk; None: it reads them there."""
        self.transfer_failures = 0
        self.transfer_interrupted = False
        """Whether a transfer to it was interrupted since it last got complete weights."""

    def cancel_requests(self) -> None:
        """Let its running requests continue elsewhere."""
        for task in list(self.requests):
            task.cancel()

    @property
    def takes_transfers(self) -> bool:
        """Whether it gets weights without the disk."""
        return self.sender is not None and self.transfer_failures <= MAX_TRANSFER_FAILURES

    async def transfer(self, label: str, lend: LendWeights, on_loaded: Callable[[], None]) -> None:
        """Give it weights. Raises PolicyError or ConfigError; it may then hold a mix of old and new ones."""
        server, sender = self.server, self.sender
        assert isinstance(server, VllmServer)
        assert sender is not None
        self.transfer_interrupted = True
        try:
            if not sender.connected:
                await server.connect(sender)
            await server.receive_weights(sender, lend, label, on_loaded)
        except BaseException as error:
            self.transfer_failures += isinstance(error, PolicyError | ConfigError)
            sender.abort()  # Nobody waits for it any more.
            raise

    async def load(self, adapter: Adapter) -> None:
        """Raises ModelServerError, or ConfigError if it takes no such adapter."""
        assert adapter.directory is not None
        await self.server.load_adapter(adapter.served_name, adapter.directory)
        self.adapters[adapter.served_name] = adapter


# -- pool --------------------------------------------------------------------------------------------------------------


class ReplicaPool(ServerSet[Replica], AgentEngines):
    """An `Engine` over `replicas`, and over their adapters. Create it with `ReplicaPool.open`, in the event loop that
    uses it. `transport` is closed with it."""

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
        super().__init__(replicas, retry_policy.health_seconds, watches_all=True)
        self.chat, self.model, self.context_length = chat, model, context_length
        self.lock = asyncio.Lock()
        """Held while weights or adapters change."""
        self.weights: WeightSource | None = None
        """What every server is to have; None: what it was started with."""
        self.weight_version = 0
        """The version that all healthy servers have."""
        self.labels = {replica.label: 0 for replica in replicas if replica.label is not None}
        """Label -> version, of the weights that may sample."""
        self.served: dict[str, Adapter] = {}
        """The adapters that every server is to have, by served name: the newest version of each, and older ones that
        calls may still use."""
        self.is_used_elsewhere: Callable[[str], bool] = lambda served_name: False
        """Whether calls of other processes may use the adapter of this served name."""
        self._transport, self._policy, self._served_name = transport, retry_policy, served_name
        self._removals: set[asyncio.Task[None]] = set()
        self._run, self._label_prefix = secrets.token_hex(3), secrets.token_hex(4)
        self._updates = 0
        self._constraints: dict[str, bool] = {}
        """JSON schema or grammar -> whether the servers can enforce it."""
        self._closed = False
        self._recovered = asyncio.Event()
        for replica in replicas:
            self.watch(replica)

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
        max_tokens = room_for_answer(prompt, self.context_length, params.max_tokens)
        end_tokens = params.end_tokens(self.chat.eos_token_ids)
        answer = ResumableSample(prompt, params, max_tokens, end_tokens, self.chat.decode, on_tokens)
        tried: list[Replica] = []
        while (reason := answer.finish_reason) is None:
            if only is None:
                await self.wait_for_up()
            up = [only] if only else [each for each in self.in_order(affinity) if each.up]
            replica = next((each for each in up if each not in tried), up[0])  # Preferably one that has not failed it.
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

    # -- adapters --------------------------------------------------------------------------------------------------

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

    # -- weights ---------------------------------------------------------------------------------------------------

    async def set_weights(self, weights: Path | WeightSource, version: int) -> None:
        """Give all servers these weights: a directory that they read themselves, or a source. Returns when all that are
        up have them; the others get them from the disk before they sample again. Raises PolicyError if no server
        accepts them."""
        source = WeightSource(weights) if isinstance(weights, Path) else weights
        async with self.lock:
            # A new label for each update: an earlier version that is restored must not share one with what followed it.
            self._updates += 1
            self.weights, source.version, source.label = source, version, f"{self._label_prefix}-{self._updates}"
            # From now on, weights that we did not set are those of a restarted server.
            self.labels = {label: known for label, known in self.labels.items() if label.startswith(self._label_prefix)}
            self.labels[source.label] = version
            await self.update_replicas()
        await self.wait_for_up()

    def announce_weights(self, label: str, version: int) -> None:
        """Let every server have the weights of this label, which a trainer in another process gives them. Tokens that
        they sample are those of `version`."""
        if self.weights is None:
            self.labels.clear()  # What the servers had before is no version of the trainer's.
        self.weights = WeightSource(None, version=version, label=label)
        self.labels[label] = version
        for old in list(self.labels)[:-MAX_LABELS]:
            del self.labels[old]

    async def update_replicas(self) -> None:
        """Give the servers that are up the target weights, while `lock` is held. One that does not take them samples
        nothing until it has them."""
        await asyncio.gather(*map(self._update, self.up))
        if self.weights is not None:
            self.weight_version = self.weights.version

    async def _update(self, replica: Replica) -> None:
        transfer = replica.takes_transfers
        try:
            await self._load_weights(replica, transfer)
        except Exception as error:  # noqa: BLE001 - whatever one server answers, the others go on
            # It may hold a mix of old and new weights, so nobody samples there until it has the new ones.
            self.evict(replica, _reason(error))
            if transfer and not replica.takes_transfers:
                log.warning("model server %s gets its weights from the disk from now on", replica.url)

    async def _load_weights(self, replica: Replica, transfer: bool = False) -> None:
        """Give `replica` the target weights, by `transfer` or from the disk. Raises PolicyError or ConfigError."""
        if (target := self.weights) is None:
            return
        server, missing = replica.server, f"not {target.label}"

        def on_loaded() -> None:
            replica.version = target.version

        if target.place is None:
            missing = f"and its trainer has not given it version {target.version} ({target.label}) yet"
        elif transfer and target.lend is not None:
            await replica.transfer(target.label, target.lend, on_loaded)
        else:
            await server.load_weights(await target.directory(), target.label, on_loaded)
        replica.transfer_interrupted = False
        replica.label = await server.weight_label()
        if replica.label != target.label and (target.place is None or replica.label is not None):
            raise ModelServerError(f"{server.url} has weights {replica.label}, {missing}", retryable=True)
        on_loaded()

    async def catch_up(self, replica: Replica) -> None:
        """Give a recovered server the weights and adapters it lacks, and unload adapters that are no longer wanted."""
        label = await replica.server.weight_label()
        if self.weights is None:
            replica.version, replica.label = 0, label
            if label is not None:
                self.labels.setdefault(label, 0)
        elif replica.version != self.weights.version or label not in (None, self.weights.label):
            await self._load_weights(replica)
        if not (self.served or replica.adapters):
            return
        present = (await replica.server.model_info()).adapters
        for name in replica.adapters.keys() - self.served.keys():
            if name in present:
                await replica.server.unload_adapter(name)
            del replica.adapters[name]
        for name, adapter in [*self.served.items()]:
            if adapter.directory is None:
                if name not in present:
                    message = f"{replica.url} has no adapter {name!r}: its trainer has not loaded it yet"
                    raise ModelServerError(message, retryable=True)
            elif replica.adapters.get(name) is not adapter or name not in present:
                await replica.load(adapter)

    async def missing_adapters(self, replica: Replica) -> list[str]:
        """The adapters that a healthy server should have and has not. Raises as `HttpModelServer.model_info`."""
        return sorted(self.served.keys() - (await replica.server.model_info()).adapters) if self.served else []

    # -- health ----------------------------------------------------------------------------------------------------

    @property
    def up(self) -> list[Replica]:
        """The servers that may sample."""
        return [replica for replica in self.replicas if replica.up]

    async def wait_for_up(self) -> None:
        """Wait for a server that is up. Raises PolicyError if none is in time, or the pool is closed."""
        try:
            async with asyncio.timeout(self._policy.wait_seconds):
                while not self.up:
                    if self._closed:
                        raise PolicyError("the pool of model servers was closed")
                    self._recovered.clear()
                    await self._recovered.wait()
        except TimeoutError:
            reasons = "; ".join(f"{replica.url}: {replica.failure}" for replica in self.replicas)
            raise PolicyError(f"no model server was up for {self._policy.wait_seconds:g} s ({reasons})") from None

    def mark_unhealthy(self, replica: Replica, reason: str, *, at_once: bool = True) -> None:
        """Send no new requests to `replica` until it has recovered; its running requests continue. Unless `at_once`, it
        takes several failures in a row."""
        was_up = replica.up
        if self._closed or (at_once and not was_up):
            return
        replica.failure = reason
        replica.record_failure(at_once)
        if was_up and not replica.up:
            log.warning("model server %s failed: %s", replica.url, reason)

    def evict(self, replica: Replica, reason: str) -> None:
        """As `mark_unhealthy`; its running requests continue on other servers."""
        self.mark_unhealthy(replica, reason)
        if replica.sender is not None:
            replica.sender.abort()
        replica.version, replica.label, replica.failure = -1, None, reason
        replica.cancel_requests()

    async def check(self, replica: Replica) -> None:
        """See `ServerSet.check`. A server that is down is up again once it has the current weights and adapters."""
        try:
            await (self._verify(replica) if replica.up else self._recover(replica))
        except Exception as error:  # noqa: BLE001 - whatever the server answers, it is asked again
            self.mark_unhealthy(replica, _reason(error), at_once=False)
            if not replica.up and time.monotonic() - replica.healthy_at > STALL_SECONDS:
                replica.cancel_requests()

    async def _verify(self, replica: Replica) -> None:
        """Evict a server that was started again. Raises the error of one that does not answer."""
        if replica.process is not None and replica.process.ended:
            return self.evict(replica, "its process ended")
        updating = self.lock.locked
        await self._ask_health(replica)
        label = replica.label if updating() else await replica.server.weight_label()
        missing = [] if updating() else await self.missing_adapters(replica)
        if not replica.up or updating():
            return
        replica.record_success()
        if label != replica.label:
            self.evict(replica, f"it has weights {label}, not {replica.label}: it was started again")
        elif missing:
            self.evict(replica, f"it has no adapter {missing[0]!r} any more: it was started again")

    async def _recover(self, replica: Replica) -> None:
        """Raises the error of a server that is not healthy, or does not take the current weights and adapters."""
        process = replica.process
        # A process that waits for the rest of a transfer may wait forever, so it is restarted.
        if process is not None and (process.ended or replica.transfer_interrupted):
            replica.adapters.clear()
            replica.version, replica.label = -1, None
            await process.restart(await self.weights.directory() if self.weights else None)
            replica.transfer_interrupted = False
        await self._ask_health(replica)
        if replica.transfer_interrupted and isinstance(replica.server, VllmServer):
            await replica.server.discard_partial_update()
        async with self.lock:
            await self.catch_up(replica)
            replica.record_success()
        log.info("model server %s is back", replica.url)
        self._recovered.set()

    async def _ask_health(self, replica: Replica) -> None:
        await replica.server.health()
        replica.healthy_at = time.monotonic()

    async def close(self) -> None:
        """End the health checks and the servers we started, and close the connections. Idempotent."""
        self._closed = True
        self._recovered.set()
        await self.end_watches()
        for replica in self.replicas:
            if replica.sender is not None:
                replica.sender.abort()
        await asyncio.gather(*(replica.process.close() for replica in self.replicas if replica.process))
        await self._transport.close()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, AgentLightningError) else repr(error)


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


# -- opening -----------------------------------------------------------------------------------------------------------

# Opens the pool of servers that a configuration describes: joins running ones, or starts vLLM processes.


async def open_served_model(config: ServedModel, name: str, stack: AsyncExitStack, logs: Path) -> dict[str, Engine]:
    """The model as `name`, and its adapters; the stack closes them. Raises as `open_servers`, and PolicyError if a
    server rejects an adapter."""
    directory = await asyncio.to_thread(resolve_model, config.model)
    servers = await open_servers(
        config.with_adapters(),
        await load_chat_format(directory, config.tool_calls),
        kind=config.engine,
        model=Path(directory),
        name=name,
        dtype=config.dtype,
        max_context=config.max_context,
        logs=logs,
    )
    stack.push_async_callback(servers.close)
    adapters = {each: await servers.load_adapter(each, Path(path)) for each, path in config.adapters.items()}
    return {name: servers, **adapters}


async def open_servers(
    config: ServersConfig,
    chat: ChatFormat,
    *,
    kind: str = "vllm",
    model: Path | None = None,
    name: str | None = None,
    dtype: str = "auto",
    max_context: int | None = None,
    weights_change: bool = False,
    logs: Path = Path(),
    transfer: str = DISK,
    device: str = "cpu",
    token: str | None = None,
) -> ReplicaPool:
    """A pool of the servers of `config`.

    Running servers of `config.urls` are joined. Without them, vLLM servers are started with `model`, as `name`; they
    log to files in `logs` and end with the pool. With a `transfer` (a key of `SENDERS`) they get new weights from a
    trainer on `device` without the disk. `token` is that of the joined servers, instead of the configured one. Raises
    ConfigError, ServerError if one cannot be started, and as `ReplicaPool.open` does."""
    config.check(kind)
    transport, replicas = Transport(), list[Replica]()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(transport.close)
        if config.urls:
            client, token = ENGINES.find(kind), token or config.token
            replicas += [
                Replica(client(transport, url, token=token, seconds=config.timeout_seconds)) for url in config.urls
            ]
        elif model is None:
            raise ConfigError("no model to start servers with; give its directory, or the addresses of servers in urls")
        else:
            transfer_args = () if transfer == DISK else (f'--weight-transfer-config={{"backend": "{transfer}"}}',)
            visible = [{VISIBLE_DEVICES: each} for each in config.devices] or [{}] * config.count
            for index, devices in enumerate(visible):
                process = VllmProcess(
                    transport,
                    model=model,
                    name=name or "policy",
                    log=logs / f"vllm-{index}.log",
                    command=shlex.split(config.command),
                    args=(*config.args, *transfer_args),
                    env={**SERVER_ENVIRONMENT.get(transfer, {}), **config.env, **devices},
                    dtype=dtype,
                    max_context=max_context,
                    seconds=config.start_seconds,
                )
                stack.push_async_callback(process.close)
                server = VllmServer(transport, process.url, seconds=config.timeout_seconds)
                replicas.append(Replica(server, process))
            await asyncio.gather(*(replica.process.restart(None) for replica in replicas if replica.process))
        if transfer != DISK:
            await _connect_senders(replicas, transfer, device, stack, required=config.transfer != AUTO)
        pool = await ReplicaPool.open(
            replicas,
            chat,
            transport,
            model=name,
            max_context=max_context,
            retry_policy=config.retry_policy,
            weights_change=weights_change,
        )
        stack.pop_all()
    return pool


async def _connect_senders(
    replicas: Sequence[Replica], transfer: str, device: str, stack: AsyncExitStack, *, required: bool
) -> None:
    """Connect the servers' workers with senders, which the stack aborts. Raises ConfigError or PolicyError if one
    cannot connect; unless `required`, that server gets its weights from the disk instead."""
    connecting: list[partial[Awaitable[None]]] = []
    for replica in replicas:
        assert isinstance(replica.server, VllmServer)
        replica.sender = SENDERS[transfer](device)
        stack.callback(replica.sender.abort)
        connecting.append(partial(replica.server.connect, replica.sender))
    errors = await asyncio.gather(*(connect() for connect in connecting), return_exceptions=not required)
    for replica, error in zip(replicas, errors, strict=True):
        if error is None:
            continue
        if not isinstance(error, PolicyError | ConfigError):
            raise error
        log.warning("weights reach %s through the disk: %s", replica.url, error)
        replica.sender = None
        if replica.process is not None:  # Its workers may wait for us forever.
            await replica.process.restart(None)
