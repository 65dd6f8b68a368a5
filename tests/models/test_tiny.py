"""The tiny policy: an ordinary checkpoint, a tokenizer that can write everything, a template that keeps its word."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.chat.hf import HFChatFormat
from agentlightning.demo.problems import TOOLS, demonstrations
from agentlightning.models.tiny import END, make_tiny, make_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), demonstrations(200))


@pytest.fixture(scope="module")
def chat(directory: Path) -> HFChatFormat:
    return HFChatFormat(AutoTokenizer.from_pretrained(directory))


def test_transformers_loads_what_was_made(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert sum(weight.numel() for weight in model.parameters()) < 450_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids(END)
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, len(tokenizer))


def test_the_seed_decides_the_weights_and_nothing_else_draws_from_it(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    paths = [make_tiny(tmp_path / name, ["some text"], seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert torch.rand(1) == expected
    a, b, c = (AutoModelForCausalLM.from_pretrained(path).model.layers[0].mlp.up_proj.weight for path in paths)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@given(st.text())
@settings(max_examples=300)
def test_every_text_comes_back_as_it_was(chat: HFChatFormat, text: str) -> None:
    assert chat.decode(chat.encode(text)) == text


def test_a_tokenizer_of_no_text_at_all_can_write_everything() -> None:
    tokenizer = make_tokenizer([])
    text = "Ünïcode 日本 ☃ 123\n\t{}"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_single_tokens(chat: HFChatFormat) -> None:
    assert [chat.decode([token]) for token in chat.encode("12345")] == list("12345")


def test_records_of_any_form_teach_the_tokenizer() -> None:
    word = "extraordinarily"
    nested = {"question": f"{word} {word}", "more": [{"deep": word}, None, 3]}
    conversation = {"messages": [{"role": "user", "content": f"{word} {word} {word}"}]}
    for record in (f"{word} {word} {word}", nested, conversation):
        tokenizer = make_tokenizer([record])
        assert len(tokenizer.encode(word, add_special_tokens=False)) < 4


def test_prompts_are_short(chat: HFChatFormat) -> None:
    messages = demonstrations(1)[0]["messages"]
    assert len(chat.encode(chat.render(messages[:2], TOOLS))) < 50
    assert len(chat.encode(chat.render(messages, TOOLS, add_generation_prompt=False))) < 90


def test_the_template_shows_the_tools_it_is_given(chat: HFChatFormat) -> None:
    other = {"type": "function", "function": {"name": "now"}}
    text = chat.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], [*TOOLS, other])
    system = text.split("<|im_end|>")[0]
    assert "Be brief." in system
    assert "calculator(expression)" in system
    assert "now()" in system
    assert "calculator(expression)" in chat.render([{"role": "user", "content": "Hi"}], TOOLS)
    assert "Tools" not in chat.render([{"role": "user", "content": "Hi"}])


def test_a_tool_call_reads_back_as_it_was_rendered(chat: HFChatFormat) -> None:
    messages = demonstrations(1)[0]["messages"]
    text = chat.render(messages[:3], TOOLS, add_generation_prompt=False)
    answer = text.removeprefix(chat.render(messages[:2], TOOLS)).partition(END)[0]
    (call,) = chat.parse(answer).tool_calls
    wanted = messages[2]["tool_calls"][0]["function"]
    assert (call.name, json.loads(call.arguments)) == (wanted["name"], json.loads(wanted["arguments"]))


plain = st.text(max_size=20)
function = st.builds(
    lambda name, arguments: {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}},
    plain,
    st.one_of(plain, st.dictionaries(plain, plain, max_size=2).map(json.dumps)),
)
message = st.one_of(
    st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]), plain),
    st.builds(lambda content: {"role": "assistant", "content": content}, plain),
    st.builds(
        lambda content, calls: {"role": "assistant", "content": content, "tool_calls": calls},
        st.one_of(st.none(), plain),
        st.lists(function, min_size=1, max_size=2),
    ),
    st.builds(lambda part: {"role": "user", "content": [{"type": "text", "text": part}]}, plain),
)


@given(st.lists(message, min_size=1, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_what_is_rendered_before_a_turn_never_changes_afterwards(
    chat: HFChatFormat, messages: list[dict[str, Any]], system: bool, tools: bool
) -> None:
    messages = [{"role": "system", "content": "S"}, *messages] if system else messages
    given_tools = TOOLS if tools else None
    whole = chat.render(messages, given_tools, add_generation_prompt=False)
    for at, turn in enumerate(messages):
        if turn["role"] == "assistant" and at:
            assert whole.startswith(chat.render(messages[:at], given_tools))
            through = chat.render(messages[: at + 1], given_tools, add_generation_prompt=False)
            assert whole.startswith(through)
            assert through.endswith(f"{END}\n")
