"""A wire to PostgreSQL that can be cut at the worst moment."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

import pytest


class Relay:
    """Passes on what clients and a server say to one another, until told otherwise."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.port is not None
        self._target = ("127.0.0.1", parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.url = url.replace(f":{parts.port}/", f":{self._listener.getsockname()[1]}/")
        self.next: Literal["pass", "lose question", "lose answer"] = "pass"
        """What becomes of the next message of a client; its connection is then cut."""
        self._start(self._accept)

    def cut(self) -> None:
        """Every connection that there is."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def _start(self, work: object, *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            self._start(self._pass_questions, client, server)
            self._start(self._pass_answers, client, server)

    def _pass_questions(self, client: socket.socket, server: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self.next == "lose question":
                    self.next = "pass"
                    break
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _pass_answers(self, client: socket.socket, server: socket.socket) -> None:
        with server, contextlib.suppress(OSError):
            while data := server.recv(65536):
                if self.next == "lose answer":
                    self.next = "pass"
                    break
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(postgres_store_url: str) -> Iterator[Relay]:
    relay = Relay(postgres_store_url)
    yield relay
    relay.close()
