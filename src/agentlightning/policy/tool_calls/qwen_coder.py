"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

A value is bare text between two line ends, so what it is, the tool's schema must say: a string where the schema has
one, or has nothing to say of the parameter; else JSON where it is JSON of a type the schema has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from agentlightning.policy.tool_calls.base import Malformed, MarkedFormat, ParsedToolCall, Tools, Unfinished
from agentlightning.policy.tool_calls.hermes import CALL_END, CALL_START
from agentlightning.policy.tool_calls.jsontext import is_text, skip_space

_FUNCTION: Final = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER: Final = re.compile(r"<parameter=([^<>\n]+)>")
_VALUE_END: Final = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_FUNCTION_END: Final = "</function>"
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_TYPES: Final = {dict: "object", list: "array", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class QwenCoder(MarkedFormat):
    __slots__ = ()

    @property
    def opening(self) -> str:
        return CALL_START

    def read_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        named, position = _tag(text, skip_space(text, start), _FUNCTION, "<function=")
        schemas = _schemas(tools, named)
        values: dict[str, str] = {}
        while not _follows(text, position := skip_space(text, position), _FUNCTION_END):
            key, position = _tag(text, position, _PARAMETER, "<parameter=")
            if (end := _VALUE_END.search(text, position)) is None:
                raise Unfinished("a parameter is not closed")
            values[key] = _typed(_bare(text[position : end.start()]), schemas.get(key))
            position = end.end()
        position = skip_space(text, position + len(_FUNCTION_END))
        if not _follows(text, position, CALL_END):
            raise Malformed("the call is not closed")
        arguments = ", ".join(f"{_json(key)}: {value}" for key, value in values.items())
        return (ParsedToolCall(named, "{" + arguments + "}"),), position + len(CALL_END)


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


def _schemas(tools: Tools, name: str) -> dict[str, Any]:
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return cast("dict[str, Any]", properties) if isinstance(properties, dict) else {}
    return {}


def _typed(value: str, schema: Any) -> str:
    """The value as JSON."""
    types = set(_types_of(schema))
    if not types or "string" in types:
        fits = "null" in types and value in ("null", "None")
        return "null" if fits else _json(value)
    spelled = _PYTHON_WORDS.get(value, value)
    try:
        kind = _TYPES.get(type(json.loads(spelled)), "string")
    except (ValueError, RecursionError):
        return _json(value)
    return spelled if kind in types or (kind == "integer" and "number" in types) else _json(value)


def _types_of(schema: Any) -> Iterator[str]:
    """The types a schema allows."""
    if not isinstance(schema, dict):
        return
    said = schema.get("type")
    yield from [said] if isinstance(said, str) else (kind for kind in said or () if isinstance(kind, str))
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            yield from _types_of(choice)
    for value in schema.get("enum") or ():
        yield _TYPES.get(type(value), "string")


def _json(text: str) -> str:
    if not is_text(text):
        raise Malformed("it holds half a character")
    return json.dumps(text, ensure_ascii=False)


QWEN_CODER: Final = QwenCoder("qwen_coder", closing=CALL_END)
