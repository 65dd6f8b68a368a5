"""Many adapters over one model in memory, each trained a gradient at a time and sampled as fixed copies.

`AdapterHost` is what a training API of small steps needs of a model: accumulate a gradient, take an optimiser step,
keep the weights as they are now and sample from those, save and load. All torch work runs in one thread
(`engine.local.worker`); answers of all copies are sampled in one batch, and the model's own weights never change.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from secrets import randbits
from typing import Any, Final, ParamSpec, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models import SHARED, checkpoint
from agentlightning.models.lora import Adapter, find_layers, read_weights, write_adapter
from agentlightning.models.resolve import shared_name
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.losses import TokenBatch, TokenLoss
from agentlightning.policy.update.forward import Forward
from agentlightning.policy.update.updater import tokens_of
from agentlightning.trajectory import FloatArray
from agentlightning_tinker.server.wire import ABOUT, AdamParams, Datum, LoraShape, Saved

ALPHA: Final = 32.0
"""The numerator of the scale of every adapter."""
OPTIMIZER: Final = "optimizer.pt"
T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """An adapter that learns."""

    adapter: Adapter
    optimizer: torch.optim.AdamW
    shape: LoraShape


class AdapterHost(LocalPolicy):
    """One model and the adapters over it. Make it with `AdapterHost.open`. What trains, reads or writes an
    adapter, and is no coroutine, is for the thread of the model: `run` calls it there."""

    max_copies = 8
    """So many fixed copies are in memory; the others are read again when they are sampled."""
    token_budget = 8192
    """Tokens of one forward pass of `gradient`, padding included."""

    def __init__(self, config: LocalPolicyConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        if config.adapters:
            raise ConfigError(f"a directory of adapters is not served; name the model below them, {config.model}")
        super().__init__(config, model, tokenizer, make_updater=None)
        self.trained: dict[str, TrainedAdapter] = {}
        """The adapters that learn, by name."""
        self._adapters, self._forward = self._learner.adapters, Forward(model)
        self._copies: OrderedDict[str, int] = OrderedDict()
        """The copies in memory, the one used last at the end, with their running answers."""
        self._loading = asyncio.Lock()

    async def run(self, method: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call a method in the thread of the model. Raises PolicyError in place of foreign exceptions."""
        return await self._engine.run(partial(method, *args, **options))

    # -- learning --------------------------------------------------------------------------------------------------

    def create(self, name: str, shape: LoraShape) -> None:
        """A new adapter, which changes nothing yet. Raises ConfigError for a shape that the model cannot have."""
        adapter = self._add(name, shape)
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.0, foreach=True)
        self.trained[name] = TrainedAdapter(adapter, optimizer, shape)

    def _add(self, name: str, shape: LoraShape) -> Adapter:
        targets = _layers(self._model, shape)
        seed = randbits(31) if shape.seed is None else shape.seed
        seed += crc32(SHARED.encode()) - crc32(name.encode())  # As the policy of a run begins.
        return self._adapters.add(name, r=shape.rank, alpha=ALPHA, targets=targets, seed=seed, head=shape.train_unembed)

    def remove(self, prefix: str) -> None:
        """Forget the adapters that learn and whose names begin so; saved weights stay."""
        for name in [each for each in self.trained if each.startswith(prefix)]:
            del self.trained[name]
            self._adapters.remove(name)

    def gradient(
        self, name: str, data: Sequence[Datum], loss: TokenLoss, *, backward: bool = True
    ) -> tuple[float, list[torch.Tensor]]:
        """Add the gradient of a loss, summed over all tokens, to that of an adapter; without `backward`, compute the
        loss alone. Returns the loss, and log p of the targets of each datum. A gradient that fails, or is of a loss
        that is not finite (PolicyError), is dropped, and so is what was accumulated before it."""
        total = 0.0
        found: dict[int, torch.Tensor] = {}
        self._model.eval()
        try:
            with self._adapters.use(name), torch.set_grad_enabled(backward):
                for numbers in _batches([len(each.inputs) for each in data], self.token_budget):
                    part = [data[number] for number in numbers]
                    logprobs_N = self._forward.of_targets([d.inputs for d in part], [d.targets for d in part])
                    value = loss(tokens_of(_token_batch(part, logprobs_N), loss)).loss
                    if backward:
                        value.backward()
                    total += float(value.detach())
                    rows = logprobs_N.detach().float().cpu().split([len(each.inputs) for each in part])
                    found |= dict(zip(numbers, rows, strict=True))
            if backward and not math.isfinite(total):
                raise PolicyError(
                    f"the loss of {len(data)} sequences is {total}: an input or a log-probability among them is not"
                    " finite; the gradient accumulated so far was dropped"
                )
        except Exception:
            if backward:
                self.trained[name].optimizer.zero_grad()
            raise
        return total, [found[number] for number in range(len(data))]

    def optim_step(self, name: str, settings: AdamParams) -> dict[str, float]:
        """Update an adapter by its accumulated gradient, and drop that. Returns the norm of the gradient. Raises
        PolicyError, and changes nothing, where it is not finite or there is none."""
        adapter, optimizer = self.trained[name].adapter, self.trained[name].optimizer
        gradients = [each.grad for each in adapter.parameters() if each.grad is not None]
        if not gradients:
            raise PolicyError("there is no gradient to step by; call forward_backward before optim_step")
        norm = nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            optimizer.zero_grad()
            raise PolicyError(f"the norm of the gradient is {float(norm)}: it was dropped, and no weight has changed")
        if settings.grad_clip_norm > 0:
            nn.utils.clip_grads_with_norm_(adapter.parameters(), settings.grad_clip_norm, norm)
        optimizer.param_groups[0] |= {
            "lr": settings.learning_rate,
            "betas": (settings.beta1, settings.beta2),
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
        }
        optimizer.step()
        optimizer.zero_grad()
        return {"grad_norm:mean": float(norm)}

    def save_trained(self, name: str, directory: Path, *, with_optimizer: bool = False) -> None:
        """Write an adapter as the peft library does, what it fits, and the state of its optimiser beside it. The
        directory is complete, or as it was. Raises PolicyError."""
        own = self.trained[name]
        about = Saved(directory=directory, base=self.config.name, shape=own.shape, saved=time.time())
        checkpoint.save(
            directory,
            None,
            lambda new: write_adapter(new, own.adapter, shared_name(self.config.model)),
            lambda new: torch.save(own.optimizer.state_dict(), new / OPTIMIZER) if with_optimizer else None,
            lambda new: (new / ABOUT).write_text(about.model_dump_json()),
        )

    def load_trained(self, name: str, directory: Path, *, with_optimizer: bool = False) -> None:
        """Put saved weights in place. Raises PolicyError for those of another shape, before anything changes."""
        own = self.trained[name]
        weights = read_weights(directory, own.adapter)
        state: Any = None
        if with_optimizer:
            try:
                state = torch.load(directory / OPTIMIZER, map_location="cpu", weights_only=True)
            except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
                raise PolicyError(
                    f"{directory} holds no state of an optimiser: {error}; load it without, or choose one that"
                    " save_state wrote"
                ) from error
        own.adapter.load_state_dict(weights)
        if state is not None:
            own.optimizer.load_state_dict(state)
        own.optimizer.zero_grad()

    # -- sampling --------------------------------------------------------------------------------------------------

    def validate(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises as `Engine.sample` for a request that cannot be served. For any thread."""
        self._generator.validate(prompt, params)

    async def sample_copy(self, copy: Saved | None, prompt: Sequence[int], params: SamplingParams) -> Sample:
        """Sample one answer from the model below the adapters, or from a copy. Raises as `Engine.sample`, and
        PolicyError for a copy that is gone."""
        async with self._held(copy) as name:
            return await self.sample_adapter(name, prompt, params)

    async def score_copy(self, copy: Saved | None, tokens: Sequence[int]) -> FloatArray:
        """log p of each token but the first, at temperature 1 [T - 1]."""

        def compute() -> FloatArray:
            self._model.eval()
            with torch.no_grad(), self._adapters.use(name):
                return self._forward.of_targets([tokens[:-1]], [tokens[1:]]).float().cpu().numpy()

        async with self._held(copy) as name:
            return await self._engine.run(compute)

    @asynccontextmanager
    async def _held(self, copy: Saved | None) -> AsyncGenerator[str | None]:
        """The name of a copy, which is in memory meanwhile."""
        if copy is None:
            yield None
            return
        async with self._loading:
            if copy.name not in self._copies:
                idle = [each for each, running in self._copies.items() if not running]
                await self.run(self._read_copy, copy, idle[: max(0, len(self._copies) + 1 - self.max_copies)])
                self._copies[copy.name] = 0
            self._copies.move_to_end(copy.name)
            self._copies[copy.name] += 1
        try:
            yield copy.name
        finally:
            self._copies[copy.name] -= 1

    def _read_copy(self, copy: Saved, unused: Sequence[str]) -> None:
        """Read a copy from the disk, in place of those that are not used."""
        for name in unused:
            del self._copies[name]
            self._adapters.remove(name)
        self._generator.prefix_cache.clear(unused)
        adapter = self._add(copy.name, copy.shape)
        try:
            adapter.load_state_dict(read_weights(copy.directory, adapter))
        except BaseException:
            self._adapters.remove(copy.name)
            raise


def _layers(model: PreTrainedModel, shape: LoraShape) -> list[str] | None:
    """The names of the layers beside the head; None: all of them."""
    if shape.train_attn and shape.train_mlp:
        return None
    layers = find_layers(model)
    attention = {name for name in layers if "attn" in name or "attention" in name}
    return [name for name in layers if (shape.train_attn if name in attention else shape.train_mlp)]


def _batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Numbers of rows, those of similar length together, each at most `budget` tokens with padding; a longer row goes
    alone."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and lengths[number] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def _token_batch(data: Sequence[Datum], logprobs_N: torch.Tensor) -> TokenBatch:
    """All tokens of a few rows, each of which is a call of its own."""
    columns = {name: np.concatenate([each.columns[name] for each in data]) for name in data[0].columns}
    numbers_N = torch.arange(len(data)).repeat_interleave(torch.tensor([len(each.inputs) for each in data]))
    call = numbers_N.to(logprobs_N.device)
    tensors = {name: torch.from_numpy(values_N).to(logprobs_N.device) for name, values_N in columns.items()}
    return TokenBatch(logprobs_N, tensors, call=call, rollout=call)
