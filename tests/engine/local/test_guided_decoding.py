"""Answers held to a JSON schema: they fit it whatever the model would rather say, and their probabilities are those
they were drawn with."""

import asyncio
import json
import math

import jsonschema_rs
import pytest
import torch
from tests.support.models import model_tokenizer, tiny_checkpoint, tiny_model

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.local.guided_decoding import GrammarCompiler
from agentlightning.engine.local.kv_cache import vocab_size
from agentlightning.errors import ConfigError
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.server.app import Server
from agentlightning.span import CONSTRAINT, RESHAPED, RESPONSE_TOKEN_IDS
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import ScriptedEngine

SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"enum": ["yes", "no", "né 🎉"]},
        "numbers": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["word", "numbers"],
    "additionalProperties": False,
}
SHORT = {
    **SCHEMA,
    "properties": {**SCHEMA["properties"], "numbers": {"const": [1]}},
    "x-guidance": {"whitespace_flexible": False},
}
TEXT = json.dumps(SHORT)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def policy(checkpoint):
    policy = LocalPolicy.open(LocalPolicyConfig(model=checkpoint, device="cpu", name="m"))
    yield policy
    await policy.close()


async def test_a_constrained_row_yields_valid_json_beside_a_free_row(policy):
    prompt = policy.chat.encode("Say yes or no: ")
    assert await policy.can_enforce(TEXT)
    held = [
        policy.sample(prompt, SamplingParams(seed=seed, json_schema=TEXT, temperature=seed % 2)) for seed in range(6)
    ]
    *answers, free = await asyncio.gather(*held, policy.sample(prompt, SamplingParams(seed=1, max_tokens=30)))
    for answer in answers:
        text = policy.chat.decode(answer.token_ids[:-1])
        assert answer.token_ids[-1] in policy.chat.eos_token_ids
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(text))
    alone = await policy.sample(prompt, SamplingParams(seed=1, max_tokens=30))
    assert (free.token_ids, free.logprobs) == (alone.token_ids, pytest.approx(alone.logprobs, abs=1e-5))


async def test_log_probabilities_are_those_under_the_mask(policy):
    prompt = policy.chat.encode("Say yes or no: ")
    sample = await policy.sample(prompt, SamplingParams(seed=3, json_schema=TEXT, top_logprobs=2))
    with torch.inference_mode():
        logits = tiny_model()(torch.tensor([[*prompt, *sample.token_ids]])).logits[0, len(prompt) - 1 :]
    matcher = GrammarCompiler(model_tokenizer(), vocab_size(tiny_model()), policy.chat.eos_token_ids).matcher(TEXT)
    forced = 0
    for row, token, logprob, top in zip(logits, sample.token_ids, sample.logprobs, sample.top_logprobs, strict=False):
        may = matcher.token_mask(len(row))
        assert may[token]
        expected = row.masked_fill(~may, -math.inf).log_softmax(-1)
        assert logprob == pytest.approx(float(expected[token]), abs=1e-3)
        assert all(may[other] for other, _ in top)
        forced += int(may.sum()) == 1
        matcher.push(token)
    assert forced
    assert may.sum() < len(may)


async def test_unenforceable_schemas_are_reported_in_advance(policy):
    cannot = json.dumps({"not": {"type": "string"}})
    assert not await policy.can_enforce(cannot)
    assert not await policy.can_enforce("[]")
    assert not await ScriptedEngine([]).can_enforce(TEXT)
    with pytest.raises(ConfigError, match="this json_schema cannot be enforced"):
        await policy.sample([1, 2], SamplingParams(json_schema=cannot))


@pytest.fixture
async def ask(policy):
    """ask(mode, holding) has a call of a rollout answered, and gives its span's attributes and text."""
    import httpx

    async def ask(mode, holding="auto", **more):
        store = InMemoryLightningStore()
        gateway = Gateway(store, {"m": policy}, secret="s", config=GatewayConfig(structured_output=holding))
        async with Server(store, gateway, secret="s") as server, httpx.AsyncClient() as http:
            attempted = await store.start_rollout({}, mode=mode)
            ids = attempted.rollout_id, attempted.attempt.attempt_id
            body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 200, "seed": 1}
            shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SHORT}}
            url = f"{server.url}/rollout/{ids[0]}/attempt/{ids[1]}/v1/chat/completions"
            reply = await http.post(url, json=body | {"response_format": shape} | more)
            (span,) = await store.query_spans(*ids)
        await store.close()
        return span.attributes, reply.json()["choices"][0]["message"]["content"]

    return ask


@pytest.mark.parametrize(
    ("mode", "holding", "held"),
    [
        ("val", "auto", True),
        ("train", "auto", False),
        (None, "auto", False),
        ("train", "always", True),
        ("val", "never", False),
    ],
)
async def test_answers_are_constrained_unless_they_are_trained_on(ask, mode, holding, held):
    attributes, text = await ask(mode, holding)
    assert attributes[CONSTRAINT] == ("enforced" if held else "violated")
    assert attributes.get(RESHAPED) == (["json_schema"] if held else None)
    if held:
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(text))


async def test_a_truncated_answer_is_reported_as_invalid_json(ask):
    attributes, _ = await ask("val", max_tokens=3)
    assert (attributes[CONSTRAINT], len(attributes[RESPONSE_TOKEN_IDS])) == ("violated", 3)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


async def test_with_tools_an_answer_is_a_call_or_the_required_content(ask):
    attributes, text = await ask("val", tools=TOOLS)
    assert (attributes[CONSTRAINT], attributes[RESHAPED]) == ("enforced", ["grammar"])
    assert text is None or jsonschema_rs.is_valid(SCHEMA, json.loads(text))


async def test_offered_tools_alone_do_not_constrain_an_answer(ask):
    attributes, _ = await ask("val", tools=TOOLS, response_format=None)
    assert CONSTRAINT not in attributes
    assert RESHAPED not in attributes


def test_whitespace_in_a_constrained_answer_is_bounded():
    tokenizer = model_tokenizer()
    grammars = GrammarCompiler(tokenizer, 320, [tokenizer.eos_token_id])
    matcher = grammars.matcher(json.dumps(SCHEMA))
    (brace,), (newline,) = (tokenizer.encode(text, add_special_tokens=False) for text in "{\n")
    matcher.push(brace)
    for _ in range(40):
        assert matcher.token_mask(320)[newline]
        matcher.push(newline)
    assert not matcher.token_mask(320)[newline]
