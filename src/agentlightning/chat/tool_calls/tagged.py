"""Calls with each argument between tags of its own: Qwen3-Coder, GLM, MiniMax.

A value is bare text, so the tool's schema decides its type: a string if the schema allows one or does not mention the
parameter; otherwise JSON, if the text is JSON of a type that the schema allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

from agentlightning.chat.lark_grammar import ANY, LarkGrammar, escaped, optional
from agentlightning.chat.tool_calls.format import (
    IncompleteCall,
    Layout,
    MalformedCall,
    MarkedFormat,
    ParsedToolCall,
    Tools,
)
from agentlightning.chat.tool_calls.parameters import ANNOTATIONS, DEFINITIONS, read_parameters
from agentlightning.chat.tool_calls.partial_json import is_utf8, skip_space
from agentlightning.chat.tool_calls.template_probe import KEY, NAME

_IGNORED_KEYWORDS: Final = ANNOTATIONS.union(DEFINITIONS)
_MAX_REFERENCES: Final = 10
"""Length of a chain of references."""
_NULLS: Final = ("null", "None")
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_TYPES: Final = {dict: "object", list: "array", bool: "boolean", int: "integer", float: "number", type(None): "null"}


Tag = tuple[str, str, str]
"""How an opening tag begins, its pattern, whose group is the name, and how it ends."""


@dataclass(frozen=True, slots=True)
class TaggedCalls(MarkedFormat):
    function: Tag = ("<function=", r"<function=([^<>\n]+)>", ">")
    parameter: Tag = ("<parameter=", r"<parameter=([^<>\n]+)>", ">")
    value_end: str = "</parameter>"
    function_end: str = "</function>"
    padding: str = "\n"
    """What the template writes around a value."""

    def write_arguments(self, lark: LarkGrammar, schema: Mapping[str, Any], layout: Layout) -> str | None:
        parameters = read_parameters(schema)
        if parameters is None:
            return None
        before, _, rest = layout.probed.partition(KEY)
        middle, _, after = rest.partition(NAME)
        written: list[str] = []
        for each in parameters:
            tag = f"{before}{each.name}{middle}".strip()
            value = self._value(lark, each.schema, after)
            if re.fullmatch(self.parameter[1], tag) is None or value is None:
                return None
            whole = f"{lark.literal(before + each.name + middle)} {value}"
            written.append(whole if each.required else optional(whole))
        return " ".join(written) or '""'

    def parse_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
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
        position = skip_space(text, position + len(self.function_end))
        if not _has_marker(text, position, self.closing):
            raise MalformedCall("the call is not closed")
        arguments = ", ".join(f"{_json(key)}: {value}" for key, value in values.items())
        return (ParsedToolCall(name, "{" + arguments + "}"),), position + len(self.closing)

    def _value(self, lark: LarkGrammar, schema: Mapping[str, Any], after: str) -> str | None:
        """Expression for a valid value and the text after it; None if neither JSON nor fixed strings can express it."""
        types = set(_types_of(schema, schema))
        if types and "string" not in types:
            return f"{lark.json(schema)} {lark.literal(after)}"
        keywords = {key: value for key, value in _resolved(schema, schema).items() if key not in _IGNORED_KEYWORDS}
        if (values := [keywords["const"]] if "const" in keywords else keywords.get("enum")) is None:
            closed_before = ANY + escaped(self.value_end) + "(?s:.+)"
            return lark.until(after, [closed_before]) if _accepts_any_text(keywords, schema) else None
        words = [
            value for value in values if isinstance(value, str) and self.value_end not in value and value not in _NULLS
        ]
        if not words or not keywords.keys() <= {"type", "const", "enum"}:
            return None
        return lark.rule(*(lark.literal(word + after) for word in words))


@cache
def _value_end(closing: str, parameter: str, call_end: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(closing)}(?=\s*(?:{re.escape(parameter)}|{re.escape(call_end)}))")


def _accepts_any_text(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether every text is valid, as the string that it is parsed as."""
    keywords = {key: value for key, value in _resolved(schema, root).items() if key not in _IGNORED_KEYWORDS}
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
    spelled = _PYTHON_WORDS.get(value, value)
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
