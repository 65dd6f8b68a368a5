"""Search "gepa": the package `gepa` (Agrawal et al. 2025, arXiv:2507.19457) on this run's agent, critic and budget.

The package runs in a thread and calls back for evaluations and replies; its own state is in the run directory, from
which it continues. Its candidates are checked like all others: one that breaks a template scores 0 without a rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, TypeVar

from agentlightning.algorithms.apo.record import Outcome, Trial
from agentlightning.algorithms.apo.search.base import BudgetSpentError, Search, SearchContext, score_of
from agentlightning.algorithms.apo.text.candidate import Candidate
from agentlightning.algorithms.apo.text.edits import ReplyError
from agentlightning.errors import MissingExtraError, TrainingStopped

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
