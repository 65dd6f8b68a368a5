"""A policy that several processes train and this one samples from: `policy.kind = "fsdp"`.

This process has the whole weights in the dtype that is sampled from, and the ranks (`group`) divide the master copies,
gradients and moments. After an update rank 0 sends the weights that have changed, and they take the place of the old
ones between two tokens, as those of a local policy do. Sampling goes on while the ranks train.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import PolicyError
from agentlightning.models import checkpoint
from agentlightning.policy.base import UPDATE, Capabilities, Columns, ScoreColumn, UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.fsdp.group import RankGroup, model_digest
from agentlightning.policy.fsdp.learner import FOLDER, GATHER, Part, check_complete, modules_by_owner
from agentlightning.policy.local import RANK_STATE as STATE
from agentlightning.policy.local import LocalPolicy
from agentlightning.trajectory import TokenTree, TrainingSample


@dataclass(frozen=True, slots=True)
class RankState:
    """Saves the training state of the ranks beside a model, and their counters in `state`."""

    call: Callable[..., Any]
    state: dict[str, Any]

    def save_pretrained(self, directory: Path, /) -> None:
        self.state[STATE] = self.call("save_state", directory / FOLDER)
        check_complete(directory / FOLDER)


class FsdpPolicy(LocalPolicy):
    """Make it with `FsdpPolicy.open`."""

    group: RankGroup

    def __init__(self, config: LocalPolicyConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, model, tokenizer, make_updater=None)
        self._unpublished: list[str | None] = []
        """The names of what has been trained since the weights were published."""

    @classmethod
    def open(cls, config: LocalPolicyConfig) -> FsdpPolicy:
        """Start the ranks or wait for them, and load the model, as they do. Raises as `LocalPolicy.open` and
        `RankGroup.open`."""
        with ExitStack() as stack:
            group = RankGroup.open(config)
            stack.callback(group.close)
            policy = cast(FsdpPolicy, super().open(config))
            stack.callback(lambda: asyncio.run(LocalPolicy.close(policy)))
            group.check(model_digest(config.model), config.model)
            stack.pop_all()
        policy.group = group
        return policy

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, separate=True)

    # -- learning --------------------------------------------------------------------------------------------------

    async def train(
        self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE, *, in_flight: bool = False
    ) -> Mapping[str, float]:
        """See `Policy.train`. Raises RankError for a rank that ends or fails: the policy is then of no more use."""
        await self._engine.run(lambda: self._require_idle(in_flight))
        metrics = await self.train_apart(samples, options)
        return {**metrics, **await self.publish_update(in_flight=in_flight)}

    async def train_apart(
        self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE
    ) -> Mapping[str, float]:
        """See `SeparatePolicy.train_apart`. Raises as `train`."""
        metrics, names = await self._call("train", list(samples), options)
        self._unpublished = list(dict.fromkeys([*self._unpublished, *names]))
        return metrics

    async def publish_update(self, *, in_flight: bool = False) -> Mapping[str, float]:
        """See `SeparatePolicy.publish_update`. Returns publish_bytes, what rank 0 has sent, and publish_seconds."""
        started, names = time.monotonic(), self._unpublished
        parts = await self._gather(names)
        await self._engine.run(lambda: self._publish(parts, names, in_flight))
        self._unpublished = []
        size = sum(values.nbytes for _, _, values in parts)
        return {"publish_bytes": float(size), "publish_seconds": time.monotonic() - started}

    async def score(
        self,
        trees: Sequence[TokenTree],
        what: AbstractSet[ScoreColumn],
        *,
        reference: Path | None = None,
        adapter: str | None = None,
    ) -> Columns:
        """See `Policy.score`; computed by the ranks, which read `reference` themselves."""
        self._check_scores(what, reference)
        return await self._call("score", list(trees), frozenset(what), reference and _absolute(reference), adapter)

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """See `Policy.load`; saved by any number of ranks. Raises as `LocalPolicy.load`, and RankError."""
        path = _absolute(Path(directory))
        state = await self._engine.run(lambda: self._state_in(path, in_flight))
        names = await self._call("load_state", path / FOLDER, state[STATE])
        parts = await self._gather(names)
        await self._engine.run(lambda: self._resume(state, in_flight, above, lambda: self._copy(parts)))
        self._unpublished = []

    async def close(self) -> None:
        await asyncio.to_thread(self.group.close)
        await super().close()

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(self.group.call, name, *arguments)

    async def _gather(self, names: Sequence[str | None]) -> list[Part]:
        """The weights of these names, from rank 0."""
        parts: list[Part] = []
        await asyncio.to_thread(self.group.call, GATHER, list(names), on_part=lambda *part: parts.append(part))
        return parts

    # -- in the worker thread --------------------------------------------------------------------------------------

    def _require_idle(self, in_flight: bool) -> None:
        if not in_flight and not self._generator.idle:
            raise PolicyError(
                "answers are in flight; wait for them before the weights change, or let them continue with"
                " in_flight=True"
            )

    def _publish(self, parts: Sequence[Part], names: Sequence[str | None], in_flight: bool) -> None:
        self._prepare_weight_change(in_flight, names)
        self._copy(parts)
        self._set_version(self._version + 1, names)

    @torch.no_grad()
    def _copy(self, parts: Sequence[Part]) -> None:
        """Sample from new weights."""
        modules = modules_by_owner(self._learner)
        parameters = {owner: dict(module.named_parameters()) for owner, module in modules.items()}
        for owner, name, values in parts:
            parameter = parameters[owner][name]
            parameter.copy_(torch.from_numpy(values).view(parameter.dtype).view(parameter.shape))

    def _save(self, directory: Path, training_state: bool) -> None:
        if self._unpublished:
            raise PolicyError("an update has been trained and not published; call publish_update before save")
        if not training_state:
            self._learner.save(directory, None)
            return
        state = self._own_state()
        self._learner.save(directory.absolute(), state, RankState(self.group.call, state))

    def _state_in(self, directory: Path, in_flight: bool) -> dict[str, Any]:
        """The training state in a checkpoint. Raises PolicyError for that of a local policy."""
        self._require_idle(in_flight)
        state = checkpoint.load_state(directory)
        if STATE not in state:
            raise PolicyError(
                f'{directory} was saved by policy.kind = "local"; continue with that, or start a new run from its'
                " weights with policy.model"
            )
        return state


def _absolute(path: Path) -> Path:
    """What ranks with another working directory can read."""
    return path.absolute()
