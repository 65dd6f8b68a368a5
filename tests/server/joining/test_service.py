"""What a server does for runs that join it, hold calls back, are gone, come back, or are not alone: a real server
and the HTTP requests that trainers send."""

from __future__ import annotations

import asyncio
import base64
import gc
import re
import sys
import weakref
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.model_server import ScriptedModelServer
from tests.support.tokenizer import tiny_tokenizer
from tests.support.waiting import until

from agentlightning import span as names
from agentlightning.attempt_variables import attempt_environment
from agentlightning.chat.hf import HFChatFormat, pack_tokenizer, probe_tokens
from agentlightning.engine.base import Engine
from agentlightning.engine.servers.joining import BASE_PATH
from agentlightning.engine.servers.pool import ReplicaPool, open_servers
from agentlightning.gateway.app import Gateway
from agentlightning.resources import ProxyLLM
from agentlightning.server.joining import JoinedPolicy
from agentlightning.server.serve import serve
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import ScriptedEngine
from agentlightning.util import templates

TOKEN, SECRET = "hub-token", "a-secret-nobody-prints"


class Trainer:
    """The requests of a run's trainer, and what it does to the model server."""

    def __init__(self, hub: Hub, model_server: ScriptedModelServer, run_id: str = "r1", model: str = "policy") -> None:
        self.hub, self.model_server, self.run_id, self.path = hub, model_server, run_id, f"{BASE_PATH}/{model}"
        self.version = 0

    async def post(self, action: str = "", **content: Any) -> httpx.Response:
        return await self.hub.client.post(self.path + action, json={"run_id": self.run_id, **content})

    def servers(self, **changes: Any) -> dict[str, Any]:
        return {"urls": [self.model_server.url], "retries": 1, "wait_seconds": 5.0, "timeout_seconds": 30.0, **changes}

    async def join(self, **changes: Any) -> httpx.Response:
        chat = HFChatFormat(tiny_tokenizer())
        content = {
            "package": version("agentlightning"),
            "kind": "vllm",
            "servers": self.servers(),
            "context_length": 512,
            "in_flight": False,
            "drain_seconds": None,
            "label": self.model_server.label,
            "version": 0,
            "lease_seconds": 60.0,
            "tokenizer": base64.b64encode(pack_tokenizer(chat)).decode(),
            "tool_calls": chat.tool_calls.name,
            "eos_token_ids": sorted(chat.eos_token_ids),
            "probe": probe_tokens(chat),
        }
        return await self.post(**{**content, **changes})

    async def state(self, version: int | None = None, **content: Any) -> httpx.Response:
        """Give the server new weights, if there is a `version`, and say what it has: calls go on, unless `paused`."""
        if version is not None:
            self.model_server.label, self.version = f"w-{version}", version
        label = None if "adapters" in content else self.model_server.label
        return await self.post("/state", **{"label": label, "version": self.version, **content})

    async def pause(self) -> dict[str, Any]:
        answer = await self.state(paused=True)
        return answer.raise_for_status().json()


class Hub:
    def __init__(self, store: InMemoryLightningStore, url: str, client: httpx.AsyncClient, gateway: Gateway) -> None:
        self.store, self.url, self.client, self.gateway = store, url, client, gateway

    async def held(self) -> None:
        """Wait until a call is held back."""
        await until(lambda: any(gate.num_waiting for _, gate in self.gateway.gates._gates.values()))

    async def ask(
        self, model: str = "policy", resources: str | None = None, **options: Any
    ) -> tuple[httpx.Response, Any]:
        """An answer to a call of a new rollout, and its span."""
        attempted = await self.store.start_rollout({}, resources_id=resources)
        ids = attempted.rollout_id, attempted.attempt.attempt_id
        environment = attempt_environment(self.url, SECRET, *ids)
        answer = await self.client.post(
            environment["OPENAI_BASE_URL"] + "/chat/completions",
            json={"model": model, "messages": [{"role": "user", "content": "Count."}], "max_tokens": 4, **options},
            headers={"authorization": f"Bearer {environment['OPENAI_API_KEY']}"},
        )
        spans = await self.store.query_spans(*ids)
        return answer, spans[-1].attributes if spans else {}


@pytest.fixture
async def model_server() -> AsyncGenerator[ScriptedModelServer]:
    async with ScriptedModelServer() as server:
        yield server


@asynccontextmanager
async def hub_of(engines: Mapping[str, Engine]) -> AsyncGenerator[Hub]:
    store = InMemoryLightningStore()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        server = await stack.enter_async_context(serve(store, engines, secret=SECRET, token=TOKEN, accepts_runs=True))
        headers = {"authorization": f"Bearer {TOKEN}"}
        client = httpx.AsyncClient(base_url=server.url, headers=headers, timeout=30)
        assert server.gateway is not None
        yield Hub(store, server.url, await stack.enter_async_context(client), server.gateway)


@pytest.fixture
async def hub() -> AsyncGenerator[Hub]:
    async with hub_of({}) as made:
        yield made


@pytest.fixture
async def trainer(hub: Hub, model_server: ScriptedModelServer) -> Trainer:
    return Trainer(hub, model_server)


async def settle() -> None:
    """Time for a call to end, or to do harm, that should not."""
    await asyncio.sleep(0.3)


@pytest.mark.parametrize("place", ["{{ messages[0].content }}", "{% if tools %}x{% endif %}"])
async def test_a_template_that_does_not_end_is_refused_while_the_server_answers_others(
    trainer: Trainer, hub: Hub, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    loop = "{% for a in range(9999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = tiny_tokenizer()
    chat = HFChatFormat(tokenizer)
    chat._tokenizer.chat_template = place + loop
    joining = asyncio.create_task(trainer.join(tokenizer=base64.b64encode(pack_tokenizer(chat)).decode()))
    alive = 0
    while not joining.done():
        async with asyncio.timeout(2):
            alive += (await hub.client.get("/livez")).status_code == 200
        await asyncio.sleep(0.05)
    assert joining.result().status_code == 422
    assert alive > 3


async def test_calls_wait_for_an_update_and_have_its_version(trainer: Trainer, hub: Hub):
    await trainer.join()
    assert (await hub.ask())[1][names.POLICY_VERSION] == 0
    assert (await trainer.pause())["paused"]
    waiting = asyncio.create_task(hub.ask())
    await hub.held()
    assert not waiting.done()
    status = (await trainer.state(1)).json()
    answer, span = await asyncio.wait_for(waiting, 5)
    assert (answer.status_code, span[names.POLICY_VERSION]) == (200, 1)
    counts = status["counts"]
    assert (counts["updates"], counts["held"], counts["failed"]) == (1, 1, 0)


async def test_an_update_waits_for_answers_under_way_unless_they_go_on_across_it(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer
):
    await trainer.join(in_flight=True)
    model_server.delay, before = 0.05, model_server.sampled
    call = asyncio.create_task(hub.ask(max_tokens=30))
    await until(lambda: model_server.sampled > before)
    status = await trainer.pause()
    assert (status["paused"], status["going_on"]) == (True, 1)
    await trainer.state(1)
    answer, span = await call
    assert answer.status_code == 200
    versions = list(span[names.POLICY_VERSIONS])
    assert (versions[::2], sum(versions[1::2])) == ([0, 1], 30)
    await trainer.join(version=1)
    call = asyncio.create_task(hub.ask(max_tokens=10))
    await until(lambda: model_server.running)
    assert (await trainer.pause())["going_on"] == 0
    await asyncio.wait_for(call, 5)
    assert call.result()[1][names.POLICY_VERSION] == 1
    assert (await trainer.state()).json()["counts"]["updates"] == 2
    assert (await trainer.state()).json()["counts"]["updates"] == 2, "a repeated request changes nothing"


@pytest.mark.integration
async def test_calls_of_a_trainer_that_died_during_an_update_are_refused_and_the_run_can_come_back(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer
):
    await trainer.join(lease_seconds=2.0, in_flight=True)
    model_server.delay = 0.05
    under_way = asyncio.create_task(hub.ask(max_tokens=400))
    await until(lambda: model_server.running)
    await trainer.pause()
    model_server._unpaused.clear()  # As the trainer leaves it.
    waiting = asyncio.create_task(hub.ask())
    for call in (waiting, under_way):
        answer, _ = await asyncio.wait_for(call, 30)
        assert answer.status_code == 503
        assert "the trainer of run r1" in answer.json()["error"]["message"]
        assert "has not been heard from for 2 s" in answer.json()["error"]["message"]
    answer, _ = await hub.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "policy_unavailable")
    assert (await trainer.state()).status_code == 404
    model_server._unpaused.set()
    model_server.delay, model_server.label = 0.0, "resumed"
    assert (await trainer.join(label="resumed", version=7)).status_code == 200
    answer, span = await hub.ask()
    assert (answer.status_code, span[names.POLICY_VERSION]) == (200, 7)


async def test_a_trainer_that_comes_back_while_its_run_is_being_ended_is_served_under_a_lease_of_its_own(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer, monkeypatch: pytest.MonkeyPatch
):
    ending, may_end, close = asyncio.Event(), asyncio.Event(), ReplicaPool.close

    async def slow(pool: ReplicaPool) -> None:
        ending.set()
        await may_end.wait()
        await close(pool)

    monkeypatch.setattr(ReplicaPool, "close", slow)
    await trainer.join(lease_seconds=0.5)
    await asyncio.wait_for(ending.wait(), 5)
    joining = asyncio.create_task(trainer.join(lease_seconds=2.0))
    await settle()
    may_end.set()
    assert (await joining).status_code == 200
    assert (await hub.ask())[0].status_code == 200
    await asyncio.sleep(3.0)
    answer, _ = await hub.ask()
    assert (answer.status_code, "has not been heard from for 2 s" in answer.text) == (503, True)


async def test_a_lease_that_was_taken_again_after_its_end_ends_in_its_own_time(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer
):
    other = Trainer(hub, model_server, "r2")

    for _ in range(2):
        assert (await trainer.join(lease_seconds=0.3)).status_code == 200
        async with asyncio.timeout(1.5):
            while (await check(other))[0] == 409:
                await settle()


async def test_a_trainer_that_was_started_again_takes_over_the_calls_it_had_held_back(trainer: Trainer, hub: Hub):
    await trainer.join()
    await trainer.pause()
    waiting = asyncio.create_task(hub.ask())
    await hub.held()
    trainer.model_server.label = "resumed"
    assert (await trainer.join(label="resumed", version=3)).status_code == 200
    answer, span = await asyncio.wait_for(waiting, 5)
    assert (answer.status_code, span[names.POLICY_VERSION]) == (200, 3)


async def test_two_runs_are_served_at_once_under_their_own_names_and_a_name_belongs_to_one(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer
):
    async with ScriptedModelServer() as second:
        other = Trainer(hub, second, "r2", "another")
        assert [(await each.join()).status_code for each in (trainer, other)] == [200, 200]
        await other.pause()
        assert (await hub.ask("policy"))[0].status_code == 200, "only the calls of one run wait"
        await other.state(1)
        assert [(await hub.ask(name))[1][names.POLICY_VERSION] for name in ("policy", "another")] == [0, 1]
        refused = await Trainer(hub, second, "r3", "another").join(label=second.label)
        assert refused.status_code == 409
        assert "'another' belongs to run r2" in refused.json()["detail"]
        assert re.search(r"wait (5[0-9]|60) s for the end of its lease", refused.json()["detail"])
        await other.post("/leave")
        assert (await hub.ask("another"))[0].status_code == 404
        assert (await Trainer(hub, second, "r3", "another").join(label=second.label)).status_code == 200


async def test_nothing_is_kept_of_a_run_that_has_left(
    trainer: Trainer, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list[weakref.ref[ReplicaPool]]()

    async def noted(*args: Any, **options: Any) -> ReplicaPool:
        pool = await open_servers(*args, **options)
        kept.append(weakref.ref(pool))
        return pool

    monkeypatch.setattr("agentlightning.server.joining.open_servers", noted)
    await trainer.join()
    assert (await hub.ask())[0].status_code == 200
    assert (await trainer.post("/leave")).status_code == 200

    def gone() -> bool:
        gc.collect()
        return kept[0]() is None

    await until(gone)


async def test_any_model_name_of_an_agent_leads_to_the_policy_of_its_own_run(trainer: Trainer, hub: Hub):
    async with ScriptedModelServer() as second:
        await Trainer(hub, second, "r2", "another").join()
        await trainer.join()
        for model in ("policy", "another"):
            await hub.store.add_resources({"llm": ProxyLLM(endpoint=hub.url, model=model)}, f"of-{model}")
            answer, span = await hub.ask("gpt-4o", f"of-{model}")
            assert (answer.status_code, answer.json().get("model"), span[names.POLICY_VERSION]) == (200, model, 0)
        await hub.store.add_resources({}, "none")
        assert (await hub.ask("gpt-4o", "none"))[0].status_code == 404


async def test_calls_of_a_run_that_has_not_joined_again_are_refused_for_the_moment(trainer: Trainer, hub: Hub):
    """As after a restart of the server: a run of another name is here, and its policy must not answer."""
    async with ScriptedModelServer() as second:
        assert (await Trainer(hub, second, "r2", "another").join()).status_code == 200
        llm = ProxyLLM(endpoint=hub.url, model="policy", policy_version=3)
        await hub.store.add_resources({"llm": llm}, "of-policy")
        for model in ("policy", "gpt-4o"):
            answer, _ = await hub.ask(model, "of-policy")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "policy_unavailable")
            assert "whose policy is 'policy', has not joined this server" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "2"
    await trainer.join(version=3)
    for model in ("policy", "gpt-4o"):
        answer, span = await hub.ask(model, "of-policy")
        assert (answer.status_code, span[names.POLICY_VERSION]) == (200, 3)


async def test_a_model_of_the_server_itself_answers_no_call_in_the_place_of_a_runs_policy(
    model_server: ScriptedModelServer,
):
    own = ScriptedEngine(["Mine."] * 2, model="own")
    async with hub_of({"own": own}) as hub:
        llm = ProxyLLM(endpoint=hub.url, model="policy", policy_version=0)
        await hub.store.add_resources({"llm": llm}, "of-policy")
        assert (await hub.ask("gpt-4o", "of-policy"))[0].status_code == 503
        status, text = await check(Trainer(hub, model_server, model="own"))
        assert (status, "'own' is used by this server's own models; set another policy.name" in text) == (409, True)
        await Trainer(hub, model_server).join()
        answer, span = await hub.ask("gpt-4o", "of-policy")
        assert (answer.status_code, answer.json()["model"], span[names.POLICY_VERSION]) == (200, "policy", 0)
        for model in ("own", "gpt-4o"):  # Of no run: the default of the server.
            assert (await hub.ask(model))[0].json()["model"] == "own"


ROUTES = {
    "own": None,
    "views": {"policy:writer": "writer", "policy:base": None},
    "agents": {"writer": "policy:writer", "editor": "policy:base"},
    "others": "policy",
}


def adapter(version: int, name: str = "writer") -> dict[str, Any]:
    return {"name": name, "served_name": f"{name}@{version}.r", "version": version}


async def join_with_adapters(trainer: Trainer, **changes: Any) -> httpx.Response:
    trainer.model_server.adapters["writer@0.r"] = "dir"
    given = {"label": None, "adapters": [adapter(0)], "adapter_routes": ROUTES}
    return await trainer.join(**{**given, **changes})


async def test_agents_are_answered_by_the_adapters_of_the_run(trainer: Trainer, hub: Hub):
    assert (await join_with_adapters(trainer)).status_code == 200
    asked = {"writer@policy": "writer@0.r", "policy:writer": "writer@0.r", "editor@policy": "tiny", "policy": "tiny"}
    for model, served in asked.items():
        answer, span = await hub.ask(model)
        path, body = trainer.model_server.calls[-1]
        assert (answer.status_code, path, body["model"]) == (200, "/inference/v1/generate", served)
        assert span[names.POLICY_VERSION] == 0
    for model in ("policy:writer", "policy:base", "policy"):
        assert (await hub.client.get(f"/v1/models/{model}")).status_code == 200
    await trainer.post("/leave")
    assert (await hub.ask("policy:writer"))[0].status_code == 404


async def test_a_call_keeps_the_version_of_the_adapter_it_began_with_and_the_trainer_learns_which_are_used(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer
):
    await join_with_adapters(trainer, in_flight=True)
    model_server.delay = 0.05
    call = asyncio.create_task(hub.ask("policy:writer", max_tokens=30))
    await until(lambda: model_server.running)
    assert (await trainer.pause())["going_on"] == 1
    model_server.adapters["writer@1.r"] = "dir"
    status = (await trainer.state(adapters=[adapter(1)])).json()
    assert status["adapters"] == ["writer@0.r"], "so the trainer does not unload it yet"
    assert (await hub.ask("policy:writer"))[1][names.POLICY_VERSION] == 1
    answer, span = await call
    assert (answer.status_code, span[names.POLICY_VERSION]) == (200, 0)
    assert (await trainer.state()).json()["adapters"] == []


async def test_a_server_without_an_adapter_of_the_run_answers_once_its_trainer_has_loaded_it(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer
):
    await join_with_adapters(trainer, servers=trainer.servers(retries=5))
    model_server.restart()
    call = asyncio.create_task(hub.ask("policy:writer"))
    await settle()
    assert not call.done()
    model_server.adapters["writer@0.r"] = "dir"
    answer, span = await asyncio.wait_for(call, 10)
    assert (answer.status_code, span[names.POLICY_VERSION]) == (200, 0)


async def test_the_gateway_settings_of_a_run_are_used_for_its_calls_alone(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer
):
    async with ScriptedModelServer() as second:
        await trainer.join(record_top_logprobs=3)
        await Trainer(hub, second, "r2", "another").join()
        spans = {model: (await hub.ask(model))[1] for model in ("policy", "another")}
    assert spans["policy"][names.TOP_LOGPROBS]
    assert names.TOP_LOGPROBS not in spans["another"]


async def test_a_server_that_lost_the_trainers_weights_answers_no_call_until_it_has_them(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer
):
    await trainer.join(servers=trainer.servers(retries=3))
    model_server.label = "of-a-restarted-server"
    call = asyncio.create_task(hub.ask())
    await settle()
    assert not call.done()
    model_server.label = "default"
    answer, span = await asyncio.wait_for(call, 10)
    assert (answer.status_code, span[names.POLICY_VERSION]) == (200, 0)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"package": "9.9"}, 422, "and the run 9.9; install the same version on both"),
        ({"servers": {"urls": ["http://127.0.0.1:9"]}}, 503, "127.0.0.1:9"),
        ({"label": "another"}, 503, "has weights default"),
        ({"tokenizer": base64.b64encode(b"no archive").decode()}, 422, "archive of the tokenizer cannot be read"),
        ({"tokenizer": "?"}, 422, "is not base64"),
        ({"probe": [1, 2, 3]}, 422, "gives other tokens than the trainer's"),
        ({"servers": {"urls": []}}, 422, "the addresses of servers in urls"),
        ({"lease_seconds": 0}, 400, "lease_seconds"),
    ],
)
async def test_a_server_says_why_it_cannot_serve_a_run(
    trainer: Trainer, changes: dict[str, Any], status: int, words: str
):
    answer = await trainer.join(**changes)
    assert (answer.status_code, words in answer.json()["detail"]) == (status, True), answer.text


async def test_answers_cross_no_update_on_servers_that_do_not_name_the_weights_of_tokens(hub: Hub):
    async with ScriptedModelServer(generates=False) as server:
        for how in ({"in_flight": True}, {"drain_seconds": 5.0}):
            refused = await Trainer(hub, server).join(**how)
            assert (refused.status_code, "--enable-scale-out" in refused.text) == (422, True)
        assert (await Trainer(hub, server).join()).status_code == 200


async def check(trainer: Trainer, changes_weights: bool = True, path: str = "/") -> tuple[int, str]:
    answer = await trainer.post("/check", urls=[trainer.model_server.url + path], changes_weights=changes_weights)
    return answer.status_code, answer.text


async def test_a_run_learns_before_it_changes_weights_that_its_name_or_its_servers_are_taken(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer
):
    assert (await check(trainer))[0] == 200
    await trainer.join()
    assert (await check(trainer))[0] == 200, "a run may be started again"
    async with ScriptedModelServer() as second:
        status, text = await check(Trainer(hub, second, "r2"))
        assert (status, "model name 'policy' belongs to run r1; set another policy.name" in text) == (409, True)
        assert (await check(Trainer(hub, second, "r2", "another")))[0] == 200
    other = Trainer(hub, model_server, "r2", "another")
    joined = await other.join()
    checked = [await check(other), await check(other, False), await check(other, path="/v1/")]
    for status, text in (*checked, (joined.status_code, joined.text)):
        assert (status, f"run r1 samples from {model_server.url}, too" in text) == (409, True)
    await trainer.post("/leave")
    assert (await check(other))[0] == 200


async def test_runs_that_add_adapters_may_share_model_servers(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer
):
    await join_with_adapters(trainer)
    other = Trainer(hub, model_server, "r2", "another")
    assert (await check(other, changes_weights=False))[0] == 200
    assert (await check(other, changes_weights=True))[0] == 409


async def test_nobody_joins_without_the_token(trainer: Trainer, hub: Hub):
    for token in ("", "Bearer other"):
        answer = await hub.client.post(f"{BASE_PATH}/policy", json={}, headers={"authorization": token})
        assert answer.status_code == 401


@pytest.mark.parametrize("error", [KeyError("weight_version"), TypeError("unhashable"), OSError("no route")], ids=repr)
async def test_a_server_that_answers_an_update_with_anything_is_left_out_until_it_has_the_weights(
    trainer: Trainer, hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    async def odd(self: object) -> str | None:
        raise error

    await trainer.join(servers=trainer.servers(retries=5))
    await trainer.pause()
    waiting = asyncio.create_task(hub.ask())
    with monkeypatch.context() as patched:
        patched.setattr("agentlightning.engine.servers.clients.vllm.VllmServer.weight_label", odd)
        assert (await trainer.state(1)).status_code == 200
        await settle()
        assert not waiting.done(), "the server may have a mix of weights"
    answer, span = await asyncio.wait_for(waiting, 20)
    assert (answer.status_code, span[names.POLICY_VERSION]) == (200, 1)


async def test_a_pause_during_the_end_of_an_update_is_one_of_its_own(
    trainer: Trainer, hub: Hub, monkeypatch: pytest.MonkeyPatch
):
    may_end = asyncio.Event()

    async def slow(self: object) -> None:
        await may_end.wait()

    await trainer.join()
    await trainer.pause()
    with monkeypatch.context() as patched:
        patched.setattr("agentlightning.engine.servers.pool.ReplicaPool.update_replicas", slow)
        ending = asyncio.create_task(trainer.state())
        await settle()
        pausing = asyncio.create_task(trainer.pause())
        await settle()
        assert not pausing.done(), "the earlier update is about to let calls go on"
        may_end.set()
        await ending
    assert (await asyncio.wait_for(pausing, 5))["paused"]
    waiting = asyncio.create_task(hub.ask())
    await hub.held()
    assert not waiting.done()
    assert not (await trainer.state()).json()["paused"]
    assert (await asyncio.wait_for(waiting, 5))[0].status_code == 200


async def test_a_pause_that_was_given_up_before_calls_had_ended_says_nothing_of_the_next_one(
    trainer: Trainer, hub: Hub, model_server: ScriptedModelServer, monkeypatch: pytest.MonkeyPatch
):
    may_end = asyncio.Event()

    async def slow(self: object) -> None:
        await may_end.wait()

    await trainer.join()
    model_server.delay = 0.05
    under_way = asyncio.create_task(hub.ask(max_tokens=30))
    await until(lambda: model_server.running)
    given_up = asyncio.create_task(trainer.pause())
    await settle()
    with monkeypatch.context() as patched:
        patched.setattr("agentlightning.engine.servers.pool.ReplicaPool.update_replicas", slow)
        ending = asyncio.create_task(trainer.state())
        await settle()
        pausing = asyncio.create_task(trainer.pause())
        await asyncio.wait_for(under_way, 10)
        await settle()
        held = asyncio.create_task(hub.ask())
        assert (await asyncio.wait_for(pausing, 5))["paused"]
        may_end.set()
        assert (await ending).json()["counts"]["updates"] == 0, "no weights changed"
    await settle()
    assert not held.done()
    assert (await trainer.state()).json()["counts"]["updates"] == 1
    assert (await asyncio.wait_for(held, 5))[0].status_code == 200
    given_up.cancel()


async def test_the_gate_opens_though_the_end_of_a_lease_is_cancelled(trainer: Trainer, hub: Hub):
    """As it is by a trainer that joins again in that moment."""
    await trainer.join()
    policy = hub.gateway.router.resolve("policy").engine
    assert isinstance(policy, JoinedPolicy)
    await trainer.pause()
    waiting = asyncio.create_task(hub.ask())
    await hub.held()
    ending = asyncio.create_task(policy.end("gone"))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.wait_for(waiting, 5)
    assert (await trainer.join()).status_code == 200
    assert (await trainer.pause())["paused"], "the next update is held as any"


@pytest.mark.parametrize("error", [KeyError("version"), RuntimeError("closed"), asyncio.CancelledError()], ids=repr)
async def test_the_gate_opens_whatever_ends_the_resume(
    trainer: Trainer, hub: Hub, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    async def broken(self: object) -> None:
        raise error

    await trainer.join()
    await trainer.pause()
    waiting = asyncio.create_task(hub.ask())
    await hub.held()
    with monkeypatch.context() as patched:
        patched.setattr("agentlightning.engine.servers.pool.ReplicaPool.update_replicas", broken)
        assert (await trainer.state()).status_code == 500
    answer, _ = await asyncio.wait_for(waiting, 5)
    assert answer.status_code == 200
    assert (await trainer.pause())["paused"], "the next update is held as any"
    assert not (await trainer.state()).json()["paused"]


@pytest.mark.parametrize("kind", ["lab_of_a_stranger:Engine", "./lab_of_a_stranger.py:Engine", "no_such_engine"])
async def test_a_run_cannot_have_a_module_imported_by_the_name_of_its_engine(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "lab_of_a_stranger.py").write_text("class Engine: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    answer = await trainer.join(kind=kind)
    assert 400 <= answer.status_code < 500, answer.text
    assert kind in answer.text or "kind" in answer.text
    assert "lab_of_a_stranger" not in sys.modules
