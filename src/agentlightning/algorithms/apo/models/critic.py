"""The critic and the editor: what they are asked, and what their replies mean.

The critic reads failed rollouts and says what the texts lack; the editor turns that into bounded edits. A reply that is
empty, over-long, or no edit, and one that does not come, is skipped and counted by its reason; after `MAX_SKIPS` in a
row the search ends with the first of them, because nothing can be learned from such a model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agentlightning.algorithms.apo.budget import Spending
from agentlightning.algorithms.apo.models.language_model import Completion, LanguageModel, ModelError
from agentlightning.algorithms.apo.text import ReplyError, numbered
from agentlightning.algorithms.apo.trials import Outcome
from agentlightning.errors import TrainingStopped

MAX_SKIPS: Final = 8
MAX_CRITIQUE_CHARS: Final = 8000

CRITIC_ROLE: Final = (
    "You improve the texts that steer an AI agent: prompts, tool descriptions, playbooks. You are shown the texts and"
    " rollouts in which the agent earned less than it could."
)
CRITIC_TASK: Final = (
    "Find the one cause that explains most of these failures and that a change of the texts can remove. Say in at most"
    " 120 words what the texts lack or what in them misleads the agent, as general advice for tasks of this kind, not"
    " for these tasks alone."
)
COUNTERS_TASK: Final = (
    "The lines of {names} are items of a playbook. End with two lines: `HELPFUL:` and `HARMFUL:`, each followed by the"
    " numbers of the items that helped or misled the agent here."
)
EDITOR_ROLE: Final = "You edit the texts that steer an AI agent. You make small changes and keep what works."
EDITOR_TASK: Final = (
    "Carry out the advice with at most {max_edits} edits of single lines. Keep all placeholders in braces as they are,"
    ' and invent none. Reply with JSON only: {{"edits": [{{"op": "add", "resource": NAME, "after": LINE, "text":'
    ' TEXT}}, {{"op": "delete", "resource": NAME, "line": LINE}}, {{"op": "replace", "resource": NAME, "line": LINE,'
    ' "text": TEXT}}]}}. Line numbers are those shown; `after` 0 adds before the first line.'
)
_COUNTER = re.compile(r"^\W*(HELPFUL|HARMFUL)\b(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Critique:
    """What the critic says, and the items of playbooks that it counts as helpful or harmful, by line number."""

    text: str
    helpful: tuple[int, ...] = ()
    harmful: tuple[int, ...] = ()


@dataclass(slots=True)
class Writer:
    """Asks critic and editor, counts what cannot be used, and accounts for what they cost."""

    critic: LanguageModel
    editor: LanguageModel
    spending: Spending
    max_edits: int
    max_transcript_chars: int
    skips: Counter[str] = field(default_factory=Counter[str])
    """Replies that could not be used, by reason."""
    _in_a_row: Counter[str] = field(default_factory=Counter[str])
    """By part, critic or editor: its unusable replies since the last one that was of use."""
    _first: dict[str, str] = field(default_factory=dict[str, str])

    async def critique(
        self, texts: Mapping[str, str], rollouts: Sequence[Outcome], playbooks: Sequence[str] = ()
    ) -> Critique | None:
        """What the texts lack, from these rollouts. None: skipped and counted."""
        counters = [COUNTERS_TASK.format(names=", ".join(playbooks))] if playbooks else []
        shown = [show_rollout(each, number, self.max_transcript_chars) for number, each in enumerate(rollouts, 1)]
        parts = ["# Texts", show_texts(texts), "# Rollouts", *shown, "# Your task", CRITIC_TASK, *counters]
        reply = await self.ask("critic", CRITIC_ROLE, "\n\n".join(parts))
        if reply is None:
            return None
        text = reply.text.strip()
        if len(text) > MAX_CRITIQUE_CHARS or reply.truncated:
            return self.skip("critic", "critic_over_long", f"the critic wrote {len(text)} characters, or was cut off")
        if not re.search(r"\w+\W+\w+", text):
            return self.skip("critic", "critic_nonsense", f"the critic said {text[:100]!r}, which is no advice")
        self._in_a_row["critic"] = 0
        helpful, harmful = (_numbers(text, word) for word in ("HELPFUL", "HARMFUL"))
        return Critique(_COUNTER.sub("", text).strip(), helpful, harmful)

    async def edit(
        self,
        texts: Mapping[str, str],
        critique: str,
        rejected: Sequence[str] = (),
        notes: Mapping[str, str] | None = None,
    ) -> str | None:
        """The editor's reply. `rejected` are edits of these texts that did not help; `notes` follow the texts they are
        named after. None: skipped and counted."""
        earlier = ["# Edits tried before that did not help", "\n".join(f"- {each}" for each in rejected)]
        parts = ["# Texts", show_texts(texts, notes), "# Advice", critique, *(earlier if rejected else [])]
        task = EDITOR_TASK.format(max_edits=self.max_edits)
        reply = await self.ask("editor", EDITOR_ROLE, "\n\n".join([*parts, "# Your task", task]))
        return None if reply is None else reply.text

    async def ask(self, part: str, role: str, text: str) -> Completion | None:
        """A reply of the critic or the editor; None: there was none, which is counted."""
        model = self.critic if part == "critic" else self.editor
        try:
            reply = await model.complete([{"role": "system", "content": role}, {"role": "user", "content": text}])
        except ModelError as error:
            return self.skip(part, f"{part}_{error.reason}", str(error))
        self.spending.count_model(model.settings, reply.input_tokens, reply.output_tokens)
        if not reply.text.strip():
            return self.skip(part, f"{part}_empty", f"the {part}'s reply is empty")
        return reply

    def accept(self) -> None:
        """An edit could be used: the editor is of use."""
        self._in_a_row["editor"] = 0

    def refuse(self, error: ReplyError, reply: str) -> None:
        """Count a reply of the editor that cannot be used."""
        self.skip("editor", error.reason, f"{error}; the editor said {reply[:200]!r}")

    def skip(self, part: str, reason: str, message: str) -> None:
        """Count a skipped reply. Raises TrainingStopped after too many of critic or editor in a row."""
        self.skips[reason] += 1
        if not self._in_a_row[part]:
            self._first[part] = message
        self._in_a_row[part] += 1
        if self._in_a_row[part] >= MAX_SKIPS:
            counted = ", ".join(f"{count} {name}" for name, count in self.skips.items())
            raise TrainingStopped(
                f"{MAX_SKIPS} replies of the {part} in a row could not be used ({counted}). The first: "
                f"{self._first[part]}. Use another model (algorithm.{part}), or raise its max_tokens or timeout_seconds"
                "; the run can be resumed"
            )


def show_texts(texts: Mapping[str, str], notes: Mapping[str, str] | None = None) -> str:
    """The texts with numbered lines."""
    notes = notes or {}
    return "\n\n".join(
        "\n".join([f"## {name}", numbered(text), *([notes[name]] if notes.get(name) else [])])
        for name, text in texts.items()
    )


def show_rollout(outcome: Outcome, number: int, limit: int) -> str:
    """A rollout as the critic reads it; the middle of a long one is left out."""
    text = outcome.transcript
    if len(text) > limit:
        text = f"{text[: limit // 2]}\n[{len(text) - limit} characters left out]\n{text[-(limit // 2) :]}"
    reward = "none" if outcome.score is None else f"{outcome.score:g}"
    return f"## Rollout {number}, reward {reward}\n{text}"


def _numbers(text: str, word: str) -> tuple[int, ...]:
    found = [numbers for name, numbers in _COUNTER.findall(text) if name == word]
    return tuple(int(each) for numbers in found for each in re.findall(r"\d+", numbers))
