"""Playbooks: texts whose lines are items, each with counts of how often it helped and harmed.

The critic names helpful and harmful items of the rollouts it reads. The editor is shown the counts, and an item that
harmed at least `PRUNE_MARGIN` times more often than it helped is deleted. Items are told apart by their words, so an
item that is proposed again keeps its counts and is not added twice (delta updates with deterministic merging: Agentic
Context Engineering, arXiv:2510.04618, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.algorithms.apo.text.candidate import Candidate

PRUNE_MARGIN: Final = 3


@dataclass(slots=True)
class Playbook:
    """The counts of the items of all playbooks of a run."""

    names: Sequence[str] = ()
    """The resources that are playbooks."""
    counts: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """Item -> times it helped, times it harmed."""

    def count(self, candidate: Candidate, helpful: Sequence[int], harmful: Sequence[int]) -> None:
        """Count items by their line numbers in the playbooks of a candidate. Numbers of no item are ignored."""
        for name in self._own(candidate):
            lines = candidate.texts[name].splitlines()
            for place, numbers in enumerate((helpful, harmful)):
                for number in numbers:
                    if 1 <= number <= len(lines) and (item := _item(lines[number - 1])):
                        self.counts.setdefault(item, [0, 0])[place] += 1

    def notes(self, candidate: Candidate) -> dict[str, str]:
        """What the editor is told of the items of a candidate's playbooks."""
        return {name: "\n".join(self._counted(candidate.texts[name])) for name in self._own(candidate)}

    def pruned(self, candidate: Candidate) -> Candidate:
        """The candidate without items that harm more than they help."""
        texts = {name: self._pruned(candidate.texts[name]) for name in self._own(candidate)}
        return candidate.changed(**texts) if texts else candidate

    def _own(self, candidate: Candidate) -> list[str]:
        return [name for name in self.names if name in candidate.texts]

    def _counted(self, text: str) -> Iterator[str]:
        for number, line in enumerate(text.splitlines(), 1):
            helped, harmed = self.counts.get(_item(line), (0, 0))
            if helped or harmed:
                yield f"Item [{number}] helped {helped} and harmed {harmed} times."

    def _pruned(self, text: str) -> str:
        kept = [line for line in text.splitlines() if not self._harms(line)]
        return "\n".join(kept) + ("\n" if text.endswith("\n") and kept else "")

    def _harms(self, line: str) -> bool:
        helped, harmed = self.counts.get(_item(line), (0, 0))
        return harmed - helped >= PRUNE_MARGIN

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = {item: list(counts) for item, counts in state.get("counts", {}).items()}


def _item(line: str) -> str:
    """The words of an item, without its bullet."""
    return " ".join(line.lstrip("-*# \t").split()).casefold()
