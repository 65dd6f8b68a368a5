"""The weights that all replicas of a pool are to have, and the labels under which servers report them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

from agentlightning.engine.servers.base import ModelServerError
from agentlightning.engine.servers.replica import LabeledWeights, Replica, WeightChannel, WeightSource
from agentlightning.errors import PolicyError


class PoolWeights:
    """The current version of a pool's weights."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.target: LabeledWeights | None = None
        """What every replica is to have; None: what it was started with."""
        self.version = 0
        """The version that all healthy replicas have."""
        self.labels = {replica.label: 0 for replica in replicas if replica.label is not None}
        """Label -> version, of the weights that may sample."""
        self.lock = asyncio.Lock()
        """Held while weights or adapters change."""
        self._label_prefix = secrets.token_hex(4)
        self._updates = 0

    def set_target(self, source: WeightSource, version: int) -> None:
        # A new label for each update: an earlier version that is restored must not share one with what followed it.
        self._updates += 1
        self.target = LabeledWeights(source, version, f"{self._label_prefix}-{self._updates}")
        # From now on, weights that we did not set are those of a restarted server.
        self.labels = {label: known for label, known in self.labels.items() if label.startswith(self._label_prefix)}
        self.labels[self.target.label] = version

    async def load(self, replica: Replica, channel: WeightChannel | None = None) -> None:
        """Give `replica` the target weights, through `channel` or from the disk. Raises PolicyError or ConfigError."""
        if (target := self.target) is None:
            return

        def on_loaded() -> None:
            replica.version = target.version

        if channel is not None and target.source.lend is not None:
            replica.transfer_interrupted = True
            await channel.send(target, target.source.lend, on_loaded)
        else:
            await replica.server.load_weights(await target.source.directory(), target.label, on_loaded)
        replica.transfer_interrupted = False
        replica.label = await replica.server.weight_label()
        if replica.label not in (None, target.label):
            message = f"{replica.server.url} has weights {replica.label}, not {target.label}"
            raise ModelServerError(message, retryable=True)

    async def catch_up(self, replica: Replica) -> None:
        """Give a recovered `replica` the target weights unless it has them."""
        label = await replica.server.weight_label()
        if self.target is None:
            replica.version, replica.label = 0, label
            if label is not None:
                self.labels.setdefault(label, 0)
        elif replica.version != self.target.version or label not in (None, self.target.label):
            await self.load(replica)


MAX_LABELS = 64
"""Labels that a pool remembers of weights that a trainer elsewhere has replaced: answers may still be under way."""


class _WeightsElsewhere:
    """The source of weights that only another process has."""

    lend = None

    async def directory(self) -> Path:
        raise PolicyError("these weights are given to the servers by their trainer, and are not here")


class FollowedWeights(PoolWeights):
    """Weights that a trainer in another process gives to the servers. It announces the label of new ones before any
    server has them; a replica has them once its server reports that label."""

    def announce(self, label: str, version: int) -> None:
        """Accept tokens that are sampled by weights of this label, as those of `version`."""
        self.target = LabeledWeights(_WeightsElsewhere(), version, label)
        self.labels[label] = version
        for old in list(self.labels)[:-MAX_LABELS]:
            del self.labels[old]

    async def load(self, replica: Replica, channel: WeightChannel | None = None) -> None:
        if (target := self.target) is None:
            return
        replica.label = await replica.server.weight_label()
        if replica.label != target.label:
            message = f"{replica.server.url} has weights {replica.label}, and its trainer has not given it version"
            raise ModelServerError(f"{message} {target.version} ({target.label}) yet", retryable=True)
        replica.version = target.version
