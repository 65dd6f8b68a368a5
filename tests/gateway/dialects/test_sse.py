"""Events of a provider's stream: cut out in time that grows with them, and never longer than is bearable."""

import gzip
import time
import zlib
from itertools import pairwise

import anthropic
import openai
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.provider import Reply, chat_answer
from tests.support.provider_streams import chat_events

from agentlightning.gateway.dialects.base import MAX_EVENT_BYTES, EventTooLongError, SSEDecoder, split_events

HI = [{"role": "user", "content": "hi"}]


@settings(max_examples=100)
@given(st.lists(st.sampled_from([b"data: a", b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", b": ping"])), st.data())
def test_events_are_the_same_however_their_bytes_are_cut(pieces, data):
    def contents(events):
        return [content for event in split_events(events) if (content := event.strip(b"\r\n"))]

    whole, events = b"".join(pieces), SSEDecoder()
    at_once = SSEDecoder()
    expected = contents(at_once.feed(whole)), at_once.rest.strip(b"\r\n")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)))))
    edges = [0, *cuts, len(whole)]
    found = [events.feed(whole[start:end]) for start, end in pairwise(edges)]
    assert ([content for each in found for content in contents(each)], events.rest.strip(b"\r\n")) == expected
    assert b"".join(found) + events.rest == whole
    assert all(b"".join(split_events(each)) == each for each in found)


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
        assert len(events.feed(b"\n\n")) == 4096 * 1024 + 2

    once = min(seconds(lambda: b"".join(pieces)) for _ in range(5))
    assert min(seconds(cut_out) for _ in range(3)) < 2000 * once  # copied with each piece, it is 80,000 times as long


def test_an_event_without_end_is_given_up():
    events = SSEDecoder(limit=100)
    events.feed(b"data: " + b"x" * 90)
    with pytest.raises(EventTooLongError, match="more than 100 bytes"):
        events.feed(b"x" * 10)


SENT = chat_events(["Hel", "lo."])
WITHOUT_DONE = b"".join(SENT[:-1]).rstrip()
STREAMS = {
    "CRLF": [event.replace(b"\n", b"\r\n") for event in SENT],
    "CR": [event.replace(b"\n", b"\r") for event in SENT],
    "both": [event.replace(b"\n\n", b"\n\r\n") for event in SENT],
    "a CRLF in two reads": [b"".join(SENT).replace(b"\n", b"\r\n")[at : at + 1] for at in range(2000)],
    "null": [SENT[0], b"data: null\n\n", *SENT[1:]],
    "no data": [SENT[0], b"data:\n\n", b"event: ping\n\n", *SENT[1:]],
    "comments": [b": data on its way\n\n", *(part for event in SENT for part in (event, b":\n\n"))],
    "a byte order mark": [b"\xef\xbb\xbf" + SENT[1], *SENT[2:]],
    "no blank line after [DONE]": [*SENT[:-1], SENT[-1].rstrip()],
    "no blank line and no [DONE]": [WITHOUT_DONE],
    "one line end": [WITHOUT_DONE + b"\r\n"],
}
GZIPPED = gzip.compress(b"".join(SENT))
RAW = zlib.compressobj(wbits=-15)
CODINGS = {
    "gzip": [GZIPPED[:20], GZIPPED[20:]],
    "x-gzip": [GZIPPED],
    "deflate": [zlib.compress(b"".join(SENT))],
    "Deflate": [RAW.compress(b"".join(SENT)) + RAW.flush()],
}
CASES = [(events, {}) for events in STREAMS.values()]
CASES += [(parts, {"content-encoding": coding}) for coding, parts in CODINGS.items()]


@pytest.mark.parametrize(("events", "headers"), CASES, ids=[*STREAMS, *CODINGS])
@pytest.mark.parametrize("translated", [False, True])
async def test_a_stream_is_read_however_it_is_written(events, headers, translated, ask):
    service, _ = await ask("openai", [Reply(events=[event for event in events if event], headers=headers)], retries=0)
    if translated:
        client = await service.anthropic()
        async with client.messages.stream(model="theirs", max_tokens=9, messages=HI) as stream:
            text = await stream.get_final_text()
        assert text == "Hello."
    else:  # What the SDK of the caller makes of it is its own affair: the bytes are the provider's.
        client = await service.http()
        body = {"model": "theirs", "messages": HI, "stream": True, "stream_options": {"include_usage": True}}
        reply = await client.post(f"{service.base_url}/chat/completions", json=body)
        assert reply.content.rstrip() == b"".join(SENT if headers else events).rstrip()
    (span,) = await service.spans()
    assert span.status_code == "OK"
    assert "Hello." in span.attributes["gen_ai.output.messages"]
    assert span.attributes["gen_ai.usage.output_tokens"] == 5


@pytest.mark.parametrize("end", [b'data: {"choices": [{"ind', b"event: mess", b""])
async def test_a_stream_that_ends_within_an_event_is_not_complete(end, ask):
    service, _ = await ask("openai", [Reply(events=[*SENT[:2], *([end] if end else [])])], retries=0)
    client = await service.client()
    stream = await client.chat.completions.create(model="theirs", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="before the response was complete"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "gzip, br"])
async def test_a_whole_answer_is_read_though_it_is_compressed_or_fails_by_name(coding, ask):
    body = orjson.dumps(chat_answer("Hello."))
    packed = {"gzip": gzip.compress(body), "deflate": zlib.compress(body)}.get(coding, body)
    service, _ = await ask("openai", [Reply(packed, headers={"content-encoding": coding})], retries=0)
    client = await service.client()
    call = client.chat.completions.create(model="theirs", messages=HI)
    if "br" in coding:
        with pytest.raises(openai.InternalServerError, match=f"content-encoding '{coding}', which was not requested"):
            await call
    else:
        assert (await call).choices[0].message.content == "Hello."


async def test_a_whole_answer_may_begin_with_a_byte_order_mark(ask):
    service, _ = await ask("openai", [Reply(b"\xef\xbb\xbf" + orjson.dumps(chat_answer("Hello.")))], retries=0)
    client = await service.http()
    body = {"model": "theirs", "max_tokens": 9, "messages": HI}
    reply = await client.post(f"{service.base_url}/messages", json=body)
    assert reply.json()["content"][0]["text"] == "Hello."


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
