"""Detection of a template's tool-call layout from probes: a rendered turn with one call, and one with two.

The chat format renders the probes. A layout counts only if the format parses calls written with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from agentlightning.chat.tool_calls.format import (
    ID,
    CallFormat,
    Layout,
    Parsed,
    ParsedMessage,
    ParsedToolCall,
    Preceding,
    Tools,
)

# -- reader ----------------------------------------------------------------------------------------------------------

# Incremental parsing of an answer into content and tool calls, for any tool-call format.


class CallReader:
    """Incremental parser of content and tool calls; whitespace next to a call is dropped."""

    def __init__(self, format: CallFormat, tools: Tools = None) -> None:
        self._format = format
        self._tools = tools
        self._pending = ""
        self._preceding: Preceding = "start"
        self._ended = False
        """No further call is parsed."""

    def feed(self, text: str) -> list[str | ParsedToolCall]:
        """The content and calls that have become certain."""
        self._pending += text
        return self._take(final=False)

    def finish(self) -> list[str | ParsedToolCall]:
        """The rest."""
        return self._take(final=True)

    def _take(self, final: bool) -> list[str | ParsedToolCall]:
        pieces: list[str | ParsedToolCall] = []
        while (parsed := self._parse(final)).end:
            pieces += [*self._content(self._pending[: parsed.content].rstrip()), *parsed.calls]
            self._pending = self._pending[parsed.end :]
            self._preceding = "call"
            self._ended |= bool(parsed.calls) and not self._format.parallel
        certain = self._pending[: parsed.content]
        certain = certain if final else certain.rstrip()
        self._pending = self._pending[len(certain) :]
        return pieces + self._content(certain)

    def _parse(self, final: bool) -> Parsed:
        if self._preceding == "call":
            self._pending, end = self._pending.lstrip(), self._format.end
            if end and self._pending.startswith(end):
                return Parsed(0, (), len(end))
            if end.startswith(self._pending) and not final:
                return Parsed(0)
        if self._ended:
            return Parsed(len(self._pending))
        return self._format.parse(self._pending, self._preceding, final, self._tools)

    def _content(self, text: str) -> list[str | ParsedToolCall]:
        if text:
            self._preceding = "content"
        return [text] if text else []


def parse_answer(format: CallFormat, text: str, tools: Tools = None) -> ParsedMessage:
    """Content and tool calls of a complete answer."""
    reader = CallReader(format, tools)
    pieces = reader.feed(text) + reader.finish()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls = tuple(piece for piece in pieces if isinstance(piece, ParsedToolCall))
    return ParsedMessage(content or None if calls else content, calls)


NAME: Final = "probe"
"""Name of the probe tool."""
KEY: Final = "agentlightning_probe"
ARGUMENTS: Final[dict[str, Any]] = {KEY: NAME}
"""Arguments of the probe calls."""
IDS: Final = ("callprobe", "callother")

_ARGUMENTS: Final = (
    re.compile(rf'\{{\s*"{KEY}"\s*:\s*"{NAME}"\s*\}}'),
    re.compile(
        rf'\s*<(?:parameter=|parameter name="|arg_key>){KEY}(?:"?>|</arg_key>\s*<arg_value>)'
        rf"\n?{NAME}\n?</(?:parameter|arg_value)>"
    ),
    re.compile(rf"""{KEY}=(["']){NAME}\1"""),
)


def probe_layout(format: CallFormat, one: str, two: str, ends: Iterable[str]) -> Layout | None:
    """The layout, from what the template writes for one and for two calls ("" if it refuses) and the texts that may end
    a turn."""
    ends = [*ends]
    layout = _first_call(_call_text(format, one, ends))
    if layout is None or not _parses(format, layout, 1):
        return None
    first = _first_call(_call_text(format, two, ends)) if format.parallel else None
    second = _first_call(first.closing) if first else None
    if first is None or second is None or replace(layout, closing=first.closing) != first:
        return layout
    several = replace(layout, between=second.opening)
    return several if replace(layout, opening=second.opening) == second and _parses(format, several, 2) else layout


def _call_text(format: CallFormat, text: str, ends: list[str]) -> str:
    """The calls of a turn, without the text around them."""
    for end in ends:
        text = text.partition(end)[0]
    text = text.strip()
    parsed = format.parse(text, "start", True)
    return text[parsed.content :] if parsed.calls else ""


def _first_call(text: str) -> Layout | None:
    """The texts around the first call; what follows it is the closing."""
    for name in IDS:
        text = text.replace(name, ID)
    found = next(filter(None, (pattern.search(text) for pattern in _ARGUMENTS)), None)
    if found is None or (place := text.find(NAME, 0, found.start())) < 0:
        return None
    return Layout(text[:place], text[place + len(NAME) : found.start()], text[found.end() :], None, found[0])


def _parses(format: CallFormat, layout: Layout, count: int) -> bool:
    message = parse_answer(format, render_calls(layout, [NAME] * count, layout.probed))
    return not message.content and [call.name for call in message.tool_calls] == [NAME] * count


def render_calls(layout: Layout, names: Iterable[str], arguments: str) -> str:
    """The text of calls of these tools, each with these arguments."""
    calls = (layout.between or "").join(f"{name}{layout.middle}{arguments}" for name in names)
    return f"{layout.opening}{calls}{layout.closing}".replace(ID, IDS[0])
