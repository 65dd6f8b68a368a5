"""A real vLLM holds answers to the calls they are to be, by the grammar that the local engine is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentlightning.chat.answer_grammar import AnswerShape, answer_grammar
from agentlightning.chat.hf import load_chat_format
from agentlightning.engine.base import SamplingParams
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.engine.servers.pool import ReplicaPool, open_servers

SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["yes", "né 🎉"]}, "number": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["word", "number"],
}
TOOLS = (("answer", json.dumps(SCHEMA)), ("give_up", '{"type": "object", "properties": {}}'))


@pytest.fixture
async def engine(server: str, models: list[Path]) -> AsyncIterator[ReplicaPool]:
    engine = await open_servers(ServersConfig(urls=(server,)), await load_chat_format(models[0]))
    yield engine
    await engine.close()


async def test_constrained_answers_are_the_required_calls(engine: ReplicaPool):
    chat = engine.chat
    prompt = chat.encode(chat.render([{"role": "user", "content": "What is 12 + 30?"}]))
    several, one = (
        answer_grammar(chat, AnswerShape(TOOLS, needs_call=True, one_call=single)) for single in (False, True)
    )
    assert several is not None
    assert one is not None
    assert await engine.can_enforce(several, "grammar")
    assert await engine.can_enforce(one, "grammar")
    drawn = await asyncio.gather(
        *(engine.sample(prompt, SamplingParams(grammar=one, seed=seed, max_tokens=300)) for seed in range(8)),
        *(engine.sample(prompt, SamplingParams(grammar=several, seed=seed, max_tokens=300)) for seed in range(8)),
    )
    for place, sample in enumerate(drawn):
        assert min(sample.logprobs) > -50
        message = chat.parse(chat.decode([token for token in sample.token_ids if token not in chat.eos_token_ids]))
        for call in message.tool_calls:
            assert call.name == "give_up" or json.loads(call.arguments)["word"] in ("yes", "né 🎉")
        if sample.finish_reason == "stop":
            assert message.tool_calls
            assert not message.content
            assert place >= 8 or len(message.tool_calls) == 1
    assert sum(sample.finish_reason == "stop" for sample in drawn) >= 12


async def test_an_invalid_grammar_cannot_be_enforced(engine: ReplicaPool):
    assert not await engine.can_enforce('%llguidance {}\nstart: %json {"type": "of no kind"}\n', "grammar")
