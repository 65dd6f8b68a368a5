"""Weights that come to a real vLLM from the trainer's memory: the whole protocol, with gloo where NCCL would be."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.engine.servers.clients.vllm import VllmProcess
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.errors import ConfigError
from agentlightning.policy.config import LocalPolicyConfig, OptimizerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.served import ServedPolicy
from agentlightning.trajectory import Node, TokenTree, TrainingSample
from agentlightning.transport import Transport
from agentlightning.weight_sync import transfer as select
from agentlightning.weight_sync.transfer import UNIQUE_ID_BYTES, NcclSender, TransferError

NEAR = 1e-3
HERE = Path(__file__).parent
BUFFER_BYTES = 1
"""So that each tensor travels by itself."""
LONG = 900
PATIENCE = datetime.timedelta(seconds=60)


class GlooLibrary:
    """The other end of `gloo_engine.py`: what `NcclSender` calls of NCCL, over gloo. After `breaks_after` runs of
    tensors a group breaks, unless that is None; `sent` counts them."""

    def __init__(self) -> None:
        self.breaks_after: int | None = None
        self.sent = 0
        self.groups = 0
        self._store: dist.TCPStore | None = None

    def unique_id(self) -> bytes:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=PATIENCE, wait_for_workers=False)
        return f"127.0.0.1:{self._store.port}".encode().ljust(UNIQUE_ID_BYTES, b"\0")

    def join(self, unique_id: bytes, ranks: int) -> GlooCommunicator:
        assert self._store is not None
        group = dist.ProcessGroupGloo(self._store, 0, ranks, PATIENCE)
        group.allreduce([torch.zeros(1)]).wait()
        self.groups += 1
        return GlooCommunicator(self, group, self._store)


class GlooCommunicator:
    def __init__(self, library: GlooLibrary, group: dist.ProcessGroupGloo, store: dist.TCPStore) -> None:
        self._library, self._group, self._store = library, group, store
        self._aborted = threading.Event()

    def broadcast(self, data: torch.Tensor) -> None:
        library = self._library
        if library.breaks_after is not None and library.sent >= library.breaks_after:
            library.breaks_after = None
            raise TransferError("the group was told to break")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = self._group.broadcast([data], options)
        while not work.is_completed():
            if self._aborted.is_set():
                raise TransferError("the broadcast was aborted")
            time.sleep(0.001)
        library.sent += 1

    def abort(self) -> None:
        self._aborted.set()
        self._group = None  # Closes its connections: the other end's wait ends.


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that vLLM finds the plugin in."""
    folder = tmp_path_factory.mktemp("plugin")
    about = folder / "gloo_engine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gloo-engine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\ngloo = gloo_engine:register\n")
    (folder / "gloo_engine.py").write_text((HERE / "gloo_engine.py").read_text())
    return folder


@pytest.fixture(scope="module")
def receiver(
    vllm: str, models: list[Path], on_cpu: dict[str, str], plugin: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server that takes weights without the disk."""
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    args = ("--enforce-eager", '--weight-transfer-config={"backend": "nccl"}')
    env = {**on_cpu, "PYTHONPATH": os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])}

    async def start() -> VllmProcess:
        transport = Transport()
        try:
            process = VllmProcess(transport, models[0], "policy", log, (vllm,), args, env, "float32", 1024)
            await process.restart(None)
            return process
        finally:
            await transport.close()

    child = asyncio.run(start())
    yield child.url
    asyncio.run(child.close())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> GlooLibrary:
    library = GlooLibrary()
    courier = NcclSender(library, buffer_bytes=BUFFER_BYTES, stall_seconds=30.0)
    monkeypatch.setitem(select.SENDERS, "nccl", lambda device: courier)
    return library


def learner_of(model: Path) -> LocalPolicy:
    return LocalPolicy.open(LocalPolicyConfig(model=model, device="cpu", optimizer=OptimizerConfig(lr=3e-2)))


@pytest.fixture
async def policy(
    receiver: str, models: list[Path], library: GlooLibrary, tmp_path: Path
) -> AsyncIterator[ServedPolicy]:
    config = ServersConfig(urls=(receiver,), transfer="nccl")
    policy = await ServedPolicy.open(learner_of(models[0]), config, tmp_path, dtype="float32")
    yield policy
    await policy.close()


@pytest.fixture
def prompt(policy: ServedPolicy) -> list[int]:
    return policy.chat.encode(policy.chat.render([{"role": "user", "content": "What is 12 + 30?"}]))


async def learn(policy: ServedPolicy, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
    """An update that changes much."""
    sample = await policy.learner.sample(prompt, SamplingParams(max_tokens=8, seed=1))
    count = len(sample.token_ids)
    tree = TokenTree((Node(-1, tuple(prompt)), Node(0, sample.token_ids, True, sample.logprobs)))
    lesson = TrainingSample(tree, advantages=((), (1.0,) * count), weights=((), (1 / count,) * count))
    return dict(await policy.train([lesson], **options))


async def weights_of(policy: ServedPolicy) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = {}
    await policy.learner.lend(lambda weights: kept.update({name: each.clone() for name, each in weights.items()}))
    del kept["lm_head.weight"]  # The input embedding once more.
    return kept


def forward(policy: ServedPolicy, weights: dict[str, torch.Tensor], prompt: list[int], sample: Sample) -> torch.Tensor:
    tokens = torch.tensor([[*prompt, *sample.token_ids]])
    with torch.inference_mode():
        answer = torch.func.functional_call(policy.learner._model, weights, (tokens,))
    return answer.logits[0, len(prompt) - 1 : -1].float()


def difference(policy: ServedPolicy, weights: dict[str, torch.Tensor], prompt: list[int], sample: Sample) -> float:
    own = forward(policy, weights, prompt, sample).log_softmax(-1)
    drawn = own.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    return float((drawn - torch.tensor(sample.logprobs)).abs().max())


async def test_vllm_samples_from_the_trainers_weights_after_each_update(
    policy: ServedPolicy, library: GlooLibrary, prompt: list[int], tmp_path: Path
):
    greedy, far = SamplingParams(temperature=0, max_tokens=32), 0.0
    for version in range(1, 4):
        before, sent = await weights_of(policy), library.sent
        figures = await learn(policy, prompt)
        weights = await weights_of(policy)
        assert library.sent > sent + 10
        assert figures["server_difference"] < NEAR
        sample = await policy.sample(prompt, greedy)
        assert sample.policy_version == version
        assert sample.token_ids == tuple(forward(policy, weights, prompt, sample).argmax(-1).tolist())
        assert difference(policy, before, prompt, sample) > 10 * NEAR
        drawn = await policy.sample(prompt, SamplingParams(max_tokens=32, seed=version))
        far = max([far, *(difference(policy, weights, prompt, each) for each in (sample, drawn))])
    assert far < NEAR
    print(f"\nafter three transfers log-probabilities differ by at most {far}")  # noqa: T201
    assert library.groups == 1
    assert [entry.name for entry in (tmp_path / "weights").iterdir()] == ["version-000000"]


async def test_answers_continue_across_a_transfer_with_token_versions(policy: ServedPolicy, prompt: list[int]):
    ends = sorted(policy.chat.eos_token_ids)
    params = SamplingParams(logit_bias=tuple((end, -100.0) for end in ends), max_tokens=LONG)
    shown: list[int] = []
    going = asyncio.Event()

    def show(tokens: Sequence[int]) -> None:
        shown.extend(tokens)
        if len(shown) >= 20:
            going.set()

    calls = [asyncio.create_task(policy.sample(prompt, params, watch)) for watch in (show, None, None)]
    await asyncio.wait_for(going.wait(), 60)
    old = await weights_of(policy)
    await learn(policy, prompt, in_flight=True)
    new = await weights_of(policy)
    for sample in await asyncio.gather(*calls):
        assert [version for version, _ in sample.versions] == [0, 1]
        cut = sample.versions[0][1]
        for weights, part in ((old, slice(0, cut)), (new, slice(cut, None))):
            logits = forward(policy, weights, prompt, sample).clone()
            logits[:, ends] -= 100.0
            drawn = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            assert float((drawn - torch.tensor(sample.logprobs))[part].abs().max()) < NEAR


async def test_an_interrupted_transfer_leaves_no_trace_and_the_next_succeeds(
    policy: ServedPolicy, library: GlooLibrary, prompt: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "agentlightning")
    names = list(await weights_of(policy))
    (within,) = (index for index, name in enumerate(names) if name.endswith("layers.0.self_attn.q_proj.weight"))
    assert any(name.endswith("layers.0.self_attn.k_proj.weight") for name in names[:within])
    library.breaks_after = library.sent + within  # vLLM has a third of what is one tensor there.
    await learn(policy, prompt)
    assert "the group was told to break" in caplog.text
    assert "the group was told to break" in policy.servers.replicas[0].failure  # Nothing went wrong after it.
    assert (tmp_path / "weights" / "version-000001").is_dir()
    for groups in (1, 2):
        weights = await weights_of(policy)
        sample = await policy.sample(prompt, SamplingParams(max_tokens=32, seed=1))
        assert difference(policy, weights, prompt, sample) < NEAR
        assert library.groups == groups
        await learn(policy, prompt)


async def test_a_server_left_in_a_partial_update_can_be_joined(
    receiver: str, models: list[Path], library: GlooLibrary, tmp_path: Path
):
    for path in ("/pause?mode=keep", "/start_weight_update"):
        request = urllib.request.Request(receiver + path, method="POST")
        (await asyncio.to_thread(urllib.request.urlopen, request)).close()
    config = ServersConfig(urls=(receiver,), transfer="nccl")
    async with asyncio.timeout(60):
        policy = await ServedPolicy.open(learner_of(models[1]), config, tmp_path, dtype="float32")
    assert (policy.differences[-1] < NEAR, library.groups) == (True, 1)
    await policy.close()


async def test_a_server_without_transfer_support_is_named_before_training(
    server: str, models: list[Path], library: GlooLibrary, tmp_path: Path
):
    learner = learner_of(models[0])
    with pytest.raises(ConfigError, match="--weight-transfer-config"):
        await ServedPolicy.open(learner, ServersConfig(urls=(server,), transfer="nccl"), tmp_path, dtype="float32")
    await learner.close()
