"""Formats whose arguments are JSON: between markers (Hermes, Granite, Phi-4 ...), bare (Llama 3), after a name
(Mistral, DeepSeek, Kimi), or in Harmony's channels; and Gemma's, which is nearly JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, cast

from agentlightning.chat.lark_grammar import ANY, LarkGrammar, escaped, optional
from agentlightning.chat.tool_calls.format import (
    KEY,
    NAME,
    CallFormat,
    Calls,
    IncompleteCall,
    Layout,
    MalformedCall,
    NoGrammar,
    Parsed,
    ParsedToolCall,
    Preceding,
    Tools,
    expect,
    is_short_id,
    is_utf8,
    object_call,
    raw_elements,
    skip_space,
    value_end,
)
from agentlightning.errors import ConfigError

# -- parameters ------------------------------------------------------------------------------------------------------

# The parameters of a tool's JSON schema, for formats that write each argument separately instead of one object.

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "format", "$comment"})
"""Keywords of a schema that constrain no value."""
DEFINITIONS = ("$defs", "definitions")
_PARAMETERS = ("type", "properties", "required", "additionalProperties", "$schema", "strict")
_KNOWN = ANNOTATIONS.union(DEFINITIONS, _PARAMETERS)
_REFERENCE = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)": "(?!#/(?:\$defs|definitions)/)')


class Parameter(NamedTuple):
    name: str
    schema: dict[str, Any]
    required: bool


def read_parameters(schema: Mapping[str, Any]) -> list[Parameter]:
    """The parameters of an object's schema, in order. Raises NoGrammar if it constrains more than individual
    properties."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    known = schema.keys() <= _KNOWN and schema.get("type") in (None, "object")
    if not known or not isinstance(properties, dict) or _REFERENCE.search(json.dumps(schema)):
        raise NoGrammar
    parameters: list[Parameter] = []
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    for name, property_schema in cast("dict[str, Any]", properties).items():
        own = {} if property_schema is True else property_schema
        if not isinstance(own, dict):
            raise NoGrammar
        parameters.append(Parameter(name, {**definitions, **own}, name in required))
    if not set(required) <= set(properties):
        raise NoGrammar
    return parameters


_PLAUSIBLE = re.compile(r"[^\n{}\"]{0,200}\n?(?:```\w*\n?)?\Z")
"""What may still become the name of a call."""


@dataclass(frozen=True, slots=True)
class JsonCalls(CallFormat):
    """After `opening`, which begins the answer's calls or each of them: a JSON object with a name and arguments, or a
    list of these, and then `closing`; or, with a `head`, a name and the JSON object of its arguments (Mistral writes
    either)."""

    name_key: str = "name"
    argument_keys: tuple[str, ...] = ("arguments",)
    head: re.Pattern[str] | None = None
    """Up to the arguments, with the groups `name`, and `id` where the model writes one."""
    ends: tuple[str, ...] = ()
    """Markers after the arguments, in order; those before the last may be absent."""

    def parse_call(self, text: str, start: int, tools: Tools) -> Calls:
        body = skip_space(text, start)
        if body == len(text):
            raise IncompleteCall("nothing follows")
        if self.head is not None and (self.ends or text[body] != "["):  # Of Mistral, it may be a list all the same.
            return self._named_call(self.head, text, body)
        if text[body] not in "{[":
            raise MalformedCall("a call is a JSON object")
        end = after = value_end(text, body)
        if self.closing:
            after = expect(text, end, self.closing)
        found = text[body:end]
        calls = tuple(map(self._read, raw_elements(found) if found.startswith("[") else [found]))
        if not calls:
            raise MalformedCall("a list holds calls")
        return calls, after

    def _read(self, body: str) -> ParsedToolCall:
        call = object_call(body, self.argument_keys, name_key=self.name_key)
        return replace(call, id=None) if self.short_ids and call.id and not is_short_id(call.id) else call

    def _named_call(self, head: re.Pattern[str], text: str, start: int) -> Calls:
        if (found := head.match(text, start)) is None:
            raise (IncompleteCall if _PLAUSIBLE.match(text, start) else MalformedCall)("it has no name")
        groups = found.groupdict()
        name = groups["name"] or groups.get("fenced")
        if found.end() < len(text) and text[found.end()] != "{":
            raise MalformedCall("arguments are a JSON object")
        end = value_end(text, found.end())
        if not is_utf8(name) or not name:
            raise MalformedCall("a call has a name")
        arguments, call_id = text[found.end() : end], groups.get("id")
        for marker in self.ends:
            end = expect(text, end, marker, *self.ends, optional=marker != self.ends[-1])
        return (ParsedToolCall(name, arguments, call_id),), end


@dataclass(frozen=True, slots=True)
class Llama3(CallFormat):
    """An answer that is `{"name": ..., "parameters": {...}}`, bare or after `<|python_tag|>`, several separated by a
    semicolon or whitespace. A bare object is a call only at the start of the answer and with the keys of a call. After
    the tag a call may also be `name.call(key="value")`, as for built-in tools."""

    unmarked: tuple[Preceding, ...] = ("start", "call")

    def parse(self, text: str, preceding: Preceding, final: bool, tools: Tools = None) -> Parsed:
        """See `CallFormat.parse`. An answer that starts with a semicolon starts with content."""
        if preceding == "start" and text.lstrip().startswith(";"):
            preceding = "content"
        return CallFormat.parse(self, text, preceding, final, tools)

    def parse_call(self, text: str, start: int, tools: Tools) -> Calls:
        marked, start = start > 0, skip_space(text, start)
        if not marked or text.startswith("{", start):
            call, end = _bare_call(text, skip_space(text, start + 1) if text.startswith(";", start) else start)
        else:
            (call,), end = parse_python(text, start, [])
            call = ParsedToolCall(call.name.removesuffix(".call"), call.arguments)
        return (call,), end


_ARGUMENTS = ("parameters", "arguments")
_KEYS = frozenset({"type", "name", "id", *_ARGUMENTS})
_FIRST_KEY = re.compile(r'\{\s*(?:"([^"\\]*)("?))?')


def _bare_call(text: str, start: int) -> tuple[ParsedToolCall, int]:
    if start == len(text):
        raise IncompleteCall("nothing follows")
    first = _FIRST_KEY.match(text, start)
    if first is None:
        raise MalformedCall("a call is a JSON object")
    key, closed = first[1] or "", first[2]
    if key not in _KEYS if closed else not any(known.startswith(key) for known in _KEYS):
        raise MalformedCall("the object has other keys than a call")
    end = value_end(text, start)
    return object_call(text[start:end], _ARGUMENTS, _KEYS), end


@dataclass(frozen=True, slots=True)
class Harmony(CallFormat):
    """gpt-oss: messages in channels, a call as `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>`
    and a JSON object, or with the recipient first, right after the prompt. Headers of other messages are dropped."""

    unmarked: tuple[Preceding, ...] = ("start", "call")

    @property
    def markers(self) -> tuple[str, ...]:
        return _HEADERS

    def starts(self, text: str) -> Iterator[tuple[int, int]]:
        return ((found.start(), found.start()) for found in _HEADER.finditer(text))

    def parse_call(self, text: str, start: int, tools: Tools) -> Calls:
        if not start and not text.startswith((*_HEADERS, _RECIPIENT, _RECIPIENT.strip())):
            raise (IncompleteCall if _RECIPIENT.startswith(text) else MalformedCall)("it has no recipient")
        if (found := _CHANNEL.match(text, start)) is None:
            unfinished = "<|message|>" not in text[start:] and len(text) - start < _MAX_HEADER
            raise (IncompleteCall if unfinished else MalformedCall)("it is no header of a message")
        if found["name"] is None:
            return (), found.end()
        end = value_end(text, found.end())
        return (ParsedToolCall(found["name"], text[found.end() : end]),), end


_RECIPIENT = " to=functions."
_HEADERS = ("<|end|>", "<|start|>", "<|channel|>")
_HEADER = re.compile("|".join(map(re.escape, _HEADERS)))
_MAX_HEADER = 200
_CHANNEL = re.compile(
    r"(?:<\|end\|>)?\s*(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?(?: ?to=functions\.(?P<name>[\w.\-]+))?\s*"
    r"(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>\s*"
)


@dataclass(frozen=True, slots=True)
class Gemma(CallFormat):
    """Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>`."""

    def write_arguments(self, lark: LarkGrammar, schema: object, layout: object) -> str:
        raise NoGrammar  # No JSON, and no grammar of its own yet.

    def parse_call(self, text: str, start: int, tools: Tools) -> Calls:
        found = _GEMMA_CALL.match(text, start)
        if found is None:
            raise (MalformedCall if "<tool_call|>" in text[start:] else IncompleteCall)("it has no end")
        arguments = _GEMMA_TOKEN.sub(_gemma_json, found["arguments"])
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise MalformedCall(str(error)) from None
        if not is_utf8(json.dumps(value, ensure_ascii=False)):
            raise MalformedCall("it contains a lone surrogate")
        return (ParsedToolCall(found["name"], arguments),), found.end()


_GEMMA_CALL = re.compile(
    r'\s*call:(?P<name>[\w.\-]+)(?P<arguments>\{(?:<\|"\|>.*?<\|"\|>|(?!<tool_call\|>|<\|"\|>).)*\})\s*<tool_call\|>',
    re.DOTALL,
)
_GEMMA_TOKEN = re.compile(r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<key>[^\s{}\[\],:"<]+)(?=\s*:)', re.DOTALL)


def _gemma_json(found: re.Match[str]) -> str:
    return json.dumps(found["key"] if found["text"] is None else found["text"], ensure_ascii=False)


# -- pythonic --------------------------------------------------------------------------------------------------------

# Calls written as Python: `[get(city="Bern"), wait()]`, as Llama 4, small Llama 3.2 models and LFM2 write them.
#
# The list is the whole answer, or stands between two markers. Arguments are keyword arguments
# with constant values; they are converted to JSON with the original spelling of numbers. JSON's constants are accepted
# too.

LONG_LIST = 1000
"""Characters from which an unterminated list is not parsed again for every token."""

_NAME = r"[^\W\d]\w*(?:[.\-]\w+)*"
_TOKEN = re.compile(
    rf"""(?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<number>-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.]))"""
    rf"|(?P<call>{_NAME})\s*\(|(?P<key>{_NAME})\s*=|(?P<word>{_NAME})|(?P<open>[\[{{])|(?P<close>[\])}}])|(?P<sign>[,:])",
    re.DOTALL,
)
_UNFINISHED_NAME = re.compile(r"(?:[^\W\d][\w.\-]*\s*)?\Z")
"""The end of a text that may go on to be the name of a call or of an argument."""
_UNFINISHED = re.compile(
    r"""(?:[^\W\d][\w.\-]*\s*|-?[\d.]*(?:[eE][+-]?\d*)?|'(?:[^'\\]|\\.)*\\?|"(?:[^"\\]|\\.)*\\?)\Z""", re.DOTALL
)
"""The same of any token."""
_WORDS = {**{"True": "true", "False": "false", "None": "null"}, **{"true": "true", "false": "false", "null": "null"}}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(0[0-9a-fA-F]{7})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": ""}


@dataclass(frozen=True, slots=True)
class Pythonic(CallFormat):
    unmarked: tuple[Preceding, ...] = ("start",)

    def write_arguments(self, lark: LarkGrammar, schema: Mapping[str, Any], layout: Layout) -> str:
        parameters = read_parameters(schema)
        if not all(re.fullmatch(_NAME, each.name) for each in parameters):
            raise NoGrammar
        written = [
            (f"{lark.literal(each.name + '=')} {_value(lark, each.schema)}", each.required) for each in parameters
        ]
        return _argument_list(lark, written)

    def parse_call(self, text: str, start: int, tools: Tools) -> Calls:
        return _parse_list(text, skip_space(text, start))


def _value(lark: LarkGrammar, schema: Mapping[str, Any]) -> str:
    """A constant as JSON, except for the words that differ in Python."""
    if schema.get("type") == "boolean" and not schema.keys() & {"enum", "const"}:
        return lark.rule('"True"', '"False"')
    return lark.json(schema)


def _argument_list(lark: LarkGrammar, items: list[tuple[str, bool]]) -> str:
    """Comma-separated (expression, required) items in their order; optional ones may be omitted."""
    first, later = '""', '""'
    for item, required in reversed(items):
        # `first`: the rest if no item has been written yet; `later`: if one has.
        alone = f"{item} {later}"
        first = alone if required else lark.rule(alone, first)
        later = lark.rule(f'", " {alone}') if required else lark.rule(f'", " {alone}', later)
    return first


def _parse_list(text: str, start: int) -> Calls:
    """The calls in the list at `start`, and its end. An empty list is malformed."""
    if len(text) - start > LONG_LIST and "]" not in text[start:]:
        raise IncompleteCall("a long list has no end yet")
    place = expect(text, start, "[")
    calls, end = parse_python(text, place, ["]"])
    if not calls:
        raise MalformedCall("the list is empty")
    return calls, end


def parse_python(text: str, position: int, closing: list[str]) -> Calls:
    """The calls from `position` on, and the end of what the brackets `closing` close; without any, of one call. They
    are written as JSON, `[["name", {"key": value}], ...]`, which tells what is malformed."""
    written, outside = ["["], len(closing)
    while True:
        position, last = skip_space(text, position), closing[-1:]
        in_value = written[-1].endswith(": ") or (len(closing) > outside and last != [")"])
        if (_UNFINISHED if in_value else _UNFINISHED_NAME).match(text, position):
            value_end("".join(written), 0)
        if (found := _TOKEN.match(text, position)) is None:
            raise MalformedCall("it is no list of calls")
        position, token = found.end(), found[0]
        match found.lastgroup:
            case "close" if last == [token]:
                if written[-1] == ", " and written[-2][-1] not in "[{":
                    written.pop()
                written.append("}]" if closing.pop() == ")" else token)
                if not closing:
                    break
            case "call" if len(closing) == outside:
                written.append(f"[{_json(found['call'])}, {{")
                closing.append(")")
            case "key" if last == [")"]:
                written.append(f"{_json(found['key'])}: ")
            case "sign" if token == "," or last == ["}"]:
                written.append(f"{token} ")
            case "number" if written[-1][-1].isdigit():
                raise MalformedCall("a comma is missing between two numbers")
            case kind if len(closing) > outside:
                written.append(_constant(kind, token))
                closing += {"[": "]", "{": "}"}.get(token, "")
            case _:
                raise MalformedCall("only calls stand in the list")
    body = "".join(written) + "]" * (not outside)
    value_end(body, 0)
    calls = [[*raw_elements(call)] for call in raw_elements(body)]
    return tuple(ParsedToolCall(json.loads(name), arguments) for name, arguments in calls), position


def _constant(kind: str | None, token: str) -> str:
    """A constant, or the bracket that begins one, as JSON."""
    if kind == "string":
        # Two escapes may spell the two surrogates of one character.
        text = _ESCAPE.sub(_unescape, token[1:-1])
        return _json(text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass"))
    if kind in ("number", "open"):
        return token
    if token not in _WORDS:
        raise MalformedCall(f"{token} is not a constant")
    return _WORDS[token]


def _object(items: Iterable[tuple[str, str]]) -> str:
    """A JSON object of keys and values that are JSON; of a key that comes twice, the last value."""
    return "{" + ", ".join(f"{_json(key)}: {value}" for key, value in dict(items).items()) + "}"


def _unescape(found: re.Match[str]) -> str:
    two, four, eight, octal, other = found.groups()
    if digits := two or four or eight:
        number = int(digits, 16)
        return chr(number) if number < 0x110000 else "�"
    if octal:
        return chr(int(octal, 8))
    return _ESCAPED.get(other, other if other in "'\"\\/" else "\\" + other)


# -- tagged ----------------------------------------------------------------------------------------------------------

# Calls with each argument between tags of its own: Qwen3-Coder, GLM, MiniMax.
#
# A value is bare text, so the tool's schema decides its type: a string if the schema allows one or does not mention the
# parameter; otherwise JSON, if the text is JSON of a type that the schema allows.

_IGNORED_KEYWORDS = ANNOTATIONS.union(DEFINITIONS)
_MAX_REFERENCES = 10
"""Length of a chain of references."""
_NULLS = ("null", "None")
_TYPES = {dict: "object", list: "array", bool: "boolean", int: "integer", float: "number", type(None): "null"}


Tag = tuple[str, str, str]
"""How an opening tag begins, its pattern, whose group is the name, and how it ends."""


@dataclass(frozen=True, slots=True)
class TaggedCalls(CallFormat):
    function: Tag = ("<function=", r"<function=([^<>\n]+)>", ">")
    parameter: Tag = ("<parameter=", r"<parameter=([^<>\n]+)>", ">")
    value_end: str = "</parameter>"
    function_end: str = "</function>"
    padding: str = "\n"
    """What the template writes around a value."""

    def write_arguments(self, lark: LarkGrammar, schema: Mapping[str, Any], layout: Layout) -> str:
        before, _, rest = layout.probed.partition(KEY)
        middle, _, after = rest.partition(NAME)
        written: list[str] = []
        for each in read_parameters(schema):
            if re.fullmatch(self.parameter[1], f"{before}{each.name}{middle}".strip()) is None:
                raise NoGrammar
            whole = f"{lark.literal(before + each.name + middle)} {self._value(lark, each.schema, after)}"
            written.append(whole if each.required else optional(whole))
        return " ".join(written) or '""'

    def parse_call(self, text: str, start: int, tools: Tools) -> Calls:
        name, position = _tag(text, skip_space(text, start), self.function)
        root = _argument_schema(tools, name)
        schemas = root.get("properties") or {}
        values: dict[str, str] = {}
        assert self.closing is not None
        call_end = self.function_end or self.closing
        value_end = _value_end(self.value_end, self.parameter[0], call_end)
        while not _has_marker(text, position := skip_space(text, position), call_end):
            key, position = _tag(text, position, self.parameter)
            if (end := value_end.search(text, position)) is None:
                raise IncompleteCall("a parameter is not closed")
            value = text[position : end.start()].removeprefix(self.padding).removesuffix(self.padding)
            values[key] = _typed(value, schemas.get(key), root)
            position = end.end()
        end = expect(text, position + len(self.function_end), self.closing)
        return (ParsedToolCall(name, _object(values.items())),), end

    def _value(self, lark: LarkGrammar, schema: Mapping[str, Any], after: str) -> str:
        """Expression for a valid value and the text after it. Raises NoGrammar if neither JSON nor fixed strings can
        express it."""
        types = set(_types_of(schema, schema))
        if types and "string" not in types:
            return f"{lark.json(schema)} {lark.literal(after)}"
        keywords = _keywords(schema, schema)
        if (values := [keywords["const"]] if "const" in keywords else keywords.get("enum")) is None:
            if not _accepts_any_text(keywords, schema):
                raise NoGrammar
            return lark.until(after, [ANY + escaped(self.value_end) + "(?s:.+)"])
        words = [
            value for value in values if isinstance(value, str) and self.value_end not in value and value not in _NULLS
        ]
        if not words or not keywords.keys() <= {"type", "const", "enum"}:
            raise NoGrammar
        return lark.rule(*(lark.literal(word + after) for word in words))


@cache
def _value_end(closing: str, parameter: str, call_end: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(closing)}(?=\s*(?:{re.escape(parameter)}|{re.escape(call_end)}))")


def _keywords(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Those that constrain values."""
    return {key: value for key, value in _resolved(schema, root).items() if key not in _IGNORED_KEYWORDS}


def _accepts_any_text(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether every text is valid, as the string that it is parsed as."""
    keywords = _keywords(schema, root)
    for key in ("anyOf", "oneOf"):
        if keywords.keys() == {key}:
            texts = [choice for choice in keywords[key] if "string" in set(_types_of(choice, root))]
            return len(texts) == 1 and _accepts_any_text(texts[0], root)
    return keywords.keys() <= {"type"}


def _tag(text: str, position: int, tag: Tag) -> tuple[str, int]:
    """(name in the tag at `position`, end of the tag)."""
    begins, pattern, ends = tag
    if found := re.compile(pattern).match(text, position):
        return found[1].strip(), found.end()
    rest = text[position:]
    unfinished = begins.startswith(rest) or (rest.startswith(begins) and ends not in rest[len(begins) :])
    raise (IncompleteCall if unfinished else MalformedCall)(f"{begins} is missing")


def _has_marker(text: str, position: int, marker: str) -> bool:
    """Whether `marker` is at `position`. Raises IncompleteCall if it may follow."""
    if text.startswith(marker, position):
        return True
    if marker.startswith(text[position:]):
        raise IncompleteCall(f"{marker} is cut")
    return False


def _argument_schema(tools: Tools, name: str) -> dict[str, Any]:
    """Schema of a tool's arguments."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            schema = function.get("parameters")
            known = isinstance(schema, dict) and isinstance(schema.get("properties") or {}, dict)
            return cast("dict[str, Any]", schema) if known else {}
    return {}


def _typed(value: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The value as JSON of the type that the schema allows."""
    types = set(_types_of(schema, root))
    if not types or "string" in types:
        return "null" if "null" in types and value in _NULLS else _json(value)
    spelled = _WORDS.get(value, value)
    try:
        kind = _TYPES.get(type(json.loads(spelled)), "string")
    except (ValueError, RecursionError):
        return _json(value)
    return spelled if kind in types or (kind == "integer" and "number" in types) else _json(value)


def _types_of(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """The types a schema allows."""
    if not isinstance(schema, dict):
        return
    schema = _resolved(schema, root)
    types = schema.get("type")
    yield from (kind for kind in [types, *_list(types)] if isinstance(kind, str))
    for choice in [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]:
        yield from _types_of(choice, root)
    for value in [schema["const"]] if "const" in schema else _list(schema.get("enum")):
        yield _TYPES.get(type(value), "string")


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference leads to, if it is defined next to the parameters."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            break
        _, _, path = reference.partition("#/")
        place, _, name = path.partition("/")
        known = root.get(place) if place in DEFINITIONS else None
        if not isinstance(known, dict) or not isinstance(found := known.get(name), dict):
            break
        schema = found
    return schema


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _json(text: str) -> str:
    if not is_utf8(text):
        raise MalformedCall("it contains a lone surrogate")
    return json.dumps(text, ensure_ascii=False)


# -- response template -------------------------------------------------------------------------------------------------

# Tool-call format declared by a tokenizer's `response_template`, parsed by transformers itself.
#
# A declared template takes precedence over detection. It is used only for where a call begins and ends and what it
# says; the rest of an answer is parsed as usual. transformers returns values, so the arguments are JSON in our own
# spelling.

FIELD = "tool_calls"
_FAILURES = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Raised by transformers for a malformed call."""


@dataclass(frozen=True, slots=True)
class ResponseTemplateFormat(CallFormat):
    template: Any = None
    """The tokenizer's template."""
    opens: Any = None
    """Pattern of the `regex` module for the start of a call."""
    closes: Any = None
    """Likewise for its end; None: a call ends with the answer."""

    def parse(self, text: str, preceding: Preceding, final: bool, tools: Tools = None) -> Parsed:
        position = 0
        while (found := self.opens.search(text, position, partial=not final)) is not None:
            end = None if found.partial else self._end(text, found.end(), final)
            if end is None:
                if not final:
                    return Parsed(found.start())
            elif calls := self._calls(text[found.start() : end], tools):
                return Parsed(found.start(), calls, end)
            position = max(found.end(), found.start() + 1)
        return Parsed(len(text))

    def write_arguments(self, lark: LarkGrammar, schema: Mapping[str, Any], layout: Layout) -> str:
        raise NoGrammar  # The end marker ends a call even inside a JSON string, so no arguments can be guaranteed.

    def _end(self, text: str, start: int, final: bool) -> int | None:
        if self.closes is None:
            return len(text) if final else None
        found = self.closes.search(text, start)
        return found.end() if found else None

    def _calls(self, segment: str, tools: Tools) -> tuple[ParsedToolCall, ...]:
        from transformers.utils.chat_parsing import ResponseParser

        try:
            parser = ResponseParser(self.template, prefix="", tools=cast(Any, list(tools or ())))
            # The newline shows the parser that the closing marker is complete.
            events = parser.feed(segment + "\n")
            closed = [event for event in events if event["type"] == "region_close" and event["field"] == FIELD]
            parts = [event["value"] for event in closed]
            values = [value for part in parts for value in (part if isinstance(part, list) else [part])]
            return tuple(_call(value) for value in values)
        except (*_FAILURES, MalformedCall):
            return ()


def _call(value: Any) -> ParsedToolCall:
    function = value.get("function", value)
    name, arguments = function["name"], function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not is_utf8(name) or not name or not is_utf8(written):
        raise MalformedCall("a call has a name, and arguments that are text")
    return ParsedToolCall(name, written)


def response_template_format(tokenizer: Any) -> CallFormat | None:
    """The format that a tokenizer declares; None if it declares none."""
    template = getattr(tokenizer, "response_template", None)
    if not template:
        return None
    try:
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:  # The modules move between versions of transformers.
        return None
    field = load_response_template(template).fields.get(FIELD)
    if field is None or field.open_re is None:
        return None
    return ResponseTemplateFormat("declared", template=template, opens=field.open_re, closes=field.close_re)


# -- table -------------------------------------------------------------------------------------------------------------

# The formats by name.
#
# hermes       Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
# qwen_coder   Qwen3-Coder, Qwen 3.5, Nemotron 3, Seed-OSS   <tool_call><function=NAME><parameter=KEY>VALUE
# glm          GLM 4.5 to 4.7                                <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE
# invoke       MiniMax M2                                    <minimax:tool_call><invoke name="NAME"><parameter name=
# llama3       Llama 3.1 to 3.3                              {"name": ..., "parameters": {...}}
# pythonic     Llama 4, small Llama 3.2                      [name(key="value")]
# lfm2         LFM2                                          <|tool_call_start|>[name(key="value")]<|tool_call_end|>
# mistral      Mistral                                       [TOOL_CALLS][{...}], [TOOL_CALLS]name[ARGS]{...}
# deepseek     DeepSeek V3, R1, V3.1                         name and JSON between markers
# kimi         Kimi K2                                       likewise, with ids such as functions.name:0
# granite      Granite 3, Phi-4-mini                         <|tool_call|>[{"name": ..., "arguments": {...}}]
# functools    Phi-4-mini                                    functools[{...}]
# nemotron     Nemotron Nano 2, Super 49B                    <TOOLCALL>[{...}]</TOOLCALL>
# tool_calls   Jamba, Hunyuan                                <tool_calls>[{...}]</tool_calls>
# cohere       Command R7B, Command A                        <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]
# gemma        Gemma 4                                       <|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>
# harmony      gpt-oss                                       <|channel|>commentary to=functions.name<|message|>{...}

HERMES = JsonCalls("hermes", opening="<tool_call>", closing="</tool_call>")

FORMATS: dict[str, CallFormat] = {
    format.name: format
    for format in (
        HERMES,
        TaggedCalls("qwen_coder", opening="<tool_call>", closing="</tool_call>"),
        TaggedCalls(
            "glm",
            opening="<tool_call>",
            closing="</tool_call>",
            function=("", r"([\w.\-/:]+)\s*(?=<)", "<"),
            parameter=("<arg_key>", r"<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>", "<arg_value>"),
            value_end="</arg_value>",
            function_end="",
            padding="",
        ),
        TaggedCalls(
            "invoke",
            opening="<minimax:tool_call>",
            closing="</minimax:tool_call>",
            function=("<invoke name=", r'<invoke name="([^"<>\n]+)">', ">"),
            parameter=("<parameter name=", r'<parameter name="([^"<>\n]+)">', ">"),
            function_end="</invoke>",
            padding="",
        ),
        Llama3("llama3", opening="<|python_tag|>"),
        Pythonic("pythonic", opening="<|python_start|>", end="<|python_end|>"),
        Pythonic("lfm2", opening="<|tool_call_start|>", end="<|tool_call_end|>", unmarked=()),
        JsonCalls(
            "mistral",
            short_ids=True,
            opening="[TOOL_CALLS]",
            head=re.compile(r"(?P<name>[\w.\-/:]+)(?:\[CALL_ID\](?P<id>[0-9A-Za-z]{9}))?\[ARGS\]\s*"),
        ),
        JsonCalls(
            "deepseek",
            unmarked=("call",),
            opening="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
            head=re.compile(
                r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>\s*(?P<fenced>[^\n`{]+?)\s*\n```(?:json)?\n"
                r"|\s*(?P<name>[^\n`{<]+?)\s*<｜tool▁sep｜>)\s*(?=\{|\Z)"
            ),
            ends=("```", "<｜tool▁call▁end｜>"),
        ),
        JsonCalls(
            "kimi",
            unmarked=("call",),
            opening="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
            head=re.compile(
                r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?)\s*"
                r"<\|tool_call_argument_begin\|>\s*"
            ),
            ends=("<|tool_call_end|>",),
        ),
        JsonCalls("granite", opening="<|tool_call|>", end="<|/tool_call|>"),
        JsonCalls("functools", opening="functools"),
        JsonCalls("nemotron", opening="<TOOLCALL>", closing="</TOOLCALL>"),
        JsonCalls("tool_calls", opening="<tool_calls>", closing="</tool_calls>"),
        JsonCalls(
            "cohere",
            opening="<|START_ACTION|>",
            closing="<|END_ACTION|>",
            name_key="tool_name",
            argument_keys=("parameters",),
        ),
        Gemma("gemma", opening="<|tool_call>", closing="<tool_call|>"),
        Harmony("harmony", end="<|call|>"),
    )
}
"""In the order in which they are tried on what a template writes."""


def call_format(name: str) -> CallFormat:
    """The format of this name. Raises ConfigError that lists the known ones."""
    if name not in FORMATS:
        raise ConfigError(f"tool_calls={name!r} is not a format of tool calls; use one of {', '.join(FORMATS)}")
    return FORMATS[name]
