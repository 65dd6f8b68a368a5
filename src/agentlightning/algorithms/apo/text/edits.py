"""Bounded edits of texts: lines that are added, deleted or replaced, as the editor writes them in JSON.

    {"edits": [{"op": "add", "resource": "prompt", "after": 3, "text": "- Give the unit."},
               {"op": "delete", "resource": "prompt", "line": 5},
               {"op": "replace", "resource": "prompt", "line": 1, "text": "You are a clerk."}]}

Lines count from 1, as the editor was shown them; `after` 0 adds before the first. All numbers are those of the text
before any edit. Small steps keep what works (SkillOpt, arXiv:2605.23904, bounds the edits of a step in the same way).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agentlightning.algorithms.apo.text.candidate import Candidate


class ReplyError(ValueError):
    """A reply of the critic or the editor that cannot be used. `reason` is what it is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Edit(BaseModel):
    """One change of one line."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    op: Literal["add", "delete", "replace"]
    resource: str = ""
    """Empty: the only one there is."""
    line: int = 0
    after: int = -1
    """Of "add": the line it follows; -1: the last one."""
    text: str = ""

    def __str__(self) -> str:
        return {
            "add": f"add {self.text!r}",
            "delete": f"delete line {self.line}",
            "replace": f"replace line {self.line} by {self.text!r}",
        }[self.op]


def numbered(text: str) -> str:
    """A text as the editor sees it.

    >>> print(numbered("Be brief.\\nBe kind."))
    [1] Be brief.
    [2] Be kind.
    """
    return "\n".join(f"[{number}] {line}" for number, line in enumerate(text.splitlines(), 1))


def read_edits(reply: str, max_edits: int, max_chars: int) -> tuple[list[Edit], int]:
    """The edits in an editor's reply, and how many beyond `max_edits` were left out. Raises ReplyError."""
    if not reply.strip():
        raise ReplyError("editor_empty", "the editor's reply is empty")
    found: Any = _json_in(reply)
    listed = found.get("edits") if isinstance(found, dict) else found
    if not isinstance(listed, list):
        raise ReplyError("editor_nonsense", f"the editor's reply holds no list of edits: {reply[:200]!r}")
    try:
        edits = [Edit.model_validate(each) for each in listed]
    except ValidationError as error:
        first = error.errors()[0]
        raise ReplyError("editor_nonsense", f"an edit cannot be read: {first['loc']}: {first['msg']}") from error
    longest = max((len(edit.text) for edit in edits), default=0)
    if longest > max_chars:
        raise ReplyError(
            "editor_over_long", f"an edit of {longest} characters is longer than max_edit_chars={max_chars}"
        )
    return edits[:max_edits], max(0, len(edits) - max_edits)


def apply_edits(candidate: Candidate, edits: Sequence[Edit]) -> Candidate:
    """The candidate with these edits. A line that is there already is not added again. Raises ReplyError for a resource
    or a line that does not exist."""
    texts: dict[str, str] = dict(candidate.texts)
    by_resource: dict[str, list[Edit]] = {}
    for edit in edits:
        name = edit.resource or (next(iter(texts)) if len(texts) == 1 else "")
        if name not in texts:
            raise ReplyError("edit_unknown_resource", f"an edit changes {name!r}; there are {', '.join(texts)}")
        by_resource.setdefault(name, []).append(edit)
    for name, own in by_resource.items():
        texts[name] = _edited(texts[name], own)
    return Candidate(texts)


def _edited(text: str, edits: Iterable[Edit]) -> str:
    lines: list[str] = text.splitlines()
    kept: list[str | None] = list(lines)
    added: dict[int, list[str]] = {}
    present = {" ".join(line.split()) for line in lines}
    for edit in edits:
        place = (len(lines) if edit.after < 0 else edit.after) if edit.op == "add" else edit.line
        if not (0 if edit.op == "add" else 1) <= place <= len(lines):
            raise ReplyError("edit_unknown_line", f"an edit names line {place} of a text of {len(lines)}")
        if edit.op == "add":
            if " ".join(edit.text.split()) not in present:
                added.setdefault(place, []).append(edit.text)
        else:
            kept[place - 1] = edit.text if edit.op == "replace" else None
    result = list(added.get(0, []))
    for number, line in enumerate(kept, 1):
        result += [] if line is None else [line]
        result += added.get(number, [])
    return "\n".join(result) + ("\n" if text.endswith("\n") and result else "")


def _json_in(reply: str) -> Any:
    """The first JSON object or array in a reply, which models like to wrap in words and fences."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"[{\[]", reply):
        try:
            return decoder.raw_decode(reply, start.start())[0]
        except ValueError:
            continue
    raise ReplyError("editor_nonsense", f"the editor's reply holds no JSON: {reply[:200]!r}")
