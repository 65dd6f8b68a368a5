"""What a policy on a server of the Tinker API promises: the updates of a local policy, refusals by name, a resume."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.waiting import until

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.errors import ConfigError, PolicyError, UnfaithfulSampleError
from agentlightning.policy.base import UpdateOptions
from agentlightning.policy.config import LocalPolicyConfig, Lora, OptimizerConfig, TinkerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.losses import PPOLoss
from agentlightning.trajectory import Node, TokenTree, TrainingSample
from agentlightning_tinker import session
from agentlightning_tinker.policy import TinkerPolicy

from .conftest import open_remote, policy_settings

PROMPT = tuple(range(5, 25))
PARAMS = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("key", "impatient"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "POLL_SECONDS", 0.5)
    monkeypatch.setattr(session, "CLOSE_SECONDS", 0.3)


def lesson(first: Sample, second: Sample, *, advantage: float = 1.0, **node: Any) -> TrainingSample:
    """A rollout of two calls, the second of which continues the first."""
    nodes = (
        Node(-1, PROMPT),
        Node(0, first.token_ids, True, first.logprobs, "ro", "one", **node),
        Node(1, (7, 8, 9)),
        Node(2, second.token_ids, True, second.logprobs, "ro", "two", **node),
    )
    sizes = [len(each.token_ids) * each.sampled for each in nodes]
    total = sum(sizes)
    advantages = [tuple(advantage * (1 - 0.1 * i) for i in range(size)) for size in sizes]
    return TrainingSample(TokenTree(nodes), advantages, [(1.0 / total,) * size for size in sizes])


async def samples_of(policy: LocalPolicy) -> list[TrainingSample]:
    found = []
    for seed, advantage in ((1, 1.0), (2, -0.7)):
        params = SamplingParams(max_tokens=8, seed=seed, ignore_eos=True)
        first = await policy.sample(PROMPT, params)
        second = await policy.sample((*PROMPT, *first.token_ids, 7, 8, 9), params)
        found.append(lesson(first, second, advantage=advantage))
    return found


LOSSES = ["importance", "ppo", "cispo", "nll", "gspo", "dppo", {"type": "ppo", "dual_clip": 3.0}, ["ppo", "nll"]]


async def test_updates_are_those_of_a_local_policy_for_every_loss_of_logprobs(model: Path, serving: Any) -> None:
    async with serving() as server:
        local = LocalPolicy.open(policy_settings(model, lora=Lora(r=4, alpha=32)))
        remote = await open_remote(model, server)
        samples = await samples_of(local)
        trees = [each.tree for each in samples]
        for loss in LOSSES:
            own, other = [await each.train(samples, UpdateOptions(loss=loss)) for each in (local, remote)]
            for name in ("loss", "grad_norm", "ratio", "clip_fraction", "approx_kl", "nll", "lr", "tokens_trained"):
                if name in own:
                    assert other[name] == pytest.approx(own[name], abs=1e-5, rel=1e-5), (loss, name)
            scores = [(await each.score(trees, {"logprobs"}))["logprobs"] for each in (local, remote)]
            for mine, theirs in zip(*scores, strict=True):
                for a, b in zip(mine, theirs, strict=True):
                    assert b.tolist() == pytest.approx(a.tolist(), abs=2e-4), loss
        assert remote.policy_version == local.policy_version == len(LOSSES)
        assert (await remote.sample(PROMPT, SamplingParams(temperature=0, max_tokens=4))).token_ids == (
            await local.sample(PROMPT, SamplingParams(temperature=0, max_tokens=4))
        ).token_ids
        await local.close()
        await remote.close()


class Doubled(PPOLoss):
    """A loss of a user's own."""

    type: str = "doubled"

    def __call__(self, tokens: Any) -> Any:
        value = super().__call__(tokens)
        return replace(value, loss=2 * value.loss)


async def test_a_loss_derived_from_one_of_the_api_is_computed_as_it_says(model: Path, serving: Any) -> None:
    async with serving() as server:
        local = LocalPolicy.open(policy_settings(model, lora=Lora(r=4, alpha=32)))
        remote = await open_remote(model, server)
        samples = await samples_of(local)
        own, other = [await each.train(samples, UpdateOptions(loss=Doubled())) for each in (local, remote)]
        for name in ("loss", "grad_norm"):
            assert other[name] == pytest.approx(own[name], abs=1e-5, rel=1e-5), name
        await local.close()
        await remote.close()


async def test_a_correction_and_minibatches_act_as_they_do_here(model: Path, serving: Any) -> None:
    async with serving() as server:
        local = LocalPolicy.open(policy_settings(model, lora=Lora(r=4, alpha=32)))
        remote = await open_remote(model, server)
        samples = await samples_of(local)
        columns = [tuple(values + 0.3 for values in map(_array, s.tree.nodes)) for s in samples]
        samples = [
            TrainingSample(s.tree, s.advantages, s.weights, proximal_logprobs=column)
            for s, column in zip(samples, columns, strict=True)
        ]
        options = UpdateOptions(loss="ppo", mismatch="truncate", minibatches=2, lr_factor=0.5)
        own, other = [await each.train(samples, options) for each in (local, remote)]
        for name in ("loss", "mismatch_weight", "optimizer_steps", "lr", "grad_norm"):
            assert other[name] == pytest.approx(own[name], abs=1e-5, rel=1e-5), name
        await local.close()
        await remote.close()


def _array(node: Node) -> Any:
    import numpy as np

    return np.asarray(node.logprobs, np.float32)


async def test_reference_log_probabilities_are_those_of_the_model_below(model: Path, serving: Any) -> None:
    async with serving() as server:
        local = LocalPolicy.open(policy_settings(model, lora=Lora(r=4, alpha=32)))
        remote = await open_remote(model, server)
        samples = await samples_of(local)
        await remote.train(samples)
        columns = (await remote.score([samples[0].tree], {"ref_logprobs"}))["ref_logprobs"][0]
        assert columns[1].tolist() == pytest.approx(samples[0].tree.nodes[1].logprobs, abs=1e-4)
        await local.close()
        await remote.close()


async def test_what_the_api_lacks_is_refused_by_name(model: Path, serving: Any, tmp_path: Path) -> None:
    async with serving() as server:
        remote = await open_remote(model, server)
        sample = await remote.sample(PROMPT, PARAMS)
        good = lesson(sample, sample)
        for loss in ("entropy", "value"):
            with pytest.raises(ConfigError, match=loss):
                await remote.train([good], UpdateOptions(loss=["ppo", loss]))
        with pytest.raises(UnfaithfulSampleError, match=r"temperature=0\.7"):
            await remote.train([lesson(sample, sample, temperature=0.7)])
        with pytest.raises(PolicyError, match="'writer'"):
            await remote.train([TrainingSample(good.tree, good.advantages, good.weights, adapter="writer")])
        with pytest.raises(ConfigError, match="moving average"):
            await remote.train([good], UpdateOptions(average=0.1))
        with pytest.raises(PolicyError, match="entropy"):
            await remote.score([good.tree], {"entropy"})
        with pytest.raises(PolicyError, match="reference"):
            await remote.score([good.tree], {"ref_logprobs"}, reference=tmp_path)
        with pytest.raises(ConfigError, match="min_p"):
            await remote.sample(PROMPT, SamplingParams(min_p=0.1))
        assert remote.policy_version == 0, "nothing was trained"
        await remote.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lora": None}, "policy.lora"),
        ({"lora": Lora(r=4, alpha=8)}, "policy.lora.alpha"),
        ({"lora": Lora(r=4, targets=("q_proj",))}, "policy.lora.targets"),
        ({"agents": {"writer": Lora(r=4)}}, "algorithm.agents"),
        ({"value_head": "linear"}, "policy.value_head"),
        ({"optimizer": OptimizerConfig(type="muon", lr=1e-3)}, "muon"),
        ({"optimizer": OptimizerConfig()}, "algorithm.optimizer.lr"),
    ],
)
async def test_settings_that_the_api_lacks_are_refused_by_name(
    model: Path, serving: Any, changes: dict[str, Any], named: str
) -> None:
    async with serving() as server:
        with pytest.raises(ConfigError, match=named):
            await open_remote(model, server, **changes)


async def test_requests_that_waited_while_the_process_stood_still_do_not_take_the_server_for_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, answers = [0.0], [True]
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(session, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(session, "_is_alive", lambda url: answers[0])
    waiting = session.TinkerSession(TinkerConfig(url="http://hub", unreachable_seconds=60), None, "tiny")
    request = asyncio.create_task(waiting._result("sample", lambda: SimpleNamespace(future=Future)))
    await asyncio.sleep(0.05)
    clock[0] = 600.0
    await until(lambda: waiting._alive == 600.0)
    assert not request.done()
    answers[0] = False
    await until(lambda: waiting._silent == 600.0)
    clock[0] = 700.0
    with pytest.raises(PolicyError, match="was unreachable for 100 s"):
        await request
    await waiting.close()


async def test_a_run_goes_on_after_the_server_was_started_again(model: Path, serving: Any, tmp_path: Path) -> None:
    async with serving() as server:
        remote, uninterrupted = [await open_remote(model, server) for _ in range(2)]
        sample = await remote.sample(PROMPT, PARAMS)
        data = [lesson(sample, sample)]
        for policy in (remote, uninterrupted):
            await policy.train(data)
        await remote.save(tmp_path / "checkpoint", training_state=True)
        await uninterrupted.train(data)
        expected = (await uninterrupted.score([data[0].tree], {"logprobs"}))["logprobs"][0]
        port = server.port
    with pytest.raises(PolicyError, match=r"unreachable|cannot be reached"):
        await remote.train(data)
    await remote.close()
    async with serving(port) as server:
        with pytest.raises(PolicyError, match="unknown"):
            await uninterrupted.train(data)
        await uninterrupted.close()
        resumed = await open_remote(model, server)
        await resumed.load(tmp_path / "checkpoint")
        assert resumed.policy_version == 2
        await resumed.train(data)
        found = (await resumed.score([data[0].tree], {"logprobs"}))["logprobs"][0]
        assert found[1].tolist() == pytest.approx(expected[1].tolist(), abs=1e-5), "weights and optimiser"
        with pytest.raises(PolicyError, match="no checkpoint"):
            await resumed.load(tmp_path)
        for damaged in ("[]", "{}", "{"):
            await asyncio.to_thread((tmp_path / "tinker.json").write_text, damaged)
            with pytest.raises(PolicyError, match="no checkpoint"):
                await resumed.load(tmp_path)
        await resumed.close()


async def test_closing_stops_the_heartbeats_though_the_server_is_gone(model: Path, serving: Any) -> None:
    async with serving() as server:
        remote = await open_remote(model, server)
        heartbeats = remote._session._service._session_holder._session_heartbeat_task
        assert not heartbeats.done()
    await remote.close()
    for _ in range(200):
        if heartbeats.done():
            return
        await asyncio.sleep(0.05)
    pytest.fail("the heartbeats go on")


async def test_closing_holds_up_nothing_while_the_package_still_makes_its_session() -> None:
    made, waited = threading.Event(), list[bool]()
    service = SimpleNamespace(close=lambda status: waited.append(made.wait(5)))
    await session.TinkerSession(TinkerConfig(), service, "tiny").close()
    assert not waited
    made.set()


async def test_a_wrong_key_a_missing_one_and_a_server_that_is_none_are_said_so(
    model: Path, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as server:
        monkeypatch.setenv("TINKER_API_KEY", "tml-wrong")
        with pytest.raises(ConfigError, match="refuses the key in TINKER_API_KEY"):
            await open_remote(model, server)
        monkeypatch.setenv("TINKER_API_KEY", "wrong")
        with pytest.raises(ConfigError, match="does not begin with tml-"):
            await open_remote(model, server)
        monkeypatch.delenv("TINKER_API_KEY")
        with pytest.raises(ConfigError, match="is not set"):
            await open_remote(model, server)
        url = server.url
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret")
    with pytest.raises(PolicyError, match="no server of the Tinker API answers"):
        await TinkerPolicy.open(policy_settings(model), TinkerConfig(url=url))


async def test_an_unknown_model_names_those_that_are_there(model: Path, serving: Any) -> None:
    async with serving() as server:
        with pytest.raises(PolicyError, match="there are tiny"):
            await TinkerPolicy.open(policy_settings(model), TinkerConfig(url=server.url, base_model="other"))


def test_the_settings_reach_the_policy() -> None:
    from agentlightning.policy.config import PolicyConfig

    with pytest.raises(ValueError, match="a model that the server has"):
        PolicyConfig(kind="tinker")
    with pytest.raises(ValueError, match="vllm"):
        PolicyConfig(kind="tinker", model="x", engine="vllm")
    assert PolicyConfig(kind="tinker", model="x", tinker={"base_model": "y"}).tinker.base_model == "y"
    assert LocalPolicyConfig(model="x").lora is None
