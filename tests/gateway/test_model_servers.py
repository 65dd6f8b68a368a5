"""Agents whose model is sampled by servers: the same conversations, the same records, the same errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.model_server import ScriptedModelServer, logprob_of
from tests.support.tokenizer import tiny_tokenizer

from agentlightning import span as names
from agentlightning.attempt_variables import attempt_environment
from agentlightning.engine.likeliest_tokens import likeliest_from_text
from agentlightning.engine.servers.config import ServedModel, ServersConfig
from agentlightning.engine.servers.pool import open_served_model
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server

SECRET = "a-secret-nobody-prints"


class Agent:
    """One attempt, and its client."""

    def __init__(self, store: Any, attempted: Any, client: httpx.AsyncClient) -> None:
        self.store, self.attempted, self.client = store, attempted, client

    async def ask(self, *messages: dict[str, str], **options: Any) -> httpx.Response:
        return await self.client.post("chat/completions", json={"model": "big", "messages": messages, **options})

    async def spans(self) -> list[Any]:
        return await self.store.query_spans(self.attempted.rollout_id, self.attempted.attempt.attempt_id)


@pytest.fixture
async def two() -> AsyncIterator[list[ScriptedModelServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ScriptedModelServer()) for _ in range(2)]


@pytest.fixture
async def agent(two: list[ScriptedModelServer], store: Any, tmp_path: Path) -> AsyncIterator[Agent]:
    tiny_tokenizer().save_pretrained(tmp_path)
    urls = tuple(server.url for server in two)
    config = ServersConfig(urls=urls, wait_seconds=0.5, retries=1)
    model = ServedModel(model=str(tmp_path), servers=config, adapters={"critic": "/adapters/critic"})
    async with AsyncExitStack() as stack:
        engines = await open_served_model(model, "big", stack, tmp_path)
        gateway = Gateway(store, engines, secret=SECRET, default_model="big")
        server = await stack.enter_async_context(Server(store, gateway, secret=SECRET))
        attempted = await store.start_rollout({})
        environment = attempt_environment(server.url, SECRET, attempted.rollout_id, attempted.attempt.attempt_id)
        headers = {"authorization": f"Bearer {environment['OPENAI_API_KEY']}"}
        client = httpx.AsyncClient(base_url=environment["OPENAI_BASE_URL"], headers=headers, verify=False)
        yield Agent(store, attempted, await stack.enter_async_context(client))


async def test_a_conversation_stays_on_one_server_and_reuses_its_exact_tokens(
    agent: Agent, two: list[ScriptedModelServer]
):
    said = [{"role": "user", "content": "Count."}]
    for _ in range(3):
        answer = (await agent.ask(*said, max_tokens=5)).json()["choices"][0]["message"]
        said += [answer, {"role": "user", "content": "More."}]
    spans = [span.attributes for span in await agent.spans()]
    for earlier, later in pairwise(spans):
        known = [*earlier[names.PROMPT_TOKEN_IDS], *earlier[names.RESPONSE_TOKEN_IDS]]
        assert list(later[names.PROMPT_TOKEN_IDS])[: len(known)] == known
    for span in spans:
        expected = [logprob_of(token, "default") for token in span[names.RESPONSE_TOKEN_IDS]]
        assert list(span[names.LOGPROBS]) == pytest.approx(expected)
    prompts = [[body["token_ids"] for path, body in server.calls if "generate" in path] for server in two]
    drawn = [[prompt for prompt in each if len(prompt) > 5] for each in prompts]
    assert sorted(len(each) for each in drawn) == [0, 3]


async def test_an_adapter_is_a_model_of_its_own(agent: Agent, two: list[ScriptedModelServer]):
    assert [server.adapters for server in two] == [{"critic": "/adapters/critic"}] * 2
    listed = (await agent.client.get("models")).json()["data"]
    assert {model["id"] for model in listed} == {"big", "critic"}
    answer = await agent.ask({"role": "user", "content": "Hm?"}, model="critic", max_tokens=2)
    assert answer.status_code == 200
    asked = [body.get("model") for server in two for path, body in server.calls if "generate" in path]
    assert asked.count("critic") == 1


async def test_errors_have_the_status_of_their_cause(agent: Agent, two: list[ScriptedModelServer]):
    question = {"role": "user", "content": "Hm?"}
    too_long = await agent.ask({"role": "user", "content": "Hm? " * 2000})
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    refused = await agent.ask(question, temperature=0.001)
    assert refused.status_code == 400
    assert "sample at 0.01 instead" in refused.json()["error"]["message"]
    for server in two:
        server.failures["/inference/v1/generate"] = [500] * 5
    failed = await agent.ask(question)
    assert failed.status_code >= 500
    assert len([span for span in await agent.spans() if span.attributes.get(names.ERROR_TYPE)]) == 3


async def test_the_likeliest_tokens_of_a_server_are_recorded_where_a_call_asks_for_them(agent: Agent):
    await agent.ask({"role": "user", "content": "Count."}, max_tokens=3, logprobs=True, top_logprobs=2)
    (span,) = await agent.spans()
    rows = likeliest_from_text(span.attributes[names.TOP_LOGPROBS], 3)
    expected = [logprob_of(token, "default") + 0.02 for token in span.attributes[names.RESPONSE_TOKEN_IDS]]
    assert [row[0] for row in rows] == [(201, pytest.approx(each, rel=1e-3)) for each in expected]
    assert [len(row) for row in rows] == [2, 2, 2]
