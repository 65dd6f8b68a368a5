"""A prompt that no context holds costs little, and one that is long stops nobody else: heartbeats share the loop."""

import asyncio
import pkgutil
import threading
import time
from contextlib import asynccontextmanager

import openai
import orjson
import pytest
from tests.support.provider import Reply, ScriptedProvider, chat_answer
from tests.support.provider_streams import chat_events

from agentlightning.gateway.config import GatewayConfig
from agentlightning.gateway.http import MAX_CHUNK_BYTES, parse

TEXT = "".join(chr(97 + place * place % 26) + " " * (place % 7 == 0) for place in range(150_000))


@asynccontextmanager
async def watchdog():
    """Yields a function: the longest time, in seconds, that something has held the loop so far."""
    worst = [0.0]

    async def tick():
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            worst[0] = max(worst[0], time.perf_counter() - before)

    task = asyncio.create_task(tick())
    await asyncio.sleep(0)
    yield lambda: worst[0]
    task.cancel()


@pytest.fixture(scope="module")
def whole(bpe_chat):
    """Seconds it takes to encode TEXT at once: the loop would be held for as long."""
    bpe_chat.encode("warm")
    started = time.perf_counter()
    bpe_chat._backend.encode(TEXT, add_special_tokens=False)
    return time.perf_counter() - started


async def test_a_prompt_beyond_the_context_is_refused_before_it_is_encoded_whole(serve, bpe_chat, whole):
    service = await serve(["Hello."] * 2, engine={"chat": bpe_chat, "context_length": 100})
    with pytest.raises(openai.BadRequestError, match="the context holds 100") as refused:
        await service.ask(TEXT)
    assert refused.value.code == "context_length_exceeded"
    assert service.engine.calls == []
    took: list[float] = []
    for _ in range(5):  # The least of them: what else the machine does may hold up any of them.
        started = time.perf_counter()
        with pytest.raises(openai.BadRequestError):
            await service.ask(TEXT)
        took.append(time.perf_counter() - started)
    assert min(took) < whole / 2


async def test_a_long_prompt_that_fits_is_encoded_beside_the_loop(serve, bpe_chat, whole):
    service = await serve(["Hello."], engine={"chat": bpe_chat, "context_length": 1_000_000})
    async with watchdog() as worst:
        await service.ask(TEXT)
    assert worst() < whole / 2
    ((prompt, _),) = service.engine.calls
    assert prompt == bpe_chat.encode(bpe_chat.render([{"role": "user", "content": TEXT}]))


async def test_a_conversation_that_grew_too_long_is_refused_by_what_is_new(serve, bpe_chat):
    service = await serve(["Hello."], engine={"chat": bpe_chat, "context_length": 1000})
    asked = [{"role": "user", "content": "hi"}]
    said = (await service.ask(asked)).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="the context holds 1000"):
        await service.ask([*asked, {"role": "assistant", "content": said}, {"role": "user", "content": TEXT}])


async def test_the_tokens_of_what_is_too_long_are_still_counted(serve, bpe_chat):
    service = await serve([], engine={"chat": bpe_chat, "context_length": 100})
    asked = {"model": "scripted", "messages": [{"role": "user", "content": TEXT}]}
    url = f"{service.environment['ANTHROPIC_BASE_URL']}/v1/messages/count_tokens"
    count = await (await service.http()).post(url, json=asked, headers={"x-api-key": service.key})
    assert count.json()["input_tokens"] > 100


@pytest.mark.parametrize("text", ["", "hi", "a b " * 50_000, "\n" * 5000, "é" * 9000, "<|im_end|>" * 3000])
@pytest.mark.parametrize("most", [10, 2000])
def test_no_text_is_said_to_be_longer_than_it_is(bpe_chat, text, most):
    length, least = len(bpe_chat.encode(text)), bpe_chat.min_token_count(text, most)
    assert least <= length
    assert (least > most) == (length > most) or length < 2 * most


def test_a_large_body_is_parsed_piece_by_piece_as_it_would_be_whole():
    messages = [
        {"role": "user", "content": text} for text in ("hi", "x" * MAX_CHUNK_BYTES, 'é"\\\ud83d\ude00'[:3], None)
    ]
    data = {"model": "m", "messages": messages * 3, "n": 1, "nested": [[[1.5, True]] * 9]}
    assert parse(b" \n" + orjson.dumps(data)) == data
    for broken in (
        orjson.dumps(data)[:-1],
        b'{"a": "' + b"x" * MAX_CHUNK_BYTES + b'", }',
        b"\xff" * (MAX_CHUNK_BYTES + 1),
    ):
        with pytest.raises(orjson.JSONDecodeError):
            parse(broken)
    with pytest.raises(orjson.JSONDecodeError):
        parse(b'{"a": "' + b"x" * MAX_CHUNK_BYTES + b'", "\xff": 1}')


GATEWAY = "agentlightning.gateway."
PACK, SPANS = "agentlightning.store.sql.store.group_by_attempt", GATEWAY + "forwarding.call.ProviderRecord.spans"
TRANSLATE = GATEWAY + "forwarding.call.translate"
WORK = {
    "local": (GATEWAY + "conversation.Prompt.__post_init__", GATEWAY + "local.LocalCall._span", PACK),
    "forwarded": (GATEWAY + "forwarding.call.upstream_call", SPANS, PACK),
    "streamed": (GATEWAY + "forwarding.call.upstream_call", SPANS, PACK),
    "translated": (TRANSLATE, SPANS, PACK),
    "counted": (TRANSLATE, GATEWAY + "forwarding.call.estimate_prompt_tokens"),
}
"""What takes long for a long conversation, by the way of its call."""


def answer(seen):
    if seen.path.endswith("/tokenize"):
        return Reply(status=404)
    return Reply(events=chat_events(["Hello."])) if seen.json.get("stream") else Reply(chat_answer("Hello."))


@pytest.mark.parametrize("way", WORK)
async def test_what_takes_long_for_a_long_conversation_is_done_beside_the_loop(serve, bpe_chat, monkeypatch, way):
    """Whether it is local, passed on, translated or only counted. What is short is not worth a thread."""
    async with ScriptedProvider(answer) as provider:
        them = {"name": "them", "base_urls": [f"{provider.url}/v1"]}
        config = {"providers": [them], "routes": [{"model": "theirs", "provider": "them"}]}
        engine = {"chat": bpe_chat, "context_length": 10_000_000}
        service = await serve(["Hello."] * 2, engine=engine, config=GatewayConfig.model_validate(config))
        http, done = await service.http(), set[tuple[str, int]]()

        def noting(name, work):
            def noted(*arguments, **options):
                done.add((name, threading.get_ident()))
                return work(*arguments, **options)

            return noted

        for name in WORK[way]:
            monkeypatch.setattr(name, noting(name, pkgutil.resolve_name(name)))
        url = service.environment["ANTHROPIC_BASE_URL"] + "/v1/"
        url += {"translated": "messages", "counted": "messages/count_tokens"}.get(way, "chat/completions")
        body = {"model": "scripted" if way == "local" else "theirs", "max_tokens": 9, "stream": way == "streamed"}
        for turns in (1, 1001):
            done.clear()
            messages = [{"role": ("user", "assistant")[turn % 2], "content": "word " * 120} for turn in range(turns)]
            reply = await http.post(url, json=body | {"messages": messages}, headers={"x-api-key": service.key})
            assert (reply.status_code, {name for name, _ in done}) == (200, set(WORK[way])), reply.text
            beside = {name for name, thread in done if thread != threading.get_ident()}
            assert beside == (set() if turns == 1 else set(WORK[way]))
