"""Recorded conversations in every form that people keep them in become the tokens that the template itself has."""

import json
from collections import Counter

import pytest
from tests.chat.sentencepiece import KINDS, TEMPLATES, own_tokens, sentencepiece
from tests.support.tokenizer import CHATML, tiny_tokenizer

from agentlightning.algorithms.preference import load_preferences, to_preferences
from agentlightning.algorithms.recorded.sessions import Tokenizer
from agentlightning.algorithms.sft import SFTAlgorithm
from agentlightning.chat.hf import HFChatFormat
from agentlightning.errors import DatasetError

TOOLS = [{"type": "function", "function": {"name": "f", "description": "computes", "parameters": {"type": "object"}}}]
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "[A]{{ m.content.split('</think>')[-1] }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}{{ tools or '' }}"
    "{% if add_generation_prompt %}[A]<think>\n{% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def user(text="hello"):
    return {"role": "user", "content": text}


def answer(**fields):
    return {"role": "assistant", "content": "good", **fields}


def called(arguments='{"x": 1}', **fields):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


def trained(template, messages, tools=None, **options):
    """(prompts, answers, notes) of a conversation."""
    chat, notes = HFChatFormat(tiny_tokenizer(template), **options), Counter()
    (found,) = Tokenizer(chat, 10_000, counts=notes).trajectories([{"messages": messages, "tools": tools}])
    calls = found.transitions
    prompts, answers = [[chat.decode(getattr(call, name)) for call in calls] for name in FIELDS]
    return prompts, answers, dict(notes)


FIELDS = ("prompt_token_ids", "response_token_ids")


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "good"}],
        [{"type": "text", "text": "go", "image": None}, {"type": "text", "text": "od"}],
        [{"type": "output_text", "text": "good"}],
        [{"type": "refusal", "refusal": "good"}],
        ["go", "od"],
        "good",
    ],
)
def test_text_parts_are_read_as_text(content):
    prompts, answers, _ = trained(CHATML, [user([{"type": "input_text", "text": "hello"}]), answer(content=content)])
    assert prompts == ["<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"]
    assert answers == ["good<|im_end|>"]


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}])
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])], [TOOLS[0]["function"]]])
def test_calls_and_tools_are_read_in_every_spelling(arguments, tools):
    messages = [user(), called(arguments), {"role": "tool", "tool_call_id": "c1", "content": "1"}, answer()]
    prompts, answers, _ = trained(CHATML, messages, tools)
    assert answers[0] == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    assert "computes" in prompts[0]


def test_turns_of_weight_0_are_read_and_not_learned_from():
    prompts, answers, _ = trained(CHATML, [user(), answer(weight=0), user("again"), answer(weight=1)])
    assert (len(prompts), answers) == (1, ["good<|im_end|>"])
    assert "good<|im_end|>" in prompts[0]


def test_a_conversation_that_the_template_refuses_is_named():
    refusing = (
        "{% for m in messages %}{{ raise_exception('too bad') if m.content == 'bad' else m.content }}{% endfor %}"
    )
    with pytest.raises(DatasetError, match=r"conversation 1: the chat template .* cannot hold these messages: too bad"):
        trained(refusing, [user("bad"), answer()])


def test_a_call_from_before_tools_is_a_call():
    messages = [
        user(),
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "[42]"},
        answer(),
    ]
    prompts, answers, _ = trained(CHATML, messages)
    assert '{"name": "f", "arguments": {}}' in answers[0]
    assert "<|im_start|>tool\n[42]" in prompts[1]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (answer(content=[{"type": "image_url", "image_url": {"url": "x"}}]), r"content has a part of type \"image_url"),
        (answer(content={"text": "x"}), "content=.* must be a list"),
        (answer(tool_calls=[{"id": "c"}]), r"tool_calls\[0\] must be an object with function.name"),
        (answer(name=3), "name=3 must be a str"),
    ],
)
def test_what_cannot_be_read_is_named(message, named):
    with pytest.raises(DatasetError, match=rf"conversation 1: messages\[1\].*{named}"):
        trained(CHATML, [user(), message])


@pytest.mark.parametrize(
    "message",
    [
        answer(reasoning_content="hmm"),
        answer(reasoning="hmm"),
        answer(thinking="hmm"),
        answer(content=[{"type": "thinking", "thinking": "hmm"}, {"type": "text", "text": "good"}]),
    ],
)
def test_a_thought_is_trained_where_the_template_has_a_place_and_counted_where_not(message, caplog):
    place = CHATML.replace("\n{{ message.content }}", "\n{{ message.reasoning_content or '' }}|{{ message.content }}")
    _, answers, notes = trained(place, [user(), message])
    assert (answers, notes) == (["hmm|good<|im_end|>"], {})
    _, answers, notes = trained(CHATML, [user(), message, user(), message])
    assert (answers, notes) == (["good<|im_end|>"] * 2, {"thoughts_left_out": 2})
    assert caplog.text.count("has no place for") == 1


@pytest.mark.parametrize(
    ("fields", "written", "note"),
    [
        ({"reasoning_content": "hmm"}, "hmm\n</think>\n\ngood", "thoughts_added"),
        ({"content": "<think>\nhmm\n</think>\n\ngood"}, "hmm\n</think>\n\ngood", "thoughts_added"),
        ({"content": "<think>hmm</think>good"}, "hmm</think>good", "thoughts_added"),
        ({}, "</think>\n\ngood", "empty_thoughts"),
        (
            {**called(), "content": "", "reasoning_content": "hmm"},
            'hmm\n</think>\n\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
            "thoughts_added",
        ),
    ],
)
def test_a_template_that_strips_thoughts_trains_them(fields, written, note):
    prompts, answers, notes = trained(R1, [user(), answer(**fields), user("more"), answer(**fields)])
    assert answers == [f"{written}<|im_end|>"] * 2
    assert prompts[1].endswith("<|im_end|>[user]more[A]<think>\n")
    assert "hmm" not in prompts[1]
    assert notes == {note: 2}


def test_a_thought_after_a_prompt_that_begins_none_is_written_whole():
    template = R1.replace("[A]<think>\n{% endif", "[A]{% endif")
    _, answers, notes = trained(template, [user(), answer(reasoning_content="hmm")])
    assert (answers, notes) == (["<think>\nhmm\n</think>\n\ngood<|im_end|>"], {"thoughts_added": 1})


def test_history_that_begins_otherwise_is_refused_with_a_remedy():
    template = "{{ messages | length }}" + CHATML
    with pytest.raises(DatasetError, match=r"turn 2: the chat template does not render it after.*leave"):
        trained(template, [user(), answer()])


# -- encoded in context ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_sentencepiece_answers_have_the_tokens_of_the_templates_own_text(kind, template):
    tokenizer, notes = sentencepiece(kind, template), Counter()
    messages = [user(), answer(content="Paris"), user("what is it?"), answer(content="The capital of France")]
    (found,) = Tokenizer(HFChatFormat(tokenizer), 10_000, counts=notes).trajectories([messages])
    own = own_tokens(tokenizer, messages)
    for call in found.transitions:
        tokens = [*call.prompt_token_ids, *call.response_token_ids]
        assert own[: len(tokens)] == tokens
        assert call.response_token_ids[-1] == tokenizer.eos_token_id
    assert notes == {}


@pytest.mark.parametrize("begins", ["good mor", "cal", "good morn"])
def test_a_token_that_spans_the_beginning_of_an_answer_is_a_drift(begins):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    ends = {"good mor": "ning", "cal": "culator", "good morn": "ing"}[begins]
    prompts, answers, notes = trained(template, [user(begins), answer(content=ends)])
    assert notes == {"drift": 1, "end_of_turn_added": 1}
    assert (prompts, answers) == ([begins], [f"{ends}<|endoftext|>"])


@pytest.mark.parametrize("messages", [[user(), answer()], [user(), answer(), user("more"), answer()]])
def test_an_answer_whose_end_the_template_does_not_mark_ends_with_the_end_of_the_sequence(messages, caplog):
    prompts, answers, notes = trained(PLAIN, messages)
    turns = len(messages) // 2
    assert answers == ["[assistant]good<|endoftext|>"] * turns
    assert prompts == ["[user]hello", "[user]hello[assistant]good[user]more"][:turns]
    assert notes == {"end_of_turn_added": turns}
    assert caplog.text.count("end-of-sequence") == 1


@pytest.mark.parametrize("ends", ["<|im_end|><|endoftext|>", "<|im_end|>\n<|endoftext|>", "<|endoftext|>\n<|im_end|>"])
def test_of_two_ends_the_first_is_trained_where_the_sampler_stops(ends):
    _, (text,), notes = trained(CHATML.replace("<|im_end|>\n{% endfor", ends + "{% endfor"), [user(), answer()])
    assert (text, notes) == ("good" + ends[: ends.index(">") + 1], {})


# -- through the public entries ----------------------------------------------------------------------------------------


class RecordingPolicy:
    context_length = 512

    def __init__(self, chat):
        self.chat, self.samples = chat, []

    async def train(self, samples, options):
        self.samples.extend(samples)
        return {"loss": 1.0}


def test_the_result_of_supervised_learning_counts_what_was_changed():
    policy = RecordingPolicy(HFChatFormat(tiny_tokenizer(PLAIN)))
    conversations = [
        {"messages": [user(), answer(reasoning_content="hmm")]},
        {"messages": [user(), called()], "tools": TOOLS},
    ]
    result = SFTAlgorithm(policy, conversations, steps=1).train()
    assert result.notes == {"end_of_turn_added": 2, "thoughts_left_out": 1, "tools_in_messages": 1}
    assert result.as_json()["notes"] == result.notes
    (sample,) = policy.samples
    texts = {policy.chat.decode(node.token_ids) for node in sample.tree.nodes}
    assert '[assistant]<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|endoftext|>' in texts


def test_preferences_read_the_same_forms():
    parts = [{"type": "text", "text": "good"}]
    pair = {
        "prompt": [user(parts)],
        "chosen": [answer(content=parts)],
        "rejected": [called({"x": 1}, reasoning_content="hmm")],
        "tools": json.dumps(TOOLS),
    }
    chat, notes = HFChatFormat(tiny_tokenizer(PLAIN)), Counter()
    chosen, rejected = to_preferences(load_preferences([pair]), Tokenizer(chat, 10_000, counts=notes))[0]
    texts = [chat.decode(each.transitions[0].response_token_ids) for each in (chosen, rejected)]
    assert texts[0] == "[assistant]good<|endoftext|>"
    assert '{"name": "f", "arguments": {"x": 1}}' in texts[1]
    assert notes == {"end_of_turn_added": 2, "thoughts_left_out": 1, "tools_in_messages": 2}
