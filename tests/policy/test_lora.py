"""What a local policy with an adapter in place of all weights promises: it learns, is saved small, and comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.models import tiny_checkpoint
from transformers import AutoModelForCausalLM

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy.config import (
    LR_FACTOR,
    LocalPolicyConfig,
    Lora,
    OptimizerConfig,
    PolicyConfig,
    adapters_of,
    default_lr,
)
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.open import policy_config
from agentlightning.trajectory import Node, TokenTree, TrainingSample

PROMPT = tuple(range(5, 25))
PARAMS = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def open_policy(model: Path, **options: Any) -> LocalPolicy:
    config = {"device": "cpu", "optimizer": OptimizerConfig(lr=1e-2), "lora": Lora(r=4), **options}
    return LocalPolicy.open(LocalPolicyConfig.model_validate({"model": model, **config}))


def lesson(sample: Sample, *, adapter: str | None = None, prompt: tuple[int, ...] = PROMPT) -> TrainingSample:
    count = len(sample.token_ids)
    tree = TokenTree((Node(-1, prompt), Node(0, sample.token_ids, True, sample.logprobs, "ro", "call")))
    columns = {"advantages": ((), (1.0,) * count), "weights": ((), (1.0 / count,) * count)}
    return TrainingSample(tree, columns=columns, adapter=adapter)


def weights_of(policy: LocalPolicy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy._model.parameters()]


async def test_the_adapter_learns_and_the_weights_below_it_stay(checkpoint: Path) -> None:
    policy = open_policy(checkpoint)
    before = weights_of(policy)
    sample = await policy.sample(PROMPT, PARAMS)
    tree = lesson(sample).tree
    assert (await policy.train([lesson(sample)]))["grad_norm"] > 0
    for _ in range(2):
        await policy.train([lesson(sample)])
    assert policy.policy_version == 3
    after = await policy.sample(PROMPT, PARAMS)
    assert after.policy_version == 3
    columns = await policy.score([tree], {"logprobs", "ref_logprobs"})
    assert columns["logprobs"][0][1].sum() > sum(sample.logprobs)
    assert columns["ref_logprobs"][0][1].tolist() == pytest.approx(sample.logprobs, abs=1e-4), "the weights below"
    own = (await policy.score([lesson(after).tree], {"logprobs"}))["logprobs"][0][1]
    assert own.tolist() == pytest.approx(after.logprobs, abs=1e-4), "sampling and training agree"
    assert all(torch.equal(now, then) for now, then in zip(policy._model.parameters(), before, strict=True))
    await policy.close()


async def test_bfloat16_samples_what_it_trains(checkpoint: Path) -> None:
    policy = open_policy(checkpoint, dtype="bfloat16")
    await policy.train([lesson(await policy.sample(PROMPT, PARAMS))])
    sample = await policy.sample(PROMPT, PARAMS)
    own = (await policy.score([lesson(sample).tree], {"logprobs"}))["logprobs"][0][1]
    assert own.tolist() == pytest.approx(sample.logprobs, abs=0.2)
    await policy.close()


async def test_a_checkpoint_holds_the_adapter_alone_and_a_resume_makes_the_same_steps(
    checkpoint: Path, tmp_path: Path
) -> None:
    policy = open_policy(checkpoint)
    sample = await policy.sample(PROMPT, PARAMS)
    await policy.train([lesson(sample)])
    await policy.save(tmp_path / "step", training_state=True)
    assert not (tmp_path / "step" / "model.safetensors").exists()
    resumed = open_policy(checkpoint)
    await resumed.load(tmp_path / "step")
    for each in (policy, resumed):
        await each.train([lesson(sample)])
    ours, theirs = ([*each._learner.adapters.by_name["shared"].parameters()] for each in (policy, resumed))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert resumed.policy_version > 1
    await policy.close()
    await resumed.close()


async def test_the_saved_adapter_opens_as_a_model_here_and_in_transformers(checkpoint: Path, tmp_path: Path) -> None:
    policy = open_policy(checkpoint)
    sample = await policy.sample(PROMPT, PARAMS)
    for _ in range(3):
        await policy.train([lesson(sample)])
    await policy.save(tmp_path / "best")
    expected = await policy.score([lesson(sample).tree], {"logprobs"})
    await policy.close()
    opened = open_policy(tmp_path / "best", lora=None)
    found = await opened.score([lesson(sample).tree], {"logprobs"})
    assert found["logprobs"][0][1].tolist() == pytest.approx(expected["logprobs"][0][1].tolist())
    answer = await opened.sample(PROMPT, PARAMS)
    await opened.close()
    pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    ids = torch.tensor([[*PROMPT, *answer.token_ids]])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    chosen = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    assert chosen.tolist() == pytest.approx(answer.logprobs, abs=1e-3)


async def test_checkpoints_of_another_kind_are_refused_by_what_they_hold(checkpoint: Path, tmp_path: Path) -> None:
    adapter, full = open_policy(checkpoint), open_policy(checkpoint, lora=None)
    await adapter.save(tmp_path / "adapter", training_state=True)
    await full.save(tmp_path / "full", training_state=True)
    with pytest.raises(PolicyError, match="holds adapters, and all weights are trained here"):
        await full.load(tmp_path / "adapter")
    with pytest.raises(PolicyError, match=r"holds the adapters none, and \['shared'\] are trained here"):
        await adapter.load(tmp_path / "full")
    with pytest.raises(PolicyError, match="adapter 'writer', which this policy does not train; it trains 'shared'"):
        await adapter.train([lesson(await adapter.sample(PROMPT, PARAMS), adapter="writer")])
    await adapter.close()
    await full.close()


async def test_an_adapter_learns_ten_times_as_fast_unless_its_rate_is_set(checkpoint: Path) -> None:
    unset = open_policy(checkpoint, optimizer=OptimizerConfig(total_steps=9))
    weights = unset._model.num_parameters()
    assert unset._learner.updaters["shared"].optimizer.lr == pytest.approx(LR_FACTOR * default_lr(weights))
    assert unset._learner.updaters["shared"].optimizer.config.total_steps == 9
    await unset.close()
    own = open_policy(checkpoint, lora=Lora(r=4, optimizer=OptimizerConfig(lr=3e-3)))
    assert own._learner.updaters["shared"].optimizer.lr == 3e-3
    await own.close()


def test_settings_of_a_run_reach_the_policy() -> None:
    config = PolicyConfig.model_validate({"lora": {"r": 8, "alpha": 4, "targets": ["q_proj"]}})
    opened = policy_config(config, "model")
    assert opened.lora == Lora(r=8, alpha=4.0, targets=("q_proj",))
    for wrong in ({"r": 0}, {"rank": 8}, {"targets": []}, {"alpha": 0}):
        with pytest.raises(ValidationError):
            PolicyConfig.model_validate({"lora": wrong})


def test_shared_agents_have_a_common_adapter_where_others_need_the_weights_below() -> None:
    writer = Lora(r=2)
    assert adapters_of(None, {}) == {}
    assert adapters_of(None, {"a": "shared", "b": "shared"}) == {}
    assert adapters_of(Lora(r=3), {}) == {"shared": Lora(r=3)}
    assert adapters_of(None, {"writer": writer, "editor": "frozen"}) == {"writer": writer}
    assert adapters_of(None, {"writer": writer, "planner": "shared"}) == {"shared": Lora(), "writer": writer}
    assert adapters_of(Lora(r=3), {"planner": "shared", "editor": "frozen"}) == {"shared": Lora(r=3)}


def test_agents_that_leave_nothing_to_train_are_refused() -> None:
    with pytest.raises(ConfigError, match="freezes every agent, so there is nothing to train"):
        adapters_of(None, {"editor": "frozen"})
    with pytest.raises(ConfigError, match=r"no agent of .*'writer'.* is; make one"):
        adapters_of(Lora(), {"writer": Lora()})
    with pytest.raises(ConfigError, match="'base' is reserved"):
        adapters_of(None, {"base": Lora()})
