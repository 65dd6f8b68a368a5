"""Promises of what is recorded of an answer that is not as its format says: everything else in it."""

import json

import pytest

from agentlightning.gateway.answer import Usage
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.record import output_messages


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
