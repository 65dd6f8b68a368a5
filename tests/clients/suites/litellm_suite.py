"""LiteLLM, as a client of OpenAI's and Anthropic's dialects."""

import asyncio
import os

import litellm
import pytest
from pydantic import BaseModel

BASE = os.environ["OPENAI_BASE_URL"]
OPENAI = {"model": "openai/policy", "api_base": BASE, "api_key": os.environ["OPENAI_API_KEY"]}
ANTHROPIC = {
    **{"model": "anthropic/policy", "api_base": os.environ["ANTHROPIC_BASE_URL"], "max_tokens": 200},
    "api_key": os.environ["ANTHROPIC_API_KEY"],
}
HELLO = [{"role": "user", "content": "hello"}]
ASK = [{"role": "user", "content": "Use weather for 'Paris'"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}


class Value(BaseModel):
    a: int


@pytest.fixture(params=[OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
def provider(request):
    return {**request.param, "num_retries": 0}


def test_completion(provider):
    whole = litellm.completion(messages=HELLO, **provider)
    assert whole.choices[0].message.content.startswith("Hello")
    assert whole.usage.completion_tokens > 0


def test_acompletion(provider):
    whole = asyncio.run(litellm.acompletion(messages=HELLO, **provider))
    assert whole.choices[0].message.content.startswith("Hello")


def test_stream(provider):
    chunks = list(litellm.completion(messages=HELLO, stream=True, **provider))
    whole = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert whole.choices[0].message.content.startswith("Hello")


def test_tools(provider):
    call = litellm.completion(messages=ASK, tools=[TOOL], **provider).choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.arguments.replace(" ", "")) == ("weather", '{"city":"Paris"}')


def test_streamed_tools(provider):
    chunks = list(litellm.completion(messages=ASK, tools=[TOOL], stream=True, **provider))
    call = litellm.stream_chunk_builder(chunks, messages=ASK).choices[0].message.tool_calls[0]
    assert "Paris" in call.function.arguments


def test_response_format(provider):
    whole = litellm.completion(messages=HELLO, response_format=Value, **provider)
    Value.model_validate_json(whole.choices[0].message.content)


def test_responses():
    assert litellm.responses(input="hello", **OPENAI).output[0].content[0].text.startswith("Hello")


def test_text_completion():
    options = {**OPENAI, "model": "text-completion-openai/policy"}
    assert litellm.text_completion(prompt="hello", max_tokens=4, **options).choices[0].text


def test_messages():
    message = asyncio.run(litellm.anthropic.messages.acreate(messages=HELLO, **ANTHROPIC))
    assert message["content"][0]["text"].startswith("Hello")


def test_errors_are_typed(provider):
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=HELLO, temperature=-3, **provider)
