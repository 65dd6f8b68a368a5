"""A real vLLM answers callers of other dialects: calls that are written piece by piece, and log-probabilities."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from agentlightning import InMemoryLightningStore
from agentlightning.attempt_variables import attempt_environment
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.server.app import Server

NUMBER = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"name": "add", "input_schema": NUMBER}
HI = [{"role": "user", "content": "What is 12 + 30?"}]


@asynccontextmanager
async def environment(server: str) -> AsyncIterator[dict[str, str]]:
    """The variables of an attempt whose model "tiny" is answered by chat completions alone."""
    them = {"name": "farm", "base_urls": [f"{server}/v1"], "paths": ["chat/completions"]}
    config = GatewayConfig.model_validate({"providers": [them], "routes": [{"provider": "farm"}]})
    store = InMemoryLightningStore()
    async with Server(store, Gateway(store, {}, secret="s", config=config), secret="s") as ours:
        rollout = await store.start_rollout({})
        yield attempt_environment(ours.url, "s", rollout.rollout_id, rollout.attempt.attempt_id)
    await store.close()


async def test_a_tool_call_of_a_stream_arrives_whole_and_the_same_in_each_dialect(fresh_server: str) -> None:
    """A model that knows nothing writes no object."""
    choice = {"type": "tool", "name": "add"}
    asked = {"model": "tiny", "max_tokens": 60, "messages": HI, "tools": [TOOL], "tool_choice": choice}
    flat = {"type": "function", "name": "add", "parameters": NUMBER}
    async with environment(fresh_server) as there:
        base, key = there["OPENAI_BASE_URL"], there["OPENAI_API_KEY"]
        async with AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as client:
            named = {"type": "function", "name": "add"}
            options = {"max_output_tokens": 60, "temperature": 0, "tools": [flat], "tool_choice": named}
            async with client.responses.stream(model="tiny", input=HI, **options) as stream:
                events = [event async for event in stream]
        base, key = there["ANTHROPIC_BASE_URL"], there["ANTHROPIC_API_KEY"]
        async with (
            AsyncAnthropic(base_url=base, api_key=key, max_retries=0) as client,
            client.messages.stream(**asked, extra_body={"temperature": 0}) as stream,
        ):
            message = await stream.get_final_message()
    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (call,) = [item for item in events[-1].response.output if item.type == "function_call"]
    assert (call.name, [call.arguments]) == ("add", parts)
    (use,) = [block for block in message.content if block.type == "tool_use"]
    assert (use.name, use.input["_raw_arguments"]) == ("add", call.arguments)


async def test_log_probabilities_and_stop_strings_reach_a_response_and_a_message(fresh_server: str) -> None:
    async with environment(fresh_server) as there:
        base, key = there["OPENAI_BASE_URL"], there["OPENAI_API_KEY"]
        async with AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as client:
            asked = {"model": "tiny", "input": "What is 12 + 30?", "max_output_tokens": 6, "temperature": 0}
            asked |= {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
            whole = (await client.responses.create(**asked)).output[0].content[0]
            async with client.responses.stream(**asked) as stream:
                events = [event async for event in stream]
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        streamed = events[-1].response.output[0].content[0]
        base, key = there["ANTHROPIC_BASE_URL"], there["ANTHROPIC_API_KEY"]
        async with AsyncAnthropic(base_url=base, api_key=key, max_retries=0) as client:
            stops = {"max_tokens": 6, "stop_sequences": [whole.text[1:3]], "extra_body": {"temperature": 0}}
            message = await client.messages.create(model="tiny", messages=HI, **stops)
    assert streamed.text == whole.text == "".join(event.delta for event in deltas)
    assert [len(each.top_logprobs) for each in whole.logprobs] == [2] * len(whole.logprobs)
    assert len(whole.logprobs) == len(streamed.logprobs) > 0
    for one, other in zip(whole.logprobs, streamed.logprobs, strict=True):
        assert (one.token, abs(one.logprob - other.logprob) < 1e-3) == (other.token, True)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", whole.text[1:3])
