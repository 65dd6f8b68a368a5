"""Weights without the disk: what servers are told and sent, and what holds when it goes wrong half-way."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import threading
import types
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.engine.servers.clients.vllm_process import LaunchOptions, VllmProcess
from agentlightning.engine.servers.config import RetryPolicy, ServersConfig
from agentlightning.engine.servers.open import open_servers
from agentlightning.errors import ConfigError, PolicyError, ServerError
from agentlightning.models.checkpoint import named_weights
from agentlightning.policy.served import ServedPolicy
from agentlightning.testing.model_server import END, ScriptedModelServer, logprob_of, next_token
from agentlightning.testing.scripted_engine import ByteChatFormat
from agentlightning.weight_sync import select
from agentlightning.weight_sync._libnccl import UNIQUE_ID_BYTES, NcclLibrary
from agentlightning.weight_sync.base import TransferError, as_bytes, manifest, num_bytes, pack_over
from agentlightning.weight_sync.cuda_ipc import CudaIpcSender, CudaMemory, pack_within
from agentlightning.weight_sync.disk import CheckpointFolder
from agentlightning.weight_sync.nccl import NcclSender

WEIGHTS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,  # Not contiguous.
    "c.bias": torch.ones(()),
    "d.weight": torch.arange(5, dtype=torch.float32),
}
GIVE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache", "/resume"]
JOIN = ["/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]
READ = ["/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache", "/resume"]
FORGET = ["/finish_weight_update", "/collective_rpc"]


class Chat(ByteChatFormat):
    eos_token_ids = frozenset({END})


class Learner:
    """A policy that lends `WEIGHTS`; its answers are those of the scripted server with the weights given last."""

    model = "policy"
    context_length = 512
    vocab_size = None
    can_update_in_flight = True
    device = "cpu"

    def __init__(self, server: ScriptedModelServer) -> None:
        self.chat = Chat()
        self.policy_version = 0
        self.server = server
        self.saved: list[int] = []

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> Sample:
        tokens = [next_token(prompt[-1])]
        for _ in range(params.max_tokens - 1):
            tokens.append(next_token(tokens[-1]))
        logprobs = tuple(logprob_of(token, self.server.label) for token in tokens)
        return Sample(tuple(tokens), logprobs, "length", self.policy_version)

    async def train(self, samples: Sequence[Any], **options: Any) -> dict[str, float]:
        self.policy_version += 1
        return {"loss": 1.0}

    async def lend(self, use: Callable[[Any], None]) -> None:
        await asyncio.to_thread(use, WEIGHTS)

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        directory.mkdir(parents=True)  # noqa: ASYNC240
        self.saved.append(self.policy_version)

    async def close(self) -> None:
        pass


class Group:
    """The trainer's place in a group without anybody else."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.aborted = threading.Event()
        self.blocks = False

    def broadcast(self, data: torch.Tensor) -> None:
        assert data.dtype == torch.uint8
        if self.blocks:
            assert self.aborted.wait(20)
        if self.aborted.is_set():
            raise TransferError("the broadcast was aborted")
        self.sent.append(data.numpy().tobytes())

    def abort(self) -> None:
        self.aborted.set()


class Library:
    """What opens groups, in order; `nobody`: the workers never come."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.ranks: list[int] = []
        self.ids = 0
        self.nobody = threading.Event()
        self.nobody.set()
        self.blocks = False

    def unique_id(self) -> bytes:
        self.ids += 1
        return bytes([self.ids]) * UNIQUE_ID_BYTES

    def join(self, unique_id: bytes, ranks: int) -> Group:
        assert unique_id in [bytes([each]) * UNIQUE_ID_BYTES for each in range(1, self.ids + 1)]
        assert self.nobody.wait(20)
        self.ranks.append(ranks)
        self.groups.append(Group())
        self.groups[-1].blocks = self.blocks
        return self.groups[-1]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Servers are reached through it, each by a sender of its own."""
    library = Library()
    monkeypatch.setitem(select.SENDERS, "nccl", lambda device: NcclSender(library, buffer_bytes=50, stall_seconds=5.0))
    monkeypatch.setattr(ServersConfig, "retry_policy", RetryPolicy(health_seconds=0.05, wait_seconds=10.0))
    return library


@pytest.fixture
async def server() -> AsyncIterator[ScriptedModelServer]:
    async with ScriptedModelServer(receives=True, workers=2) as server:
        yield server


async def open_policy(server: ScriptedModelServer, tmp_path: Path, *more: ScriptedModelServer) -> ServedPolicy:
    learner: Any = Learner(server)
    config = ServersConfig(urls=tuple(each.url for each in (server, *more)), transfer="nccl")
    return await ServedPolicy.open(learner, config, tmp_path, dtype="float32")


@pytest.fixture
async def policy(server: ScriptedModelServer, library: Library, tmp_path: Path) -> AsyncIterator[ServedPolicy]:
    policy = await open_policy(server, tmp_path)
    yield policy
    await policy.close()


def paths(server: ScriptedModelServer) -> list[str]:
    """Of the calls that change something, since it was asked last."""
    found = [path for path in server.paths() if "generate" not in path]
    server.calls.clear()
    return found


def received(server: ScriptedModelServer, group: Group) -> dict[str, torch.Tensor]:
    """What the server makes of what it was told and sent."""
    (told,) = server.received
    rest = b"".join(group.sent)
    found: dict[str, torch.Tensor] = {}
    for name, dtype, shape in zip(told["names"], told["dtype_names"], told["shapes"], strict=True):
        kind = getattr(torch, dtype)
        count = torch.Size(shape).numel() * torch.empty(0, dtype=kind).element_size()
        found[name] = torch.frombuffer(bytearray(rest[:count]), dtype=kind).reshape(shape)
        rest = rest[count:]
    assert not rest
    return found


# -- what is sent ----------------------------------------------------------------------------------------------------


async def test_workers_are_invited_once_and_get_all_weights_between_pause_and_resume(
    policy: ServedPolicy, server: ScriptedModelServer, library: Library, tmp_path: Path
):
    assert paths(server) == [*JOIN, *GIVE]
    assert server.invited == {
        "nccl_unique_id_b64": base64.b64encode(bytes([1]) * UNIQUE_ID_BYTES).decode(),
        "rank_offset": 1,
        "world_size": 3,
        "packed": True,
        "packed_buffer_size_bytes": 50,
        "packed_num_buffers": 2,
    }
    for version in range(1, 4):
        library.groups[0].sent.clear()
        figures = await policy.train([])
        assert paths(server) == GIVE
        assert [len(run) for run in library.groups[0].sent] == [60, 24]  # Each ends with what makes it more than 50.
        for name, tensor in received(server, library.groups[0]).items():
            assert tensor.equal(WEIGHTS[name]), name
        assert figures["server_difference"] == 0.0
        sample = await policy.sample([50], SamplingParams(max_tokens=2))
        assert sample.policy_version == policy.policy_version == version
    assert (library.ranks, policy.learner.saved) == ([3], [0])


class Call:
    """A function of a C library."""

    def __init__(self, name: str, calls: list[tuple[Any, ...]], result: int = 0) -> None:
        self.name, self.calls, self.result = name, calls, result

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append((self.name, *arguments))
        return b"invalid usage" if self.name == "ncclGetErrorString" else self.result


class NcclOnPaper:
    """libnccl, as far as its declarations go: no GPU is needed to see what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Call:
        function = Call(name, self.calls)
        setattr(self, name, function)
        return function


def test_nccl_is_called_as_its_header_declares(monkeypatch: pytest.MonkeyPatch):
    paper, zeros = NcclOnPaper(), torch.zeros
    stream = types.SimpleNamespace(cuda_stream=77, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    library: Any = paper
    nccl = NcclLibrary(library, "cuda:0")
    unique_id = nccl.unique_id()
    assert len(unique_id) == UNIQUE_ID_BYTES
    group = nccl.join(unique_id, 3)
    data = torch.arange(7, dtype=torch.uint8)
    group.broadcast(data)
    group.abort()
    with pytest.raises(TransferError, match="aborted"):
        group.broadcast(data)
    (got, joined, summed, sent) = paper.calls[:4]
    assert got[0] == "ncclGetUniqueId"
    assert (joined[0], joined[2], bytes(joined[3]), joined[4]) == ("ncclCommInitRank", 3, unique_id, 0)
    assert (summed[0], summed[3:6], summed[7]) == ("ncclAllReduce", (1, 7, 0), 77)  # One float, summed up.
    where = data.data_ptr()
    assert (sent[0], sent[1:6], sent[7]) == ("ncclBroadcast", (where, where, 7, 1, 0), 77)  # Bytes, from rank 0.
    paper.ncclGetUniqueId.result = 5
    with pytest.raises(TransferError, match="ncclGetUniqueId: invalid usage"):
        nccl.unique_id()


async def test_each_server_has_a_group_of_its_own(server: ScriptedModelServer, library: Library, tmp_path: Path):
    async with ScriptedModelServer(receives=True) as other:
        policy = await open_policy(server, tmp_path, other)
        library.groups.sort(key=lambda group: len(group.sent))
        await policy.train([])
        assert sorted(library.ranks) == [2, 3]
        assert [len(group.sent) for group in library.groups] == [4, 4]
        assert server.label == other.label
        await policy.close()
        assert all(group.aborted.is_set() for group in library.groups)


sizes = st.lists(st.integers(0, 40), max_size=30)


@given(sizes, st.integers(1, 60))
def test_tensors_are_cut_where_the_server_cuts(lengths: list[int], limit: int):
    tensors = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    runs = [[num_bytes(tensor) for tensor in run] for run in pack_over(tensors, limit)]
    assert [length for run in runs for length in run] == lengths
    assert all(sum(run) > limit for run in runs[:-1])
    assert all(sum(run[:-1]) <= limit for run in runs)


@given(sizes, st.integers(1, 60))
def test_a_shared_buffer_is_never_overfull_but_by_one_tensor(lengths: list[int], limit: int):
    weights = {str(index): torch.zeros(length, dtype=torch.uint8) for index, length in enumerate(lengths)}
    runs = list(pack_within(weights, limit))
    assert [name for run in runs for name in run] == list(weights)
    assert all(len(run) == 1 or sum(map(num_bytes, run.values())) <= limit for run in runs)


def test_what_a_server_is_told_of_tensors_has_their_order_types_and_shapes():
    assert manifest(WEIGHTS) == {
        "names": ["a.weight", "b.weight", "c.bias", "d.weight"],
        "dtype_names": ["float32", "bfloat16", "float32", "float32"],
        "shapes": [[3, 4], [3, 2], [], [5]],
    }
    assert as_bytes(WEIGHTS["b.weight"]).view(torch.bfloat16).tolist() == [0, 3, 1, 4, 2, 5]


def small(kind: type[PreTrainedConfig], **more: Any) -> PreTrainedConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(vocab_size=32, num_key_value_heads=1, **sizes, **more)


class Saved:
    """A model as a policy that is saved."""

    policy_version = 0

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        self.model.save_pretrained(directory)


@pytest.mark.parametrize(
    "config",
    [
        small(LlamaConfig, tie_word_embeddings=True),
        small(Qwen2Config, tie_word_embeddings=False),
        small(MixtralConfig, num_local_experts=2),  # Its experts are one tensor in memory and many in a checkpoint.
    ],
    ids=["tied", "untied", "experts"],
)
async def test_what_is_lent_is_what_a_checkpoint_holds(config: PreTrainedConfig, tmp_path: Path):
    model = AutoModelForCausalLM.from_config(config)
    lent = named_weights(model)
    saved: Any = Saved(model)
    directory = await CheckpointFolder(tmp_path).write(saved)
    written: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        written |= load_file(file)
    assert set(lent) == set(written)
    assert all(lent[name].equal(written[name]) for name in written)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert config.model_type == "mixtral" or {tensor.data_ptr() for tensor in lent.values()} == own  # Nothing copied.


class Shared:
    """One GPU, as far as `CudaIpcSender` knows."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.settled = self.collected = 0

    def allocate(self, size: int) -> torch.Tensor:
        self.buffers.append(torch.zeros(size, dtype=torch.uint8))
        return self.buffers[-1]

    def handle(self, buffer: torch.Tensor) -> dict[str, Any]:
        return {"GPU-1": ("a handle", len(buffer))}

    def synchronize(self) -> None:
        self.settled += 1

    def collect(self) -> None:
        self.collected += 1


def test_a_shared_buffer_is_filled_again_only_once_the_server_has_what_it_held():
    memory, told, found = Shared(), [], {}

    def tell(info: dict[str, Any]) -> Future[Any]:
        told.append(info)
        start = 0
        assert memory.settled == len(told)
        for name, dtype, shape, count in zip(
            info["names"], info["dtype_names"], info["shapes"], info["tensor_sizes"], strict=True
        ):
            part = memory.buffers[-1][start : start + count].clone()
            found[name] = part.view(getattr(torch, dtype)).reshape(shape)
            start += count
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    sender = CudaIpcSender(memory, buffer_bytes=62)
    with pytest.raises(TransferError, match="2 workers"):
        sender.init_info(2)
    assert sender.init_info(1) == {"packed": True}
    assert not sender.connected
    sender.connect()
    sender.send(WEIGHTS, tell)
    assert (sender.connected, memory.collected, len(memory.buffers), len(told)) == (True, 1, 1, 2)
    assert all(found[name].equal(tensor) for name, tensor in WEIGHTS.items())
    for info in told:
        assert pickle.loads(base64.b64decode(info["ipc_handles_pickled"])) == {"GPU-1": ("a handle", 62)}


def test_a_server_that_does_not_answer_for_a_shared_buffer_is_given_up():
    sender = CudaIpcSender(Shared(), stall_seconds=0.05)
    sender.connect()
    with pytest.raises(TransferError, match=r"accepted nothing for 0\.05 s"):
        sender.send(WEIGHTS, lambda info: Future())
    assert not sender.connected


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
async def test_a_server_where_a_transfer_fails_reads_the_disk_and_the_next_transfer_begins_anew(
    policy: ServedPolicy, server: ScriptedModelServer, library: Library, tmp_path: Path, path: str
):
    paths(server)
    server.failures[path] = [500]
    await policy.train([])
    assert server.weights == str(tmp_path / "weights" / "version-000001")
    assert not server.paused
    assert paths(server) == [*GIVE[: GIVE.index(path) + 1], *FORGET, *READ]
    assert library.groups[0].aborted.is_set()
    await policy.train([])
    assert paths(server) == [*JOIN, *GIVE]
    assert (server.weights, len(library.groups)) == (None, 2)
    sample = await policy.sample([50], SamplingParams(max_tokens=1))
    assert sample.logprobs == (logprob_of(51, server.label),)


async def test_after_a_second_failure_it_is_the_disk_for_the_rest_of_the_run(
    policy: ServedPolicy, server: ScriptedModelServer, caplog: pytest.LogCaptureFixture
):
    server.failures["/update_weights"] = [500, 500]
    await policy.train([])
    assert "from the disk from now on" not in caplog.text
    await policy.train([])
    assert "from the disk from now on" in caplog.text
    paths(server)
    await policy.train([])
    assert paths(server) == READ
    assert "scheduled failure" in caplog.text


async def test_one_that_fails_draws_nothing_until_it_has_what_the_other_has(
    server: ScriptedModelServer, library: Library, tmp_path: Path
):
    async with ScriptedModelServer(receives=True) as other:
        policy = await open_policy(server, tmp_path, other)
        other.failures["/update_weights"] = [500]
        other.failures["/collective_rpc"] = [500]
        await policy.train([])
        assert (server.weights, server.label) == (None, policy.servers.replicas[0].label)
        for number in range(20):
            sample = await policy.sample([50], SamplingParams(max_tokens=1), affinity=str(number))
            assert sample.policy_version == 1
        async with asyncio.timeout(10):
            while not policy.servers.replicas[1].up:  # noqa: ASYNC110  a server's state
                await asyncio.sleep(0.005)
        assert other.weights == str(tmp_path / "weights" / "version-000001")
        assert other.label == server.label
        await policy.close()


async def test_a_server_that_takes_nothing_is_given_up(
    server: ScriptedModelServer, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    quick = NcclSender(library, stall_seconds=0.1)
    monkeypatch.setitem(select.SENDERS, "nccl", lambda device: quick)
    policy = await open_policy(server, tmp_path)
    server.silent = True
    await policy.train([])
    assert server.weights == str(tmp_path / "weights" / "version-000001")
    assert "accepted nothing for 0.1 s" in policy.servers.replicas[0].failure
    server.silent, library.blocks = False, True
    await policy.train([])
    assert server.weights == str(tmp_path / "weights" / "version-000002")
    await policy.close()


async def test_a_server_that_comes_back_between_updates_reads_what_the_learner_still_has(
    policy: ServedPolicy, server: ScriptedModelServer, tmp_path: Path
):
    await policy.train([])
    assert policy.learner.saved == [0]
    server.restart()
    async with asyncio.timeout(10):
        while server.weights is None:  # noqa: ASYNC110  a server's state
            await asyncio.sleep(0.005)
    assert server.weights == str(tmp_path / "weights" / "version-000001")
    sample = await policy.sample([50], SamplingParams(max_tokens=1))
    assert (sample.policy_version, sample.logprobs) == (1, (logprob_of(51, server.label),))


async def test_weights_that_have_changed_since_are_not_written_under_the_old_name(policy: ServedPolicy, tmp_path: Path):
    changes = policy.generation
    await policy.train([])
    with pytest.raises(PolicyError, match="have changed since"):
        await policy.write(changes)
    learner: Any = policy.learner
    save = learner.save

    async def slowly(directory: Path) -> None:
        await save(directory)
        policy._generation += 1  # A step begins.

    learner.save = slowly
    with pytest.raises(PolicyError, match="have changed since"):
        await policy.write(policy.generation)
    assert not (tmp_path / "weights" / "version-000001").exists()


async def test_a_run_that_ends_in_the_middle_of_a_transfer_does_not_wait_for_it(
    policy: ServedPolicy, server: ScriptedModelServer, library: Library
):
    library.groups[0].blocks = True
    server.received.clear()
    training = asyncio.create_task(policy.train([]))
    async with asyncio.timeout(10):
        while not server.received:  # noqa: ASYNC110  a server's state
            await asyncio.sleep(0.005)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert library.groups[0].aborted.is_set()


# -- joining ---------------------------------------------------------------------------------------------------------


async def test_a_server_not_started_for_it_is_named_with_the_way_out(library: Library, tmp_path: Path):
    async with ScriptedModelServer() as plain:
        with pytest.raises(ConfigError, match=r"not configured.*start it with --weight-transfer-config"):
            await open_policy(plain, tmp_path)


async def test_a_refusal_that_comes_before_we_wait_for_the_workers_ends_the_wait(library: Library):
    library.nobody.clear()
    sender = NcclSender(library, stall_seconds=20.0)
    sender.init_info(1)
    sender.abort()
    with pytest.raises(TransferError, match="aborted before"):
        sender.connect()
    library.nobody.set()
    with pytest.raises(TransferError, match="needs a new init_info"):
        sender.connect()


async def test_workers_that_never_come_are_not_waited_for_for_ever(
    server: ScriptedModelServer, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    library.nobody.clear()
    quick = NcclSender(library, stall_seconds=0.05)
    monkeypatch.setitem(select.SENDERS, "nccl", lambda device: quick)
    with pytest.raises(PolicyError, match=r"did not join within 0\.05 s"):
        await open_policy(server, tmp_path)
    library.nobody.set()


async def test_where_the_way_was_chosen_for_the_user_a_server_that_cannot_join_reads_the_disk(
    server: ScriptedModelServer, library: Library, caplog: pytest.LogCaptureFixture
):
    server.failures["/init_weight_transfer_engine"] = [500]
    config = ServersConfig(urls=(server.url,), transfer="auto")
    engine = await open_servers(config, Chat(), weights_change=True, transfer="nccl")
    assert engine.replicas[0].channel is None
    assert f"weights reach {server.url} through the disk" in caplog.text
    await engine.close()


# -- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "devices", "visible", "way"),
    [
        ("cpu", ("0",), None, "disk"),
        ("cuda:0", (), None, "disk"),
        ("cuda:0", ("1", "2,3"), None, "nccl"),
        ("cuda", ("0",), None, "ipc"),
        ("cuda:0", ("0", "1"), None, "disk"),
        ("cuda:0", ("1, 0",), None, "disk"),
        ("cuda:1", ("0",), None, "nccl"),
        ("cuda:1", ("7",), "4,7", "ipc"),
        ("cuda:1", ("4",), "4,7", "nccl"),
    ],
)
def test_auto_goes_by_who_has_which_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, devices: tuple[str, ...], visible: str | None, way: str
):
    for name in select.SENDERS:
        monkeypatch.setitem(select.SENDERS, name, lambda device: object())
    monkeypatch.setenv(select.VISIBLE_DEVICES, visible) if visible else monkeypatch.delenv(
        select.VISIBLE_DEVICES, raising=False
    )
    assert select.select_transport("auto", device, devices) == way


def test_auto_is_the_disk_where_the_libraries_are_missing_and_a_way_by_name_is_refused():
    assert select.select_transport("auto", "cuda:0", ("1",)) == "disk"
    assert select.select_transport("disk", "cpu", ()) == "disk"
    for way in ("nccl", "ipc"):
        with pytest.raises(ConfigError, match=f'transfer="{way}" needs the trainer on a GPU, and it is on cpu'):
            select.select_transport(way, "cpu", ())
    for leaf in (NcclLibrary, CudaMemory):
        with pytest.raises(ConfigError, match="needs the trainer on a GPU"):
            leaf.open("cuda:0")


async def test_what_cannot_be_is_refused_before_anything_is_started(tmp_path: Path):
    with pytest.raises(ValidationError, match="choose one of disk, auto, nccl, ipc"):
        ServersConfig(transfer="rsync")
    learner: Any = Learner(ScriptedModelServer())
    config = ServersConfig(urls=("http://x",), transfer="nccl")
    with pytest.raises(ConfigError, match="sglang servers read"):
        await ServedPolicy.open(learner, config, tmp_path, kind="sglang")
    learner = object()
    with pytest.raises(ConfigError, match="does not lend its weights"):
        await ServedPolicy.open(learner, config, tmp_path)


async def test_servers_we_start_are_told_what_they_will_receive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Library
):
    launches: list[LaunchOptions] = []

    async def start(launch: LaunchOptions, transport: Any) -> None:
        launches.append(launch)
        raise ServerError("as far as this test goes")

    monkeypatch.setattr(VllmProcess, "start", start)
    for transfer in ("disk", "nccl", "ipc"):
        with pytest.raises(ServerError):
            await open_servers(ServersConfig(command="env"), Chat(), model=tmp_path, transfer=transfer)
    assert [launch.args for launch in launches] == [
        (),
        ('--weight-transfer-config={"backend": "nccl"}',),
        ('--weight-transfer-config={"backend": "ipc"}',),
    ]
    assert [dict(launch.env) for launch in launches] == [{}, {}, {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}]
