"""The helpers of the `openai` package: streams with events and accumulated results, parsed answers, pages of models."""

import json

import openai
import pytest
from pydantic import BaseModel

MODEL = "policy"
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    **{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": WEATHER, "strict": True}
ASK = [{"role": "user", "content": "Use weather for 'Paris'"}]


class Value(BaseModel):
    a: int


@pytest.fixture
def client():
    return openai.OpenAI(max_retries=0)


@pytest.fixture
def tool():
    return {"type": "function", "function": FUNCTION}


def test_models(client):
    assert MODEL in [each.id for each in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat_create(client):
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content.startswith("Hello")
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


def test_chat_several_choices(client):
    assert len(client.chat.completions.create(model=MODEL, messages=HELLO, n=2).choices) == 2


def test_chat_stream_helper(client):
    with client.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        kinds = [event.type for event in stream]
    final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert final.choices[0].message.content.startswith("Hello")
    assert final.choices[0].finish_reason == "stop"


def test_chat_stream_helper_with_usage(client):
    options = {"stream_options": {"include_usage": True}}
    with client.chat.completions.stream(model=MODEL, messages=HELLO, **options) as stream:
        assert stream.get_final_completion().usage.completion_tokens > 0


def test_chat_stream_helper_with_logprobs(client):
    with client.chat.completions.stream(model=MODEL, messages=HELLO, logprobs=True) as stream:
        kinds = {event.type for event in stream}
    assert "logprobs.content.delta" in kinds


def test_chat_stream_helper_with_tools(client, tool):
    with client.chat.completions.stream(model=MODEL, messages=ASK, tools=[tool]) as stream:
        kinds = {event.type for event in stream}
    call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert call.function.parsed_arguments == {"city": "Paris"}


def test_chat_stream_helper_with_a_format(client):
    with client.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Value) as stream:
        for _ in stream:
            pass
    assert isinstance(stream.get_final_completion().choices[0].message.parsed, Value)


def test_chat_parse(client, tool):
    parsed = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Value)
    assert isinstance(parsed.choices[0].message.parsed, Value)
    called = client.chat.completions.parse(model=MODEL, messages=ASK, tools=[tool])
    assert called.choices[0].message.tool_calls[0].function.parsed_arguments == {"city": "Paris"}


def test_chat_raw_and_streaming_response(client):
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO)
    assert raw.parse().choices[0].message.content
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=HELLO) as response:
        assert json.loads(response.read())["object"] == "chat.completion"


def test_a_length_limit_is_an_error_of_the_helper(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Value, max_tokens=2)


def test_responses_stream_helper(client):
    with client.responses.stream(model=MODEL, input="hello") as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert stream.get_final_response().output_text.startswith("Hello")


def test_responses_stream_helper_with_tools(client):
    with client.responses.stream(model=MODEL, input=ASK, tools=[{"type": "function", **FUNCTION}]) as stream:
        for _ in stream:
            pass
    call = stream.get_final_response().output[0]
    assert call.parsed_arguments == {"city": "Paris"}


def test_responses_stream_helper_with_a_format(client):
    with client.responses.stream(model=MODEL, input="hello", text_format=Value) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Value)


def test_responses_parse(client):
    assert isinstance(client.responses.parse(model=MODEL, input="hello", text_format=Value).output_parsed, Value)


def test_responses_go_on_from_the_previous_one(client):
    first = client.responses.create(model=MODEL, input="hello")
    second = client.responses.create(model=MODEL, input="and now?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens


def test_responses_are_retrieved_and_deleted(client):
    first = client.responses.create(model=MODEL, input="hello")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_list_their_input(client):
    first = client.responses.create(model=MODEL, input="hello")
    assert len(client.responses.input_items.list(first.id).data) == 1


def test_responses_in_the_background(client):
    assert client.responses.create(model=MODEL, input="hello", background=True).status in ("queued", "in_progress")


def test_completions(client):
    assert client.completions.create(model=MODEL, prompt="hello", max_tokens=4).choices[0].text
    assert [chunk.choices[0].text for chunk in client.completions.create(model=MODEL, prompt="hi", stream=True)]


def test_errors_are_typed(client):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[{"role": "nobody", "content": "x"}])
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-3)
