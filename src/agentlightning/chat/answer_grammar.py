"""The grammar of an answer: a thought perhaps, then calls of tools, JSON, or free text.

Responsible for what an answer may be in the words of its model: its markers, its way to write calls. Called by the
gateway where an answer is to be held to what was asked for; an engine compiles it (`SamplingParams.grammar`). What it
allows, the model's call format reads back as the calls it is; where that cannot be promised there is no grammar.

A call that is asked for comes at once, after the thought of a model that thinks: left free to write first, a model
that would not call writes for ever. Where a call may come or not, text is free up to what begins a call, and calls end
the answer. In formats whose calls have no marker (Llama 3, Python), an answer that begins as they do is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, cast

from agentlightning.chat.base import ChatFormat
from agentlightning.chat.lark import ANY, Lark, beginning, containing, optional
from agentlightning.chat.tool_calls.format import ID, CallFormat, Layout, MarkedFormat, read_whole
from agentlightning.chat.tool_calls.template_probe import written

_GAP: Final = r"\s{1,4}"
"""Whitespace after a thought."""
_ID: Final = "[0-9A-Za-z]{9}"
_OPTIONAL_ID: Final = re.compile(rf'(,\s*"id":\s*"{ID}"|\[CALL_ID\]{ID})')


_FOR_PEOPLE: Final = ("title", "description", "$comment")
_VALUES: Final = ("enum", "const")
"""What stands under these is no schema."""


@dataclass(frozen=True, slots=True)
class Thought:
    """How a model marks what it thinks before it answers."""

    start: str
    end: str
    opened: bool
    """The prompt has begun it."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What an answer is to be."""

    tools: tuple[tuple[str, str], ...] = ()
    """(name, JSON schema of its arguments): those that may be called."""
    needs_call: bool = False
    one_call: bool = False
    """At most one."""
    content: str | None = None
    """The JSON schema of an answer that calls nothing; None: any text."""
    thought: Thought | None = None


@lru_cache(maxsize=256)
def answer_grammar(chat: ChatFormat, outline: Outline) -> str | None:
    """The grammar; None where the model's format cannot hold an answer to it."""
    if chat.markers is None:
        return None
    lark = Lark(chat.markers)
    tools = tuple((name, _told(schema)) for name, schema in outline.tools)
    content = None if outline.content is None else _told(outline.content)
    if any(lark.marked(text) for tool in tools for text in tool) or lark.marked(content or ""):
        return None  # A text that is spelled like a marker cannot be written in tokens of text.
    outline = replace(outline, tools=tools, content=content)
    if (body := _body(lark, chat.tool_calls, outline)) is None:
        return None
    end = f"<[{','.join(map(str, sorted(chat.eos_token_ids)))}]>"
    return lark.whole(f"{_thought(lark, outline.thought)} {body} {optional(end)}")


def _thought(lark: Lark, thought: Thought | None) -> str:
    if thought is None:
        return ""
    thinks = f"{_to(lark, thought.end)} {optional(lark.pattern(_GAP))}"
    return thinks if thought.opened else optional(f"{lark.literal(thought.start)} {thinks}")


def _to(lark: Lark, end: str, without: Sequence[str] = ()) -> str:
    """Text up to a marker, and that."""
    if end not in lark.markers:
        return lark.until(end, without)
    return f"{lark.pattern(ANY, [containing(end), *without])} {lark.literal(end)}"


def _body(lark: Lark, format: CallFormat, outline: Outline) -> str | None:
    content = None if outline.content is None else lark.json(json.loads(outline.content))
    if not outline.tools:
        return content
    layout = format.layout
    if layout is None or (calls := _calls(lark, format, layout, outline)) is None:
        return None
    opening = lark.literal(layout.opening)
    if outline.needs_call:
        return f"{opening} {calls}"
    if content is not None:
        # JSON that begins like a call would be read as one.
        marker = _marker(lark, format, layout)
        return lark.rule(f"{opening} {calls}", content) if marker and layout.opening.startswith(marker) else None
    return _free(lark, format, layout, calls, outline.thought)


def _free(lark: Lark, format: CallFormat, layout: Layout, calls: str, thought: Thought | None) -> str | None:
    """Text, and calls where it comes to one."""
    if (marker := _marker(lark, format, layout)) is None:
        return None
    # A marker spelled in text is read as the marker too.
    without = [beginning(thought.start)] if thought and not thought.opened else []
    if not layout.opening.startswith(marker):
        text = lark.pattern(ANY, [*without, beginning(layout.opening[0]), containing(marker)])
        return lark.rule(f"{lark.literal(layout.opening)} {calls}", text)
    text = lark.pattern(ANY, [*without, containing(marker)])
    rest = lark.literal(layout.opening.removeprefix(marker))
    return lark.rule(text, f"{_to(lark, marker, without)} {rest} {calls}")


def _marker(lark: Lark, format: CallFormat, layout: Layout) -> str | None:
    """What begins calls, though some models write them without it."""
    if isinstance(format, MarkedFormat):
        return format.opening
    return next((marker for marker in lark.markers if layout.opening.startswith(marker)), None)


def _calls(lark: Lark, format: CallFormat, layout: Layout, outline: Outline) -> str | None:
    """What follows the opening."""
    choices = [_call(lark, format, layout, name, schema) for name, schema in outline.tools]
    known = [choice for choice in choices if choice is not None]
    if len(known) < len(choices):
        return None
    call = lark.rule(*known)
    more = ""
    if layout.between is not None and format.parallel and not outline.one_call:
        more = f"({_with_ids(lark, layout.between)} {call})*"
    return f"{call} {more} {_with_ids(lark, layout.closing)}"


def _call(lark: Lark, format: CallFormat, layout: Layout, name: str, schema: str) -> str | None:
    spelled = json.dumps(name, ensure_ascii=False)[1:-1] if layout.opening.endswith('"') else name
    read = read_whole(format, written(layout, [spelled], layout.probed)).tool_calls
    if [call.name for call in read] != [name]:
        return None
    if (arguments := format.write_arguments(lark, _of_object(json.loads(schema)), layout)) is None:
        return None
    return f"{_with_ids(lark, spelled + layout.middle)} {arguments}"


def _told(schema: str) -> str:
    return json.dumps(_plain(json.loads(schema)), ensure_ascii=False)


def _plain(schema: Any) -> Any:
    """A schema without what is written for people: it may be long, and spelled like a marker."""
    if isinstance(schema, list):
        return [_plain(each) for each in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    known = cast("dict[str, Any]", schema)
    told = {key: value for key, value in known.items() if not (key in _FOR_PEOPLE and isinstance(value, str))}
    return {key: value if key in _VALUES else _plain(value) for key, value in told.items()}


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object, which arguments are. Without what nobody asked for: a model may else write one more
    property after the other."""
    open_ = schema.keys() & {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "allOf"}
    properties, required = schema.get("properties"), schema.get("required") or []
    closed = not open_ and isinstance(properties, dict) and all(name in properties for name in required)
    return {"type": "object", **schema} | ({"additionalProperties": False} if closed else {})


def _with_ids(lark: Lark, text: str) -> str:
    """A text of the layout; the model may write an id where the template writes one."""
    parts: list[str] = []
    for part in _OPTIONAL_ID.split(text):
        name = f" {lark.pattern(_ID)} " if ID in part else ""
        written = name.join(lark.literal(piece) for piece in part.split(ID))
        parts.append(optional(written) if _OPTIONAL_ID.fullmatch(part) else written)
    return " ".join(part for part in parts if part != '""')
