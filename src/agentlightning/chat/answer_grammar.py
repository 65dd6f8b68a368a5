"""Grammars for constrained answers: an optional thought, then tool calls, JSON or free text.

A grammar is written in the markers and the tool-call format of the model. The gateway requests one when an answer must
have a certain shape, and an engine compiles it (`SamplingParams.grammar`). The model's tool-call format parses every
answer that a grammar allows into the intended calls; where that cannot be guaranteed, there is no grammar.

A required call comes at once, or right after the thought of a reasoning model: with free text before it, a model that
would not call writes forever. Where calls are optional, text is free up to the start of a call, and calls end the
answer. In formats whose calls have no marker (Llama 3, Python), an answer that begins like a call is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from agentlightning.chat.base import ChatFormat, ThoughtMarkers
from agentlightning.chat.lark_grammar import ANY, LarkGrammar, beginning, containing, optional
from agentlightning.chat.tool_calls.format import ID, CallFormat, Layout, NoGrammar, parse_answer, render_calls

_GAP_PATTERN = r"\s{1,4}"
"""Whitespace after a thought."""
_ID = "[0-9A-Za-z]{9}"
_OPTIONAL_ID = re.compile(rf'(,\s*"id":\s*"{ID}"|\[CALL_ID\]{ID})')


_ANNOTATIONS = ("title", "description", "$comment")
_VALUE_KEYWORDS = ("enum", "const")
"""Keywords whose content is not a schema."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The required shape of an answer."""

    tools: tuple[tuple[str, str], ...] = ()
    """The tools that may be called: (name, JSON schema of the arguments)."""
    needs_call: bool = False
    one_call: bool = False
    """At most one call."""
    content: str | None = None
    """JSON schema of an answer without calls; None: any text."""
    thought: ThoughtMarkers | None = None


@lru_cache(maxsize=256)
def answer_grammar(chat: ChatFormat, shape: AnswerShape) -> str | None:
    """The grammar of a shape; None if it cannot be enforced in the model's format."""
    if chat.markers is None:
        return None
    lark = LarkGrammar(chat.markers)
    tools = tuple((name, _without_descriptions(schema)) for name, schema in shape.tools)
    content = None if shape.content is None else _without_descriptions(shape.content)
    if any(lark.contains_marker(text) for tool in tools for text in tool) or lark.contains_marker(content or ""):
        return None  # Text that looks like a marker cannot be written in ordinary tokens.
    shape = replace(shape, tools=tools, content=content)
    try:
        body = _body(lark, chat.tool_calls, shape)
    except NoGrammar:
        return None
    end = f"<[{','.join(map(str, sorted(chat.eos_token_ids)))}]>"
    return lark.render(f"{_thought(lark, shape.thought)} {body} {optional(end)}")


def _thought(lark: LarkGrammar, thought: ThoughtMarkers | None) -> str:
    if thought is None:
        return ""
    rest = f"{_up_to(lark, thought.end)} {optional(lark.pattern(_GAP_PATTERN))}"
    return rest if thought.opened else optional(f"{lark.literal(thought.start)} {rest}")


def _up_to(lark: LarkGrammar, end: str, without: Sequence[str] = ()) -> str:
    """Text up to and including a marker."""
    if end not in lark.markers:
        return lark.until(end, without)
    return f"{lark.pattern(ANY, [containing(end), *without])} {lark.literal(end)}"


def _body(lark: LarkGrammar, format: CallFormat, shape: AnswerShape) -> str:
    content = None if shape.content is None else lark.json(json.loads(shape.content))
    if not shape.tools and content is not None:
        return content
    layout = format.layout
    if layout is None or not shape.tools:
        raise NoGrammar
    calls = _calls(lark, format, layout, shape)
    opening = lark.literal(layout.opening)
    if shape.needs_call:
        return f"{opening} {calls}"
    if content is not None:
        if not layout.opening.startswith(_call_marker(lark, format, layout)):
            raise NoGrammar  # JSON that begins like a call would be parsed as one.
        return lark.rule(f"{opening} {calls}", content)
    return _optional_calls(lark, format, layout, calls, shape.thought)


def _optional_calls(
    lark: LarkGrammar, format: CallFormat, layout: Layout, calls: str, thought: ThoughtMarkers | None
) -> str:
    """Free text, optionally followed by calls."""
    marker = _call_marker(lark, format, layout)
    # A marker spelled in ordinary text is parsed as the marker too.
    without = [beginning(thought.start)] if thought and not thought.opened else []
    if not layout.opening.startswith(marker):
        text = lark.pattern(ANY, [*without, beginning(layout.opening[0]), containing(marker)])
        return lark.rule(f"{lark.literal(layout.opening)} {calls}", text)
    text = lark.pattern(ANY, [*without, containing(marker)])
    rest = lark.literal(layout.opening.removeprefix(marker))
    return lark.rule(text, f"{_up_to(lark, marker, without)} {rest} {calls}")


def _call_marker(lark: LarkGrammar, format: CallFormat, layout: Layout) -> str:
    """The marker that begins calls, which some models omit."""
    if format.opening:
        return format.opening
    for marker in lark.markers:
        if layout.opening.startswith(marker):
            return marker
    raise NoGrammar


def _calls(lark: LarkGrammar, format: CallFormat, layout: Layout, shape: AnswerShape) -> str:
    """The calls after the opening."""
    call = lark.rule(*(_call(lark, format, layout, name, schema) for name, schema in shape.tools))
    more = ""
    if layout.between is not None and format.parallel and not shape.one_call:
        more = f"({_with_ids(lark, layout.between)} {call})*"
    return f"{call} {more} {_with_ids(lark, layout.closing)}"


def _call(lark: LarkGrammar, format: CallFormat, layout: Layout, name: str, schema: str) -> str:
    spelled = json.dumps(name, ensure_ascii=False)[1:-1] if layout.opening.endswith('"') else name
    parsed = parse_answer(format, render_calls(layout, [spelled], layout.probed)).tool_calls
    if [call.name for call in parsed] != [name]:
        raise NoGrammar
    arguments = format.write_arguments(lark, _of_object(json.loads(schema)), layout)
    return f"{_with_ids(lark, spelled + layout.middle)} {arguments}"


def _without_descriptions(schema: str) -> str:
    return json.dumps(_strip_annotations(json.loads(schema)), ensure_ascii=False)


def _strip_annotations(schema: Any) -> Any:
    """A schema without annotations, which may be long and may look like markers."""
    if isinstance(schema, list):
        return [_strip_annotations(each) for each in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    known = cast("dict[str, Any]", schema)
    kept = {key: value for key, value in known.items() if not (key in _ANNOTATIONS and isinstance(value, str))}
    return {key: value if key in _VALUE_KEYWORDS else _strip_annotations(value) for key, value in kept.items()}


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as that of an object. It allows no unnamed properties: otherwise a model may write one after
    another."""
    open_ = schema.keys() & {"additionalProperties", "unevaluatedProperties", "patternProperties", "$ref", "allOf"}
    properties, required = schema.get("properties"), schema.get("required") or []
    closed = not open_ and isinstance(properties, dict) and all(name in properties for name in required)
    return {"type": "object", **schema} | ({"additionalProperties": False} if closed else {})


def _with_ids(lark: LarkGrammar, text: str) -> str:
    """A text of the layout, in which the model may write ids where the template does."""
    parts: list[str] = []
    for part in _OPTIONAL_ID.split(text):
        name = f" {lark.pattern(_ID)} " if ID in part else ""
        written = name.join(lark.literal(piece) for piece in part.split(ID))
        parts.append(optional(written) if _OPTIONAL_ID.fullmatch(part) else written)
    return " ".join(part for part in parts if part != '""')
