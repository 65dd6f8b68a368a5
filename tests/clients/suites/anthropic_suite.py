"""The helpers of the `anthropic` package: streams with events and accumulated messages, parsed answers, its loop of
tools."""

import anthropic
import pytest
from pydantic import BaseModel

MODEL = "policy"
HELLO = [{"role": "user", "content": "hello"}]
ASK = [{"role": "user", "content": "Use weather for 'Paris'"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": CITY}
LIMIT = {"model": MODEL, "max_tokens": 200}


class Value(BaseModel):
    a: int


@pytest.fixture
def client():
    return anthropic.Anthropic(max_retries=0)


def test_models(client):
    assert MODEL in [each.id for each in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def test_create(client):
    message = client.messages.create(**LIMIT, messages=HELLO, system="Be kind.")
    assert message.content[0].text.startswith("Hello")
    assert message.stop_reason == "end_turn"


def test_stream_helper(client):
    with client.messages.stream(**LIMIT, messages=HELLO) as stream:
        kinds = {event.type for event in stream}
    final = stream.get_final_message()
    assert {"message_start", "text", "content_block_stop", "message_stop"} <= kinds
    assert final.content[0].text.startswith("Hello")
    assert final.usage.output_tokens > 0


def test_text_stream(client):
    with client.messages.stream(**LIMIT, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
    assert text == stream.get_final_text()


def test_stream_helper_with_tools(client):
    with client.messages.stream(**LIMIT, messages=ASK, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
    final = stream.get_final_message()
    assert "input_json" in kinds
    assert final.stop_reason == "tool_use"
    assert final.content[-1].input == {"city": "Paris"}


def test_forced_tool(client):
    choice = {"type": "tool", "name": "weather"}
    message = client.messages.create(**LIMIT, messages=ASK, tools=[TOOL], tool_choice=choice)
    assert message.content[-1].name == "weather"


def test_parse(client):
    parsed = client.messages.parse(**LIMIT, messages=HELLO, output_format=Value)
    assert isinstance(parsed.parsed_output, Value)


def test_stream_helper_with_a_format(client):
    with client.messages.stream(**LIMIT, messages=HELLO, output_format=Value) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Value)


def test_tool_runner(client):
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: the city
        """
        return f"Sunny in {city}."

    final = client.beta.messages.tool_runner(**LIMIT, messages=ASK, tools=[weather]).until_done()
    assert final.content[0].text.startswith("Hello")


def test_tool_runner_streams(client):
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: the city
        """
        return f"Sunny in {city}."

    reasons = []
    for stream in client.beta.messages.tool_runner(**LIMIT, messages=ASK, tools=[weather], stream=True):
        for _ in stream:
            pass
        reasons.append(stream.get_final_message().stop_reason)
    assert reasons == ["tool_use", "end_turn"]


def test_count_tokens(client):
    assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 0


def test_stop_sequence(client):
    message = client.messages.create(**LIMIT, messages=HELLO, stop_sequences=["thank"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "thank")


def test_batches(client):
    request = {"custom_id": "1", "params": {**LIMIT, "messages": HELLO}}
    assert client.messages.batches.create(requests=[request]).id


def test_errors_are_typed(client):
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**LIMIT, messages=[{"role": "nobody", "content": "x"}])
