"""What a proxy redirects, or answers with a page of its own, is not delivered: the program must hear of it."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from agentlightning.errors import StoreServerError
from agentlightning.span import Span
from agentlightning.tracing import outbox
from agentlightning.tracing.outbox import PostingSink


class Proxy(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        moved = self.path.startswith("/moved/")
        body = b"" if moved else b"<html>Sign in</html>"
        self.send_response(308 if moved else 200)
        if moved:
            self.send_header("Location", "https://elsewhere.example/v1/traces")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as httpd:
        Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


@pytest.fixture(autouse=True)
def lost(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was lost; else this process fails at its end, as a program must."""
    found: list[str] = []
    monkeypatch.setattr(outbox, "_lost", found)
    return found


SPAN = Span("ro-1", "at-1", "search", start_time=0.0)


@pytest.mark.parametrize(
    ("path", "problem"), [("/moved", "HTTP 308: to https://elsewhere"), ("", "HTTP 200: <html>Sign in")]
)
def test_spans_that_no_server_has_taken_are_said_to_be_lost(
    address: str, path: str, problem: str, lost: list[str]
) -> None:
    with pytest.raises(StoreServerError, match=rf"1 spans \(search\) could not be sent .*{problem}"):
        PostingSink(address + path, "key", patience=5.0).put([SPAN])
    assert len(lost) == 1


@pytest.mark.parametrize("given", ["nan", "-1", "soon"])
def test_a_patience_that_is_no_time_is_the_usual_one(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setenv("AGL_PATIENCE", given)
    with pytest.raises(StoreServerError, match=r"for 0\.05 s, see AGL_PATIENCE"):
        PostingSink("http://127.0.0.1:9", "key").put([SPAN])
