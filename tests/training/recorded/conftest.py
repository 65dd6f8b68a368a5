"""Stores of sessions about one decision: answers of "yes" are right, those of "no" are wrong."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import agentlightning as agl
from agentlightning.chat.hf import HFChatFormat
from agentlightning.demo.problems import demonstrations
from agentlightning.models.tiny import make_tiny

Add = Callable[..., Awaitable[str]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("offline") / "tiny", demonstrations(60), hidden_size=32, heads=2)


@pytest.fixture(scope="session")
def chat(tiny: Path) -> HFChatFormat:
    return HFChatFormat(AutoTokenizer.from_pretrained(tiny))


@pytest.fixture
def store(tmp_path: Path) -> agl.LightningStore:
    return agl.LightningStore(tmp_path / "sessions.db")


@pytest.fixture
def add(chat: HFChatFormat) -> Add:
    """Adds a finished session of one call; with `tokens`, the call has those of the tiny model."""

    async def session(
        store: agl.LightningStore,
        task: Any,
        answer: str,
        reward: Any = None,
        *,
        agent: str | None = None,
        tokens: bool = False,
        shift: int = 0,
        mode: Any = None,
        temperature: float = 1.0,
    ) -> str:
        rollout = await store.start_rollout(task, mode)
        attempt = rollout.attempt
        messages = [{"role": "user", "content": str(task)}]
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": str(task)}]}]),
            "gen_ai.output.messages": json.dumps(
                [{"role": "assistant", "parts": [{"type": "text", "content": answer}]}]
            ),
        }
        if agent is not None:
            attributes["gen_ai.agent.name"] = agent
        if tokens:
            prompt = chat.encode(chat.render(messages))
            sampled = [token + shift for token in chat.encode(f"{answer}<|im_end|>")]
            attributes |= {
                "agentlightning.prompt_token_ids": prompt,
                "agentlightning.response_token_ids": sampled,
                "agentlightning.logprobs": [-1.0] * len(sampled),
                "gen_ai.request.temperature": temperature,
            }
        spans = [("chat", attributes)]
        if reward is not None:
            spans.append(("gen_ai.evaluation.result", {"gen_ai.evaluation.score.value": reward}))
        for name, own in spans:
            span = agl.Span(
                rollout_id=rollout.rollout_id,
                attempt_id=attempt.attempt_id,
                name=name,
                start_time=1.0,
                end_time=2.0,
                trace_id=uuid.uuid4().hex,
                span_id=uuid.uuid4().hex[:16],
                status_code="OK",
                attributes=own,
            )
            await store.add_span(span)
        await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status="succeeded")
        return rollout.rollout_id

    return session


Fill = Callable[..., None]


@pytest.fixture
def fill(add: Add) -> Fill:
    """Adds two right and two wrong sessions of each task."""

    def sessions(store: agl.LightningStore, tasks: int = 3, **options: Any) -> None:
        async def record() -> None:
            for number in range(tasks):
                for answer, reward in (("yes", 1.0), ("no", 0.0), ("yes", 1.0), ("no", 0.0)):
                    await add(store, f"question {number}", answer, reward, **options)

        asyncio.run(record())

    return sessions
