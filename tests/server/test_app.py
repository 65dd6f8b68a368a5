"""One server for a store and a gateway: its addresses and its errors."""

import ast
import asyncio
import inspect
import re
import socket
import textwrap

import httpx
import pytest
from openai import AsyncOpenAI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentlightning import span as names
from agentlightning.attempt_variables import attempt_environment
from agentlightning.errors import ConfigError, ServerError
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.server.http import BoundedHttpProtocol
from agentlightning.store.instrumented import instrument
from agentlightning.testing import ScriptedEngine

SECRET = "a-secret"


@pytest.fixture
async def server(store):
    async with Server(store, secret=SECRET) as server:
        yield server


async def test_health_is_that_of_the_store(store, server):
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        await store.close()
        assert (await client.get("/health")).status_code == 503


async def test_store_and_gateway_share_one_port(store):
    gateway = Gateway(store, {"scripted": ScriptedEngine(["Hello."])}, secret=SECRET)
    async with Server(store, gateway, secret=SECRET) as server:
        started = await store.start_rollout("a task")
        environment = attempt_environment(server.url, SECRET, started.rollout_id, started.attempt.attempt_id)
        async with AsyncOpenAI(base_url=environment["OPENAI_BASE_URL"], api_key=environment["AGL_KEY"]) as client:
            messages = [{"role": "user", "content": "hi"}]
            await client.chat.completions.create(model="scripted", messages=messages)
        event, headers = {"event_type": "reward", "data": {"value": 1}}, {"x-api-key": environment["AGL_KEY"]}
        async with httpx.AsyncClient(headers=headers) as client:
            await client.post(environment["AGL_EVENT_URL"], json=event)
        spans = await store.query_spans(started.rollout_id)
    assert [span.name for span in spans] == ["chat scripted", names.REWARD]


async def test_a_port_in_use_is_an_error_that_names_it_and_the_way_out(store):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"cannot listen on 127.0.0.1:{port}: .*choose another port"):
            await Server(store, secret=SECRET, port=port).start()


async def test_a_stopped_server_frees_its_port_and_can_start_again(store):
    server = Server(store, secret=SECRET)
    await server.start()
    url = server.url
    await server.stop()
    await server.stop()
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/health")
        await server.start()
        assert server.url == url
        assert (await client.get(f"{url}/health")).status_code == 200
    await server.stop()


async def test_stopping_lets_calls_under_way_finish(store):
    engine = ScriptedEngine(["Hello."], delay=0.02)
    gateway = Gateway(store, {"scripted": engine}, secret=SECRET)
    server = await Server(store, gateway, secret=SECRET).start()
    started = await store.start_rollout("a task")
    environment = attempt_environment(server.url, SECRET, started.rollout_id, started.attempt.attempt_id)
    async with AsyncOpenAI(base_url=environment["OPENAI_BASE_URL"], api_key=environment["AGL_KEY"]) as client:
        messages = [{"role": "user", "content": "hi"}]
        call = asyncio.create_task(client.chat.completions.create(model="scripted", messages=messages))
        for _ in range(10_000):
            if engine.calls:
                break
            await asyncio.sleep(0.001)
        await server.stop()
        assert (await call).choices[0].message.content == "Hello."


async def test_stopping_sends_those_away_who_wait_for_rollouts_and_they_have_claimed_nothing(store):
    waiting = instrument(store, [listener := Listener()])
    server = await Server(waiting, secret=SECRET).start()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        polling = asyncio.create_task(client.post("/v1/agl/queues/rollouts/dequeue", json={"timeout": 60}))
        await asyncio.wait_for(listener.heard.wait(), 20)
        await server.stop()
        reply = await polling
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "about to stop" in reply.json()["error"]["message"]
    queued = await store.enqueue_rollout("a task")
    assert (await store.dequeue_rollout("another")).rollout_id == queued.rollout_id


class Listener:
    """Hears that somebody claims."""

    def __init__(self):
        self.heard = asyncio.Event()

    def on_start(self, method):
        if method == "dequeue_many_rollouts":
            self.heard.set()

    def on_end(self, call):
        pass


async def test_what_is_not_served_is_refused_in_the_shape_of_every_error(server):
    async with httpx.AsyncClient(base_url=server.url) as client:
        nowhere, wrong = await client.get("/nowhere"), await client.put("/health")
    for reply, status in ((nowhere, 404), (wrong, 405)):
        assert reply.status_code == status
        assert reply.json()["error"]["message"] == reply.json()["detail"]


# -- pages of other sites --------------------------------------------------------------------------------------------


async def test_pages_of_named_sites_may_read_the_answers(store) -> None:
    async with (
        Server(store, secret="s", allowed_origins=["https://mine.example"]) as server,
        httpx.AsyncClient(base_url=server.url) as http,
    ):
        for path in ("/v1/agl/health", "/v1/agl/rollouts"):
            reply = await http.get(path, headers={"origin": "https://mine.example"})
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] == "https://mine.example"
        wishes = {"access-control-request-method": "DELETE", "access-control-request-headers": "authorization"}
        asked = await http.options("/v1/agl/rollouts/r", headers={"origin": "https://mine.example", **wishes})
        assert asked.status_code == 200
        assert "DELETE" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"]
        for refused in (
            await http.get("/v1/agl/rollouts", headers={"origin": "https://evil.example"}),
            await http.options("/v1/agl/rollouts", headers={"origin": "https://evil.example", **wishes}),
        ):
            assert refused.status_code == 403
            assert "access-control-allow-origin" not in refused.headers


async def test_without_configuration_no_page_of_another_site_may_read_anything(store) -> None:
    async with Server(store, secret="s") as server, httpx.AsyncClient(base_url=server.url) as http:
        reply = await http.get("/v1/agl/rollouts")
        assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origin", ["mine.example", "ftp://mine.example", "https://mine.example/page", "*"])
def test_an_origin_that_is_no_site_is_refused(store, origin: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(origin))):
        Server(store, secret="s", allowed_origins=[origin])
    if origin == "*":
        Server(store, secret="s", allowed_origins=[origin], token="t")


def private_names(source):
    """Private methods and attributes that a source defines or uses."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_nothing_private_of_uvicorn_is_called_or_overridden():
    """Private methods come and go between the versions that pyproject.toml allows."""
    ours, theirs = private_names(inspect.getsource(BoundedHttpProtocol)), inspect.getsource(HttpToolsProtocol)
    assert issubclass(BoundedHttpProtocol, HttpToolsProtocol)
    assert ours & private_names(theirs) == set()
