"""Checkpoints for servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from agentlightning.models.checkpoint import named_weights
from agentlightning.weight_sync.disk import CheckpointFolder


def small(kind: type[PreTrainedConfig], **more: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(vocab_size=32, num_key_value_heads=1, **sizes, **more)


class Saved:
    """A model as a policy that is saved."""

    policy_version = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        self.model.save_pretrained(directory)


@pytest.mark.parametrize(
    "config",
    [
        small(LlamaConfig, tie_word_embeddings=True),
        small(Qwen2Config, tie_word_embeddings=False),
        small(MixtralConfig, num_local_experts=2),  # Its experts are one tensor in memory and many in a checkpoint.
    ],
    ids=["tied", "untied", "experts"],
)
async def test_lent_weights_equal_a_checkpoint(config: PreTrainedConfig, tmp_path: Path):
    model = AutoModelForCausalLM.from_config(config)
    lent = named_weights(model)
    saved: Any = Saved(model)
    directory = await CheckpointFolder(tmp_path).write(saved)
    written: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        written |= load_file(file)
    assert set(lent) == set(written)
    assert all(lent[name].equal(written[name]) for name in written)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert config.model_type == "mixtral" or {tensor.data_ptr() for tensor in lent.values()} == own  # Nothing copied.
