"""A real HTTP server on loopback whose answers a test scripts."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = Callable[[dict[str, Any]], Any]
"""Body of a request -> body of the reply, or (status, body), or seconds to stay silent."""


@dataclass
class Raw:
    """A body as it is sent, in parts with a pause before each."""

    parts: list[bytes]
    headers: dict[str, str] = field(default_factory=dict[str, str])
    pause: float = 0.0

    def send(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in {"Connection": "close", **self.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):  # the client has gone
            for part in self.parts:
                time.sleep(self.pause)
                handler.wfile.write(part)
                handler.wfile.flush()


class Service:
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list[Answer] = []
        """One for each request; the last one goes on."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.seen.append(body)
                service.headers.append({name.lower(): value for name, value in self.headers.items()})
                answer = service.answers.pop(0) if len(service.answers) > 1 else service.answers[0]
                found = answer(body)
                if isinstance(found, float):
                    time.sleep(found)
                    found = (200, {})
                status, value = found if isinstance(found, tuple) else (200, found)
                if isinstance(value, Raw):
                    value.send(self)
                    return
                data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


def chat(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.server.shutdown()
    made.server.server_close()
