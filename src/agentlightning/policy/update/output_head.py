"""Log-probabilities of chosen tokens from hidden states, in chunks: [N, V] logits of all positions never exist at once.

If there is more than one chunk, its logits are computed again in the backward pass: the output head runs twice. Memory
holds one chunk where the head is a linear layer and nothing else (`chunked_logprobs`), and a few where more happens to
its logits: a soft cap, a scale, an adapter.

Shapes: N trained positions, C positions of a chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from agentlightning.errors import PolicyError
from agentlightning.models.checkpoint import FORWARD_ERRORS
from agentlightning.policy.update.chunked_logprobs import Chosen, Kept, logprobs_from_linear, logprobs_from_logits

# -- head positions --------------------------------------------------------------------------------------------------

# A forward pass that computes what follows the last attention only at the positions whose logits are needed.
#
# After the last attention, tokens no longer depend on one another, so the last layer's feed-forward block and the
# output head can leave out the other positions. The model is not rewritten: its modules have hooks during a pass.
#
# Shapes: B rows, T tokens of a row, N wanted positions, H hidden.


@contextmanager
def head_at_positions(
    model: PreTrainedModel, positions_N: Tensor, block: nn.Module | None, hidden: list[Tensor], *, logits: bool = True
) -> Generator[None]:
    """Compute the output head, and `block` (`last_mlp`), at `positions_N` of the flattened [B, T] input only.

    The head's input hidden_NH is appended to `hidden`. The model's logits are then [1, N, V], and go through whatever
    follows the head; without `logits`, the head computes none.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise PolicyError(f"{type(model).__name__} has no output embeddings; train a causal language model")

    def select(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0].flatten(0, 1).index_select(0, positions_N).unsqueeze(0), *args[1:])

    shapes: list[torch.Size] = []

    def narrow(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        shapes.append(args[0].shape)
        return select(module, args)

    def widen(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        shape = shapes.pop()
        empty = output.new_zeros(shape[0] * shape[1], shape[2])
        return empty.index_copy(0, positions_N, output[0]).view(shape)

    def take(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states = select(module, args)[0]
        hidden.append(states[0])
        return (states if logits else states[:, :0], *args[1:])

    with ExitStack() as hooks:
        hooks.callback(head.register_forward_pre_hook(take).remove)
        if block is not None:
            hooks.callback(block.register_forward_pre_hook(narrow).remove)
            hooks.callback(block.register_forward_hook(widen).remove)
        yield


def last_mlp(model: PreTrainedModel) -> nn.Module | None:
    """The feed-forward block of the last layer, by the name that transformers gives it in most models."""
    layers: Sequence[Any] = list(getattr(model.get_decoder(), "layers", []))
    block = getattr(layers[-1], "mlp", None) if layers else None
    return block if isinstance(block, nn.Module) else None


logger = logging.getLogger(__name__)

CHUNK_LOGITS = 1 << 24
"""Logits computed at once: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class HeadTraits:
    """What is found out about an output head by running it."""

    separable: bool = False
    """Whether logits can be computed from hidden states alone."""
    linear: bool = False
    """Whether logits are those of the output layer."""
    output: Callable[..., Any] = BaseModelOutputWithPast
    """The type that the decoder returns."""


class OutputHead:
    """What a causal language model does after its decoder: the output layer, and whatever follows it (a soft cap, a
    scale). It runs the model with the decoder replaced by given hidden states; the first use is compared with a plain
    forward pass."""

    def __init__(self, model: PreTrainedModel, traits: HeadTraits | None = None) -> None:
        """`traits`: those of the same model in another process, where this one cannot be run yet."""
        self._model = _causal_model(model)
        self.vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        self._decoder = getattr(self._model, self._model.base_model_prefix, None)
        self.traits = traits or HeadTraits()
        if traits is None:
            self._find_traits()
        if not self.traits.separable:
            logger.warning(
                "the output head of %s cannot be run alone: the logits of all trained positions are in memory at once",
                type(self._model).__name__,
            )

    @property
    def linear(self) -> nn.Linear | None:
        """The layer that computes the logits, if nothing else happens to them now."""
        layer: Any = self._model.get_output_embeddings()
        hooked = layer is not None and (layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer))
        return layer if self.traits.linear and not hooked else None

    def __call__(self, hidden_CH: Tensor) -> Tensor:
        """logits_CV."""
        ids_1C = torch.zeros(1, len(hidden_CH), dtype=torch.long, device=hidden_CH.device)
        with _with_decoder_output(self._decoder, self.traits.output(last_hidden_state=hidden_CH.unsqueeze(0))):
            return self._model(input_ids=ids_1C, use_cache=False).logits[0]

    @torch.no_grad()
    def _find_traits(self) -> None:
        """Set `traits` to those of the model."""
        decoder: Any = self._decoder
        padding = getattr(self._model.config, "pad_token_id", None)  # transformers warns of it without a mask.
        ids_1C = torch.tensor([[token for token in range(4) if token != padding]], device=self._model.device)
        hidden: list[Tensor] = []
        layer: Any = self._model.get_output_embeddings()

        def take(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            """What training takes: something may happen to it between decoder and output layer."""
            hidden.append(args[0][0])

        agrees = False
        with suppress(*FORWARD_ERRORS):
            with layer.register_forward_pre_hook(take):
                expected = self._model(input_ids=ids_1C, use_cache=False).logits[0]
            output = type(decoder(input_ids=ids_1C, use_cache=False))
            self.traits = HeadTraits(separable=True, output=output)
            found = self(hidden[0])
            agrees = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
        self.traits = replace(self.traits, linear=self._matches_layer()) if agrees else HeadTraits()

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


def token_logprobs(
    head: OutputHead,
    hidden_NH: Tensor,
    chosen_N: Tensor,
    temperatures_N: Tensor | None,
    entropy_gradient: bool = False,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """log p of the chosen tokens at their temperatures, and the entropies there: [N], float32 or more. Entropies have a
    gradient if asked for. With `kept`, the distributions are over these tokens only. The gradient is for
    `Tensor.backward` alone (`logprobs_from_linear`)."""
    size = max(1, CHUNK_LOGITS // head.vocabulary)
    chosen = Chosen(chosen_N, temperatures_N, entropy_gradient, kept)
    if (linear := head.linear) is not None:
        return logprobs_from_linear(hidden_NH, linear.weight, linear.bias, chosen, size, adds_to_grad=True)
    if len(hidden_NH) <= size:
        return _of_chunk(head, hidden_NH, chosen)
    found: list[Any] = [
        checkpoint(_of_chunk, head, hidden_CH, part, use_reentrant=False, preserve_rng_state=False)
        for hidden_CH, part in zip(hidden_NH.split(size), chosen.split(size), strict=True)
    ]
    return torch.cat([logprobs_C for logprobs_C, _ in found]), torch.cat([entropy_C for _, entropy_C in found])


def _of_chunk(head: OutputHead, hidden_CH: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor]:
    return logprobs_from_logits(head(hidden_CH), chosen)


def _causal_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, inside the wrapper that adapters put around it."""
    head = model.get_output_embeddings()
    found = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.get_output_embeddings() is head]
    return found[-1] if found else model


@contextmanager
def _with_decoder_output(decoder: Any, output: Any) -> Generator[None]:
    """Let the decoder return `output`, whatever its input."""
    own = decoder.__dict__.get("forward")  # Libraries that offload weights put one there.

    def forward(*_args: Any, **_options: Any) -> Any:
        return output

    decoder.forward = forward
    try:
        yield
    finally:
        if own is None:
            del decoder.forward
        else:
            decoder.forward = own
