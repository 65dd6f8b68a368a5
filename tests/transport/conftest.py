"""An authority of our own, for servers that speak TLS on loopback."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

_USAGE = ("-addext", "keyUsage=critical,digitalSignature,keyCertSign")
"""Python insists on it from 3.13 on."""


class Authority:
    """Signs certificates for servers; `file` is its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = str(folder / "authority.pem")
        made = ("req", "-x509", *self._key("authority"), "-out", self.file, "-days", "1", "-subj", "/CN=ours")
        self._run(*made, *_USAGE)

    def server(self, name: str) -> ssl.SSLContext:
        """Of a server that is called so."""
        files = self._folder / f"{name}.key", self._folder / f"{name}.pem"
        if not files[1].exists():
            kind = "IP" if name[0].isdigit() else "DNS"
            signed = ("-CA", self.file, "-CAkey", str(self._folder / "authority.key"), "-days", "1")
            extra = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={kind}:{name}", *_USAGE)
            self._run("req", "-x509", *self._key(name), *signed, "-out", str(files[1]), *extra)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files[1], files[0])
        return context

    def _key(self, name: str) -> list[str]:
        made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout"]
        return [*made, str(self._folder / f"{name}.key")]

    def _run(self, *words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


class Backend:
    """A server that answers each request with the next of its bodies."""

    def __init__(self, *bodies: bytes) -> None:
        self.bodies = list(bodies)
        self.connections = 0
        self.requests: list[bytes] = []
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int((head.lower().partition(b"content-length: ")[2] or b"0").split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                body = self.bodies.pop(0)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()


@pytest.fixture
def backend_type() -> type[Backend]:
    return Backend


Started = Callable[..., Awaitable[Backend]]


@pytest.fixture
async def start() -> AsyncGenerator[Started]:
    """start(*bodies, tls=None): a server on loopback."""
    servers: list[asyncio.Server] = []

    async def start(*bodies: bytes, tls: ssl.SSLContext | None = None) -> Backend:
        backend = Backend(*bodies)
        server = await asyncio.start_server(backend, "127.0.0.1", 0, ssl=tls)
        servers.append(server)
        backend.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return backend

    yield start
    for server in servers:
        server.close()
