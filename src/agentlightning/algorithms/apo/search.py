"""The searches for better texts: reflective with a pool, beam search, and GEPA by its own package."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeVar

from agentlightning.algorithms.apo.config import APOConfig, Spending
from agentlightning.algorithms.apo.models import Writer
from agentlightning.algorithms.apo.text import (
    Candidate,
    Playbook,
    ReplyError,
    apply_edits,
    read_edits,
    schema_violation,
)
from agentlightning.algorithms.apo.trials import Evaluator, Outcome, Trial
from agentlightning.errors import MissingExtraError, TrainingStopped
from agentlightning.evaluation.sequential import PairedSequentialTest, fewest_pairs
from agentlightning.resources import PromptTemplate

# -- base ------------------------------------------------------------------------------------------------------------

# The contract of a search: it proposes candidates, has them tried, and says which is the best.
#
# A search is a state machine with one proposal a step. After each step `state_dict` holds all it needs to go on, so a
# run that is interrupted continues from its last step; rollouts of the broken step are found in the store again.


class BudgetSpentError(Exception):
    """The budget does not allow the evaluations that a step needs: the step ends there."""


@dataclass(slots=True)
class SearchContext:
    """What a search works with."""

    config: APOConfig
    start: Mapping[str, PromptTemplate]
    """The templates to begin with."""
    train_tasks: int
    validation_tasks: int
    evaluator: Evaluator
    writer: Writer
    spending: Spending
    counts: Counter[str] = field(default_factory=Counter[str])
    """What was proposed, accepted, rejected and skipped, by reason."""
    first: dict[str, str] = field(default_factory=dict[str, str])
    """The first message of each kind of refused edit."""
    on_favourite: Callable[[Candidate], object] = lambda candidate: None
    """Called with the candidate that would be the result if the search ended now."""
    directory: Path = Path()
    """Where a search may keep files of its own."""

    @property
    def seed(self) -> Candidate:
        return Candidate({name: template.template for name, template in self.start.items()})

    async def evaluate(self, candidate: Candidate, trials: Sequence[Trial]) -> list[Outcome]:
        """Outcomes, accounted for. Raises BudgetSpentError where the budget does not allow so many."""
        if self.spending.left() < len(trials):
            raise BudgetSpentError
        outcomes = await self.evaluator.evaluate(candidate, trials) if trials else []
        for outcome in outcomes:
            self.spending.count_evaluation(outcome.tokens, outcome.money)
        self.counts["failed_rollouts"] += sum(outcome.score is None for outcome in outcomes)
        return outcomes

    def check(self, candidate: Candidate) -> None:
        """Raises ReplyError for a candidate that does not keep the placeholders of its templates."""
        for name, template in self.start.items():
            problem = schema_violation(template, candidate.texts[name])
            if problem is not None:
                raise ReplyError("schema_violations", f"an edit of {name!r} {problem}")

    def refuse(self, error: ReplyError) -> None:
        """Count an edit that cannot be used."""
        self.counts[error.reason] += 1
        self.first.setdefault(error.reason, str(error))

    async def propose(
        self, parent: Candidate, critique: str, rejected: Sequence[str], playbook: Playbook
    ) -> tuple[Candidate, str] | None:
        """A child with the editor's bounded edits, and these in words. None: there was none, which is counted."""
        config = self.config
        reply = await self.writer.edit(parent.texts, critique, rejected, playbook.notes(parent))
        if reply is None:
            return None
        try:
            edits, dropped = read_edits(reply, config.max_edits, config.max_edit_chars)
        except ReplyError as error:
            self.writer.refuse(error, reply)
            return None
        self.counts["edits_left_out"] += dropped
        try:
            child = playbook.pruned(apply_edits(parent, edits))
            self.check(child)
        except ReplyError as error:
            self.refuse(error)
            self.writer.refuse(error, reply)
            return None
        self.writer.accept()
        if child == parent:
            self.counts["unchanged"] += 1
            return None
        return child, "; ".join(map(str, edits))


class Search(ABC):
    """A way to find better texts."""

    def __init__(self, context: SearchContext) -> None:
        self.context = context
        self.random = random.Random(context.config.seed)
        self.ended: str | None = None
        """Why the search ended, in words; None while it goes on."""
        self.ended_for_budget = False

    @property
    @abstractmethod
    def favourite(self) -> Candidate:
        """The candidate that would be the result if the search ended now."""

    @property
    @abstractmethod
    def reserved(self) -> int:
        """Evaluations that are put aside for validation."""

    @property
    @abstractmethod
    def smallest_budget(self) -> int:
        """Evaluations below which nothing can be shown."""

    @abstractmethod
    async def step(self) -> None:
        """One proposal. Sets `ended` where it is the last."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that the search has learned, as JSON holds it."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def reopen(self) -> None:
        """Go on with a search that ended, because its budget has grown."""
        self.ended, self.ended_for_budget = None, False

    def end(self, why: str, *, budget: bool = False) -> None:
        self.ended, self.ended_for_budget = why, budget


def score_of(outcome: Outcome, lowest: float = 0.0) -> float:
    """The score of an outcome; a failed rollout has the lowest."""
    return lowest if outcome.score is None else outcome.score


# -- line credits ----------------------------------------------------------------------------------------------------

# What the reflective search remembers of lines: the failures that each added line turned.
#
# So a child that loses a line is tried on just these tasks, and a line is taken back if they stay turned without it.

Line = tuple[str, str]
"""Name of the resource, text."""


@dataclass(slots=True)
class LineCredits:
    """The credits of lines."""

    tasks: dict[Line, list[int]] = field(default_factory=dict[Line, list[int]])
    """Added line -> the tasks whose failures it turned."""
    examined: set[Line] = field(default_factory=set[Line])
    """Lines that were found to be needed since the last change of the favourite."""

    def credit(self, parent: Candidate, child: Candidate, tasks: Iterable[int]) -> None:
        """Credit the lines that a child adds with the failures it turned."""
        for line in added_lines(parent, child):
            self.tasks[line] = sorted({*self.tasks.get(line, ()), *tasks})

    def endangered(self, parent: Candidate, child: Candidate) -> list[int]:
        """The tasks that lines turned which a child no longer has."""
        return sorted({task for line in added_lines(child, parent) for task in self.tasks.get(line, ())})

    def state_dict(self) -> dict[str, Any]:
        return {
            "credits": [[*line, tasks] for line, tasks in self.tasks.items()],
            "examined": [list(line) for line in self.examined],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tasks = {(name, text): list(tasks) for name, text, tasks in state["credits"]}
        self.examined = {(name, text) for name, text in state["examined"]}


def lines_of(candidate: Candidate) -> list[Line]:
    return [(name, line) for name, text in candidate.texts.items() for line in text.splitlines()]


def added_lines(before: Candidate, after: Candidate) -> list[Line]:
    known = set(lines_of(before))
    return [line for line in lines_of(after) if line not in known and line[1].strip()]


def without_line(candidate: Candidate, line: Line) -> Candidate:
    """The candidate without one line."""
    name, text = line
    lines = candidate.texts[name].splitlines()
    lines.remove(text)
    return candidate.changed(**{name: "\n".join(lines)})


# -- pool ------------------------------------------------------------------------------------------------------------

# The pool of the reflective search: candidates with what is known of each, and which of them to go on from.

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


# -- finals ----------------------------------------------------------------------------------------------------------

# The finals of a search: its best candidates meet on the validation tasks, which it has not used before.
#
# The favourite meets one challenger after the other, task by task. A sequential test looks at the differences as they
# come and stops as soon as it can tell the two apart; where it cannot, the higher mean decides. Results of the
# favourite are bought once for all challengers.

WAVE: Final = 5
"""Pairs that run at the same time."""


@dataclass(slots=True)
class Duel:
    """What a comparison of two finalists found."""

    verdict: str
    """better or worse: the challenger is; exhausted: no difference could be shown; budget: it was not finished."""
    pairs: int
    difference: float
    """Mean of challenger - favourite."""
    p_value: float


@dataclass(slots=True)
class Finals:
    """Chooses among the finalists."""

    finalists: list[Candidate]
    """The favourite of the search first."""
    why: str = ""
    """Why the search ended."""
    for_budget: bool = False
    span: float = 1.0
    """The largest difference of two rewards; a larger one counts as this."""
    scores: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    """Digest -> validation task -> score."""
    duels: list[Duel] = field(default_factory=list[Duel])
    winner: Candidate | None = None

    @property
    def best(self) -> Candidate:
        return self.winner or self.finalists[0]

    async def decide(self, context: SearchContext) -> None:
        """Spend the validation tasks, and choose."""
        best = self.finalists[0]
        if context.validation_tasks:
            for challenger in self.finalists[1:]:
                duel = await self._duel(context, best, challenger)
                self.duels.append(duel)
                if duel.verdict == "better" or (duel.verdict in ("exhausted", "budget") and duel.difference > 0):
                    best = challenger
        self.winner = best

    async def _duel(self, context: SearchContext, best: Candidate, challenger: Candidate) -> Duel:
        tasks = range(context.validation_tasks)
        alpha = context.config.alpha
        test = PairedSequentialTest(alpha, (-self.span, self.span), max_pairs=max(len(tasks), fewest_pairs(alpha)))
        differences: list[float] = []
        verdict, start = "continue", 0
        while verdict == "continue" and start < len(tasks):
            wave = tasks[start : start + WAVE]
            if context.spending.left() < 2 * len(wave) or context.spending.exhausted() is not None:
                verdict = "budget"
                break
            theirs, ours = await self._scores(context, best, wave), await self._scores(context, challenger, wave)
            for mine, other in zip(ours, theirs, strict=True):
                differences.append(mine - other)
                verdict = test.update(max(-self.span, min(self.span, mine - other)))
                if verdict != "continue":
                    break
            start += len(wave)
        mean = fmean(differences) if differences else 0.0
        return Duel("exhausted" if verdict == "continue" else verdict, len(differences), mean, test.p_value)

    async def _scores(self, context: SearchContext, candidate: Candidate, tasks: Sequence[int]) -> list[float]:
        known = self.scores.setdefault(candidate.digest, {})
        missing = [Trial(task, split="validation") for task in tasks if task not in known]
        for outcome in await context.evaluate(candidate, missing):
            known[outcome.task] = score_of(outcome)
        return [known[task] for task in tasks]

    def state_dict(self) -> dict[str, Any]:
        return {
            "finalists": [dict(each.texts) for each in self.finalists],
            "why": self.why,
            "for_budget": self.for_budget,
            "span": self.span,
            "scores": {
                digest: {str(task): value for task, value in known.items()} for digest, known in self.scores.items()
            },
            "duels": [[each.verdict, each.pairs, each.difference, each.p_value] for each in self.duels],
            "winner": None if self.winner is None else dict(self.winner.texts),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Finals:
        winner = state["winner"]
        return cls(
            [Candidate(texts) for texts in state["finalists"]],
            state["why"],
            state["for_budget"],
            state["span"],
            {digest: {int(task): value for task, value in known.items()} for digest, known in state["scores"].items()},
            [Duel(*each) for each in state["duels"]],
            None if winner is None else Candidate(winner),
        )


# -- reflective ------------------------------------------------------------------------------------------------------

# Search "reflective": an edit is tried first on the failures that it was written for.
#
# Each step takes a candidate of the pool, has the critic read a few of its recorded failures, and the editor write a
# child. The child then has to pass three stages, each of which ends as soon as it is lost:
#
#     screen    the failures it was written for: at least one must turn out better
#     confirm   one of these once more, because one good result may be luck
#     guard     recorded successes of the parent: none may be lost twice
#
# Results of the parent are never bought again, so a bad edit costs about `reflection_size` evaluations and a good one
# about five. No validation task is used meanwhile: at the end, the best `finalists` are compared on them, pair by pair,
# by a sequential test (`finals.py`). A rejected child that is proposed again is screened on other failures only. Now
# and then a line is taken back, if the failures that it turned stay turned without it.


class ReflectiveSearch(Search):
    """See the module."""

    def __init__(self, context: SearchContext) -> None:
        super().__init__(context)
        config = context.config
        self.pool = Pool(config.pool, [Node(context.seed)])
        self.playbook = Playbook(config.playbooks)
        self.credits = LineCredits()
        self.children: dict[str, Node] = {}
        """Rejected children by digest of parent and child, with what is known of them."""
        self.number = 0
        self.fruitless = 0
        """Proposals in a row of which none was accepted."""
        self.finals: Finals | None = None
        self.order = list(range(context.train_tasks))
        self.random.shuffle(self.order)

    @property
    def favourite(self) -> Candidate:
        return self.pool.favourite.candidate if self.finals is None else self.finals.best

    @property
    def reserved(self) -> int:
        """Half of the budget at most: two finalists on the validation tasks, in pairs."""
        calls = self.context.spending.budget.calls
        finalists = self.context.config.finalists
        wanted = finalists * self.context.validation_tasks if finalists > 1 else 0
        return wanted if calls is None else min(wanted, calls // 2)

    @property
    def smallest_budget(self) -> int:
        config = self.context.config
        return 2 * (2 * config.reflection_size + 1 + config.guards)

    async def step(self) -> None:
        if self.finals is not None:
            return await self._validate(self.finals)
        context = self.context
        spent = context.spending.exhausted(self.reserved)
        if spent is not None or self.fruitless >= context.config.patience:
            why = spent or f"none of the last {self.fruitless} proposals was accepted"
            self.end_search(why, budget=spent is not None)
            return None
        self.number += 1
        try:
            accepted = await (self._prune() if self._prunable else self._propose())
        except BudgetSpentError:
            calls = context.spending.budget.calls
            return self.end_search(f"what is left of its budget of {calls} evaluations is too little", budget=True)
        self.fruitless = 0 if accepted else self.fruitless + 1
        context.on_favourite(self.favourite)
        return None

    def end_search(self, why: str, *, budget: bool) -> None:
        """Go on with the finals."""
        finalists = [node.candidate for node in self.pool.nodes[: self.context.config.finalists]]
        known = [score_of(node.last(task)) for node in self.pool.nodes for task in node.tasks]
        self.finals = Finals(finalists, why, budget, span=max([*known, 1.0]) - min([*known, 0.0]))

    def reopen(self) -> None:
        super().reopen()
        self.finals = None

    async def _validate(self, finals: Finals) -> None:
        await finals.decide(self.context)
        self.end(finals.why, budget=finals.for_budget)

    # -- one proposal ----------------------------------------------------------------------------------------------

    async def _propose(self) -> bool:
        context, parent = self.context, self.pool.choose(self.random)
        failures = await self._failures(parent)
        if not failures:
            context.counts["without_failures"] += 1
            return False
        for failure in failures:
            parent.reflections[failure.task] += 1
        critique = await context.writer.critique(parent.candidate.texts, failures, self.playbook.names)
        if critique is None:
            return False
        self.playbook.count(parent.candidate, critique.helpful, critique.harmful)
        proposed = await context.propose(parent.candidate, critique.text, parent.rejected[-8:], self.playbook)
        if proposed is None:
            return False
        candidate, words = proposed
        if any(node.candidate == candidate for node in self.pool.nodes):
            context.counts["unchanged"] += 1
            return False
        key = f"{parent.candidate.digest}-{candidate.digest}"
        child = self.children.pop(key, None) or parent.child(candidate, self.number)
        lost = await self._lost(child, parent, failures)
        context.counts["proposed"] += 1
        context.counts[f"rejected_{lost}" if lost else "accepted"] += 1
        if lost is None:
            self.pool.add(child)
            return True
        self.children[key] = child
        if words not in parent.rejected:
            parent.rejected.append(words)
        return False

    async def _failures(self, node: Node) -> list[Outcome]:
        """Failures to reflect on: recorded ones, and those of tasks that the candidate has not run."""
        config = self.context.config
        found, rounds = node.failures(config.success), 0
        while len(found) < (config.reflection_size if rounds == 0 else 1) and rounds < 4:
            fresh = self._fresh(node, config.reflection_size)
            if not fresh:
                break
            node.drawn += map(score_of, await self._run(node, fresh))
            found, rounds = node.failures(config.success), rounds + 1
        self.pool.sort()
        return found[: config.reflection_size]

    def _fresh(self, node: Node, count: int) -> list[int]:
        """Tasks of which the least is known: untried ones, then those that only ancestors ran, then the rest."""
        count = min(count, self.context.spending.left(self.reserved))
        ranked = sorted(self.order, key=lambda task: (task in node.tasks, len(node.outcomes.get(task, ()))))
        return ranked[:count]

    async def _run(self, node: Node, tasks: Sequence[int]) -> list[Outcome]:
        trials = [Trial(task, repeat=len(node.outcomes.get(task, ()))) for task in tasks]
        outcomes = await self.context.evaluate(node.candidate, trials)
        for outcome in outcomes:
            node.add(outcome)
        return outcomes

    # -- the stages ------------------------------------------------------------------------------------------------

    async def _lost(self, child: Node, parent: Node, failures: Sequence[Outcome]) -> str | None:
        """The stage that a child does not pass; None if it passes all."""
        before = {each.task: score_of(each) for each in failures}
        screened = await self._run(child, [each.task for each in failures if each.task not in child.outcomes])
        flips = [each.task for each in screened if score_of(each) > before[each.task]]
        if not flips:
            return "screen"
        [again] = await self._run(child, flips[:1])
        if score_of(again) <= before[again.task]:
            return "confirm"
        if not await self._guards(child, parent, before.keys()):
            return "guard"
        self.credits.credit(parent.candidate, child.candidate, flips)
        return None

    async def _guards(self, child: Node, parent: Node, screened: Any) -> bool:
        """Whether the child keeps the parent's successes, tried one after the other. Fewer are tried where the parent
        seldom succeeds: its successes are then mostly luck."""
        config = self.context.config
        solved = set(parent.successes(config.success)) - set(screened)
        endangered = [task for task in self.credits.endangered(parent.candidate, child.candidate) if task in solved]
        others = sorted(solved - set(endangered))
        self.random.shuffle(others)
        count = max(len(endangered[:2]), round(config.guards * parent.estimate))
        for task in [*endangered, *others][:count]:
            for _ in range(2):
                [outcome] = await self._run(child, [task])
                if score_of(outcome) >= parent.score(task):
                    break
            else:
                return False
        return True

    # -- pruning ---------------------------------------------------------------------------------------------------

    @property
    def _prunable(self) -> Line | None:
        """An added line of the favourite to try to do without: the oldest that was not examined since three others were
        added."""
        node, credits = self.pool.favourite, self.credits
        added = [line for line in lines_of(node.candidate) if line in credits.tasks]
        waiting = [line for line in added if line not in credits.examined]
        return waiting[0] if len(waiting) > 3 else None

    async def _prune(self) -> bool:
        """Take a line back if the failures that it turned stay turned without it, twice."""
        line, node = self._prunable, self.pool.favourite
        assert line is not None
        self.credits.examined.add(line)
        tasks = self.credits.tasks[line][:2]
        shorter = node.child(without_line(node.candidate, line), self.number)
        for task in (tasks * 2)[:2]:
            [outcome] = await self._run(shorter, [task])
            if score_of(outcome) < self.context.config.success:
                return False
        self.context.counts["pruned"] += 1
        self.pool.nodes.remove(node)
        self.pool.add(shorter)
        return True

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = self.random.getstate()
        return {
            "pool": [node.as_json() for node in self.pool.nodes],
            "children": {key: node.as_json() for key, node in self.children.items()},
            "playbook": self.playbook.state_dict(),
            "credits": self.credits.state_dict(),
            "number": self.number,
            "fruitless": self.fruitless,
            "finals": None if self.finals is None else self.finals.state_dict(),
            "random": [version, list(internal), gauss],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.pool.nodes = [Node.from_json(each) for each in state["pool"]]
        self.children = {key: Node.from_json(each) for key, each in state["children"].items()}
        self.playbook.load_state_dict(state["playbook"])
        self.credits.load_state_dict(state["credits"])
        self.number, self.fruitless = state["number"], state["fruitless"]
        self.finals = None if state["finals"] is None else Finals.from_state(state["finals"])
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))


# -- beam ------------------------------------------------------------------------------------------------------------

# Search "beam": textual gradients with a beam of prompts (ProTeGi, Pryzant et al. 2023, arXiv:2305.03495, algorithm
# 1).
#
# Each round, every prompt of the beam gets `branch_factor` children: the critic reads `gradient_batch_size` rollouts of
# the parent (the textual gradient), and the editor applies what it says. All prompts are then scored on
# `val_batch_size` validation tasks, and the best `beam_width` stay. The best of each round is scored on all validation
# tasks; the best of these is the result. This is what `agl.APO` of Agent Lightning 0.x did, with edits that are bounded
# and checked.


class BeamSearch(Search):
    """See the module."""

    def __init__(self, context: SearchContext) -> None:
        super().__init__(context)
        self.settings = context.config.beam
        self.playbook = Playbook(context.config.playbooks)
        self.beam = [context.seed]
        self.best = context.seed
        self.best_score: float | None = None
        self.round = 0
        self.runs = 0
        """Evaluations so far, which tells repetitions of a task apart."""

    @property
    def favourite(self) -> Candidate:
        return self.best

    @property
    def reserved(self) -> int:
        return 0

    @property
    def smallest_budget(self) -> int:
        batch = min(self.settings.val_batch_size, self.context.validation_tasks)
        return self.settings.gradient_batch_size + 2 * batch

    async def step(self) -> None:
        if self.context.validation_tasks == 0:
            return self.end("there are no validation tasks to score prompts on; give some")
        needed = self.context.validation_tasks
        if self.round == 0 and self.settings.run_initial_validation and self.context.spending.left() >= needed:
            self.best_score = await self._score(self.best, range(self.context.validation_tasks))
        spent = self.context.spending.exhausted()
        if spent is None and self.round < self.settings.beam_rounds:
            await self._round()
            self.round += 1
            spent = self.context.spending.exhausted()
        if spent is not None or self.round >= self.settings.beam_rounds:
            self.end(spent or f"all {self.round} rounds are done", budget=spent is not None)
        return None

    async def _round(self) -> None:
        children = list(self.beam)
        for parent in self.beam:
            for _ in range(self.settings.branch_factor):
                child = await self._child(parent)
                if child is not None and child not in children:
                    children.append(child)
        count = min(self.settings.val_batch_size, self.context.validation_tasks)
        tasks = sorted(self.random.sample(range(self.context.validation_tasks), count))
        scores: dict[Candidate, float] = {}
        for each in children:
            if self.context.spending.left() < len(tasks):
                break
            scores[each] = await self._score(each, tasks)
        if not scores:
            return
        self.beam = sorted(scores, key=lambda each: -scores[each])[: self.settings.beam_width]
        await self._compare(self.beam[0])

    async def _compare(self, first: Candidate) -> None:
        """Score the first of the beam on all validation tasks, and keep it if it is the best so far."""
        if first == self.best or self.context.spending.left() < self.context.validation_tasks:
            return
        score = await self._score(first, range(self.context.validation_tasks))
        if self.best_score is None or score > self.best_score:
            self.best, self.best_score = first, score
            self.context.counts["accepted"] += 1
            self.context.on_favourite(first)

    async def _child(self, parent: Candidate) -> Candidate | None:
        context = self.context
        count = min(self.settings.gradient_batch_size, context.train_tasks, context.spending.left())
        if count == 0:
            return None
        tasks = self.random.sample(range(context.train_tasks), count)
        outcomes = await context.evaluate(parent, self._trials(tasks, "train"))
        critique = await context.writer.critique(parent.texts, outcomes, self.playbook.names)
        if critique is None:
            return None
        self.playbook.count(parent, critique.helpful, critique.harmful)
        proposed = await context.propose(parent, critique.text, (), self.playbook)
        context.counts["proposed"] += proposed is not None
        return None if proposed is None else proposed[0]

    async def _score(self, candidate: Candidate, tasks: Sequence[int]) -> float:
        outcomes = await self.context.evaluate(candidate, self._trials(tasks, "validation"))
        return fmean(map(score_of, outcomes))

    def _trials(self, tasks: Sequence[int], split: Any) -> list[Trial]:
        self.runs += 1
        return [Trial(task, self.runs, split) for task in tasks]

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = self.random.getstate()
        return {
            "beam": [dict(each.texts) for each in self.beam],
            "best": dict(self.best.texts),
            "best_score": self.best_score,
            "round": self.round,
            "runs": self.runs,
            "playbook": self.playbook.state_dict(),
            "random": [version, list(internal), gauss],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.beam = [Candidate(texts) for texts in state["beam"]]
        self.best, self.best_score = Candidate(state["best"]), state["best_score"]
        self.round, self.runs = state["round"], state["runs"]
        self.playbook.load_state_dict(state["playbook"])
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))


# -- gepa ------------------------------------------------------------------------------------------------------------

# Search "gepa": the package `gepa` (Agrawal et al. 2025, arXiv:2507.19457) on this run's agent, critic and budget.
#
# The package runs in a thread and calls back for evaluations and replies; its own state is in the run directory, from
# which it continues. Its candidates are checked like all others: one that breaks a template scores 0 without a rollout.

T = TypeVar("T")
ROLE = "You improve the texts that steer an AI agent. Keep all placeholders in braces as they are."


class GepaSearch(Search):
    """See the module."""

    def __init__(self, context: SearchContext) -> None:
        super().__init__(context)
        self.best = context.seed
        self.runs = 0
        try:
            import gepa  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
        except ModuleNotFoundError as error:
            raise MissingExtraError("gepa", "gepa") from error

    @property
    def favourite(self) -> Candidate:
        return self.best

    @property
    def reserved(self) -> int:
        return 0

    @property
    def validation(self) -> int:
        """The number of validation tasks that are used."""
        limit = self.context.config.gepa.validation_tasks
        return self.context.validation_tasks if limit is None else min(limit, self.context.validation_tasks)

    @property
    def smallest_budget(self) -> int:
        return 2 * (self.validation + self.context.config.gepa.minibatch)

    async def step(self) -> None:
        """The whole search."""
        if self.validation == 0:
            return self.end("there are no validation tasks to score prompts on; give some")
        loop = asyncio.get_running_loop()
        adapter = _Adapter(self, loop)
        stopping = asyncio.Event()
        task = asyncio.create_task(asyncio.to_thread(self._optimize, adapter, stopping))
        try:
            result: Any = await asyncio.shield(task)
        except asyncio.CancelledError:
            stopping.set()
            adapter.closed = True
            raise
        if adapter.failure is not None and not isinstance(adapter.failure, BudgetSpentError):
            raise adapter.failure
        self.context.counts["proposed"] += adapter.proposed
        spent = self.context.spending.exhausted()
        if result is None:
            spent = f"what is left of its budget of {self.context.spending.budget.calls} evaluations is too little"
        else:
            self.best = Candidate(dict(result.best_candidate))
        self.end(spent or "gepa found nothing more to try", budget=spent is not None)
        return None

    def _optimize(self, adapter: _Adapter, stopping: asyncio.Event) -> Any:
        import gepa  # pyright: ignore[reportMissingImports]

        config, context = self.context.config, self.context

        def stops(state: Any) -> bool:
            return self._stops(state, adapter, stopping)

        directory = context.directory / "gepa"
        optimize: Any = vars(gepa)["optimize"]
        with suppress(BudgetSpentError):
            return optimize(
                dict(context.seed.texts),
                [Trial(task) for task in range(context.train_tasks)],
                [Trial(task, split="validation") for task in range(self.validation)],
                adapter=adapter,
                reflection_lm=adapter.reflect,
                reflection_minibatch_size=config.gepa.minibatch,
                candidate_selection_strategy=config.gepa.candidate_selection,
                use_merge=config.gepa.use_merge,
                perfect_score=config.success,
                stop_callbacks=stops,
                logger=_Silent(),
                run_dir=str(directory),
                seed=config.seed,
            )

        return None

    def _stops(self, state: Any, adapter: _Adapter, stopping: asyncio.Event) -> bool:
        scores = [fmean(each.values()) if each else 0.0 for each in state.prog_candidate_val_subscores]
        self.context.counts["accepted"] = max(0, len(scores) - 1)
        if scores:
            best = Candidate(dict(state.program_candidates[scores.index(max(scores))]))
            if best != self.best:
                self.best = best
                self.context.on_favourite(best)
        return stopping.is_set() or adapter.failure is not None or self.context.spending.exhausted() is not None

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self.best.texts), "runs": self.runs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.runs = Candidate(state["best"]), state["runs"]


class _Silent:
    def log(self, *_: Any, **__: Any) -> None:
        """What gepa reports of itself is in its own files."""


class _Adapter:
    """Implements `gepa.GEPAAdapter`. It is called in gepa's thread."""

    propose_new_texts = None
    """gepa asks for it, and skips every mutation without a word where the attribute is missing."""

    def __init__(self, search: GepaSearch, loop: asyncio.AbstractEventLoop) -> None:
        self._search, self._loop = search, loop
        self.failure: BaseException | None = None
        """What ended the search: gepa itself goes on after errors."""
        self.closed = False
        self.proposed = 0

    def evaluate(self, batch: Sequence[Trial], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        from gepa.core.adapter import EvaluationBatch  # pyright: ignore[reportMissingImports]

        outcomes = self._call(self._evaluate(batch, Candidate(dict(candidate))))
        make: Any = EvaluationBatch
        return make(
            outputs=[each.transcript for each in outcomes],
            scores=[score_of(each) for each in outcomes],
            trajectories=list(outcomes) if capture_traces else None,
        )

    async def _evaluate(self, batch: Sequence[Trial], candidate: Candidate) -> list[Outcome]:
        search = self._search
        try:
            search.context.check(candidate)
        except ReplyError as error:
            search.context.refuse(error)
            return [Outcome(trial.task, None, str(error)) for trial in batch]
        search.runs += 1
        trials = [Trial(each.task, search.runs, each.split) for each in batch]
        return await search.context.evaluate(candidate, trials)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: Sequence[str]
    ) -> dict[str, list[dict[str, str]]]:
        shown = [
            {"Rollout": each.transcript[: self._search.context.config.max_transcript_chars], "Reward": str(each.score)}
            for each in eval_batch.trajectories
        ]
        return dict.fromkeys(components_to_update, shown)

    def reflect(self, prompt: Any) -> str:
        """A reply of the critic, which also writes in this search; empty where there was none."""
        self.proposed += 1
        reply = self._call(self._search.context.writer.ask("critic", ROLE, str(prompt)))
        return "" if reply is None else reply.text

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self.closed:
            work.close()
            raise TrainingStopped("the run ended")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except BaseException as error:
            self.failure = error
            raise
