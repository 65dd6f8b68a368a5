"""Tool-call format declared by a tokenizer's `response_template`, parsed by transformers itself.

A declared template takes precedence over detection. It is used only for where a call begins and ends and what it says;
the rest of an answer is parsed as usual. transformers returns values, so the arguments are JSON in our own spelling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from agentlightning.chat.lark_grammar import LarkGrammar
from agentlightning.chat.tool_calls.format import (
    CallFormat,
    Layout,
    MalformedCall,
    Parsed,
    ParsedToolCall,
    Preceding,
    Tools,
)
from agentlightning.chat.tool_calls.partial_json import is_utf8

FIELD: Final = "tool_calls"
_FAILURES: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
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

    def write_arguments(self, lark: LarkGrammar, schema: Mapping[str, Any], layout: Layout) -> str | None:
        return None  # The end marker ends a call even inside a JSON string, so no arguments can be guaranteed.

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
