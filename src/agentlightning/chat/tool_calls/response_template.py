"""Tool calls as a tokenizer declares them: its `response_template`, read by transformers itself.

Where a tokenizer carries one, it knows best. We ask it only where a call begins, where it ends and what it says; the
rest of an answer is read as ever. Arguments are then JSON of our spelling, since transformers gives values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from agentlightning.chat.lark import Lark
from agentlightning.chat.tool_calls.format import (
    Before,
    CallFormat,
    Layout,
    Malformed,
    ParsedToolCall,
    Reading,
    Tools,
)
from agentlightning.chat.tool_calls.partial_json import is_text

FIELD: Final = "tool_calls"
_FAILURES: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a malformed call by a template raises."""


@dataclass(frozen=True, slots=True)
class Declared(CallFormat):
    template: Any = None
    """As the tokenizer carries it."""
    opens: Any = None
    """Pattern of the `regex` module."""
    closes: Any = None
    """Likewise; None: a call ends with the answer."""

    def read(self, text: str, before: Before, whole: bool, tools: Tools = None) -> Reading:
        position = 0
        while (found := self.opens.search(text, position, partial=not whole)) is not None:
            end = None if found.partial else self._end(text, found.end(), whole)
            if end is None:
                if not whole:
                    return Reading(found.start())
            elif calls := self._calls(text[found.start() : end], tools):
                return Reading(found.start(), calls, end)
            position = max(found.end(), found.start() + 1)
        return Reading(len(text))

    def write_arguments(self, lark: Lark, schema: Mapping[str, Any], layout: Layout) -> str | None:
        return None  # What ends a call ends it within a string of JSON too, so that no arguments can be promised.

    def _end(self, text: str, start: int, whole: bool) -> int | None:
        if self.closes is None:
            return len(text) if whole else None
        found = self.closes.search(text, start)
        return found.end() if found else None

    def _calls(self, segment: str, tools: Tools) -> tuple[ParsedToolCall, ...]:
        from transformers.utils.chat_parsing import ResponseParser

        try:
            parser = ResponseParser(self.template, prefix="", tools=cast(Any, list(tools or ())))
            # The line end shows the parser that the closing marker does not go on.
            events = parser.feed(segment + "\n")
            closed = [event for event in events if event["type"] == "region_close" and event["field"] == FIELD]
            read = [event["value"] for event in closed]
            values = [value for part in read for value in (part if isinstance(part, list) else [part])]
            return tuple(_call(value) for value in values)
        except (*_FAILURES, Malformed):
            return ()


def _call(value: Any) -> ParsedToolCall:
    function = value.get("function", value)
    name, arguments = function["name"], function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not is_text(name) or not name or not is_text(written):
        raise Malformed("a call has a name, and arguments that are text")
    return ParsedToolCall(name, written)


def declared(tokenizer: Any) -> CallFormat | None:
    """The format a tokenizer declares; None where it declares none."""
    template = getattr(tokenizer, "response_template", None)
    if not template:
        return None
    try:
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:  # transformers moves these modules about.
        return None
    field = load_response_template(template).fields.get(FIELD)
    if field is None or field.open_re is None:
        return None
    return Declared("declared", template=template, opens=field.open_re, closes=field.close_re)
