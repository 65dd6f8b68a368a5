"""One update of a policy: training samples in, an optimiser step done.

Works with any `transformers` causal language model through its own forward and `DynamicCache`, on any device. Only
the hidden states at trained positions reach the output head (`policy.positions`), a chunk at a time
(`policy.scoring`), so that no [B, T, V] logits exist and no [N, V] ones of a large vocabulary.
The model stays in evaluation mode: the probabilities that are trained are those that were sampled from.

Shapes: B rows, T tokens of a row, N trained tokens of a micro-batch, V vocabulary, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from agentlightning.errors import ConfigError, PolicyError, UnfaithfulSampleError
from agentlightning.policy.head_positions import last_block, only_positions
from agentlightning.policy.losses.base import PPOLoss, TokenBatch, TokenLoss, token_loss
from agentlightning.policy.optimizer import Optimizer
from agentlightning.policy.optimizer_config import OptimizerConfig
from agentlightning.policy.packing import CostModel, MicroBatch, Sharing, plan, predictions
from agentlightning.policy.scoring import OutputHead, score, score_logits
from agentlightning.trajectory import TrainingSample

LAUNCH_CPU = 1.5e7
LAUNCH_ACCELERATOR = 1e10
"""What launching the kernels of one layer costs, in multiply-adds the device could have done."""
COPY = 16.0
"""Multiply-adds that take as long as handing one number of a cache to a row, forward and backward."""


class Updater:
    """Trains one model in place. Not thread safe: nothing may use the weights during a step."""

    def __init__(self, model: PreTrainedModel, optimizer: OptimizerConfig | None = None) -> None:
        self.model = model
        self.optimizer = Optimizer(model, optimizer or OptimizerConfig())
        self.cost = cost_model(model)
        self.last_block = last_block(model)
        """What is computed at trained positions only; None turns that off."""
        self.head = OutputHead(model)

    def step(
        self,
        samples: Sequence[TrainingSample],
        *,
        loss: str | Mapping[str, Any] | TokenLoss = "ppo",
        token_budget: int = 8192,
        sharing: Sharing = "auto",
        minibatches: int = 1,
    ) -> dict[str, float]:
        """Train on all samples once.

        `token_budget` bounds the tokens of one forward pass, padding included. `minibatches` cuts the batch by samples
        into that many optimiser steps, whose weights are scaled to sum to 1 again. Returns means over trained tokens
        (loss, ratio, clip_fraction, approx_kl, entropy), grad_norm and lr (means over steps), and counts:
        tokens_trained, tokens_computed (padding included), micro_batches, optimizer_steps and skipped_steps (a loss or
        gradient that was not finite).

        Raises UnfaithfulSampleError for samples the loss cannot correct for, ConfigError for impossible settings.
        """
        if minibatches < 1 or token_budget < 1:
            raise ConfigError(f"minibatches={minibatches} and token_budget={token_budget} must be at least 1")
        loss = token_loss(loss)
        if loss.needs_sampled_logprobs:
            refuse_unfaithful(samples)
        totals = dict.fromkeys(COUNTS, 0.0)
        for part in _cut(samples, minibatches):
            batches = self.plan(part, token_budget=token_budget, sharing=sharing, uses_advantages=loss.uses_advantages)
            if batches:
                sums = self.accumulate(batches, loss)
                _add(totals, sums)
                _add(totals, self.optimizer.step(sums["loss"]))
        return _means(totals)

    def plan(
        self,
        samples: Sequence[TrainingSample],
        *,
        token_budget: int = 8192,
        sharing: Sharing = "auto",
        uses_advantages: bool = True,
    ) -> list[MicroBatch]:
        """What `step` would compute. Raises ConfigError where sharing="shared" and the model's cache forbids it."""
        if sharing in ("auto", "shared") and not can_share(self.model):
            if sharing == "shared":
                raise ConfigError(
                    f'sharing="shared" needs a plain key-value cache, which {type(self.model).__name__} does not use '
                    'here; use sharing="merged" or "auto"'
                )
            sharing = "merged"
        return plan(
            samples, token_budget=token_budget, cost=self.cost, sharing=sharing, uses_advantages=uses_advantages
        )

    def accumulate(self, batches: Sequence[MicroBatch], loss: TokenLoss | None = None) -> dict[str, float]:
        """Add the gradient of `batches` to that of `optimizer.masters`; returns sums over tokens, and counts."""
        loss = loss or PPOLoss()
        self.model.train(_checkpoints_activations(self.model))
        totals: dict[str, float] = {}
        for batch in batches:
            rows = batch.rows
            logprobs_N, entropy = self._logprobs(batch, at_temperature=loss.needs_sampled_logprobs)
            tokens = TokenBatch(
                logprobs=logprobs_N,
                sampled_logprobs=self._floats(row.logprobs for row in rows),
                advantages=self._floats(row.advantages for row in rows),
                weights=self._floats(row.weights for row in rows),
            )
            value = loss(tokens)
            value.loss.backward()
            _add(totals, {"loss": float(value.loss.detach()), "entropy": float(entropy)})
            _add(totals, {name: float(total) for name, total in value.sums.items()})
            _add(totals, {"tokens_trained": len(logprobs_N), "tokens_computed": batch.tokens, "micro_batches": 1})
            _add(totals, {"shared_prefixes": len(batch.families)})
        self.model.eval()
        return totals

    def state_dict(self) -> dict[str, Any]:
        """All that a resume needs beside the weights."""
        return self.optimizer.state_dict()

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for a state that `load_state_dict` would refuse."""
        self.optimizer.check_state_dict(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def _logprobs(self, batch: MicroBatch, at_temperature: bool) -> tuple[Tensor, Tensor]:
        """logprobs_N in the order of rows and targets, and the summed entropy of their distributions."""
        rows, cut = batch.rows, batch.cut
        where = predictions(batch)
        prefix_N, cache = self._prefix(batch, where.prefix) if cut else (None, None)
        ids_BT = self._padded([row.token_ids[cut:-1] for row in rows], batch.width)
        states_N = self._forward(ids_BT, where.rows, cache)
        if prefix_N is not None and where.prefix:
            states_N = torch.cat([prefix_N, states_N])[self._longs(where.order)]
        chosen_N = self._longs([row.token_ids[t] for row in rows for t in row.targets])
        temperatures_N = self._floats(row.temperatures for row in rows) if at_temperature else None
        if not self.head.separable:
            return score_logits(states_N, chosen_N, temperatures_N)
        return score(self.head, states_N, chosen_N, temperatures_N)

    def _prefix(self, batch: MicroBatch, positions: Sequence[int]) -> tuple[Tensor, DynamicCache]:
        """Compute each family's prefix once; returns what `_forward` does, and a cache with one entry for each row."""
        firsts = [sum(batch.families[:i]) for i in range(len(batch.families))]
        ids_GT = self._padded([batch.rows[b].token_ids[: batch.cut] for b in firsts], batch.cut)
        cache = DynamicCache(config=self.model.config)
        states_N = self._forward(ids_GT, positions, cache)
        _hand_out(cache, batch.families)
        return states_N, cache

    def _forward(self, ids_BT: Tensor, positions: Sequence[int], cache: DynamicCache | None) -> Tensor:
        """The head's input hidden_NH at `positions` of the flattened [B, T] input; logits_NV of a model whose head
        cannot be run alone. Rows are padded on the right, where a causal model does not look, so that no mask is
        needed."""
        block = None if _checkpoints_activations(self.model) else self.last_block
        hidden: list[Tensor] | None = [] if self.head.separable else None
        with only_positions(self.model, self._longs(positions), block, hidden):
            output = self.model(input_ids=ids_BT, past_key_values=cache, use_cache=cache is not None)
        return output.logits[0] if hidden is None else hidden[0]

    def _padded(self, rows: Sequence[Sequence[int]], width: int) -> Tensor:
        return self._longs([[*row, *[0] * (width - len(row))] for row in rows])

    def _longs(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.model.device)

    def _floats(self, rows: Iterable[Sequence[float]]) -> Tensor:
        values = [value for row in rows for value in row]
        return torch.tensor(values, dtype=torch.float32, device=self.model.device)


def can_share(model: PreTrainedModel) -> bool:
    """Whether keys and values of a prefix can be handed to several rows: every layer keeps all of them, and no layer is
    computed again in the backward pass."""
    if _checkpoints_activations(model):
        return False
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) is DynamicLayer for layer in layers)


def _hand_out(cache: DynamicCache, families: Sequence[int]) -> None:
    """Give the keys and values of each prefix to the rows of its family."""
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise PolicyError('a layer of the model keeps no plain keys and values; train it with sharing="merged"')
        layer.keys, layer.values = _repeat(layer.keys, families), _repeat(layer.values, families)


def _repeat(states_GHTD: Tensor, counts: Sequence[int]) -> Tensor:
    """states_BHTD, entry g `counts[g]` times. Backward is a sum over each family, where that of an index is a scatter,
    several times slower on a CPU."""
    entries = zip(states_GHTD.split(1), counts, strict=True)
    return torch.cat([entry.expand(count, -1, -1, -1) for entry, count in entries])


def _checkpoints_activations(model: nn.Module) -> bool:
    """Transformers does so in training mode only."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def cost_model(model: PreTrainedModel) -> CostModel:
    """The cost of passes through this model on its device, from its shape."""
    config = model.config.get_text_config(decoder=True)
    outer = [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
    embeddings = {id(p): p.numel() for module in outer for p in module.parameters()}
    body = max(1, sum(p.numel() for p in model.parameters()) - sum(embeddings.values()))
    layers, hidden = config.num_hidden_layers, config.hidden_size
    launch = LAUNCH_CPU if model.device.type == "cpu" else LAUNCH_ACCELERATOR
    return CostModel(
        pair=2 * layers * hidden / body,
        copy=COPY * layers * hidden / body,
        launch=launch * layers / body,
    )


def refuse_unfaithful(samples: Sequence[TrainingSample]) -> None:
    """Raises UnfaithfulSampleError for trained tokens that were chosen greedily: they had no probability to correct."""
    for sample in samples:
        for node, weights in zip(sample.tree.nodes, sample.weights, strict=True):
            if node.sampled and node.temperature <= 0 and any(weights):
                raise UnfaithfulSampleError(
                    f"call {node.call} of rollout {node.rollout_id} was sampled with temperature={node.temperature:g}; "
                    'sample training rollouts with a temperature above 0, or train with loss="nll"'
                )


def _cut(samples: Sequence[TrainingSample], minibatches: int) -> list[Sequence[TrainingSample]]:
    if minibatches == 1:
        return [samples]
    parts = (samples[i::minibatches] for i in range(minibatches))
    return [_rescaled(part) for part in parts if part]


def _rescaled(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    total = math.fsum(weight for sample in samples for weights in sample.weights for weight in weights)
    if not total:
        return list(samples)
    return [replace(s, weights=tuple(tuple(w / total for w in weights) for weights in s.weights)) for s in samples]


COUNTS: tuple[str, ...] = (
    "optimizer_steps",
    "skipped_steps",
    "tokens_trained",
    "tokens_computed",
    "micro_batches",
    "shared_prefixes",
)
PER_STEP: tuple[str, ...] = ("loss", "lr", "grad_norm")


def _add(totals: dict[str, float], values: Mapping[str, float | Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + float(value)


def _means(totals: dict[str, float]) -> dict[str, float]:
    """Sums over tokens become means over tokens, sums over steps means over steps; counts stay."""
    steps = totals["optimizer_steps"] + totals["skipped_steps"]
    divisors = dict.fromkeys(COUNTS, 1.0) | dict.fromkeys(PER_STEP, steps)
    return {name: total / divisors.get(name, totals["tokens_trained"]) for name, total in totals.items()}
