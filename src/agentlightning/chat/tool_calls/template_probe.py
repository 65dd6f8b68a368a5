"""How a template writes tool calls, found out from what it wrote: a turn of one call, and one of two.

Called by a chat format, which has its template write them. What is found is tried: the format must read it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.chat.tool_calls.format import ID, CallFormat, Layout, read_whole

NAME: Final = "probe"
"""Of the tool that the probes call."""
KEY: Final = "agentlightning_probe"
ARGUMENTS: Final[dict[str, Any]] = {KEY: NAME}
"""What they call it with."""
IDS: Final = ("callprobe", "callother")

_ARGUMENTS: Final = (
    re.compile(rf'\{{\s*"{KEY}"\s*:\s*"{NAME}"\s*\}}'),
    re.compile(rf"\s*<parameter={KEY}>\n?{NAME}\n?</parameter>"),
    re.compile(rf"""{KEY}=(["']){NAME}\1"""),
)


@dataclass(frozen=True, slots=True)
class _Call:
    before: str
    middle: str
    arguments: str
    after: str


def find_layout(format: CallFormat, one: str, two: str, ends: Iterable[str]) -> Layout | None:
    """`one` and `two`: what the template writes for so many calls, "" where it refuses. `ends`: what may end a turn."""
    ends = [*ends]
    found = _call(_calls(format, one, ends))
    if found is None:
        return None
    layout = Layout(found.before, found.middle, found.after, None, found.arguments)
    if not _reads(format, layout, 1):
        return None
    second = _second(format, two, ends, found) if format.parallel else None
    several = Layout(found.before, found.middle, found.after, second, found.arguments)
    return several if second is not None and _reads(format, several, 2) else layout


def _second(format: CallFormat, two: str, ends: list[str], first: _Call) -> str | None:
    """What stands between two calls."""
    found = _call(_calls(format, two, ends))
    second = _call(found.after) if found else None
    if found is None or second is None or (found.before, found.middle) != (first.before, first.middle):
        return None
    return second.before if (second.middle, second.after) == (first.middle, first.after) else None


def _calls(format: CallFormat, text: str, ends: list[str]) -> str:
    """The calls of a turn, without what stands around them."""
    for end in ends:
        text = text.partition(end)[0]
    text = text.strip()
    reading = format.read(text, "start", True)
    return text[reading.content :] if reading.calls else ""


def _call(text: str) -> _Call | None:
    for name in IDS:
        text = text.replace(name, ID)
    found = next(filter(None, (pattern.search(text) for pattern in _ARGUMENTS)), None)
    if found is None or (place := text.find(NAME, 0, found.start())) < 0:
        return None
    return _Call(text[:place], text[place + len(NAME) : found.start()], found[0], text[found.end() :])


def _reads(format: CallFormat, layout: Layout, count: int) -> bool:
    message = read_whole(format, written(layout, [NAME] * count, layout.probed))
    return not message.content and [call.name for call in message.tool_calls] == [NAME] * count


def written(layout: Layout, names: Iterable[str], arguments: str) -> str:
    """Calls of these tools, each with these arguments."""
    calls = (layout.between or "").join(f"{name}{layout.middle}{arguments}" for name in names)
    return f"{layout.opening}{calls}{layout.closing}".replace(ID, IDS[0])
