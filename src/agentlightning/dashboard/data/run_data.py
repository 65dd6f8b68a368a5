"""All that views read of one run or store, with what is remembered between requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.config import TrainConfig
from agentlightning.dashboard.data.attempt_index import AttemptIndexes
from agentlightning.dashboard.data.credit import BatchCredit, credit_of
from agentlightning.dashboard.data.live import Live
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.dashboard.data.summary import Summaries, group_of
from agentlightning.dashboard.data.token_text import TokenTexts, find_texts
from agentlightning.errors import AgentLightningError, NotFoundError
from agentlightning.policy.learner import updates_of
from agentlightning.rollouts import Rollout
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import task_key
from agentlightning.training.persistence.token_ratios import CallRatios, read_ratios
from agentlightning.training.sources.collector import TrajectoryReader

MOST_IN_BATCH: Final = 1024
"""Rollouts of a step over which credit is computed; with more, only the group itself is read."""
MOST_CREDITS: Final = 8
"""Steps whose credit is remembered."""
PAGE: Final = 500
"""Rollouts in one request to the store."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is shown under one name: a run with its store, or a store by itself."""

    name: str
    files: RunFiles | None = None
    """None: it is a store by itself."""

    @property
    def run_id(self) -> str | None:
        """What the ids of its rollouts contain; None: anything."""
        return None if self.files is None else self.files.state().run_id

    def run(self) -> RunFiles:
        """Raises NotFoundError for a store by itself, which has no steps, settings or checkpoints."""
        if self.files is None:
            raise NotFoundError(f"{self.name!r} is a store, not a run; it has rollouts, and neither steps nor settings")
        return self.files


@dataclass(slots=True)
class RunData:
    """One run or store."""

    source: Source
    store: LightningStoreBase
    shares_store: bool = False
    """Whether the store also has rollouts of others."""
    summaries: Summaries = field(init=False)
    live: Live = field(init=False)
    attempts: AttemptIndexes = field(init=False)
    _texts: TokenTexts | None = None
    _texts_read: bool = False
    _credits: dict[Any, BatchCredit] = field(default_factory=dict[Any, BatchCredit])

    def __post_init__(self) -> None:
        self.summaries = Summaries(self.store, self.weights, self._updates)
        self.live = Live(self.store, self.summaries)
        self.attempts = AttemptIndexes(self.store)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def in_ids(self) -> str | None:
        """What the ids of its rollouts and resources contain; None: all of the store are its own."""
        return self.source.run_id if self.shares_store else None

    @property
    def files(self) -> RunFiles | None:
        return self.source.files

    @property
    def config(self) -> TrainConfig | None:
        return None if self.files is None else self.files.config()

    @property
    def weights(self) -> dict[str, float] | None:
        """Those that a run gives the dimensions of a reward."""
        return None if self.config is None else getattr(self.config.algorithm, "reward_weights", None)

    def _updates(self, version: int) -> int:
        """By the resumes of a run as they are now; the version itself where there is no run."""
        return version if self.files is None else updates_of(version, self.files.state().resumes)

    @property
    def texts(self) -> TokenTexts | None:
        """The text of tokens; None: there is no tokenizer that can be read."""
        if not self._texts_read and self.files is not None:
            model = None if self.config is None else self.config.policy.model
            self._texts = find_texts(self.files.path, model)
            self._texts_read = self._texts is not None  # one that is still to be written is looked for again
        return self._texts

    async def rollout(self, rollout_id: str) -> Rollout:
        """Raises NotFoundError."""
        found = await self.store.get_rollout_by_id(rollout_id)
        if found is None:
            raise NotFoundError(f"no rollout {rollout_id!r} in this store")
        return found

    async def by_ids(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """Those that there are, in the given order."""
        found: dict[str, Rollout] = {}
        for start in range(0, len(rollout_ids), PAGE):
            chunk = rollout_ids[start : start + PAGE]
            found |= {each.rollout_id: each for each in await self.store.query_rollouts(rollout_id_in=chunk)}
        return [found[each] for each in rollout_ids if each in found]

    async def group(self, rollout: Rollout) -> list[Rollout]:
        """The rollouts of the same group, itself included, in order of creation: by the group they name, else by the
        same task among the newest rollouts."""
        group = group_of(rollout)
        if not group:
            return await self._of_same_task(rollout)
        if rollout.rollout_id.startswith(group):
            found = await self.store.query_rollouts(rollout_id_contains=group)
        else:
            stem = rollout.rollout_id[: _common(rollout)]
            found = await self.store.query_rollouts(rollout_id_contains=stem, limit=5000)
        own = [each for each in found if group_of(each) == group]
        return own if any(each.rollout_id == rollout.rollout_id for each in own) else [*own, rollout]

    async def _of_same_task(self, rollout: Rollout) -> list[Rollout]:
        try:
            key = task_key(rollout.input)
        except TypeError:
            return [rollout]
        newest = await self.store.query_rollouts(newest_first=True, limit=2000)
        own = [each for each in reversed(newest) if not group_of(each) and task_key(each.input) == key]
        return own if any(each.rollout_id == rollout.rollout_id for each in own) else [*own, rollout]

    async def ratios(self, step: int | None, rollout_ids: Sequence[str]) -> CallRatios:
        """The log-ratios of new to old of the tokens of some rollouts that a step has learned from; empty where the run
        records none."""
        if self.files is None or step is None:
            return {}
        return await asyncio.to_thread(read_ratios, self.files.path, step, rollout_ids)

    async def step_of(self, rollout: Rollout) -> int | None:
        """The step that learned from a rollout; None: none did, or the audit log does not say."""
        if self.files is None or rollout.mode != "train":
            return None
        return await asyncio.to_thread(self.files.learned_at, rollout.rollout_id)

    # -- credit --------------------------------------------------------------------------------------------------------

    async def credit(self, rollout: Rollout) -> tuple[BatchCredit, int | None]:
        """The credit of the step that learned from a rollout, and that step. The rollouts of validation and evaluation
        have none."""
        config = self.config
        if self.files is None or config is None:
            return BatchCredit(notes=("only rollouts of a run have advantages: a store has no credit rule",)), None
        if not isinstance(config.algorithm, LightningRLConfig):
            return BatchCredit(notes=(f'algorithm "{config.algorithm.type}" learns from text, not from tokens',)), None
        if rollout.mode != "train":
            return BatchCredit(notes=("this rollout measures the policy: nothing is learned from it",)), None
        step = await asyncio.to_thread(self.files.learned_at, rollout.rollout_id)
        batch = None if step is None else self.files.learned_by(step)
        if batch is not None and len(batch) <= MOST_IN_BATCH:
            return await self._credit_of(("step", step), batch, config.algorithm), step
        members = [each.rollout_id for each in await self.group(rollout) if each.status == "succeeded"]
        found = await self._credit_of(("group", *members), members, config.algorithm)
        why = _why_alone(step, bool(self.files.audit()), rollout)
        return BatchCredit(found.rule, found.calls, (*found.notes, why)), step

    async def _credit_of(self, key: Any, ids: Iterable[str], config: LightningRLConfig) -> BatchCredit:
        if (known := self._credits.pop(key, None)) is None:
            rollouts = await self.by_ids(list(ids))
            known = await self._compute(rollouts, config)
        self._credits[key] = known
        if len(self._credits) > MOST_CREDITS:
            self._credits.pop(next(iter(self._credits)))
        return known

    async def _compute(self, rollouts: Sequence[Rollout], config: LightningRLConfig) -> BatchCredit:
        run = self.config
        assert run is not None
        turns = run.curriculum.turns
        reader = TrajectoryReader(self.store, run.policy.name, turn_limit_reward=turns and turns.reward)
        groups = {each.rollout_id: group_of(each) or task_key(each.input) for each in rollouts}
        tasks = {each.rollout_id: each.input for each in rollouts}
        try:
            trajectories, rejected = await reader.read(groups, tasks=tasks)
        except AgentLightningError as error:
            return BatchCredit(notes=(f"the rollouts of the step cannot be read: {error}",))
        found = await asyncio.to_thread(credit_of, trajectories, config)
        if not rejected:
            return found
        return BatchCredit(found.rule, found.calls, (*found.notes, f"{len(rejected)} rollouts cannot be read"))


def _why_alone(step: int | None, has_audit: bool, rollout: Rollout) -> str:
    if step is not None:
        return "the step is too large: advantages are computed over this group alone, weights are relative to it"
    if not has_audit:
        return "the run has no audit log: advantages are computed over this group alone, weights are relative to it"
    if rollout.status != "succeeded":
        return "this rollout did not succeed: nothing is learned from it"
    return "no step has learned from this rollout (yet); shown is what its group alone would teach"


def _common(rollout: Rollout) -> int:
    """The length of the beginning that its id shares with others of its group."""
    return max(1, len(rollout.rollout_id.rstrip("0123456789")))
