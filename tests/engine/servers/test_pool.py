"""What an engine over model servers promises: the right tokens whatever fails, and one set of weights for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.model_server import END, ScriptedModelServer, logprob_of, next_token
from tests.support.waiting import until

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.servers.clients.vllm import VllmServer
from agentlightning.engine.servers.config import RetryPolicy, ServersConfig
from agentlightning.engine.servers.pool import Replica, ReplicaPool, WeightSource, open_servers
from agentlightning.errors import ConfigError, ContextLengthError, PolicyError
from agentlightning.testing import ByteChatFormat
from agentlightning.transport import Transport
from agentlightning_sglang import SGLangServer

PROMPT = [40, 41, 42]


class Chat(ByteChatFormat):
    """Tokens below 200 are letters, so that stop strings can be made of them."""

    eos_token_ids = frozenset({END})


@asynccontextmanager
async def engine_of(*servers: ScriptedModelServer, weights_change: bool = True, **retry: Any) -> Any:
    transport = Transport()
    backend = SGLangServer if servers[0].dialect == "sglang" else VllmServer
    replicas = [Replica(backend(transport, server.url, seconds=5.0)) for server in servers]
    retry_policy = RetryPolicy(**{"wait_seconds": 5.0, "health_seconds": 0.05, **retry})
    engine = await ReplicaPool.open(
        replicas, Chat(), transport, retry_policy=retry_policy, weights_change=weights_change
    )
    for server in servers:
        server.calls.clear()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def one() -> AsyncIterator[ScriptedModelServer]:
    async with ScriptedModelServer() as server:
        yield server


@pytest.fixture
async def two() -> AsyncIterator[tuple[ScriptedModelServer, ScriptedModelServer]]:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(ScriptedModelServer())
        second = await stack.enter_async_context(ScriptedModelServer())
        yield first, second


def counted(start: int, count: int) -> tuple[int, ...]:
    tokens = [start]
    for _ in range(count):
        tokens.append(next_token(tokens[-1]))
    return tuple(tokens[1:])


def label_of(engine: ReplicaPool, version: int) -> str:
    """What the servers are told the weights of a version are called."""
    return next(label for label, known in engine.labels.items() if known == version)


def draws(server: ScriptedModelServer) -> list[Any]:
    return [body for path, body in server.calls if path in ("/inference/v1/generate", "/v1/completions", "/generate")]


# -- drawing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"generates": False}, {"dialect": "sglang"}], ids=["ids", "texts", "sglang"])
@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_and_log_probabilities_are_the_servers(options: Any, stream: bool):
    async with ScriptedModelServer(**options) as server, engine_of(server) as engine:
        server.ends_at = 6
        seen: list[int] = []
        params = SamplingParams(temperature=0.5, max_tokens=9, top_logprobs=2)
        sample = await engine.sample(PROMPT, params, seen.extend if stream else None)
        assert sample.token_ids == (*counted(42, 5), END)
        assert sample.logprobs == tuple(logprob_of(token, "default") for token in sample.token_ids)
        assert sample.finish_reason == "stop"
        assert [len(top) for top in sample.top_logprobs] == [2] * 6
        assert all(top[0][1] >= top[1][1] for top in sample.top_logprobs)
        assert tuple(seen) == (sample.token_ids if stream else ())
        cut = await engine.sample(PROMPT, SamplingParams(max_tokens=3))
        assert (cut.token_ids, cut.finish_reason) == (counted(42, 3), "length")


async def test_log_probabilities_are_streamed_on_request(one: ScriptedModelServer):
    async with engine_of(one) as engine:
        told: list[Any] = []
        params = SamplingParams(max_tokens=3, stream_logprobs=True, top_logprobs=2)
        sample = await engine.sample(PROMPT, params, lambda *values: told.append(values))  # type: ignore[arg-type]
        parts = [tuple(part for value in values for part in value) for values in zip(*told, strict=True)]
        assert parts == [sample.token_ids, sample.logprobs, sample.top_logprobs]


async def test_enforceable_schemas_are_probed_once(one: ScriptedModelServer):
    async with engine_of(one) as engine:
        assert await engine.can_enforce('{"type": "object"}')
        assert draws(one)[0]["sampling_params"]["structured_outputs"] == {"json": '{"type": "object"}'}
        one.failures["/inference/v1/generate"] = [400]
        assert not await engine.can_enforce('{"type": "of no kind"}')
        asked = len(draws(one))
        assert await engine.can_enforce('{"type": "object"}')
        assert not await engine.can_enforce('{"type": "of no kind"}')
        assert len(draws(one)) == asked
        assert await engine.can_enforce("start: x", "grammar")
        assert draws(one)[-1]["sampling_params"]["structured_outputs"] == {"grammar": "start: x"}
        one.failures["/inference/v1/generate"] = [400]
        assert not await engine.can_enforce("start: none", "grammar")


async def test_a_stream_leaves_its_connection_reusable(one: ScriptedModelServer):
    async with engine_of(one, health_seconds=60.0) as engine:
        for _ in range(5):
            await engine.sample(PROMPT, SamplingParams(max_tokens=3), lambda _: None)
        assert one.connections == 1


async def test_every_sampling_parameter_is_sent(one: ScriptedModelServer):
    async with engine_of(one) as engine:
        params = SamplingParams(0.7, 0.9, 5, 4, ("ab",), 11, 3, logit_bias=((7, 1.5),), min_p=0.1, presence_penalty=0.2)
        await engine.sample(PROMPT, params)
        sent = draws(one)[0]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["max_tokens"]) == (0.7, 0.9, 5, 4)
    assert (sent["stop"], sent["seed"], sent["stop_token_ids"]) == (["ab"], 11, [END])
    assert (sent["min_p"], sent["presence_penalty"], sent["logit_bias"]) == (0.1, 0.2, {"7": 1.5})
    assert sent["skip_special_tokens"] is False
    assert sent["repetition_penalty"] == 1.0


async def test_an_answer_without_a_limit_may_fill_the_context(one: ScriptedModelServer):
    one.context_length = 20
    async with engine_of(one) as engine:
        sample = await engine.sample(PROMPT, SamplingParams())
        assert (len(sample.token_ids), sample.finish_reason) == (17, "length")
        with pytest.raises(ContextLengthError, match="20 tokens and the context holds 20"):
            await engine.sample([5] * 20, SamplingParams())


async def test_a_server_with_a_smaller_context_still_raises_context_length_errors(one: ScriptedModelServer):
    async with engine_of(one) as engine:
        one.context_length = 20
        with pytest.raises(ContextLengthError, match="no room for an answer"):
            await engine.sample([5] * 30, SamplingParams())


@pytest.mark.parametrize(
    ("dialect", "params", "words"),
    [
        ("vllm", SamplingParams(temperature=0.001), "sample at 0.01 instead"),
        ("sglang", SamplingParams(top_p=0.9), "top_p=0.9"),
        ("sglang", SamplingParams(top_k=3), "top_k=3"),
    ],
)
async def test_unsupported_params_are_rejected(dialect: Any, params: SamplingParams, words: str):
    async with ScriptedModelServer(dialect=dialect) as server, engine_of(server) as engine:
        with pytest.raises(ConfigError, match=words):
            await engine.sample(PROMPT, params)
        assert not draws(server)


async def test_cancelling_a_call_frees_the_server(one: ScriptedModelServer):
    one.delay = 0.002
    async with engine_of(one) as engine:
        for watch in (None, lambda _: None):
            call = asyncio.create_task(engine.sample(PROMPT, SamplingParams(), watch))
            await until(lambda: one.running == 1)
            call.cancel()
            await until(lambda: one.running == 0)
            assert engine.in_flight == 0


# -- joining ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"raw": True}, "--logprobs-mode processed_logprobs"),
        ({"admin": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"token": "s3cret"}, "give the token"),
    ],
)
async def test_a_misconfigured_server_is_rejected_with_a_remedy(options: Any, words: str):
    async with ScriptedModelServer(**options) as server:
        with pytest.raises(ConfigError, match=words):
            await open_servers(ServersConfig(urls=(server.url,)), Chat(), weights_change=True)


@pytest.mark.parametrize("ties", [1, 2, 10])
async def test_tokens_that_are_equally_likely_are_no_misconfiguration(ties: int):
    async with ScriptedModelServer(ties=ties) as server:
        await open_servers(ServersConfig(urls=(server.url,)), Chat(), weights_change=True)


async def test_servers_of_different_models_are_no_replicas():
    async with ScriptedModelServer() as first, ScriptedModelServer(model="other") as second:
        with pytest.raises(ConfigError, match="different models"):
            await open_servers(ServersConfig(urls=(first.url, second.url)), Chat())


async def test_the_api_token_is_sent_but_never_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVERS", "s3cret")
    async with ScriptedModelServer(token="s3cret") as server:
        config = ServersConfig(urls=(server.url,), token_env="SERVERS", retries=0)
        engine = await open_servers(config, Chat(), name="mine")
        assert engine.model == "mine"
        server.failures["/inference/v1/generate"] = [500]
        with pytest.raises(PolicyError, match="500: scheduled failure") as failed:
            await engine.sample(PROMPT, SamplingParams(max_tokens=2))
        assert "s3cret" not in str(failed.value)
        await engine.close()


async def test_a_server_left_paused_is_resumed(one: ScriptedModelServer):
    one._pause(None)
    async with asyncio.timeout(5), engine_of(one) as engine:
        await engine.sample(PROMPT, SamplingParams(max_tokens=1))


# -- failures --------------------------------------------------------------------------------------------------------


async def test_calls_of_one_affinity_go_to_one_server_and_others_are_spread(two: Any):
    async with engine_of(*two) as engine:
        for _ in range(5):
            await engine.sample(PROMPT, SamplingParams(max_tokens=1), affinity="rollout/attempt")
        assert sorted(len(draws(server)) for server in two) == [0, 5]
        for number in range(30):
            await engine.sample(PROMPT, SamplingParams(max_tokens=1), affinity=f"rollout/{number}")
        assert min(len(draws(server)) for server in two) > 5


@pytest.mark.parametrize("watched", [False, True])
async def test_an_interrupted_answer_resumes_on_another_server(two: Any, watched: bool):
    async with engine_of(*two) as engine:
        for server in two:
            server.break_after = 4
        seen: list[int] = []
        params = SamplingParams(max_tokens=20, seed=3)
        sample = await engine.sample(PROMPT, params, seen.extend if watched else None)
        assert sample.token_ids == counted(42, 20)
        assert len(sample.logprobs) == 20
        assert tuple(seen) == (counted(42, 20) if watched else ())


async def test_retries_are_limited_and_the_error_names_the_cause(one: ScriptedModelServer):
    async with engine_of(one, retries=2) as engine:
        one.failures["/inference/v1/generate"] = [500, 503, 500]
        with pytest.raises(PolicyError, match="answered 500: scheduled failure"):
            await engine.sample(PROMPT, SamplingParams(max_tokens=1))
        one.failures["/inference/v1/generate"] = [500, 503]
        assert (await engine.sample(PROMPT, SamplingParams(max_tokens=1))).token_ids == counted(42, 1)


async def test_rejected_requests_are_not_retried(one: ScriptedModelServer):
    async with engine_of(one) as engine:
        one.failures["/inference/v1/generate"] = [400]
        with pytest.raises(ConfigError, match="cannot sample with these"):
            await engine.sample(PROMPT, SamplingParams(max_tokens=1))
        assert len(draws(one)) == 1


async def test_a_stop_string_is_found_across_two_servers(two: Any):
    async with engine_of(*two) as engine:
        for server in two:
            server.break_after = 3
        seen: list[int] = []
        stop = bytes(counted(97, 4)[1:]).decode()  # "cde", of which the first server draws "c"
        sample = await engine.sample([*b"a"], SamplingParams(stop=(stop,), max_tokens=30), seen.extend)
        # The scripted server knows no stop strings, so only the engine can have found it.
        assert bytes(sample.token_ids).endswith(stop.encode())
        assert (sample.finish_reason, tuple(seen)) == ("stop", sample.token_ids)
        assert len(sample.token_ids) < 10


async def test_calls_wait_for_a_server_and_then_fail_with_reasons():
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ScriptedModelServer())
        engine = await stack.enter_async_context(engine_of(server, wait_seconds=0.3))
        await server.__aexit__()
        with pytest.raises(PolicyError, match=r"no model server was up for 0.3 s .*connect"):
            await engine.sample(PROMPT, SamplingParams(max_tokens=1))


async def test_a_call_waits_for_recovery_when_the_last_server_fails(one: ScriptedModelServer):
    async with engine_of(one) as engine:
        call = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=3)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # it has seen that a server is up, and is about to choose
        engine.mark_unhealthy(engine.replicas[0], "a hiccup")
        assert (await asyncio.wait_for(call, 10)).token_ids == counted(PROMPT[-1], 3)


async def test_a_recovered_server_gets_the_newest_weights_first(tmp_path: Path):
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ScriptedModelServer())
        engine = await stack.enter_async_context(engine_of(server))
        await engine.set_weights(tmp_path / "one", 1)
        await server.__aexit__()
        call = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=2)))
        await until(lambda: not engine.replicas[0].up)
        again = await stack.enter_async_context(ScriptedModelServer(port=server.port))
        sample = await call
        assert (sample.policy_version, again.weights) == (1, str(tmp_path / "one"))
        assert sample.logprobs[0] == logprob_of(43, label_of(engine, 1))


async def test_calls_that_wait_for_a_server_end_with_the_pool():
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ScriptedModelServer())
        engine = await stack.enter_async_context(engine_of(server, wait_seconds=600.0))
        await server.__aexit__()
        call = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=1)))
        await until(lambda: not engine.up)
        await engine.close()
        with pytest.raises(PolicyError, match="was closed"):
            await asyncio.wait_for(call, 10)


# -- weights ---------------------------------------------------------------------------------------------------------


async def test_weights_load_while_sampling_is_paused_and_caches_are_dropped(two: Any, tmp_path: Path):
    async with engine_of(*two) as engine:
        await engine.set_weights(tmp_path, 1)
        for server in two:
            assert server.paths() == ["/pause", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache",
                                      "/resume"]  # fmt: skip
            assert (server.weights, server.label, server.paused) == (str(tmp_path), label_of(engine, 1), False)
            assert ("/pause?mode=keep", None) in server.calls
            assert ("/reset_prefix_cache?reset_running_requests=true", None) in server.calls
        assert engine.policy_version == 1
        assert (await engine.sample(PROMPT, SamplingParams(max_tokens=1))).policy_version == 1


@pytest.mark.parametrize(
    "options", [{}, {"labels": False}, {"dialect": "sglang"}], ids=["labels", "no labels", "sglang"]
)
async def test_answers_in_flight_continue_across_an_update_with_token_versions(options: Any, tmp_path: Path):
    async with ScriptedModelServer(**options) as server, engine_of(server) as engine:
        await engine.set_weights(tmp_path, 1)
        server.delay = 0.001
        seen: list[int] = []
        call = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=60), seen.extend))
        await until(lambda: len(seen) > 9)
        await engine.set_weights(tmp_path, 2)
        sample = await call
        assert sample.token_ids == counted(42, 60)
        assert [version for version, _ in sample.versions] == [1, 2]
        assert sum(count for _, count in sample.versions) == 60
        assert sample.policy_version == 2
        if server.label != "default":
            drawn_by = [label_of(engine, version) for version, count in sample.versions for _ in range(count)]
            expected = [logprob_of(token, label) for token, label in zip(sample.token_ids, drawn_by, strict=True)]
            assert list(sample.logprobs) == expected


async def test_an_answer_from_weights_that_another_process_has_just_given_waits_for_their_version(
    one: ScriptedModelServer,
):
    async with engine_of(one, weights_change=False) as engine:
        engine.announce_weights("default", 0)
        async with engine.lock:
            one.label = "next"
            call = asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=3)))
            await until(lambda: len(draws(one)) == 1 and one.running == 0)
            await asyncio.sleep(0.05)
            assert not call.done()
            engine.announce_weights("next", 7)
            await engine.update_replicas()
        sample = await asyncio.wait_for(call, 10)
        assert (sample.policy_version, len(draws(one))) == (7, 1)


async def test_a_server_that_cannot_load_weights_samples_nothing_until_it_can(two: Any, tmp_path: Path):
    bad, good = two
    async with engine_of(*two) as engine:
        await engine.set_weights(tmp_path, 1)
        bad.delay = good.delay = 0.001
        calls = [asyncio.create_task(engine.sample(PROMPT, SamplingParams(max_tokens=300))) for _ in range(4)]
        await until(lambda: bad.running > 0 and good.running > 0)
        bad.failures["/collective_rpc"] = [500, 500, 500]
        await engine.set_weights(tmp_path, 2)
        samples = await asyncio.gather(*calls)
        assert all(sample.token_ids == counted(42, 300) for sample in samples)
        await until(lambda: all(replica.up for replica in engine.replicas))
        assert bad.label == good.label == label_of(engine, 2)
        assert not bad.paused


async def test_a_server_without_its_weights_on_disk_gets_them_later(two: Any, tmp_path: Path):
    asked = 0

    async def write() -> Path:
        """The disk is full when it is asked first."""
        nonlocal asked
        asked += 1
        if asked == 1:
            raise PolicyError("the disk is full")
        return tmp_path

    async with engine_of(*two) as engine:
        await engine.set_weights(WeightSource(write), 1)
        assert engine.policy_version == 1
        await until(lambda: all(replica.up and replica.version == 1 for replica in engine.replicas))


async def test_a_failed_restart_is_retried(one: ScriptedModelServer):
    class Program:
        """Cannot write its log the first time."""

        ended = True
        starts = 0

        async def restart(self, directory: Path | None) -> None:
            self.starts += 1
            if self.starts == 1:
                raise OSError(28, "No space left on device")
            self.ended = False

        async def close(self) -> None: ...

    async with engine_of(one) as engine:
        engine.replicas[0].process = program = Program()
        await until(lambda: engine.replicas[0].up and not program.ended)
        assert program.starts == 2


async def test_an_update_that_no_server_accepts_fails(one: ScriptedModelServer, tmp_path: Path):
    async with engine_of(one, wait_seconds=0.2) as engine:
        one.failures["/collective_rpc"] = [500] * 100
        with pytest.raises(PolicyError, match="no model server was up"):
            await engine.set_weights(tmp_path, 1)


async def test_answers_of_a_restarted_server_are_discarded(one: ScriptedModelServer, tmp_path: Path):
    async with engine_of(one, health_seconds=60.0) as engine:
        await engine.set_weights(tmp_path, 1)
        one.restart()
        sample = await engine.sample(PROMPT, SamplingParams(max_tokens=2))
        assert sample.logprobs == tuple(logprob_of(token, label_of(engine, 1)) for token in sample.token_ids)
        assert one.weights == str(tmp_path)


async def test_health_checks_detect_a_restarted_server(one: ScriptedModelServer, tmp_path: Path):
    async with engine_of(one) as engine:
        await engine.set_weights(tmp_path, 1)
        one.restart()
        await until(lambda: one.label == label_of(engine, 1) and engine.replicas[0].up)


# -- adapters --------------------------------------------------------------------------------------------------------


async def test_an_adapter_is_an_engine_of_its_own_on_every_server(two: Any, tmp_path: Path):
    async with engine_of(*two) as engine:
        adapter = await engine.load_adapter("critic", tmp_path / "a")
        assert [server.adapters for server in two] == [{"critic": str(tmp_path / "a")}] * 2
        sample = await adapter.sample(PROMPT, SamplingParams(max_tokens=2), affinity="r/a")
        assert (adapter.model, sample.policy_version) == ("critic", 0)
        assert [body["model"] for server in two for body in draws(server)] == ["critic"]
        await engine.load_adapter("critic", tmp_path / "b")
        assert (adapter.policy_version, (await adapter.sample(PROMPT, SamplingParams(max_tokens=1))).policy_version) == (1, 1)  # fmt: skip  # noqa: E501
        await engine.unload_adapters()
        assert not two[0].adapters
        with pytest.raises(ConfigError, match="no adapter 'critic' is loaded"):
            await adapter.sample(PROMPT, SamplingParams(max_tokens=1))


async def test_a_server_that_cannot_load_an_adapter_is_evicted_until_it_can(two: Any, tmp_path: Path):
    bad = two[0]
    async with engine_of(*two) as engine:
        bad.failures["/v1/load_lora_adapter"] = [500, 500]
        adapter = await engine.load_adapter("critic", tmp_path)
        assert (await adapter.sample(PROMPT, SamplingParams(max_tokens=1))).token_ids == counted(42, 1)
        await until(lambda: "critic" in bad.adapters and all(replica.up for replica in engine.replicas))
        for server in two:
            server.failures["/v1/load_lora_adapter"] = [404]
        with pytest.raises((PolicyError, ConfigError)):
            await engine.load_adapter("critic", tmp_path / "missing")
        assert adapter.policy_version == 0


async def test_a_recovered_server_gets_its_adapters(one: ScriptedModelServer, tmp_path: Path):
    async with engine_of(one) as engine:
        await engine.set_weights(tmp_path, 1)
        await engine.load_adapter("critic", tmp_path)
        one.restart()
        await until(lambda: "critic" in one.adapters and engine.replicas[0].up)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_the_fullest_server_says_how_full_the_key_value_cache_is(dialect: Any) -> None:
    first, second = (ScriptedModelServer(dialect=dialect) for _ in range(2))
    async with first, second, engine_of(first, second) as engine:
        assert await engine.kv_cache_usage() is None, "neither has metrics"
        first.kv_cache_usage, second.kv_cache_usage = 0.25, 0.75
        assert await engine.kv_cache_usage() == 0.75
        second.failures["/metrics"] = [500]
        assert await engine.kv_cache_usage() == 0.25
