"""What is drawn under the grammar of an answer is read back as what was asked for, in every format of tool calls."""

import json
from dataclasses import replace

import jsonschema_rs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.templates import FAMILIES
from tests.support.tokenizer import tiny_tokenizer

from agentlightning.chat.answer_grammar import AnswerShape, answer_grammar
from agentlightning.chat.base import ThoughtMarkers
from agentlightning.chat.hf import HFChatFormat
from agentlightning.engine.base import Sample
from agentlightning.engine.local.guided_decoding import GrammarCompiler
from agentlightning.gateway.sampling import SampledAnswer
from agentlightning.testing import ByteChatFormat

THINKS = ("<think>", "</think>")
LONGEST = 500


class Model:
    """Draws at random, as a grammar allows; ends and markers are likelier than the rest."""

    def __init__(self, family):
        tokenizer = tiny_tokenizer(family.template, special=(*family.special, *THINKS), eos=family.eos)
        self.chat = HFChatFormat(tokenizer)
        self.grammars = GrammarCompiler(tokenizer, len(tokenizer), self.chat.eos_token_ids)
        self.weights = torch.ones(len(tokenizer))
        likely = [*self.chat.markers.values(), *(token for text in '"}])\n<[,' for token in self.chat.encode(text))]
        self.weights[likely] = 30

    def draw(self, grammar, seed):
        """(tokens, whether the answer came to its end)."""
        matcher = self.grammars.matcher(grammar, "grammar")
        random = torch.Generator().manual_seed(seed)
        drawn = []
        while len(drawn) < LONGEST:
            may = matcher.token_mask(len(self.weights))
            drawn.append(int(torch.multinomial(self.weights * may, 1, generator=random)))
            if drawn[-1] in self.chat.eos_token_ids:
                return drawn, True
            matcher.push(drawn[-1])
        return drawn, False

    def read(self, drawn, tools, thought):
        answer = SampledAnswer(0, chat=self.chat, tools=tools or [], reasoning_markers=thought)
        answer.finish(Sample(tuple(drawn), (0.0,) * len(drawn), "stop", 0))
        return answer


def with_markers(name, tokens):
    """A family whose markers of calls are tokens, or are none."""
    family = FAMILIES[name]
    return replace(family, special=tuple(text for text in family.special if "tool" not in text) + tokens)


KINDS = {
    **FAMILIES,
    "hermes, tokens": with_markers("hermes", ("<tool_call>", "</tool_call>")),
    "qwen_coder, tokens": with_markers("qwen_coder", ("<tool_call>", "</tool_call>")),
    "deepseek, text": with_markers("deepseek", ()),
}


@pytest.fixture(scope="module")
def models():
    return {name: Model(family) for name, family in KINDS.items()}


WORD = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True).filter(lambda name: name not in ("true", "false", "null"))
NAMES = {
    "pythonic": WORD | st.sampled_from(["get.it", "get-it", "é"]),
    "qwen_coder": WORD | st.sampled_from(["get.it", "é", 'a"b', "a b", "]"]),
    "mistral_named": WORD | st.sampled_from(["get.it", "a/b:c", "é"]),
}
ANY_NAME = WORD | st.sampled_from(["get.it", "get-it", "é", 'a"b', "a b", "a\\b", "]", "}"])
WORDS = ["yes", "né 🎉", " ", 'a "b"', "</tool_call>", "}]", "\\", "a\nb", "null", "</parameter>", "'", "a</b"]
ENUM = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True).map(lambda words: {"enum": words})
INTEGER = st.just({"type": "integer", "minimum": -3, "maximum": 12})
TEXT = st.sampled_from([{"type": "string"}, {"type": "string", "maxLength": 4}, {"type": "string", "title": "A text"}])
ANYTHING = st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 5}, {"$ref": "#/$defs/Size"}])
SIMPLE = ENUM | INTEGER | TEXT | ANYTHING


def an_object(properties, values):
    def made(given):
        known, needed = given
        return {"type": "object", "properties": known, "required": [name for name in known if name in needed]}

    names = st.lists(properties, max_size=3)
    return st.tuples(st.dictionaries(properties, values, max_size=3), names).map(made)


NESTED = st.one_of(
    SIMPLE,
    SIMPLE.map(lambda inner: {"anyOf": [inner, {"type": "null"}]}),
    SIMPLE.map(lambda inner: {"type": "array", "items": inner, "maxItems": 2}),
    an_object(WORD, SIMPLE).map(lambda inner: {**inner, "additionalProperties": False}),
)
DEFINED = {"$defs": {"Size": {"type": "object", "properties": {"w": {"enum": [1, 2.5]}}, "required": ["w"]}}}
DEFINED["$defs"]["Size"]["additionalProperties"] = False
CONTENT = an_object(ANY_NAME, NESTED).map(lambda schema: {**schema, **DEFINED})
THOUGHTS = [ThoughtMarkers(start, end, opened) for start, end in (THINKS, ("[?]", "]")) for opened in (False, True)]


def tools_of(name):
    """Tools by name: (their schemas), such as the format can write, most of them."""
    names = NAMES.get(name, ANY_NAME)
    properties = names if name in ("pythonic", "qwen_coder") else ANY_NAME
    arguments = an_object(properties, NESTED).map(lambda schema: {**schema, **DEFINED})
    return st.dictionaries(names, arguments, min_size=1, max_size=3)


@pytest.mark.parametrize("examples", [4, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_constrained_answers_have_the_required_shape(models, name, examples):
    model, ended = models[name], 0
    tools = tools_of(name.partition(",")[0])
    thoughts = st.sampled_from([None, *THOUGHTS])

    @settings(max_examples=examples)
    @given(tools, st.booleans(), st.booleans(), st.none() | CONTENT, thoughts, st.integers(0, 2**30))
    def check(tools, needs_call, one_call, content, thought, seed):
        nonlocal ended
        named = tuple((name, json.dumps(schema)) for name, schema in tools.items())
        shape = None if content is None else json.dumps(content)
        grammar = answer_grammar(model.chat, AnswerShape(named, needs_call, one_call, shape, thought))
        if grammar is None:
            return
        assert model.grammars.can_compile(grammar, "grammar")
        drawn, whole = model.draw(grammar, seed)
        if not whole:
            return
        ended += 1
        offered = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in tools.items()]
        answer = model.read(drawn, offered, thought)
        for call in answer.tool_calls:
            jsonschema_rs.validate(tools[call.name], json.loads(call.arguments))
        assert answer.tool_calls or not needs_call
        assert len(answer.tool_calls) <= 1 or not (one_call or not model.chat.tool_calls.parallel)
        assert not (needs_call and answer.content)
        if content is not None and not answer.tool_calls:
            jsonschema_rs.validate(content, json.loads(answer.content))

    check()
    assert ended


PLAIN = json.dumps({"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}})
NOTHING = '{"type": "object", "properties": {}}'
TWO = (("f", PLAIN), ("g", "{}"))


@pytest.mark.parametrize("name", KINDS)
def test_every_format_has_grammars_for_required_and_optional_calls(models, name):
    model = models[name]
    for shape in (
        AnswerShape(TWO, True),
        AnswerShape(TWO, True, True),
        AnswerShape(TWO),
        AnswerShape(TWO, False, True),
    ):
        grammar = answer_grammar(model.chat, shape)
        assert model.grammars.can_compile(grammar, "grammar")
    bare = not model.chat.tool_calls.layout.opening.startswith(model.chat.tool_calls.opening)
    assert (answer_grammar(model.chat, AnswerShape(TWO, content=PLAIN)) is None) == bare
    texts = ["", "So: ", " \n", "né 🎉"]
    for text in texts:
        matcher = model.grammars.matcher(answer_grammar(model.chat, AnswerShape(TWO)), "grammar")
        for token in model.chat.encode(text):
            assert matcher.token_mask(len(model.weights))[token]
            matcher.push(token)
        may = matcher.token_mask(len(model.weights))
        assert all(may[token] for token in model.chat.eos_token_ids)


def written(model, shape, seeds=range(10)):
    grammar = answer_grammar(model.chat, shape)
    drawn = [model.draw(grammar, seed) for seed in seeds]
    return [model.read(tokens, None, shape.thought) for tokens, whole in drawn if whole]


def test_parallel_calls_are_sampled_only_if_allowed(models):
    asked = AnswerShape((("g", NOTHING),), True)
    for name, model in models.items():
        counts = {len(answer.tool_calls) for answer in written(model, asked)}
        assert (max(counts) > 1) == (name != "llama3")


def test_a_reasoning_model_thinks_first_and_calls_in_its_thought_do_not_count(models):
    for thought in THOUGHTS:
        answers = written(models["hermes"], AnswerShape((("g", NOTHING),), True, True, thought=thought))
        assert any(answer.reasoning for answer in answers)
        assert all(len(answer.tool_calls) == 1 and not answer.content for answer in answers)


UNWRITABLE = {
    "a marker in a name": ("hermes", (("<|im_end|>", "{}"),)),
    "a marker in a schema": ("hermes", (("f", '{"properties": {"x": {"enum": ["<|im_end|>"]}}}'),)),
    "a name that is none in Python": ("pythonic", (("a b", "{}"),)),
    "an argument that has no name in Python": ("pythonic", (("f", '{"properties": {"a b": {}}}'),)),
    "a name with a tag in it": ("qwen_coder", (("f>", "{}"),)),
    "a pattern of bare text": ("qwen_coder", (("f", '{"properties": {"x": {"type": "string", "pattern": "a"}}}'),)),
    "more than single parameters": ("qwen_coder", (("f", '{"properties": {"x": {}}, "minProperties": 1}'),)),
    "a reference to the whole": ("pythonic", (("f", '{"properties": {"x": {"$ref": "#"}}}'),)),
}


@pytest.mark.parametrize("why", UNWRITABLE)
def test_unparsable_arguments_have_no_grammar(models, why):
    name, tools = UNWRITABLE[why]
    assert answer_grammar(models[name].chat, AnswerShape(tools, True)) is None


def test_a_declared_format_is_validated_but_not_constrained():
    call = "<<{{ call.function.name }}|{{ call.function.arguments | tojson }}>>"
    turn = "{{ m.content }}{% for call in m.tool_calls or [] %}" + call + "{% endfor %}<|im_end|>"
    tokenizer = tiny_tokenizer("{% for m in messages %}" + turn + "{% endfor %}")
    function = {"name": "{name}", "arguments": "{content}"}
    calls = {"open_pattern": r"<<(?P<name>\w+)\|", "close": ">>", "content": "json", "repeats": True}
    calls["transform"] = {"type": "function", "function": function}
    tokenizer.response_template = {
        "start_anchor": "assistant",
        "fields": {"content": {"content": "text"}, "tool_calls": calls},
    }
    chat = HFChatFormat(tokenizer)
    assert (chat.tool_calls.name, chat.tool_calls.layout.opening) == ("declared", "<<")
    assert answer_grammar(chat, AnswerShape(TWO, True)) is None


def test_a_grammar_needs_markers_and_a_layout():
    assert answer_grammar(ByteChatFormat(), AnswerShape(TWO, True)) is None
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    chat = HFChatFormat(tiny_tokenizer(template), tool_calls="template")
    assert chat.tool_calls.layout is None
    assert answer_grammar(chat, AnswerShape(TWO, True)) is None


def goes_on(model, shape, spelled, before=""):
    """What may follow when a text is written letter by letter: None where it cannot be."""
    matcher = model.grammars.matcher(answer_grammar(model.chat, shape), "grammar")
    letters = [token for letter in spelled for token in model.chat.encode(letter)]
    for token in model.chat.encode(before) + letters:
        if not matcher.token_mask(len(model.weights))[token]:
            return None
        matcher.push(token)
    return matcher.token_mask(len(model.weights))


def may_end(model, shape, text):
    may = goes_on(model, shape, text)
    return may is not None and all(may[token] for token in model.chat.eos_token_ids)


@pytest.mark.parametrize("name", KINDS)
def test_free_text_cannot_look_like_a_malformed_call(models, name):
    model, shape = models[name], AnswerShape(TWO)
    marker, layout = model.chat.tool_calls.opening, model.chat.tool_calls.layout
    assert may_end(model, shape, "So " + marker[:-1])
    assert not may_end(model, shape, "So " + marker)
    assert not may_end(model, shape, marker)
    assert may_end(model, shape, "So {[")
    begins = not layout.opening.startswith(marker)
    assert may_end(model, shape, f" {layout.opening[0]}") == (not begins)


def test_free_text_of_a_reasoning_model_cannot_begin_an_unfinished_thought(models):
    shape = AnswerShape(TWO, thought=THOUGHTS[2])
    assert not may_end(models["hermes"], shape, "[?] hm")
    assert may_end(models["hermes"], shape, "[?] hm]")
    assert may_end(models["hermes"], shape, "[?] hm] So")
    assert may_end(models["hermes"], shape, "So [?]")
    assert not may_end(models["hermes"], shape, " [?]")


TEXT_NEEDED = '{"properties": {"x": {"type": "string"}}, "required": ["x"]}'


def test_qwen_coder_values_cannot_contain_their_end_marker(models):
    shape, model = AnswerShape((("f", TEXT_NEEDED),), True), models["qwen_coder"]
    call = "<tool_call>\n<function=f><parameter=x>\n"
    assert goes_on(model, shape, "a</parameter", call) is not None
    assert goes_on(model, shape, "a</parameter>", call) is None
    assert goes_on(model, shape, "a\n</parameter>", call) is not None
    may = goes_on(model, shape, "", call + "a\n b\n</parameter></function>\n</tool_call>")
    assert all(may[token] for token in model.chat.eos_token_ids)


def test_the_model_may_write_ids_where_the_template_does(models):
    asked, model = AnswerShape((("g", NOTHING),), True, True), models["mistral"]
    for rest in ("}]", ', "id": "abcdefgh1"}]'):
        may = goes_on(model, asked, "", '[TOOL_CALLS] [{"name": "g", "arguments": {}' + rest)
        assert may is not None
        assert all(may[token] for token in model.chat.eos_token_ids)


def test_constrained_arguments_have_only_the_named_properties(models):
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1'
    one = {"properties": {"x": {"const": 1}}, "required": ["x"]}
    for schema, more in ((one, False), ({**one, "additionalProperties": {"type": "integer"}}, True)):
        asked = AnswerShape((("f", json.dumps(schema)),), True)
        assert (goes_on(models["hermes"], asked, "", call + ', "') is not None) == more


def test_schema_annotations_may_look_like_markers(models):
    schema = {"description": "Ends with <|im_end|>.", "properties": {"title": {"type": "integer"}}}
    assert answer_grammar(models["hermes"].chat, AnswerShape((("f", json.dumps(schema)),), True)) is not None
    schema["properties"]["<|im_end|>"] = {"type": "integer"}
    assert answer_grammar(models["hermes"].chat, AnswerShape((("f", json.dumps(schema)),), True)) is None
