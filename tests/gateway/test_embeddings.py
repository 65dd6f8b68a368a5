"""Embeddings and images: passed on where a provider takes them, refused by name where nobody does."""

import base64

import openai
import orjson
import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import messages_answer

from agentlightning import span as names
from agentlightning.assemble import calls
from agentlightning.gateway.config import GatewayConfig

VECTORS = {
    "object": "list",
    "model": "embedder-1",
    "data": [{"object": "embedding", "index": index, "embedding": [0.25, -0.5]} for index in range(2)],
    "usage": {"prompt_tokens": 7, "total_tokens": 7},
}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture
async def ask(serve):
    """ask(replies) -> (the service, the provider behind its models "their-*")."""
    opened = []

    async def start(replies, dialect="openai", **options):
        provider = await ScriptedProvider(replies).start()
        opened.append(provider)
        base = provider.url if dialect == "anthropic" else f"{provider.url}/v1"
        them = {"name": "them", "dialect": dialect, "base_urls": [base], "api_key": "sk-theirs-0123456789"}
        rule = {"model": "their-*", "provider": "them"}
        config = GatewayConfig.model_validate({"providers": [them | options], "routes": [rule]})
        return await serve([], config=config), provider

    yield start
    for provider in opened:
        await provider.stop()


# -- embeddings ------------------------------------------------------------------------------------------------------


async def test_embeddings_are_the_providers_and_recorded_without_their_vectors(ask):
    service, provider = await ask([Reply(VECTORS)], price={"input": 2.0})
    client = await service.client()
    reply = await client.embeddings.create(model="their-embedder", input=["one", "two"], dimensions=2)
    assert [each.embedding for each in reply.data] == [[0.25, -0.5]] * 2
    (seen,) = provider.seen
    assert (seen.path, seen.json["input"], seen.json["dimensions"]) == ("/v1/embeddings", ["one", "two"], 2)
    assert seen.headers["authorization"] == "Bearer sk-theirs-0123456789"
    (span,) = await service.spans()
    kept = span.attributes
    assert (span.name, kept[names.OPERATION_NAME]) == ("embeddings their-embedder", "embeddings")
    assert (kept[names.INPUT_TOKENS], kept[names.COST]) == (7, pytest.approx(14e-6))
    assert (kept[names.PROVIDER_NAME], kept[names.RESPONSE_MODEL]) == ("them", "embedder-1")
    assert len(orjson.loads(kept[names.INPUT_MESSAGES])) == 2
    assert "0.25" not in str(span)
    assert calls([span]) == []


async def test_embeddings_come_as_bytes_where_the_sdk_asks_for_them(ask):
    packed = base64.b64encode(b"\0\0\x80\x3e\0\0\0\xbf").decode()
    body = VECTORS | {"data": [{"object": "embedding", "index": 0, "embedding": packed}]}
    service, provider = await ask([Reply(body)])
    client = await service.client()
    reply = await client.embeddings.create(model="their-embedder", input="one")
    assert reply.data[0].embedding == [0.25, -0.5]
    assert provider.seen[0].json["encoding_format"] == "base64"


async def test_a_provider_that_refuses_an_embedding_is_heard_and_recorded(ask):
    refused = {"error": {"message": "too long", "type": "invalid_request_error", "param": "input", "code": None}}
    service, _ = await ask([Reply(refused, status=400)])
    client = await service.client()
    with pytest.raises(openai.BadRequestError, match="too long"):
        await client.embeddings.create(model="their-embedder", input="one")
    (span,) = await service.spans()
    assert span.status_code == "ERROR"


async def test_a_model_that_makes_no_embeddings_is_not_found_with_the_way_out(serve):
    service = await serve([])
    client = await service.client()
    with pytest.raises(openai.NotFoundError, match="add a route that leads it to a provider"):
        await client.embeddings.create(model="scripted", input="one")
    assert service.engine.calls == []


# -- images ----------------------------------------------------------------------------------------------------------

IMAGES = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}}]}]
    },
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}]},
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
                ],
            }
        ],
    },
}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "m",
    "output": [
        {"type": "message", "role": "assistant", "id": "msg_1", "content": [{"type": "output_text", "text": "A dot."}]}
    ],
}
ANSWERS = {
    "/v1/chat/completions": chat_answer("A dot."),
    "/v1/responses": RESPONSE,
    "/v1/messages": messages_answer([{"type": "text", "text": "A dot."}]),
}


@pytest.mark.parametrize("path", IMAGES)
async def test_an_image_reaches_a_provider_of_the_same_dialect_as_it_came(ask, path):
    dialect = "anthropic" if path == "/v1/messages" else "openai"
    service, provider = await ask([Reply(ANSWERS[path])], dialect, paths=[path.removeprefix("/v1/")])
    client = await service.http()
    body = {"model": "their-eyes"} | IMAGES[path]
    reply = await client.post(service.environment["ANTHROPIC_BASE_URL"] + path, json=body)
    assert (reply.status_code, "A dot." in reply.text) == (200, True)
    assert provider.seen[0].json == body
    (span,) = await service.spans()
    assert "A dot." in span.attributes[names.OUTPUT_MESSAGES]
