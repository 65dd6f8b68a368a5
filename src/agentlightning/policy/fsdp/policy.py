"""A policy that several processes train and this one samples from: `policy.kind = "fsdp"`.

This process is one of them, rank 0. It has the whole weights in the dtype that is sampled from, and the ranks (`group`)
divide the master copies, gradients and moments. After an update rank 0 gathers the weights that have changed, and they
take the place of the old ones between two tokens, as those of a local policy do. Sampling goes on during training.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import PolicyError
from agentlightning.models import checkpoint
from agentlightning.policy.base import (
    UPDATE,
    Capabilities,
    Columns,
    Metrics,
    ScoreColumn,
    SeparatePolicy,
    UpdateOptions,
)
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.fsdp.group import RankGroup
from agentlightning.policy.fsdp.learner import FOLDER, Weights, check_complete, modules_by_owner
from agentlightning.policy.local import RANK_STATE as STATE
from agentlightning.policy.local import LocalPolicy
from agentlightning.trajectory import TokenTree, TrainingSample


class FsdpPolicy(SeparatePolicy, LocalPolicy):
    """Make it with `FsdpPolicy.open`."""

    group: RankGroup

    def __init__(self, config: LocalPolicyConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, model, tokenizer, make_updater=None)
        self._unpublished: list[str | None] = []
        """The names of what has been trained since the weights were published."""
        self._turn = asyncio.Lock()
        """Held while the ranks compute: some of that needs the worker thread, which in `save` waits for them."""

    @classmethod
    def open(cls, config: LocalPolicyConfig) -> FsdpPolicy:
        """Load the model, then start the ranks or wait for them. Raises as `LocalPolicy.open` and `RankGroup.open`."""
        policy = cast(FsdpPolicy, super().open(config))
        try:
            policy.group = RankGroup.open(config, lambda read: asyncio.run(policy._engine.run(read)))
        except BaseException:
            asyncio.run(LocalPolicy.close(policy))
            raise
        return policy

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, separate=True)

    # -- learning --------------------------------------------------------------------------------------------------

    async def train_apart(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> Metrics:
        """See `SeparatePolicy.train_apart`. Raises RankError for a rank that ends or fails: the policy is of no
        more use then."""
        metrics, names = await self._call("train", list(samples), options)
        self._unpublished = list(dict.fromkeys([*self._unpublished, *names]))
        return metrics

    async def check_idle(self, in_flight: bool) -> None:
        """See `SeparatePolicy.check_idle`."""
        await self._engine.run(lambda: self._generator.check_idle(in_flight))

    async def publish_update(self, *, in_flight: bool = False) -> Metrics:
        """See `SeparatePolicy.publish_update`. Returns publish_bytes, of what has changed, and publish_seconds."""
        started, names = time.monotonic(), self._unpublished
        weights = await self._call("gather", names)
        await self._engine.run(lambda: self._publish(weights, names, in_flight))
        self._unpublished = []
        size = sum(each.nbytes for own in weights.values() for each in own.values())
        return {"publish_bytes": float(size), "publish_seconds": time.monotonic() - started}

    async def _scores(
        self, trees: Sequence[TokenTree], what: AbstractSet[ScoreColumn], reference: Path | None, adapter: str | None
    ) -> Columns:
        """Computed by the ranks, which read `reference` themselves."""
        return await self._call("score", list(trees), frozenset(what), reference and _absolute(reference), adapter)

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """See `Policy.load`; saved by any number of ranks. Raises as `LocalPolicy.load`, and RankError."""
        path = _absolute(Path(directory))
        await self.check_idle(in_flight)
        state = await asyncio.to_thread(_state_in, path)
        names = await self._call("load_state", path / FOLDER)
        weights = await self._call("gather", names)
        await self._engine.run(lambda: self._resume(state, in_flight, above, lambda: self._copy(weights)))
        self._unpublished = []

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        async with self._turn:
            await super().save(directory, training_state=training_state)

    async def close(self) -> None:
        await asyncio.to_thread(self.group.close)
        await super().close()

    async def _call(self, name: str, *arguments: Any) -> Any:
        async with self._turn:
            return await asyncio.to_thread(self.group.call, name, *arguments)

    # -- in the worker thread --------------------------------------------------------------------------------------

    def _publish(self, weights: Weights, names: Sequence[str | None], in_flight: bool) -> None:
        self._prepare_weight_change(in_flight, names)
        self._copy(weights)
        self._set_version(self._version + 1, names)

    def _copy(self, weights: Weights) -> None:
        """Sample from new weights."""
        modules = modules_by_owner(self._learner)
        for owner, own in weights.items():
            modules[owner].load_state_dict(own, strict=False)

    def _save(self, directory: Path, training_state: bool) -> None:
        if self._unpublished:
            raise PolicyError("an update has been trained and not published; call publish_update before save")
        if not training_state:
            self._learner.save(directory, None)
            return
        state = self._own_state()

        def save_ranks(beside: Path) -> None:
            state[STATE] = self.group.call("save_state", beside / FOLDER)
            check_complete(beside / FOLDER)

        self._learner.save(directory.absolute(), state, save_ranks)


def _state_in(directory: Path) -> dict[str, Any]:
    """The training state in a checkpoint. Raises PolicyError for that of a local policy."""
    state = checkpoint.load_state(directory)
    if STATE not in state:
        raise PolicyError(
            f'{directory} was saved by policy.kind = "local"; continue with that, or start a new run from its weights'
            " with policy.model"
        )
    return state


def _absolute(path: Path) -> Path:
    """What ranks with another working directory can read."""
    return path.absolute()
