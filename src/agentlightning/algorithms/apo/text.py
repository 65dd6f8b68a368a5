"""The texts that are searched: candidates, their edits, placeholders and playbooks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from agentlightning.resources import PromptTemplate, f_string_fields
from agentlightning.rewards.base import last_object

Texts: TypeAlias = Mapping[str, str]
"""A candidate: one text for each resource that is optimised, by the name of the resource."""


PARENT: Final = "parent"
"""In the metadata of a rollout: the `digest` of the candidate that its own was made from."""


def digest(texts: Texts) -> str:
    """The same for the same texts, in every process."""
    return hashlib.blake2b(orjson.dumps(dict(texts), option=orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()


# -- placeholders ----------------------------------------------------------------------------------------------------

# The placeholders of a template: what an edit must neither drop nor invent.


def placeholders(template: PromptTemplate) -> frozenset[str]:
    """The names that a template is filled with. Raises ValueError for a text that its engine cannot read.

    >>> sorted(placeholders(agl.PromptTemplate(template="Answer {question} in {words!r:>3} words.")))
    ['question', 'words']
    """
    if template.engine == "plain":
        return frozenset()
    if template.engine == "f-string":
        fields = [name for _, name, _, _ in f_string_fields(template.template) if name is not None]
        return frozenset(re.split(r"[.\[]", name)[0] for name in fields)
    from jinja2 import meta
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    try:
        return frozenset(meta.find_undeclared_variables(SandboxedEnvironment().parse(template.template)))
    except TemplateError as error:
        raise ValueError(str(error)) from error


def schema_violation(before: PromptTemplate, after: str) -> str | None:
    """What a new text does to the placeholders of a template, in words; None where it keeps them all.

    >>> schema_violation(agl.PromptTemplate(template="Say {word}."), "Say {sentence}.")
    'drops the placeholder word and invents sentence'
    """
    known = placeholders(before)
    try:
        found = placeholders(before.model_copy(update={"template": after}))
    except ValueError as error:
        return f"is no {before.engine} template ({error})"
    dropped, invented = sorted(known - found), sorted(found - known)
    parts = [f"drops the placeholder {', '.join(dropped)}"] if dropped else []
    parts += [f"invents {', '.join(invented)}"] if invented else []
    return " and ".join(parts) or None


# -- edits -----------------------------------------------------------------------------------------------------------

# Bounded edits of texts: lines that are added, deleted or replaced, as the editor writes them in JSON.
#
#     {"edits": [{"op": "add", "resource": "prompt", "after": 3, "text": "- Give the unit."},
#                {"op": "delete", "resource": "prompt", "line": 5},
#                {"op": "replace", "resource": "prompt", "line": 1, "text": "You are a clerk."}]}
#
# Lines count from 1, as the editor was shown them; `after` 0 adds before the first. All numbers are those of the text
# before any edit. Small steps keep what works (SkillOpt, arXiv:2605.23904, bounds the edits of a step in the same way).


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
    listed: Any = (last_object(reply, "edits") or {}).get("edits")
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


def apply_edits(texts: Texts, edits: Sequence[Edit]) -> dict[str, str]:
    """The texts with these edits. A line that is there already is not added again. Raises ReplyError for a resource or
    a line that does not exist."""
    found = dict(texts)
    only = next(iter(texts)) if len(texts) == 1 else ""
    by_resource = dict[str, list[Edit]]()  # All of a text at once: they name its lines as they were.
    for edit in edits:
        by_resource.setdefault(edit.resource or only, []).append(edit)
    for name, own in by_resource.items():
        if name not in texts:
            raise ReplyError("edit_unknown_resource", f"an edit changes {name!r}; there are {', '.join(texts)}")
        found[name] = _edited(texts[name], own)
    return found


def _edited(text: str, edits: Iterable[Edit]) -> str:
    lines = text.splitlines()
    kept: list[list[str | None]] = [[None], *([line] for line in lines)]
    """Each line, None where it was deleted, and what follows it; before the first, what is before all."""
    present = {" ".join(line.split()) for line in lines}
    for edit in edits:
        adds = edit.op == "add"
        place = (len(lines) if edit.after < 0 else edit.after) if adds else edit.line
        if not (0 if adds else 1) <= place <= len(lines):
            raise ReplyError("edit_unknown_line", f"an edit names line {place} of a text of {len(lines)}")
        if adds and " ".join(edit.text.split()) not in present:
            kept[place].append(edit.text)
        elif not adds:
            kept[place][0] = edit.text if edit.op == "replace" else None
    return joined([line for own in kept for line in own if line is not None], text)


def joined(lines: Sequence[str], before: str) -> str:
    """Lines as a text, which ends as the one `before` did."""
    return "\n".join(lines) + ("\n" if before.endswith("\n") and lines else "")


# -- playbook --------------------------------------------------------------------------------------------------------

# Playbooks: texts whose lines are items, each with counts of how often it helped and harmed.
#
# The critic names helpful and harmful items of the rollouts it reads. The editor is shown the counts, and an item that
# harmed at least `PRUNE_MARGIN` times more often than it helped is deleted. Items are told apart by their words, so an
# item that is proposed again keeps its counts and is not added twice (delta updates with deterministic merging: Agentic
# Context Engineering, arXiv:2510.04618, section 3).

PRUNE_MARGIN: Final = 3


@dataclass(slots=True)
class Playbook:
    """The counts of the items of all playbooks of a run."""

    names: Sequence[str] = ()
    """The resources that are playbooks."""
    counts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Item -> times it helped, times it harmed."""

    def count(self, texts: Texts, helpful: Sequence[int], harmful: Sequence[int]) -> None:
        """Count items by their line numbers in the playbooks among the texts. Numbers of no item are ignored."""
        for _, lines in self._own(texts):
            for place, numbers in enumerate((helpful, harmful)):
                for number in numbers:
                    if 1 <= number <= len(lines) and (item := _item(lines[number - 1])):
                        self.counts.setdefault(item, [0, 0])[place] += 1

    def notes(self, texts: Texts) -> dict[str, str]:
        """What the editor is told of the items of the playbooks."""
        found: dict[str, str] = {}
        for name, lines in self._own(texts):
            counts = [(number, *self._count(line)) for number, line in enumerate(lines, 1)]
            told = [f"Item [{n}] helped {good} and harmed {bad} times." for n, good, bad in counts if good or bad]
            found[name] = "\n".join(told)
        return found

    def pruned(self, texts: Texts) -> dict[str, str]:
        """The texts without items that harm more than they help."""
        found = dict(texts)
        for name, lines in self._own(texts):
            counts = [(line, *self._count(line)) for line in lines]
            found[name] = joined([line for line, good, bad in counts if bad - good < PRUNE_MARGIN], texts[name])
        return found

    def _own(self, texts: Texts) -> list[tuple[str, list[str]]]:
        return [(name, texts[name].splitlines()) for name in self.names if name in texts]

    def _count(self, line: str) -> Sequence[int]:
        return self.counts.get(_item(line), (0, 0))


def _item(line: str) -> str:
    """The words of an item, without its bullet."""
    return " ".join(line.lstrip("-*# \t").split()).casefold()
