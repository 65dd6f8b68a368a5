"""Calls that are asked for are made, by an untrained model, in every dialect, wherever nobody learns from the answer;
and the tokens on the span are those that were drawn."""

import json
import shutil
from contextlib import AsyncExitStack

import httpx2
import jsonschema_rs
import pytest
from openai import AsyncOpenAI
from tests.support.models import TEXTS, tiny_checkpoint
from tokenizers import AddedToken

from agentlightning.attempt_address import attempt_key
from agentlightning.attempt_variables import attempt_environment
from agentlightning.gateway.app import Gateway
from agentlightning.gateway.config import GatewayConfig
from agentlightning.models.tiny import make_tokenizer
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.server.app import Server
from agentlightning.span import CONSTRAINT, RESHAPED, RESPONSE_TOKEN_IDS, VIOLATIONS
from agentlightning.store import InMemoryLightningStore

pytestmark = pytest.mark.integration

SECRET = "s"
SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "enum": ["yes", "né 🎉", "}\n</"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
        "sure": {"type": "boolean"},
    },
    "required": ["word", "number"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}}
F, G = ({"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in "fg")
STRICT = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
ASKED = {"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 400, "seed": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), context_length=1024)


class Service:
    def __init__(self, policy, store, gateway, server, attempted, exits):
        self.policy, self.store, self.gateway, self.exits = policy, store, gateway, exits
        self.ids = attempted.rollout_id, attempted.attempt.attempt_id
        self.environment = attempt_environment(server.url, SECRET, *self.ids)
        self.key = attempt_key(SECRET, *self.ids)

    async def openai(self):
        http = httpx2.AsyncClient(verify=False, timeout=60)
        made = AsyncOpenAI(
            base_url=self.environment["OPENAI_BASE_URL"], api_key=self.key, http_client=http, max_retries=0
        )
        return await self.exits.enter_async_context(made)

    async def anthropic(self):
        from anthropic import AsyncAnthropic

        http = httpx2.AsyncClient(verify=False, timeout=60)
        made = AsyncAnthropic(
            base_url=self.environment["ANTHROPIC_BASE_URL"], api_key=self.key, http_client=http, max_retries=0
        )
        return await self.exits.enter_async_context(made)

    async def ask(self, **options):
        return (await (await self.openai()).chat.completions.create(**ASKED | options)).choices[0]

    async def span(self):
        return (await self.store.query_spans(*self.ids))[-1].attributes


@pytest.fixture
async def serve(checkpoint):
    """serve(mode, holding) -> a rollout of that mode, served by an untrained model."""
    async with AsyncExitStack() as exits:

        async def start(mode="val", holding="auto", model=checkpoint):
            policy = LocalPolicy.open(LocalPolicyConfig(model=model, device="cpu", name="m"))
            exits.push_async_callback(policy.close)
            store = InMemoryLightningStore()
            exits.push_async_callback(store.close)
            gateway = Gateway(store, {"m": policy}, secret=SECRET, config=GatewayConfig(structured_output=holding))
            server = await exits.enter_async_context(Server(store, gateway, secret=SECRET))
            return Service(policy, store, gateway, server, await store.start_rollout({}, mode=mode), exits)

        yield start


def fits(call):
    jsonschema_rs.validate(SCHEMA, json.loads(call.arguments))
    return call.name


def allowed(mode):
    one = {"type": "function", "function": {"name": "g"}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [one]}}


def slowly(*values):
    """In the slow tier: the others say the same, nearly."""
    return pytest.param(*values, marks=pytest.mark.slow)


NAMED = {"type": "function", "function": {"name": "g"}}


SOME = [NAMED, slowly("required"), slowly("auto"), slowly(allowed("auto")), slowly(allowed("required"))]


@pytest.mark.parametrize("choice", SOME)
async def test_a_call_that_is_asked_for_is_made_and_another_one_is_not(serve, choice):
    service = await serve()
    required = choice not in ("auto", allowed("auto"))
    options = {"tools": [STRICT, G], "tool_choice": choice, "parallel_tool_calls": False}
    for seed in range(2):
        answer = await service.ask(**options, seed=seed, max_tokens=400 if required else 40)
        names = [fits(call.function) for call in answer.message.tool_calls or ()]
        assert (len(names) == 1 and answer.message.content is None) if required else len(names) <= 1
        assert set(names) <= ({"f", "g"} if choice in ("required", "auto") else {"g"})
        span = await service.span()
        # What is optional may be free text, which this model may go on with.
        assert required or answer.finish_reason in ("length", "stop", "tool_calls")
        assert not required or answer.finish_reason == "tool_calls"
        assert (span[CONSTRAINT], span[RESHAPED]) == ("enforced", ["grammar"])


async def test_what_was_drawn_is_recorded_and_the_next_turn_goes_on_from_it(serve):
    service = await serve()
    options = {"tools": [F], "tool_choice": "required", "parallel_tool_calls": False}
    answer = await service.ask(**options)
    drawn, chat = (await service.span())[RESPONSE_TOKEN_IDS], service.policy.chat
    assert drawn[-1] in chat.eos_token_ids
    read = chat.parse(chat.decode(drawn[:-1]))
    assert [(call.name, call.arguments) for call in read.tool_calls] == [
        (call.function.name, call.function.arguments) for call in answer.message.tool_calls
    ]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in answer.message.tool_calls]
    await service.ask(**options, messages=[*ASKED["messages"], answer.message.model_dump(), *results])
    assert (service.gateway.counters.continued, service.gateway.counters.drift) == (1, 0)


@pytest.mark.parametrize(
    ("mode", "holding", "held"),
    [
        ("train", "auto", False),
        slowly(None, "auto", False),
        slowly("train", "always", True),
        slowly("val", "never", False),
    ],
)
async def test_where_somebody_learns_from_an_answer_it_is_drawn_freely_and_checked(serve, mode, holding, held):
    service = await serve(mode, holding)
    answer = await service.ask(tools=[F], tool_choice="required", parallel_tool_calls=False, max_tokens=100)
    span = await service.span()
    assert bool(answer.message.tool_calls) == held
    assert (span[CONSTRAINT], span.get(RESHAPED)) == (("enforced", ["grammar"]) if held else ("violated", None))


async def test_a_call_that_is_cut_ends_by_its_length_and_is_marked(serve):
    service = await serve()
    answer = await service.ask(tools=[F], tool_choice="required", max_tokens=5)
    span = await service.span()
    assert (answer.finish_reason, answer.message.tool_calls) == ("length", None)
    assert (span[CONSTRAINT], span[VIOLATIONS], len(span[RESPONSE_TOKEN_IDS])) == ("violated", ["tool_choice"], 5)


@pytest.mark.slow
async def test_a_call_that_is_cut_ends_by_its_length_in_every_dialect(serve):
    service = await serve()
    client = await service.anthropic()
    asked = {"model": "m", "messages": ASKED["messages"], "tools": [{"name": "f", "input_schema": SCHEMA}]}
    message = await client.messages.create(**asked, max_tokens=5, tool_choice={"type": "any"})
    assert message.stop_reason == "max_tokens"
    reply = await (await service.openai()).responses.create(
        model="m", input="?", tools=[{"type": "function", **F["function"]}], tool_choice="required", max_output_tokens=5
    )
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.slow
async def test_schemas_that_nobody_can_be_held_to_leave_any_arguments_to_tools_that_are_not_strict(serve):
    service = await serve()
    odd = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}
    loose = {"type": "function", "function": {"name": "f", "parameters": odd}}
    answer = await service.ask(tools=[loose], tool_choice="required", max_tokens=60, temperature=0)
    assert (await service.span())[RESHAPED] == ["grammar"]
    assert answer.finish_reason == "length" or answer.message.tool_calls[0].function.name == "f"
    none = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": 5}}}
    answer = await service.ask(tools=[none], tool_choice="required", max_tokens=60, temperature=0)
    assert (await service.span())[RESHAPED] == ["grammar"]
    strict = {"type": "function", "function": {**loose["function"], "strict": True}}
    await service.ask(tools=[strict], tool_choice="required", max_tokens=20)
    assert RESHAPED not in await service.span()


async def test_chat_completions_streams_the_call(serve):
    client = await (await serve()).openai()
    asked = {**ASKED, "tools": [F], "tool_choice": "required", "parallel_tool_calls": False}
    async with client.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        (choice,) = (await stream.get_final_completion()).choices
    assert (choice.finish_reason, [fits(call.function) for call in choice.message.tool_calls]) == ("tool_calls", ["f"])


RESPONSES = [{"type": "function", **tool["function"]} for tool in (F, G)]


@pytest.mark.parametrize("choice", [slowly("required"), {"type": "function", "name": "g"}])
async def test_responses_answer_with_the_call_whole_and_streamed(serve, choice):
    client = await (await serve()).openai()
    asked = {"model": "m", "input": "?", "tools": RESPONSES, "tool_choice": choice, "parallel_tool_calls": False}
    whole = await client.responses.create(**asked, max_output_tokens=400)
    async with client.responses.stream(**asked, max_output_tokens=400) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_response()
    for reply in (whole, streamed):
        (item,) = reply.output
        assert (reply.status, item.type, item.status) == ("completed", "function_call", "completed")
        assert fits(item) in ("f", "g") if choice == "required" else fits(item) == "g"


@pytest.mark.parametrize("choice", [{"type": "any"}, slowly({"type": "tool", "name": "g"})])
async def test_messages_answer_with_the_call_whole_and_streamed(serve, choice):
    client = await (await serve()).anthropic()
    tools = [{"name": name, "input_schema": SCHEMA} for name in "fg"]
    choice = choice | {"disable_parallel_tool_use": True}
    asked = {"model": "m", "messages": ASKED["messages"], "max_tokens": 400, "tools": tools, "tool_choice": choice}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for reply in (whole, streamed):
        (block,) = reply.content
        assert (reply.stop_reason, block.type) == ("tool_use", "tool_use")
        jsonschema_rs.validate(SCHEMA, block.input)
        assert choice["type"] == "any" or block.name == "g"


THINKING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content }}{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n{"name": "' + call.function.name
+ '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""


@pytest.fixture
def thinking(checkpoint, tmp_path):
    """The same model behind a template that has it think first, with the markers as tokens: (directory, the one that
    ends a thought)."""
    tokenizer = make_tokenizer(TEXTS, vocabulary=300, context_length=1024)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    tokenizer.chat_template = THINKING
    shutil.copytree(checkpoint, tmp_path / "thinking")
    tokenizer.save_pretrained(tmp_path / "thinking")
    return tmp_path / "thinking", tokenizer.convert_tokens_to_ids("</think>")


async def test_a_model_that_thinks_is_held_once_it_has_thought(serve, thinking):
    directory, end = thinking
    service = await serve(model=directory)
    options = {"logit_bias": {str(end): 100}, "parallel_tool_calls": False}
    answer = await service.ask(tools=[F], tool_choice="required", **options)
    assert fits(answer.message.tool_calls[0].function) == "f"
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    assert end in (await service.span())[RESPONSE_TOKEN_IDS]
    shape = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    answer = await service.ask(response_format=shape, **options)
    jsonschema_rs.validate(SCHEMA, json.loads(answer.message.content))
    span = await service.span()
    assert (span[CONSTRAINT], span[RESHAPED]) == ("enforced", ["logit_bias", "grammar"])
