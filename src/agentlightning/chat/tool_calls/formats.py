"""Formats whose arguments are JSON: between markers (Hermes, Granite, Phi-4 ...), bare (Llama 3), after a name
(Mistral, DeepSeek, Kimi), or in Harmony's channels; and Gemma's, which is nearly JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Final

from agentlightning.chat.lark_grammar import LarkGrammar
from agentlightning.chat.tool_calls.format import (
    CallFormat,
    IncompleteCall,
    MalformedCall,
    MarkedFormat,
    Parsed,
    ParsedToolCall,
    Preceding,
    Tools,
    is_short_id,
    partial_marker_length,
)
from agentlightning.chat.tool_calls.partial_json import (
    expect,
    is_utf8,
    object_call,
    outside_strings,
    raw_elements,
    skip_space,
    value_end,
)
from agentlightning.chat.tool_calls.pythonic import parse_python_call

_PLAUSIBLE: Final = re.compile(r"[^\n{}\"]{0,200}\n?(?:```\w*\n?)?\Z")
"""What may still become the name of a call."""


@dataclass(frozen=True, slots=True)
class JsonCalls(MarkedFormat):
    """A JSON object, or a list of them, with a name and arguments, after `opening`; `closing` must follow."""

    name_key: str = "name"
    argument_keys: tuple[str, ...] = ("arguments",)

    def parse_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        body = skip_space(text, start)
        if body == len(text):
            raise IncompleteCall("nothing follows")
        if text[body] not in "{[":
            raise MalformedCall("a call is a JSON object")
        if self.closing:
            end = outside_strings(text, body, self.closing, self.opening)
            after = end + len(self.closing)
        else:
            end = after = value_end(text, body)
        if text[body] == "{":
            return (self._read(text[body:end]),), after
        calls = tuple(self._read(element) for element in raw_elements(text[body : value_end(text, body)]))
        if not calls or text[value_end(text, body) : end].strip():
            raise MalformedCall("a list holds calls, and nothing follows it")
        return calls, after

    def _read(self, body: str) -> ParsedToolCall:
        call = object_call(body, self.argument_keys, name_key=self.name_key)
        return replace(call, id=None) if self.short_ids and call.id and not is_short_id(call.id) else call


@dataclass(frozen=True, slots=True)
class Llama3(MarkedFormat):
    """An answer that is `{"name": ..., "parameters": {...}}`, bare or after `<|python_tag|>`, several separated by a
    semicolon or whitespace. A bare object is a call only at the start of the answer and with the keys of a call. After
    the tag a call may also be `name.call(key="value")`, as for built-in tools."""

    def parse_unmarked(self, text: str, preceding: Preceding) -> Parsed:
        if preceding == "content":
            raise MalformedCall("a bare call must start the answer")
        start = skip_space(text, 0)
        start = skip_space(text, start + 1) if preceding == "call" and text.startswith(";", start) else start
        call, end = _bare_call(text, start)
        return Parsed(0, (call,), end)

    def parse_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        start = skip_space(text, start)
        if text.startswith("{", start):
            call, end = _bare_call(text, start)
        else:
            call, end = parse_python_call(text, start)
            call = ParsedToolCall(call.name.removesuffix(".call"), call.arguments)
        return (call,), end


_ARGUMENTS: Final = ("parameters", "arguments")
_KEYS: Final = frozenset({"type", "name", "id", *_ARGUMENTS})
_FIRST_KEY: Final = re.compile(r'\{\s*(?:"([^"\\]*)("?))?')


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
class NamedCalls(MarkedFormat):
    """A name, a separator and a JSON object. `opening` begins the answer's calls, or each of them."""

    head: re.Pattern[str] = re.compile("")
    """Up to the object, with the groups `name`, and `id` where the model writes one."""
    ends: tuple[str, ...] = ()
    """Markers after the object, in order; those before the last may be absent."""

    def parse_unmarked(self, text: str, preceding: Preceding) -> Parsed:
        if preceding != "call" or not self.end:
            raise MalformedCall("the first call begins with a marker for all")
        return Parsed(0, *self.parse_call(text, 0, None))

    def parse_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        start = skip_space(text, start)
        if (found := self.head.match(text, start)) is None:
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
class Mistral(NamedCalls):
    """A list of calls, or each as `name[ARGS]{...}`. Ids have nine letters and digits: in the list, or after
    `[CALL_ID]`."""

    def parse_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
        if text.startswith("[", start := skip_space(text, start)):
            return JsonCalls("", opening=self.opening, short_ids=True).parse_call(text, start, tools)
        return NamedCalls.parse_call(self, text, start, tools)


@dataclass(frozen=True, slots=True)
class Harmony(CallFormat):
    """gpt-oss: messages in channels, a call as `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>`
    and a JSON object, or with the recipient first, right after the prompt. Headers of other messages are dropped."""

    def parse(self, text: str, preceding: Preceding, final: bool, tools: Tools = None) -> Parsed:
        position = 0
        while (place := self._header(text, position, preceding)) is not None:
            found = _CHANNEL.match(text, place)
            if found is None:
                unfinished = "<|message|>" not in text[place:] and len(text) - place < _MAX_HEADER
                if unfinished and not final:
                    return Parsed(place)
            elif found["name"] is None:
                return Parsed(place, (), found.end())
            else:
                try:
                    end = value_end(text, found.end())
                    call = ParsedToolCall(found["name"], text[found.end() : end])
                    return Parsed(place, (call,), end)
                except IncompleteCall:
                    if not final:
                        return Parsed(place)
                except MalformedCall:
                    pass
            position = place + 1
        tail = 0 if final else max(partial_marker_length(text[position:], marker) for marker in _HEADERS)
        if not final and preceding != "content" and _RECIPIENT.startswith(text):
            tail = len(text)
        return Parsed(len(text) - tail)

    def _header(self, text: str, start: int, preceding: Preceding) -> int | None:
        """Where a message's header begins."""
        if start == 0 and preceding != "content" and text.startswith((_RECIPIENT, _RECIPIENT.strip())):
            return 0
        return min((place for marker in _HEADERS if (place := text.find(marker, start)) >= 0), default=None)


_RECIPIENT: Final = " to=functions."
_HEADERS: Final = ("<|end|>", "<|start|>", "<|channel|>")
_MAX_HEADER: Final = 200
_CHANNEL: Final = re.compile(
    r"(?:<\|end\|>)?\s*(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?(?: ?to=functions\.(?P<name>[\w.\-]+))?\s*"
    r"(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:json)?\s*<\|message\|>\s*"
)


@dataclass(frozen=True, slots=True)
class Gemma(MarkedFormat):
    """Gemma 4: `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:1}<tool_call|>`."""

    def write_arguments(self, lark: LarkGrammar, schema: object, layout: object) -> str | None:
        return None  # No JSON, and no grammar of its own yet.

    def parse_call(self, text: str, start: int, tools: Tools) -> tuple[tuple[ParsedToolCall, ...], int]:
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


_GEMMA_CALL: Final = re.compile(
    r'\s*call:(?P<name>[\w.\-]+)(?P<arguments>\{(?:<\|"\|>.*?<\|"\|>|(?!<tool_call\|>|<\|"\|>).)*\})\s*<tool_call\|>',
    re.DOTALL,
)
_GEMMA_TOKEN: Final = re.compile(r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<key>[^\s{}\[\],:"<]+)(?=\s*:)', re.DOTALL)


def _gemma_json(found: re.Match[str]) -> str:
    return json.dumps(found["key"] if found["text"] is None else found["text"], ensure_ascii=False)
