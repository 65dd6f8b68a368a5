"""Promises of what is recorded of an answer that is not as its format says: everything else in it."""

import pytest

from agentlightning.gateway.dialects.provider_events import Usage
from agentlightning.gateway.recording.provider_response import ProviderResponse


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
    response = ProviderResponse("chat/completions")
    choice = {"index": 0, "message": {"content": "Hello."}, "finish_reason": "stop"} | malformed
    response.read({"id": "c", "model": "m", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    recorded = response.choices[0]
    assert recorded.recorded_message("stop")["parts"] == [{"type": "text", "content": "Hello."}]
    assert recorded.finish_reason == "stop"
    assert response.usage == Usage(3, 2)


def test_a_malformed_event_of_a_stream_costs_no_other_event():
    response = ProviderResponse("chat/completions")
    for delta in ("Hel", "lo."):
        choice = {"index": 0, "delta": {"content": delta}, "token_ids": 5}
        response.read({"id": "c", "model": "m", "choices": [choice]})
    assert response.choices[0].recorded_message("stop")["parts"] == [{"type": "text", "content": "Hello."}]
