"""An adapter merged into the model below it answers as the two did together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.models import tiny_checkpoint
from transformers import AutoModelForCausalLM

from agentlightning.errors import PolicyError
from agentlightning.models.lora import merge
from agentlightning.policy.config import LocalPolicyConfig, Lora, OptimizerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.trajectory import Node, TokenTree, TrainingSample

IDS = tuple(range(5, 25))


async def test_the_merged_model_gives_the_same_probabilities(tmp_path: Path) -> None:
    base = tiny_checkpoint(tmp_path / "base")
    config = {"model": base, "device": "cpu", "lora": Lora(r=4), "optimizer": OptimizerConfig(lr=1e-2)}
    policy = LocalPolicy.open(LocalPolicyConfig.model_validate(config))
    sampled = Node(0, IDS[10:], True, (-1.0,) * 10, "ro", "call")
    tree = TokenTree((Node(-1, IDS[:10]), sampled))
    columns = {"advantages": ((), (1.0,) * 10), "weights": ((), (0.1,) * 10)}
    for _ in range(3):
        await policy.train([TrainingSample(tree, columns=columns)])
    found = await policy.score([tree], {"logprobs"})
    await policy.save(tmp_path / "adapter")
    await policy.close()
    merge(tmp_path / "adapter", tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([IDS])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, 9:-1].log_softmax(-1).gather(1, ids[0, 10:, None])[:, 0]
        before = AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits[0, 9:-1].log_softmax(-1)
    assert found["logprobs"][0][1].tolist() == pytest.approx(logprobs.tolist(), abs=1e-3)
    assert (before.gather(1, ids[0, 10:, None])[:, 0] - logprobs).abs().max() > 0.01, "the adapter changes something"


def test_adapters_of_single_agents_are_no_one_model(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="adapters of single agents"):
        merge(tmp_path, tmp_path / "merged")
