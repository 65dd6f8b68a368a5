"""Promises of what is recorded of an answer that is not as its format says: everything else in it."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.gateway.answer import Usage
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import encode_event
from agentlightning.gateway.dialects.chat import ChatResponse
from agentlightning.gateway.record import input_messages, output_messages


def said(answer):
    answer.take_new(done=True)
    (message,) = json.loads(output_messages(answer, "stop"))
    return message["parts"]


@pytest.mark.parametrize(
    "malformed",
    [
        {"token_ids": 5},
        {"token_ids": [1], "logprobs": {"token_logprobs": 0.5}},
        {"prompt_token_ids": 7, "token_ids": 9},
    ],
    ids=["token ids", "logprobs", "prompt token ids"],
)
def test_malformed_tokens_cost_neither_the_text_nor_the_usage_of_the_answer(malformed):
    response = DIALECTS["chat/completions"].response()
    choice = {"index": 0, "message": {"content": "Hello."}, "finish_reason": "stop"} | malformed
    response.read({"id": "c", "model": "m", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    recorded = response.choices[0]
    assert said(recorded) == [{"type": "text", "content": "Hello."}]
    assert recorded.finish_reason == "stop"
    assert response.usage == Usage(3, 2)


def test_a_malformed_event_of_a_stream_costs_no_other_event():
    response = DIALECTS["chat/completions"].response()
    for delta in ("Hel", "lo."):
        choice = {"index": 0, "delta": {"content": delta}, "token_ids": 5}
        response.read({"id": "c", "model": "m", "choices": [choice]})
    assert said(response.choices[0]) == [{"type": "text", "content": "Hello."}]


LOGGED = st.lists(
    st.sampled_from([{"token": "t", "logprob": -0.5}, {"token": "u", "logprob": -1.5}, {}, None, 5]), max_size=3
)
DELTAS = st.one_of(
    st.builds(lambda text: {"content": text}, st.sampled_from(["", "a", "b c", None, ["d"]])),
    st.sampled_from(
        [{}, {"role": "assistant", "content": "e"}, {"reasoning_content": "Hm."}, {"refusal": "No."}, None, 7]
    ),
    st.just({"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "f", "arguments": "{}"}}]}),
)
CHOICES = st.fixed_dictionaries(
    {"index": st.sampled_from([0, 0, 0, 1, -1, "0", None]), "delta": DELTAS},
    optional={
        "finish_reason": st.sampled_from([None, "stop", 5]),
        "token_ids": st.sampled_from([[], [1], [2, 3], None, 5]),
        "logprobs": st.one_of(st.none(), st.just({}), st.builds(lambda entries: {"content": entries}, LOGGED)),
        "text": st.just("f"),
    },
)
CHUNKS = st.fixed_dictionaries(
    {"choices": st.lists(CHOICES, max_size=2) | st.lists(CHOICES, min_size=1, max_size=1)},
    optional={
        "id": st.sampled_from(["x", "y", 5]),
        "model": st.sampled_from(["m", None]),
        "prompt_token_ids": st.just([7, 8]),
        "usage": st.sampled_from([None, {"prompt_tokens": 3, "completion_tokens": 2}]),
        "error": st.sampled_from([None, {"message": "bad"}]),
    },
)

TEXTS = st.builds(
    lambda text, more: {"id": "x", "model": "m", "choices": [{"index": 0, "delta": {"content": text}, **more}]},
    st.sampled_from(["", "a", "b c", 'data: "\n\n']),
    st.fixed_dictionaries(
        {},
        optional={
            "finish_reason": st.none(),
            "token_ids": st.sampled_from([[], [1], [2, 3], None]),
            "logprobs": st.none() | st.builds(lambda entries: {"content": entries, "refusal": None}, LOGGED),
        },
    ),
)
"""Chunks that are read as one."""


def contents(response):
    for answer in response.choices.values():
        answer.take_new(done=True)
    told = [
        (answer.content, answer.reasoning, answer.tool_calls, answer.token_ids, answer.logprobs, answer.given_reason)
        for _, answer in sorted(response.choices.items())
    ]
    return told, response.id, response.model, response.usage, response.prompt_token_ids, response.error


@given(
    st.lists(st.lists(CHUNKS | st.sampled_from([None, 5, []]), max_size=6) | st.lists(TEXTS, min_size=1), max_size=4)
)
def test_chunks_of_a_stream_read_together_say_what_each_says(reads):
    one_by_one, together = DIALECTS["chat/completions"].response(), DIALECTS["chat/completions"].response()
    for events in reads:
        merged = together.merge(b"".join(encode_event(event) for event in events))
        for data in events if merged is None else [merged]:
            together.read(data)
        for event in events:
            one_by_one.read(event)
    assert contents(together) == contents(one_by_one)


TEXT_EVENT = encode_event({"choices": [{"index": 0, "delta": {"content": "a"}}]})


@pytest.mark.parametrize(
    "events",
    [
        TEXT_EVENT.replace(b"\n\n", b"\r\r"),
        TEXT_EVENT.replace(b",", b",\n", 1) + TEXT_EVENT,
        TEXT_EVENT[:-2] + b"," + TEXT_EVENT[6:] + TEXT_EVENT,
        TEXT_EVENT + encode_event({"x": 0}).replace(b"0", b"[" * 5000 + b"]" * 5000),
    ],
    ids=["ended by CRs", "cut by a line end", "two values", "nested deep"],
)
def test_events_that_are_no_json_or_ended_otherwise_are_not_read_as_one(events):
    assert ChatResponse().merge(events) is None


def test_the_prompts_of_any_request_are_recorded_as_messages_and_a_prompt_that_its_provider_stores_as_none():
    def told(request, index=0):
        return [part["content"] for message in json.loads(input_messages(request, index)) for part in message["parts"]]

    assert told({"prompt": {"id": "pmpt_1"}}) == told({}) == []
    assert told({"prompt": ["a", "b"]}, 1) == told({"prompt": "b"}) == told({"input": "b"}) == ["b"]
    assert told({"input": ["a", [1, 2]]}) == ["a", "[1,2]"]
    assert told({"prompt": [1, 2]}, 3) == told({"input": [1, 2]}) == ["[1,2]"]
    assert told({"system": "s", "messages": [{"role": "user", "content": "u"}]}) == ["s", "u"]


def test_of_a_token_little_more_than_its_number_and_its_log_probability_is_kept():
    def chunk(number):
        entry = {"token": "t", "logprob": -number / 1e5, "bytes": [116], "top_logprobs": []}
        choice = {"index": 0, "delta": {"content": "t"}, "token_ids": [1000 + number], "logprobs": {"content": [entry]}}
        return {"id": "c", "model": "m", "choices": [choice]}

    tracemalloc.start()
    try:
        response = ChatResponse()
        for start in range(0, 20_000, 200):
            events = b"".join(encode_event(chunk(number)) for number in range(start, start + 200))
            response.read(response.merge(events))
        del events
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(response.choice().logprobs) == 20_000
    assert kept / 20_000 < 150
