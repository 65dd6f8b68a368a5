"""In every dialect, with the official SDKs: the next call's prompt begins with the tokens of the call before it."""

import asyncio
import json
from itertools import pairwise

import httpx2
import pytest
from anthropic import AsyncAnthropic
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, LengthFinishReasonError
from starlette.applications import Starlette
from tests.support.templates import FAMILIES
from tests.support.tokenizer import CHATML, tiny_tokenizer

from agentlightning import span as names
from agentlightning.attempt_variables import attempt_environment
from agentlightning.chat.hf import HFChatFormat
from agentlightning.engine.base import Sample
from agentlightning.gateway.app import Gateway
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import ScriptedEngine

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}, "y": {"type": "number"}}}
THOUGHT = "<think>\nhm\n</think>\n\n"
WRITTEN = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
THINKING = CHATML.replace("{{ message.content }}", WRITTEN + "{{ message.content }}")
XML = "<tool_call>\n<function=f>\n<parameter=x>\n %s\n</parameter>\n</function>\n</tool_call>"
SHARP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CALLS = {
    "plain": [
        '<tool_call>\n{"name": "f", "arguments": {"x":  "6*7", "y": 1.0}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": "6 *"}\n</tool_call>',
        "<tool_call>",
        "</tool_call>",
    ],
    "qwen_coder": [XML % "6*7", XML % "two\nlines\n", "<tool_call>\n<function=f>", "</parameter>"],
    "llama3": [
        '{"name": "f", "parameters": {"x":  "6*7", "y": 1.0}}',
        '<|python_tag|>f.call(x="6*7")',
        '{"name": "f", ',
        ";",
    ],
    "pythonic": ["[f(x='6*7', y=1.0), f()]", '<|python_start|>[f(x="\\u00e9")]<|python_end|>', "[f(x=", ")]"],
    "mistral": [
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x":  "6*7"}, "id": "abcdefgh1"}]',
        "[TOOL_CALLS]",
        "[{",
        "}]",
    ],
    "mistral_named": [
        '[TOOL_CALLS]f[ARGS]{"x":  "6*7"}[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{}',
        *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ],
    "deepseek": [SHARP % 'f<｜tool▁sep｜>{"x":  "6*7"}', SHARP % "f<｜tool▁sep｜>{", "<｜tool▁sep｜>"],
    "deepseek_fenced": [SHARP % 'function<｜tool▁sep｜>f\n```json\n{"x":  "6*7"}\n```', "```", "<｜tool▁call▁begin｜>"],
}
PIECES = [" ", "\n", "é", "🎉", "hello", "{", '"', "\\", "0", "�", "<", "["]
SPELLED = ["<|im_end|>", "<|im_start|>", "<|eot_id|>", "</s>", "[/INST]", "<tool_call>", "<｜end▁of▁sentence｜>"]
"""What looks like a special token, and is not: drawn character by character."""
MOVES_ITS_TOOLS = {"mistral"}
"""Families whose template writes an earlier turn otherwise once another one follows."""


def awkward(name):
    """Answers cut in many ways: (text, whether it is drawn character by character)."""
    calls = CALLS.get(name, CALLS["plain"])
    thoughts = [THOUGHT, THOUGHT, "</think>"] if name in ("plain", "thinking") else []
    whole = st.lists(st.sampled_from([*PIECES, *calls, calls[0], *thoughts]), max_size=6).map("".join)
    spelled = st.lists(st.sampled_from([*PIECES, *SPELLED]), max_size=4).map("".join)
    return (
        st.sampled_from(calls).map(lambda text: (text, False))
        | st.tuples(whole, st.just(False))
        | st.tuples(spelled, st.just(True))
    )


def turns(name):
    """What the model says, what the user or the tool says to that, and where the answer is cut off (0: nowhere)."""
    asked = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)
    return st.lists(st.tuples(awkward(name), asked, st.integers(0, 12) | st.just(0)), min_size=1, max_size=3)


class TokenEngine(ScriptedEngine):
    """Says exactly the tokens it is told to."""

    says: tuple[int, ...] = ()

    async def sample(self, prompt_token_ids, params, on_tokens=None, *, affinity=""):
        for token in self.says if on_tokens else ():
            on_tokens([token])
        reason = "stop" if self.says[-1:] and self.says[-1] in self.chat.eos_token_ids else "length"
        return Sample(self.says, (0.0,) * len(self.says), reason, 0)


class House:
    """A gateway in one event loop, with an attempt for each conversation."""

    def __init__(self, chat):
        self.runner = asyncio.Runner()
        self.store = InMemoryLightningStore()
        self.engine = TokenEngine([], chat=chat, model="m")
        self.gateway = Gateway(self.store, {"m": self.engine}, secret="secret")
        self.end = self.engine._end_of_turn()
        transport = httpx2.ASGITransport(Starlette(routes=self.gateway.routes()))
        self.http = httpx2.AsyncClient(transport=transport, base_url="http://gateway")

    def close(self):
        self.runner.run(self.http.aclose())
        self.runner.run(self.store.close())
        self.runner.close()

    async def converse(self, agent_type, turns, streams):
        """The spans of one conversation. A cut of 0 lets the model finish its turn."""
        attempted = await self.store.start_rollout({})
        ids = attempted.rollout_id, attempted.attempt.attempt_id
        agent = agent_type(attempt_environment("http://gateway", "secret", *ids), self.http, streams)
        for (said, spelled), asked, cut in [*turns, (("end", False), "", 0)]:
            pieces = list(said) if spelled else [said]
            tokens = [token for piece in pieces for token in self.engine.chat.encode(piece)] + self.end
            self.engine.says = tuple(tokens[:cut] if cut else tokens)
            await agent.turn(asked, ended=self.engine.chat.decode(self.end) * (self.engine.says == tuple(tokens)))
        spans = [span.attributes for span in await self.store.query_spans(*ids)]
        self.gateway.forget(*ids)
        return spans


def chat_of(name):
    if name in ("plain", "thinking"):
        return HFChatFormat(tiny_tokenizer(CHATML if name == "plain" else THINKING))
    family = FAMILIES[name]
    return HFChatFormat(tiny_tokenizer(family.template, special=family.special, eos=family.eos))


@pytest.fixture(scope="module")
def houses():
    houses = {}

    def house(name):
        if name not in houses:
            houses[name] = House(chat_of(name))
        return houses[name]

    yield house
    for built in houses.values():
        built.close()


def as_json(value):
    """As a client would send it back."""
    return json.loads(json.dumps(value))


class ChatAgent:
    def __init__(self, environment, http, streams):
        base, key = environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]
        self.client = AsyncOpenAI(base_url=base, api_key=key, http_client=http, max_retries=0)
        self.streams = streams
        self.history = [{"role": "user", "content": "start"}]

    async def turn(self, asked, ended):
        tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
        options = {"model": "m", "messages": self.history, "tools": tools}
        message = (await self.ask(options)).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": asked} for call in message.tool_calls or ()]
        echo = as_json(message.model_dump(exclude={"parsed"}))
        self.history += [echo, *(results or [{"role": "user", "content": asked}])]

    async def ask(self, options):
        if not self.streams:
            return await self.client.chat.completions.create(**options)
        try:
            async with self.client.chat.completions.stream(**options) as events:
                return await events.get_final_completion()
        except LengthFinishReasonError as cut:
            return cut.completion


class MessagesAgent:
    def __init__(self, environment, http, streams):
        base, key = environment["ANTHROPIC_BASE_URL"], environment["ANTHROPIC_API_KEY"]
        self.client = AsyncAnthropic(base_url=base, api_key=key, http_client=http, max_retries=0)
        self.streams = streams
        self.history = [{"role": "user", "content": "start"}]

    async def turn(self, asked, ended):
        tools = [{"name": "f", "input_schema": SCHEMA}]
        options = {"model": "m", "max_tokens": 999, "messages": self.history, "tools": tools}
        if self.streams:
            async with self.client.messages.stream(**options) as events:
                message = await events.get_final_message()
        else:
            message = await self.client.messages.create(**options)
        calls = [block.id for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call, "content": asked} for call in calls]
        self.history += [
            {"role": "assistant", "content": as_json([block.to_dict() for block in message.content])},
            {"role": "user", "content": results or asked},
        ]


class ResponsesAgent:
    names_the_last = False

    def __init__(self, environment, http, streams):
        base, key = environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]
        self.client = AsyncOpenAI(base_url=base, api_key=key, http_client=http, max_retries=0)
        self.streams = streams
        self.input = [{"role": "user", "content": "start"}]
        self.options = {"model": "m", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]}

    async def turn(self, asked, ended):
        create = self.client.responses.create
        if self.streams:
            events = await create(**self.options, input=self.input, stream=True)
            reply = [event async for event in events][-1].response
        else:
            reply = await create(**self.options, input=self.input)
        calls = [item.call_id for item in reply.output if item.type == "function_call"]
        new = [{"type": "function_call_output", "call_id": call, "output": asked} for call in calls]
        new = new or [{"role": "user", "content": asked}]
        if self.names_the_last:
            self.input, self.options["previous_response_id"] = new, reply.id
        else:
            self.input = self.input + as_json([item.to_dict() for item in reply.output]) + new


class NamingAgent(ResponsesAgent):
    names_the_last = True


class CompletionsAgent:
    """Writes its own template: the end of a turn too, where the model wrote it."""

    def __init__(self, environment, http, streams):
        base, key = environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"]
        self.client = AsyncOpenAI(base_url=base, api_key=key, http_client=http, max_retries=0)
        self.streams = streams
        self.prompt = "start"

    async def turn(self, asked, ended):
        reply = await self.client.completions.create(model="m", prompt=self.prompt, stream=self.streams)
        if self.streams:
            text = "".join([choice.text async for chunk in reply for choice in chunk.choices])
        else:
            text = reply.choices[0].text
        self.prompt += text + ended + asked


AGENTS = [ChatAgent, MessagesAgent, ResponsesAgent, NamingAgent, CompletionsAgent]


MANY = pytest.mark.slow


def each(few, many):
    """(family, agent, how many examples): every family in every dialect, few of each by default."""
    families = [*CALLS, "thinking"]
    pairs = [(family, agent) for family in families for agent in AGENTS]
    few_of_each = [pytest.param(family, agent, few) for family, agent in pairs]
    return few_of_each + [pytest.param(family, agent, many, marks=MANY) for family, agent in pairs]


@pytest.mark.parametrize(("family", "agent", "examples"), each(2, 150))
def test_every_prompt_of_a_conversation_begins_with_the_prompt_and_sample_before_it(houses, family, agent, examples):
    house, moves = houses(family), family in MOVES_ITS_TOOLS and agent is not CompletionsAgent

    @settings(max_examples=examples)
    @given(turns(family), st.booleans())
    def check(turns, streams):
        spans = house.runner.run(house.converse(agent, turns, streams))
        assert len(spans) == len(turns) + 1
        for before, after in pairwise(spans):
            known = [*before[names.PROMPT_TOKEN_IDS], *before[names.RESPONSE_TOKEN_IDS]]
            if moves and names.DRIFT in after:
                assert after[names.DRIFT_REASON] == "template"
                continue
            assert after[names.PROMPT_TOKEN_IDS][: len(known)] == known
            assert names.CONTINUES in after
            assert names.DRIFT not in after

    check()


def test_a_raw_prompt_without_the_end_of_the_turn_keeps_every_other_token(houses):
    class Agent(CompletionsAgent):
        async def turn(self, asked, ended):
            await super().turn(asked, "")

    house = houses("plain")
    one, two = house.runner.run(house.converse(Agent, [(("hello 🎉", False), " more", 0)], False))
    known = [*one[names.PROMPT_TOKEN_IDS], *one[names.RESPONSE_TOKEN_IDS]]
    assert two[names.PROMPT_TOKEN_IDS] == known[:-1] + house.engine.chat.encode(" more")
    assert names.CONTINUES not in two
