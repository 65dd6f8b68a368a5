"""Search "gepa": the package `gepa` (Agrawal et al. 2025, arXiv:2507.19457) on this run's agent, critic and budget.

The package runs in a thread and calls back for evaluations and replies; its own state is in the run directory, from
which it continues. Its candidates are checked like all others: one that breaks a template scores 0 without a rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any, ClassVar, TypeVar

from agentlightning.algorithms.apo.search import BudgetSpentError, Outcome, Search, Trial, score_of
from agentlightning.algorithms.apo.text import ReplyError, Texts
from agentlightning.errors import MissingExtraError, TrainingStopped

T = TypeVar("T")
ROLE = "You improve the texts that steer an AI agent. Keep all placeholders in braces as they are."


class GepaSearch(Search):
    """See the module. It is the `gepa.GEPAAdapter` of its own search, whose calls come from gepa's thread."""

    learned: ClassVar[Mapping[str, Any]] = {"best": dict[str, str], "runs": int}
    propose_new_texts = None
    """gepa asks for it, and skips every mutation without a word where the attribute is missing."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.runs = 0
        self.failure: BaseException | None = None
        """What ended the search: gepa itself goes on after errors."""
        self.stopping = False
        self.reflected: Texts | None = None
        """The candidate that gepa makes another one from."""
        limit, tasks = self.config.gepa.validation_tasks, self.validation_tasks
        self.validation = tasks if limit is None else min(limit, tasks)
        """The number of validation tasks that are used."""
        try:
            import gepa  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
        except ModuleNotFoundError as error:
            raise MissingExtraError("gepa", "gepa") from error

    @property
    def smallest_budget(self) -> int:
        return 2 * (self.validation + self.config.gepa.minibatch)

    async def step(self) -> None:
        """The whole search."""
        if self.validation == 0:
            return await self.end("there are no validation tasks to score prompts on; give some")
        self._loop, spending = asyncio.get_running_loop(), self.spending
        self.failure = None
        task = asyncio.create_task(asyncio.to_thread(self._optimize))
        try:
            result: Any = await asyncio.shield(task)
        except asyncio.CancelledError:
            self.stopping = True
            raise
        if self.failure is not None and not isinstance(self.failure, BudgetSpentError):
            raise self.failure
        spent = spending.exhausted()
        if result is None:
            spent = f"what is left of its budget of {spending.budget.calls} evaluations is too little"
        else:
            self.best = dict(result.best_candidate)
        await self.end(spent or "gepa found nothing more to try", budget=spent is not None)
        return None

    def _optimize(self) -> Any:
        import gepa  # pyright: ignore[reportMissingImports]

        config = self.config
        optimize: Any = vars(gepa)["optimize"]
        with suppress(BudgetSpentError):
            return optimize(
                {name: each.template for name, each in self.start.items()},
                [Trial(task) for task in range(self.train_tasks)],
                [Trial(task, split="validation") for task in range(self.validation)],
                adapter=self,
                reflection_lm=self.reflect,
                reflection_minibatch_size=config.gepa.minibatch,
                perfect_score=config.success,
                stop_callbacks=self._stops,
                logger=_Silent(),
                run_dir=str(self.training.directory / "gepa"),
                seed=config.seed,
            )

        return None

    def _stops(self, state: Any) -> bool:
        scores = [fmean(each.values()) if each else 0.0 for each in state.prog_candidate_val_subscores]
        self.counts["accepted"] = max(0, len(scores) - 1)
        if scores:
            best = dict(state.program_candidates[scores.index(max(scores))])
            if best != self.best:
                self.best = best
                self.show_favourite()
        return self.stopping or self.failure is not None or self.spending.exhausted() is not None

    # -- what gepa calls -----------------------------------------------------------------------------------------------

    def evaluate(self, batch: Sequence[Trial], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        from gepa.core.adapter import EvaluationBatch  # pyright: ignore[reportMissingImports]

        outcomes = self._call(self._evaluate(batch, dict(candidate)))
        make: Any = EvaluationBatch
        return make(
            outputs=[each.transcript for each in outcomes],
            scores=[score_of(each) for each in outcomes],
            trajectories=list(outcomes) if capture_traces else None,
        )

    async def _evaluate(self, batch: Sequence[Trial], candidate: Texts) -> list[Outcome]:
        try:
            self.check(candidate)
        except ReplyError as error:
            self.skip(error.reason, str(error))
            return [Outcome(trial.task, None, str(error)) for trial in batch]
        if self.reflected is not None and candidate != self.reflected:
            self.descend(candidate, self.reflected)
            self.reflected = None
        self.runs += 1
        return await self.run_trials(candidate, [Trial(each.task, self.runs, each.split) for each in batch])

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: Sequence[str]
    ) -> dict[str, list[dict[str, str]]]:
        self.reflected = dict(candidate)
        most = self.config.max_transcript_chars
        shown = [{"Rollout": each.transcript[:most], "Reward": str(each.score)} for each in eval_batch.trajectories]
        return dict.fromkeys(components_to_update, shown)

    def reflect(self, prompt: Any) -> str:
        """A reply of the critic, which also writes in this search; empty where there was none."""
        self.counts["proposed"] += 1
        reply = self._call(self.ask("critic", ROLE, str(prompt)))
        if reply is None:
            return ""
        self._in_a_row.clear()
        return reply.text

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self.stopping:
            work.close()
            raise TrainingStopped("the run ended")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except BaseException as error:
            self.failure = error
            raise


class _Silent:
    def log(self, *_: Any, **__: Any) -> None:
        """What gepa reports of itself is in its own files."""
