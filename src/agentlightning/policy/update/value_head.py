"""The value head: a small critic that reads the policy's hidden states.

    V_t = f(h_t)        h_t: the hidden state that predicts token t, which has seen the tokens before it only

It shares the body of the policy and has float32 weights, an optimiser and a file of its own. Hidden states are scaled
to unit root mean square first, so that one learning rate suits every model; the output layer starts at 0.

Shapes: N tokens, H hidden.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentlightning.models.checkpoint import read_tensors
from agentlightning.policy.config import STEP, OptimizerConfig, ValueHeadConfig

logger = logging.getLogger(__name__)

FILE = Path("value_head") / "head.safetensors"
"""In a checkpoint. In a folder of its own, because servers load every safetensors file beside the model's."""
NO_HEAD = 'the policy has no value head; set policy.value_head = "linear" (or "mlp")'


class ValueHead(nn.Module):
    """Predicts the return from hidden states."""

    def __init__(self, config: ValueHeadConfig, size: int, *, seed: int = 0) -> None:
        """`size`: that of a hidden state."""
        super().__init__()
        self.config = config
        self.size = size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = _layers(config, size)
        output = cast(nn.Linear, self.layers[-1])
        nn.init.zeros_(output.weight)
        nn.init.zeros_(output.bias)

    @classmethod
    def of(cls, model: PreTrainedModel, config: ValueHeadConfig, *, seed: int = 0) -> ValueHead:
        """A new head for a model, on its device; on the CPU for one without weights yet."""
        size = int(model.config.get_text_config(decoder=True).hidden_size)
        head = cls(config, size, seed=seed)
        return head if model.device.type == "meta" else head.to(model.device)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """values_N, float32."""
        if not self.config.trains_body:
            hidden_NH = hidden_NH.detach()
        return self.layers(nn.functional.rms_norm(hidden_NH.float(), (self.size,)))[:, 0]

    def optimizer_config(self, policy: OptimizerConfig) -> OptimizerConfig:
        """AdamW at the head's own rate, on the schedule of the policy."""
        lr = self.config.lr if self.config.lr is not None else STEP / self.size
        return policy.model_copy(update={"type": "adamw", "lr": lr, "weight_decay": 0.0})

    def save_pretrained(self, directory: Path) -> None:
        """Write it beside a model."""
        path = directory / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}, path)

    def read(self, directory: Path) -> dict[str, Tensor] | None:
        """The weights of the head saved beside a model; None where there is none. Raises PolicyError for a damaged file
        and for a head of another shape."""
        path = directory / FILE
        return read_tensors(path, "value head", self.state_dict()) if path.is_file() else None


def read_values(head: ValueHead | None, directory: Path) -> dict[str, Tensor] | None:
    """The weights of `head` in a checkpoint. A head that the checkpoint lacks stays as it is, one that only the
    checkpoint has is not used: both are logged. Raises as `ValueHead.read`."""
    weights = None if head is None else head.read(directory)
    if head is None and (directory / FILE).is_file():
        logger.warning("the value head in %s is not used: policy.value_head is not set", directory)
    if head is not None and weights is None:
        logger.warning("%s holds no value head: the policy's own continues, untrained if it is new", directory)
    return weights


def _layers(config: ValueHeadConfig, size: int) -> nn.Sequential:
    if config.type == "linear":
        return nn.Sequential(nn.Linear(size, 1))
    return nn.Sequential(nn.Linear(size, config.hidden_size), nn.GELU(), nn.Linear(config.hidden_size, 1))
