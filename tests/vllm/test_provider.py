"""A real vLLM as a provider of the gateway: its models are listed, its tokenizer counts, and what it counts is used."""

from __future__ import annotations

import httpx

from agentlightning import InMemoryLightningStore
from agentlightning.attempt_variables import attempt_environment
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.server.app import Server

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


async def test_the_token_count_endpoint_matches_usage(server: str) -> None:
    them = {"name": "farm", "base_urls": [f"{server}/v1"], "token_ids": True}
    config = GatewayConfig.model_validate({"providers": [them], "routes": [{"provider": "farm"}]})
    store = InMemoryLightningStore()
    async with Server(store, Gateway(store, {}, secret="s", config=config), secret="s") as ours:
        rollout = await store.start_rollout({})
        there = attempt_environment(ours.url, "s", rollout.rollout_id, rollout.attempt.attempt_id)
        headers = {"x-api-key": there["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
        asked = {"model": "tiny", "system": "Add.", "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
        async with httpx.AsyncClient(base_url=there["ANTHROPIC_BASE_URL"], headers=headers, timeout=60) as client:
            listed = (await client.get("/v1/models")).json()
            counted = await client.post("/v1/messages/count_tokens", json=asked)
            with_tool = await client.post("/v1/messages/count_tokens", json=asked | {"tools": [TOOL]})
            said = (await client.post("/v1/messages", json=asked | {"max_tokens": 4})).json()
    await store.close()
    assert "tiny" in [model["id"] for model in listed["data"]]
    assert counted.headers["x-agentlightning-count"] == "tokenizer"
    assert counted.json()["input_tokens"] == said["usage"]["input_tokens"] > 10
    assert with_tool.json()["input_tokens"] > counted.json()["input_tokens"]
