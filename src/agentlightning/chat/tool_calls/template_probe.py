"""Detection of a template's tool-call layout from probes: a rendered turn with one call, and one with two.

The chat format renders the probes. A layout counts only if the format parses calls written with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.chat.tool_calls.format import ID, CallFormat, Layout
from agentlightning.chat.tool_calls.reader import parse_answer

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


@dataclass(frozen=True, slots=True)
class _Call:
    before: str
    middle: str
    arguments: str
    after: str


def probe_layout(format: CallFormat, one: str, two: str, ends: Iterable[str]) -> Layout | None:
    """The layout, from what the template writes for one and for two calls ("" if it refuses) and the texts that may end
    a turn."""
    ends = [*ends]
    found = _call(_call_text(format, one, ends))
    if found is None:
        return None
    layout = Layout(found.before, found.middle, found.after, None, found.arguments)
    if not _parses(format, layout, 1):
        return None
    second = _second(format, two, ends, found) if format.parallel else None
    several = Layout(found.before, found.middle, found.after, second, found.arguments)
    return several if second is not None and _parses(format, several, 2) else layout


def _second(format: CallFormat, two: str, ends: list[str], first: _Call) -> str | None:
    """The text between two calls."""
    found = _call(_call_text(format, two, ends))
    second = _call(found.after) if found else None
    if found is None or second is None or (found.before, found.middle) != (first.before, first.middle):
        return None
    return second.before if (second.middle, second.after) == (first.middle, first.after) else None


def _call_text(format: CallFormat, text: str, ends: list[str]) -> str:
    """The calls of a turn, without the text around them."""
    for end in ends:
        text = text.partition(end)[0]
    text = text.strip()
    parsed = format.parse(text, "start", True)
    return text[parsed.content :] if parsed.calls else ""


def _call(text: str) -> _Call | None:
    for name in IDS:
        text = text.replace(name, ID)
    found = next(filter(None, (pattern.search(text) for pattern in _ARGUMENTS)), None)
    if found is None or (place := text.find(NAME, 0, found.start())) < 0:
        return None
    return _Call(text[:place], text[place + len(NAME) : found.start()], found[0], text[found.end() :])


def _parses(format: CallFormat, layout: Layout, count: int) -> bool:
    message = parse_answer(format, render_calls(layout, [NAME] * count, layout.probed))
    return not message.content and [call.name for call in message.tool_calls] == [NAME] * count


def render_calls(layout: Layout, names: Iterable[str], arguments: str) -> str:
    """The text of calls of these tools, each with these arguments."""
    calls = (layout.between or "").join(f"{name}{layout.middle}{arguments}" for name in names)
    return f"{layout.opening}{calls}{layout.closing}".replace(ID, IDS[0])
