"""Every format of tool calls: found by its template, read back as it was written, whole and in pieces."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.templates import FAMILIES
from tests.support.tokenizer import tiny_tokenizer

from agentlightning.chat.hf import HFChatFormat
from agentlightning.chat.tool_calls.format import CallReader, ParsedToolCall, is_short_id, parse_answer
from agentlightning.chat.tool_calls.formats import FORMATS, call_format
from agentlightning.errors import ConfigError

ASKED = {"role": "user", "content": "?"}


@pytest.fixture(scope="module")
def chats():
    def chat(family):
        return HFChatFormat(tiny_tokenizer(family.template, special=family.special, eos=family.eos))

    return {name: chat(family) for name, family in FAMILIES.items()}


def turn(*calls, content=""):
    """An assistant's turn that calls tools with (name, arguments)."""
    wire = [
        {"id": f"callabc{place:02}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": wire}


def written(chat, message):
    """What the template writes for a turn, without the token that ends it."""
    text = chat.render([ASKED, message], add_generation_prompt=False)
    text = text.removeprefix(chat.render([ASKED]))
    ends = re.finditer("|".join(re.escape(chat.decode([token])) for token in chat.eos_token_ids), text)
    return text[: max((end.start() for end in ends), default=len(text))]  # the last: an argument may spell it


def meant(parsed):
    return [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_detected_from_the_template(chats, name):
    assert chats[name].tool_calls.name == FAMILIES[name].name


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_detected_after_a_thought_begun_by_the_template(chats, name):
    family = FAMILIES[name]
    template = family.template + "{% if add_generation_prompt %}<think>\n{% endif %}"
    chat = HFChatFormat(tiny_tokenizer(template, special=family.special, eos=family.eos))
    assert chat.tool_calls == chats[name].tool_calls
    assert chat.tool_calls.layout is not None


LAYOUTS = {
    "hermes": ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "qwen_coder": ("<tool_call>\n<function=", ">", "</function>\n</tool_call>"),
    "llama3": ('{"name": "', '", "parameters": ', "}"),
    "pythonic": ("[", "(", ")]"),
    "mistral": ('[TOOL_CALLS] [{"name": "', '", "arguments": ', ', "id": "\0"}]'),
    "mistral_named": ("[TOOL_CALLS]", "[CALL_ID]\0[ARGS]", ""),
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_fenced": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layout_of_calls_is_detected(chats, name):
    layout = chats[name].tool_calls.layout
    assert (layout.opening, layout.middle, layout.closing) == LAYOUTS[name]
    assert (layout.between is None) == (name == "llama3")


def test_an_option_overrides_detection_and_unknown_formats_are_rejected():
    family = FAMILIES["hermes"]
    assert HFChatFormat(tiny_tokenizer(family.template), tool_calls="llama3").tool_calls.name == "llama3"
    with pytest.raises(ConfigError, match="'hermse' is not a format of tool calls; use one of hermes, qwen_coder, "):
        HFChatFormat(tiny_tokenizer(family.template), tool_calls="hermse")


def test_hermes_is_the_fallback_format():
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    assert HFChatFormat(tiny_tokenizer(template)).tool_calls.name == "hermes"


SKELETON = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "BEFORE{% for c in m.tool_calls or [] %}CALL{% endfor %}AFTER<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON_CALL = '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
LISTED = JSON_CALL + "{{ ', ' if not loop.last }}"
PYTHON = (
    "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}"
)
VALUES = "{{ v if v is string else v | tojson }}"
FURTHER = {
    "glm": (
        "",
        "\n<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments | items %}"
        f"\n<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUES}</arg_value>{{% endfor %}}\n</tool_call>",
        "",
    ),
    "invoke": (
        "",
        '<minimax:tool_call>\n<invoke name="{{ c.function.name }}">{% for k, v in c.function.arguments | items %}\n'
        f'<parameter name="{{{{ k }}}}">{VALUES}</parameter>{{% endfor %}}\n</invoke>\n</minimax:tool_call>',
        "",
    ),
    "lfm2": ("<|tool_call_start|>[", PYTHON, "]<|tool_call_end|>"),
    "kimi": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{{ c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "granite": ("<|tool_call|>[", LISTED, "]"),
    "functools": ("functools[", LISTED, "]"),
    "nemotron": ("<TOOLCALL>[", LISTED, "]</TOOLCALL>"),
    "tool_calls": ("<tool_calls>[", LISTED, "]</tool_calls>"),
    "cohere": (
        "<|START_ACTION|>[",
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": {{ c.function.name | tojson }}, '
        '"parameters": {{ c.function.arguments | tojson }}}{{ ", " if not loop.last }}',
        "]<|END_ACTION|>",
    ),
    "gemma": (
        "",
        "<|tool_call>call:{{ c.function.name }}{{ '{' }}{% for k, v in c.function.arguments | items %}{{ k }}:"
        "{% if v is string %}<|\"|>{{ v }}<|\"|>{% else %}{{ v | tojson }}{% endif %}{{ ',' if not loop.last }}"
        "{% endfor %}{{ '}' }}<tool_call|>",
        "",
    ),
    "harmony": (
        "",
        "<|start|>assistant<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>"
        "{{ c.function.arguments | tojson }}",
        "<|call|>",
    ),
}


@pytest.mark.parametrize("name", FURTHER)
def test_a_further_family_is_detected_and_its_calls_are_read_back(name):
    before, call, after = FURTHER[name]
    template = SKELETON.replace("CALL", call)
    template = template.replace("BEFORE", "{% if m.tool_calls %}" + before + "{% endif %}")
    chat = HFChatFormat(tiny_tokenizer(template.replace("AFTER", "{% if m.tool_calls %}" + after + "{% endif %}")))
    assert (chat.tool_calls.name, chat.tools_in_messages) == (name, False)
    calls = [("f", {"x": "say", "n": 3, "yes": True}), ("g", {"text": "a [b] c"})]
    text = written(chat, turn(*((called, json.dumps(arguments)) for called, arguments in calls)))
    parsed = chat.parse(text.removesuffix("<|im_end|>"), offered(calls))
    assert (parsed.content, meant(parsed)) == (None, calls)


def test_harmonys_channels_are_no_content():
    text = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It is 42."
    assert parse_answer(call_format("harmony"), text).content == "Let me see.It is 42."
    first = ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
    assert parse_answer(call_format("harmony"), first).tool_calls == (ParsedToolCall("f", '{"x": 1}'),)


@pytest.mark.parametrize("name", ["granite", "deepseek", "lfm2", "kimi"])
def test_a_missing_marker_after_the_calls_is_no_matter(name):
    assert [call.name for call in parse_answer(call_format(name), CALLED[name]).tool_calls] == ["f"]


SPECIAL = [
    "{",
    "}",
    "[",
    "]",
    '"',
    "'",
    "\\",
    "\n",
    "</tool_call>",
    "<|python_tag|>",
    "[ARGS]",
    "[TOOL_CALLS]",
    "```",
    ";",
]
MARKERS = [
    "<tool_call>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|python_end|>",
    "<function=f>",
    "\\u00e9",
    "🎉",
    "é",
]
TEXT = st.text(max_size=8) | st.lists(st.sampled_from([*SPECIAL, *MARKERS]), max_size=4).map("".join)
NUMBER = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
NAME = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(lambda name: name not in ("true", "false", "null"))
CALLS = st.lists(st.tuples(NAME, st.dictionaries(NAME, JSON, max_size=4)), min_size=1, max_size=3)


def offered(calls):
    """Tools whose schemas fit the calls: where a value is bare text, only they can say what it is."""

    def tool(name):
        called = [arguments for other, arguments in calls if other == name]
        values = {key: value for arguments in called for key, value in arguments.items()}
        properties = {key: {"type": kind(value)} for key, value in values.items()}
        return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}

    return [tool(name) for name in {name for name, _ in calls}]


def kind(value):
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


SLOWLY = pytest.param(True, 5000, marks=pytest.mark.slow)
FEW_OR_MANY = [10, pytest.param(2000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("examples", FEW_OR_MANY)
@pytest.mark.parametrize("name", FAMILIES)
def test_rendered_calls_parse_back(chats, name, examples):
    chat = chats[name]

    @settings(max_examples=examples)
    @given(CALLS)
    @example([("f", {})])
    @example([("f", {"text": "</s>"})])
    def check(calls):
        calls = list({called: (called, arguments) for called, arguments in calls}.values())
        calls = calls if chat.tool_calls.parallel else calls[:1]
        if name == "qwen_coder" and re.search("</parameter>|</function>", json.dumps(calls)):
            return  # The format has no way to say this.
        text = written(chat, turn(*((called, json.dumps(arguments)) for called, arguments in calls)))
        parsed = chat.parse(text, offered(calls))
        assert (parsed.content, meant(parsed)) == (None, calls)

    check()


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"qwen_coder", "pythonic"}))
def test_arguments_keep_the_spelling_the_model_gave_them(chats, name):
    chat, odd = chats[name], '{"x":  1.50,\t"y": [ ], "z": "\\u00e9"}'
    text = written(chat, turn(("f", '{"x": "HERE"}'))).replace('{"x": "HERE"}', odd)
    assert chat.parse(text).tool_calls[0].arguments == odd


@pytest.mark.parametrize("name", FAMILIES)
def test_text_before_a_call_is_kept_and_incomplete_calls_are_text(chats, name):
    chat = chats[name]
    call = written(chat, turn(("f", '{"x": 1}')))
    for cut in range(len(call) - 1):
        half = call[:cut]
        parsed = chat.parse(half)
        assert not parsed.tool_calls or "<｜tool▁calls▁end｜>".endswith(call[cut:])
    if name not in ("llama3", "pythonic"):
        parsed = chat.parse("Let me see. " + call, offered([("f", {"x": 1})]))
        assert (parsed.content, meant(parsed)) == ("Let me see.", [("f", {"x": 1})])


CALLED = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
    "qwen_coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "llama3": '{"name": "f", "parameters": {"x": "}"}}',
    "pythonic": "[f(x='a)', y=[1, {'k': None}])]",
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "]"}, "id": "abcdefgh1"}]',
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "invoke": '<minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke></minimax:tool_call>',
    "lfm2": "<|tool_call_start|>[f(x='a)', y=1)]<|tool_call_end|>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"x": 1}<|tool_call_end|>',
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"x": "]"}}]',
    "functools": 'functools[{"name": "f", "arguments": {"x": "]"}}]',
    "nemotron": '<TOOLCALL>[{"name": "f", "arguments": {"x": "</TOOLCALL>"}}]</TOOLCALL>',
    "tool_calls": '<tool_calls>[{"name": "f", "arguments": {"x": "]"}}]</tool_calls>',
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}]<|END_ACTION|>',
    "gemma": '<|tool_call>call:f{x:<|"|>a}<|"|>,y:{z:[1,true]}}<tool_call|>',
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": "<|call|>"}',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>',
}
PARTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f"}', '"'],
    "qwen_coder": ["<tool_call>", "<function=f>", "<parameter=x>", "1", "</parameter>", "</function>", "</tool_call>"],
    "llama3": ["<|python_tag|>", '{"name": "f", ', '"parameters": {}}', ";", "f.call(", 'x="1")', '{"a'],
    "pythonic": ["<|python_start|>", "<|python_end|>", "[", "f(", "x=", "-1.5e", "'a'", ")", ", ", "]"],
    "mistral": [
        "[TOOL_CALLS]",
        "f",
        "[CALL_ID]",
        "abcdefgh1",
        "[ARGS]",
        "{}",
        "[",
        '{"name": "f", "arguments": 1}',
        "]",
    ],
    "glm": ["<tool_call>", "f\n", "<arg_key>", "x", "</arg_key>", "<arg_value>", "1", "</arg_value>", "</tool_call>"],
    "invoke": ["<minimax:tool_call>", '<invoke name="f">', '<parameter name="x">', "1", "</parameter>", "</invoke>"],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "[", "f(", "x=", "-1.5e", ")", ", ", "]"],
    "kimi": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        *("<|tool_call_argument_begin|>", "functions.f:0", "f", "{}"),
    ],
    "granite": ["<|tool_call|>", "<|/tool_call|>", "[", "]", '{"name": "f"}', ", ", '"'],
    "functools": ["functools", "func", "[", "]", '{"name": "f"}', ", ", '"'],
    "nemotron": ["<TOOLCALL>", "</TOOLCALL>", "[", "]", '{"name": "f"}', ", ", '"'],
    "tool_calls": ["<tool_calls>", "</tool_calls>", "[", "]", '{"name": "f"}', ", ", '"'],
    "cohere": ["<|START_ACTION|>", "<|END_ACTION|>", "[", "]", '{"tool_name": "f", "parameters": {}}', ", ", '"'],
    "gemma": ["<|tool_call>", "<tool_call|>", "call:f", "{", "x:", '<|"|>', "}", "1", ","],
    "harmony": ["<|start|>assistant", "<|channel|>commentary", " to=functions.f", "json", "<|mess", "{}", "<|call|>"],
    "deepseek": [
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        *("f", "function", "\n```json\n", "{}", "\n```"),
    ],
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("parallel", "examples"), [(True, 20), (False, 8), SLOWLY])
def test_incremental_parsing_equals_whole_parsing(name, parallel, examples):
    format = replace(call_format(name), parallel=parallel)
    pieces = [*PARTS[name] * 2, CALLED[name], CALLED[name], " ", "\n", "hello", "{", "<", "é"]

    @settings(max_examples=examples)
    @given(st.lists(st.sampled_from(pieces), max_size=8).map("".join), st.lists(st.integers(1, 30), min_size=1))
    @example('<|python_tag|>f.call(x="1")', [1])
    def check(text, sizes):
        reader, position, shown = CallReader(format), 0, []
        for size in sizes * len(text):
            shown += reader.feed(text[position : position + size])
            position += size
        shown += reader.finish()
        parsed = parse_answer(format, text)
        assert "".join(piece for piece in shown if isinstance(piece, str)) == (parsed.content or "")
        assert tuple(piece for piece in shown if isinstance(piece, ParsedToolCall)) == parsed.tool_calls
        assert parallel or len(parsed.tool_calls) <= 1
        if not parsed.tool_calls:
            assert parsed.content == text

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_text_that_cannot_become_a_call_is_emitted_at_once(name):
    reader = CallReader(call_format(name))
    assert reader.feed("The answer") == ["The answer"]
    assert reader.feed(" is {") == [" is {"]
    assert CallReader(call_format(name)).feed('{"answer": 4') == ['{"answer": 4']


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_emitted_once_complete(name):
    reader = CallReader(call_format(name))
    assert reader.feed(CALLED[name][:-20]) == []
    (call,) = reader.feed(CALLED[name][-20:] + (" " if name == "pythonic" else ""))
    assert call.name == "f"


# -- what single families have of their own ---------------------------------------------------------------------------


def test_a_single_call_template_gets_one_call(chats):
    one = '{"name": "f", "parameters": {}}'
    parsed = chats["llama3"].parse(f"{one}; {one}")
    assert (meant(parsed), parsed.content) == ([("f", {})], f"; {one}")
    assert meant(parse_answer(call_format("llama3"), f"{one}; {one}\n{one}")) == [("f", {})] * 3


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('<|python_tag|>f.call(query="what?", n=2)', '{"query": "what?", "n": 2}'),
        ('{"name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
    ],
)
def test_llama_calls_come_in_several_shapes(text, arguments):
    assert parse_answer(call_format("llama3"), text).tool_calls == (ParsedToolCall("f", arguments),)


def test_a_semicolon_of_llama3_stands_between_calls_and_not_before_the_first():
    text = '; {"name": "f", "parameters": {}}'
    assert parse_answer(call_format("llama3"), text).content == text
    assert CallReader(call_format("llama3")).feed(";") == [";"]


@pytest.mark.parametrize("text", ['{"name": "Ann"}', '{"name": "f", "parameters": {}, "age": 3}', "[1, 2]", "{"])
def test_llama3_json_without_call_keys_stays_text(text):
    assert parse_answer(call_format("llama3"), text).content == text


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("[f(a='it\\'s', b=\"\\u00e9\\ud83c\\udf89\\x41\\n\")]", {"a": "it's", "b": "é🎉A\n"}),
        ("[f(a=True, b=None, c=false, d=-1.50, e={'k': [1, ()]})]".replace(", ()", ""), None),
        ("<|python_start|>[f(class=1, from='x',)]<|python_end|>", {"class": 1, "from": "x"}),
    ],
)
def test_python_constants_become_json(text, arguments):
    (call,) = parse_answer(call_format("pythonic"), text).tool_calls
    if arguments is None:
        assert call.arguments == '{"a": true, "b": null, "c": false, "d": -1.50, "e": {"k": [1]}}'
    else:
        assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    "text",
    [
        *("[f(1)]", "[f(x=y)]", "[f(x=g())]", "[]", "[f]", "[f(x='\\ud800')]", "[" * 999),
        *("[f(x=01)]", "[f(x=1 5)]", "[f(x=[1\n5])]"),
    ],
)
def test_python_that_is_no_list_of_calls_with_constants_stays_text(text):
    assert parse_answer(call_format("pythonic"), text).content == text


@pytest.mark.parametrize("text", ['["Bern', "['Bern", "[1", "[-", '[f("Bern', "[f(12"])
def test_a_list_that_holds_no_call_is_emitted_before_its_first_constant_ends(text):
    assert CallReader(call_format("pythonic")).feed(text) == [text]


def test_a_mistral_call_keeps_its_id_if_valid():
    call = '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "%s"}]'
    assert parse_answer(call_format("mistral"), call % "abc123XYZ").tool_calls[0].id == "abc123XYZ"
    assert parse_answer(call_format("mistral"), call % "short").tool_calls[0].id is None
    assert (
        parse_answer(call_format("mistral"), "[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}").tool_calls[0].id == "abc123XYZ"
    )


@pytest.mark.parametrize("name", ["mistral", "mistral_named"])
def test_ids_are_created_and_converted_in_the_familys_form(chats, name):
    chat = chats[name]
    assert is_short_id(chat.tool_calls.new_id("call_"))
    message = turn(("f", "{}"))
    message["tool_calls"][0]["id"] = "toolu_from_elsewhere"
    text = chat.render([ASKED, message, {"role": "tool", "tool_call_id": "toolu_from_elsewhere", "content": "42"}])
    assert text.count(chat.tool_calls.convert_id("toolu_from_elsewhere")) == 2


def test_ids_have_the_prefix_of_the_callers_api(chats):
    assert chats["hermes"].tool_calls.new_id("toolu_").startswith("toolu_")


SCHEMA = {
    "a": {"type": "string"},
    "b": {"type": ["integer", "null"]},
    "c": {"anyOf": [{"type": "array"}, {"type": "boolean"}]},
    "d": {"enum": [1, 2]},
    "e": {"type": "number"},
    "f": {"type": ["string", "null"]},
}


@pytest.mark.parametrize(
    ("key", "value", "json_value"),
    [
        ("a", "12", '"12"'),
        ("b", "12", "12"),
        ("b", "None", "null"),
        ("b", "twelve", '"twelve"'),
        ("c", "True", "true"),
        ("c", "[1,  2]", "[1,  2]"),
        ("d", "2", "2"),
        ("e", "3", "3"),
        ("f", "null", "null"),
        ("unknown", "12", '"12"'),
        ("a", "\n two lines \n", '"\\n two lines \\n"'),
    ],
)
def test_the_tools_schema_decides_the_type_of_bare_text(key, value, json_value):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": SCHEMA}}}]
    text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse_answer(call_format("qwen_coder"), text, tools).tool_calls
    assert call.arguments == f'{{"{key}": {json_value}}}'


DEFINED = {
    "Size": {"type": "object", "properties": {"w": {"type": "integer"}}},
    "Colour": {"enum": ["red", "1"]},
    "Loop": {"$ref": "#/$defs/Loop"},
}


@pytest.mark.parametrize(
    ("name", "value", "json_value"),
    [("Size", '{"w": 1}', '{"w": 1}'), ("Colour", "1", '"1"'), ("Loop", "1", '"1"'), ("missing", "1", '"1"')],
)
def test_schema_references_are_resolved(name, value, json_value):
    schema = {"properties": {"x": {"$ref": f"#/$defs/{name}"}}, "$defs": DEFINED}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse_answer(call_format("qwen_coder"), text, tools).tool_calls
    assert call.arguments == f'{{"x": {json_value}}}'


@pytest.mark.parametrize(
    "schema",
    [{"type": 5}, {"enum": 5}, {"anyOf": 5}, {"oneOf": {"type": "integer"}}, {"$ref": 5}, {"$ref": "#/$defs/x"}, 5],
)
def test_an_invalid_schema_is_ignored(schema):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}, "$defs": 5}}}]
    text = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse_answer(call_format("qwen_coder"), text, tools).tool_calls
    assert call.arguments == '{"x": "1"}'


def test_a_declared_response_template_is_parsed_by_transformers():
    tokenizer = tiny_tokenizer("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    tokenizer.response_template = {
        "start_anchor": "assistant\n",
        "fields": {
            "content": {"content": "text"},
            "tool_calls": {
                "open_pattern": r"<<(?P<name>\w+)\|",
                "close": ">>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    chat = HFChatFormat(tokenizer)
    assert chat.tool_calls.name == "declared"
    parsed = chat.parse('So: <<f|{"x": 1}>> <<g|{"y": ">"}>>')
    assert (parsed.content, meant(parsed)) == ("So:", [("f", {"x": 1}), ("g", {"y": ">"})])
    for text in ("<<f|{>>", "<<f|{", "<<", "plain"):
        assert chat.parse(text).content == text
    reader = CallReader(chat.tool_calls)
    assert [piece for character in 'a <<f|{"x": 1}>>' for piece in reader.feed(character)] == [
        "a",
        ParsedToolCall("f", '{"x": 1}'),
    ]
