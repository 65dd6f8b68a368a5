"""Adapters that learn here and are sampled from servers: who is answered by which version, whatever servers do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.model_server import END, ScriptedModelServer, logprob_of, next_token
from tests.support.waiting import until

from agentlightning.engine.base import AgentEngines, Sample, SamplingParams
from agentlightning.engine.servers.config import RetryPolicy, ServersConfig
from agentlightning.errors import ConfigError, PolicyError
from agentlightning.policy.base import Capabilities
from agentlightning.policy.config import LocalPolicyConfig, Lora, PolicyConfig, adapters_of
from agentlightning.policy.open import policy_config
from agentlightning.policy.served import ServedPolicy
from agentlightning.testing import ByteChatFormat

AGENTS: dict[str, Any] = {"writer": Lora(r=4), "critic/1": Lora(r=12), "editor": "frozen"}
PROMPT = [50]


class Chat(ByteChatFormat):
    eos_token_ids = frozenset({END})


class Learner:
    """A policy with adapters whose answers are those of the scripted server."""

    model = "policy"
    context_length = 512
    vocab_size = None

    def __init__(self, agents: dict[str, Any], lora: Lora | None = None) -> None:
        self.config = LocalPolicyConfig(model="base", agents=agents, lora=lora)
        self.capabilities = Capabilities(adapters=adapters_of(lora, agents))
        self.chat = Chat()
        self.changes = dict.fromkeys(self.capabilities.adapters, 0)
        self.off: dict[str | None, float] = {}

    @property
    def policy_version(self) -> int:
        return max(self.changes.values())

    supported_params = frozenset[str]()

    async def can_enforce(self, text: str) -> bool:
        return False

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> Sample:
        return await self.sample_adapter(None, prompt, params)

    def version_of(self, adapter: str | None) -> int:
        return 0 if adapter is None else self.changes[adapter]

    async def sample_adapter(self, adapter: str | None, prompt: Sequence[int], params: SamplingParams) -> Sample:
        tokens = [next_token(prompt[-1])]
        for _ in range((params.max_tokens or 1) - 1):
            tokens.append(next_token(tokens[-1]))
        logprobs = tuple(logprob_of(token, "default") + self.off.get(adapter, 0.0) for token in tokens)
        return Sample(tuple(tokens), logprobs, "length", 0)

    async def score(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    save = score

    async def train(self, samples: Sequence[str], options: Any) -> dict[str, float]:
        """`samples` are the names of the adapters that change."""
        self.changes |= dict.fromkeys(samples, self.policy_version + 1)
        return {"loss": 1.0}

    async def load(self, directory: Path, *, above: int = 0) -> None:
        self.changes = dict.fromkeys(self.changes, max(self.policy_version, above) + 1)

    async def save_adapter(self, name: str, directory: Path) -> None:
        directory.mkdir(parents=True)  # noqa: ASYNC240
        (directory / "adapter_model.safetensors").write_text(name)

    async def close(self) -> None: ...


@asynccontextmanager
async def opened(
    folder: Path, *servers: ScriptedModelServer, learner: Learner | None = None, kind: Any = "vllm", **config: Any
) -> AsyncIterator[Any]:
    urls = tuple(server.url for server in servers)
    served: Any = learner or Learner(AGENTS)
    policy = await ServedPolicy.open(served, ServersConfig(urls=urls, **config), folder, kind=kind, dtype="float32")
    for server in servers:
        server.calls.clear()
    try:
        yield policy
    finally:
        await policy.close()


@pytest.fixture(autouse=True)
def quick_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = property(lambda config: RetryPolicy(wait_seconds=5.0, health_seconds=0.05))
    monkeypatch.setattr(ServersConfig, "retry_policy", quick)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedModelServer]:
    async with ScriptedModelServer() as server:
        yield server


def loaded(server: ScriptedModelServer) -> list[str]:
    """What the server has, without the part of each name that tells runs apart."""
    return sorted(name.rpartition(".")[0] for name in server.adapters)


def asked(server: ScriptedModelServer) -> list[str]:
    """The models that the answers were asked of."""
    bodies = [body for _, body in server.calls if body and ("sampling_params" in body and len(body) > 2)]
    return [str(body.get("model") or body.get("lora_path")).rpartition(".")[0] or "base" for body in bodies]


async def ask(policy: Any, agent: str | None, tokens: int = 3) -> Sample:
    return await policy.for_agent(agent).sample(PROMPT, SamplingParams(max_tokens=tokens))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_each_agent_is_answered_by_the_newest_version_of_its_adapter(kind: Any, tmp_path: Path):
    async with ScriptedModelServer(dialect=kind) as server, opened(tmp_path, server, kind=kind) as policy:
        assert isinstance(policy, AgentEngines)
        assert loaded(server) == ["critic/1@0", "writer@0"]
        metrics = await policy.train(["writer"])
        assert (metrics["adapters_published"], metrics["publish_bytes"]) == (1, len("writer"))
        assert metrics["publish_seconds"] > 0
        assert metrics["server_difference"] == 0.0
        server.calls.clear()
        for agent, version in {"writer": 1, "critic/1": 0, "editor": 0, "unlisted": 0}.items():
            assert (await ask(policy, agent)).policy_version == version
        assert asked(server) == ["writer@1", "critic/1@0", "base", "base"]
        assert policy.versions == {"policy": 0, "policy:writer": 1, "policy:critic/1": 0}
        assert policy.policy_version == 1
        await until(lambda: loaded(server) == ["critic/1@0", "writer@1"])
        assert not {"/pause", "/pause_generation"} & set(server.paths()), "no call waits"
    assert not server.adapters, "a server that goes on has none of them left"


async def test_an_adapter_of_the_whole_policy_answers_every_agent(server: ScriptedModelServer, tmp_path: Path):
    async with opened(tmp_path, server, learner=Learner({}, Lora(r=4))) as policy:
        await policy.train(["shared"])
        assert (await policy.sample(PROMPT, SamplingParams(max_tokens=1))).policy_version == 1
        assert asked(server)[-1] == "shared@1"


async def test_a_call_ends_on_the_version_it_began_with(server: ScriptedModelServer, tmp_path: Path):
    async with opened(tmp_path, server) as policy:
        server.delay = 0.005
        call = asyncio.create_task(ask(policy, "writer", 100))
        await until(lambda: server.running == 1)
        with pytest.raises(PolicyError, match="1 answers are in flight"):
            await policy.train(["writer"])
        await policy.train(["writer"], in_flight=True)
        assert (await ask(policy, "writer")).policy_version == 1
        assert "writer@0" in loaded(server)
        files = tmp_path / "weights" / "adapter-1"
        assert len(list(files.iterdir())) == 2
        sample = await call
        assert (sample.policy_version, sample.versions, len(sample.token_ids)) == (0, (), 100)
        await until(lambda: loaded(server) == ["critic/1@0", "writer@1"])
        await until(lambda: [each.name for each in files.iterdir()] == ["version-000001"])


async def test_a_call_continues_on_another_server_with_the_version_it_began_with(tmp_path: Path):
    async with ScriptedModelServer() as one, ScriptedModelServer() as two, opened(tmp_path, one, two) as policy:
        one.delay = two.delay = 0.005
        call = asyncio.create_task(ask(policy, "writer", 60))
        await until(lambda: one.running + two.running == 1)
        first, second = (one, two) if one.running else (two, one)
        await policy.train(["writer"], in_flight=True)
        first.restart()
        await until(lambda: bool(asked(second)) and asked(second)[-1] == "writer@0")
        sample = await call
        assert (len(sample.token_ids), sample.policy_version) == (60, 0)
        assert sample.token_ids[:3] == (51, 52, 53)
        await until(lambda: loaded(first) == loaded(second) == ["critic/1@0", "writer@1"])


async def test_a_server_that_was_started_again_gets_the_current_adapters(server: ScriptedModelServer, tmp_path: Path):
    async with opened(tmp_path, server) as policy:
        await policy.train(["writer", "critic/1"])
        server.restart()
        assert (await ask(policy, "writer")).policy_version == 1
        assert loaded(server) == ["critic/1@1", "writer@1"]


async def test_a_server_that_was_away_during_an_update_samples_once_it_has_it(tmp_path: Path):
    async with ScriptedModelServer() as one, ScriptedModelServer() as two, opened(tmp_path, one, two) as policy:
        two.failures["/v1/load_lora_adapter"] = [500, 500]
        await policy.train(["writer"])
        assert not policy.servers.replicas[1].up
        await until(lambda: policy.servers.replicas[1].up)
        await until(lambda: loaded(one) == loaded(two) == ["critic/1@0", "writer@1"])


async def test_a_checkpoint_that_is_loaded_reaches_the_servers(server: ScriptedModelServer, tmp_path: Path):
    async with opened(tmp_path, server) as policy:
        await policy.load(tmp_path, above=39)
        assert policy.versions["policy:writer"] == 40
        await until(lambda: loaded(server) == ["critic/1@40", "writer@40"])


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_without_lora_is_refused_with_the_option_it_lacks(kind: Any, tmp_path: Path):
    async with ScriptedModelServer(dialect=kind) as good, ScriptedModelServer(dialect=kind, lora=False) as bad:
        with pytest.raises(ConfigError, match=r"takes no adapters .*start it with --enable-lora"):
            async with opened(tmp_path, good, bad, kind=kind):
                pass


@pytest.mark.parametrize(("name", "words"), [(None, "must serve the model below"), ("writer", "with an adapter")])
async def test_a_server_that_disagrees_is_found_out(name: Any, words: str, server: ScriptedModelServer, tmp_path: Path):
    learner = Learner(AGENTS)
    learner.off[name] = 0.02
    with pytest.raises(PolicyError, match=f"differ by 0.0200 .*{words}"):
        async with opened(tmp_path, server, learner=learner):
            pass


def test_started_servers_are_told_of_the_adapters():
    started = ServersConfig(args=("--x",)).with_lora(2, 12)
    assert started.args == ("--x", "--enable-lora", "--max-lora-rank=16", "--max-loras=4")
    own = ServersConfig(args=("--max-loras=9", "--enable-lora")).with_lora(2, 4)
    assert own.args == ("--max-loras=9", "--enable-lora", "--max-lora-rank=8")
    joined = ServersConfig(urls=("http://x",))
    assert joined.with_lora(2, 12) == joined
    assert ServersConfig().with_lora(0, 0) == ServersConfig()


def test_adapters_that_servers_cannot_take_are_refused_before_anything_starts():
    def check(r: int, **servers: Any) -> None:
        settings = PolicyConfig(lora=Lora(r=r), engine="vllm", servers=ServersConfig(**servers))
        policy_config(settings, "model")

    with pytest.raises(ConfigError, match='transfer="nccl" is for all weights'):
        check(4, transfer="nccl")
    with pytest.raises(ConfigError, match="r=600 is more than the 512 that vLLM serves"):
        check(600)
    check(4, transfer="auto")
