"""The short way of a model call, and the long one: the same answers, and no connection is held for nothing."""

import asyncio
import json
import socket

import pytest

from agentlightning.fastpath import MAX_BODY_BYTES, MAX_HEAD_BYTES
from agentlightning.gateway.app import Gateway
from agentlightning.rollouts import attempt_path
from agentlightning.server import Server
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.metrics import Metrics
from agentlightning.testing import ScriptedEngine

BODY = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.fixture
async def store():
    store = InMemoryLightningStore()
    yield store
    await store.close()


@pytest.fixture
async def serve(store):
    """serve(script, ...) -> (the server, the path of an attempt's chat completions)."""
    started = []

    async def start(script, engine=None, **options):
        scripted = ScriptedEngine(script, **(engine or {}))
        server = await Server(store, Gateway(store, {"scripted": scripted}, secret="s"), secret="s", **options).start()
        server.engine = scripted
        started.append(server)
        attempted = await store.start_rollout({})
        return server, attempt_path(attempted.rollout_id, attempted.attempt.attempt_id) + "/v1/chat/completions"

    yield start
    for server in started:
        await server.stop()


async def until(true):
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true")


class Line:
    """One connection, byte by byte."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def send(self, data):
        self.writer.write(data)

    async def answer(self):
        """(status, headers, body) of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        if "content-length" in headers:
            return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return int(head[0].split()[1]), headers, body

    async def closed(self):
        """Whether the server hangs up."""
        return await asyncio.wait_for(self.reader.read(), 5) == b""


@pytest.fixture
async def dial():
    lines = []

    async def start(server):
        line = Line(*await asyncio.open_connection("127.0.0.1", server.port))
        lines.append(line)
        return line

    yield start
    for line in lines:
        line.writer.close()


def post(path, body=BODY, *more, version="1.1"):
    lines = [f"POST {path} HTTP/{version}", "host: x", f"content-length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def text(answer):
    status, _, body = answer
    assert status == 200, body
    return json.loads(body)["choices"][0]["message"]["content"]


async def test_calls_of_one_connection_are_answered_one_after_the_other(serve, dial):
    server, path = await serve(["one", "two", "three"])
    line = await dial(server)
    for expected in ("one", "two", "three"):
        line.send(post(path))
        assert text(await line.answer()) == expected


async def test_a_call_may_come_in_any_pieces(serve, dial):
    server, path = await serve(["one", "two"])
    line = await dial(server)
    for _ in range(2):
        for byte in post(path):
            line.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await line.answer())[0] == 200


async def test_calls_sent_at_once_are_answered_in_order(serve, dial):
    server, path = await serve(["one", "two", "three"])
    line = await dial(server)
    line.send(post(path) + post(path) + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" + post(path))
    said = [await line.answer() for _ in range(4)]
    assert [text(said[0]), text(said[1]), text(said[3])] == ["one", "two", "three"]
    assert json.loads(said[2][2])["object"] == "list"


async def test_what_is_unusual_goes_the_long_way_to_the_same_answer(serve, dial):
    server, path = await serve(["chunked", "expected", "long", "query", "escaped", "old"])
    line = await dial(server)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    line.send(head + b"%x\r\n%b\r\n" % (7, BODY[:7]))
    line.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY) - 7, BODY[7:]))
    assert text(await line.answer()) == "chunked"

    line.send(post(path, BODY, "expect: 100-continue").removesuffix(BODY))
    assert (await line.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 Continue")
    line.send(BODY)
    assert text(await line.answer()) == "expected"

    line.send(post(path, BODY + b" " * MAX_BODY_BYTES))
    assert text(await line.answer()) == "long"
    line.send(post(path + "?x=1"))
    assert text(await line.answer()) == "query"
    line.send(post(path.replace("chat", "%63hat")))
    assert text(await line.answer()) == "escaped"
    line.send(post(path, BODY, "connection: close", version="1.0"))
    assert text(await line.answer()) == "old"
    assert await line.closed()


async def test_a_stream_comes_in_chunks_and_the_connection_goes_on(serve, dial):
    server, path = await serve(["one two", "three"])
    line = await dial(server)
    line.send(post(path, BODY[:-1] + b', "stream": true}'))
    status, headers, body = await line.answer()
    assert (status, headers["transfer-encoding"], body.count(b"data: [DONE]")) == (200, "chunked", 1)
    line.send(post(path))
    assert text(await line.answer()) == "three"


async def test_a_caller_that_asks_for_it_is_hung_up_on(serve, dial):
    server, path = await serve(["one"])
    line = await dial(server)
    line.send(post(path, BODY, "connection: close"))
    status, headers, _ = await line.answer()
    assert (status, headers["connection"]) == (200, "close")
    assert await line.closed()


async def test_a_caller_that_hangs_up_ends_the_sampling(serve, dial, store):
    server, path = await serve(["one"], engine={"delay": 5})
    line = await dial(server)
    line.send(post(path))
    rollout_id = path.split("/")[2]
    await until(lambda: server.engine.calls)
    line.writer.close()
    await until(lambda: server._gateway.counters.cancelled)
    spans = await store.query_spans(rollout_id)
    assert spans[0].attributes["error.type"] == "client_disconnected"


async def test_the_metrics_see_what_takes_the_short_way(serve, dial, store):
    server, path = await serve(["one"], metrics=Metrics(store))
    line = await dial(server)
    line.send(post(path) + b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    assert text(await line.answer()) == "one"
    shown = (await line.answer())[2].decode()
    template = "/rollout/{rollout_id}/attempt/{attempt_id}/v1/chat/completions"
    assert [row for row in shown.splitlines() if template in row and "_count" in row and row.endswith(" 1.0")]


@pytest.mark.parametrize(
    "said",
    [
        b"POST /v1/chat/comp",
        b"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n",
        b"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
        b"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        b"POST /v1/agl/rollouts HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    ],
)
async def test_a_request_that_does_not_come_to_its_end_gets_408_and_frees_its_place(serve, dial, said):
    server, path = await serve(["one"], stalled_seconds=0.05)
    line = await dial(server)
    line.send(said.replace(b"{path}", path.encode()))
    status, headers, body = await asyncio.wait_for(line.answer(), 5)
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(body)["error"]["message"]
    assert await line.closed()
    other = await dial(server)
    other.send(post(path))
    assert text(await other.answer()) == "one"


async def test_a_client_that_drips_bytes_is_not_waited_for(serve, dial):
    server, path = await serve(["one"], stalled_seconds=0.1)
    line = await dial(server)
    line.send(f"POST {path} HTTP/1.1\r\n".encode())
    answer = asyncio.create_task(line.answer())
    number = 0
    while not answer.done():
        line.send(b"x-%d: y\r\n" % (number := number + 1))
        await asyncio.sleep(0.01)
    assert (await answer)[0] == 408


async def test_a_call_that_takes_long_is_not_taken_for_one_that_stalls(serve, dial):
    server, path = await serve(["one"], engine={"delay": 0.05}, stalled_seconds=0.02)
    line = await dial(server)
    line.send(post(path))
    assert text(await line.answer()) == "one"


async def test_a_head_without_end_is_refused(serve, dial):
    server, path = await serve(["one"])
    line = await dial(server)
    line.send(f"POST {path} HTTP/1.1\r\nx: ".encode() + b"x" * (MAX_HEAD_BYTES + 1))
    assert (await line.answer())[0] == 431


async def test_what_is_no_http_is_refused(serve, dial):
    server, _ = await serve(["one"])
    line = await dial(server)
    line.send(b"\x16\x03\x01\x02\x00\x01\x00")
    assert (await line.reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 400")


async def test_a_server_that_stops_finishes_what_is_under_way(serve, dial):
    server, path = await serve(["one"], engine={"delay": 0.1})
    line = await dial(server)
    line.send(post(path))
    await until(lambda: server.engine.calls)
    stopping = asyncio.create_task(server.stop())
    status, headers, _ = await line.answer()
    assert (status, headers["connection"]) == (200, "close")
    await stopping


async def test_a_caller_that_reads_nothing_more_of_its_answer_is_hung_up_on(serve):
    server, path = await serve(["x" * 400_000], engine={"context_length": 10**6}, stalled_seconds=0.2)
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.setblocking(False)
        await asyncio.get_running_loop().sock_connect(caller, ("127.0.0.1", server.port))
        connections = server._uvicorn.server_state.connections
        await until(lambda: connections)
        for each in connections:  # otherwise the system takes it all
            each.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        caller.send(post(path))
        await until(lambda: any(each.flow.write_paused for each in connections))
        await until(lambda: not connections)
