"""Precision and threads that settings leave open."""

from __future__ import annotations

import ctypes
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from tests.support.models import model_tokenizer, tiny_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from agentlightning.credit import group_trajectories, training_samples
from agentlightning.engine.base import SamplingParams
from agentlightning.policy import model_loading
from agentlightning.policy.config import PolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.open import policy_config
from agentlightning.trajectory import Trajectory, Transition


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def test_a_small_model_has_float32_and_one_thread(model: Path) -> None:
    config = policy_config(PolicyConfig(), str(model))
    assert (config.dtype, config.threads) == ("float32", 1)


@pytest.mark.parametrize("computes", [True, False])
async def test_a_large_model_has_bfloat16_where_the_processor_computes_in_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, computes: bool
) -> None:
    monkeypatch.setattr(model_loading, "LARGE", 1000)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: computes)
    policy = LocalPolicy.open(policy_config(PolicyConfig(device="cpu"), str(model)))
    assert policy._model.dtype == (torch.bfloat16 if computes else torch.float32)
    await policy.close()


def test_threads_are_those_that_multiply_faster(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "LARGE", 1000)
    monkeypatch.setattr(model_loading, "CORES", 2)
    before = torch.get_num_threads()
    for seconds, threads in (({1: 1.0, 2: 0.6}, 2), ({1: 1.0, 2: 0.9}, 1), ({1: 1.0, 2: 8.0}, 1)):
        disturbed = iter([5.0] * 9)  # Another program for a moment changes nothing.
        monkeypatch.setattr(
            model_loading.timeit,
            "timeit",
            lambda work, seconds=seconds, others=disturbed, **_: seconds[torch.get_num_threads()] + next(others, 0.0),
        )
        assert policy_config(PolicyConfig(device="cpu"), str(model)).threads == threads
        assert torch.get_num_threads() == before


async def test_memory_of_the_engine_is_bounded_by_settings_of_a_run(model: Path) -> None:
    settings = PolicyConfig(device="cpu", kv_cache_bytes=1 << 16, prefix_cache_bytes=0)
    policy = LocalPolicy.open(policy_config(settings, str(model)))
    roomy = LocalPolicy.open(policy_config(PolicyConfig(device="cpu"), str(model)))
    prompt, params = list(range(1, 30)), SamplingParams(max_tokens=2)
    for each in (policy, roomy):
        await each.sample(prompt, params)
    assert policy._generator._cache.limit_bytes == 1 << 16
    assert policy._generator.prefix_cache.num_bytes == 0 < roomy._generator.prefix_cache.num_bytes
    for each in (policy, roomy):
        await each.close()


def test_what_was_chosen_for_a_large_model_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy_config(PolicyConfig(), str(model))
    assert not caplog.records
    monkeypatch.setattr(model_loading, "LARGE", 1000)
    config = policy_config(PolicyConfig(), str(model))
    assert f"policy.dtype={config.dtype}, policy.threads={config.threads}" in caplog.text


def test_what_is_set_is_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "LARGE", 1000)
    config = policy_config(PolicyConfig(dtype="float32", threads=3), str(model))
    assert (config.dtype, config.threads) == ("float32", 3)
    config = policy_config(PolicyConfig(dtype="bfloat16"), str(model))
    assert config.dtype == "bfloat16"


def test_a_model_that_cannot_be_read_fails_where_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    config = policy_config(PolicyConfig(), str(tmp_path))
    with pytest.raises(model_loading.PolicyError, match="holds no tokenizer"):
        LocalPolicy.open(config)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or sys.maxsize < 2**32, reason="glibc")
async def test_memory_that_an_update_needed_is_given_back(tmp_path: Path) -> None:
    tokenizer = model_tokenizer()
    shape = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 12, "num_attention_heads": 10}
    large = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **shape))
    assert large.num_parameters() > model_loading.LARGE
    large.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    del large
    policy = LocalPolicy.open(policy_config(PolicyConfig(device="cpu", dtype="float32", threads=1), str(tmp_path)))
    rng = random.Random(0)
    trajectories = [
        Trajectory(
            f"r{number}",
            "a",
            (
                Transition(
                    rollout_id=f"r{number}",
                    attempt_id="a",
                    span_id="s",
                    sequence_id=0,
                    prompt_token_ids=tuple(rng.choices(range(10, 100), k=150 + 20 * number)),
                    response_token_ids=(7, 8),
                    logprobs=(-1.0, -1.0),
                    policy_version=0,
                ),
            ),
            float(number % 2),
            "g",
        )
        for number in range(6)
    ]
    (samples, _) = training_samples(group_trajectories(trajectories))
    Path("/proc/self/clear_refs").write_text("5")  # noqa: ASYNC240 - the highest so far is forgotten
    await policy.train(samples)
    left, peak = memory("VmRSS"), memory("VmHWM")
    ctypes.CDLL(None).malloc_trim(0)
    assert left - memory("VmRSS") < 0.1 * (peak - memory("VmRSS")), "nothing is left to give back"
    await policy.close()


def memory(name: str) -> int:
    """Kilobytes of this process."""
    return int(re.findall(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[0])
