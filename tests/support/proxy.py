"""An HTTP proxy on loopback that forwards requests, opens CONNECT tunnels and records what it received.

    async with LocalProxy(credentials="me:secret") as proxy:
        ... Provider(name="them", base_urls=("https://127.0.0.1:8443/v1",), proxy=proxy.url_with("me:secret"))

No caching and no keep-alive: one request or tunnel per connection.
"""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit


class LocalProxy:
    """Use as `async with`."""

    def __init__(
        self,
        credentials: str = "",
        refuse: bytes = b"",
        tls: ssl.SSLContext | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`credentials` ("user:password") are required (407 without them). With `refuse`, every request gets that
        status ("403 Forbidden"). With `tls`, the proxy itself uses https. `names` maps hosts that only the proxy
        resolves to their addresses."""
        self.heads: list[bytes] = []
        """Heads of the received requests."""
        self._expected = b"Basic " + b64encode(credentials.encode()) if credentials else b""
        self._refuse = refuse
        self._tls = tls
        self._names = dict(names or {})
        self._server: asyncio.Server | None = None
        self._port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return self.url_with("")

    def url_with(self, credentials: str) -> str:
        """Its URL with "user:password"."""
        account = f"{credentials}@" if credentials else ""
        return f"{'https' if self._tls else 'http'}://{account}127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the client disconnected
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        given = [line.partition(b": ") for line in head.split(b"\r\n") if line.lower().startswith(b"proxy-auth")]
        if self._expected and [value for _, _, value in given] != [self._expected]:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
        elif self._refuse:
            writer.write(b"HTTP/1.1 %s\r\ncontent-length: 0\r\n\r\n" % self._refuse)
        else:
            method, target, _ = head.partition(b"\r\n")[0].decode().split(" ")
            where = urlsplit(f"//{target}" if method == "CONNECT" else target)
            host = where.hostname or ""
            ours, theirs = await asyncio.open_connection(self._names.get(host, host), where.port)
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                theirs.write(_forwarded_head(head, f"{where.path}?{where.query}".rstrip("?")))
            copies = [asyncio.ensure_future(_copy(*each)) for each in ((reader, theirs), (ours, writer))]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                theirs.close()
        await writer.drain()


def _forwarded_head(head: bytes, target: str) -> bytes:
    """The head as forwarded to the server: the path only, without headers for the proxy."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    headers = [line for line in lines if not line.lower().startswith(b"proxy-")]
    return b"\r\n".join([b"%s %s HTTP/1.1" % (first.split(b" ")[0], target.encode()), *headers]) + b"\r\n\r\n"


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while part := await source.read(65536):
        sink.write(part)
        await sink.drain()
