"""Model calls byte by byte: the same answers however they are sent, and no connection is held for nothing."""

import asyncio
import gzip
import json
import socket
import zlib
from contextlib import asynccontextmanager

import pytest
from tests.support.waiting import until

from agentlightning.attempt_address import attempt_path
from agentlightning.gateway.app import Gateway
from agentlightning.observability.logs import SlowLog
from agentlightning.observability.metrics import Metrics
from agentlightning.server.app import Server
from agentlightning.server.http import MAX_HEAD_BYTES
from agentlightning.testing import ScriptedEngine

MEGABYTE = 1024 * 1024
BODY = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.fixture
async def serve(store):
    """serve(script, ...) -> (the server, the path of an attempt's chat completions)."""
    started = []

    async def start(script, engine=None, gateway=None, bounds=None, **options):
        scripted = ScriptedEngine(script, **(engine or {}))
        gateway = Gateway(store, {"scripted": scripted}, secret="s", **(gateway or {}))
        server = Server(store, gateway, secret="s", **options)
        vars(server.bounds).update(bounds or {})
        await server.start()
        server.engine = scripted
        started.append(server)
        attempted = await store.start_rollout({})
        return server, attempt_path(attempted.rollout_id, attempted.attempt.attempt_id) + "/v1/chat/completions"

    yield start
    for server in started:
        await server.stop()


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


async def test_what_is_sent_in_an_unusual_way_gets_the_same_answer(serve, dial):
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

    line.send(post(path, BODY + b" " * MEGABYTE))
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
    await until(lambda: server.gateway.counters.cancelled)
    spans = await store.query_spans(rollout_id)
    assert spans[0].attributes["error.type"] == "client_disconnected"


async def test_the_metrics_name_the_route_of_a_call(serve, dial, store):
    server, path = await serve(["one"], metrics=Metrics(store))
    line = await dial(server)
    line.send(post(path) + b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    assert text(await line.answer()) == "one"
    shown = (await line.answer())[2].decode()
    template = "/rollout/{rollout_id}/attempt/{attempt_id}/v1/chat/completions"
    assert [row for row in shown.splitlines() if template in row and "_count" in row and row.endswith(" 1.0")]


async def test_a_model_that_takes_its_time_is_not_slow(serve, dial, caplog):
    server, path = await serve(["one"], slow=SlowLog(0.0))
    line = await dial(server)
    line.send(post(path) + b"GET /v1/agl/queues HTTP/1.1\r\nhost: x\r\n\r\n")
    assert text(await line.answer()) == "one"
    assert (await line.answer())[0] == 200
    slow = [record.getMessage() for record in caplog.records if record.getMessage().startswith("slow: ")]
    assert len(slow) == 1
    assert "GET /v1/agl/queues" in slow[0]


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
    server, path = await serve(["one"], bounds={"stalled_seconds": 0.05})
    line = await dial(server)
    line.send(said.replace(b"{path}", path.encode()))
    status, headers, body = await asyncio.wait_for(line.answer(), 5)
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(body)["error"]["message"]
    assert await line.closed()
    other = await dial(server)
    other.send(post(path))
    assert text(await other.answer()) == "one"


async def test_an_error_with_one_connection_does_not_end_the_watch_of_the_others(serve, dial, caplog):
    server, path = await serve(["one"], bounds={"stalled_seconds": 0.05})
    broken, stalled = await dial(server), await dial(server)
    await until(lambda: len(server._connections.connections) == 2)
    (first, _) = server._connections.connections
    first.check_timeouts = None
    for line in (broken, stalled):
        line.send(post(path)[:-5])
    answered = [asyncio.create_task(line.answer()) for line in (broken, stalled)]
    done, _ = await asyncio.wait(answered, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result()[0] for task in done] == [408]
    assert "'NoneType' object is not callable" in caplog.text
    for task in answered:
        task.cancel()


async def test_a_client_that_drips_bytes_is_not_waited_for(serve, dial):
    server, path = await serve(["one"], bounds={"stalled_seconds": 0.1})
    line = await dial(server)
    line.send(f"POST {path} HTTP/1.1\r\n".encode())
    answer = asyncio.create_task(line.answer())
    number = 0
    while not answer.done():
        line.send(b"x-%d: y\r\n" % (number := number + 1))
        await asyncio.sleep(0.01)
    assert (await answer)[0] == 408


async def test_a_call_that_takes_long_is_not_taken_for_one_that_stalls(serve, dial):
    server, path = await serve(["one"], engine={"delay": 0.05}, bounds={"stalled_seconds": 0.02})
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


@asynccontextmanager
async def slow_reader(server, request):
    """A client that has read nothing yet of an answer that no buffer holds whole."""
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.setblocking(False)
        await asyncio.get_running_loop().sock_connect(caller, ("127.0.0.1", server.port))
        connections = server._connections.connections
        await until(lambda: connections)
        for each in connections:  # otherwise the system takes it all
            each.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        caller.send(request)
        await until(lambda: any(each.flow.write_paused for each in connections))
        yield caller


async def test_a_caller_that_reads_nothing_more_of_its_answer_is_hung_up_on(serve):
    server, path = await serve(["x" * 400_000], engine={"context_length": 10**6}, bounds={"stalled_seconds": 0.2})
    async with slow_reader(server, post(path)):
        await until(lambda: not server._connections.connections)


async def test_what_was_answered_arrives_whole_though_the_server_stops(serve):
    """The request is over, its bytes are still under way."""
    server, path = await serve(["x" * 400_000], engine={"context_length": 10**6})
    async with slow_reader(server, post(path)) as caller:
        await until(lambda: not server._connections.tasks)
        stopping, read = asyncio.create_task(server.stop()), b""
        while part := await asyncio.get_running_loop().sock_recv(caller, 65536):
            read += part
            await asyncio.sleep(0.001)
        await stopping
    assert json.loads(read.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"] == "x" * 400_000


# -- an upgrade that nobody makes ------------------------------------------------------------------------------------

H2C = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAoAAAAAIAAAAA")


@pytest.mark.parametrize("pieces", [1, 2, 3])
async def test_who_would_rather_speak_http2_is_served_and_the_body_is_never_a_request(serve, dial, pieces):
    server, path = await serve(["one", "two", "three", "four"])
    line = await dial(server)
    head, sneaked = post(path, BODY, *H2C).removesuffix(BODY), b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    for expected in ("one", "two"):
        whole = head + BODY
        for part in [whole] if pieces == 1 else [head, BODY] if pieces == 2 else [head[:30], head[30:], BODY]:
            line.send(part)
            await asyncio.sleep(0.01)
        assert text(await line.answer()) == expected
    line.send(post(path, sneaked, *H2C).removesuffix(sneaked))
    await asyncio.sleep(0.01)
    line.send(sneaked)
    assert (await line.answer())[0] == 400  # no JSON
    line.send(post(path, BODY, *H2C) + post(path))
    assert [text(await line.answer()) for _ in range(2)] == ["three", "four"]


async def test_a_websocket_is_told_that_there_is_none_and_a_tunnel_is_refused(serve, dial):
    server, path = await serve(["one"])
    line = await dial(server)
    get = f"GET {path.replace('chat/completions', 'responses')} HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\n"
    line.send(f"{get}upgrade: websocket\r\n\r\n".encode())
    assert (await line.answer())[0] == 426
    line.send(b"CONNECT other:443 HTTP/1.1\r\nhost: other:443\r\n\r\n")
    assert (await line.answer())[0] == 405
    assert await line.closed()


# -- strangers -------------------------------------------------------------------------------------------------------


async def test_nothing_is_kept_of_what_a_stranger_sends(serve, dial):
    server, path = await serve(["one"], gateway={"require_key": True})
    for url in (path, "/v1/chat/completions"):
        line = await dial(server)
        large = post(url, b" " * 500_000)
        line.send(large[:-1])
        await asyncio.sleep(0.1)
        assert server.bounds.unfinished_bytes == 0
        line.send(large[-1:])
        status, _, body = await line.answer()
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")


async def test_bodies_that_do_not_come_to_their_end_are_bounded_in_all(serve, dial):
    server, path = await serve(["one", "two"], bounds={"max_unfinished_bytes": 300_000})
    first, second = await dial(server), await dial(server)
    large = post(path, BODY + b" " * 200_000)
    first.send(large[:-1])
    await until(lambda: server.bounds.unfinished_bytes > 200_000)
    second.send(b"POST /v1/agl/rollouts HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + b" " * 199_999)
    status, headers, _ = await second.answer()
    assert (status, headers["retry-after"]) == (503, "1")
    first.send(large[-1:])
    assert text(await first.answer()) == "one"
    assert server.bounds.unfinished_bytes == 0


async def test_who_sends_slowly_holds_no_slot(serve, dial):
    server, path = await serve(["one", "two"], gateway={"max_concurrency": 1})
    slow, quick = await dial(server), await dial(server)
    large = post(path, BODY + b" " * MEGABYTE)
    slow.send(large[:-1])
    await asyncio.sleep(0.05)
    quick.send(post(path))
    assert text(await asyncio.wait_for(quick.answer(), 5)) == "one"
    slow.send(large[-1:])
    assert text(await slow.answer()) == "two"


@pytest.mark.parametrize(
    ("host", "served"),
    [
        *(("127.0.0.1:1", True), ("localhost", True), ("[::1]:1", True), ("hub:4747", True), ("a.localhost", True)),
        *(("evil.example:4747", False), ("127.0.0.1.evil.example", False), ("hub.mine.example", True)),
    ],
)
async def test_without_a_token_a_page_gets_nowhere_by_a_name_of_its_own(serve, dial, host, served):
    server, path = await serve(["one"], allowed_hosts=["hub.mine.example"])
    line = await dial(server)
    for request in (post(path), b"GET /v1/agl/rollouts HTTP/1.1\r\nhost: x\r\n\r\n"):
        line.send(request.replace(b"host: x", f"host: {host}".encode()))
        assert (await line.answer())[0] == (200 if served else 403)


async def test_with_a_token_any_name_will_do(serve, dial):
    server, _ = await serve(["one"], token="t")
    line = await dial(server)
    line.send(b"GET /v1/agl/rollouts HTTP/1.1\r\nhost: hub.example\r\nauthorization: Bearer t\r\n\r\n")
    assert (await line.answer())[0] == 200


async def test_where_calls_need_no_key_a_page_gets_nowhere_by_a_name_of_its_own_in_spite_of_a_token(serve, dial):
    server, path = await serve(["program", "page"], token="t")
    line = await dial(server)
    line.send(post(path).replace(b"host: x", b"host: hub.example"))
    assert text(await line.answer()) == "program"
    for url in (path, path + "?x=1"):
        line.send(post(url, BODY, "origin: http://evil.example").replace(b"host: x", b"host: evil.example"))
        assert (await line.answer())[0] == 403
    line.send(post(path, BODY, "origin: http://x"))
    assert text(await line.answer()) == "page"


async def test_a_page_of_another_site_makes_no_model_calls(serve, dial, store):
    server, path = await serve(["one", "two"], allowed_origins=["https://mine.example"])
    worker = "/worker/w/v1/chat/completions"
    line = await dial(server)
    for url in (path, worker, path + "?x=1"):
        line.send(post(url, BODY, "origin: https://evil.example", "content-type: text/plain"))
        assert (await line.answer())[0] == 403
    assert not server.engine.calls
    for expected, origin in (("one", "http://x"), ("two", "https://mine.example")):
        line.send(post(path, BODY, f"origin: {origin}"))
        assert text(await line.answer()) == expected


# -- compressed ------------------------------------------------------------------------------------------------------


def zstd(data):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.Codec("zstd").compress(data).to_pybytes()


@pytest.mark.parametrize(
    ("coding", "compress"),
    [
        *(("gzip", gzip.compress), ("deflate", zlib.compress)),
        *(("deflate", lambda data: zlib.compress(data, wbits=-15)), ("zstd", zstd)),
    ],
)
async def test_a_compressed_call_is_decompressed_up_to_the_limit(serve, dial, coding, compress):
    server, path = await serve(["one", "two"], gateway={"max_body_bytes": 2_000_000})
    line = await dial(server)
    header = f"content-encoding: {coding}"
    for padding, expected in ((0, "one"), (1_000_000, "two")):
        line.send(post(path, compress(BODY + b" " * padding), header))
        assert text(await line.answer()) == expected
    for body, status, named in (
        (compress(BODY + b" " * 3_000_000), 413, "2000000 bytes"),
        (compress(BODY)[:-9], 400, f"not one complete {coding} stream"),
        (b"hello, this is text", 400, coding),
    ):
        line.send(post(path, body, header))
        answered, _, said = await line.answer()
        assert (answered, named in json.loads(said)["error"]["message"]) == (status, True), said
    line.send(post(path, BODY, "content-encoding: br"))
    status, _, said = await line.answer()
    assert (status, "'br'" in said.decode()) == (415, True)
