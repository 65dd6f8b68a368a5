"""Weights from the trainer's GPU to vLLM's, by NCCL and on one GPU that both share: `pytest -m gpu tests/vllm`.

AGL_VLLM is then an environment with vLLM for CUDA, and ours has torch for CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.policy.config import LocalPolicyConfig, OptimizerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.served import ServedPolicy
from agentlightning.trajectory import Node, TokenTree, TrainingSample

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("transfer", "device", "gpus"), [("nccl", "1", 2), ("ipc", "0", 1), ("auto", "1", 2)])
async def test_vllm_agrees_with_the_trainer_after_updates_without_disk(
    vllm: str, models: list[Path], tmp_path: Path, transfer: str, device: str, gpus: int
):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, and torch sees {torch.cuda.device_count()}")
    learner = LocalPolicy.open(LocalPolicyConfig(model=models[0], device="cuda:0", optimizer=OptimizerConfig(lr=3e-2)))
    args = ("--enforce-eager", "--gpu-memory-utilization=0.3")
    config = ServersConfig(command=vllm, args=args, devices=(device,), transfer=transfer)
    policy = await ServedPolicy.open(learner, config, tmp_path, dtype="float32")
    try:
        assert policy.transfer == ("ipc" if transfer == "ipc" else "nccl")
        prompt = policy.chat.encode(policy.chat.render([{"role": "user", "content": "What is 12 + 30?"}]))
        for version in range(1, 4):
            sample = await policy.sample(prompt, SamplingParams(max_tokens=8, seed=version))
            count = len(sample.token_ids)
            tree = TokenTree((Node(-1, tuple(prompt)), Node(0, sample.token_ids, True, sample.logprobs)))
            lesson = TrainingSample(tree, advantages=((), (1.0,) * count), weights=((), (1 / count,) * count))
            figures = await policy.train([lesson])
            assert figures["server_difference"] < 0.01
            assert all(replica.up and not replica.transfer_interrupted for replica in policy.servers.replicas)
            assert policy.policy_version == version
        assert [entry.name for entry in (tmp_path / "weights").iterdir()] == ["version-000000"]
    finally:
        await policy.close()
