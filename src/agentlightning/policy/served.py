"""A policy that trains in this process and samples from model servers with the same weights.

The local policy trains, saves and loads. After each change its weights are written to a directory that the servers
read, or sent to them without the disk (`agentlightning.weight_sync`); of adapters, whose model the servers hold from
the start, only those that changed (`ReplicaPool.load_adapter`). Then both sample a few tokens, and the
update counts only if their log-probabilities agree.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast
from zlib import crc32

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.engine.servers.pool import PooledEngine, ReplicaPool, WeightSource, open_servers
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.base import (
    UPDATE,
    Capabilities,
    Metrics,
    Policy,
    SeparatePolicy,
    UpdateOptions,
    capabilities_of,
)
from agentlightning.policy.config import adapter_table, check_servable
from agentlightning.trajectory import TrainingSample
from agentlightning.weight_sync.disk import CheckpointFolder
from agentlightning.weight_sync.transfer import AUTO, DISK, WeightOwner, select_transport

if TYPE_CHECKING:
    from agentlightning.policy.local import LocalPolicy

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
PROBE_MESSAGES = ({"role": "user", "content": "What is 2 + 3?"},)
OTHER_MODEL = "it must serve the model below the adapters (policy.model): "
OTHER_ADAPTER = "with an adapter: "


@dataclass(eq=False, repr=False)
class ServedPolicy(SeparatePolicy, PooledEngine):
    """Trains `learner` and samples from `servers`; it owns both. Create it with `ServedPolicy.open`."""

    learner: Policy
    servers: ReplicaPool
    checkpoints: CheckpointFolder
    tolerance: float
    transfer: str
    """How the weights travel: `disk`, or a key of `SENDERS`."""
    config: ServersConfig
    kind: str

    def __post_init__(self) -> None:
        learner, servers = self.learner, self.servers
        self.score, self.save = learner.score, learner.save
        self.sample_adapter = servers.sample_adapter
        self.model = servers.model
        self.vocab_size = learner.vocab_size
        self.differences: list[float] = []
        """For each update, the largest difference of log-probabilities between the servers and the learner."""
        self.generation = 0
        """Number of times the learner's weights changed, or may have changed."""
        self.adapters = sorted(capabilities_of(learner).adapters)
        """Their names; empty: all weights are trained."""
        if self.adapters:
            self.table = adapter_table(self.model, self._local.config.agents, self.adapters)
        self._probe = tuple(learner.chat.encode(learner.chat.render(list(PROBE_MESSAGES))))

    @classmethod
    async def open(
        cls, learner: Policy, config: ServersConfig, folder: Path, *, kind: str = "vllm", dtype: str = "auto"
    ) -> ServedPolicy:
        """Start or join the servers of `config`, and give them the learner's weights: all, or its adapters over the
        model that they must serve. `folder` gets their logs, and the weights unless `config.weights` is set. Raises as
        `open_servers`, `ReplicaPool.set_weights` and `ReplicaPool.load_adapter` do."""
        checkpoints = CheckpointFolder(
            _own_folder(Path(config.weights), folder) if config.weights else folder / "weights"
        )
        adapters = capabilities_of(learner).adapters
        check_servable(adapters, config, kind)
        if adapters and not hasattr(learner, "save_adapter"):
            raise ConfigError(
                f"{type(learner).__name__} trains adapters and saves none for model servers; leave policy.lora and"
                ' algorithm.agents out, or set policy.engine = "local"'
            )
        transfer, device = (DISK, "cpu") if adapters else _transfer(learner, config, kind)
        if adapters:
            base = cast("LocalPolicy", learner).config.model  # Which never changes.
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
        tolerance = config.tolerance or (0.01 if dtype == "float32" else 0.1)
        policy = cls(learner, servers, checkpoints, tolerance, transfer, config, kind)
        try:
            if policy.adapters:
                await policy._publish_adapters(first=True)
            else:
                await policy._publish_weights(policy.source(first))
        except BaseException:
            await servers.close()
            raise
        return policy

    async def kv_cache_usage(self) -> float | None:
        """See `Policy.kv_cache_usage`."""
        return await self.servers.kv_cache_usage()

    # -- learning --------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(in_flight=True, separate=True, starts_at_base=capabilities_of(self.learner).starts_at_base)

    async def train_apart(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> Metrics:
        """See `SeparatePolicy.train_apart`. Raises as the learner does."""
        self.generation += 1
        return await self.learner.train(samples, options)

    async def publish_update(self, *, in_flight: bool = False) -> Metrics:
        """See `SeparatePolicy.publish_update`."""
        await self.check_idle(in_flight)
        metrics = await self.publish()
        return {"server_difference": self.differences[-1], **metrics}

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """See `Policy.load`. Raises as `train` does."""
        await self.check_idle(in_flight)
        self.generation += 1
        await self.learner.load(directory, above=above)
        await self.publish()

    async def publish(self) -> Metrics:
        """Give the servers the learner's weights, and check that they agree; returns metrics. Raises PolicyError if no
        server accepts them, or one then disagrees with the learner."""
        if self.adapters:
            return await self._publish_adapters()
        weights = self.source()
        if self.transfer == DISK:
            await weights.directory()
        await self._publish_weights(weights)
        return {}

    async def _publish_adapters(self, *, first: bool = False) -> Metrics:
        """Each adapter that has changed is written as the peft library writes it, and the servers load it as a new
        version. `first`: they have none, and the model below is compared, too."""
        started, size = time.monotonic(), 0
        versions = {name: self._local.version_of(name) for name in self.adapters}
        known = {name: each.version for name, each in self.servers.adapters.items()}
        changed = [name for name, version in versions.items() if known.get(name) != version]
        for name in changed:
            # Agents' names may hold any character; a number cannot collide or leave the folder.
            folder = self.checkpoints.path.absolute() / f"adapter-{self.adapters.index(name)}"
            if name not in known:  # What a run that was killed has left.
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            directory = folder / f"version-{versions[name]:06d}"
            await self._local.save_adapter(name, directory)
            size += await asyncio.to_thread(_size_of, directory)
            await self.servers.load_adapter(name, directory, versions[name], can_fail=not first)
        seconds = time.monotonic() - started
        self.differences.append(0.0)
        for name in [None, *changed] if first else changed:
            own = await self._local.sample_adapter(name, self._probe, GREEDY)
            await self._compare(own, name, OTHER_MODEL if name is None else OTHER_ADAPTER)
        return {"adapters_published": len(changed), "publish_bytes": size, "publish_seconds": seconds}

    async def _publish_weights(self, weights: WeightSource) -> None:
        await self.servers.set_weights(weights, self.learner.policy_version)
        self.differences.append(0.0)
        await self._compare(await self.learner.sample(self._probe, GREEDY))
        if not all(replica.up for replica in self.servers.replicas):
            await weights.directory()  # For the replicas that recover: the next step changes the weights.
        if isinstance(weights.place, Path):
            await self.checkpoints.prune(weights.place)

    def source(self, path: Path | None = None) -> WeightSource:
        """The learner's current weights, for servers. `path`: where they are on disk already."""
        lend = None if self.transfer == DISK else cast(WeightOwner, self.learner).lend
        return WeightSource(path or partial(self.write, self.generation), lend)

    async def write(self, generation: int) -> Path:
        """The weights of this generation on disk. Raises PolicyError if they have changed since."""
        directory = await self.checkpoints.write(self.learner) if generation == self.generation else None
        if directory is None or generation != self.generation:
            if directory is not None:  # It may hold newer weights under this name.
                await self.checkpoints.remove(directory)
            raise PolicyError("the weights have changed since; the server gets those of the next update")
        return directory

    async def check_idle(self, in_flight: bool) -> None:
        """See `SeparatePolicy.check_idle`."""
        if not in_flight and self.servers.in_flight:
            raise PolicyError(
                f"{self.servers.in_flight} answers are in flight; wait for them before the weights change, or let them "
                "continue with in_flight=True"
            )

    async def _compare(self, own: Sample, adapter: str | None = None, hint: str = "") -> None:
        """Compare an answer of the learner with those of each server. Raises PolicyError for one that disagrees."""
        up = self.servers.up
        sampling = (self.servers.sample_from(each, self._probe, GREEDY, adapter) for each in up)
        differences = [_difference(own, sample) for sample in await asyncio.gather(*sampling)]
        self.differences[-1] = max([self.differences[-1], *differences])
        for replica, difference in zip(up, differences, strict=True):
            if difference > self.tolerance:
                raise PolicyError(
                    f"{replica.url} gives log-probabilities that differ by {difference:.4f} from the trainer's "
                    f"(tolerance {self.tolerance:g}); {hint}give the server the same dtype and no quantization, or "
                    "set a larger tolerance"
                )

    @property
    def _local(self) -> LocalPolicy:
        """The learner of adapters."""
        return cast("LocalPolicy", self.learner)

    async def close(self) -> None:
        """Close the servers and the learner."""
        try:
            await self.servers.unload_adapters()
            await self.servers.close()
        finally:
            await self.learner.close()


def _transfer(learner: Policy, config: ServersConfig, kind: str) -> tuple[str, str]:
    """How weights travel, and the device they travel from. Raises ConfigError if the configured way is impossible."""
    lends = capabilities_of(learner).lends_weights
    if config.transfer == DISK or (config.transfer == AUTO and not (kind == "vllm" and lends)):
        return DISK, "cpu"
    if kind != "vllm":
        raise ConfigError(
            f'transfer="{config.transfer}" is for vLLM servers; {kind} servers read weights from the disk'
        )
    if not lends:
        raise ConfigError(f'{type(learner).__name__} does not lend its weights; use transfer="disk"')
    device = cast(WeightOwner, learner).device
    return select_transport(config.transfer, device, () if config.urls else config.devices), device


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


def _size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def _own_folder(shared: Path, folder: Path) -> Path:
    """A folder below a directory that several runs may share; the same when the run is resumed."""
    place = str(folder.absolute())
    return shared / f"{folder.absolute().parent.name}-{crc32(place.encode()):08x}"
