"""A forward pass that computes what follows the last attention only at the positions whose logits are needed.

After the last attention, tokens no longer depend on one another, so the last layer's feed-forward block and the output
head can leave out the other positions. The model is not rewritten: its modules have hooks during a pass.

Shapes: B rows, T tokens of a row, N wanted positions, H hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentlightning.errors import PolicyError
from agentlightning.models.refusal import FORWARD_ERRORS


@contextmanager
def head_at_positions(
    model: PreTrainedModel, positions_N: Tensor, block: nn.Module | None, hidden: list[Tensor], *, logits: bool = True
) -> Generator[None]:
    """Compute the output head, and `block` (`tokenwise_last_mlp`), at `positions_N` of the flattened [B, T] input only.

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


def tokenwise_last_mlp(model: PreTrainedModel) -> nn.Module | None:
    """The feed-forward block of the last layer, if it treats every token independently and runs once; else None.

    It is probed.
    """
    block = last_mlp(model)
    return block if block is not None and _is_tokenwise(block, model) and _runs_once(block, model) else None


def last_mlp(model: PreTrainedModel) -> nn.Module | None:
    """The feed-forward block of the last layer, by the name that transformers gives it in most models."""
    layers: Sequence[Any] = list(getattr(model.get_decoder(), "layers", []))
    block = getattr(layers[-1], "mlp", None) if layers else None
    return block if isinstance(block, nn.Module) else None


@torch.no_grad()
def _runs_once(block: nn.Module, model: PreTrainedModel) -> bool:
    """Whether no attention can follow. Some models run their layers several times."""
    calls: list[nn.Module] = []

    def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append(module)

    with block.register_forward_pre_hook(count):
        model(input_ids=torch.ones(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    return len(calls) == 1


@torch.no_grad()
def _is_tokenwise(block: nn.Module, model: PreTrainedModel) -> bool:
    hidden = model.config.get_text_config(decoder=True).hidden_size
    probe = torch.linspace(-1, 1, 6 * hidden, device=model.device, dtype=model.dtype).sin().view(2, 3, hidden)
    training = block.training
    block.eval()
    try:
        whole, part = block(probe), block(probe[1:, 1:2])
    except FORWARD_ERRORS:  # It needs more than hidden states.
        return False
    finally:
        block.train(training)
    if not isinstance(whole, Tensor) or whole.shape != probe.shape:
        return False
    return torch.allclose(whole[1:, 1:2], part, rtol=1e-3, atol=1e-3)
