"""Weight transfer through NCCL to scripted servers: the protocol, failures and recovery."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.model_server import END, ScriptedModelServer, logprob_of, next_token

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.engine.servers.clients.vllm import VllmProcess
from agentlightning.engine.servers.config import RetryPolicy, ServersConfig
from agentlightning.engine.servers.pool import open_servers
from agentlightning.errors import ConfigError, PolicyError, ServerError
from agentlightning.policy.base import Capabilities
from agentlightning.policy.served import ServedPolicy
from agentlightning.testing import ByteChatFormat
from agentlightning.weight_sync import transfer as select
from agentlightning.weight_sync.transfer import UNIQUE_ID_BYTES, NcclSender, TransferError

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
    capabilities = Capabilities(in_flight=True, lends_weights=True)
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

    async def train(self, samples: Sequence[Any], options: Any) -> dict[str, float]:
        self.policy_version += 1
        return {"loss": 1.0}

    async def lend(self, use: Callable[[Any], None]) -> None:
        await asyncio.to_thread(use, WEIGHTS)

    async def score(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

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


async def test_workers_connect_once_and_get_all_weights_between_pause_and_resume(
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


async def test_each_server_has_its_own_nccl_group(server: ScriptedModelServer, library: Library, tmp_path: Path):
    async with ScriptedModelServer(receives=True) as other:
        policy = await open_policy(server, tmp_path, other)
        library.groups.sort(key=lambda group: len(group.sent))
        await policy.train([])
        assert sorted(library.ranks) == [2, 3]
        assert [len(group.sent) for group in library.groups] == [4, 4]
        assert server.label == other.label
        await policy.close()
        assert all(group.aborted.is_set() for group in library.groups)


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
async def test_a_failed_transfer_falls_back_to_disk_and_reconnects(
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


async def test_after_a_second_failed_transfer_the_disk_is_used(
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


async def test_a_failed_server_samples_nothing_until_it_has_caught_up(
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


async def test_a_stalled_transfer_fails(
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


async def test_a_server_that_recovers_between_updates_gets_the_current_weights(
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


async def test_changed_weights_are_not_written_under_the_old_version(policy: ServedPolicy, tmp_path: Path):
    changes = policy.generation
    await policy.train([])
    with pytest.raises(PolicyError, match="have changed since"):
        await policy.write(changes)
    learner: Any = policy.learner
    save = learner.save

    async def slowly(directory: Path) -> None:
        await save(directory)
        policy.generation += 1  # A step begins.

    learner.save = slowly
    with pytest.raises(PolicyError, match="have changed since"):
        await policy.write(policy.generation)
    assert not (tmp_path / "weights" / "version-000001").exists()


async def test_closing_does_not_wait_for_a_running_transfer(
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


async def test_a_server_without_transfer_support_is_named_with_a_remedy(library: Library, tmp_path: Path):
    async with ScriptedModelServer() as plain:
        with pytest.raises(ConfigError, match=r"not configured.*start it with --weight-transfer-config"):
            await open_policy(plain, tmp_path)


async def test_an_abort_before_connecting_ends_the_wait(library: Library):
    library.nobody.clear()
    sender = NcclSender(library, stall_seconds=20.0)
    sender.init_info(1)
    sender.abort()
    with pytest.raises(TransferError, match="aborted before"):
        sender.connect()
    library.nobody.set()
    with pytest.raises(TransferError, match="needs a new init_info"):
        sender.connect()


async def test_waiting_for_workers_times_out(
    server: ScriptedModelServer, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    library.nobody.clear()
    quick = NcclSender(library, stall_seconds=0.05)
    monkeypatch.setitem(select.SENDERS, "nccl", lambda device: quick)
    with pytest.raises(PolicyError, match=r"did not join within 0\.05 s"):
        await open_policy(server, tmp_path)
    library.nobody.set()


async def test_with_auto_a_server_that_cannot_connect_uses_the_disk(
    server: ScriptedModelServer, library: Library, caplog: pytest.LogCaptureFixture
):
    server.failures["/init_weight_transfer_engine"] = [500]
    config = ServersConfig(urls=(server.url,), transfer="auto")
    engine = await open_servers(config, Chat(), weights_change=True, transfer="nccl")
    assert engine.replicas[0].sender is None
    assert f"weights reach {server.url} through the disk" in caplog.text
    await engine.close()


# -- configuration ---------------------------------------------------------------------------------------------------


async def test_impossible_transports_are_rejected_before_servers_start(tmp_path: Path):
    with pytest.raises(ValidationError, match="choose one of disk, auto, nccl, ipc"):
        ServersConfig(transfer="rsync")
    learner: Any = Learner(ScriptedModelServer())
    config = ServersConfig(urls=("http://x",), transfer="nccl")
    with pytest.raises(ConfigError, match="sglang servers read"):
        await ServedPolicy.open(learner, config, tmp_path, kind="sglang")
    learner = object()
    with pytest.raises(ConfigError, match="does not lend its weights"):
        await ServedPolicy.open(learner, config, tmp_path)


async def test_started_servers_get_transfer_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Library):
    launches: list[VllmProcess] = []

    async def restart(process: VllmProcess, directory: Path | None) -> None:
        launches.append(process)
        raise ServerError("as far as this test goes")

    monkeypatch.setattr(VllmProcess, "restart", restart)
    for transfer in ("disk", "nccl", "ipc"):
        with pytest.raises(ServerError):
            await open_servers(ServersConfig(command="env"), Chat(), model=tmp_path, transfer=transfer)
    assert [launch.args for launch in launches] == [
        (),
        ('--weight-transfer-config={"backend": "nccl"}',),
        ('--weight-transfer-config={"backend": "ipc"}',),
    ]
    assert [dict(launch.env) for launch in launches] == [{}, {}, {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}]
