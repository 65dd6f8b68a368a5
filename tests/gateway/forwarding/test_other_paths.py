"""Requests to the other paths of a provider: forwarded as they are, and recorded without their content."""

import io

import httpx
import openai
import orjson
import pytest
from tests.support.provider import Reply, ScriptedProvider
from tests.support.provider_streams import messages_answer

from agentlightning import span as names
from agentlightning.assemble import calls
from agentlightning.gateway.config import GatewayConfig

pytestmark = pytest.mark.integration

KEY = "sk-theirs-0123456789"
SECRET_TEXT = "only the provider may read this"


@pytest.fixture
async def ask(serve):
    """ask(replies, **options) -> (the service, OpenAI's provider, Anthropic's provider)."""
    opened = []

    async def start(replies, all_paths=True, **options):
        providers = [await ScriptedProvider(replies).start() for _ in range(2)]
        opened.extend(providers)
        openai_like = {"name": "o", "base_urls": [f"{providers[0].url}/v1"]}
        claude_like = {"name": "a", "base_urls": [providers[1].url], "dialect": "anthropic"}
        common = {"api_key": KEY, "retries": 0, "all_paths": all_paths} | options
        rules = [{"model": "claude*", "provider": "a"}, {"provider": "o"}]
        config = {"providers": [openai_like | common, claude_like | common], "routes": rules}
        return await serve([], config=GatewayConfig.model_validate(config)), *providers

    yield start
    for provider in opened:
        await provider.stop()


def answer(seen):
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    if "speech" in seen.path:
        return Reply(events=[b"\0\1", b"\2"], headers={"content-type": "audio/mpeg"})
    if "generations" in seen.path:
        usage = {"input_tokens": 5, "output_tokens": 7, "total_tokens": 12}
        return Reply({"created": 1, "data": [{"b64_json": "AAAA"}], "usage": usage})
    if "files" in seen.path:
        file = {"id": "file-1", "object": "file", "bytes": 1, "created_at": 1, "filename": "x", "purpose": "user_data"}
        return Reply(file | {"status": "processed"})
    result = {"flagged": False, "categories": {}, "category_scores": {}, "category_applied_input_types": {}}
    return Reply({"id": "m-1", "model": "m", "text": SECRET_TEXT, "results": [result], "usage": usage})


async def test_the_sdks_other_calls_reach_the_provider_and_are_recorded_without_their_content(ask):
    service, provider, _ = await ask(answer)
    client = await service.client()
    await client.moderations.create(model="mod-1", input=SECRET_TEXT)
    wave = io.BytesIO(b"RIFF\0\xff")
    said = await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", wave))
    assert said.text == SECRET_TEXT
    assert (await client.audio.speech.create(model="tts-1", voice="alloy", input="hi")).content == b"\0\1\2"
    assert (await client.files.create(file=("b.txt", b"x" * 300_000), purpose="user_data")).id == "file-1"
    assert (await client.images.generate(model="image-1", prompt="a dot")).data[0].b64_json == "AAAA"
    assert provider.seen[1].headers["content-type"].startswith("multipart/form-data; boundary=")
    assert b"RIFF\0\xff" in provider.seen[1].body
    assert {seen.headers["authorization"] for seen in provider.seen} == {f"Bearer {KEY}"}
    spans = await service.spans()
    assert [span.name for span in spans] == [
        *("POST /v1/moderations", "POST /v1/audio/transcriptions", "POST /v1/audio/speech", "POST /v1/files"),
        "POST /v1/images/generations",
    ]
    kept = [span.attributes for span in spans]
    assert [each.get(names.REQUEST_MODEL) for each in kept] == ["mod-1", None, "tts-1", None, "image-1"]
    assert [each.get(names.INPUT_TOKENS) for each in kept] == [3, 3, None, None, 5]
    assert kept[4][names.OUTPUT_TOKENS] == 7
    assert {each[names.HTTP_STATUS] for each in kept} == {200}
    assert all(names.ATTRIBUTION in each for each in kept)
    assert SECRET_TEXT not in repr(spans)
    assert calls(spans) == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "files/file-1/content?limit=2&after=a%2Fb"),
        ("DELETE", "files/file-1"),
        ("PATCH", "anything/else"),
        ("PUT", "anything"),
        ("GET", "responses/resp_of_another_run"),
        ("POST", "responses/resp_1/cancel"),
        ("GET", "vector_stores/a%20b"),
    ],
)
async def test_any_method_and_path_arrives_as_it_is(method, path, ask):
    service, provider, _ = await ask(answer)
    got = []
    provider.responses = provider.models = lambda seen: got.append(seen) or Reply({})
    client = await service.http()
    reply = await client.request(method, f"{service.base_url}/{path}", headers={"x-mine": "1", "cookie": "no"})
    assert reply.status_code == 200
    (span,) = await service.spans()
    assert (span.attributes[names.HTTP_METHOD], span.attributes[names.URL_PATH]) == (
        method,
        "/v1/" + path.partition("?")[0],
    )
    for seen in [*provider.seen, *got]:
        assert (seen.method, seen.path, seen.headers["x-mine"]) == (method, f"/v1/{path}", "1")
        assert "cookie" not in seen.headers


async def test_the_sdk_decides_between_two_providers(ask):
    service, _, claude = await ask(lambda seen: Reply(messages_answer([])))
    client = await service.http()
    url = service.environment["ANTHROPIC_BASE_URL"] + "/v1/messages/batches"
    await client.post(url, json={"requests": []}, headers={"anthropic-version": "2099-01-01"})
    (seen,) = claude.seen
    assert (seen.path, seen.headers["x-api-key"]) == ("/v1/messages/batches", KEY)
    assert seen.headers["anthropic-version"] == "2099-01-01"


async def test_errors_pass_as_they_are_and_are_recorded(ask):
    error = {"error": {"message": f"no, {KEY}", "code": "bad", "type": "t", "param": None}}
    headers = {"retry-after": "3", "x-should-retry": "true", "x-request-id": "r-1"}
    dropped = Reply(head=False, end="close")  # On the kept-alive connection, and on a new one.
    service, _, _ = await ask([Reply(error, 429, headers), dropped, dropped, Reply(b"[0]", end="close")])
    client = await service.client()
    with pytest.raises(openai.RateLimitError, match="no, ") as caught:
        await client.moderations.create(input="x")
    assert {name: caught.value.response.headers[name] for name in headers} == headers
    with pytest.raises(openai.InternalServerError, match="closed the connection"):
        await client.moderations.create(input="x")
    spans = await service.spans()
    assert [span.attributes[names.ERROR_TYPE] for span in spans] == ["429", "provider_closed"]
    assert KEY not in f"{caught.value} {spans}"
    with pytest.raises(httpx.RemoteProtocolError):
        await (await service.http()).post(f"{service.base_url}/audio/speech", json={})
    assert (await service.spans())[-1].attributes[names.ERROR_TYPE] == "provider_closed"


async def test_only_a_provider_that_takes_all_paths_gets_them(ask):
    service, provider, _ = await ask(answer, all_paths=False)
    client = await service.client()
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        await client.moderations.create(input="x")
    assert provider.seen == []


@pytest.mark.parametrize("path", ["../admin", "files/..%2f..%2fadmin", "%2e%2e/admin"])
async def test_no_path_leaves_the_api(path, ask):
    service, provider, _ = await ask(answer)
    transport = httpx.AsyncHTTPTransport()
    target = service.base_url.encode() + b"/" + path.encode()
    url = httpx.URL(service.base_url)
    request = httpx.Request("POST", url, extensions={"target": target.partition(url.netloc)[2]})
    reply = await transport.handle_async_request(request)
    await reply.aread()
    await transport.aclose()
    assert (reply.status_code, provider.seen) == (404, [])


async def test_an_attempt_that_has_ended_calls_nothing(ask):
    service, provider, _ = await ask(answer)
    await service.store.update_attempt(service.rollout_id, service.attempt_id, status="succeeded")
    client = await service.http()
    reply = await client.post(f"{service.base_url}/moderations", content=orjson.dumps({}))
    assert (reply.status_code >= 400, provider.seen) == (True, [])
