"""A policy that learns here and is sampled from elsewhere: a local policy, and servers with the same weights.

`ServedPolicy` fulfils `policy.base.Policy`. The local policy trains, saves and loads; after each change of its
weights they are written to a directory and the servers read them in place, or they are sent without the disk
(`policy.transfer`); a few tokens are drawn by both to see that they agree. Only then does the update count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final, Literal
from zlib import crc32

from agentlightning.chat.base import ChatFormat
from agentlightning.engine.base import ConstraintKind, Sample, SamplingParams
from agentlightning.engine.servers.config import ServersConfig, open_servers
from agentlightning.engine.servers.pool import Replicas
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy.base import Columns, Policy, ScoreColumn
from agentlightning.trajectory import TokenTree, TrainingSample
from agentlightning.weight_sync.base import Lend, Lender
from agentlightning.weight_sync.disk import WeightsFolder
from agentlightning.weight_sync.select import AUTO, DISK, choose

GREEDY: Final = SamplingParams(temperature=0.0, max_tokens=4)
PROBE: Final = ({"role": "user", "content": "What is 2 + 3?"},)
NEAR: Final = {"float32": 0.01}
"""How far log-probabilities may be apart, by dtype."""


class Held:
    """The weights that the learner of `policy` has now, as a `Source` for servers. `path`: where they have been written
    already."""

    def __init__(self, policy: ServedPolicy, path: Path | None = None) -> None:
        self.path = path
        self._policy = policy
        self._changes = policy.changes
        self._writing = asyncio.Lock()

    @property
    def lend(self) -> Lend | None:
        learner = self._policy.learner
        return learner.lend if self._policy.transfer != DISK and isinstance(learner, Lender) else None

    async def directory(self) -> Path:
        async with self._writing:
            if self.path is None:
                self.path = await self._policy.write(self._changes)
            return self.path


class ServedPolicy:
    """Trains `learner`, samples from `servers`. Make it with `ServedPolicy.open`; it owns both."""

    def __init__(
        self, learner: Policy, servers: Replicas, weights: WeightsFolder, tolerance: float, transfer: str = DISK
    ) -> None:
        self.learner = learner
        self.servers = servers
        self.model = servers.model
        self.context_length = min(servers.context_length, learner.context_length)
        self.vocab_size = learner.vocab_size
        self.differences: list[float] = []
        """For each update, how far the servers' log-probabilities of the probed tokens were from the learner's."""
        self.transfer = transfer
        """How the weights travel: `disk`, or the name of a courier."""
        self._weights = weights
        self._changes = 0
        """How often the learner's weights were changed, or may have been."""
        self._tolerance = tolerance
        self._probe = tuple(learner.chat.encode(learner.chat.render(list(PROBE))))

    @classmethod
    async def open(
        cls,
        learner: Policy,
        config: ServersConfig,
        folder: Path,
        *,
        kind: Literal["vllm", "sglang"] = "vllm",
        dtype: str = "auto",
    ) -> ServedPolicy:
        """Start or join the servers of `config`, and give them the learner's weights. `folder` is where their logs
        go, and the weights unless `config.weights` says otherwise. Raises as `open_servers` and `push` do."""
        weights = WeightsFolder(_own_folder(Path(config.weights), folder) if config.weights else folder / "weights")
        transfer, device = _transfer(learner, config, kind)
        first = await weights.write(learner)
        servers = await open_servers(
            config,
            learner.chat,
            kind=kind,
            model=first,
            name=learner.model,
            dtype=dtype,
            max_context=learner.context_length,
            weights_change=True,
            logs=folder,
            transfer=transfer,
            device=device,
        )
        policy = cls(learner, servers, weights, config.tolerance or NEAR.get(dtype, 0.1), transfer)
        try:
            await policy._give(Held(policy, first))
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
        return self.servers.policy_version

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
        *,
        affinity: str = "",
    ) -> Sample:
        """See `Engine.sample`; drawn by a server. Raises as `Replicas.sample` does."""
        return await self.servers.sample(prompt_token_ids, params, on_tokens, affinity=affinity)

    # -- learning --------------------------------------------------------------------------------------------------

    @property
    def can_update_in_flight(self) -> bool:
        return True

    async def train(
        self, samples: Sequence[TrainingSample], *, in_flight: bool = False, **options: Any
    ) -> Mapping[str, float]:
        """See `Policy.train`. Raises as the learner does, and PolicyError where the servers do not take the weights."""
        self._nobody(in_flight)
        self._changes += 1
        metrics = await self.learner.train(samples, **options)
        await self.publish()
        return {**metrics, "server_difference": self.differences[-1]}

    async def score(
        self, trees: Sequence[TokenTree], what: AbstractSet[ScoreColumn], *, reference: Path | None = None
    ) -> Columns:
        """See `Policy.score`; computed by the learner."""
        return await self.learner.score(trees, what, reference=reference)

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        await self.learner.save(directory, training_state=training_state)

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """See `Policy.load`. Raises as `train` does."""
        self._nobody(in_flight)
        self._changes += 1
        await self.learner.load(directory, above=above)
        await self.publish()

    async def publish(self) -> None:
        """Give the servers the learner's weights, and see that they agree. Raises PolicyError where no server takes
        them, or one then answers otherwise than the learner."""
        held = Held(self)
        if self.transfer == DISK:
            await held.directory()
        await self._give(held)

    async def _give(self, held: Held) -> None:
        await self.servers.push(held, self.learner.policy_version)
        await self._verify()
        if not all(replica.up for replica in self.servers.replicas):
            await held.directory()  # As long as they can be had: the next step changes them.
        if held.path is not None:
            await self._weights.prune(held.path)

    async def write(self, changes: int) -> Path:
        """The weights on disk, as they were after so many changes. Raises PolicyError where they have changed since."""
        directory = await self._weights.write(self.learner) if changes == self._changes else None
        if directory is None or changes != self._changes:
            if directory is not None:  # Its name may be that of others.
                await self._weights.remove(directory)
            raise PolicyError("the weights have changed since; the server gets those of the next update")
        return directory

    @property
    def changes(self) -> int:
        return self._changes

    def _nobody(self, in_flight: bool) -> None:
        if not in_flight and self.servers.busy:
            raise PolicyError(
                f"{self.servers.busy} answers are under way; wait for them before the weights change, or let them go "
                "on with in_flight=True"
            )

    async def _verify(self) -> None:
        own = await self.learner.sample(self._probe, GREEDY)
        up = [replica for replica in self.servers.replicas if replica.up]
        found = await asyncio.gather(*(self.servers.sample_from(replica, self._probe, GREEDY) for replica in up))
        differences = [_difference(own, sample) for sample in found]
        self.differences.append(max(differences, default=0.0))
        for replica, difference in zip(up, differences, strict=True):
            if difference > self._tolerance:
                raise PolicyError(
                    f"{replica.backend.url} gives log-probabilities that differ by {difference:.4f} from the trainer's "
                    f"(tolerance {self._tolerance:g}); give the server the same dtype and no quantization, or set a "
                    "larger tolerance"
                )

    async def close(self) -> None:
        """End the servers we started, and the learner."""
        try:
            await self.servers.close()
        finally:
            await self.learner.close()


def _transfer(learner: Policy, config: ServersConfig, kind: str) -> tuple[str, str]:
    """How weights travel, and the device they travel from. Raises ConfigError where they cannot as configured."""
    if config.transfer == DISK or (config.transfer == AUTO and (kind != "vllm" or not isinstance(learner, Lender))):
        return DISK, "cpu"
    if kind != "vllm":
        raise ConfigError(
            f'transfer="{config.transfer}" is for vLLM servers; {kind} servers read weights from the disk'
        )
    if not isinstance(learner, Lender):
        raise ConfigError(f'{type(learner).__name__} does not lend its weights; use transfer="disk"')
    return choose(config.transfer, learner.device, () if config.urls else config.devices), learner.device


def _difference(own: Sample, other: Sample) -> float:
    """The largest between log-probabilities, up to the first token that differs: of two that are as likely the one
    may draw this and the other that."""
    largest = 0.0
    pairs = zip(own.token_ids, own.logprobs, other.token_ids, other.logprobs, strict=False)
    for token, logprob, other_token, other_logprob in pairs:
        largest = max(largest, abs(logprob - other_logprob))
        if token != other_token:
            break
    return largest


def _own_folder(shared: Path, folder: Path) -> Path:
    """Below a directory that several runs may share; the same again when the run is resumed."""
    place = str(folder.absolute())
    return shared / f"{folder.absolute().parent.name}-{crc32(place.encode()):08x}"
