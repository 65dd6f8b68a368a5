"""Health checks for orchestrators: what `/livez` and `/readyz` say, and how a draining server lets clients go."""

import httpx
from openai import AsyncOpenAI

from agentlightning.attempt_variables import attempt_environment
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.testing import ScriptedEngine

SECRET = "a-secret"


async def test_a_server_is_not_ready_before_its_store_has_answered_and_is_alive_all_the_same(store):
    await store.close()
    async with Server(store, secret=SECRET) as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == 503


async def test_an_outage_of_the_store_does_not_take_every_server_away(store):
    async with Server(store, secret=SECRET) as server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/readyz")).json() == {"status": "ok"}
        await store.close()
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/readyz")).status_code == 200


async def test_probes_need_no_token(store):
    async with Server(store, secret=SECRET, token="t0ken") as server, httpx.AsyncClient(base_url=server.url) as client:
        assert [(await client.get(path)).status_code for path in ("/livez", "/readyz")] == [200, 200]


async def test_a_draining_server_says_so_serves_calls_and_closes_their_connections(store):
    gateway = Gateway(store, {"scripted": ScriptedEngine(["Hello."] * 3)}, secret=SECRET)
    async with Server(store, gateway, secret=SECRET) as server:
        started = await store.start_rollout("a task")
        variables = attempt_environment(server.url, SECRET, started.rollout_id, started.attempt.attempt_id)
        options = {"base_url": variables["OPENAI_BASE_URL"], "api_key": variables["AGL_KEY"], "max_retries": 0}
        async with AsyncOpenAI(**options) as calls, httpx.AsyncClient(base_url=server.url) as client:
            chat = calls.chat.completions.with_raw_response
            request = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
            assert "connection" not in (await chat.create(**request)).headers
            assert "connection" not in (await client.get("/livez")).headers
            server.drain()
            probe = await client.get("/readyz")
            assert (probe.status_code, probe.headers["connection"]) == (503, "close")
            assert (await client.get("/livez")).status_code == 200
            for _ in range(2):
                assert (await chat.create(**request)).headers["connection"] == "close"


async def test_a_server_that_starts_again_is_ready_again(store):
    server = Server(store, secret=SECRET)
    async with server:
        server.drain()
    async with server, httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/readyz")).status_code == 200
