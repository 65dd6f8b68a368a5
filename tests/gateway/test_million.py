"""A million tokens, drawn over many attempts and streams at once: the store has each of them, and each prompt."""

import asyncio
import itertools
import random
import struct
import sys

import aiohttp
import orjson
import pytest

from agentlightning import span as names
from agentlightning.engine.base import Sample
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.store import LightningStore
from agentlightning.testing import ByteChatFormat, ScriptedEngine

ATTEMPTS, TURNS, DRAWN = 64, 8, 2048
SECRET = "a-secret-nobody-prints"
END = 258


class RandomEngine(ScriptedEngine):
    """Draws random bytes, most of them no UTF-8, in runs of random length; remembers what it was given and what it
    drew, by attempt."""

    def __init__(self):
        super().__init__([], model="m", context_length=10**6)
        self.known = {}

    async def sample(self, prompt_token_ids, params, on_tokens=None, *, affinity=""):
        numbers = random.Random(f"{affinity} {len(self.known.setdefault(affinity, []))}")
        tokens = [*numbers.randbytes(DRAWN), END]
        logprobs = struct.unpack(
            f"<{len(tokens)}f", struct.pack(f"<{len(tokens)}f", *map(numbers.uniform, *bounds(tokens)))
        )
        self.known[affinity].append((list(prompt_token_ids), tokens, list(logprobs)))
        position = 0
        while on_tokens is not None and position < len(tokens):
            step = numbers.randint(1, 64)
            on_tokens(tokens[position : position + step])
            position += step
            await asyncio.sleep(0)
        return Sample(tuple(tokens), logprobs, "stop", 0)


def bounds(tokens):
    return [-9.0] * len(tokens), [0.0] * len(tokens)


async def ask(http, url, body):
    """The events of a streamed reply, or the reply alone."""
    async with http.post(url, json=body) as reply:
        data = await reply.read()
        assert reply.status == 200, data[:500]
    if not body["stream"]:
        return [orjson.loads(data)]
    lines = [line[6:] for line in data.split(b"\n\n") if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    return [orjson.loads(line) for line in lines[:-1]]


async def chat(http, url, turns, streams):
    """A conversation that sends back what it was shown."""
    history = [{"role": "user", "content": "start"}]
    for turn in range(turns):
        events = await ask(http, url + "/chat/completions", {"model": "m", "messages": history, "stream": streams})
        kind = "delta" if streams else "message"
        text = "".join(choice[kind].get("content") or "" for event in events for choice in event["choices"])
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on {turn} 🎉"}]
    return None


async def complete(http, url, turns, streams):
    """A caller that keeps its own tokens; returns the prompts it sent."""
    prompt, sent = [1, 2, 3], []
    for turn in range(turns):
        sent.append(prompt)
        body = {"model": "m", "prompt": prompt, "stream": streams, "logprobs": 0, "max_tokens": 10**5}
        events = await ask(http, url + "/completions", body)
        shown = next(c["logprobs"] for event in events for c in event["choices"] if c.get("logprobs"))
        assert len(shown["token_logprobs"]) == DRAWN + 1
        prompt = [*prompt, *random.Random(turn).randbytes(50)]
    return sent


async def work(store, engine, url, number, http):
    """One attempt: how many of its tokens in the store were compared."""
    attempted = await store.start_rollout({"number": number})
    ids = attempted.rollout_id, attempted.attempt.attempt_id
    speak = complete if number % 4 == 0 else chat
    sent = await speak(http, f"{url}/rollout/{ids[0]}/attempt/{ids[1]}/v1", TURNS, streams=number % 2 == 0)
    spans = [span.attributes for span in await store.query_spans(*ids)]
    known = engine.known["/".join(ids)]
    assert len(spans) == len(known) == TURNS
    for attributes, (prompt, tokens, logprobs) in zip(spans, known, strict=True):
        assert attributes[names.PROMPT_TOKEN_IDS] == prompt
        assert attributes[names.RESPONSE_TOKEN_IDS] == tokens
        assert attributes[names.LOGPROBS] == logprobs
    if sent is not None:
        assert [prompt for prompt, _, _ in known] == sent
    else:
        for (prompt, tokens, _), (following, _, _) in itertools.pairwise(known):
            assert following[: len(prompt) + len(tokens)] == prompt + tokens
    return sum(len(tokens) for _, tokens, _ in known), sum(len(prompt) for prompt, _, _ in known)


@pytest.mark.slow
async def test_a_million_tokens_are_recorded_exactly_as_they_were_drawn_and_sent(tmp_path, capsys):
    store, engine = LightningStore(tmp_path / "million.db"), RandomEngine()
    gateway = Gateway(store, {"m": engine}, secret=SECRET)
    async with Server(store, gateway, secret=SECRET) as server, aiohttp.ClientSession() as http:
        work_of_all = [work(store, engine, server.url, number, http) for number in range(ATTEMPTS)]
        counts = await asyncio.gather(*work_of_all)
    await store.close()
    drawn, sent = (sum(count) for count in zip(*counts, strict=True))
    with capsys.disabled():
        sys.stdout.write(f"\n{drawn:,} tokens drawn and {sent:,} of prompts in {ATTEMPTS} attempts: all in the store\n")
    assert drawn >= 1_000_000
    assert gateway.counters.drift == 0
    assert isinstance(engine.chat, ByteChatFormat)
