"""An exchange kept as it was said becomes the same spans as one that is read at once, whatever was said."""

import base64
from dataclasses import replace
from pathlib import Path

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning import span as names
from agentlightning.gateway.callers.agents import Agent
from agentlightning.gateway.callers.attribution import Caller
from agentlightning.gateway.callers.client_retries import RequestIdentity
from agentlightning.gateway.dialects.provider_events import Usage
from agentlightning.gateway.forwarding.passthrough import ForwardedCall
from agentlightning.gateway.recording import raw_exchange
from agentlightning.gateway.recording.provider_response import ProviderResponse, usage_of
from agentlightning.gateway.routing import ModelRoute
from agentlightning.gateway.upstream.pricing import Price
from agentlightning.gateway.upstream.provider import Provider
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.testing.provider import chat_answer, messages_answer

PATHS = ["chat/completions", "completions", "responses", "messages", "embeddings"]
CALLER = Caller(
    "ro-1",
    "at-1",
    parent_id="ab" * 8,
    source="url",
    mode="train",
    temperature=1.0,
    ignored=("x",),
    agent=Agent("writer", "k", "theirs", ("y",)),
    repeat=RequestIdentity("digest", 2),
)
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "model": "theirs",
    "status": "completed",
    "output": [{"type": "message", "content": [{"type": "output_text", "text": "Hello."}]}],
    "usage": {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}},
}
ANSWERS = {
    "chat/completions": chat_answer("Hello.", usage=(11, 3)),
    "completions": {"id": "c", "choices": [{"index": 0, "text": "Hello."}], "usage": {"prompt_tokens": 5}},
    "responses": RESPONSE,
    "messages": messages_answer([{"type": "text", "text": "Hello."}], usage=(9, 4)),
    "embeddings": {"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 5, "total_tokens": 5}},
}
USED = {
    "chat/completions": Usage(11, 3),
    "completions": Usage(5, 0),
    "responses": Usage(7, 2, 3),
    "messages": Usage(9, 4),
    "embeddings": Usage(5, 0),
}
odd = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**33) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def exchange(path, request, answer):
    """(the spans read at once, the record)."""
    dialect = "anthropic" if path == "messages" else "openai"
    provider = Provider(
        name="them", dialect=dialect, base_urls=("http://127.0.0.1:1",), price=Price(input=1.0, output=2.0)
    )
    pool = ServerPool(provider, lambda: None)
    route = ModelRoute("theirs", None, pool, "big-1", provider.price)
    forward = ForwardedCall(path, route, CALLER, request, {}, "cd" * 16, {"top_k": 5}, 1000.5)
    call = forward.upstream_call()
    call.body = orjson.dumps(answer)
    forward.response.read(answer)
    call.settle(forward.response.usage)
    record = raw_exchange.write(forward, call, orjson.dumps(request), 1001.25)
    return forward.spans(call.attributes(), 1001.25), record


def same(spans, others):
    assert [replace(span, span_id="") for span in spans] == [replace(span, span_id="") for span in others]


@pytest.mark.parametrize("path", PATHS)
def test_what_an_answer_used_is_known_without_reading_the_rest(path):
    assert usage_of(path, orjson.dumps(ANSWERS[path])) == USED[path]
    assert usage_of(path, b"{}") is None
    with pytest.raises(msgspec.DecodeError):
        usage_of(path, b"<html>")


@pytest.mark.parametrize("path", PATHS)
def test_a_record_becomes_the_spans_it_would_have_been(path):
    request = {"model": "theirs", "temperature": 0.5, "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    spans, record = exchange(path, request, ANSWERS[path])
    same(raw_exchange.read(record), spans)
    assert spans[0].attributes[names.AGENT_NAME] == "writer"


def test_a_record_that_is_read_twice_becomes_spans_of_the_same_ids():
    """One that a killed process left may be in the store already."""
    answer = chat_answer("Hello.")
    answer["choices"] = [answer["choices"][0] | {"index": index} for index in range(3)]
    spans, record = exchange("chat/completions", {"model": "theirs", "n": 3}, answer)
    ids = [span.span_id for span in raw_exchange.read(record)]
    assert ids == [span.span_id for span in raw_exchange.read(record)]
    assert len(set(ids)) == len(spans) == 3


@given(path=st.sampled_from(PATHS), more=st.dictionaries(st.sampled_from(["choices", "usage", "id", "output"]), odd))
def test_unusual_exchanges_are_read_later_as_they_would_be_at_once(path, more):
    request = {"model": "theirs", "messages": [{"role": "user", "content": "hi"}], "input": "hi", "prompt": "hi"}
    answer = ANSWERS[path] | more
    spans, record = exchange(path, request, answer)
    same(raw_exchange.read(record), spans)


def test_an_unreadable_exchange_is_recorded_as_raw_text(monkeypatch, caplog):
    _, record = exchange("chat/completions", {"model": "theirs"}, {"choices": "odd"})

    def fail(*_):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(ProviderResponse, "read", fail)
    (span,) = raw_exchange.read(record)
    assert (span.status_code, span.attributes[names.OUTPUT_MESSAGES]) == ("ERROR", '{"choices":"odd"}')
    assert (span.rollout_id, span.attempt_id, span.trace_id) == ("ro-1", "at-1", "cd" * 16)
    assert "could not be read" in caplog.text


def test_what_may_hold_a_secret_does_not_wait():
    assert raw_exchange.may_defer(b'{"choices": []}')
    assert not raw_exchange.may_defer(b'{"error": {"message": "the key sk-1 is wrong"}}')


def test_half_a_surrogate_pair_costs_one_character():
    request = {"model": "theirs", "messages": [{"role": "user", "content": "hi"}]}
    _, record = exchange("chat/completions", request, chat_answer("cut: HERE"))
    (span,) = raw_exchange.read(broken(record))
    assert span.status_code == "OK"
    assert "cut: \ufffd" in span.attributes[names.OUTPUT_MESSAGES]


def broken(record):
    """The same, with an answer in which an emoji is cut in two."""
    said = raw_exchange._decoder.decode(record[1:])
    answer = said.answer.replace(b"HERE", rb"\ud83d")
    return record[:1] + raw_exchange._encoder.encode(msgspec.structs.replace(said, answer=answer))


def test_a_record_of_another_version_is_reported_as_such():
    with pytest.raises(ValueError, match="another version"):
        raw_exchange.read(msgspec.msgpack.encode(["chat/completions", "theirs"]))


def test_a_record_says_its_version_and_one_of_a_later_version_is_not_guessed_at():
    _, record = exchange("chat/completions", {"model": "theirs"}, chat_answer("Hello."))
    assert record[0] == raw_exchange.VERSION
    with pytest.raises(ValueError, match=f"another version: it has version {raw_exchange.VERSION + 1}"):
        raw_exchange.read(bytes((raw_exchange.VERSION + 1,)) + record[1:])


def test_a_record_from_before_there_were_versions_is_read():
    """Left in a journal by a process of an older version that was killed."""
    record = base64.b64decode((Path(__file__).parent / "record_without_version.b64").read_text())
    (span,) = raw_exchange.read(record)
    assert (span.rollout_id, span.attempt_id, span.span_id) == ("ro-1", "at-1", "00" * 8)
    assert span.attributes[names.INPUT_TOKENS] == 11
    assert orjson.loads(span.attributes[names.OUTPUT_MESSAGES])[0]["parts"][0]["content"] == "Hello."
