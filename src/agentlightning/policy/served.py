"""A policy that trains in this process and samples from model servers with the same weights.

The local policy trains, saves and loads. After each change its weights are written to a directory that the servers
read, or sent to them without the disk (`agentlightning.weight_sync`); of adapters, only those that changed
(`adapters.served`). Then both sample a few tokens, and the update counts only if their log-probabilities agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final
from zlib import crc32

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.base import ConstraintKind, Engine, OnTokens, Sample, SamplingParams
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.engine.servers.open import open_servers
from agentlightning.engine.servers.pool import ReplicaPool
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.adapters.served import AdapterLearner, ServedAdapters
from agentlightning.policy.base import UPDATE, Columns, Policy, ScoreColumn, UpdateOptions
from agentlightning.policy.lora_config import check_servable
from agentlightning.trajectory import TokenTree, TrainingSample
from agentlightning.weight_sync.base import LendWeights, WeightOwner
from agentlightning.weight_sync.disk import CheckpointFolder
from agentlightning.weight_sync.select import AUTO, DISK, select_transport

GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=4)
PROBE_MESSAGES: Final = ({"role": "user", "content": "What is 2 + 3?"},)
OTHER_MODEL: Final = "it must serve the model below the adapters (policy.model): "
OTHER_ADAPTER: Final = "with an adapter: "
TOLERANCES: Final = {"float32": 0.01}
"""Largest difference of log-probabilities, by dtype."""


class PublishedWeights:
    """The learner's current weights, as a `WeightSource` for servers. `path`: where they are on disk already."""

    def __init__(self, policy: ServedPolicy, path: Path | None = None) -> None:
        self.path = path
        self._policy = policy
        self._generation = policy.generation
        self._writing = asyncio.Lock()

    @property
    def lend(self) -> LendWeights | None:
        learner = self._policy.learner
        return learner.lend if self._policy.transfer != DISK and isinstance(learner, WeightOwner) else None

    async def directory(self) -> Path:
        async with self._writing:
            if self.path is None:
                self.path = await self._policy.write(self._generation)
            return self.path


class ServedPolicy:
    """Trains `learner` and samples from `servers`; it owns both. Create it with `ServedPolicy.open`."""

    def __init__(
        self,
        learner: Policy,
        servers: ReplicaPool,
        checkpoints: CheckpointFolder,
        tolerance: float,
        transfer: str = DISK,
        *,
        config: ServersConfig | None = None,
        kind: str = "vllm",
    ) -> None:
        self.learner = learner
        self.servers = servers
        self.config = config or ServersConfig()
        self.kind = kind
        self.model = servers.model
        self.context_length = min(servers.context_length, learner.context_length)
        self.vocab_size = learner.vocab_size
        self.differences: list[float] = []
        """For each update, the largest difference of log-probabilities between the servers and the learner."""
        self.transfer = transfer
        """How the weights travel: `disk`, or a key of `SENDERS`."""
        self._checkpoints = checkpoints
        self._generation = 0
        """Number of times the learner's weights changed, or may have changed."""
        self._tolerance = tolerance
        self.adapters: ServedAdapters | None = None
        """None: all weights are trained."""
        if isinstance(learner, AdapterLearner) and learner.adapters:
            self.adapters = ServedAdapters(self, learner, servers, checkpoints.path)
        self._probe = tuple(learner.chat.encode(learner.chat.render(list(PROBE_MESSAGES))))

    @classmethod
    async def open(
        cls,
        learner: Policy,
        config: ServersConfig,
        folder: Path,
        *,
        kind: str = "vllm",
        dtype: str = "auto",
    ) -> ServedPolicy:
        """Start or join the servers of `config`, and give them the learner's weights: all, or its adapters over the
        model that they must serve. `folder` gets their logs, and the weights unless `config.weights` is set. Raises as
        `open_servers`, `ReplicaPool.set_weights` and `ReplicaPool.set_adapter` do."""
        checkpoints = CheckpointFolder(
            _own_folder(Path(config.weights), folder) if config.weights else folder / "weights"
        )
        adapters = learner.adapters if isinstance(learner, AdapterLearner) else {}
        check_servable(adapters, config, kind)
        transfer, device = (DISK, "cpu") if adapters else _transfer(learner, config, kind)
        if isinstance(learner, AdapterLearner) and adapters:
            base = learner.config.model
            first = Path(base if config.urls else await asyncio.to_thread(resolve_model, base))
        else:
            first = await checkpoints.write(learner)
        servers = await open_servers(
            config.with_lora(len(adapters), max((each.r for each in adapters.values()), default=0)),
            learner.chat,
            kind=kind,
            model=first,
            name=learner.model,
            dtype=dtype,
            max_context=learner.context_length,
            weights_change=not adapters,
            logs=folder,
            transfer=transfer,
            device=device,
        )
        tolerance = config.tolerance or TOLERANCES.get(dtype, 0.1)
        policy = cls(learner, servers, checkpoints, tolerance, transfer, config=config, kind=kind)
        try:
            if policy.adapters is not None:
                await policy._publish_adapters(policy.adapters, first=True)
            else:
                await policy._publish(PublishedWeights(policy, first))
        except BaseException:
            await servers.close()
            raise
        return policy

    # -- sampling --------------------------------------------------------------------------------------------------

    @property
    def chat(self) -> ChatFormat:
        return self.learner.chat

    @property
    def supported_params(self) -> frozenset[str]:
        return self.servers.supported_params

    async def can_enforce(self, text: str, kind: ConstraintKind = "json_schema") -> bool:
        """See `Engine.can_enforce`."""
        return await self.servers.can_enforce(text, kind)

    @property
    def policy_version(self) -> int:
        return self.adapters.newest if self.adapters else self.servers.policy_version

    @property
    def views(self) -> Mapping[str, Engine]:
        """See `AgentEngines.views`."""
        return self.adapters.by_model if self.adapters else {}

    @property
    def versions(self) -> Mapping[str, int]:
        """See `AgentEngines.versions`."""
        own = self.adapters.own if self.adapters else None
        return {self.model: self.version_of(own)} | {name: view.policy_version for name, view in self.views.items()}

    def for_agent(self, agent: str | None) -> Engine:
        """See `AgentEngines.for_agent`."""
        return self.adapters.views.for_agent(agent) if self.adapters else self

    def version_of(self, adapter: str | None) -> int:
        """See `AdapterSampler.version_of`."""
        return self.adapters.version_of(adapter) if self.adapters else self.servers.policy_version

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`. Raises as `ReplicaPool.sample` does."""
        own = self.adapters.own if self.adapters else None
        return await self.sample_adapter(own, prompt_token_ids, params, on_tokens, affinity=affinity)

    async def sample_adapter(
        self,
        adapter: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `AdapterSampler.sample_adapter`. Raises as `sample`."""
        if self.adapters is None:
            return await self.servers.sample(prompt_token_ids, params, on_tokens, affinity=affinity)
        return await self.adapters.sample(adapter, prompt_token_ids, params, on_tokens, affinity)

    async def kv_cache_usage(self) -> float | None:
        """See `Policy.kv_cache_usage`."""
        return await self.servers.kv_cache_usage()

    # -- learning --------------------------------------------------------------------------------------------------

    @property
    def can_update_in_flight(self) -> bool:
        return True

    async def train(
        self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE, *, in_flight: bool = False
    ) -> Mapping[str, float]:
        """See `Policy.train`. Raises as the learner does, and PolicyError where the servers do not take the weights."""
        self._require_idle(in_flight)
        metrics = await self.train_apart(samples, options)
        return {**metrics, **await self.publish_update(in_flight=in_flight)}

    async def train_apart(
        self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE
    ) -> Mapping[str, float]:
        """See `SeparatePolicy.train_apart`. Raises as the learner does."""
        self._generation += 1
        return await self.learner.train(samples, options)

    async def publish_update(self, *, in_flight: bool = False) -> Mapping[str, float]:
        """See `SeparatePolicy.publish_update`."""
        self._require_idle(in_flight)
        metrics = await self.publish()
        return {"server_difference": self.differences[-1], **metrics}

    @property
    def starts_at_base(self) -> bool:
        """See `Policy.starts_at_base`."""
        return bool(getattr(self.learner, "starts_at_base", False))

    async def score(
        self,
        trees: Sequence[TokenTree],
        what: AbstractSet[ScoreColumn],
        *,
        reference: Path | None = None,
        adapter: str | None = None,
    ) -> Columns:
        """See `Policy.score`; computed by the learner."""
        return await self.learner.score(trees, what, reference=reference, adapter=adapter)

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        await self.learner.save(directory, training_state=training_state)

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """See `Policy.load`. Raises as `train` does."""
        self._require_idle(in_flight)
        self._generation += 1
        await self.learner.load(directory, above=above)
        await self.publish()

    async def publish(self) -> Mapping[str, float]:
        """Give the servers the learner's weights, and check that they agree; returns metrics. Raises PolicyError if no
        server accepts them, or one then disagrees with the learner."""
        if self.adapters is not None:
            return await self._publish_adapters(self.adapters)
        weights = PublishedWeights(self)
        if self.transfer == DISK:
            await weights.directory()
        await self._publish(weights)
        return {}

    async def _publish_adapters(self, adapters: ServedAdapters, *, first: bool = False) -> Mapping[str, float]:
        changed, metrics = await adapters.publish(strict=first)
        self.differences.append(0.0)
        for name in [None, *changed] if first else changed:
            own, samples = await adapters.probe(name, self._probe, GREEDY)
            self._compare(own, samples, OTHER_MODEL if name is None else OTHER_ADAPTER)
        return metrics

    async def _publish(self, weights: PublishedWeights) -> None:
        await self.servers.set_weights(weights, self.learner.policy_version)
        await self._check_agreement()
        if not all(replica.up for replica in self.servers.replicas):
            await weights.directory()  # For the replicas that recover: the next step changes the weights.
        if weights.path is not None:
            await self._checkpoints.prune(weights.path)

    async def write(self, generation: int) -> Path:
        """The weights of this generation on disk. Raises PolicyError if they have changed since."""
        directory = await self._checkpoints.write(self.learner) if generation == self._generation else None
        if directory is None or generation != self._generation:
            if directory is not None:  # It may hold newer weights under this name.
                await self._checkpoints.remove(directory)
            raise PolicyError("the weights have changed since; the server gets those of the next update")
        return directory

    @property
    def generation(self) -> int:
        return self._generation

    def _require_idle(self, in_flight: bool) -> None:
        if not in_flight and self.servers.in_flight:
            raise PolicyError(
                f"{self.servers.in_flight} answers are in flight; wait for them before the weights change, or let them "
                "continue with in_flight=True"
            )

    async def _check_agreement(self) -> None:
        own = await self.learner.sample(self._probe, GREEDY)
        up = [replica for replica in self.servers.replicas if replica.up]
        samples = await asyncio.gather(*(self.servers.sample_from(replica, self._probe, GREEDY) for replica in up))
        self.differences.append(0.0)
        self._compare(own, [(each.server.url, sample) for each, sample in zip(up, samples, strict=True)])

    def _compare(self, own: Sample, samples: Sequence[tuple[str, Sample]], hint: str = "") -> None:
        """Raises PolicyError for a server that disagrees with the learner."""
        differences = [(url, _difference(own, sample)) for url, sample in samples]
        self.differences[-1] = max([self.differences[-1], *(difference for _, difference in differences)])
        for url, difference in differences:
            if difference > self._tolerance:
                raise PolicyError(
                    f"{url} gives log-probabilities that differ by {difference:.4f} from the trainer's "
                    f"(tolerance {self._tolerance:g}); {hint}give the server the same dtype and no quantization, or "
                    "set a larger tolerance"
                )

    async def close(self) -> None:
        """Close the servers and the learner."""
        try:
            if self.adapters is not None:
                await self.adapters.close()
            await self.servers.close()
        finally:
            await self.learner.close()


def _transfer(learner: Policy, config: ServersConfig, kind: str) -> tuple[str, str]:
    """How weights travel, and the device they travel from. Raises ConfigError if the configured way is impossible."""
    if config.transfer == DISK or (
        config.transfer == AUTO and (kind != "vllm" or not isinstance(learner, WeightOwner))
    ):
        return DISK, "cpu"
    if kind != "vllm":
        raise ConfigError(
            f'transfer="{config.transfer}" is for vLLM servers; {kind} servers read weights from the disk'
        )
    if not isinstance(learner, WeightOwner):
        raise ConfigError(f'{type(learner).__name__} does not lend its weights; use transfer="disk"')
    return select_transport(config.transfer, learner.device, () if config.urls else config.devices), learner.device


def _difference(own: Sample, other: Sample) -> float:
    """Largest difference of log-probabilities up to the first token that differs: of two equally likely tokens each
    may sample another."""
    largest = 0.0
    pairs = zip(own.token_ids, own.logprobs, other.token_ids, other.logprobs, strict=False)
    for token, logprob, other_token, other_logprob in pairs:
        largest = max(largest, abs(logprob - other_logprob))
        if token != other_token:
            break
    return largest


def _own_folder(shared: Path, folder: Path) -> Path:
    """A folder below a directory that several runs may share; the same when the run is resumed."""
    place = str(folder.absolute())
    return shared / f"{folder.absolute().parent.name}-{crc32(place.encode()):08x}"
