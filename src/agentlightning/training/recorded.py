"""Recorded data as what a run learns from: sessions of a store, conversations, or preference pairs, without an agent.

`open_recorded` reads the sessions and makes a `RecordedSource`, which chooses what the algorithm learns from, in the
tokens of the model, and hands it out in batches: groups of one task each, over and over, or as they arrive. All else is
the run of any other algorithm: settings, steps, checkpoints, measurements (of an agent, where there is one), report and
resume.

LightningRL learns from sessions of another policy by one of three methods, and other algorithms from the same forms:

    importance   the policy gradient, each token weighed by a clipped importance ratio without gradient (CISPO,
                 arXiv:2506.13585, equations 4 and 5): needs the log-probability each token was sampled with
    awr          advantage-weighted regression (arXiv:1910.00177, equation 3): needs rewards that differ
    rejection    rejection sampling fine-tuning (arXiv:2308.01825): imitates the successful sessions, and needs some

The clip of PPO is for data of the present policy: beyond its bounds a token has no gradient, so that sessions of
another policy would soon teach nothing. Sessions of tasks that have one session each share a group, whose mean reward
is then the baseline of all of them.
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
from typing import Any, Literal

from msgspec import Struct, field

from agentlightning.algorithms.base import Algorithm
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.preference import DPO, load_preferences, to_preferences
from agentlightning.algorithms.recorded.sessions import (
    NO_LOGPROBS,
    PART,
    Session,
    Sessions,
    TokenizedSession,
    Tokenizer,
    describe_notes,
    read_sessions,
    successful,
    without_probabilities,
)
from agentlightning.algorithms.sequential import Sequential
from agentlightning.algorithms.sft import RejectionSampling, SFTAlgorithm, SFTResult
from agentlightning.algorithms.training import Collected, RolloutRequest
from agentlightning.config import CurriculumConfig, DataConfig, TrainConfig
from agentlightning.credit import group_trajectories, is_target
from agentlightning.credit.base import SMALLEST_SPREAD, spread
from agentlightning.credit.rejection import Rejection, count_reasons, describe_reasons
from agentlightning.errors import ConfigError, DatasetError, TrainingStopped
from agentlightning.models.resolve import TINY
from agentlightning.policy.losses import SAMPLED_LOGPROBS, AWRLoss, CISPOLoss, PPOLoss
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.trajectory_query import TrajectoryQuery
from agentlightning.task import load_dataset, task_key
from agentlightning.training.persistence.checkpoints import make_starting_policy
from agentlightning.training.persistence.run_dir import RecordedData, RunDir, RunState, Tasks
from agentlightning.training.report.result import RecordedResult
from agentlightning.training.sources.collector import checked
from agentlightning.trajectory import Trajectory
from agentlightning.util.progress import Progress

# -- forms -----------------------------------------------------------------------------------------------------------

Method = Literal["importance", "awr", "rejection"]
Form = Literal["importance", "awr", "rejection", "whole", "recorded"]
"""The form of sessions: that of a method, whole sessions of whatever policy, or what was recorded as it is."""
METHODS: Mapping[Method, str] = {
    "importance": "importance-weighted policy gradient",
    "awr": "advantage-weighted regression",
    "rejection": "rejection sampling fine-tuning",
}


def check_any(found: Sequence[TokenizedSession], rejected: Sequence[Rejection]) -> None:
    """Raises DatasetError where no session can be learned from."""
    if not found:
        raise DatasetError(f"no session has a reward and tokens to learn from; the last one: {rejected[-1].message}")


def divided(session: Session, form: Form, target: str | None) -> list[Session]:
    """A session, or its parts of the agents to train where it holds several rewards. A conversation is one episode,
    whose credit rule says what each reward is due to, unless it is imitated."""
    if not session.rewards or not (form == "rejection" or (form == "awr" and session.has_independent_parts)):
        return [session]
    parts = [part for part in session.parts() if any(is_target(call.agent, target) for call in part.calls)]
    return parts or [session]


def with_loss(algorithm: LightningRL, given: Sequence[str], by_ratio: bool) -> LightningRL:
    """What learns from sessions of another policy, with the loss of the method unless one that fits was `given`."""
    config = algorithm.config
    changes: dict[str, Any] = {} if by_ratio else {"mismatch": None}
    needs_sampler = any(SAMPLED_LOGPROBS in loss.needs for loss in config.losses)
    if needs_sampler != by_ratio or ("loss" not in given and config.loss == PPOLoss()):
        changes["loss"] = CISPOLoss() if by_ratio else AWRLoss()
    found = algorithm.with_settings(changes, "for the recorded sessions")
    found.objective = "reinforcement" if by_ratio else "supervised"
    return found


def _by_prompt(whole: Trajectory) -> Trajectory:
    """Parts of sessions are compared with those that answer the same prompt, and not with all of their task."""
    if PART not in whole.rollout_id:
        return whole
    return replace(whole, group=f"{whole.group} {task_key(list(whole.transitions[0].prompt_token_ids))}")


# -- source ----------------------------------------------------------------------------------------------------------

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
    """What an algorithm learns from in a run on recorded data, in batches, and the account of what was left out."""

    algorithm: Algorithm[Any]
    """That of the run; `choose` gives it what it learns from, or puts the one of a method in its place."""
    sessions: Sequence[Session]
    """Of a store; empty for data of the algorithm's own."""
    tokenizer: Tokenizer
    settings: DataConfig
    data: RecordedData
    progress: Progress
    store: LightningStoreBase | None
    seed: int
    _chosen: Sequence[Trajectory] = ()
    """Empty for an algorithm that reads its data itself."""
    _calls: Counter[str] = field(default_factory=Counter[str])
    """Calls of what was chosen, or arrived since, that were `rendered` from text, and `foreign` ones among them."""
    _groups: list[tuple[Trajectory, ...]] = []
    """Of the present epoch."""
    _waiting: list[Trajectory] = []
    """Those that arrived and were not learned from."""

    # -- choosing ------------------------------------------------------------------------------------------------------

    def choose(self) -> None:
        """Choose what the algorithm learns from. Raises DatasetError where that is nothing, saying what is missing."""
        algorithm = self.algorithm
        if isinstance(algorithm, SFTAlgorithm):
            return self._demonstrations(algorithm)
        if isinstance(algorithm, RejectionSampling):
            found = self._successes(algorithm)
        elif isinstance(algorithm, DPO):
            found = self._preferences(algorithm)
        else:
            found = self._by_method(algorithm) if isinstance(algorithm, LightningRL) else self._in_form("whole")
        self.learn_from(found)
        return None

    def learn_from(self, examples: Sequence[TokenizedSession]) -> None:
        """Take these as what was chosen."""
        found = self._chosen = self._counted(examples)
        learned = set(self.data.source.get("learned", ()))  # Earlier versions have whole sessions there.
        self._waiting = [each for each in found if learned.isdisjoint((each.rollout_id, _session(each.rollout_id)))]

    def _counted(self, examples: Sequence[TokenizedSession]) -> list[Trajectory]:
        for each in examples:
            self._calls.update(rendered=each.rendered, foreign=each.foreign)
        return [each.trajectory for each in examples]

    def prepare(self, sessions: Sequence[Session], form: Form) -> tuple[list[TokenizedSession], list[Rejection]]:
        """The sessions that have a reward, or parts of them, in the form that is learned from, and those that cannot
        be."""
        found: list[TokenizedSession] = []
        rejected: list[Rejection] = []
        weights = self.algorithm.reward_weights
        for session in (part for each in sessions for part in divided(each, form, self.tokenizer.target)):
            made, score = self.tokenizer(session), session.score(weights)
            if isinstance(made, Rejection) or isinstance(score, Rejection):
                rejected.append(made if isinstance(made, Rejection) else score)  # pyright: ignore[reportArgumentType]
            elif form == "importance" and not made.logprobs:
                message = 'of its calls no log-probabilities in tokens of this model are known; method="awr" learns'
                rejected.append(Rejection(made.trajectory.rollout_id, NO_LOGPROBS, f"{message} from it"))
            else:
                own = replace(made.trajectory, weights=weights)
                kept = own if form in ("importance", "recorded") else without_probabilities(own)
                found.append(replace(made, trajectory=kept))
        return found, rejected

    def _in_form(
        self, form: Form, refused: Sequence[Rejection] = (), why: Sequence[str] = ()
    ) -> list[TokenizedSession]:
        """The sessions in a form, but not those that the algorithm has `refused`. Says how many, or `why` these."""
        found, rejected = self.prepare(self.sessions, form)
        check_any(found, rejected)
        left_out = {each.rollout_id for each in refused}
        found = [each for each in found if each.trajectory.rollout_id not in left_out]
        notes = [*why] or [f"{self.algorithm.name}: {len(found)} sessions"]
        if form != "whole" and (several := sum(bool(each.rewards) for each in self.sessions)):
            notes.append(f"{several} sessions hold several rewards; each belongs to the calls since the one before it")
        if foreign := sum(each.foreign for each in found):
            notes.append(f"{foreign} calls have tokens of another tokenizer; their text is rendered anew")
        self._report(len(found), [*rejected, *refused], notes)
        return found

    def _report(self, number: int, rejected: Iterable[Rejection], notes: Sequence[str]) -> None:
        self.data.sessions = number
        self.reject(rejected)
        for note in (*notes, *describe_notes(self.tokenizer.counts)):
            self.say(note)

    def _demonstrations(self, algorithm: SFTAlgorithm) -> None:
        found = algorithm.dataset
        if algorithm.reads_sessions:
            default: Any = self.data.sources.get("dataset") or {"threshold": self.settings.success_threshold}
            query: Any = algorithm.dataset or TrajectoryQuery(None, **default)
            found, left_out = successful(self.sessions, query)
            self.data.left_out.update(left_out)
        self.algorithm = algorithm.on(found)

    def _successes(self, algorithm: RejectionSampling, why: Sequence[str] = ()) -> list[TokenizedSession]:
        made, bound = self._in_form("rejection", why=why), algorithm.config.success_threshold
        chosen = [each for each in made if algorithm.is_success(each.trajectory)]
        if not chosen:
            raise DatasetError(
                f"none of {len(made)} sessions has a reward of {bound:g} or more; lower success_threshold"
            )
        self.data.sessions = len(chosen)
        return chosen

    def _preferences(self, algorithm: DPO) -> list[TokenizedSession]:
        if algorithm.reads_sessions:
            made = [replace(each, trajectory=_by_prompt(each.trajectory)) for each in self._in_form("awr")]
        else:
            records = load_preferences(algorithm.data)
            found, rejected = to_preferences(records, self.tokenizer)
            if not found:
                raise DatasetError(
                    f"none of {len(records)} preference pairs can be learned from"
                    f" ({describe_reasons(count_reasons(rejected))}). The first: {rejected[0].rollout_id}:"
                    f" {rejected[0].message}"
                )
            pairs = len(found) // 2
            self._report(pairs, rejected, [f"{algorithm.name}: {pairs} preference pairs"])
            made = [TokenizedSession(each) for each in found]
        algorithm.check_data([each.trajectory for each in made], algorithm.config.target_agent)
        return made

    def _by_method(self, algorithm: LightningRL) -> list[TokenizedSession]:
        config = algorithm.config
        self.sessions = [self.tokenizer.read(each) for each in self.sessions]
        found, rejected = self.prepare(self.sessions, "recorded")
        check_any(found, rejected)
        sampled = [each.trajectory for each in found if each.logprobs]
        refused = algorithm.rejections(sampled, config.target_agent) if sampled else []
        method, why = self.choose_method(found, len(sampled) - len(refused))
        self.data.method = method
        if method == "rejection":
            names = ("steps", "tasks_per_step", "target_agent", "reward_weights", "optimizer")
            shared: dict[str, Any] = {name: getattr(config, name) for name in names}
            bound = self.settings.success_threshold
            self.algorithm = learner = RejectionSampling(group_size=1, success_threshold=bound, **shared)
            return self._successes(learner, why)
        by_ratio = method == "importance"
        self.algorithm = with_loss(algorithm, self.data.given, by_ratio)
        return self._in_form(method, refused if by_ratio else (), why)

    def choose_method(self, found: Sequence[TokenizedSession], known: int) -> tuple[Method, list[str]]:
        """The method that the data has what it needs for, and why: of the sessions that were `found`, `known` have
        log-probabilities. Raises DatasetError, saying what is missing."""
        trajectories, weights = [each.trajectory for each in found], self.algorithm.reward_weights
        groups = [[each.score or 0.0 for each in group] for group in group_trajectories(trajectories)]
        singles = [group[0] for group in groups if len(group) == 1]
        varied = self.settings.follow
        varied = varied or any(spread(group) > SMALLEST_SPREAD for group in (*groups, singles) if group)
        ids, bound = {each.rollout_id for each in trajectories}, self.settings.success_threshold
        own = [each for each in self.sessions if each.rollout.rollout_id in ids]
        parts = [part for each in own for part in divided(each, "rejection", self.tokenizer.target)]
        wins = sum(reward >= bound for part in parts if (reward := part.reward(weights)) is not None)
        method, tasks = self.data.method or self.settings.method, len(groups)
        if method == "importance" and not known:
            raise DatasetError(
                f'method="importance" needs log-probabilities of the sampler, and none of {len(found)} sessions has'
                ' them in tokens of this model: record through the gateway with this model, or use method="awr"'
            )
        if method in ("importance", "awr") and not varied:
            raise DatasetError(
                f'method="{method}" learns from differences in reward, and the sessions of each of {tasks} tasks'
                ' have the same one; record more of the same task, or use method="rejection"'
            )
        if method == "auto" and varied:
            method = "importance" if known * 2 >= len(found) else "awr"
        elif method in ("auto", "rejection"):
            method = "rejection"
            if not wins:
                raise DatasetError(
                    f"the sessions of each of {tasks} tasks have the same reward, and none of {len(found)} has"
                    f" {bound:g} or more: there is nothing to prefer. Record sessions that differ, or lower"
                    " success_threshold"
                )
        notes = [
            f"LightningRL learns by {METHODS[method]}: {len(found)} sessions of {tasks} tasks, {known} of them"
            f" with log-probabilities, {wins} with a reward of {bound:g} or more"
        ]
        if singles:
            notes.append(f"{len(singles)} tasks have one session each; their baseline is the mean of such sessions")
        return method, notes

    # -- batches -------------------------------------------------------------------------------------------------------

    async def next(self, request: RolloutRequest) -> Collected:
        """See `RolloutSource.next`. Sampling parameters and timeouts do not apply to what was recorded."""
        started = time.monotonic()
        batch = await self._arrived(request) if self.settings.follow else self._of_epoch(request)
        usable, rejected = await checked(batch, request.check)
        self.reject(rejected)
        if self.settings.follow:
            self.data.sessions = len(set(self.data.source["learned"]) - self.data.rejected.keys())
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
            pools_singles = not isinstance(self.algorithm, DPO | RejectionSampling)
            self._groups = chunks(self._chosen, request.group_size, rng, pools_singles=pools_singles)
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
        self.data.source = {"learned": [*self.data.source.get("learned", ()), *(each.rollout_id for each in batch)]}
        groups = chunks(batch, request.group_size, random.Random(self.seed))
        return [each for group in groups for each in group]

    async def _read(self) -> bool:
        assert self.store is not None
        assert self.data.method is not None  # LightningRL alone follows a store (`check_recorded`).
        waiting = (each.rollout_id for each in self._waiting)
        read = {_session(each) for each in (*self.data.source.get("learned", ()), *self.data.rejected, *waiting)}
        found = await read_sessions(self.store, known=read)
        usable, rejected = await asyncio.to_thread(self.prepare, found.usable, self.data.method)
        self.reject([*found.rejected, *rejected])
        self._waiting += self._counted(usable)
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
            algorithm=self.algorithm.name,
            method=self.data.method,
            sessions=self.data.sessions,
            left_out=dict(Counter(self.data.rejected.values()).most_common()) | self.data.left_out,
            rendered_calls=self._calls["rendered"],
            foreign_calls=self._calls["foreign"],
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
    tokenizer, seed = await _tokenizer(config, run_dir, target), config.run.seed
    source = RecordedSource(algorithm, sessions.usable, tokenizer, config.data, data, progress, store, seed)
    source.reject(sessions.rejected)
    await asyncio.to_thread(source.choose)
    if sessions.measured:
        data.left_out["modes_val_and_test"] = sessions.measured
    if data.rollouts is None and store is not None and not config.data.follow:
        data.rollouts = [each.rollout_id for each in (*(each.rollout for each in sessions.usable), *sessions.rejected)]
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
        "curriculum": config.curriculum != CurriculumConfig(),
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
