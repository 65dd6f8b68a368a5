"""Whatever a request holds and whatever a provider answers: an error that says so, and never a failure of ours."""

import random

import aiohttp
import pytest
from tests.support.provider import Reply, ScriptedProvider

from agentlightning import InMemoryLightningStore
from agentlightning.attempt_variables import attempt_environment
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.server.app import Server
from agentlightning.testing import ScriptedEngine

FIELDS = {
    "chat/completions": "messages tools tool_choice response_format n stop stream stream_options logprobs top_logprobs "
    "temperature seed max_tokens parallel_tool_calls functions logit_bias metadata reasoning_effort thinking user "
    "service_tier",
    "completions": "prompt n stop stream logprobs echo suffix best_of max_tokens logit_bias",
    "responses": "input instructions tools tool_choice text previous_response_id store stream reasoning include "
    "max_output_tokens truncation top_logprobs metadata service_tier",
    "messages": "messages system tools tool_choice stream stop_sequences max_tokens thinking metadata thread "
    "output_config service_tier",
    "messages/count_tokens": "messages system tools",
    "embeddings": "input dimensions encoding_format",
}
INNER = [
    *("role", "content", "type", "text", "name", "tool_calls", "id", "function", "arguments", "call_id"),
    *("output", "input", "image_url", "source", "schema", "json_schema", "parameters", "input_schema"),
    *("tool_use_id", "summary", "file", "file_data", "filename", "encrypted_content", "effort", "user_id", "title"),
]
WORDS = [
    *("user", "assistant", "system", "tool", "text", "image_url", "function", "tool_use", "tool_result"),
    *("input_text", "function_call", "message", "auto", "required", "json_schema", "json_object", "object"),
    *("reasoning", "thinking", "redacted_thinking", "document", "file", "input_file", "agl1.e30=", "x"),
]
USUAL = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "max_tokens": 16}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWER = {
    **{"id": "x", "object": "chat.completion", "created": 1, "model": "m", "prompt_token_ids": [1, 2]},
    **{"type": "message", "role": "assistant", "stop_reason": "end_turn"},
    "content": [{"type": "text", "text": "h"}, {"type": "tool_use", "id": "i", "name": "n", "input": {}}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "input_tokens": 3, "output_tokens": 2},
    "choices": [
        {
            **{"index": 0, "finish_reason": "stop", "token_ids": [3, 4]},
            "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2}]},
            "message": {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        }
    ],
}


class Dice(random.Random):
    def value(self, depth=0):
        kind = self.random()
        if depth > 3 or kind < 0.35:
            return self.choice([None, True, False, 0, 1, -1, 2.5, 1e308, "", *WORDS])
        if kind < 0.6:
            return [self.value(depth + 1) for _ in range(self.randint(0, 3))]
        return {self.choice(INNER): self.value(depth + 1) for _ in range(self.randint(0, 4))}

    def body(self, path):
        body = {"model": self.choice(["scripted", "theirs", "claude", 5, None, "nope"])}
        for name in FIELDS[path].split():
            chance = self.random()
            if chance < 0.3:
                body[name] = self.value()
            elif name in USUAL and chance < 0.8:
                body[name] = USUAL[name]
        return body

    def bent(self, value):
        """Something like it."""
        if self.random() < 0.05:
            return self.value(2)
        if isinstance(value, dict):
            return {key: self.bent(inner) for key, inner in value.items() if self.random() > 0.03}
        return [self.bent(inner) for inner in value] if isinstance(value, list) else value


async def posted(seed, count):
    """(path, body, status, text) of so many random requests, answered by an engine and by two odd providers."""
    dice, store, told = Dice(seed), InMemoryLightningStore(), []
    async with ScriptedProvider(lambda seen: Reply(dice.bent(ANSWER))) as them:
        price = {"input": 1, "output": 1}
        providers = [
            {"name": "openai", "base_urls": [f"{them.url}/v1"], "token_ids": True, "price": price},
            {"name": "anthropic", "dialect": "anthropic", "base_urls": [them.url]},
        ]
        routes = [{"model": "theirs", "provider": "openai"}, {"model": "claude", "provider": "anthropic"}]
        config = GatewayConfig.model_validate({"providers": providers, "routes": routes})
        engine = ScriptedEngine(lambda messages: "hello <tool_call>{")
        async with (
            Server(store, Gateway(store, {"scripted": engine}, secret="s", config=config), secret="s") as server,
            aiohttp.ClientSession() as http,
        ):
            rollout = await store.start_rollout({})
            there = attempt_environment(server.url, "s", rollout.rollout_id, rollout.attempt.attempt_id)
            for _ in range(count):
                path = dice.choice(list(FIELDS))
                body = dice.body(path)
                async with http.post(f"{there['OPENAI_BASE_URL']}/{path}", json=body) as reply:
                    told.append((path, body, reply.status, await reply.text()))
        spans = await store.query_spans(rollout.rollout_id)
    await store.close()
    return told, spans


def check(told, spans):
    def failed(path, body, status, text):
        odd_provider = body["model"] in ("theirs", "claude") and status == 502
        return status >= 500 and not odd_provider

    assert [each for each in told if failed(*each)] == []
    answered = [status == 200 and path != "messages/count_tokens" for path, _, status, _ in told]
    assert 0 < sum(answered) / 2 <= len(spans)


async def test_no_request_and_no_answer_is_too_odd():
    check(*await posted(seed=0, count=300))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
async def test_no_request_and_no_answer_is_too_odd_in_many(seed):
    check(*await posted(seed=seed, count=4000))
