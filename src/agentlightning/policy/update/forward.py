"""The forward pass of training: log-probabilities of chosen tokens, for an update or to score them.

Works with any `transformers` causal language model through its own forward and `DynamicCache`, on any device. Only
the hidden states at trained positions reach the output head (`states_at_positions`), a chunk at a time
(`output_head`), so that no [B, T, V] logits exist and no [N, V] ones of a large vocabulary.
The model is in evaluation mode: the probabilities that are trained are those that were sampled from.

Shapes: B rows, T tokens of a row, N trained tokens of a micro-batch, V vocabulary, H hidden, G prefix families.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models.checkpoint import FORWARD_ERRORS, cache_argument, configured_window
from agentlightning.policy.base import Sharing
from agentlightning.policy.update.output_head import (
    Chosen,
    HeadTraits,
    Kept,
    OutputHead,
    last_mlp,
    states_at_positions,
    token_logprobs,
)
from agentlightning.policy.update.packing import (
    CostModel,
    Line,
    MicroBatch,
    TokenTable,
    join_rows,
    plan,
    token_table,
)
from agentlightning.policy.update.value_head import ValueHead
from agentlightning.trajectory import FloatArray, Node, TokenTree, TrainingSample

# -- gradient checkpointing ------------------------------------------------------------------------------------------

# Gradient checkpointing: layers store their input alone, and are computed again in the backward pass.
#
# The layers stay in evaluation mode, and a key-value cache is put back to what it was before they are computed again,
# so that the gradient is the same and rows can share a prefix. transformers' own checkpointing allows neither. The last
# layer stores its activations: it is computed at trained positions only (`states_at_positions`).
#
# Chen et al. 2016, arXiv:1604.06174.


def layers_to_recompute(model: PreTrainedModel) -> list[nn.Module]:
    """All layers but the last. Raises ConfigError for a model whose layers cannot be computed again."""
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"policy.gradient_checkpointing: {type(model).__name__} has no layers that can be computed again; leave it"
            " out, or lower policy.token_budget"
        )
    return layers[:-1]


@contextmanager
def recomputed(layers: Sequence[nn.Module]) -> Generator[None]:
    """Forward passes within store the inputs of these layers alone."""
    for layer in layers:
        layer.forward = _recomputing(layer.forward, _cache_index(layer))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _recomputing(forward: Callable[..., Any], index: int | None) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **options)
        caches = [each for each in (*args, *options.values()) if isinstance(each, Cache)]
        kept: dict[str, Any] = {}
        if caches and index is not None:
            cached = caches[0].layers[index]
            kept["context_fn"] = lambda: (nullcontext(), _AsNow(cached))
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kept, **options)

    return run


class _AsNow:
    """Within, a layer of a cache is as it was when this was made."""

    def __init__(self, cached: Any) -> None:
        self._cached, self._now = vars(cached), dict(vars(cached))

    def __enter__(self) -> None:
        self._later = dict(self._cached)
        self._cached.update(self._now)

    def __exit__(self, *_error: object) -> None:
        self._cached.update(self._later)


def _cache_index(layer: nn.Module) -> int | None:
    found = [getattr(module, "layer_idx", None) for module in layer.modules()]
    return next((index for index in found if isinstance(index, int)), None)


PROBE = (3, 5, 4, 6), (7, 4, 8, 2), (8, 6, 3, 5)
"""A prompt and two answers, by which is found out what a model can."""
LAUNCH_CPU = 1.5e7
LAUNCH_ACCELERATOR = 1e10
"""What launching the kernels of one layer costs, in multiply-adds the device could have done."""
GRADIENT_CPU = 40.0
"""Multiply-adds that take about as long as adding to the gradient of one weight, once for each backward pass: by the
bytes that this moves, not fitted to measurements."""
COPY = 16.0
"""Multiply-adds that take as long as copying one number of a cache to a row, forward and backward."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What is found out about a model by running it."""

    head: HeadTraits
    tokenwise_mlp: bool
    """Whether the feed-forward block of the last layer treats every token independently."""
    shares: bool
    """Whether rows can use the keys and values of a prefix that was computed once."""
    joins: bool
    """Whether rows can stand behind one another, apart by a mask and by their positions."""


class Forward:
    """Computes log-probabilities with one model. Not thread safe: the weights may not change during a pass."""

    always_uses_prefix: ClassVar[bool] = False
    """Whether the output of a shared prefix has a gradient, if only of 0, where nothing is predicted from it. Layers
    that processes divide are gathered for the backward pass when it reaches their output."""

    def __init__(
        self, model: PreTrainedModel, *, gradient_checkpointing: bool = False, traits: ModelTraits | None = None
    ) -> None:
        """`traits`: those of the same model in another process, where this one cannot be run yet. Raises ConfigError
        for a model that cannot have gradient checkpointing."""
        self.model = model.eval()
        self.cache_argument = cache_argument(model)
        self.dtype = model.dtype
        """What it computes in."""
        self.recomputed_layers = layers_to_recompute(model) if gradient_checkpointing else []
        self.cost = cost_model(model)
        self.head = OutputHead(model, traits and traits.head)
        self.last_mlp = last_mlp(model)
        """What is computed at trained positions only; None turns that off."""
        self.traits = traits or self._probe()
        if not self.traits.tokenwise_mlp:
            self.last_mlp = None

    @torch.no_grad()
    def _probe(self) -> ModelTraits:
        """The traits, by comparing the hidden states of passes over one small tree: a model may have a last block that
        mixes tokens, count positions from another number, or take masks of its own kind only."""
        prompt, *answers = [tuple(token % self.head.vocabulary for token in each) for each in PROBE]
        nodes = [Node(0, answer, sampled=True, logprobs=(0.0,) * len(answer)) for answer in answers]
        batch = [TrainingSample(TokenTree((Node(-1, prompt), *nodes)))]
        (plain,) = plan(batch, token_budget=64, sharing="merged")
        (shared,) = plan(batch, token_budget=64, sharing="shared", join=False)
        block, self.last_mlp = self.last_mlp, None
        whole_NH = self._hidden(plain)
        shares = can_share(self.model) and self._agree(whole_NH, self._hidden(shared))
        lines = replace(plain, lines=tuple(join_rows(plain.rows, 64)))
        joins = can_share(self.model) and can_mask(self.model) and self._agree(whole_NH, self._hidden(lines))
        self.last_mlp = block
        tokenwise_mlp = block is not None and self._agree(whole_NH, self._hidden(plain))
        return ModelTraits(self.head.traits, tokenwise_mlp, shares, joins)

    def _agree(self, expected_NH: Tensor | None, found_NH: Tensor | None) -> bool:
        """Whether hidden states differ by rounding only."""
        if expected_NH is None or found_NH is None:
            return False
        precision = (expected_NH.amax() - expected_NH.amin()) * (3e-4 if self.dtype == torch.float32 else 0.05)
        return bool((found_NH - expected_NH).abs().amax() <= precision)

    def _hidden(self, batch: MicroBatch) -> Tensor | None:
        """The hidden states for the targets of a micro-batch, in the order of the table [N, H]; None where the model
        cannot compute them."""
        try:
            return self.states(batch)[self.tensor(batch.places.argsort())]
        except (*FORWARD_ERRORS, PolicyError):
            return None

    def plan(
        self,
        batch: TokenTable | Sequence[TrainingSample],
        *,
        token_budget: int = 8192,
        sharing: Sharing = "auto",
    ) -> list[MicroBatch]:
        """The micro-batches of a batch. Raises ConfigError where sharing="shared" and the model cannot share."""
        if sharing in ("auto", "shared") and not (self.traits.shares and can_share(self.model)):
            if sharing == "shared":
                raise ConfigError(
                    f'sharing="shared" needs a plain key-value cache, which {type(self.model).__name__} does not use '
                    'here; use sharing="merged" or "auto"'
                )
            sharing = "merged"
        return plan(
            batch,
            token_budget=token_budget,
            cost=self.cost,
            sharing=sharing,
            join=self.traits.joins and can_mask(self.model),
        )

    def aligned(self, batches: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """The passes over `batches` are within. Where several processes divide the model (`policy.fsdp`), these then
        make as many passes each."""
        return nullcontext()

    def joint(self, found: FloatArray) -> FloatArray:
        """Numbers of the tokens of a table, of which each process has computed those of its own `plan`, else 0."""
        return found

    def states(self, batch: MicroBatch) -> Tensor:
        """Run the body of the model. hidden_NH, of which the targets of a micro-batch are predicted, in the order of
        `MicroBatch.places`."""
        shared = batch.shared_length
        where = batch.predictions()
        prefix_PH, cache = self._prefix(batch, where.prefix) if shared else (None, None)
        ids = [line.token_ids[shared:] for line in batch.lines]
        masked = self._line_inputs(batch.lines, batch.width) if batch.joined else {}
        hidden_NH = self._states(self._padded(ids, batch.width), where.rows, cache, **masked)
        if prefix_PH is None or not (len(where.prefix) or self.always_uses_prefix):
            return hidden_NH
        return torch.cat([prefix_PH, hidden_NH])[self.tensor(where.order)]

    def logprobs(
        self, batch: MicroBatch, hidden_NH: Tensor, at_temperature: bool, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """logprobs_N of the targets of a micro-batch, from its `states`, and the entropy of their distributions [N],
        which has a gradient if asked for. `at_temperature`, a distribution is the one that was sampled from: also over
        those tokens only that were recorded as kept."""
        chosen = [row.token_ids[target] for row in batch.rows for target in row.targets.tolist()]
        chosen_N = self.tensor(np.array(chosen, np.int64))
        temperatures_N = self.tensor(batch.table.temperatures[batch.places]) if at_temperature else None
        sets = batch.kept if at_temperature else None
        kept = None if sets is None else Kept.of(sets, self.head.vocabulary, self.model.device)
        return token_logprobs(self.head, hidden_NH, Chosen(chosen_N, temperatures_N, entropy_gradient, kept))

    def of_targets(self, inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Tensor:
        """log p(targets[b][t] | inputs[b][: t + 1]) at temperature 1, all rows one behind the other [N], with gradient.
        Targets need not be the tokens that follow in the inputs."""
        width = max(map(len, inputs))
        places = np.concatenate([np.arange(len(row)) + number * width for number, row in enumerate(inputs)])
        chosen_N = self.tensor(np.concatenate([np.asarray(row, np.int64) for row in targets]))
        hidden_NH = self._states(self._padded(inputs, width), places, None)
        return token_logprobs(self.head, hidden_NH, Chosen(chosen_N))[0]

    @torch.no_grad()
    def score(
        self,
        trees: Sequence[TokenTree],
        what: AbstractSet[str] = frozenset({"logprobs", "entropy"}),
        *,
        value_head: ValueHead | None = None,
        token_budget: int = 8192,
    ) -> dict[str, list[tuple[FloatArray, ...]]]:
        """`logprobs` and `entropy` of every sampled token at its temperature, and its `values` by a head: for each tree
        a column, as `TrainingSample` has them."""
        table = token_table(map(TrainingSample, trees))
        # In one order: processes join them one after the other, and the order of a set differs from process to process.
        found = {name: np.zeros_like(table.call, np.float32) for name in sorted(what)}
        self.model.eval()
        batches = self.plan(table, token_budget=token_budget)
        with self.aligned(batches):
            for batch in batches:
                hidden_NH = self.states(batch)
                columns = {} if value_head is None else {"values": value_head(hidden_NH)}
                if what & {"logprobs", "entropy"}:
                    columns["logprobs"], columns["entropy"] = self.logprobs(batch, hidden_NH, at_temperature=True)
                for name in columns.keys() & what:
                    found[name][batch.places] = columns[name].cpu().numpy()
        return {name: table.by_node(self.joint(values)) for name, values in found.items()}

    def tensor(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self.model.device)

    def _prefix(self, batch: MicroBatch, positions: np.ndarray[Any, Any]) -> tuple[Tensor, DynamicCache]:
        """Compute each family's prefix once; returns what `_states` does, and a cache with one entry for each row."""
        firsts = [sum(batch.families[:i]) for i in range(len(batch.families))]
        ids_GT = self._padded([batch.lines[b].token_ids[: batch.shared_length] for b in firsts], batch.shared_length)
        cache = DynamicCache(config=self.model.config)
        hidden_PH = self._states(ids_GT, positions, cache)
        _expand_to_rows(cache, batch.families)
        return hidden_PH, cache

    def _line_inputs(self, lines: Sequence[Line], width: int) -> dict[str, Tensor]:
        """The positions [L, T] of the tokens of lines, and a mask [L, 1, T, T] that is added to their attention scores:
        each token sees its own path. Padding sees itself, as every token must see one."""
        positions_LT = np.zeros((len(lines), width), np.int64)
        visible_LTT = np.repeat(np.eye(width, dtype=bool)[None], len(lines), 0)
        for positions_T, visible_TT, line in zip(positions_LT, visible_LTT, lines, strict=True):
            for index, begin in zip(line.index, line.begins, strict=True):
                positions_T[index] = np.arange(len(index))
                visible_TT[np.ix_(index[begin:], index)] = np.tri(len(index) - begin, len(index), begin, bool)
        hidden_LTT = self.tensor(~visible_LTT)
        mask_LTT = torch.zeros(hidden_LTT.shape, dtype=self.dtype, device=self.model.device)
        mask_LTT.masked_fill_(hidden_LTT, torch.finfo(self.dtype).min)
        return {"attention_mask": mask_LTT[:, None], "position_ids": self.tensor(positions_LT)}

    def _states(
        self, ids_BT: Tensor, positions: np.ndarray[Any, Any], cache: DynamicCache | None, **inputs: Tensor
    ) -> Tensor:
        """hidden_NH at `positions` of the flattened [B, T] input. Rows are padded on the right, where a causal model
        does not look, so that no mask is needed unless rows are joined."""
        hidden: list[Tensor] = []
        # One token may predict the first of several answers.
        distinct, which = np.unique(positions, return_inverse=True)
        at_positions = states_at_positions(self.head.decoder, self.tensor(distinct), self.last_mlp, hidden)
        with at_positions, recomputed(self.recomputed_layers):
            self.model(input_ids=ids_BT, **{self.cache_argument: cache, "use_cache": cache is not None}, **inputs)
        return hidden[0].index_select(0, self.tensor(which))

    def _padded(self, rows: Sequence[Sequence[int]], width: int) -> Tensor:
        padded = [[*row, *[0] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.long, device=self.model.device)


def can_share(model: PreTrainedModel) -> bool:
    """Whether several rows can use the keys and values of one prefix: every layer caches all of them."""
    if has_unsloth_forward(model):
        return False
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) is DynamicLayer for layer in layers)


def can_mask(model: PreTrainedModel) -> bool:
    """Whether its attention takes a mask of any shape, and nothing else hides tokens: a window that layers have by
    themselves, as those of GPT-Neo, which do not go through transformers' attention interface, or a mask of the model's
    own."""
    known = getattr(model.config, "_attn_implementation", None) in ("sdpa", "eager")
    interface = known and model._supports_attention_backend  # pyright: ignore[reportPrivateUsage]
    return interface and configured_window(model) is None and not has_unsloth_forward(model)


def has_unsloth_forward(model: PreTrainedModel) -> bool:
    """Whether Unsloth has replaced the forward pass. Its own reads a cache in its own way, and a mask in some modes
    only, so each row is given by itself."""
    passes = (type(part).forward for part in (model, model.get_decoder()) if part is not None)
    return any("unsloth" in str(getattr(each, "__module__", "")) for each in passes)


def cost_model(model: PreTrainedModel) -> CostModel:
    """The cost of passes through this model on its device, from its shape."""
    config = model.config.get_text_config(decoder=True)
    outer = [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
    embeddings = {id(p): p.numel() for module in outer for p in module.parameters()}
    body = max(1, sum(p.numel() for p in model.parameters()) - sum(embeddings.values()))
    layers, hidden = config.num_hidden_layers, config.hidden_size
    launch = LAUNCH_CPU if model.device.type == "cpu" else LAUNCH_ACCELERATOR
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) if model.device.type == "cpu" else 0
    return CostModel(
        pair=2 * layers * hidden / body,
        copy=COPY * layers * hidden / body,
        launch=(launch * layers + GRADIENT_CPU * trained) / body,
    )


def _expand_to_rows(cache: DynamicCache, families: Sequence[int]) -> None:
    """Give the keys and values of each prefix to the rows of its family."""
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise PolicyError('a layer of the model has no plain key-value cache; train it with sharing="merged"')
        layer.keys, layer.values = _repeat(layer.keys, families), _repeat(layer.values, families)


def _repeat(states_GHTD: Tensor, counts: Sequence[int]) -> Tensor:
    """states_BHTD, entry g `counts[g]` times. Its backward pass is a sum over each family; that of an index is a
    scatter, several times slower on a CPU."""
    entries = zip(states_GHTD.split(1), counts, strict=True)
    return torch.cat([entry.expand(count, -1, -1, -1) for entry, count in entries])
