"""Weight updates as agents meet them: none of their calls fails, and every token says which weights drew it."""

import asyncio
import copy
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx
import pytest
import torch
from tests.support.models import tiny_checkpoint
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.waiting import until

from agentlightning import span as names
from agentlightning.assemble import trajectory
from agentlightning.attempt_address import attempt_path
from agentlightning.credit import training_samples
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.policy.config import LocalPolicyConfig, OptimizerConfig
from agentlightning.policy.learner import staleness
from agentlightning.policy.local import LocalPolicy
from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.testing import ScriptedEngine
from agentlightning.trajectory import Node, TokenTree, TrainingSample

pytestmark = pytest.mark.integration


# -- a policy that learns while it is asked ----------------------------------------------------------------------------


@dataclass
class Learning:
    """A gateway in front of a real policy and a frozen reference, and agents that never stop asking."""

    store: LightningStoreBase
    policy: LocalPolicy
    gateway: Gateway
    http: httpx.AsyncClient
    url: str
    attempts: list[tuple[str, str]] = field(default_factory=list)
    by_version: dict[int, torch.nn.Module] = field(default_factory=dict)
    answered: int = 0

    async def update(self, **mode) -> bool:
        """One real step on random tokens; returns whether answers went on across it."""
        if not self.by_version:
            self.by_version[0] = copy.deepcopy(self.policy._model)
        async with self.gateway.gates.of(self.policy).update(**mode) as under_way:
            await self.policy.train([lesson(self.policy.policy_version)], in_flight=under_way)
            self.by_version[self.policy.policy_version] = copy.deepcopy(self.policy._model)
        return under_way

    async def call(self, path: str, body: dict, *, model="policy") -> None:
        """One call, which is to be answered whole."""
        body = {"model": model, **body}
        if not body.get("stream"):
            reply = await self.http.post(self.url + path, json=body)
            assert reply.status_code == 200, reply.text
        else:
            async with self.http.stream("POST", self.url + path, json=body) as reply:
                text = (await reply.aread()).decode()
            lines = [line for line in text.split("\n") if line.startswith("data: ")]  # httpx splits at U+2028 too
            assert reply.status_code == 200
            assert '"error"' not in "".join(lines).replace('"error":null', "")
            assert lines[-1] == "data: [DONE]" or json.loads(lines[-1][6:])["type"] in ENDS
        self.answered += 1

    async def agent(self, number: int, stop: asyncio.Event) -> None:
        """Asks in every dialect, streaming and not, for short and long answers."""
        rng = random.Random(number)
        rollout = await self.store.start_rollout({"number": number})
        path = attempt_path(rollout.rollout_id, rollout.attempt.attempt_id)
        self.attempts.append((rollout.rollout_id, rollout.attempt.attempt_id))
        while not stop.is_set():
            await self.call(*request(rng, path))

    async def spans(self):
        return [span for ids in self.attempts for span in await self.store.query_spans(*ids)]

    def assert_faithful(self, span) -> None:
        """Every token has the log-probability that the weights recorded for it give."""
        attributes = span.attributes
        prompt, drawn = attributes[names.PROMPT_TOKEN_IDS], attributes[names.RESPONSE_TOKEN_IDS]
        flat = attributes.get(names.POLICY_VERSIONS) or [attributes[names.POLICY_VERSION], len(drawn)]
        assert sum(flat[1::2]) == len(drawn)
        assert flat[-2] == attributes[names.POLICY_VERSION]
        ids, start = torch.tensor([[*prompt, *drawn]]), 0
        for version, count in zip(flat[::2], flat[1::2], strict=True):
            with torch.inference_mode():
                logprobs = self.by_version[version](ids).logits.float().log_softmax(-1)[0]
            places = torch.arange(start, start + count) + len(prompt)
            expected = logprobs[places - 1].gather(1, ids[0, places, None])[:, 0]
            recorded = torch.tensor(attributes[names.LOGPROBS][start : start + count])
            torch.testing.assert_close(recorded, expected, atol=1e-4, rtol=0)
            start += count


ENDS = {"response.completed", "response.incomplete", "message_stop"}


def request(rng: random.Random, path: str) -> tuple[str, dict]:
    messages = [{"role": "user", "content": rng.choice(["hi", "What is 12 + 30?", "a much longer question " * 3])}]
    limit, stream = rng.choice([1, 5, 40, 120]), rng.random() < 0.5
    match rng.choice(["chat", "completions", "responses", "messages"]):
        case "chat":
            return f"{path}/v1/chat/completions", {"messages": messages, "max_tokens": limit, "stream": stream}
        case "completions":
            return f"{path}/v1/completions", {"prompt": "Tom has", "max_tokens": limit, "stream": stream, "n": 2}
        case "responses":
            return f"{path}/v1/responses", {"input": messages, "max_output_tokens": max(16, limit), "stream": stream}
        case _:
            return f"{path}/v1/messages", {"messages": messages, "max_tokens": limit, "stream": stream}


def lesson(number: int) -> TrainingSample:
    rng = random.Random(number)
    drawn = tuple(rng.randrange(3, 300) for _ in range(12))
    tree = TokenTree((Node(-1, (5, 6, 7)), Node(0, drawn, True, (-5.0,) * 12, "ro", "call")))
    return TrainingSample(tree, advantages=((), (1.0,) * 12), weights=((), (1 / 12,) * 12))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def learning(checkpoint) -> AsyncIterator[Learning]:
    async with AsyncExitStack() as stack:
        store = InMemoryLightningStore()
        stack.push_async_callback(store.close)
        policy = LocalPolicy.open(
            LocalPolicyConfig(model=checkpoint, device="cpu", max_batch_size=6, optimizer=OptimizerConfig(lr=3e-3))
        )
        stack.push_async_callback(policy.close)
        engines = {"policy": policy, "reference": ScriptedEngine(lambda messages: "As ever.")}
        gateway = Gateway(store, engines, secret="a-secret", allow_unattributed=True)
        server = await stack.enter_async_context(Server(store, gateway, secret="a-secret"))
        limits = httpx.Limits(max_connections=200)
        http = await stack.enter_async_context(httpx.AsyncClient(verify=False, timeout=60, limits=limits))
        yield Learning(store, policy, gateway, http, server.url)


MODES = [{"in_flight": True}, {"in_flight": False}, {"drain_seconds": 0.03}]


async def stress(learning: Learning, mode: dict, *, agents: int, updates: int, calls: int) -> None:
    """`updates` under continuous traffic, each after so many more answers. Fails with the first call that does."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(agents):
            group.create_task(learning.agent(number, stop))
        went_on = 0
        for _ in range(updates):
            before = learning.answered
            await until(lambda before=before: learning.answered >= before + calls, seconds=100)
            went_on += await learning.update(**mode)
        assert went_on == (updates if mode.get("in_flight") else 0) or "drain_seconds" in mode
        stop.set()
    assert learning.policy.policy_version == updates
    spans = await learning.spans()
    assert {span.status_code for span in spans} == {"OK"}
    assert learning.gateway.counters.errors == learning.gateway.counters.cancelled == 0
    for span in spans:
        learning.assert_faithful(span)
    crossed = [span for span in spans if names.POLICY_VERSIONS in span.attributes]
    if "in_flight" in mode:
        assert bool(crossed) == mode["in_flight"]
    await assert_trainable(learning, updates)


async def assert_trainable(learning: Learning, version: int) -> None:
    """What was recorded across the updates makes one more step, and says how old it is."""
    recorded = [
        trajectory(rollout, attempt, await learning.store.query_spans(rollout, attempt), "all")
        for rollout, attempt in learning.attempts
    ]
    for number, each in enumerate(recorded):
        object.__setattr__(each, "reward", float(number))
    samples, _ = training_samples([recorded])
    assert 0 < staleness(samples, lambda adapter: version)["staleness"] < version
    figures = await learning.policy.train(samples)
    assert figures["tokens_trained"] > 0


QUICK = [mode for mode in MODES if mode.get("in_flight") is not False]
"""The slow test below has all of them."""


@pytest.mark.parametrize("mode", QUICK, ids=lambda mode: "-".join(f"{k}={v}" for k, v in mode.items()))
async def test_no_call_fails_for_an_update_and_every_token_names_its_weights(learning, mode):
    await stress(learning, mode, agents=4, updates=2, calls=3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(f"{k}={v}" for k, v in mode.items()))
async def test_no_call_of_many_agents_fails_for_many_updates(learning, mode):
    await stress(learning, mode, agents=40, updates=12, calls=60)


async def test_an_update_holds_up_the_policy_that_learns_and_no_other(learning):
    hello = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    async with learning.gateway.gates.of(learning.policy).update():
        held = asyncio.create_task(learning.call("/v1/chat/completions", hello))
        await until(lambda: learning.gateway.gates.of(learning.policy).num_waiting == 1)
        await learning.call("/v1/chat/completions", hello, model="reference")
        assert not held.done()
    await held
    assert learning.answered == 2


# -- callers of every kind ---------------------------------------------------------------------------------------------


def body(**more) -> dict:
    return {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], **more}


async def test_calls_that_come_during_an_update_are_served_in_the_order_they_came_by_the_new_weights(serve):
    service = await serve(lambda messages: "Hello.", engine={"policy_version": 3})
    http, gate = await service.http(), service.gateway.gates.of(service.engine)
    held = []
    async with gate.update():
        for number in range(20):
            asked = body(seed=number)
            held.append(asyncio.create_task(http.post(f"{service.base_url}/chat/completions", json=asked)))
            await until(lambda number=number: gate.num_waiting == number + 1)
        service.engine.policy_version = 4
    assert [reply.status_code for reply in await asyncio.gather(*held)] == [200] * 20
    assert [params.seed for _, params in service.engine.calls] == list(range(20))
    assert {span.attributes[names.POLICY_VERSION] for span in await service.spans()} == {4}


async def test_however_many_wait_for_an_update_calls_of_other_engines_and_providers_are_served(store):
    engines = {"scripted": ScriptedEngine(lambda _: "Hello."), "reference": ScriptedEngine(lambda _: "As ever.")}
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(ScriptedProvider(lambda _: Reply(chat_answer("From afar."))))
        them = {"name": "them", "base_urls": [f"{provider.url}/v1"]}
        routes = [{"model": "theirs", "provider": "them"}]
        config = GatewayConfig.model_validate({"providers": [them], "routes": routes})
        gateway = Gateway(store, engines, secret="s", config=config, allow_unattributed=True, max_concurrency=3)
        server = await stack.enter_async_context(Server(store, gateway, secret="s"))
        http = await stack.enter_async_context(httpx.AsyncClient(verify=False, timeout=60))
        gate = gateway.gates.of(engines["scripted"])

        async def ask(model):
            reply = await http.post(f"{server.url}/v1/chat/completions", json=body() | {"model": model})
            return reply.json()["choices"][0]["message"]["content"]

        async with gate.update():
            held = [asyncio.create_task(ask("scripted")) for _ in range(10)]
            await until(lambda: gate.num_waiting == 10)
            others = await asyncio.gather(*(ask(model) for model in ("reference", "theirs") * 3))
            assert others == ["As ever.", "From afar."] * 3
        assert await asyncio.gather(*held) == ["Hello."] * 10


@pytest.mark.slow
async def test_a_thousand_calls_wait_for_one_update_and_all_are_served_by_the_new_weights(serve):
    service = await serve(lambda messages: "Hello.", engine={"policy_version": 3})
    gate, content = service.gateway.gates.of(service.engine), json.dumps(body()).encode()
    host, port = service.server.url.removeprefix("http://").split(":")
    path = service.base_url.removeprefix(service.server.url) + "/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"

    async def call():
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + content)
        reply = await reader.read()
        writer.close()
        await writer.wait_closed()
        return reply

    async with gate.update():
        calls = [asyncio.create_task(call()) for _ in range(1000)]
        await until(lambda: gate.num_waiting == 1000, seconds=60)
        service.engine.policy_version = 4
    assert all(reply.startswith(b"HTTP/1.1 200") for reply in await asyncio.gather(*calls))
    spans = await service.spans()
    assert [span.attributes[names.POLICY_VERSION] for span in spans] == [4] * 1000


async def test_a_caller_that_hangs_up_while_it_waits_is_recorded_and_holds_nobody_up(serve):
    service = await serve(lambda messages: "Hello.")
    gate = service.gateway.gates.of(service.engine)
    async with gate.update():
        gone = asyncio.create_task(service.stream())
        await until(lambda: gate.num_waiting == 1)
        gone.cancel()
        await until(lambda: gate.num_waiting == 0)
        kept = asyncio.create_task(service.ask())
        await until(lambda: gate.num_waiting == 1)
    await kept
    await until(lambda: gate.num_in_flight == 0)
    failed, answered = await service.spans()
    assert failed.attributes[names.ERROR_TYPE] == "client_disconnected"
    assert answered.status_code == "OK"
    assert len(service.engine.calls) == 1


async def test_a_stream_half_shown_goes_on_after_the_update_it_made_wait(serve):
    service = await serve(lambda messages: "Hello. " * 30, engine={"delay": 0.001})
    client, gate = await service.client(), service.gateway.gates.of(service.engine)
    messages = [{"role": "user", "content": "hi"}]
    stream = await client.chat.completions.create(model="scripted", messages=messages, stream=True)
    shown = [await anext(aiter(stream))]
    async with gate.update() as under_way:
        assert not under_way
    shown += [chunk async for chunk in stream]
    pieces = [choice.delta.content or "" for chunk in shown for choice in chunk.choices]
    assert "".join(pieces) == "Hello. " * 30


async def test_a_client_that_stops_reading_does_not_hold_an_update_up(serve):
    service = await serve(lambda messages: "x" * 40_000, engine={"tokens_per_step": 10}, max_concurrency=1)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = service.server.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    content = json.dumps(body(stream=True)).encode()
    path = service.base_url.removeprefix(service.server.url) + "/chat/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    await until(lambda: service.engine.calls)
    async with asyncio.timeout(10), service.gateway.gates.of(service.engine).update() as under_way:
        assert not under_way
    assert [span.status_code for span in await service.spans()] == ["OK"]
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection)
    assert b"[DONE]" in await reader.read()
    writer.close()
    await writer.wait_closed()
