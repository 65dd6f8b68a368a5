"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

A value is bare text between two line ends, so what it is, the tool's schema must say: a string where the schema has
one, or has nothing to say of the parameter; else JSON where it is JSON of a type the schema has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from agentlightning.chat.lark import ANY, Lark, escaped, optional
from agentlightning.chat.tool_calls.format import Layout, Malformed, MarkedFormat, ParsedToolCall, Tools, Unfinished
from agentlightning.chat.tool_calls.hermes import CALL_END, CALL_START
from agentlightning.chat.tool_calls.parameters import DEFINITIONS, SAYS_NOTHING, read_parameters
from agentlightning.chat.tool_calls.partial_json import is_text, skip_space
from agentlightning.chat.tool_calls.template_probe import KEY, NAME

_FUNCTION: Final = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER: Final = re.compile(r"<parameter=([^<>\n]+)>")
_VALUE_END: Final = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_FUNCTION_END: Final = "</function>"
_VALUE_CLOSING: Final = "</parameter>"
_SAYS_NOTHING: Final = SAYS_NOTHING.union(DEFINITIONS)
_MOST_STEPS: Final = 10
"""From one reference to the next."""
_NULLS: Final = ("null", "None")
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_TYPES: Final = {dict: "object", list: "array", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class QwenCoder(MarkedFormat):
    __slots__ = ()

    @property
    def opening(self) -> str:
        return CALL_START

    def write_arguments(self, lark: Lark, schema: Mapping[str, Any], layout: Layout) -> str | None:
        parameters = read_parameters(schema)
        if parameters is None:
            return None
        before, _, rest = layout.probed.partition(KEY)
        middle, _, after = rest.partition(NAME)
        written: list[str] = []
        for each in parameters:
            tag = f"{before.lstrip()}{each.name}>"
            if _PARAMETER.fullmatch(tag) is None or (value := _value(lark, each.schema, after)) is None:
                return None
            whole = f"{lark.literal(before + each.name + middle)} {value}"
            written.append(whole if each.needed else optional(whole))
        return " ".join(written) or '""'

    def read_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        named, position = _tag(text, skip_space(text, start), _FUNCTION, "<function=")
        root = _schema(tools, named)
        schemas = root.get("properties") or {}
        values: dict[str, str] = {}
        while not _follows(text, position := skip_space(text, position), _FUNCTION_END):
            key, position = _tag(text, position, _PARAMETER, "<parameter=")
            if (end := _VALUE_END.search(text, position)) is None:
                raise Unfinished("a parameter is not closed")
            values[key] = _typed(_bare(text[position : end.start()]), schemas.get(key), root)
            position = end.end()
        position = skip_space(text, position + len(_FUNCTION_END))
        if not _follows(text, position, CALL_END):
            raise Malformed("the call is not closed")
        arguments = ", ".join(f"{_json(key)}: {value}" for key, value in values.items())
        return (ParsedToolCall(named, "{" + arguments + "}"),), position + len(CALL_END)


def _value(lark: Lark, schema: Mapping[str, Any], after: str) -> str | None:
    """What is read as a value that fits, and what follows it; None where that would take more than JSON or words."""
    types = set(_types_of(schema, schema))
    if types and "string" not in types:
        return f"{lark.json(schema)} {lark.literal(after)}"
    said = {key: value for key, value in _resolved(schema, schema).items() if key not in _SAYS_NOTHING}
    if (values := [said["const"]] if "const" in said else said.get("enum")) is None:
        closed_before = ANY + escaped(_VALUE_CLOSING) + "(?s:.+)"
        return lark.until(after, [closed_before]) if _takes_any_text(said, schema) else None
    words = [
        value for value in values if isinstance(value, str) and _VALUE_CLOSING not in value and value not in _NULLS
    ]
    if not words or not said.keys() <= {"type", "const", "enum"}:
        return None
    return lark.rule(*(lark.literal(word + after) for word in words))


def _takes_any_text(schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether every text fits, as the string that it is read as."""
    said = {key: value for key, value in _resolved(schema, root).items() if key not in _SAYS_NOTHING}
    for key in ("anyOf", "oneOf"):
        if said.keys() == {key}:
            texts = [choice for choice in said[key] if "string" in set(_types_of(choice, root))]
            return len(texts) == 1 and _takes_any_text(texts[0], root)
    return said.keys() <= {"type"}


def _tag(text: str, position: int, pattern: re.Pattern[str], begins: str) -> tuple[str, int]:
    """(the name in the tag at `position`, where the tag ends)."""
    if found := pattern.match(text, position):
        return found[1].strip(), found.end()
    rest = text[position:]
    unfinished = begins.startswith(rest) or (rest.startswith(begins) and not re.search(r"[<>\n]", rest[len(begins) :]))
    raise (Unfinished if unfinished else Malformed)(f"{begins} is missing")


def _follows(text: str, position: int, marker: str) -> bool:
    """Whether `marker` stands at `position`. Raises Unfinished where it may yet."""
    if text.startswith(marker, position):
        return True
    if marker.startswith(text[position:]):
        raise Unfinished(f"{marker} is cut")
    return False


def _bare(value: str) -> str:
    """Without the line ends that the template writes around a value."""
    return value.removeprefix("\n").removesuffix("\n")


def _schema(tools: Tools, name: str) -> dict[str, Any]:
    """Of a tool's arguments."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            schema = function.get("parameters")
            known = isinstance(schema, dict) and isinstance(schema.get("properties") or {}, dict)
            return cast("dict[str, Any]", schema) if known else {}
    return {}


def _typed(value: str, schema: Any, root: Mapping[str, Any]) -> str:
    """The value as JSON."""
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
    said = schema.get("type")
    yield from (kind for kind in [said, *_list(said)] if isinstance(kind, str))
    for choice in [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]:
        yield from _types_of(choice, root)
    for value in [schema["const"]] if "const" in schema else _list(schema.get("enum")):
        yield _TYPES.get(type(value), "string")


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a schema refers to, where that is defined beside the parameters."""
    for _ in range(_MOST_STEPS):
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
    if not is_text(text):
        raise Malformed("it holds half a character")
    return json.dumps(text, ensure_ascii=False)


QWEN_CODER: Final = QwenCoder("qwen_coder", closing=CALL_END)
