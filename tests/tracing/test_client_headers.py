"""Calls to an attempt's own server say whose they are, whatever client makes them."""

import asyncio
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agentlightning.attempt_address import root_span_id_of, trace_id_of
from agentlightning.tracing import client_headers
from agentlightning.tracing.emit import track_agent
from agentlightning.tracing.scope import scope
from agentlightning.tracing.tracer import tracer

ATTEMPT = "at-" + "0123456789ab" * 2


class Nowhere:
    def put(self, spans):
        pass


@pytest.fixture(scope="module")
def server():
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append({name.lower(): value for name, value in self.headers.items()})
            moved = self.path.partition("/moved-to/")[2]
            self.send_response(307 if moved else 200)
            if moved:
                self.send_header("Location", moved)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    httpd.seen = seen
    httpd.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    client_headers.install()
    yield httpd
    httpd.shutdown()
    httpd.server_close()


@contextmanager
def attempt(server, **options):
    with scope("ro-1", ATTEMPT, Nowhere(), address=server.url, key="agl-ro-1.key", **options):
        yield


def with_httpx(url, headers):
    import httpx

    with httpx.Client() as client:
        client.get(url, headers=headers)


def with_httpx_async(url, headers):
    import httpx

    async def get():
        async with httpx.AsyncClient() as client:
            await client.get(url, headers=headers)

    asyncio.run(get())


def with_httpx2(url, headers):
    import httpx2

    with httpx2.Client() as client:
        client.get(url, headers=headers)


def with_aiohttp(url, headers):
    import aiohttp

    async def get():
        async with aiohttp.ClientSession(headers=headers) as session, session.get(url) as response:
            await response.read()

    asyncio.run(get())


def with_requests(url, headers):
    import requests

    requests.get(url, headers=headers, timeout=10).close()


def with_urllib3(url, headers):
    import urllib3

    with urllib3.PoolManager() as pool:
        pool.request("GET", url, headers=headers)


def with_urllib(url, headers):
    import urllib.request

    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
        response.read()


CLIENTS = [with_httpx, with_httpx_async, with_httpx2, with_aiohttp, with_requests, with_urllib3, with_urllib]


@pytest.mark.parametrize("get", CLIENTS)
def test_every_client_says_whose_its_call_is_and_who_speaks(server, get):
    module = get.__name__.removeprefix("with_").removesuffix("_async")
    if module != "urllib":
        pytest.importorskip(module)
    with attempt(server), track_agent("writer, first"):
        get(f"{server.url}/v1/models", {"x-own": "kept", "baggage": "user=7"})
    headers = server.seen[-1]
    assert headers["x-own"] == "kept"
    assert headers["x-agentlightning-attempt"] == "agl-ro-1.key"
    assert headers["traceparent"] == f"00-{trace_id_of(ATTEMPT)}-{root_span_id_of(ATTEMPT)}-01"
    assert headers["baggage"] == (
        f"user=7,agentlightning.rollout_id=ro-1,agentlightning.attempt_id={ATTEMPT},"
        "agentlightning.agent=writer%2C%20first"
    )


@pytest.mark.parametrize("get", CLIENTS)
def test_calls_elsewhere_and_calls_of_nobody_are_left_alone(server, get):
    module = get.__name__.removeprefix("with_").removesuffix("_async")
    if module != "urllib":
        pytest.importorskip(module)
    with scope("ro-1", ATTEMPT, Nowhere(), address="http://127.0.0.1:1", key="agl-secret"), track_agent("a"):
        get(server.url, {})
    get(server.url, {})
    for headers in server.seen[-2:]:
        assert not headers.keys() & {"x-agentlightning-attempt", "traceparent", "baggage"}


@pytest.mark.parametrize("get", [with_requests, with_urllib3, with_urllib])
def test_a_redirect_takes_no_key_to_another_server(server, get):
    if get is not with_urllib:
        pytest.importorskip(get.__name__.removeprefix("with_"))
    elsewhere = server.url.replace("127.0.0.1", "localhost")
    with attempt(server):
        get(f"{server.url}/moved-to/{elsewhere}", {})
    first, second = server.seen[-2:]
    assert first["x-agentlightning-attempt"] == "agl-ro-1.key"
    assert not second.keys() & {"x-agentlightning-attempt", "traceparent", "baggage"}


def test_urllib3_knows_the_server_by_an_address_without_its_usual_port(server, monkeypatch):
    import urllib3
    from urllib3.connection import HTTPConnection

    port = int(server.url.rpartition(":")[2])
    monkeypatch.setattr(HTTPConnection, "_new_conn", lambda self: socket.create_connection(("127.0.0.1", port)))
    with (
        scope("ro-1", ATTEMPT, Nowhere(), address="http://gateway.test", key="agl-ro-1.key"),
        urllib3.PoolManager() as pool,
    ):
        pool.request("GET", "http://gateway.test/v1/models")
    assert server.seen[-1]["x-agentlightning-attempt"] == "agl-ro-1.key"


def test_an_address_that_only_begins_alike_is_another(server):
    with attempt(server):
        assert client_headers.attempt_headers(server.url + "/v1")
        assert client_headers.attempt_headers(server.url)
        assert not client_headers.attempt_headers(server.url + "1/v1")
        assert not client_headers.attempt_headers(server.url + ".evil.example/v1")


def test_the_operation_a_call_is_made_in_is_its_parent(server):
    with attempt(server), tracer().start_as_current_span("step") as span:
        with_urllib(server.url, {})
    assert server.seen[-1]["traceparent"].split("-")[2] == f"{span.get_span_context().span_id:016x}"


def test_a_trace_that_the_agent_passes_on_itself_stays(server):
    own = f"00-{'a' * 32}-{'b' * 16}-01"
    with attempt(server):
        with_httpx(server.url, {"traceparent": own})
    assert server.seen[-1]["traceparent"] == own


def test_a_program_of_one_attempt_says_who_speaks(server):
    program = """
import urllib.request, httpx, os
import agentlightning as agl
with agl.track_agent("critic"):
    httpx.get(os.environ["URL"])
    urllib.request.urlopen(os.environ["URL"]).close()
httpx.get(os.environ["URL"])
"""
    environment = {"URL": f"{server.url}/v1", "AGL_EVENT_URL": f"{server.url}/rollout/r/attempt/a/events"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=60)
    assert [headers.get("baggage") for headers in server.seen[-3:]] == [
        "agentlightning.agent=critic",
        "agentlightning.agent=critic",
        None,
    ]
