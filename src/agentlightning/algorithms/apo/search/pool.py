"""The pool of the reflective search: candidates with what is known of each, and which of them to go on from."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from agentlightning.algorithms.apo.record import Outcome
from agentlightning.algorithms.apo.search.base import score_of
from agentlightning.algorithms.apo.text.candidate import Candidate

FAVOURITE_SHARE: Final = 0.85
"""How often the search goes on from its favourite instead of another candidate of the pool."""
PRIOR_STRENGTH: Final = 8
"""How many drawn tasks the expectation of a new candidate is worth."""
EXPECTED_GAIN: Final = 0.1
"""The share of what is missing that an accepted child is expected to gain."""
MAX_REFLECTIONS: Final = 2
"""How often the critic reads the same failure."""


@dataclass(slots=True)
class Node:
    """A candidate, and the outcomes that are known of it."""

    candidate: Candidate
    number: int = 0
    """Its place in the order of proposals."""
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict[int, list[Outcome]])
    """Its own, by task."""
    inherited: dict[int, Outcome] = field(default_factory=dict[int, Outcome])
    """Those of its ancestors on tasks that it did not run."""
    reflections: Counter[int] = field(default_factory=Counter[int])
    """How often the critic has read the last failure of a task."""
    rejected: list[str] = field(default_factory=list[str])
    """Edits of it that did not help."""
    prior: float = 0.0
    """What was expected of it before it ran on tasks that were not chosen for it."""
    drawn: list[float] = field(default_factory=list[float])
    """Its scores on such tasks."""

    def add(self, outcome: Outcome) -> None:
        self.outcomes.setdefault(outcome.task, []).append(outcome)
        self.inherited.pop(outcome.task, None)
        self.reflections.pop(outcome.task, None)

    def score(self, task: int) -> float:
        """What is known of a task: the mean of its own outcomes, else the inherited one."""
        own = self.outcomes.get(task)
        return fmean(map(score_of, own)) if own else score_of(self.inherited[task])

    @property
    def tasks(self) -> set[int]:
        return self.outcomes.keys() | self.inherited.keys()

    @property
    def estimate(self) -> float:
        """The expected score on any task. Failures that a child was written for, and their repetitions, do not count:
        some of them were bad luck, and turn by themselves."""
        return (PRIOR_STRENGTH * self.prior + sum(self.drawn)) / (PRIOR_STRENGTH + len(self.drawn))

    def last(self, task: int) -> Outcome:
        own = self.outcomes.get(task)
        return own[-1] if own else self.inherited[task]

    def failures(self, success: float) -> list[Outcome]:
        """Recorded failures that the critic may still read: its own first, the least read first."""
        found = [self.last(task) for task in self.tasks if score_of(self.last(task)) < success]
        usable = [each for each in found if self.reflections[each.task] < MAX_REFLECTIONS]
        return sorted(usable, key=lambda each: (self.reflections[each.task], each.task in self.inherited, each.task))

    def successes(self, success: float) -> list[int]:
        """Tasks that it, or else its ancestors, solved."""
        return sorted(task for task in self.tasks if self.score(task) >= success)

    def child(self, candidate: Candidate, number: int) -> Node:
        known = {task: self.last(task) for task in self.tasks}
        prior = self.estimate + EXPECTED_GAIN * max(0.0, 1 - self.estimate)
        return Node(candidate, number, inherited=known, prior=prior)

    def as_json(self) -> dict[str, Any]:
        return {
            "texts": dict(self.candidate.texts),
            "number": self.number,
            "outcomes": [each.as_json() for own in self.outcomes.values() for each in own],
            "inherited": [each.as_json() for each in self.inherited.values()],
            "reflections": {str(task): count for task, count in self.reflections.items()},
            "rejected": self.rejected,
            "prior": self.prior,
            "drawn": self.drawn,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Node:
        node = cls(Candidate(state["texts"]), state["number"], rejected=list(state["rejected"]))
        node.prior, node.drawn = state["prior"], list(state["drawn"])
        node.inherited = {each[0]: Outcome(*each) for each in state["inherited"]}
        for each in state["outcomes"]:
            node.outcomes.setdefault(each[0], []).append(Outcome(*each))
        node.reflections = Counter({int(task): count for task, count in state["reflections"].items()})
        return node


@dataclass(slots=True)
class Pool:
    """The candidates to go on from; the best come first."""

    size: int
    nodes: list[Node]

    @property
    def favourite(self) -> Node:
        return self.nodes[0]

    def add(self, node: Node) -> None:
        self.nodes.append(node)
        self.sort()
        del self.nodes[self.size :]

    def sort(self) -> None:
        self.nodes.sort(key=lambda node: (-node.estimate, -node.number))

    def choose(self, rng: random.Random) -> Node:
        """The favourite, or now and then another, so that one unlucky rejection does not end the search."""
        others: Sequence[Node] = self.nodes[1:]
        return rng.choice(others) if others and rng.random() > FAVOURITE_SHARE else self.favourite
