"""A policy that two processes train is the policy that one process trains."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models import tiny_checkpoint
from tests.support.ranks import ranks_of
from transformers import AutoModelForCausalLM

from agentlightning.engine.base import SamplingParams
from agentlightning.errors import ConfigError, PolicyError, RankError
from agentlightning.models.tiny import make_tiny
from agentlightning.policy.base import Policy, UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, Lora
from agentlightning.policy.open import open_policy
from agentlightning.trajectory import Node, TokenTree, TrainingSample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("fsdp") / "model")


def samples(seed: int, trees: int = 5) -> list[TrainingSample]:
    found: list[TrainingSample] = []
    for number in range(trees):
        answers = [
            tuple((seed * 31 + number * 7 + i * 5 + k) % 250 for k in range(2 + (number + i) % 4)) for i in range(3)
        ]
        nodes = [Node(0, a, True, (-3.0,) * len(a), f"{number}.{i}", f"c{i}") for i, a in enumerate(answers)]
        columns: dict[str, Sequence[Any]] = {
            "advantages": [(), *((i - 1.0,) * len(a) for i, a in enumerate(answers))],
            "weights": [(), *((1 / trees / 3 / len(a),) * len(a) for a in answers)],
        }
        found.append(TrainingSample(TokenTree((Node(-1, (1, 2, 3, number)), *nodes)), columns=columns))
    return found


def config(model: Path, ranks: int | None, **settings: Any) -> LocalPolicyConfig:
    divided = {} if ranks is None else {"kind": "fsdp", "processes": ranks, "rank_timeout_seconds": 300}
    given = {"optimizer": {"lr": 1e-3}, **divided, **settings}
    return LocalPolicyConfig.model_validate({"model": str(model), "device": "cpu", **given})


@pytest.fixture
async def opened() -> AsyncIterator[Any]:
    policies: list[Policy] = []

    async def open_one(*given: Any, **settings: Any) -> Policy:
        policies.append(await open_policy(config(*given, **settings)))
        return policies[-1]

    yield open_one
    for policy in policies:
        await policy.close()


async def answers(policy: Policy) -> list[Any]:
    return [await policy.sample((1, 2, n), GREEDY) for n in range(3)]


@pytest.mark.parametrize("broken", [("2.1",), ("0.0", "3.2"), ("1.0", "1.1", "1.2")])
async def test_the_ranks_agree_which_rollouts_are_not_finite(model: Path, opened: Any, broken: tuple[str, ...]) -> None:
    """Finite numbers whose loss is not: only a gradient shows it, which the ranks compute together. Each of them has
    another order of sets of strings."""

    def column(sample: TrainingSample, name: str, value: float) -> list[Any]:
        pairs = zip(sample.tree.nodes, sample.columns[name], strict=True)
        return [(value,) * len(own) if node.rollout_id in broken else own for node, own in pairs]

    batch = [
        TrainingSample(
            s.tree, columns={"advantages": column(s, "advantages", 3e38), "weights": column(s, "weights", 1)}
        )
        for s in samples(0, trees=4)
    ]
    metrics = []
    for ranks in (None, 2):
        policy = await opened(model, ranks, optimizer={"lr": 1e-3, "clip_norm": None})
        metrics.append(await policy.train(batch, UpdateOptions(loss="importance")))
    assert [m["rollouts_not_finite"] for m in metrics] == [len(broken)] * 2
    assert [m["optimizer_steps"] for m in metrics] == [1.0, 1.0]
    assert metrics[1]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=1e-4)


async def assert_same(one: Policy, several: Policy) -> None:
    """The same answers, with the same probabilities."""
    for own, other in zip(await answers(one), await answers(several), strict=True):
        assert own.token_ids == other.token_ids
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-4)


SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"optimizer": {"lr": 1e-3, "warmup_steps": 16}},
    "lora": {"lora": Lora(r=4)},
    "muon": {"optimizer": {"type": "muon", "lr": 1e-3}},
    "critic": {"value_head": "linear"},
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_it_learns_what_one_process_learns_and_continues_on_another_number(
    model: Path, tmp_path: Path, opened: Any, name: str
) -> None:
    settings = SETTINGS[name]
    one, several = await opened(model, None, **settings), await opened(model, 2, **settings)
    assert several.capabilities.separate
    await assert_same(one, several)
    loss = ["ppo", "value"] if name == "critic" else "ppo"
    columns = ("returns", "values") if name == "critic" else ()
    for step in range(2):
        batch = [
            TrainingSample(s.tree, columns={**s.columns, **dict.fromkeys(columns, s.advantages)}) for s in samples(step)
        ]
        options = UpdateOptions(loss=loss, minibatches=2, token_budget=40, average=0.5)
        expected, found = await one.train(batch, options), await several.train(batch, options)
        assert found["idle_ranks"] == 0
        for metric in ("loss", "grad_norm", "entropy", "tokens_trained", "optimizer_steps", "lr"):
            assert found[metric] == pytest.approx(expected[metric], rel=1e-4), metric
        await assert_same(one, several)
    assert several.policy_version == one.policy_version == 2
    await several.save(tmp_path / "checkpoint", training_state=True)
    trees = [sample.tree for sample in samples(7)]
    what = {"logprobs", "entropy", "average_logprobs"}
    expected, found = await one.score(trees, what), await several.score(trees, what)
    for column in what:
        for own, other in zip(expected[column], found[column], strict=True):
            for here, there in zip(own, other, strict=True):
                assert there == pytest.approx(here, abs=1e-3)

    await several.close()
    resumed = await opened(model, 1 if name == "lora" else 3, **settings)
    await resumed.load(tmp_path / "checkpoint")
    assert resumed.policy_version == 3
    await assert_same(one, resumed)
    last = samples(9)
    expected, found = (
        await one.train(last, UpdateOptions(average=0.5)),
        await resumed.train(last, UpdateOptions(average=0.5)),
    )
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert found["lr"] == expected["lr"]
    await assert_same(one, resumed)


async def test_a_reference_is_read_while_answers_are_sampled_and_the_policy_is_saved(
    model: Path, tmp_path: Path, opened: Any
) -> None:
    one, several = await opened(model, None), await opened(model, 2)
    reference = tiny_checkpoint(tmp_path / "reference", seed=3)
    trees = [sample.tree for sample in samples(7)]
    expected = await one.score(trees, {"ref_logprobs"}, reference=reference)
    found, _, sampled = await asyncio.gather(
        several.score(trees, {"ref_logprobs"}, reference=reference),
        several.save(tmp_path / "saved", training_state=True),
        answers(several),
    )
    for own, other in zip(expected["ref_logprobs"], found["ref_logprobs"], strict=True):
        for here, there in zip(own, other, strict=True):
            assert there == pytest.approx(here, abs=1e-3)
    assert [each.token_ids for each in sampled] == [each.token_ids for each in await answers(one)]


async def test_bfloat16_over_two_processes_learns_what_one_process_learns(
    model: Path, tmp_path: Path, opened: Any
) -> None:
    """Both have float32 masters. Passes differ by the rounding of bfloat16, far less than the weights move."""
    settings = {"dtype": "bfloat16", "optimizer": {"lr": 1e-2}}
    policies = {"one": await opened(model, None, **settings), "several": await opened(model, 2, **settings)}
    for step in range(4):
        expected, found = [await each.train(samples(step)) for each in policies.values()]
        for metric in ("loss", "grad_norm", "entropy"):
            assert found[metric] == pytest.approx(expected[metric], rel=0.05, abs=0.01), metric
    weights: dict[str, list[torch.Tensor]] = {}
    for name, policy in policies.items():
        await policy.save(tmp_path / name)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")
        assert saved.dtype == torch.bfloat16
        weights[name] = [each.float() for each in saved.parameters()]
    start = [each.bfloat16().float() for each in AutoModelForCausalLM.from_pretrained(model).parameters()]
    apart, moved = _distance(weights["one"], weights["several"]), _distance(weights["one"], start)
    print(f"bfloat16: apart {apart:.3g}, moved {moved:.3g}")  # noqa: T201
    assert apart < 0.1 * moved


def _distance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    return torch.cat([(a - b).flatten() for a, b in zip(one, other, strict=True)]).norm().item()


async def test_only_the_trainer_holds_the_whole_model_while_ranks_start(tmp_path: Path, opened: Any) -> None:
    peaks: dict[int, list[int]] = {}
    for hidden in (64, 768):
        made = make_tiny(tmp_path / str(hidden), (), hidden_size=hidden, layers=2 if hidden == 64 else 12, heads=8)
        policy = await opened(made, 4)
        peaks[hidden] = [_peak_bytes(rank.pid) for rank in ranks_of(os.getpid())]
        await policy.close()
    whole = (tmp_path / "768" / "model.safetensors").stat().st_size
    others = [large - small for large, small in zip(peaks[768], peaks[64], strict=True)]
    print(f"MiB: model {whole >> 20}, ranks {[each >> 20 for each in others]}")  # noqa: T201
    assert len(others) == 3
    assert max(others) < 0.7 * whole, "a quarter, a layer, the embeddings, and buffers"


def _peak_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


async def test_masters_are_float32_where_bfloat16_is_sampled(model: Path, tmp_path: Path, opened: Any) -> None:
    settings = {"dtype": "bfloat16", "optimizer": {"lr": 1e-5}}
    one, several = await opened(model, None, **settings), await opened(model, 2, **settings)
    for step in range(3):  # Each far smaller than the distance of two values in bfloat16.
        expected, found = await one.train(samples(step)), await several.train(samples(step))
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    await several.save(tmp_path / "bf16", training_state=True)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto")
    assert saved.dtype == torch.bfloat16
    await several.close()
    resumed = await opened(model, 1, **settings)
    await resumed.load(tmp_path / "bf16")
    for number in range(12):
        await resumed.train(samples(number))
        await one.train(samples(number))
    before, after = AutoModelForCausalLM.from_pretrained(model), tmp_path / "after"
    await resumed.save(after)
    moved = AutoModelForCausalLM.from_pretrained(after, dtype=torch.float32)
    changed = [
        (a != b.bfloat16().float()).float().mean() for a, b in zip(moved.parameters(), before.parameters(), strict=True)
    ]
    assert max(changed) > 0.01


async def test_a_first_small_update_moves_bfloat16_weights_as_in_one_process(
    model: Path, tmp_path: Path, opened: Any
) -> None:
    start = [each.bfloat16().float() for each in AutoModelForCausalLM.from_pretrained(model).parameters()]
    changed: list[float] = []
    for processes in (None, 2):
        policy = await opened(model, processes, dtype="bfloat16", optimizer={"lr": 1e-5})
        await policy.train(samples(0))
        await policy.save(tmp_path / str(processes))
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / str(processes), dtype=torch.float32).parameters()
        changed.append(torch.cat([(a != b).flatten() for a, b in zip(saved, start, strict=True)]).float().mean().item())
    assert changed[0] > 0.001
    assert changed[1] == pytest.approx(changed[0], rel=0.1)


async def test_what_it_refuses_and_how_it_ends(model: Path, tmp_path: Path, opened: Any) -> None:
    policy = await opened(model, 2)
    with pytest.raises(ConfigError, match="minibatches=0"):
        await policy.train(samples(0), UpdateOptions(minibatches=0))
    with pytest.raises(PolicyError, match="'nobody'"):
        await policy.train([TrainingSample(s.tree, columns=s.columns, adapter="nobody") for s in samples(0)])
    few = await policy.train(samples(0, trees=1))
    assert (few["idle_ranks"], few["rank_imbalance"]) == (1, 2)

    local = await opened(model, None)
    await local.save(tmp_path / "local", training_state=True)
    with pytest.raises(PolicyError, match=r'saved by policy.kind = "local"'):
        await policy.load(tmp_path / "local")
    await policy.save(tmp_path / "ours", training_state=True)
    with pytest.raises(PolicyError, match=r'saved by policy.kind = "fsdp"'):
        await local.load(tmp_path / "ours")
    await policy.save(tmp_path / "before", training_state=True)
    part = next((tmp_path / "ours" / "ranks").glob("__*"))
    part.write_bytes(part.read_bytes()[:100])
    before = await answers(policy)
    with pytest.raises(PolicyError, match="choose an earlier checkpoint"):
        await policy.load(tmp_path / "ours")
    assert await answers(policy) == before
    await policy.train(samples(1))

    (killed,) = ranks_of(os.getpid())
    killed.kill()
    named = f"rank 1 of 2 .process {killed.pid} on .* was killed by SIGKILL during 'train'.* when it is resumed"
    with pytest.raises(RankError, match=named):
        await policy.train(samples(2))
    with pytest.raises(RankError, match=named):
        await policy.score([samples(0)[0].tree], {"logprobs"})
    assert not ranks_of(os.getpid())
    await policy.close()
    resumed = await opened(model, 2)
    await resumed.load(tmp_path / "before")
    assert [each.logprobs for each in await answers(resumed)] == [each.logprobs for each in before]
