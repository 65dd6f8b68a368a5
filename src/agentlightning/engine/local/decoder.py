"""The forward pass of the Llama family on a CPU, for sampling: the same numbers from a fraction of the operations.

Sampling from a small model spends most of its time between the matrix products of transformers' modules, and the
products themselves read weights in an order that suits a processor badly. Here the weights of linear layers are packed
(oneDNN's blocked format) once for each version of them, and a layer is about twenty operations. `ContinuousBatcher`
compares the logits with the model's own when it is made, and works without this where they differ.

Letters in names: N rows, Q new tokens of each, H key heads, R query heads of each, D dim of a head, T cached positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from agentlightning.engine.local.cascade_attention import attend_rows
from agentlightning.engine.local.kv_cache import KVCache, KVCacheLayer

ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Models whose layers are those of `Layer`."""


def supported(model: PreTrainedModel, cache: KVCache) -> bool:
    """Whether `Decoder` knows this model's layers, and torch has the operations it needs for it."""
    return (
        not cache.layout.has_sliding_window
        and type(model).__name__ in ARCHITECTURES
        and model.device.type == "cpu"
        and model.dtype in (torch.float32, torch.bfloat16)
        and getattr(model.config, "hidden_act", None) == "silu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedLinear:
    """Linear layers with the same input as one product: y = x W^T + b, with the weights of the latest `pack`. Their
    forward hooks, which adapters use, run as in the layers."""

    def __init__(self, *layers: nn.Linear) -> None:
        self._layers = layers
        self._sizes = [layer.out_features for layer in layers]
        self._bias: Tensor | None = None
        self._weight: Tensor | None = None

    def pack(self) -> None:
        weight = torch.cat([layer.weight.detach() for layer in self._layers])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        biases = [bias.detach() for layer in self._layers if (bias := cast(Tensor | None, layer.bias)) is not None]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, Q, in]; returns [N, Q, the sum of the layers' out]."""
        y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        if not any(map(_hooks, self._layers)):
            return y
        parts = y.split(self._sizes, -1)
        return torch.cat([_run_hooks(layer, x, part) for layer, part in zip(self._layers, parts, strict=True)], -1)


class Layer:
    """Attention and feed-forward network, each behind a norm (RMSNorm) and beside a residual connection."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = PackedLinear(attention.o_proj)
        self.gate_up = PackedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = PackedLinear(mlp.down_proj)
        self.norms = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.dim: int = attention.head_dim
        self.scaling: float = attention.scaling
        self.key_heads: int = attention.k_proj.out_features // self.dim
        self.index: int = attention.layer_idx

    def __call__(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache, mask: Tensor | None) -> Tensor:
        x = x + self.out(self._attend(rms_norm(x, self.norms[0]), rotation, cache, mask))
        gate, up = self.gate_up(rms_norm(x, self.norms[1])).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)

    def _attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache, mask: Tensor | None) -> Tensor:
        count, width, _ = x.shape
        heads = self.qkv(x).view(count, width, -1, self.dim)
        rotated, value = heads[:, :, : -self.key_heads], heads[:, :, -self.key_heads :]
        if self.head_norms[0] is not None:
            parts = rotated[:, :, : -self.key_heads], rotated[:, :, -self.key_heads :]
            rotated = torch.cat([rms_norm(part, norm) for part, norm in zip(parts, self.head_norms, strict=True)], 2)
        cos, sin = rotation
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.dim // 2, -1), sin)
        query, key = rotated[:, :, : -self.key_heads], rotated[:, :, -self.key_heads :]
        keys, values = cast(KVCacheLayer, cache.layers[self.index]).update(key.transpose(1, 2), value.transpose(1, 2))
        if width == 1 and mask is not None:
            queries = (query * self.scaling).reshape(count, self.key_heads, -1, self.dim)
            return attend_rows(queries, keys, values, mask, self.index).reshape(count, 1, -1)
        output = functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys, values, mask, is_causal=mask is None, scale=self.scaling, enable_gqa=True
        )
        return output.transpose(1, 2).reshape(count, width, -1)


class Decoder:
    """Computes logits with the weights that `model` had when they were packed: on the first pass, and on the first
    after each `invalidate`."""

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        inner = cast(Any, model).model
        self._cache = cache
        self._embedding: nn.Embedding = inner.embed_tokens
        self._rotary: nn.Module = inner.rotary_emb
        self._norm: nn.Module = inner.norm
        self._layers = [Layer(layer) for layer in inner.layers]
        self._head = PackedLinear(cast(Any, model).lm_head)
        parts = (part for layer in self._layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down))
        self._linears = (*parts, self._head)
        self._packed = False

    def invalidate(self) -> None:
        """The weights change, or have changed."""
        self._packed = False

    def __call__(self, ids_NQ: Tensor, attention_mask: Tensor | None, position_ids: Tensor) -> Tensor:
        """Logits [N, V] after the last of `ids_NQ` at `position_ids` [N, Q], with the mask of `KVCache.masks`; None:
        nothing is cached for these rows."""
        if not self._packed:
            for linear in self._linears:
                linear.pack()
            self._packed = True
        x = self._embedding(ids_NQ)
        cos, sin = self._rotary(x, position_ids)
        half = sin.shape[-1] // 2  # Rotating by half a head turns (a, b) into (-b, a); `roll` gives (b, a).
        rotation = cos.unsqueeze(2), torch.cat([-sin[..., :half], sin[..., half:]], -1).unsqueeze(2)
        for layer in self._layers:
            x = layer(x, rotation, self._cache, attention_mask)
        return self._head(rms_norm(x[:, -1:], self._norm))[:, 0]


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _hooks(layer: nn.Linear) -> Mapping[int, Callable[..., Tensor | None]]:
    return vars(layer)["_forward_hooks"]


def _run_hooks(layer: nn.Linear, x: Tensor, y: Tensor) -> Tensor:
    for hook in _hooks(layer).values():
        changed = hook(layer, (x,), y)
        y = y if changed is None else changed
    return y
