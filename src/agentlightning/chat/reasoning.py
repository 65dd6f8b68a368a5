"""Separates a model's reasoning from its answer, by the markers that its own template writes.

A template that knows `reasoning_content` shows how the model marks a thought: we let it write one and look. A template
that knows none has no markers, and then nothing is separated.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from agentlightning.chat.base import ChatFormat, Message, ThoughtMarkers
from agentlightning.errors import ConfigError

_PROBE: Final = "agentlightning probe"
_TAG: Final = r"(<[^<>]+>|\[[^\[\]]+\])"
_BEFORE: Final = re.compile(_TAG + r"\s*\Z")
_AFTER: Final = re.compile(r"\A\s*" + _TAG)


@lru_cache(maxsize=64)
def find_reasoning_markers(chat: ChatFormat) -> ThoughtMarkers | None:
    """The reasoning markers of a chat template; None if it has none."""
    question: Message = {"role": "user", "content": "?"}
    answer: Message = {"role": "assistant", "content": "!", "reasoning_content": _PROBE}
    try:
        text = chat.render([question, answer], add_generation_prompt=False)
        opening = chat.render([question])
    except ConfigError:
        return None
    before, found, after = text.partition(_PROBE)
    start, end = _BEFORE.search(before), _AFTER.search(after)
    # Only a pair of tags: some templates render reasoning as a message of its own.
    if not found or not start or not end or end[1] != f"{start[1][0]}/{start[1][1:]}":
        return None
    return ThoughtMarkers(start[1], end[1], opening.rstrip().endswith(start[1]))


def strip_reasoning(markers: ThoughtMarkers | None, text: str) -> str:
    """The text of an answer without the reasoning it may begin with."""
    begins = text.lstrip()
    if markers is None or not begins.startswith(markers.start):
        return text
    _, found, rest = begins.partition(markers.end)
    return rest.lstrip() if found else text


def strip_opening_marker(markers: ThoughtMarkers | None, text: str) -> str:
    """A prompt without the reasoning marker that the template opens for the answer."""
    return text[: text.rindex(markers.start)] if markers and markers.opened and markers.start in text else text
