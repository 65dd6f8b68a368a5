"""`gateway.record_top_logprobs` where a real vLLM samples: spans and token view have the model's likeliest tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentlightning import InMemoryLightningStore
from agentlightning import span as names
from agentlightning.attempt_variables import attempt_environment
from agentlightning.chat.hf import load_chat_format
from agentlightning.dashboard.data.run_data import Catalog
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views.rollout import show_tokens
from agentlightning.engine.likeliest_tokens import likeliest_from_text
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.engine.servers.pool import ReplicaPool, open_servers
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.server.app import Server
from agentlightning.span import Span

MOST = 3
NEAR = 2e-2
"""Spans keep two decimals of the log-probabilities of alternatives."""
BODY = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 8, "seed": 1}


@pytest.fixture
async def engine(server: str, models: list[Path]) -> AsyncIterator[ReplicaPool]:
    engine = await open_servers(ServersConfig(urls=(server,)), await load_chat_format(models[0]))
    yield engine
    await engine.close()


async def recorded(gateway: Any, store: Any, **options: Any) -> tuple[dict[str, Any], Span]:
    """What the caller of a model call is told, and the call's span."""
    async with Server(store, gateway, secret="s") as ours:
        rollout = await store.start_rollout({"question": "12 + 30"})
        there = attempt_environment(ours.url, "s", rollout.rollout_id, rollout.attempt.attempt_id)
        headers = {"authorization": f"Bearer {there['OPENAI_API_KEY']}"}
        async with httpx.AsyncClient(base_url=there["OPENAI_BASE_URL"], headers=headers, timeout=60) as client:
            answer = await client.post("/chat/completions", json={**BODY, "model": "tiny", **options})
        assert answer.status_code == 200, answer.text
    (span,) = await store.query_spans(rollout.rollout_id)
    return answer.json()["choices"][0], span


async def test_spans_and_the_token_view_have_the_likeliest_tokens_of_the_model(engine: ReplicaPool, models: list[Path]):
    store = InMemoryLightningStore()
    config = GatewayConfig(record_top_logprobs=MOST)
    told, span = await recorded(Gateway(store, {"tiny": engine}, secret="s", config=config), store)
    assert told.get("logprobs") is None, "the caller asked for none"
    prompt, sampled = span.attributes[names.PROMPT_TOKEN_IDS], span.attributes[names.RESPONSE_TOKEN_IDS]
    model = AutoModelForCausalLM.from_pretrained(models[0])
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1].float()
    best = logits.log_softmax(-1).topk(MOST)
    rows = likeliest_from_text(span.attributes[names.TOP_LOGPROBS], len(sampled))
    for row, tokens, values in zip(rows, best.indices.tolist(), best.values.tolist(), strict=True):
        assert [token for token, _ in row] == tokens
        assert [value for _, value in row] == pytest.approx(values, abs=NEAR)
    data = Catalog(store)
    shown = await show_tokens(await data.run("store"), Query({"rollout": span.rollout_id}))
    alternatives = shown["stream"][0]["tokens"]["alternatives"]
    assert [[token for token, _, _ in row] for row in alternatives] == best.indices.tolist()
    await data.close()
    await store.close()


async def test_calls_that_are_forwarded_to_a_provider_have_none_whoever_asks(server: str):
    store = InMemoryLightningStore()
    them = {"name": "farm", "base_urls": [f"{server}/v1"], "token_ids": True}
    config = GatewayConfig.model_validate(
        {"providers": [them], "routes": [{"provider": "farm"}], "record_top_logprobs": MOST}
    )
    gateway = Gateway(store, {}, secret="s", config=config)
    told, span = await recorded(gateway, store, logprobs=True, top_logprobs=2)
    assert [len(each["top_logprobs"]) for each in told["logprobs"]["content"]] == [2] * len(told["logprobs"]["content"])
    assert span.attributes[names.RESPONSE_TOKEN_IDS]
    assert names.TOP_LOGPROBS not in span.attributes
    await store.close()
