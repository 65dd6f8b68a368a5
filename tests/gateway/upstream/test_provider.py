"""Promises of what is known of a provider: how it is reached, and which of its answer's headers its caller sees."""

import asyncio
import json
import logging
import tomllib

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.proxy import LocalProxy

from agentlightning.errors import ConfigError
from agentlightning.gateway.config import GatewayConfig, Provider
from agentlightning.gateway.upstream.call import Redactor
from agentlightning.util.settings import dump_toml, load_settings

SEEN = [
    (b"x-request-id", b"req_1"),
    (b"request-id", b"req_2"),
    (b"retry-after", b"3"),
    (b"retry-after-ms", b"250"),
    (b"openai-processing-ms", b"42"),
    (b"x-ratelimit-remaining-requests", b"59"),
    (b"x-ratelimit-reset-tokens", b"6m0s"),
    (b"anthropic-ratelimit-tokens-remaining", b"9000"),
]
KEPT_BACK = [
    (b"content-length", b"12"),
    (b"connection", b"close"),
    (b"transfer-encoding", b"chunked"),
    (b"content-type", b"application/json"),
    (b"set-cookie", b"session=1"),
    (b"openai-organization", b"acme"),
    (b"anthropic-organization-id", b"acme"),
    (b"x-should-retry", b"true"),
    (b"server", b"them"),
]


visible_headers = Redactor(Provider(name="them", base_urls=("http://host/v1",))).visible_headers


def test_callers_see_request_ids_rate_limits_and_when_to_come_back_and_nothing_else():
    mixed = [header for pair in zip(SEEN, KEPT_BACK, strict=False) for header in pair] + KEPT_BACK[len(SEEN) :]
    assert visible_headers(mixed) == SEEN


@pytest.mark.parametrize("name", [b"x-request-id", b"request-id"])
def test_a_request_id_is_found_by_the_sdks_of_either_dialect(name):
    assert sorted(visible_headers([(name, b"req_1")])) == [(b"request-id", b"req_1"), (b"x-request-id", b"req_1")]


def test_a_header_that_comes_twice_is_passed_twice():
    twice = [(b"x-ratelimit-limit-requests", b"60"), (b"x-ratelimit-limit-requests", b"100")]
    assert visible_headers(twice) == twice


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from([name for name, _ in SEEN]), st.binary(max_size=40))))
def test_what_is_passed_is_always_one_short_line(headers):
    for _, value in visible_headers(headers):
        assert not set(value) & set(b"\r\n\0")
    assert visible_headers([(b"request-id", b"x" * 70000)]) == []


# -- proxies -----------------------------------------------------------------------------------------------------------


def routed(url, **options):
    them = {"name": "them", "base_urls": [f"{url}/v1"], "retries": 3, **options}
    return GatewayConfig.model_validate({"providers": [them], "routes": [{"model": "theirs", "provider": "them"}]})


async def ask(service):
    client = await service.client()
    return await client.chat.completions.create(model="theirs", messages=[{"role": "user", "content": "hi"}])


async def test_a_provider_is_reached_through_the_proxy_it_is_configured_with(serve):
    async with ScriptedProvider([Reply(chat_answer("Hello."))]) as them, LocalProxy("me:hidden-word") as proxy:
        service = await serve([], config=routed(them.url, proxy=proxy.url_with("me:hidden-word")))
        assert (await ask(service)).choices[0].message.content == "Hello."
    assert proxy.heads[0].startswith(f"POST {them.url}/v1/chat/completions HTTP/1.1\r\n".encode())
    assert not any(name.startswith("proxy-") for name in them.seen[0].headers)


@pytest.mark.parametrize("url", ["https://api.example", "http://api.example"])
async def test_a_proxy_that_refuses_is_asked_once_and_its_password_is_nowhere(serve, caplog, url):
    caplog.set_level(logging.DEBUG)
    async with LocalProxy("me:other") as proxy:
        service = await serve([], config=routed(url, proxy=proxy.url_with("me:hidden-word")))
        with pytest.raises(openai.APIStatusError, match="cannot be reached through its proxy") as caught:
            await ask(service)
    assert (caught.value.status_code, caught.value.code, len(proxy.heads)) == (502, "proxy_refused", 1)
    (span,) = await service.spans()
    for text in (str(caught.value), caplog.text, repr(span), repr(service.gateway.providers["them"].provider)):
        assert "hidden-word" not in text
        assert "bWU6aGlkZGVuLXdvcmQ=" not in text


async def test_a_server_that_cannot_be_talked_to_in_private_is_asked_once_and_named(serve):
    connections = []

    async def plain(reader, writer):
        connections.append(await reader.read(1))
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    service = await serve([], config=routed(f"https://{host}"))
    with pytest.raises(openai.APIStatusError, match=f"{host} .* is it http://") as caught:
        await ask(service)
    server.close()
    assert (caught.value.status_code, caught.value.code, len(connections)) == (502, "provider_tls", 1)


def test_a_configuration_that_is_written_down_names_the_proxy_without_its_password():
    config = routed("http://api.example", proxy="http://me:hidden-word@proxy:3128")
    written = dump_toml(config)
    assert "hidden-word" not in written
    assert "http://***@proxy:3128" in written
    with pytest.raises(ValueError, match="has no passwords"):
        GatewayConfig.model_validate(tomllib.loads(written) | {"default_model": None, "accept_any_model": None})
    for proxy in ("http://proxy:3128", False):
        assert Provider(name="x", base_urls=("http://h",), proxy=proxy).model_dump()["proxy"] == proxy


@pytest.mark.parametrize("proxy", ["", "socks5://h:1", "http://h:port", True])
def test_a_proxy_that_cannot_be_used_is_refused_before_the_first_call(proxy):
    with pytest.raises(ValueError, match="proxy"):
        Provider(name="x", base_urls=("http://h",), proxy=proxy)


@pytest.mark.parametrize(
    "wrong",
    [{"proxy": "socks5://me:hidden-word@h:1"}, {"api_key": ["hidden-word"]}, {"headers": {"x": ["hidden-word"]}}],
)
def test_a_mistake_beside_a_secret_is_told_without_it(tmp_path, wrong):
    config = {"providers": [{"name": "x", "base_urls": ["http://h"], **wrong}]}
    for make in (lambda: GatewayConfig.model_validate(config), lambda: Provider(**config["providers"][0])):
        with pytest.raises(ValueError, match=next(iter(wrong))) as caught:
            make()
        assert "hidden-word" not in str(caught.value)
    (tmp_path / "routes.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"providers\.0\.{next(iter(wrong))}") as caught:
        load_settings(GatewayConfig, toml=tmp_path / "routes.json")
    assert "hidden-word" not in str(caught.value)
    override = f'providers=[{{name="x", base_urls=["http://h"], {next(iter(wrong))}=["hidden-word"]}}]'
    with pytest.raises(ConfigError) as caught:
        load_settings(GatewayConfig, overrides=[override])
    assert "hidden-word" not in str(caught.value)


def test_a_proxy_of_the_environment_that_cannot_be_used_is_refused_where_it_is_needed(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://h:1")
    Provider(name="x", base_urls=("http://127.0.0.1:8000/v1",)).connect_options()
    with pytest.raises(ConfigError, match="ALL_PROXY"):
        Provider(name="x", base_urls=("https://api.example/v1",)).connect_options()


def test_what_a_provider_is_shown_as_holds_no_key():
    secret = "a-secret-that-nobody-sees"
    options = {"api_key": secret, "headers": {"api-key": secret}, "proxy": f"http://me:{secret}@proxy:3128"}
    assert secret not in repr(Provider(name="x", base_urls=("http://h",), **options))


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_divide_the_limits_of_a_provider_without_a_rest(processes):
    limits = {"max_concurrency": 8, "requests_per_minute": 3, "tokens_per_minute": 1000}
    provider = Provider(name="them", base_urls=("http://host/v1",), **limits)
    parts = [provider.divided(number, processes) for number in range(1, processes + 1)]
    for name, limit in limits.items():
        each = [getattr(part, name) for part in parts]
        assert (sum(each), max(each) - min(each) <= 1, min(each) > 0) == (limit, True, True)
    unlimited = Provider(name="them", base_urls=("http://host/v1",)).divided(1, processes)
    assert (unlimited.requests_per_minute, unlimited.tokens_per_minute) == (None, None)
    with pytest.raises(ConfigError, match=r"requests_per_minute=3 .* between 4 processes"):
        provider.divided(1, 4)
