"""Our side of `real_model.py`: answers of the local engine, and updates of the local policy."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from line import measured, serve

from agentlightning.credit import training_samples
from agentlightning.engine.base import SamplingParams
from agentlightning.engine.local.scheduler import ContinuousBatcher
from agentlightning.models.resolve import resolve_model
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, Lora, OptimizerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.model_loading import load_model
from agentlightning.trajectory import TrainingSample, Trajectory, Transition

MICRO_BATCH_TOKENS = 8192
ENGINES: dict[str, ContinuousBatcher] = {}


def prepare(model: str, gguf: str | None = None) -> dict[str, Any]:
    """The directory of the model, fetched if need be; `gguf`: also write its weights to this file, in float32."""
    directory = resolve_model(model)
    if gguf is not None and not Path(gguf).exists():
        from agentlightning.models.gguf import write_gguf

        write_gguf(Path(directory), Path(gguf), "f32")
    config = json.loads((Path(directory) / "config.json").read_text())
    return {"directory": directory, "vocabulary": config["vocab_size"], "torch": torch.__version__}


def load(model: str, dtype: str, threads: int, context: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    _, loaded = load_model(LocalPolicyConfig(model=model, dtype=dtype, threads=threads))  # type: ignore[arg-type]
    ENGINES["one"] = ContinuousBatcher(
        loaded, eos_token_ids=frozenset(), decode=lambda _: "", context_length=context, max_batch_size=64
    )
    return {}


def sample(prompts: list[list[int]], new: int) -> dict[str, Any]:
    engine = ENGINES["one"]
    engine.invalidate_cache()  # as after a change of the weights: no prompt is known from the round before

    def work() -> dict[str, Any]:
        requests = [engine.submit(prompt, SamplingParams(max_tokens=new)) for prompt in prompts]
        while not engine.idle:
            engine.step()
        return {"tokens": sum(len(request.logprobs) for request in requests)}

    with torch.inference_mode():
        return measured(work)


def update(model: str, dtype: str, threads: int, lora: bool, groups: list[dict[str, Any]], lr: float) -> dict[str, Any]:
    policy = LocalPolicy.open(
        LocalPolicyConfig(
            model=model,
            dtype=dtype,  # type: ignore[arg-type]
            threads=threads,
            lora=Lora(r=16) if lora else None,
            optimizer=OptimizerConfig(lr=lr),
        )
    )
    return asyncio.run(second_update(policy, samples(groups)))


async def second_update(policy: LocalPolicy, batch: list[TrainingSample]) -> dict[str, Any]:
    """The first one allocates the state of the optimiser."""
    await policy.train(batch, UpdateOptions(token_budget=MICRO_BATCH_TOKENS))
    loop = asyncio.get_running_loop()

    def work() -> dict[str, Any]:
        future = asyncio.run_coroutine_threadsafe(
            policy.train(batch, UpdateOptions(token_budget=MICRO_BATCH_TOKENS)), loop
        )
        metrics = future.result()
        return {"tokens": int(metrics["tokens_trained"]), "computed": int(metrics["tokens_computed"])}

    answer = await asyncio.to_thread(measured, work)
    await policy.close()
    return answer


def samples(groups: list[dict[str, Any]]) -> list[TrainingSample]:
    draw, made = random.Random(0), []
    for g, group in enumerate(groups):
        rollouts = []
        for i, (answer, reward) in enumerate(zip(group["answers"], group["rewards"], strict=True)):
            logprobs = tuple(-6.0 + draw.uniform(-0.1, 0.1) for _ in answer)
            call = Transition(f"{g}.{i}", "at", f"{g}.{i}", 1, tuple(group["prompt"]), tuple(answer), logprobs)
            rollouts.append(Trajectory(f"{g}.{i}", "at", (call,), reward))
        made.append(rollouts)
    return training_samples(made)[0]


if __name__ == "__main__":
    serve([prepare, load, sample, update])
