"""A recipe written for the Tinker API, by the official package alone, trains a local model."""

from __future__ import annotations

import asyncio
import statistics
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PROMPT = list(range(5, 13))
GROUPS, GROUP, TOKENS = 4, 16, 4
STEPS, GOAL = 14, 0.85
"""A random policy samples even token ids half of the time."""


def reward(tokens: list[int]) -> float:
    return statistics.mean(token % 2 == 0 for token in tokens)


def train(url: str, loss: str, steps: int = STEPS, saved: Path | None = None) -> list[float]:
    """Sample, score, forward_backward, optim_step, publish: the mean reward of each step. The weights go to `saved`."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url, api_key="tml-secret")
    client = service.create_lora_training_client("tiny", rank=8, seed=0).result()
    found: list[float] = []
    for step in range(steps):
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
    if saved is not None:
        download(url, client.save_weights_external("final").result().path, saved)
    service.close("success").result()
    return found


def download(url: str, path: str, directory: Path) -> None:
    import tinker

    found = tinker.RestClient(base_url=url, api_key="tml-secret").get_external_weights_urls(path).result()
    assert found.expires > datetime.now(UTC)
    for name, url in found.urls.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=60) as response:
            (directory / name).write_bytes(response.read())


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads it.
async def test_the_weights_that_a_recipe_downloads_load_in_peft_with_what_the_server_samples(
    serving: Any, model: Path, tmp_path: Path
) -> None:
    import tinker
    import torch
    from peft import PeftModel
    from tinker import types
    from transformers import AutoModelForCausalLM

    tokens, saved = [*PROMPT, 20, 31, 44, 52], tmp_path / "downloaded"

    def recipe(url: str) -> list[float]:
        train(url, "ppo", steps=2, saved=saved)
        service = tinker.ServiceClient(base_url=url, api_key="tml-secret")
        path = next(
            f"tinker://{each.parts[-3]}/external_weights/final" for each in tmp_path.rglob("external_weights/final")
        )
        sampler = service.create_sampling_client(model_path=path).result()
        found = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        service.close("success").result()
        return found[1:]

    async with serving() as server:
        expected = await asyncio.to_thread(recipe, server.url)
    plain = AutoModelForCausalLM.from_pretrained(model)
    before = _logprobs(plain, tokens)
    trained = PeftModel.from_pretrained(plain, saved)
    assert _logprobs(trained, tokens) == pytest.approx(expected, abs=1e-4)
    assert before != pytest.approx(expected, abs=1e-2)
    with torch.no_grad():
        merged = trained.merge_and_unload()
    assert _logprobs(merged, tokens) == pytest.approx(expected, abs=1e-4)


def _logprobs(model: Any, tokens: list[int]) -> list[float]:
    import torch

    with torch.no_grad():
        scores = model(input_ids=torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
