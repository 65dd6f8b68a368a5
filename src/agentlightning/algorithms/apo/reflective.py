"""Search "reflective": an edit is tried first on the failures that it was written for.

Each step takes a candidate of the pool, has the critic read a few of its recorded failures, and the editor write a
child. The child then has to pass three stages, each of which ends as soon as it is lost:

    screen    the failures it was written for: at least one must turn out better
    confirm   one of these once more, because one good result may be luck
    guard     recorded successes of the parent: none may be lost twice

Results of the parent are never bought again, so a bad edit costs about `reflection_size` evaluations and a good one
about five. No validation task is used meanwhile: at the end, the best `finalists` are compared on them, pair by pair,
by a sequential test. A rejected child that is proposed again is screened on other failures only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, ClassVar, Final

from pydantic import Field
from pydantic.dataclasses import dataclass

from agentlightning.algorithms.apo.search import BudgetSpentError, Outcome, Search, Trial, score_of
from agentlightning.algorithms.apo.text import Texts, digest
from agentlightning.evaluation.sequential import PairedSequentialTest, fewest_pairs

Scores = dict[str, dict[int, float]]
"""Digest of a candidate -> validation task -> score."""
FAVOURITE_SHARE: Final = 0.85
"""How often the search goes on from its favourite instead of another candidate of the pool."""
PRIOR_STRENGTH: Final = 8
"""How many drawn tasks the expectation of a new candidate is worth."""
EXPECTED_GAIN: Final = 0.1
"""The share of what is missing that an accepted child is expected to gain."""
MAX_REFLECTIONS: Final = 2
"""How often the critic reads the same failure."""
WAVE: Final = 5
"""Pairs of finalists' rollouts that run at the same time."""


@dataclass
class Node:
    """A candidate, and the outcomes that are known of it."""

    texts: dict[str, str]
    number: int = 0
    """Its place in the order of proposals."""
    outcomes: list[Outcome] = Field(default_factory=list[Outcome])
    """Its own, in order."""
    inherited: list[Outcome] = Field(default_factory=list[Outcome])
    """The last ones of its ancestors, one for each task."""
    reflections: dict[int, int] = Field(default={})
    """How often the critic has read the last failure of a task."""
    rejected: list[str] = Field(default_factory=list[str])
    """Edits of it that did not help."""
    prior: float = 0.0
    """What was expected of it before it ran on tasks that were not chosen for it."""
    drawn: list[float] = Field(default_factory=list[float])
    """Its scores on such tasks."""

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.reflections.pop(outcome.task, None)

    def own(self, task: int) -> list[Outcome]:
        """Its own outcomes on a task."""
        return [each for each in self.outcomes if each.task == task]

    def score(self, task: int) -> float:
        """What is known of a task: its own outcomes, else the inherited one."""
        known = self.own(task) or [each for each in self.inherited if each.task == task]
        return fmean(map(score_of, known))

    @property
    def tasks(self) -> set[int]:
        return {each.task for each in (*self.outcomes, *self.inherited)}

    @property
    def estimate(self) -> float:
        """The expected score on any task. Failures that a child was written for, and their repetitions, do not count:
        some of them were bad luck, and turn by themselves."""
        return (PRIOR_STRENGTH * self.prior + sum(self.drawn)) / (PRIOR_STRENGTH + len(self.drawn))

    @property
    def last(self) -> dict[int, Outcome]:
        """By task, the last outcome that is known."""
        return {each.task: each for each in (*self.inherited, *self.outcomes)}

    def failures(self, success: float) -> list[Outcome]:
        """Recorded failures that the critic may still read: its own first, the least read first."""
        read, own = self.reflections, {each.task for each in self.outcomes}
        failed = [each for each in self.last.values() if score_of(each) < success]
        unread = [each for each in failed if read.get(each.task, 0) < MAX_REFLECTIONS]
        return sorted(unread, key=lambda each: (read.get(each.task, 0), each.task not in own, each.task))

    def child(self, texts: Texts, number: int) -> Node:
        prior = self.estimate + EXPECTED_GAIN * max(0.0, 1 - self.estimate)
        return Node(dict(texts), number, inherited=list(self.last.values()), prior=prior)


# -- search -----------------------------------------------------------------------------------------------------------


class ReflectiveSearch(Search):
    """See the module."""

    learned: ClassVar[Mapping[str, Any]] = {
        "pool": list[Node],
        "children": dict[str, Node],
        "credits": dict[str, list[int]],
        "number": int,
        "fruitless": int,
        "winner": dict[str, str] | None,
    }

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.pool = [Node(dict(self.best))]
        """The candidates to go on from; the best come first."""
        self.credits: dict[str, list[int]] = {}
        """Added line -> the tasks whose failures it turned. A child that loses a line is tried on just these."""
        self.children: dict[str, Node] = {}
        """Rejected children by digest of parent and child, with what is known of them."""
        self.number = 0
        self.fruitless = 0
        """Proposals in a row of which none was accepted."""
        self.winner: dict[str, str] | None = None
        """Of the finals."""
        self.order = list(range(self.train_tasks))
        self.random.shuffle(self.order)

    @property
    def favourite(self) -> Texts:
        return self.winner or self.pool[0].texts

    @property
    def reserved(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Half of the budget at most: two finalists on the validation tasks, in pairs."""
        calls, finalists = self.spending.budget.calls, self.config.finalists
        wanted = finalists * self.validation_tasks if finalists > 1 else 0
        return wanted if calls is None else min(wanted, calls // 2)

    @property
    def smallest_budget(self) -> int:
        return 2 * (2 * self.config.reflection_size + 1 + self.config.guards)

    async def step(self) -> None:
        self.winner = None  # Of a search that goes on with a larger budget.
        spent = self.spending.exhausted(self.reserved)
        if spent is None and self.fruitless >= self.config.patience:
            return await self.end(f"none of the last {self.fruitless} proposals was accepted")
        if spent is None:
            self.number += 1
            try:
                accepted = await self._propose()
            except BudgetSpentError:
                spent = f"what is left of its budget of {self.spending.budget.calls} evaluations is too little"
            else:
                self.fruitless = 0 if accepted else self.fruitless + 1
                return self.show_favourite()
        return await self.end(spent, budget=True)

    # -- one proposal ----------------------------------------------------------------------------------------------

    def _sort(self) -> None:
        self.pool.sort(key=lambda node: (-node.estimate, -node.number))

    def _add(self, node: Node) -> None:
        self.pool.append(node)
        self._sort()
        del self.pool[self.config.pool :]

    async def _propose(self) -> bool:
        others = self.pool[1:]
        # Now and then another than the favourite, so that one unlucky rejection does not end the search.
        parent = self.random.choice(others) if others and self.random.random() > FAVOURITE_SHARE else self.pool[0]
        failures = await self._failures(parent)
        if not failures:
            self.counts["without_failures"] += 1
            return False
        for failure in failures:
            parent.reflections[failure.task] = parent.reflections.get(failure.task, 0) + 1
        proposed = await self.write(parent.texts, failures, parent.rejected[-8:])
        if proposed is None:
            return False
        texts, words = proposed
        if any(node.texts == texts for node in self.pool):
            self.counts["unchanged"] += 1
            return False
        key = f"{digest(parent.texts)}-{digest(texts)}"
        child = self.children.pop(key, None) or parent.child(texts, self.number)
        lost = await self._lost(child, parent, failures)
        self.counts["proposed"] += 1
        self.counts[f"rejected_{lost}" if lost else "accepted"] += 1
        if lost is None:
            self._add(child)
            return True
        self.children[key] = child
        if words not in parent.rejected:
            parent.rejected.append(words)
        return False

    async def _failures(self, node: Node) -> list[Outcome]:
        """Failures to reflect on: recorded ones, and those of tasks of which the least is known: untried ones, then
        those that only ancestors ran, then the rest."""
        config, spending = self.config, self.spending
        found, rounds = node.failures(config.success), 0
        while len(found) < (config.reflection_size if rounds == 0 else 1) and rounds < 4:
            known, runs = node.tasks, Counter(each.task for each in node.outcomes)
            ranked = sorted(self.order, key=lambda task: (task in known, runs[task]))
            fresh = ranked[: min(config.reflection_size, spending.left(self.reserved))]
            if not fresh:
                break
            node.drawn += map(score_of, await self._run(node, fresh))
            found, rounds = node.failures(config.success), rounds + 1
        self._sort()
        return found[: config.reflection_size]

    async def _run(self, node: Node, tasks: Sequence[int]) -> list[Outcome]:
        trials = [Trial(task, repeat=len(node.own(task))) for task in tasks]
        outcomes = await self.run_trials(node.texts, trials)
        for outcome in outcomes:
            node.add(outcome)
        return outcomes

    async def _lost(self, child: Node, parent: Node, failures: Sequence[Outcome]) -> str | None:
        """The stage that a child does not pass; None if it passes all."""
        before = {each.task: score_of(each) for each in failures}
        screened = await self._run(child, [each.task for each in failures if not child.own(each.task)])
        flips = [each.task for each in screened if score_of(each) > before[each.task]]
        if not flips:
            return "screen"
        [again] = await self._run(child, flips[:1])
        if score_of(again) <= before[again.task]:
            return "confirm"
        if not await self.guards(child, parent, before):
            return "guard"
        for line in added_lines(parent.texts, child.texts):
            self.credits[line] = sorted({*self.credits.get(line, ()), *flips})
        return None

    async def guards(self, child: Node, parent: Node, screened: Collection[int] = ()) -> bool:
        """Whether the child keeps the parent's successes, tried one after the other: first those that lines turned
        which it no longer has. Fewer are tried where the parent seldom succeeds: its successes are then mostly luck."""
        config = self.config
        solved = {task for task in parent.tasks if parent.score(task) >= config.success} - set(screened)
        missing = added_lines(child.texts, parent.texts)
        endangered = sorted(solved & {task for line in missing for task in self.credits.get(line, ())})
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

    # -- finals ----------------------------------------------------------------------------------------------------

    async def end(self, why: str, *, budget: bool = False) -> None:
        """The best candidates meet on the validation tasks, which the search has not used before.

        The favourite meets one challenger after the other, task by task. A sequential test looks at the differences as
        they come and stops as soon as it can tell the two apart; where it cannot, the higher mean decides. Results of
        the favourite are bought once for all challengers."""
        best, *challengers = [node.texts for node in self.pool[: self.config.finalists]]
        scores: Scores = {}
        for challenger in challengers if self.validation_tasks else ():
            if await self.wins(challenger, best, scores):
                best = challenger
        self.winner = best
        await super().end(why, budget=budget)

    async def wins(self, challenger: Texts, best: Texts, scores: Scores) -> bool:
        """Whether the challenger is better; where the test cannot tell, or the budget ends it, the higher mean is.
        `scores`: what was bought before."""
        tasks, alpha = range(self.validation_tasks), self.config.alpha
        known = [score_of(each) for node in self.pool for each in node.last.values()]
        span = max([*known, 1.0]) - min([*known, 0.0])  # The largest difference that counts.
        test = PairedSequentialTest(alpha, (-span, span), max_pairs=max(len(tasks), fewest_pairs(alpha)))
        differences: list[float] = []
        for start in range(0, len(tasks), WAVE):
            wave = tasks[start : start + WAVE]
            if self.spending.left() < 2 * len(wave) or self.spending.exhausted() is not None:
                break
            theirs, ours = await self._scores(best, wave, scores), await self._scores(challenger, wave, scores)
            for mine, other in zip(ours, theirs, strict=True):
                differences.append(mine - other)
                verdict = test.update(max(-span, min(span, mine - other)))
                if verdict in ("better", "worse"):
                    return verdict == "better"
        return bool(differences) and fmean(differences) > 0

    async def _scores(self, candidate: Texts, tasks: Sequence[int], scores: Scores) -> list[float]:
        known = scores.setdefault(digest(candidate), {})
        missing = [Trial(task, split="validation") for task in tasks if task not in known]
        known |= {outcome.task: score_of(outcome) for outcome in await self.run_trials(candidate, missing)}
        return [known[task] for task in tasks]


def added_lines(before: Texts, after: Texts) -> list[str]:
    """Lines that are new, each behind the name of its text."""
    known, own = (
        dict.fromkeys(f"{name}: {line}" for name, text in texts.items() for line in text.splitlines() if line.strip())
        for texts in (before, after)
    )
    return [line for line in own if line not in known]
