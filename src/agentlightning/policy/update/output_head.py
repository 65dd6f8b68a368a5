"""Log-probabilities of chosen tokens from hidden states, in chunks: [N, V] logits of all positions never exist at once.

If there is more than one chunk, its logits are computed again in the backward pass: the output head runs twice, and
memory holds one chunk instead of several tensors of all positions.

Shapes: N trained positions, C positions of a chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from agentlightning.engine.local.sampler import MIN_TEMPERATURE

logger = logging.getLogger(__name__)

CHUNK_LOGITS = 1 << 24
"""Logits computed at once: 64 MiB in float32."""


class OutputHead:
    """What a causal language model does after its decoder: the output layer, and whatever follows it (a soft cap, a
    scale). It runs the model with the decoder replaced by given hidden states; the first use is compared with a plain
    forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = _causal_model(model)
        self.vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
        self._decoder = getattr(self._model, self._model.base_model_prefix, None)
        self._output: Callable[..., Any] = BaseModelOutputWithPast
        """The type that the decoder returns."""
        self.separable = isinstance(self._decoder, nn.Module) and self._matches_model()
        """Whether logits can be computed from hidden states alone."""
        if not self.separable:
            logger.warning(
                "the output head of %s cannot be run alone: the logits of all trained positions are in memory at once",
                type(self._model).__name__,
            )

    def __call__(self, hidden_CH: Tensor) -> Tensor:
        """logits_CV."""
        ids_1C = torch.zeros(1, len(hidden_CH), dtype=torch.long, device=hidden_CH.device)
        with _with_decoder_output(self._decoder, self._output(last_hidden_state=hidden_CH.unsqueeze(0))):
            return self._model(input_ids=ids_1C, use_cache=False).logits[0]

    @torch.no_grad()
    def _matches_model(self) -> bool:
        decoder: Any = self._decoder
        padding = getattr(self._model.config, "pad_token_id", None)  # transformers warns of it without a mask.
        ids_1C = torch.tensor([[token for token in range(4) if token != padding]], device=self._model.device)
        try:
            expected = self._model(input_ids=ids_1C, use_cache=False).logits[0]
            output = decoder(input_ids=ids_1C, use_cache=False)
            self._output = type(output)
            found = self(output.last_hidden_state[0])
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
            return False
        return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-3)


def token_logprobs(
    head: OutputHead,
    hidden_NH: Tensor,
    chosen_N: Tensor,
    temperatures_N: Tensor | None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log p of the chosen tokens at their temperatures, and the entropies there: float32 [N]. Entropies have a gradient
    if asked for."""
    size = max(1, CHUNK_LOGITS // head.vocabulary)
    if len(hidden_NH) <= size:
        return _chunk_logprobs(head, hidden_NH, chosen_N, temperatures_N, entropy_gradient)
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for start in range(0, len(hidden_NH), size):
        part = slice(start, start + size)
        temperatures = None if temperatures_N is None else temperatures_N[part]
        found: Any = checkpoint(
            _chunk_logprobs, head, hidden_NH[part], chosen_N[part], temperatures, entropy_gradient,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        logprobs.append(found[0])
        entropies.append(found[1])
    return torch.cat(logprobs), torch.cat(entropies)


def token_logprobs_from_logits(
    logits_CV: Tensor, chosen_C: Tensor, temperatures_C: Tensor | None, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of given logits."""
    logits_CV = logits_CV.float()
    if temperatures_C is not None:
        logits_CV = logits_CV / temperatures_C[:, None].clamp(min=MIN_TEMPERATURE)
    logprobs_CV = logits_CV.log_softmax(-1)
    if entropy_gradient:
        entropy_C = -(logprobs_CV.exp() * logprobs_CV).sum(-1)
    else:
        with torch.no_grad():
            entropy_C = -logprobs_CV.exp().mul_(logprobs_CV).sum(-1)
    return logprobs_CV.gather(1, chosen_C[:, None])[:, 0], entropy_C


def _chunk_logprobs(
    head: OutputHead, hidden_CH: Tensor, chosen_C: Tensor, temperatures_C: Tensor | None, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    return token_logprobs_from_logits(head(hidden_CH), chosen_C, temperatures_C, entropy_gradient)


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
