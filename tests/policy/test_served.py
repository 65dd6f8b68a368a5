"""A policy that learns here and is sampled from servers: what both have is the same, or the update fails."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import ValidationError
from safetensors import safe_open
from tests.support.model_server import END, ScriptedModelServer, logprob_of, next_token
from transformers import AutoModelForCausalLM

from agentlightning.config import TrainConfig
from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.engine.servers.config import ServedModel, ServersConfig
from agentlightning.engine.servers.pool import open_servers
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.models.tiny import make_tiny
from agentlightning.policy.base import Capabilities, UpdateOptions
from agentlightning.policy.config import Lora, PolicyConfig
from agentlightning.policy.open import with_servers
from agentlightning.policy.served import ServedPolicy
from agentlightning.run import with_absolute_paths
from agentlightning.testing import ByteChatFormat
from agentlightning.weight_sync.disk import CheckpointFolder


class Chat(ByteChatFormat):
    eos_token_ids = frozenset({END})


class Learner:
    """A policy whose answers are those of the scripted server with the weights it was given last."""

    model = "policy"
    context_length = 512
    vocab_size = None
    capabilities = Capabilities(in_flight=True)

    def __init__(self, server: ScriptedModelServer) -> None:
        self.chat = Chat()
        self.policy_version = 0
        self.server = server
        self.off = 0.0
        self.closed = False

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> Sample:
        tokens = [next_token(prompt[-1])]
        for _ in range(params.max_tokens - 1):
            tokens.append(next_token(tokens[-1]))
        logprobs = tuple(logprob_of(token, self.server.label) + self.off for token in tokens)
        return Sample(tuple(tokens), logprobs, "length", self.policy_version)

    async def train(self, samples: Sequence[Any], options: UpdateOptions) -> dict[str, float]:
        self.policy_version += 1
        return {"loss": 1.0, "token_budget": options.token_budget or 0}

    async def score(
        self, trees: Sequence[Any], what: set[str], *, reference: Path | None = None, adapter: str | None = None
    ) -> dict[str, Any]:
        return {name: [reference] for name in what}

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        directory.mkdir(parents=True)  # noqa: ASYNC240

    async def load(self, directory: Path, *, above: int = 0) -> None:
        self.policy_version = max(self.policy_version, above) + 1

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
async def server() -> AsyncIterator[ScriptedModelServer]:
    async with ScriptedModelServer() as server:
        yield server


@pytest.fixture
async def policy(server: ScriptedModelServer, tmp_path: Path) -> AsyncIterator[ServedPolicy]:
    learner: Any = Learner(server)
    policy = await ServedPolicy.open(learner, ServersConfig(urls=(server.url,)), tmp_path, dtype="float32")
    yield policy
    await policy.close()
    assert learner.closed


async def test_servers_begin_with_the_learners_weights_and_get_them_after_each_update(
    policy: ServedPolicy, server: ScriptedModelServer, tmp_path: Path
):
    assert server.weights == str(tmp_path / "weights" / "version-000000")
    for version in range(1, 5):
        figures = await policy.train([], UpdateOptions(token_budget=7))
        assert figures == {"loss": 1.0, "token_budget": 7, "server_difference": 0.0}
        assert server.weights == str(tmp_path / "weights" / f"version-{version:06d}")
        sample = await policy.sample([50], SamplingParams(max_tokens=3))
        assert policy.policy_version == sample.policy_version == version
    assert len(list((tmp_path / "weights").iterdir())) == 2
    await policy.load(tmp_path, above=39)
    assert (policy.policy_version, server.weights) == (40, str(tmp_path / "weights" / "version-000040"))


async def test_servers_sample_from_a_backend_of_ones_own(server: ScriptedModelServer, tmp_path: Path):
    learner: Any = Learner(server)
    settings = PolicyConfig(engine="vllm", servers=ServersConfig(urls=(server.url,)))
    policy = await with_servers(learner, settings, tmp_path, "bfloat16")
    try:
        assert (await policy.sample([50], SamplingParams(max_tokens=3))).policy_version == 0
    finally:
        await policy.close()


async def test_adapters_of_a_backend_that_cannot_give_them_to_servers_are_refused(
    server: ScriptedModelServer, tmp_path: Path
):
    learner: Any = Learner(server)
    learner.capabilities = Capabilities(adapters={"shared": Lora()})
    with pytest.raises(ConfigError, match="Learner trains adapters and saves none for model servers"):
        await ServedPolicy.open(learner, ServersConfig(urls=(server.url,)), tmp_path)


async def test_answers_are_sampled_while_the_learner_trains(policy: ServedPolicy):
    assert await policy.train_apart([], UpdateOptions(token_budget=7)) == {"loss": 1.0, "token_budget": 7}
    assert (policy.learner.policy_version, policy.policy_version) == (1, 0)
    assert (await policy.sample([50], SamplingParams(max_tokens=3))).policy_version == 0
    assert await policy.publish_update() == {"server_difference": 0.0}
    assert (await policy.sample([50], SamplingParams(max_tokens=3))).policy_version == policy.policy_version == 1


async def test_tokens_are_scored_by_the_learner(policy: ServedPolicy):
    assert await policy.score([], {"ref_logprobs"}, reference=Path("model")) == {"ref_logprobs": [Path("model")]}


async def test_servers_that_disagree_with_the_learner_end_the_run(policy: ServedPolicy):
    policy.learner.off = 0.02  # type: ignore[attr-defined]
    with pytest.raises(PolicyError, match=r"differ by 0.0200 from the trainer's \(tolerance 0.01\)"):
        await policy.train([])


async def test_without_in_flight_weights_never_change_during_an_answer(
    policy: ServedPolicy, server: ScriptedModelServer
):
    server.delay = 0.001
    seen: list[int] = []
    call = asyncio.create_task(policy.sample([50], SamplingParams(max_tokens=100), seen.extend))
    async with asyncio.timeout(10):
        while len(seen) < 5:  # noqa: ASYNC110  the server says it only by tokens
            await asyncio.sleep(0.002)
    with pytest.raises(PolicyError, match="1 answers are in flight"):
        await policy.train([])
    await policy.train([], in_flight=True)
    assert [version for version, _ in (await call).versions] == [0, 1]


async def test_a_policy_that_cannot_be_opened_leaves_no_server_behind(server: ScriptedModelServer, tmp_path: Path):
    learner: Any = Learner(server)
    learner.off = 1.0
    with pytest.raises(PolicyError, match="differ"):
        await ServedPolicy.open(learner, ServersConfig(urls=(server.url,)), tmp_path)
    assert len(asyncio.all_tasks()) == 1 or not any("model servers" in task.get_name() for task in asyncio.all_tasks())


async def test_runs_that_share_a_directory_for_weights_leave_each_others_alone(
    server: ScriptedModelServer, tmp_path: Path
):
    places: list[str] = []
    for run in ("one", "two", "one"):
        learner: Any = Learner(server)
        config = ServersConfig(urls=(server.url,), weights=str(tmp_path / "shared"))
        policy = await ServedPolicy.open(learner, config, tmp_path / run / "servers")
        assert server.weights is not None
        places.append(server.weights)
        for _ in range(3):
            await policy.train([])
        await policy.close()
        if run == "one":
            shutil.rmtree(Path(places[0]).parent)
    assert places[0] == places[2] != places[1]
    assert Path(places[0]).parent.parent == tmp_path / "shared"


def test_a_run_without_its_servers_is_rejected_at_the_start():
    config = TrainConfig(policy=PolicyConfig(engine="sglang"))
    with pytest.raises(ConfigError, match="sglang servers are joined, not started"):
        with_absolute_paths(config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"count": 2, "devices": ("0",)}, "devices names those of 1 servers, count=2"),
        ({"urls": ("http://x",), "args": ("--more",)}, "leave them out with urls"),
        ({"url": ("http://x",)}, "Extra inputs"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        ServersConfig(**settings)


async def test_servers_cannot_be_opened_without_what_they_need(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_SUCH", raising=False)
    for config, kind, words in (
        (ServersConfig(command="env"), "vllm", "no model to start servers with"),
        (ServersConfig(), "sglang", "sglang servers are joined, not started"),
        (ServersConfig(urls=("http://x",), token_env="NO_SUCH"), "vllm", "that environment variable is not set"),
    ):
        with pytest.raises(ConfigError, match=words):
            await open_servers(config, Chat(), kind=kind)


def test_a_run_can_be_resumed_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = ServersConfig(command="env/bin/vllm --x", weights="shared").with_absolute_paths()
    assert (config.command, config.weights) == (f"{tmp_path}/env/bin/vllm --x", str(tmp_path / "shared"))
    assert ServersConfig().with_absolute_paths() == ServersConfig()


@pytest.mark.parametrize("setting", [{"transfer": "nccl"}, {"weights": "/shared"}, {"tolerance": 0.5}])
def test_training_settings_are_rejected_for_served_models(setting: dict[str, Any]):
    with pytest.raises(ValidationError, match=f"{next(iter(setting))} is about new weights, and m is not trained"):
        ServedModel(model="m", servers=ServersConfig(**setting))


def test_started_servers_enable_adapters():
    adapters = {"a": "/a", "b": "/b"}
    started = ServedModel(model="m", adapters=adapters, servers=ServersConfig(args=("--x",))).with_adapters()
    assert started.args == ("--x", "--enable-lora", "--max-loras=2")
    joined = ServersConfig(urls=("http://x",))
    assert ServedModel(model="m", adapters=adapters, servers=joined).with_adapters() == joined
    assert ServedModel(model="m").with_adapters() == ServersConfig()


class Saved:
    """A model that is saved in files of a size."""

    policy_version = 3

    def __init__(self, model: Any, shard: str) -> None:
        self.saved, self.shard = model, shard

    async def score(
        self, trees: Sequence[Any], what: set[str], *, reference: Path | None = None, adapter: str | None = None
    ) -> dict[str, Any]:
        return {name: [reference] for name in what}

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        self.saved.save_pretrained(directory, max_shard_size=self.shard)


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
@pytest.mark.parametrize("tied", [True, False])
async def test_a_tied_output_layer_is_also_written_under_its_own_name(tmp_path: Path, shard: str, tied: bool):
    model = AutoModelForCausalLM.from_pretrained(make_tiny(tmp_path / "m", ["a b c"]), tie_word_embeddings=tied)
    policy: Any = Saved(model, shard)
    directory = await CheckpointFolder(tmp_path / "weights").write(policy)
    index = directory / "model.safetensors.index.json"
    assert index.exists() == (shard == "100KB")
    named = orjson.loads(index.read_bytes())["weight_map"] if index.exists() else {}
    extra = directory / "lm_head.safetensors"
    assert extra.exists() == tied
    if tied:
        with safe_open(extra, "pt") as tensors:
            assert tensors.get_tensor("lm_head.weight").equal(model.get_input_embeddings().weight)
        assert named.get("lm_head.weight", extra.name) == extra.name
