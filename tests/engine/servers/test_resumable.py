"""An answer is the same however many servers drew it, and however they cut it into runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.engine.base import Sample, SamplingParams
from agentlightning.engine.servers.clients.http import Completion, TokenChunk
from agentlightning.engine.servers.pool import ResumableSample, StopStringFound, UnknownWeightsError

PROMPT = (1, 2, 3)


def text(token_ids: Sequence[int]) -> str:
    return bytes(token_ids).decode("utf-8", errors="replace")


def drawn(tokens: Sequence[int], cuts: Sequence[int], parts: Sequence[int], params: SamplingParams) -> Sample:
    """The sample of `tokens` that come cut at `cuts`, from a new server at each of `parts`."""
    seen: list[int] = []
    answer = ResumableSample(PROMPT, params, len(tokens), frozenset({0}), text, seen.extend)
    bounds = sorted({0, len(tokens), *cuts, *parts})
    request = answer.request("m", False)
    for start, end in pairwise(bounds):
        if start in parts:
            request = answer.request("m", False)
            assert tuple(request.prompt) == (*PROMPT, *tokens[:start])
            assert request.max_tokens == len(tokens) - start
        try:
            answer.append(TokenChunk(tuple(tokens[start:end]), tuple(-token / 8 for token in tokens[start:end])), 7)
        except StopStringFound:
            break
    assert tuple(seen) == tuple(answer.token_ids)
    return answer.sample("stop", 7)


@given(st.lists(st.integers(97, 120), min_size=1, max_size=40), st.data())
def test_chunks_and_servers_do_not_affect_the_sample(tokens: list[int], data: st.DataObject):
    places = st.lists(st.integers(0, len(tokens)), max_size=5)
    sample = drawn(tokens, data.draw(places), data.draw(places), SamplingParams())
    assert sample == Sample(tuple(tokens), tuple(-token / 8 for token in tokens), "stop", 7)


@given(st.lists(st.sampled_from(b"abc"), min_size=2, max_size=30), st.data())
def test_a_stop_string_may_span_two_servers(tokens: list[int], data: st.DataObject):
    stop = data.draw(st.text("abc", min_size=2, max_size=3))
    place = text(tokens).find(stop)
    if place < 0:
        return
    # The first server would have found what is whole before it went.
    part = data.draw(st.integers(1, place + len(stop) - 1))
    sample = drawn(tokens, (), (part,), SamplingParams(stop=(stop,)))
    assert sample.token_ids == tuple(tokens[: place + len(stop)])


def test_another_server_does_not_repeat_the_random_numbers_of_a_seed():
    answer = ResumableSample(PROMPT, SamplingParams(seed=5), 10, frozenset(), text, None)
    assert answer.request("m", False).params.seed == 5
    answer.append(TokenChunk((9, 9), (-1.0, -1.0)), 0)
    assert answer.request("m", False).params.seed == 7


def test_the_servers_reported_versions_are_used():
    answer = ResumableSample(PROMPT, SamplingParams(), 10, frozenset(), text, None)
    answer.request("m", False)
    answer.append(TokenChunk((9,) * 5, (-1.0,) * 5), 3)
    answer.set_versions(Completion("length", (("a", 2), ("b", 3))), {"a": 3, "b": 4})
    sample = answer.sample("length", 0)
    assert (sample.versions, sample.policy_version) == (((3, 2), (4, 3)), 4)
    with pytest.raises(UnknownWeightsError, match="c"):
        answer.set_versions(Completion("length", (("c", 5),)), {"a": 3})


COUNTING = [SamplingParams(presence_penalty=0.5), SamplingParams(json_schema="{}"), SamplingParams(grammar="")]


@pytest.mark.parametrize("params", COUNTING)
def test_stateful_parameters_prevent_resuming_elsewhere(params: SamplingParams):
    answer = ResumableSample(PROMPT, params, 10, frozenset(), text, None)
    assert answer.can_resume
    answer.append(TokenChunk((9,), (-1.0,)), 0)
    assert not answer.can_resume
