"""Promises about proxies: which calls go through one, how, and that its password is nowhere to be read."""

from __future__ import annotations

import asyncio
import os
import pickle
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from unittest import mock
from urllib.parse import quote

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.proxy import LocalProxy

from agentlightning.errors import ConfigError
from agentlightning.transport import Transport, TransportError
from agentlightning.transport.base import Origin
from agentlightning.transport.options import ConnectOptions, Proxy, secrets_of, without_credentials

PROXY = "http://proxy:3128"
SET = {"HTTP_PROXY": PROXY, "HTTPS_PROXY": PROXY}


def found(url: str, **environment: str) -> str | None:
    secure, _, rest = url.partition("://")
    host, _, port = rest.rpartition(":")
    with mock.patch.dict(os.environ, environment, clear=True):
        proxy = ConnectOptions.create().proxy(Origin(secure == "https", host.strip("[]"), int(port)))
    return proxy and str(proxy)


# -- which calls go through it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "plain", "private"),
    [
        ({}, None, None),
        ({"HTTP_PROXY": "http://a:1"}, "http://a:1", None),
        ({"HTTPS_PROXY": "http://a:1"}, None, "http://a:1"),
        ({"ALL_PROXY": "http://a:1"}, "http://a:1", "http://a:1"),
        ({"ALL_PROXY": "http://a:1", "https_proxy": "https://b"}, "http://a:1", "https://b:443"),
        ({"HTTP_PROXY": "http://a:1", "http_proxy": "b:2"}, "http://b:2", None),
        ({"HTTPS_PROXY": "http://a:1", "https_proxy": ""}, None, None),
        ({"HTTP_PROXY": "http://a:1", "REQUEST_METHOD": "GET"}, None, None),
        ({"HTTPS_PROXY": "http://[::1]:3128"}, None, "http://[::1]:3128"),
        ({"HTTPS_PROXY": "http://a"}, None, "http://a:80"),
        ({"HTTPS_PROXY": " http://a:1 "}, None, "http://a:1"),
        ({"HTTPS_PROXY": " ", "ALL_PROXY": "http://a:1"}, "http://a:1", "http://a:1"),
    ],
)
def test_the_environment_names_the_proxy_of_each_kind_of_call(environment, plain, private):
    assert found("http://api.example:80", **environment) == plain
    assert found("https://api.example:443", **environment) == private


@pytest.mark.parametrize(
    ("listed", "url", "through"),
    [
        ("*", "https://api.example:443", False),
        ("api.example", "https://api.example:443", False),
        ("API.example ", "https://Api.Example.:443", False),
        ("example", "https://api.example:443", False),
        (".example", "https://api.example:443", False),
        ("*.example", "https://api.example:443", False),
        (".api.example", "https://api.example:443", False),
        ("ample", "https://api.example:443", True),
        ("other,api.example", "https://api.example:443", False),
        ("other api.example", "https://api.example:443", False),
        ("api.example:443", "https://api.example:443", False),
        ("api.example:8443", "https://api.example:443", True),
        ("http://api.example", "https://api.example:443", True),
        ("https://api.example", "https://api.example:443", False),
        ("all://api.example", "https://api.example:443", False),
        ("10.0.0.7", "http://10.0.0.7:8000", False),
        ("10.0.0.0/8", "http://10.0.0.7:8000", False),
        ("10.0.0.0/8", "http://11.0.0.7:8000", True),
        ("10.0.0.0/8:8000", "http://10.0.0.7:8000", False),
        ("fd00::/8", "http://[fd00::1]:8000", False),
        ("[fd00::1]:8000", "http://[fd00::1]:8000", False),
        ("fd00::1", "http://[fd00::2]:8000", True),
        ("10.0.0.0/8", "http://10.example:80", True),
        (",, ,", "https://api.example:443", True),
        ("", "https://api.example:443", True),
    ],
)
def test_no_proxy_excepts_domains_addresses_networks_and_ports(listed, url, through):
    assert found(url, **SET, NO_PROXY=listed) == (PROXY if through else None)
    assert found(url, **SET, no_proxy=listed) == (PROXY if through else None)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "here.localhost", "127.0.0.1", "127.1.2.3", "[::1]"])
def test_this_machine_is_never_called_through_a_proxy_unless_a_setting_says_so(host):
    assert found(f"http://{host}:8000", **SET, ALL_PROXY=PROXY) is None
    assert str(ConnectOptions.create(PROXY).proxy(Origin(False, host.strip("[]"), 8000))) == PROXY


def test_a_proxy_nobody_goes_through_may_be_of_any_kind_and_one_that_is_needed_is_refused_by_name():
    environment = {"ALL_PROXY": "socks5://me:hidden-word@sox:1080", "NO_PROXY": "example"}
    assert found("http://127.0.0.1:80", **environment) is None
    assert found("http://api.example:80", **environment) is None
    with pytest.raises(
        ConfigError, match=r"HTTP_PROXY \(or ALL_PROXY\) names a proxy of the kind 'socks5'.*NO_PROXY=\*"
    ) as caught:
        found("http://elsewhere:80", **environment)
    assert "hidden-word" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "http://", "http://:3128", "http://[x", "http://a:port", "http://a:99999", "ftp://a"]
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="HTTPS_PROXY"):
        Proxy.parse(url, "HTTPS_PROXY")


@settings(max_examples=30)
@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=8, max_size=20))
def test_a_password_is_sent_and_shown_nowhere(password):
    url = f"http://me:{quote(password, safe='')}@proxy:3128"
    options = ConnectOptions.create(url)
    proxy = options.proxy(Origin(True, "api.example", 443))
    assert proxy is not None
    ((name, value),) = proxy.headers
    assert (name, b64decode(value.removeprefix(b"Basic ")).decode()) == (b"proxy-authorization", f"me:{password}")
    assert password in secrets_of(url)
    for text in (repr(options), str(options), repr(proxy), str(proxy), without_credentials(url)):
        assert not any(secret in text for secret in secrets_of(url))
    assert without_credentials(url) == "http://***@proxy:3128"
    assert pickle.loads(pickle.dumps(options)) == options


# -- how ---------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def through(proxy, ca_file=None):
    transport = Transport(ConnectOptions.create(proxy, ca_file))
    yield transport
    await transport.close()


async def test_a_plain_call_is_passed_on_by_the_proxy(start):
    backend = await start(b"one", b"two")
    url, host = f"{backend.url}/v1/chat?a=1", backend.url.removeprefix("http://")
    async with LocalProxy("me:s3cret p@ss") as proxy, through(proxy.url_with("me:s3cret%20p%40ss")) as transport:
        for expected in (b"one", b"two"):
            async with await transport.send("POST", url, [(b"x-mine", b"1")], b"body") as answer:
                assert await answer.read() == expected
    assert proxy.heads[0].startswith(f"POST {url} HTTP/1.1\r\nhost: {host}\r\nproxy-authorization: Basic ".encode())
    assert backend.requests[0].startswith(f"POST /v1/chat?a=1 HTTP/1.1\r\nhost: {host}\r\n".encode())
    assert backend.requests[0].endswith(b"\r\n\r\nbody")
    assert b"proxy-" not in backend.requests[0]
    assert backend.connections == 1


@pytest.mark.parametrize("private_proxy", [False, True])
async def test_a_private_call_goes_through_a_tunnel_that_the_proxy_cannot_look_into(start, authority, private_proxy):
    tls = authority.server("127.0.0.1")
    backend = await start(b"one", b"x" * 500_000, b"three", tls=tls)
    host, sizes = backend.url.removeprefix("https://"), []
    async with (
        LocalProxy("me:secret", tls=tls if private_proxy else None) as proxy,
        through(proxy.url_with("me:secret"), authority.file) as transport,
    ):
        for _ in range(3):
            async with await transport.send("POST", f"{backend.url}/v1/chat", [(b"x-api-key", b"k")], b"b") as answer:
                sizes.append(len(await answer.read()))
    assert sizes == [3, 500_000, 5]
    asked = f"CONNECT {host} HTTP/1.1\r\nhost: {host}\r\nproxy-authorization: Basic bWU6c2VjcmV0\r\n\r\n"
    assert proxy.heads == [asked.encode()]
    assert backend.requests[0].startswith(b"POST /v1/chat HTTP/1.1\r\n")
    assert b"proxy-" not in backend.requests[0]


async def test_what_only_the_proxy_can_find_is_reached_with_the_environment_alone(start, authority, monkeypatch):
    private = await start(b"one", tls=authority.server("api.example"))
    plain = await start(b"two")
    async with LocalProxy(names={"api.example": "127.0.0.1"}) as proxy:
        for name in ("HTTPS_PROXY", "HTTP_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv("SSL_CERT_FILE", authority.file)
        monkeypatch.delenv("NO_PROXY", raising=False)
        transport = Transport()
        bodies = []
        for backend in (private, plain):
            async with await transport.send("GET", backend.url.replace("127.0.0.1", "api.example"), []) as answer:
                bodies.append(await answer.read())
        await transport.close()
    assert bodies == [b"one", b"two"]
    assert [head.split(b" ")[0] for head in proxy.heads] == [b"CONNECT", b"GET"]


def test_a_tunnel_is_opened_by_the_loop_that_servers_run_in(backend_type, authority):
    async def call():
        backend, tls = backend_type(b"one"), authority.server("127.0.0.1")
        server = await asyncio.start_server(backend, "127.0.0.1", 0, ssl=tls)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with LocalProxy(tls=tls) as proxy, through(proxy.url, authority.file) as transport:
            answer = await transport.send("GET", url, [], connect_seconds=5)
            body = await answer.read()
        server.close()
        return body

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(uvloop.run, call()).result(20) == b"one"


@pytest.mark.parametrize(
    ("options", "reason", "said"),
    [
        ({"credentials": "you:other"}, "proxy", "requires credentials"),
        ({"refuse": b"401 Unauthorized"}, "proxy", "requires credentials"),
        ({"refuse": b"403 Forbidden by policy"}, "proxy", "status 403 Forbidden by policy"),
        ({"refuse": b"502 Bad Gateway"}, "connect", "status 502 Bad Gateway"),
        ({"refuse": b"banana"}, "protocol", "invalid HTTP response"),
    ],
)
async def test_a_proxy_that_refuses_is_named_without_its_password(options, reason, said):
    async with LocalProxy(**options) as proxy, through(proxy.url_with("me:hidden-word")) as transport:
        with pytest.raises(TransportError, match=said) as caught:
            await transport.send("GET", "https://api.example/v1/models", [])
    assert caught.value.reason == reason
    assert "https://api.example:443" in str(caught.value)
    assert proxy.url in str(caught.value)
    assert "hidden-word" not in str(caught.value)


async def test_a_proxy_that_is_not_there_is_a_failure_to_connect():
    async with through("http://127.0.0.1:1") as transport:
        for url in ("https://api.example/", "http://api.example/"):
            with pytest.raises(TransportError, match=r"through the proxy http://127\.0\.0\.1:1") as caught:
                await transport.send("GET", url, [])
            assert caught.value.reason == "connect"


async def test_a_proxy_that_says_nothing_is_waited_for_as_long_as_for_a_connection():
    gone = asyncio.Event()

    async def silent(reader, writer):
        await reader.read()
        writer.close()
        gone.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with through(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as transport:
        with pytest.raises(TransportError, match="accepted no connection through the proxy") as caught:
            await transport.send("GET", "https://api.example/", [], connect_seconds=0.3)
    assert caught.value.reason == "connect"
    await asyncio.wait_for(gone.wait(), 5)
    server.close()
