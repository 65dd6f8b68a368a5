"""Recorded data as what a run learns from: sessions of a store, conversations, or preference pairs, without an agent.

`open_recorded` reads the sessions, has `plan` choose what the algorithm learns from, in the tokens of the
model, and makes a source of batches: groups of one task each, over and over, or as they arrive. All else is the run of
any other algorithm: settings, steps, checkpoints, measurements (of an agent, where there is one), report and resume.

Sessions of tasks that have one session each share a group, whose mean reward is then the baseline of all of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import Struct

from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.preference import DPO
from agentlightning.algorithms.recorded.plan import Plan, RecordedSessions, plan, prepare
from agentlightning.algorithms.recorded.sessions import PART, Session, Sessions, Tokenizer, read_sessions
from agentlightning.algorithms.sequential import Sequential
from agentlightning.algorithms.sft import RejectionSampling, SFTResult
from agentlightning.algorithms.training import Collected, RolloutRequest
from agentlightning.config import DataConfig, TrainConfig
from agentlightning.credit.rejection import Rejection
from agentlightning.errors import ConfigError, DatasetError, TrainingStopped
from agentlightning.models.resolve import TINY
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.task import load_dataset
from agentlightning.training.persistence.checkpoints import make_starting_policy
from agentlightning.training.persistence.run_dir import RecordedData, RunDir, RunState, Tasks
from agentlightning.training.report.result import RecordedResult
from agentlightning.training.sources.collector import checked
from agentlightning.trajectory import Trajectory
from agentlightning.util.progress import Progress

SINGLES = "sessions of tasks with one session"
"""The group of such sessions."""
POLL_SECONDS = 0.5
CHECKPOINT_EVERY = 20
"""Steps between checkpoints, unless `run.checkpoint_every` says otherwise: a step costs no rollouts here."""
SUMMED = (
    "groups",
    "groups_trained",
    "groups_without_spread",
    "groups_too_small",
    "groups_without_tokens",
    "rollouts_trained",
    "tokens_trained",
    "pairs",
    "groups_without_pairs",
    "skipped_steps",
    "rollouts_not_finite",
)
"""Counts of a step that are summed over a run."""


class NothingArrived(TrainingStopped):
    """No session came for as long as a run that follows its store waits: its training ends."""


class RecordedSource(Struct):
    """Batches of recorded sessions, and the account of those that were left out."""

    plan: Plan
    data: RecordedData
    progress: Progress
    tokenizer: Tokenizer
    store: LightningStoreBase | None
    settings: DataConfig
    seed: int
    _groups: list[tuple[Trajectory, ...]] = []
    """Of the present epoch."""
    _waiting: list[Trajectory] = []
    """Those that arrived and were not learned from."""
    _known: set[str] = set()
    """Rollouts that were read."""

    def __post_init__(self) -> None:
        learned = set(self.data.source.get("learned", ()))
        self._waiting = [each for each in self.plan.trajectories if _session(each.rollout_id) not in learned]
        read = [*self.data.rejected, *(each.rollout_id for each in self._waiting)]
        self._known = {*learned, *map(_session, read)}

    async def next(self, request: RolloutRequest) -> Collected:
        """See `RolloutSource.next`. Sampling parameters and timeouts do not apply to what was recorded."""
        started = time.monotonic()
        batch = await self._arrived(request) if self.settings.follow else self._of_epoch(request)
        usable, rejected = await checked(batch, request.check)
        self.reject(rejected)
        return Collected(usable, rejected=rejected, seconds=time.monotonic() - started)

    async def recall(self, *_: object) -> tuple[Trajectory, ...]:
        """None: every session comes again by itself."""
        return ()

    def _of_epoch(self, request: RolloutRequest) -> list[Trajectory]:
        """The next `tasks` groups of at most `group_size` sessions. Each epoch has every session once, and no batch is
        of two epochs."""
        epoch, left = self.data.source.get("epoch", 0), self.data.source.get("left", 0)
        if not left or not self._groups:
            epoch += not left
            rng = random.Random(f"{self.seed}/{epoch - 1}")
            pools_singles = not isinstance(self.plan.algorithm, DPO | RejectionSampling)
            self._groups = chunks(self.plan.trajectories, request.group_size, rng, pools_singles=pools_singles)
            rng.shuffle(self._groups)
        following = self._groups[-left:]
        chosen = following[: request.tasks]
        self.data.source = {"epoch": epoch, "left": len(following) - len(chosen)}
        return [each for group in chosen for each in group]

    async def _arrived(self, request: RolloutRequest) -> list[Trajectory]:
        """As many sessions as the request asks for, whatever their tasks. Raises NothingArrived after the timeout."""
        wanted, timeout = request.tasks * request.group_size, self.settings.follow_timeout
        arrived = time.monotonic()
        while len(self._waiting) < wanted:
            if await self._read():
                arrived = time.monotonic()
            elif timeout is not None and time.monotonic() - arrived >= timeout:
                raise NothingArrived(
                    f"no session arrived for {timeout:g} s; {len(self._waiting)} of {wanted} for the next step"
                )
            else:
                await asyncio.sleep(POLL_SECONDS)
        batch, self._waiting = self._waiting[:wanted], self._waiting[wanted:]
        learned = [*self.data.source.get("learned", ()), *(_session(each.rollout_id) for each in batch)]
        self.data.source = {"learned": list(dict.fromkeys(learned))}
        groups = chunks(batch, request.group_size, random.Random(self.seed))
        return [each for group in groups for each in group]

    async def _read(self) -> bool:
        assert self.store is not None
        assert self.plan.method is not None  # LightningRL alone follows a store (`check_recorded`).
        found = await read_sessions(self.store, known=self._known)
        self._known |= {each.rollout.rollout_id for each in found.usable}
        self._known |= {each.rollout_id for each in found.rejected}
        weights = self.plan.algorithm.reward_weights
        usable, rejected = await asyncio.to_thread(prepare, found.usable, self.tokenizer, self.plan.method, weights)
        self.reject([*found.rejected, *rejected])
        self._waiting += [each.trajectory for each in usable]
        return bool(usable)

    def say(self, text: str) -> None:
        """Show something once, and keep it for the result."""
        if text not in self.data.notes:
            self.data.notes.append(text)
            self.progress.note(text)

    def reject(self, rejected: Iterable[Rejection]) -> None:
        """Count sessions that are left out, and name the first of each kind."""
        for each in rejected:
            if each.reason not in self.data.rejected.values():
                self.say(f"session {each.rollout_id} is left out ({each.reason.replace('_', ' ')}): {each.message}")
            self.data.rejected.setdefault(each.rollout_id, each.reason)

    def finish(self, outcome: object) -> None:
        """Say why the algorithm ended early; take what supervised learning, which reads its data itself, has learned
        from."""
        if isinstance(outcome, NothingArrived):
            self.say(f"training ended: {outcome}")
        if isinstance(outcome, SFTResult):
            self.data.sessions = outcome.conversations
            self.data.left_out.update(outcome.left_out)

    def result(self, lines: Sequence[Mapping[str, Any]]) -> RecordedResult:
        """`lines`: the metrics of all steps."""
        counts = Counter[str]()
        for line in lines:
            counts.update({name: int(line[name]) for name in SUMMED if line.get(name) is not None})
        return RecordedResult(
            algorithm=self.plan.algorithm.name,
            method=self.plan.method,
            sessions=self.data.sessions,
            left_out=dict(Counter(self.data.rejected.values()).most_common()) | self.data.left_out,
            rendered_calls=sum(each.rendered for each in self.plan.examples),
            foreign_calls=sum(each.foreign for each in self.plan.examples),
            metrics={name: value for name, value in (lines[-1] if lines else {}).items() if value is not None},
            counts=dict(counts),
            notes=tuple(self.data.notes),
        )


def _session(rollout_id: str) -> str:
    """The session that a part is of."""
    return rollout_id.partition(PART)[0]


def chunks(
    trajectories: Sequence[Trajectory], group_size: int, rng: random.Random, *, pools_singles: bool = True
) -> list[tuple[Trajectory, ...]]:
    """The sessions of each task in groups of at most `group_size`, as equal in size as can be. `pools_singles`: those
    of tasks with one session share groups; else each is a group of its own."""
    by_task: dict[str, list[Trajectory]] = {}
    for each in trajectories:
        by_task.setdefault(each.group, []).append(each)
    singles = [name for name, group in by_task.items() if len(group) == 1]
    if pools_singles and singles:
        by_task[SINGLES] = [by_task.pop(name)[0] for name in singles]
    found: list[tuple[Trajectory, ...]] = []
    for name, group in by_task.items():
        rng.shuffle(group)
        count = -(-len(group) // group_size)
        for number in range(count):
            part = f"{name}#{number}" if count > 1 else name
            found.append(tuple(replace(each, group=part) for each in group[number::count]))
    return found


# -- opening ---------------------------------------------------------------------------------------------------------


async def open_recorded(
    config: TrainConfig,
    algorithm: Algorithm[Any],
    store: LightningStoreBase | None,
    run_dir: RunDir,
    state: RunState,
    progress: Progress,
    stack: AsyncExitStack,
) -> tuple[TrainConfig, RecordedSource]:
    """The source of a run, new or resumed, and its settings, which name the store of its sessions where they can. That
    store is the one of a query, else `store`, that of the trainer, else the algorithm's, or the one in the settings.

    Raises DatasetError where there is nothing that the algorithm can learn from, saying what is missing."""
    data = state.recorded
    assert data is not None
    query = getattr(algorithm, "dataset", None)
    if isinstance(query, TrajectoryQuery):
        store = query.store
    elif store is None:
        store = getattr(algorithm, "store", None)
    if not algorithm.reads_sessions:
        store = None
    elif store is None:
        store = open_sessions(config.data.sessions)
        stack.push_async_callback(store.close)
    elif not isinstance(getattr(store, "path", None), Path):
        state.objects = [*{*state.objects, "store"}]
    path = getattr(store, "path", None)
    if isinstance(path, Path):
        config = config.with_section("data", sessions=str(path.resolve()))
    progress.phase("reading the data" if store is None else "reading sessions")
    target = getattr(getattr(algorithm, "config", None), "target_agent", None)
    sessions = await _sessions(store, data, config.data, target, progress)
    records = [] if config.policy.model != TINY else _texts(algorithm, sessions.usable)
    if config.policy.model == TINY and not records:
        raise ConfigError("no model: give model=NAME to the trainer, such as smollm2-135m or a directory")
    await make_starting_policy(config, run_dir, Tasks(records), progress)
    recorded = RecordedSessions(
        sessions.usable,
        await _tokenizer(config, run_dir, target),
        data.method or config.data.method,  # pyright: ignore[reportArgumentType]
        config.data.success_threshold,
        config.data.follow,
        data.given,
        data.sources.get("dataset") or {"threshold": config.data.success_threshold},
    )
    made = await asyncio.to_thread(plan, algorithm, recorded)
    measured = {"modes_val_and_test": sessions.measured} if sessions.measured else {}
    if data.rollouts is None:
        data.left_out = {**made.left_out, **measured}
        if store is not None and not config.data.follow:
            data.rollouts = [
                each.rollout_id for each in (*(each.rollout for each in sessions.usable), *sessions.rejected)
            ]
    data.method, data.sessions = made.method, made.sessions or data.sessions
    source = RecordedSource(made, data, progress, recorded.tokenizer, store, config.data, config.run.seed)
    source.reject([*sessions.rejected, *made.rejected])
    for note in made.notes:
        source.say(note)
    return config, source


def recorded_data(algorithm: Algorithm[Any], *, is_object: bool) -> RecordedData:
    """That of a new run. All settings of an algorithm that is no object may come from a file that has every one."""
    config, query = getattr(algorithm, "config", None), getattr(algorithm, "dataset", None)
    data = RecordedData(sorted(getattr(config, "model_fields_set", ())) if is_object else [])
    if isinstance(query, TrajectoryQuery):
        data.sources["dataset"] = {name: getattr(query, name) for name in query.__slots__ if name != "store"}
    return data


def open_sessions(name: str | None) -> LightningStoreBase:
    """A store of sessions: a SQLite file, an address of PostgreSQL, or the URL of a server; None: the default one.
    Raises DatasetError for a file that is not there: opening would make an empty store."""
    if name is not None and "://" not in name and not Path(name).exists():
        raise DatasetError(f"there is no store at {name}; record sessions first, or name another one")
    return LightningStore() if name is None else LightningStore(name)


async def _sessions(
    store: LightningStoreBase | None, data: RecordedData, settings: DataConfig, target: str | None, progress: Progress
) -> Sessions:
    """What the store holds, or held when the run began; one that is followed, once it holds something."""
    if store is None:
        return Sessions(())
    found = await read_sessions(store, ids=data.rollouts)
    if data.rollouts and (lost := len(data.rollouts) - len(found.usable) - len(found.rejected)):
        progress.note(f"warning: {lost} sessions of this run are no longer in the store")
    since, timeout = time.monotonic(), settings.follow_timeout
    while settings.follow and not found.usable and (timeout is None or time.monotonic() - since < timeout):
        await asyncio.sleep(POLL_SECONDS)
        found = await read_sessions(store)
    found.check()
    found.check_target(target)
    return found


def _texts(algorithm: Algorithm[Any], sessions: Sequence[Session]) -> list[Any]:
    """What a tiny model's tokenizer is made of: the algorithm's own conversations, or what sessions say."""
    own = getattr(algorithm, "dataset", None) or getattr(algorithm, "data", None)
    if own and not algorithm.reads_sessions:
        return [each for each in load_dataset(own) if isinstance(each, dict | list)]
    return [
        [session.rollout.input, *([*call.messages, call.answer, *call.tools] for call in session.calls)]
        for session in sessions
    ]


async def _tokenizer(config: TrainConfig, run_dir: RunDir, target: str | None) -> Tokenizer:
    from agentlightning.chat.hf import load_chat_format
    from agentlightning.models.resolve import model_limits, resolve_model

    policy = config.policy
    directory = await asyncio.to_thread(resolve_model, str(run_dir.start) if run_dir.start.exists() else policy.model)
    chat = await load_chat_format(directory, policy.tool_calls)
    vocabulary, context = await asyncio.to_thread(model_limits, directory)
    return Tokenizer(chat, min(context, policy.max_context or context), vocabulary, target)


def check_recorded(algorithm: Algorithm[Any], config: TrainConfig, agent: Any, held_out: object) -> None:
    """Raises ConfigError for what cannot learn from recorded data, and for settings that do not go together."""
    if not algorithm.learns_weights:
        raise ConfigError(
            f"{type(algorithm).__name__} trains no weights, so recorded sessions teach it nothing; give an agent"
            " and tasks: train(agent=..., train_dataset=...)"
        )
    if isinstance(algorithm, Sequential):
        raise ConfigError(
            "Sequential runs an agent in each of its stages; give train(agent=..., train_dataset=...), or one"
            " algorithm to learn from recorded sessions"
        )
    data = config.data
    for_rollouts: dict[str, Any] = {
        "guard": config.guard,
        "gate": agent is None and config.gate,
        "group_reward": config.group_reward,
        "run.gateways": config.run.gateways,
        "data.train": data.sessions and data.train,
        "data.validation": data.sessions and data.validation,
    }
    if unused := [name for name, setting in for_rollouts.items() if setting]:
        raise ConfigError(f"{', '.join(unused)}: for rollouts of an agent, and this run has none; leave it out")
    if (agent is None) != (not held_out):
        raise ConfigError(
            "eval_agent and held_out_dataset go together: give both, or neither; a resumed run has its tasks, and needs"
            " an agent that was an object in memory again: train(eval_agent=...), or --eval-agent"
        )
    of_rl = {"method": data.method != "auto", "follow": data.follow}
    if not isinstance(algorithm, LightningRL) and (unused := [name for name, is_set in of_rl.items() if is_set]):
        raise ConfigError(
            f"{', '.join(unused)}: for LightningRL, and {algorithm.name!r} learns otherwise; leave it out"
        )
    if data.follow_timeout is not None and not data.follow:
        raise ConfigError(f"follow_timeout={data.follow_timeout:g} has a meaning with follow=True only")
    if data.follow and data.method == "rejection":
        raise ConfigError('follow=True learns by "importance" or "awr"; method="rejection" learns from what is there')


def check_live(algorithm: Algorithm[Any], config: TrainConfig) -> None:
    """Raises ConfigError for data that a run with an agent would not learn from."""
    names, default = ("sessions", "method", "success_threshold", "follow", "follow_timeout"), DataConfig()
    if unused := [f"data.{name}" for name in names if getattr(config.data, name) != getattr(default, name)]:
        raise ConfigError(
            f"{', '.join(unused)}: fit() runs an agent, and train() learns from recorded sessions; call that"
        )
    stages: Any = getattr(algorithm, "stages", (algorithm,))
    if any(isinstance(each, DPO) and not each.reads_sessions for each in stages):
        raise ConfigError(
            "DPO was given data, and with an agent it learns from preferences between its rollouts; leave data out, or"
            " leave the agent out: Trainer(...).train(eval_agent=agent, held_out_dataset=tasks) measures it"
        )
