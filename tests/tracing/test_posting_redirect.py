"""A program's spans that a proxy redirects are not delivered: it must hear of it."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from agentlightning.errors import StoreServerError
from agentlightning.span import Span
from agentlightning.tracing import outbox
from agentlightning.tracing.outbox import PostingSink


class Redirecting(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(308)
        self.send_header("Location", "https://elsewhere.example/v1/traces")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as httpd:
        Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_spans_that_a_server_redirects_are_said_to_be_lost(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_lost", [])  # else this process fails at its end, as a program must
    with pytest.raises(
        StoreServerError, match=r"1 spans \(search\) could not be sent .*HTTP 308: to https://elsewhere"
    ):
        PostingSink(address, "key", patience=5.0).put([Span("ro-1", "at-1", "search", start_time=0.0)])
