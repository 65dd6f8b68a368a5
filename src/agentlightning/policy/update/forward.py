"""The forward pass of training: log-probabilities of chosen tokens, for an update or to score them.

Works with any `transformers` causal language model through its own forward and `DynamicCache`, on any device. Only
the hidden states at trained positions reach the output head (`states_at_positions`), a chunk at a time, so that no
[B, T, V] logits exist and no [N, V] ones of a large vocabulary. Of several chunks, the logits are computed again in the
backward pass: the output head runs twice. Memory holds one chunk where the head is a linear layer and nothing else, and
a few where more happens to its logits: a soft cap, a scale, an adapter.
The model is in evaluation mode: the probabilities that are trained are those that were sampled from.

Shapes: B rows, T tokens of a row, N trained tokens of a micro-batch, C of a chunk, V vocabulary, H hidden, G prefix
families.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from agentlightning.engine.local.sampler import MIN_TEMPERATURE
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models.checkpoint import FORWARD_ERRORS, cache_argument, configured_window, refusing
from agentlightning.policy.base import Sharing
from agentlightning.policy.update.packing import (
    CostModel,
    KeptTokens,
    Line,
    MicroBatch,
    TokenTable,
    join_rows,
    plan,
    token_table,
)
from agentlightning.policy.update.value_head import ValueHead
from agentlightning.trajectory import FloatArray, Node, TokenTree, TrainingSample

# -- chunked log-probabilities ----------------------------------------------------------------------------------------

# Log-probabilities and entropies of next tokens with an exact gradient, in the memory of one chunk of logits.
#
#     z = logits / T        p = softmax(z)        log p(chosen) = z[chosen] - log sum exp z        H = - sum p log p
#
#     d log p(chosen) / dz = onehot(chosen) - p                dH / dz = - p (log p + H)
#
# Where only some tokens could be sampled (top-k, top-p), z is -inf for all others: p, its entropy and its gradient are
# those of the distribution that was sampled from (DeepSeek-V3.2, 2025, arXiv:2512.02556, keep sampling mask).
#
# Softmax is computed in blocks of rows. Behind a linear output layer all chunks use one buffer: the backward pass
# computes their logits again, the last chunk excepted, writes their gradient over them, and adds its product with the
# hidden states to one gradient of the weights, which is summed in float32 where weights have less precision.
#
# Shapes: N positions, C positions of a chunk, B of a block, V vocabulary, H hidden, K ids of all kept sets.

BLOCK_CPU = 1 << 17
"""Logits of a block, where its float32 copies (two of 512 KiB) should stay in the cache of a core."""
BLOCK_ACCELERATOR = 1 << 24
"""Logits of a block, where a kernel should have enough to do."""
SLICE = 1 << 22
"""Numbers of a gradient of half precision that are added to its float32 sum at once."""


FAR = -1e4
"""A shifted logit whose exp() is 0 in any precision, and finite, so that 0 times it is 0."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is asked of N distributions: each entry [N]."""

    tokens: Tensor
    temperatures: Tensor | None = None
    """None: 1."""
    entropy_gradient: bool = False
    """Whether entropies have a gradient."""
    kept: KeptTokens | None = None
    """None: all distributions are over the whole vocabulary."""

    def part(self, part: slice) -> Chosen:
        """The same of consecutive distributions."""
        return Chosen(
            self.tokens[part],
            None if self.temperatures is None else self.temperatures[part],
            self.entropy_gradient,
            None if self.kept is None else self.kept.part(part),
        )


@dataclass(frozen=True, slots=True)
class Softmax:
    """What a forward pass keeps of N distributions: each [N] in float32, or float64 for logits of that precision."""

    entropy: Tensor
    largest: Tensor
    """The largest logit."""
    total: Tensor
    """sum_v exp((logit_v - max) / T)"""


def logprobs_from_logits(logits_NV: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor]:
    """log p of the chosen tokens and the entropies, [N]."""
    return logprobs_from_linear(logits_NV, None, None, chosen, len(logits_NV) or 1)


def logprobs_from_linear(
    hidden_NH: Tensor, weight_VH: Tensor | None, bias_V: Tensor | None, chosen: Chosen, size: int
) -> tuple[Tensor, Tensor]:
    """`logprobs_from_logits` of the logits of a linear layer, `size` positions at a time; without a weight, `hidden_NH`
    are the logits. For `Tensor.backward`: the gradient of the weight is added to its `grad` in place where there is one
    already."""
    found = _LogProbs.apply(hidden_NH, weight_VH, bias_V, chosen, size)  # pyright: ignore[reportUnknownVariableType]
    return cast("tuple[Tensor, Tensor]", found)


class _LogProbs(Function):
    """Of the logits of a linear layer for hidden_NH; without a weight, these are the logits themselves."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor | None, bias_V: Tensor | None, chosen: Chosen, size: int
    ) -> tuple[Tensor, Tensor]:
        buffer_CV = None if weight_VH is None else hidden_NH.new_empty(min(size, len(hidden_NH)), len(weight_VH))
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N, *others = (hidden_NH.new_empty(len(hidden_NH), dtype=dtype) for _ in range(4))
        found = Softmax(*others)
        for part in _parts(len(hidden_NH), size):
            _measure(_logits(hidden_NH[part], weight_VH, bias_V, buffer_CV), chosen, logprobs_N, found, part)
        ctx.chosen, ctx.size = chosen, size
        ctx.last_chunk = buffer_CV if any(ctx.needs_input_grad) else None
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        ctx.softmax = replace(found, entropy=found.entropy.clone())  # A context that holds its outputs is never freed.
        if not chosen.entropy_gradient:
            ctx.mark_non_differentiable(found.entropy)
        return logprobs_N, found.entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        if weight_VH is None:
            gradient_NV = torch.empty_like(hidden_NH)
            _write_gradient(hidden_NH, ctx.chosen, ctx.softmax, slice(None), gradients, gradient_NV)
            return gradient_NV, None, None, None, None
        of_hidden = torch.empty_like(hidden_NH) if wanted[0] else None
        parts = _parts(len(hidden_NH), ctx.size)
        earlier = _earlier(weight_VH)
        of_weight = (_sum_for(weight_VH, len(parts)) if earlier is None else earlier) if wanted[1] else None
        of_bias = _sum_for(bias_V, len(parts)) if wanted[2] else None
        buffer_CV, ctx.last_chunk = ctx.last_chunk, None  # A second backward pass computes every chunk again.
        known = buffer_CV is not None
        if buffer_CV is None:
            buffer_CV = hidden_NH.new_empty(min(ctx.size, len(hidden_NH)), len(weight_VH))
        for part in reversed(parts):
            hidden_CH = hidden_NH[part]
            logits_CV = buffer_CV[: len(hidden_CH)] if known else _logits(hidden_CH, weight_VH, bias_V, buffer_CV)
            known = False
            _write_gradient(logits_CV, ctx.chosen, ctx.softmax, part, gradients, logits_CV)
            if of_hidden is not None:
                torch.mm(logits_CV, weight_VH, out=of_hidden[part])
            if of_weight is not None:
                _add_product(of_weight, logits_CV, hidden_CH)
            if of_bias is not None:
                of_bias += logits_CV.sum(0, dtype=of_bias.dtype)
        returned = _as(of_weight, weight_VH) if earlier is None else None
        return of_hidden, returned, _as(of_bias, bias_V), None, None


def _parts(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _blocks(
    logits_CV: Tensor, chosen: Chosen, found: Softmax, part: slice, *, first: bool
) -> Iterator[tuple[slice, slice, Tensor, Tensor | float]]:
    """Of each block the rows in a chunk, and among the N positions of which the chunk is `part`; (logits - max) / T in
    float32 or more: at most 0, and `FAR` for excluded tokens; and T [B, 1]. The `first` time, the largest logits are
    filled in."""
    start = part.start or 0
    numbers = BLOCK_CPU if logits_CV.device.type == "cpu" else BLOCK_ACCELERATOR
    for rows in _parts(len(logits_CV), max(1, numbers // max(1, logits_CV.shape[1]))):
        places = slice(start + rows.start, start + rows.stop)
        logits_BV = logits_CV[rows]
        excluded_BV = _excluded(logits_BV, chosen, places)
        if first:
            within_BV = logits_BV if excluded_BV is None else logits_BV.masked_fill(excluded_BV, -math.inf)
            found.largest[places] = within_BV.amax(-1)
        shifted_BV, temperatures_B1 = logits_BV.to(found.largest.dtype) - found.largest[places, None], 1.0
        if chosen.temperatures is not None:
            temperatures_B1 = chosen.temperatures[places, None].to(shifted_BV.dtype).clamp(min=MIN_TEMPERATURE)
            shifted_BV.div_(temperatures_B1)
        if excluded_BV is not None:
            shifted_BV.masked_fill_(excluded_BV, FAR)
        yield rows, places, shifted_BV, temperatures_B1


def _logits(hidden_CH: Tensor, weight_VH: Tensor | None, bias_V: Tensor | None, buffer_CV: Tensor | None) -> Tensor:
    """logits_CV, in the first rows of the buffer."""
    if weight_VH is None or buffer_CV is None:
        return hidden_CH
    logits_CV = buffer_CV[: len(hidden_CH)]
    if bias_V is None:
        return torch.mm(hidden_CH, weight_VH.T, out=logits_CV)
    return torch.addmm(bias_V, hidden_CH, weight_VH.T, out=logits_CV)


def _excluded(logits_BV: Tensor, chosen: Chosen, places: slice) -> Tensor | None:
    """Which tokens some distributions are not over [B, V]; None: they are over all. Another model may lack an id."""
    kept = None if chosen.kept is None else chosen.kept.part(places)
    if kept is None or not len(kept.ids):
        return None
    rows, within = np.repeat(np.arange(len(kept.sizes)), kept.sizes), kept.ids < logits_BV.shape[1]
    excluded_BV = torch.from_numpy(kept.sizes > 0).to(logits_BV.device)[:, None].expand(logits_BV.shape).clone()
    excluded_BV[rows[within], kept.ids[within]] = False
    return excluded_BV


def _measure(logits_CV: Tensor, chosen: Chosen, logprobs_N: Tensor, found: Softmax, part: slice) -> None:
    """Fill in the entries of a chunk."""
    for _, places, shifted_BV, _ in _blocks(logits_CV, chosen, found, part, first=True):
        exp_BV = shifted_BV.exp()
        sum_B = exp_BV.sum(-1)
        found.total[places], log_sum_B = sum_B, sum_B.log()
        logprobs_N[places] = shifted_BV.gather(1, chosen.tokens[places, None])[:, 0] - log_sum_B
        found.entropy[places] = log_sum_B - exp_BV.mul_(shifted_BV).sum(-1) / sum_B


def _write_gradient(
    logits_CV: Tensor, chosen: Chosen, found: Softmax, part: slice, gradients: Sequence[Tensor], out_CV: Tensor
) -> None:
    """Write the gradient of a chunk of logits, which may be `out_CV` itself."""
    of_logprobs_N, of_entropy_N = gradients
    for rows, places, shifted_BV, temperatures_B1 in _blocks(logits_CV, chosen, found, part, first=False):
        scale_B1, total_B1 = of_logprobs_N[places, None], found.total[places, None]
        factor_B1 = -scale_B1 / total_B1 / temperatures_B1
        if chosen.entropy_gradient:
            own_B1 = -of_entropy_N[places, None] / total_B1 / temperatures_B1
            offset_B1 = found.entropy[places, None] - total_B1.log()
            factor_B1 = (shifted_BV + offset_B1).mul_(own_B1).add_(factor_B1)
        gradient_BV = shifted_BV.exp_().mul_(factor_B1)
        gradient_BV.scatter_add_(1, chosen.tokens[places, None], scale_B1 / temperatures_B1)
        out_CV[rows] = gradient_BV


def _sum_for(weight: Tensor, products: int) -> Tensor:
    """Zeros to which that many products are added: of the weight's precision for one, else at least of float32."""
    dtype = weight.dtype if products == 1 else torch.promote_types(weight.dtype, torch.float32)
    return torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)


def _earlier(weight: Tensor) -> Tensor | None:
    """The gradient of earlier backward passes, if products can be added to it without a loss of precision."""
    grad = weight.grad if weight.is_leaf else None
    return grad if grad is not None and torch.finfo(grad.dtype).bits >= 32 and grad.dtype == weight.dtype else None


def _add_product(sum_VH: Tensor, gradient_CV: Tensor, hidden_CH: Tensor) -> None:
    """sum += gradient^T hidden."""
    if sum_VH.dtype == gradient_CV.dtype:
        sum_VH.addmm_(gradient_CV.T, hidden_CH)
        return
    for rows in _parts(len(sum_VH), max(1, SLICE // sum_VH.shape[1])):
        sum_VH[rows] += gradient_CV[:, rows].T @ hidden_CH


def _as(gradient: Tensor | None, weight: Tensor | None) -> Tensor | None:
    return None if gradient is None or weight is None else gradient.to(weight.dtype)


# -- positions -------------------------------------------------------------------------------------------------------

# A forward pass that computes what follows the last attention only at the positions whose logits are needed.
#
# After the last attention, tokens no longer depend on one another, so the last layer's feed-forward block and the
# output head can leave out the other positions. The model is not rewritten: its modules have hooks during a pass.
#
# Shapes: B rows, T tokens of a row, N wanted positions, H hidden.


@contextmanager
def states_at_positions(
    decoder: nn.Module, positions_N: Tensor, block: nn.Module | None, hidden: list[Tensor]
) -> Generator[None]:
    """Append what the decoder returns at `positions_N` of the flattened [B, T] input to `hidden`: hidden_NH. `block`
    (`last_mlp`) computes these alone, and what follows the decoder computes nothing."""

    def at_positions(states_BTH: Tensor) -> Tensor:
        return states_BTH.flatten(0, 1).index_select(0, positions_N)

    def narrowed(compute: Callable[..., Tensor], states_BTH: Tensor, *args: Any) -> Tensor:
        output_1NH = compute(at_positions(states_BTH).unsqueeze(0), *args)
        empty = output_1NH.new_zeros(states_BTH.shape).flatten(0, 1)
        return empty.index_copy(0, positions_N, output_1NH[0]).view(states_BTH.shape)

    def take(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> Any:
        states_BTH = output["last_hidden_state"]
        hidden.append(at_positions(states_BTH))
        output["last_hidden_state"] = states_BTH[:, :0]
        return output

    at_block = nullcontext() if block is None else computing(block, partial(narrowed, block.forward))
    with decoder.register_forward_hook(take), at_block:
        yield


@contextmanager
def computing(module: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """Within, a module computes `forward`, also where a library that offloads weights has given it one of its own."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def last_mlp(model: PreTrainedModel) -> nn.Module | None:
    """The feed-forward block of the last layer, by the name that transformers gives it in most models."""
    layers: Sequence[Any] = list(getattr(model.get_decoder(), "layers", []))
    block = getattr(layers[-1], "mlp", None) if layers else None
    return block if isinstance(block, nn.Module) else None


# -- head ------------------------------------------------------------------------------------------------------------

CHUNK_LOGITS = 1 << 24
"""Logits computed at once: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What is found out about a model by running it."""

    output: Callable[..., Any] = BaseModelOutputWithPast
    """The type that the decoder returns."""
    linear: bool = False
    """Whether logits are those of the output layer."""
    tokenwise_mlp: bool = False
    """Whether the feed-forward block of the last layer treats every token independently."""
    shares: bool = False
    """Whether rows can use the keys and values of a prefix that was computed once."""
    joins: bool = False
    """Whether rows can stand behind one another, apart by a mask and by their positions."""


class OutputHead:
    """What a causal language model does after its decoder: the output layer, and whatever is before it (a scale, a
    transformation) or follows it (a soft cap). It runs the model with the decoder replaced by given hidden states; the
    first use is compared with a plain forward pass."""

    def __init__(self, model: PreTrainedModel, traits: ModelTraits | None = None) -> None:
        """`traits`: those of the same model in another process, where this one cannot be run yet. Raises PolicyError
        for a model without output embeddings, or whose logits are not those of what its decoder returns."""
        self._model = _causal_model(model)
        if self._model.get_output_embeddings() is None:
            raise PolicyError(f"{type(model).__name__} has no output embeddings; train a causal language model")
        self.vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        self.decoder = _decoder(self._model)
        self.traits = traits or ModelTraits()
        if traits is None:
            self._find_traits()

    @property
    def linear(self) -> nn.Linear | None:
        """The layer that computes the logits, if nothing else happens to them now."""
        layer: Any = self._model.get_output_embeddings()
        hooked = layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer)
        return layer if self.traits.linear and not hooked else None

    def __call__(self, hidden_CH: Tensor) -> Tensor:
        """logits_CV."""
        ids_1C = torch.zeros(1, len(hidden_CH), dtype=torch.long, device=hidden_CH.device)
        output = self.traits.output(last_hidden_state=hidden_CH.unsqueeze(0))
        with computing(self.decoder, lambda *_args, **_options: output):
            return self._model(input_ids=ids_1C, use_cache=False).logits[0]

    @torch.no_grad()
    def _find_traits(self) -> None:
        """Set `traits` to those of the model."""
        padding = getattr(self._model.config, "pad_token_id", None)  # transformers warns of it without a mask.
        ids_1C = torch.tensor([[token for token in range(4) if token != padding]], device=self._model.device)
        outputs: list[Any] = []
        with refusing(self._model):
            with self.decoder.register_forward_hook(lambda _module, _args, output: outputs.append(output)):
                expected = self._model(input_ids=ids_1C, use_cache=False).logits[0]
            self.traits = ModelTraits(type(outputs[0]))
            found = self(outputs[0]["last_hidden_state"][0])
            if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
                raise ValueError("its logits are not those of what its decoder returns")
            self.traits = replace(self.traits, linear=self._matches_layer())

    @torch.no_grad()
    def _matches_layer(self) -> bool:
        """Whether logits are those of the output layer, also large ones, which a soft cap would change."""
        layer: Any = self._model.get_output_embeddings()
        if type(layer) is not nn.Linear:
            return False
        hidden_CH = torch.linspace(-9, 9, 2 * layer.in_features, device=layer.weight.device).sin().view(2, -1)
        largest = nn.functional.linear(hidden_CH, layer.weight.float()).abs().max()
        for scale in (1.0, 1000.0 / largest.clamp(min=1e-6)):
            scaled_CH = (hidden_CH * scale).to(layer.weight.dtype)
            expected = nn.functional.linear(scaled_CH, layer.weight, layer.bias)
            if not torch.allclose(self(scaled_CH), expected, rtol=1e-3, atol=1e-3):
                return False
        return True


def token_logprobs(head: OutputHead, hidden_NH: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor]:
    """log p of the chosen tokens at their temperatures, and the entropies there: [N], float32 or more. The gradient is
    for `Tensor.backward` alone (`logprobs_from_linear`)."""
    size = max(1, CHUNK_LOGITS // head.vocabulary)
    if (linear := head.linear) is not None:
        return logprobs_from_linear(hidden_NH, linear.weight, linear.bias, chosen, size)
    if len(hidden_NH) <= size:
        return _of_chunk(head, hidden_NH, chosen)
    found: list[Any] = [
        checkpoint(_of_chunk, head, hidden_NH[part], chosen.part(part), use_reentrant=False, preserve_rng_state=False)
        for part in _parts(len(hidden_NH), size)
    ]
    logprobs_N, entropy_N = map(torch.cat, zip(*found, strict=True))
    return logprobs_N, entropy_N


def _of_chunk(head: OutputHead, hidden_CH: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor]:
    return logprobs_from_logits(head(hidden_CH), chosen)


def _causal_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, inside the wrapper that adapters put around it."""
    head = model.get_output_embeddings()
    found = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.get_output_embeddings() is head]
    return found[-1] if found else model


def _decoder(model: PreTrainedModel) -> PreTrainedModel:
    """What computes the hidden states of a causal model, and no logits."""
    found: nn.Module = model.get_decoder()
    decoder = found if isinstance(found, PreTrainedModel) else cast(PreTrainedModel, model.base_model)
    inner = (each for each in model.children() if isinstance(each, PreTrainedModel))
    return next(inner, model) if decoder is model else decoder  # Of some, as Llama 4, transformers names none.


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
    with ExitStack() as stack:
        for layer in layers:
            numbers = (getattr(module, "layer_idx", None) for module in layer.modules())
            index = next((number for number in numbers if isinstance(number, int)), None)
            stack.enter_context(computing(layer, _recomputing(layer.forward, index)))
        yield


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
        self.head = OutputHead(model, traits)
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
        shares = can_share(self.model) and self._gives(whole_NH, shared)
        lines = replace(plain, lines=tuple(join_rows(plain.rows, 64)))
        joins = can_share(self.model) and can_mask(self.model) and self._gives(whole_NH, lines)
        self.last_mlp = block
        tokenwise_mlp = block is not None and self._gives(whole_NH, plain)
        return replace(self.head.traits, tokenwise_mlp=tokenwise_mlp, shares=shares, joins=joins)

    def _gives(self, expected_NH: Tensor | None, batch: MicroBatch) -> bool:
        """Whether the hidden states for a micro-batch differ from others by rounding only."""
        if expected_NH is None or (found_NH := self._hidden(batch)) is None:
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
        self, batch: TokenTable | Sequence[TrainingSample], *, token_budget: int = 8192, sharing: Sharing = "auto"
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
        shared, first = batch.shared_length, len(batch.families) * batch.shared_length
        # One token may predict the first of several answers.
        distinct, which = np.unique(batch.predicting(), return_inverse=True)
        early = int(np.searchsorted(distinct, first))
        prefix_PH, cache = self._prefix(batch, distinct[:early]) if shared else (None, None)
        ids = [line.token_ids[shared:] for line in batch.lines]
        masked = self._line_inputs(batch.lines, batch.width) if batch.joined else {}
        hidden_NH = self._states(self._padded(ids, batch.width), distinct[early:] - first, cache, **masked)
        if prefix_PH is not None and (early or self.always_uses_prefix):
            hidden_NH = torch.cat([prefix_PH, hidden_NH])
        return hidden_NH.index_select(0, self.tensor(which))

    def logprobs(
        self, batch: MicroBatch, hidden_NH: Tensor, at_temperature: bool, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """logprobs_N of the targets of a micro-batch, from its `states`, and the entropy of their distributions [N],
        which has a gradient if asked for. `at_temperature`, a distribution is the one that was sampled from: also over
        those tokens only that were recorded as kept."""
        chosen = [row.token_ids[target] for row in batch.rows for target in row.targets.tolist()]
        chosen_N = self.tensor(np.array(chosen, np.int64))
        temperatures_N = self.tensor(batch.table.temperatures[batch.places]) if at_temperature else None
        kept = batch.kept if at_temperature else None
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
    ) -> dict[str, list[tuple[FloatArray, ...]]]:
        """`logprobs` and `entropy` of every sampled token at its temperature, and its `values` by a head: for each tree
        a column, as `TrainingSample` has them."""
        table = token_table(map(TrainingSample, trees))
        # In one order: processes join them one after the other, and the order of a set differs from process to process.
        found = {name: np.zeros_like(table.call, np.float32) for name in sorted(what)}
        self.model.eval()
        batches = self.plan(table)
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
        """hidden_NH at distinct `positions` of the flattened [B, T] input. Rows are padded on the right, where a causal
        model does not look, so that no mask is needed unless rows are joined."""
        hidden: list[Tensor] = []
        at_positions = states_at_positions(self.head.decoder, self.tensor(positions), self.last_mlp, hidden)
        with at_positions, recomputed(self.recomputed_layers):
            self.model(input_ids=ids_BT, **{self.cache_argument: cache, "use_cache": cache is not None}, **inputs)
        return hidden[0]

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
