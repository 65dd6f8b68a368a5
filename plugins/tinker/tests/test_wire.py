"""The results of the Tinker API are what the official package reads."""

from __future__ import annotations

from tinker.proto import response_conv

from agentlightning.engine.base import Sample
from agentlightning_tinker.server.wire import sample_output


def test_fewer_likely_tokens_than_were_asked_for_are_read_as_those() -> None:
    rows = ((4, -0.5), (9, -1.0)), ((7, 0.0),), ()
    answer = Sample((4, 7, 5), (-0.5, 0.0, -2.0), "stop", 0, top_logprobs=rows)
    (sequence,) = response_conv.deserialize_sample_response(sample_output([answer], None).body).sequences
    assert sequence.topk_logprobs == [[(4, -0.5), (9, -1.0)], [(7, 0.0)], None]
