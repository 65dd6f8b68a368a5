"""What a gateway does for runs that joined it: over real HTTP, with a scripted model server and a tiny tokenizer."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator

import httpx
import pytest
from openai import AsyncOpenAI, InternalServerError, NotFoundError

from agentlightning import span as names
from agentlightning.attempt_variables import attempt_environment
from agentlightning.chat.hf import HFChatFormat
from agentlightning.chat.tokenizer_archive import pack_tokenizer, probe_tokens
from agentlightning.engine.servers.joining import BASE_PATH, PROTOCOL, JoinRequest
from agentlightning.models.tiny import make_tokenizer
from agentlightning.server.joining.service import JoinedPolicies
from agentlightning.server.serve import serve
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing.model_server import ScriptedModelServer
from agentlightning.testing.models import TEXTS

pytestmark = pytest.mark.integration


class Hub:
    """A server that runs can join, an attempt whose calls go to it, and a run's side of the protocol."""

    def __init__(self, url: str, store: InMemoryLightningStore, servers: ScriptedModelServer) -> None:
        self.url, self.store, self.model_server = url, store, servers
        self.chat = HFChatFormat(make_tokenizer(TEXTS))
        self.http = httpx.AsyncClient(base_url=url, timeout=30, headers={"authorization": "Bearer t"})
        self.ids = ("", "")

    def request(self, run_id: str, label: str, version: int = 0, lease: float = 60.0) -> JoinRequest:
        return JoinRequest(
            run_id=run_id,
            protocol=PROTOCOL,
            kind="vllm",
            urls=(self.model_server.url,),
            context_length=512,
            retries=1,
            wait_seconds=5,
            timeout_seconds=30,
            crosses_updates=True,
            label=label,
            version=version,
            lease_seconds=lease,
            tokenizer=base64.b64encode(pack_tokenizer(self.chat)).decode(),
            tool_calls=None,
            eos_token_ids=tuple(sorted(self.chat.eos_token_ids)),
            probe=tuple(probe_tokens(self.chat)),
        )

    async def join(self, request: JoinRequest, model: str = "policy") -> httpx.Response:
        return await self.http.post(f"{BASE_PATH}/{model}", json=request.model_dump())

    async def send(self, action: str, run_id: str = "r1", **more: object) -> dict[str, object]:
        response = await self.http.post(f"{BASE_PATH}/policy/{action}", json={"run_id": run_id, **more})
        assert response.status_code == 200, response.text
        return response.json()

    async def call(self) -> str:
        environment = attempt_environment(self.url, "s", *self.ids)
        base_url, key = environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]
        async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            messages = [{"role": "user", "content": "hello"}]
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)  # type: ignore[arg-type]
        return answer.choices[0].message.content or ""

    async def versions(self) -> list[int]:
        spans = await self.store.query_spans(*self.ids)
        return [each.attributes[names.POLICY_VERSION] for each in spans if names.POLICY_VERSION in each.attributes]


@pytest.fixture
async def hub() -> AsyncGenerator[Hub]:
    store, joined = InMemoryLightningStore(), JoinedPolicies()
    async with (
        ScriptedModelServer(context_length=512) as model_server,
        serve(store, {}, secret="s", token="t", joined=joined) as server,
    ):
        made = Hub(server.url, store, model_server)
        attempted = await store.start_rollout("task", mode="train")
        made.ids = attempted.rollout_id, attempted.attempt.attempt_id
        yield made
        await made.http.aclose()
        await joined.close()
    await store.close()


async def test_calls_wait_for_an_update_and_have_its_version(hub: Hub) -> None:
    hub.model_server.label = "w-1"
    assert (await hub.join(hub.request("r1", "w-1"))).status_code == 200
    await hub.call()
    assert (await hub.send("pause", in_flight=False, drain_seconds=None))["paused"]
    waiting = asyncio.create_task(hub.call())
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await hub.send("announce", label="w-2", version=1)
    hub.model_server.label = "w-2"
    status = await hub.send("resume")
    await waiting
    assert await hub.versions() == [0, 1]
    assert (status["updates"], status["failed"]) == (1, 0)


async def test_calls_that_wait_for_a_trainer_that_died_are_refused_when_its_lease_ends_and_answered_after_it_resumed(
    hub: Hub,
) -> None:
    hub.model_server.label = "w-1"
    await hub.join(hub.request("r1", "w-1", lease=1.0))
    await hub.send("pause", in_flight=False, drain_seconds=None)
    with pytest.raises(InternalServerError, match="has not been heard from for 1 s") as refused:
        await hub.call()
    assert refused.value.status_code == 503
    hub.model_server.label = "v-1"
    assert (await hub.join(hub.request("r1", "v-1", version=5))).status_code == 200
    await hub.call()
    assert (await hub.versions())[-1] == 5


async def test_a_name_that_another_run_has_is_refused_and_free_once_that_has_left(hub: Hub) -> None:
    hub.model_server.label = "w-1"
    await hub.join(hub.request("r1", "w-1"))
    taken = await hub.join(hub.request("r2", "w-1"))
    assert (taken.status_code, "belongs to run r1" in taken.json()["error"]) == (409, True)
    assert (await hub.join(hub.request("r2", "w-1"), model="other")).status_code == 200
    await hub.send("leave")
    with pytest.raises(NotFoundError):
        await hub.call()
    assert (await hub.join(hub.request("r3", "w-1"))).status_code == 200


async def test_servers_that_cannot_be_reached_or_have_other_weights_are_named(hub: Hub) -> None:
    other = await hub.join(hub.request("r1", "w-1"))
    assert (other.status_code, "has weights default" in other.json()["error"]) == (503, True)
    away = hub.request("r1", "w-1").model_copy(update={"urls": ("http://127.0.0.1:9",)})
    refused = await hub.join(away)
    assert (refused.status_code, "127.0.0.1:9" in refused.json()["error"]) == (503, True)


async def test_a_tokenizer_that_gives_other_tokens_is_refused(hub: Hub) -> None:
    hub.model_server.label = "w-1"
    wrong = hub.request("r1", "w-1").model_copy(update={"probe": (1, 2, 3)})
    refused = await hub.join(wrong)
    assert (refused.status_code, "gives other tokens than the trainer's" in refused.json()["error"]) == (422, True)
