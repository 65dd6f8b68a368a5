"""The scripted engine that users' tests rely on."""

import pytest

from agentlightning.engine.base import SamplingParams
from agentlightning.errors import ContextLengthError, PolicyError
from agentlightning.testing import ByteChatFormat, ScriptedEngine, read_chatml

CHAT = ByteChatFormat()


def prompt(*messages):
    return CHAT.encode(CHAT.render([{"role": role, "content": content} for role, content in messages]))


async def test_answers_come_in_order_and_the_script_ends_with_a_clear_error():
    engine = ScriptedEngine(["one", ValueError("two is broken")])
    sample = await engine.sample(prompt(("user", "hi")), SamplingParams())
    assert CHAT.decode(sample.token_ids) == "one<|im_end|>"
    assert len(sample.logprobs) == len(sample.token_ids)
    with pytest.raises(ValueError, match="two is broken"):
        await engine.sample(prompt(("user", "hi")), SamplingParams())
    with pytest.raises(PolicyError, match="the script of scripted has 2 answers, but this is call 3"):
        await engine.sample(prompt(("user", "hi")), SamplingParams())


async def test_a_function_sees_the_conversation():
    engine = ScriptedEngine(lambda messages: messages[-1]["content"].upper())
    sample = await engine.sample(prompt(("system", "a"), ("user", "hi")), SamplingParams())
    assert CHAT.decode(sample.token_ids, skip_special_tokens=True) == "HI"


async def test_tokens_stream_and_limits_hold():
    engine, seen = ScriptedEngine(lambda messages: "Hello END."), []
    sample = await engine.sample([1], SamplingParams(max_tokens=3), seen.append)
    assert (seen, sample.finish_reason) == ([[72], [101], [108]], "length")
    sample = await engine.sample([1], SamplingParams(stop=("END",)))
    assert (CHAT.decode(sample.token_ids), sample.finish_reason) == ("Hello END", "stop")
    with pytest.raises(ContextLengthError, match="holds 4"):
        await ScriptedEngine(["x"], context_length=4).sample([1, 2, 3, 4], SamplingParams())


async def test_the_weights_version_is_that_at_the_start_of_the_answer():
    engine = ScriptedEngine(lambda messages: "Hello", policy_version=1)
    sample = await engine.sample([1], SamplingParams(), lambda _: setattr(engine, "policy_version", 2))
    assert (sample.policy_version, engine.policy_version) == (1, 2)


async def test_a_real_tokenizer_can_be_given(bpe_chat):
    engine = ScriptedEngine(["Hello 🎉"], chat=bpe_chat)
    sample = await engine.sample(bpe_chat.encode("hi"), SamplingParams())
    assert bpe_chat.decode(sample.token_ids) == "Hello 🎉<|im_end|>"


def test_conversations_are_read_back_from_chatml():
    messages = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": ""}]
    assert read_chatml(CHAT.render(messages)) == messages
