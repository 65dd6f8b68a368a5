"""The demo's job reaches its goal where two processes train, and what it exports is the policy that was measured."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning.demo import job
from agentlightning.engine.base import SamplingParams
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.trainer import Trainer

AGL = str(Path(sys.executable).parent / "agl")


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_the_demo_reaches_its_goal_on_two_processes_and_is_exported(tmp_path: Path) -> None:
    shown = job.write_demonstrations(tmp_path / "demonstrations.jsonl", 0)
    settings = job.settings("calculator.toml", warm_start__dataset=shown)
    policy = settings.policy.model_copy(update={"kind": "fsdp", "processes": 2, "device": "cpu"})
    trainer = Trainer(settings.model_copy(update={"policy": policy}), run_dir=tmp_path / "run")
    result = await trainer.fit_async(**job.tasks(0))
    assert result.failed_rollouts == 0
    assert result.held_out["greedy"].after > 0.9

    exported = tmp_path / "exported"
    done = await asyncio.create_subprocess_exec(AGL, "export", tmp_path / "run", "--to", "hf", "--out", exported)
    assert await done.wait() == 0
    model: Any = AutoModelForCausalLM.from_pretrained(exported)
    checkpoint = LocalPolicyConfig(model=str(tmp_path / "run" / "checkpoint"), device="cpu")
    sampler = LocalPolicy.open(checkpoint)
    try:
        sample = await sampler.sample((5, 6, 7), SamplingParams(temperature=1.0, max_tokens=8, seed=1))
    finally:
        await sampler.close()
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7, *sample.token_ids]])).logits[0, 2:-1]
    found = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    assert found.tolist() == pytest.approx(sample.logprobs, abs=1e-4)
