"""A recipe written for the Tinker API, by the official package alone, trains a local model."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PROMPT = list(range(5, 13))
GROUPS, GROUP, TOKENS = 4, 16, 4
STEPS, GOAL = 14, 0.85
"""A random policy samples even token ids half of the time."""


def reward(tokens: list[int]) -> float:
    return statistics.mean(token % 2 == 0 for token in tokens)


def train(url: str, loss: str) -> list[float]:
    """Sample, score, forward_backward, optim_step, publish: the mean reward of each step."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key="tml-secret")
    client = service.create_lora_training_client("tiny", rank=8, seed=0).result()
    found: list[float] = []
    for step in range(STEPS):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=TOKENS, seed=1000 * step, stop=[])
        prompts = [[*PROMPT, 20 + group] for group in range(GROUPS)]
        calls = [sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
        data: list[Any] = []
        rewards: list[float] = []
        for prompt, call in zip(prompts, calls, strict=True):
            sequences = call.result().sequences
            own = [reward(each.tokens) for each in sequences]
            rewards += own
            for sequence, value in zip(sequences, own, strict=True):
                data.append(datum(types, loss, prompt, sequence, value - statistics.mean(own)))
        found.append(statistics.mean(rewards))
        gradient = client.forward_backward(data, loss)
        update = client.optim_step(types.AdamParams(learning_rate=2e-2, grad_clip_norm=1.0))
        assert gradient.result().metrics.keys() == {"loss:sum"}
        assert update.result().metrics is not None
    service.close("success").result()
    return found


def datum(types: Any, loss: str, prompt: list[int], sequence: Any, advantage: float) -> Any:
    full, before, count = [*prompt, *sequence.tokens], len(prompt) - 1, len(sequence.tokens)
    inputs: dict[str, Any] = {"target_tokens": full[1:]}
    if loss == "cross_entropy":  # The imitation of what was better than the group.
        inputs["weights"] = [0.0] * before + [max(0.0, advantage)] * count
    else:
        inputs["logprobs"] = [0.0] * before + list(sequence.logprobs)
        inputs["advantages"] = [0.0] * before + [advantage] * count
    return types.Datum(model_input=types.ModelInput.from_ints(full[:-1]), loss_fn_inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "cross_entropy"])
async def test_a_recipe_of_the_official_package_reaches_its_goal(serving: Any, loss: str) -> None:
    async with serving() as server:
        rewards = await asyncio.to_thread(train, server.url, loss)
    assert statistics.mean(rewards[-2:]) > GOAL > 0.65 > rewards[0], rewards
