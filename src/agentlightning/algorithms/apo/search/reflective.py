"""Search "reflective": an edit is tried first on the failures that it was written for.

Each step takes a candidate of the pool, has the critic read a few of its recorded failures, and the editor write a
child. The child then has to pass three stages, each of which ends as soon as it is lost:

    screen    the failures it was written for: at least one must turn out better
    confirm   one of these once more, because one good result may be luck
    guard     recorded successes of the parent: none may be lost twice

Results of the parent are never bought again, so a bad edit costs about `reflection_size` evaluations and a good one
about five. No validation task is used meanwhile: at the end, the best `finalists` are compared on them, pair by pair,
by a sequential test (`finals.py`). A rejected child that is proposed again is screened on other failures only. Now and
then a line is taken back, if the failures that it turned stay turned without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.algorithms.apo.record import Outcome, Trial
from agentlightning.algorithms.apo.search.base import BudgetSpentError, Search, SearchContext, score_of
from agentlightning.algorithms.apo.search.finals import Finals
from agentlightning.algorithms.apo.search.line_credits import Line, LineCredits, lines_of, without_line
from agentlightning.algorithms.apo.search.pool import Node, Pool
from agentlightning.algorithms.apo.text.candidate import Candidate
from agentlightning.algorithms.apo.text.playbook import Playbook


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
