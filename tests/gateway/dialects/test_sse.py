"""Events of a provider's stream: cut out in time that grows with them, and never longer than is bearable."""

import time
from itertools import pairwise

import anthropic
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.gateway.dialects.sse import MAX_EVENT_BYTES, EventTooLongError, SSEDecoder
from agentlightning.testing.provider import Reply, chat_events

HI = [{"role": "user", "content": "hi"}]


@settings(max_examples=100)
@given(st.lists(st.sampled_from([b"data: a", b"\n", b"\r\n", b"\n\n", b"\r\n\r\n", b": ping"])), st.data())
def test_events_are_the_same_however_their_bytes_are_cut(pieces, data):
    whole, events = b"".join(pieces), SSEDecoder()
    at_once = SSEDecoder()
    expected = at_once.feed(whole), at_once.rest
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    edges = [0, *cuts, len(whole)]
    found = [event for start, end in pairwise(edges) for event in events.feed(whole[start:end])]
    assert (found, events.rest) == expected
    assert b"".join(found) + events.rest == whole


def test_an_event_that_comes_in_many_pieces_takes_time_in_proportion():
    pieces = [b"x" * 1024] * 4096

    def seconds(work):
        started = time.thread_time()
        work()
        return time.thread_time() - started

    def cut_out():
        events = SSEDecoder()
        for piece in pieces:
            events.feed(piece)
        (event,) = events.feed(b"\n\n")
        assert len(event) == 4096 * 1024 + 2

    once = min(seconds(lambda: b"".join(pieces)) for _ in range(5))
    assert min(seconds(cut_out) for _ in range(3)) < 2000 * once  # copied with each piece, it is 80,000 times as long


def test_an_event_without_end_is_given_up():
    events = SSEDecoder(limit=100)
    events.feed(b"data: " + b"x" * 90)
    with pytest.raises(EventTooLongError, match="more than 100 bytes"):
        events.feed(b"x" * 10)


@pytest.mark.parametrize("translated", [False, True])
async def test_a_stream_whose_event_does_not_end_fails_by_name(ask, translated):
    endless = [*chat_events(["Hel"])[:2], *([b"x" * 1_000_000] * (MAX_EVENT_BYTES // 1_000_000 + 1))]
    service, _ = await ask("openai", [Reply(events=endless)])
    if translated:
        client, error = await service.anthropic(), anthropic.APIStatusError
        stream = await client.messages.create(model="theirs", max_tokens=9, messages=HI, stream=True)
    else:
        client, error = await service.client(), openai.APIError
        stream = await client.chat.completions.create(model="theirs", messages=HI, stream=True)
    with pytest.raises(error, match="an event of its stream has more than"):
        async for _ in stream:
            pass
    (span,) = await service.spans()
    assert span.attributes["error.type"] == "provider_protocol"
