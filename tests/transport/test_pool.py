"""Calls to another server: what comes back, what is kept, and what is said where nothing comes back."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentlightning.transport import Transport, TransportError
from agentlightning.transport.base import MAX_HEAD_BYTES
from agentlightning.transport.pool import HIGH_WATER_BYTES

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Backend:
    """A server that answers each request with the next of its scripts, and hangs up after it where it is to."""

    def __init__(self, *scripts: bytes, close: bool = False) -> None:
        self.scripts, self.close = list(scripts), close
        self.connections = 0
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int((head.lower().partition(b"content-length: ")[2] or b"0").split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                self.asked.set()
                writer.write(self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0])
                if self.close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()


@asynccontextmanager
async def served(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncGenerator[tuple[Transport, str]]:
    under_way: set[asyncio.Task[None]] = set()

    def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(handler(reader, writer))
        under_way.add(task)
        task.add_done_callback(lambda _: writer.close())

    server = await asyncio.start_server(visit, "127.0.0.1", 0, ssl=tls)
    transport = Transport()
    try:
        yield transport, f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat"
    finally:
        await transport.close()
        server.close()
        await asyncio.wait_for(asyncio.gather(*under_way), 5)
        await server.wait_closed()


def whole(body: bytes, extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), extra, body)


async def test_a_request_arrives_as_it_was_given_and_connections_are_used_again() -> None:
    backend = Backend(whole(b"one"), whole(b"", b"X-Two: 2\r\n"), b"HTTP/1.1 204 No Content\r\n\r\n", whole(b"four"))
    async with served(backend) as (transport, url):
        bodies = []
        for number in range(4):
            async with await transport.send("POST", url, [(b"x-n", b"%d" % number)], b"body") as answer:
                bodies.append((answer.status, await answer.read()))
        assert bodies == [(200, b"one"), (200, b""), (204, b""), (200, b"four")]
    assert backend.connections == 1
    assert backend.requests[0].startswith(b"POST /v1/chat HTTP/1.1\r\nhost: 127.0.0.1:")
    assert backend.requests[3].endswith(b"x-n: 3\r\ncontent-length: 4\r\n\r\nbody")


async def test_header_names_come_in_lower_case() -> None:
    backend = Backend(whole(b"x", b"X-Request-ID: r1\r\n"))
    async with served(backend) as (transport, url), await transport.send("GET", url, []) as answer:
        assert (b"x-request-id", b"r1") in answer.headers


async def test_a_body_in_chunks_comes_as_it_is_sent() -> None:
    go_on = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in (b"3\r\none\r\n", b"3\r\ntwo\r\n0\r\n\r\n"):
            await go_on.wait()
            go_on.clear()
            writer.write(part)
        await reader.read()
        writer.close()

    async with served(handler) as (transport, url), await transport.send("GET", url, []) as answer:
        chunks = answer.chunks()
        go_on.set()
        assert await anext(chunks) == b"one"
        go_on.set()
        assert [chunk async for chunk in chunks] == [b"two"]


async def test_what_comes_while_a_stream_is_left_alone_comes_at_once_after_it() -> None:
    went_on = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n0\r\n")
        await went_on.wait()
        for number in range(1, 9):
            writer.write(b"1\r\n%d\r\n" % number)
            await asyncio.sleep(0.01)
        writer.close()  # before its end

    async with served(handler) as (transport, url), await transport.send("GET", url, []) as answer:
        chunks = answer.chunks(gather_seconds=1.0)
        assert await anext(chunks) == b"0"
        went_on.set()
        assert await anext(chunks) == b"12345678"
        with pytest.raises(TransportError, match="in the middle"):
            await anext(chunks)


async def test_the_end_of_a_stream_waits_for_no_more() -> None:
    went_on = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n0\r\n")
        await went_on.wait()
        writer.write(b"1\r\n1\r\n0\r\n\r\n")

    async with served(handler) as (transport, url), await transport.send("GET", url, []) as answer:
        chunks = answer.chunks(gather_seconds=60.0)
        assert await anext(chunks) == b"0"
        went_on.set()
        async with asyncio.timeout(10):
            assert [chunk async for chunk in chunks] == [b"1"]


async def test_a_body_may_end_with_the_connection() -> None:
    backend = Backend(b"HTTP/1.1 200 OK\r\n\r\nall of it", close=True)
    async with served(backend) as (transport, url), await transport.send("GET", url, []) as answer:
        assert await answer.read() == b"all of it"


async def test_what_precedes_the_answer_is_passed_over() -> None:
    script = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + whole(b"it")
    async with served(Backend(script)) as (transport, url), await transport.send("POST", url, [], b"b") as answer:
        assert (answer.status, await answer.read(), answer.headers) == (200, b"it", [(b"content-length", b"2")])


async def test_a_kept_connection_that_the_server_closed_is_replaced_once() -> None:
    backend = Backend(whole(b"x", b"Connection: keep-alive\r\n"), close=True)
    async with served(backend) as (transport, url):
        for _ in range(5):
            async with await transport.send("POST", url, [], b"b") as answer:
                assert await answer.read() == b"x"
    assert len(backend.requests) == 5


async def test_a_server_that_hangs_up_on_a_new_connection_is_not_asked_again() -> None:
    backend = Backend(b"", close=True)
    async with served(backend) as (transport, url):
        with pytest.raises(TransportError, match="before its response") as caught:
            await transport.send("POST", url, [], b"b")
    assert caught.value.reason == "closed"
    assert len(backend.requests) == 1


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", "closed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf", "closed"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nhalf", "protocol"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "protocol"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (MAX_HEAD_BYTES + 1), "protocol"),
    ],
)
async def test_an_answer_that_is_cut_short_or_none_says_so(script: bytes, reason: str) -> None:
    async with served(Backend(script, close=True)) as (transport, url):
        with pytest.raises(TransportError, match=r"127\.0\.0\.1") as caught:
            async with await transport.send("POST", url, [], b"b") as answer:
                await answer.read()
    assert caught.value.reason == reason


@pytest.mark.parametrize("script", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"])
async def test_silence_ends_a_call(script: bytes) -> None:
    backend = Backend(script)
    async with served(backend) as (transport, url):
        with pytest.raises(TransportError, match=r"sent nothing for 0\.05 s") as caught:
            async with await transport.send("POST", url, [], b"b", timeout_seconds=0.05) as answer:
                await answer.read()
        await asyncio.wait_for(backend.gone.wait(), 5)
    assert caught.value.reason == "timeout"


async def test_silence_ends_a_stream_that_was_just_left_alone() -> None:
    async with served(Backend(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")) as (transport, url):
        answer = await transport.send("POST", url, [], b"b", timeout_seconds=0.05)
        with pytest.raises(TransportError, match=r"sent nothing for 0\.05 s"):
            async with asyncio.timeout(5):
                assert [chunk async for chunk in answer.chunks(gather_seconds=0.2)] == [b"half"]


async def test_nobody_listening_is_a_failure_to_connect() -> None:
    transport = Transport()
    for url in ("http://127.0.0.1:1/", "http://nowhere.invalid/"):
        with pytest.raises(TransportError) as caught:
            await transport.send("GET", url, [], connect_seconds=5)
        assert caught.value.reason == "connect"
    await transport.close()


@pytest.mark.parametrize("url", ["ftp://x/", "http:///v1", "http://x:port/", "http://x/a b\r\nc"])
async def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(TransportError, match="valid URL"):
        await Transport().send("GET", url, [])


async def test_a_header_of_two_lines_is_never_sent_and_never_shown() -> None:
    async with served(Backend(whole(b""))) as (transport, url):
        with pytest.raises(TransportError, match="x-bad") as caught:
            await transport.send("GET", url, [(b"x-bad", b"secret\r\nx-other: 1")])
    assert "secret" not in str(caught.value)


async def test_a_call_that_is_given_up_closes_its_connection() -> None:
    backend = Backend(b"")
    async with served(backend) as (transport, url):
        call = asyncio.create_task(transport.send("POST", url, [], b"b"))
        await asyncio.wait_for(backend.asked.wait(), 5)
        call.cancel()
        await asyncio.wait_for(backend.gone.wait(), 5)

    backend = Backend(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
    async with served(backend) as (transport, url):
        async with await transport.send("POST", url, [], b"b"):
            pass
        await asyncio.wait_for(backend.gone.wait(), 5)


async def test_a_reader_that_does_not_read_makes_the_server_wait() -> None:
    size, written = 64 * 1024 * 1024, 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(bytes(1 << 20))
            written += 1 << 20
            await writer.drain()
        await reader.read()
        writer.close()

    async with served(handler) as (transport, url), await transport.send("GET", url, []) as answer:
        seen = -1
        while seen != written:  # until the server stands still
            seen = written
            await asyncio.sleep(0.05)
        assert written < size // 2
        assert len(answer.unread) < 4 * HIGH_WATER_BYTES  # type: ignore[attr-defined]
        assert sum([len(chunk) async for chunk in answer.chunks()]) == size


async def test_a_closed_transport_takes_no_calls() -> None:
    async with served(Backend(whole(b"x"))) as (transport, url):
        await transport.close()
        with pytest.raises(TransportError, match="was closed"):
            await transport.send("GET", url, [])


async def test_tls_is_spoken_and_a_stranger_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "1", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    async with served(Backend(whole(b"secret")), tls) as (transport, url):
        with pytest.raises(TransportError, match="is not trusted"):
            await transport.send("GET", url, [])
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    backend = Backend(whole(b"secret"))
    async with served(backend, tls) as (transport, url), await transport.send("GET", url, []) as answer:
        assert await answer.read() == b"secret"
