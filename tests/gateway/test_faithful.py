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

from agentlightning import span as names
from agentlightning.gateway.app import Gateway
from agentlightning.policy.base import Sample
from agentlightning.policy.chat import HFChatFormat
from agentlightning.rollouts import attempt_environment
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import ScriptedEngine
from agentlightning.testing.tokenizer import CHATML, tiny_tokenizer

SCHEMA = {"type": "object"}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x":  "6*7", "y": 1.0}}\n</tool_call>'
ODD = '<tool_call>\n{"name": "f", "arguments": "6 *"}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"
WRITTEN = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
THINKING = CHATML.replace("{{ message.content }}", WRITTEN + "{{ message.content }}")
PIECES = [
    THOUGHT,
    THOUGHT,
    "</think>",
    " ",
    "\n",
    "é",
    "🎉",
    "hello",
    "<tool_call>",
    "</tool_call>",
    CALL,
    CALL,
    ODD,
    "{",
    '"',
    "\\",
    "0",
    "�",
]
AWKWARD = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
TURN = st.tuples(AWKWARD, AWKWARD, st.integers(0, 12))


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
        for said, asked, cut in [*turns, ("end", "", 0)]:
            tokens = self.engine.chat.encode(said) + self.engine.chat.encode("<|im_end|>")
            self.engine.says = tuple(tokens[:cut] if cut else tokens)
            await agent.turn(asked, ended=self.engine.says == tuple(tokens))
        spans = [span.attributes for span in await self.store.query_spans(*ids)]
        self.gateway.forget(*ids)
        return spans


@pytest.fixture(scope="module", params=["plain", "thinking"])
def house(request, bpe_chat):
    house = House(bpe_chat if request.param == "plain" else HFChatFormat(tiny_tokenizer(THINKING)))
    yield house
    house.close()


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
        self.prompt += text + ("<|im_end|>" if ended else "") + asked


AGENTS = [ChatAgent, MessagesAgent, ResponsesAgent, NamingAgent, CompletionsAgent]


@pytest.mark.parametrize("agent", AGENTS)
def test_every_prompt_of_a_conversation_begins_with_the_prompt_and_sample_before_it(house, agent):
    @settings(max_examples=8, deadline=None)
    @given(st.lists(TURN, min_size=1, max_size=3), st.booleans())
    def check(turns, streams):
        spans = house.runner.run(house.converse(agent, turns, streams))
        assert len(spans) == len(turns) + 1
        for before, after in pairwise(spans):
            known = [*before[names.PROMPT_TOKEN_IDS], *before[names.RESPONSE_TOKEN_IDS]]
            assert after[names.PROMPT_TOKEN_IDS][: len(known)] == known
            assert names.CONTINUES in after
            assert names.DRIFT not in after

    check()


def test_a_raw_prompt_without_the_end_of_the_turn_keeps_every_other_token(house):
    class Agent(CompletionsAgent):
        async def turn(self, asked, ended):
            await super().turn(asked, False)

    one, two = house.runner.run(house.converse(Agent, [("hello 🎉", " more", 0)], False))
    known = [*one[names.PROMPT_TOKEN_IDS], *one[names.RESPONSE_TOKEN_IDS]]
    assert two[names.PROMPT_TOKEN_IDS] == known[:-1] + house.engine.chat.encode(" more")
    assert names.CONTINUES not in two
