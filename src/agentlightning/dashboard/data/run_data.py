"""All that views read of runs and stores, with what is remembered between requests; and the catalog of those that a
dashboard shows."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from string import digits
from typing import Any

import orjson

from agentlightning import span as names
from agentlightning.algorithms.lightning_rl import (
    AgentRoles,
    LightningRLConfig,
    assignment_of,
    most_uncertain,
    shape_rewards,
    truncated_rollouts,
    without_weight,
)
from agentlightning.assemble import is_call
from agentlightning.config import TrainConfig
from agentlightning.credit import Assignment, group_trajectories, training_samples
from agentlightning.dashboard.data.rollouts import (
    AttemptIndexes,
    Summaries,
    Updates,
    call_facts,
    digest_of,
    group_of,
    message_json,
    messages_of,
    shortened,
)
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.errors import AgentLightningError, ConfigError, NotFoundError
from agentlightning.policy.learner import updates_of
from agentlightning.rollouts import Rollout
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import task_key
from agentlightning.training.sources.collector import RolloutPlan, TrajectoryReader
from agentlightning.training.tracking import CallRatios, read_ratios
from agentlightning.training.watch import running_rollouts
from agentlightning.trajectory import CallId, TrainingSample, Trajectory
from agentlightning.util.json_values import Json

# -- the text of tokens -----------------------------------------------------------------------------------------------
#
# Token ids alone say little. The vocabulary maps pieces to ids; a piece is bytes written as letters (byte-level BPE),
# or text with U+2581 for a space (SentencePiece), with `<0x0A>` for single bytes. Where several tokens make one letter,
# each of them shows as U+FFFD.


PLACES = ("start", "checkpoint", ".")
"""Where a run directory may have the file, beside its checkpoints."""


def read_texts(path: Path) -> dict[int, str]:
    """The text of each token. Raises OSError, ValueError, LookupError or TypeError for a file that is no tokenizer."""
    document: Any = orjson.loads(path.read_bytes())
    vocabulary = document["model"]["vocab"]
    entries = vocabulary.items() if isinstance(vocabulary, dict) else ((v[0], i) for i, v in enumerate(vocabulary))
    text_of = _text_of_bytes if b'"ByteLevel"' in orjson.dumps(document.get("decoder")) else _text_of_piece
    added = {int(each["id"]): str(each["content"]) for each in document.get("added_tokens") or ()}
    return {int(number): text_of(str(piece)) for piece, number in entries} | added


def _text_of_bytes(piece: str) -> str:
    try:
        return piece.translate(BYTES).encode("latin-1").decode(errors="replace")
    except UnicodeEncodeError:
        return piece


def _text_of_piece(piece: str) -> str:
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    return bytes.fromhex(byte[1]).decode(errors="replace") if byte else piece.replace("\u2581", " ")


def find_texts(run: Path, model: str | None) -> dict[int, str] | None:
    """Those of a run, by the files of its weights, else of the model it started from. None: none can be read."""
    saved = sorted((run / "checkpoints").glob("step-*"), reverse=True)
    for folder in (*(run / place for place in PLACES), *saved, *([run / model] if model else ())):
        try:
            return read_texts(folder / "tokenizer.json")
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return None


_SHOWN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
BYTES = {256 + place: byte for place, byte in enumerate(_HIDDEN)}
"""By the letter that byte-level BPE writes for it: the next from U+0100, where it cannot be seen itself."""


# -- credit -----------------------------------------------------------------------------------------------------------
#
# A run does not store them: they follow from the rewards of a step's rollouts by its credit rule. They are computed
# again with the run's own settings over the rollouts that the step was given, in the order in which `LightningRL` does
# so. What cannot be repeated without the policy (its values, a divergence from the reference) is named in `notes`.


REMEMBERING = frozenset({"state_value", "hierarchical"})
"""Rules that also use what they remember of earlier steps."""


CallCredit = tuple[list[float], list[float]]
"""Of each sampled token of a call: the advantage, and the factor of its loss, of which 0 carries none."""


@dataclass(frozen=True, slots=True)
class BatchCredit:
    """The credit of the calls of a batch."""

    rule: str | None = None
    calls: Mapping[CallId, CallCredit] = field(default_factory=dict[CallId, CallCredit])
    """By (rollout_id, span_id). A call that is missing carries no loss."""
    notes: tuple[str, ...] = ()
    """What differs from the numbers of the run, and why there are none."""


def credit_of(trajectories: Sequence[Trajectory], config: LightningRLConfig) -> BatchCredit:
    """The credit of the rollouts of a step."""
    rule = None
    try:
        assignment = assignment_of(config)
        rule = assignment.rule.type
        if not (needs := assignment.rule.needs):
            samples = _samples(trajectories, config, assignment)
            return BatchCredit(rule, _by_call(samples), tuple(_notes(config, rule)))
        needed = ", ".join(sorted(needs))
        note = f'credit rule "{rule}" reads {needed} of the policy, which are not kept: no advantages are shown'
    except ModuleNotFoundError as error:
        note = f"{error.name} is not installed: pip install 'agentlightning[train]'"
    except AgentLightningError as error:
        note = f"the credit of this step cannot be computed: {error}"
    return BatchCredit(rule, notes=(note,))


def _samples(
    trajectories: Sequence[Trajectory], config: LightningRLConfig, assignment: Assignment
) -> list[TrainingSample]:
    target = config.target_agent
    shaped, _ = shape_rewards(trajectories, config, target)
    groups = most_uncertain(group_trajectories(shaped), config.keep_groups)
    trains = AgentRoles(config.agents).trains
    samples, _ = training_samples(groups, assignment, aggregate=config.aggregate, target_agent=target, trains=trains)
    return without_weight(samples, truncated_rollouts(trajectories, target)) if config.mask_truncated else samples


def _notes(config: LightningRLConfig, rule: str) -> Iterator[str]:
    if rule in REMEMBERING:
        yield f'credit rule "{rule}" also uses what it remembers of earlier steps; this is of the step alone'
    if config.kl_in_reward:
        yield "kl_in_reward takes a divergence from the reference off the rewards, which is not kept"
    if config.replay is not None:
        yield "replay adds rollouts of earlier steps to groups; they are left out here"
    if any(loss.type in ("sdpo", "distill") for loss in config.losses):
        yield 'losses "sdpo" and "distill" also learn from the distribution of a teacher, which is not kept'


def _by_call(samples: Iterable[TrainingSample]) -> dict[CallId, CallCredit]:
    found: dict[CallId, CallCredit] = {}
    for sample in samples:
        columns: Any = zip(sample.tree.nodes, sample.advantages, sample.weights, strict=True)
        for node, own, factor in columns:
            if node.sampled and node.call is not None and node.rollout_id is not None:
                advantages, weights = found.setdefault((node.rollout_id, node.call), ([], []))
                advantages += own.tolist()
                weights += factor.tolist()
    return found


@dataclass(frozen=True, slots=True)
class TokenFacts:
    """What is known of the tokens of some rollouts beside what their spans say."""

    updates: Updates
    credit: BatchCredit = BatchCredit()
    step: int | None = None
    """The one that learned from them."""
    ratios: CallRatios = field(default_factory=CallRatios)
    """The log-ratios of new to old; empty where the run records none."""
    texts: Mapping[int, str] | None = None
    """None: there is no tokenizer that can be read."""

    def text(self, token_id: int) -> str | None:
        return None if self.texts is None else self.texts.get(token_id, f"<{token_id}>")


# -- one run or store -------------------------------------------------------------------------------------------------


SECONDS = 1.0
"""How long an answer about what happens now is given to all who ask."""
NEWEST = 30
"""Calls and running rollouts that are shown."""
MOST_WORKERS = 1000
SPANS = 100
SPANS_OF_SHARED = 1000
"""Spans that are read to find the newest calls; more where the store also has rollouts of others."""
MOST_IN_BATCH = 1024
"""Rollouts of a step over which credit is computed; with more, only the group itself is read."""
MOST_CREDITS = 8
"""Steps whose credit is remembered."""
MOST_NAMED = 20_000
"""Rollouts whose ids may say that they are of a group."""
MOST_NEAR = 2000
"""Rollouts created before one, and after it, among which those of its group are where ids do not tell."""


def files_of_run(name: str, files: RunFiles | None) -> RunFiles:
    """Raises NotFoundError for a store by itself, which has no steps, settings or checkpoints."""
    if files is None:
        raise NotFoundError(f"{name!r} is a store, not a run; it has rollouts, and neither steps nor settings")
    return files


class RunData:
    """One run, or a store by itself, which has no files. `shares_store`: the store also has rollouts of others.
    `writable`: requests with the token may change the store."""

    def __init__(self, files: RunFiles | None, store: LightningStoreBase, shares_store: bool, writable: bool) -> None:
        self.files, self.store, self.shares_store, self.writable = files, store, shares_store, writable
        self.readers = 0
        """Requests that read it."""
        self.summaries = Summaries(store, self.weights, self.updates)
        self.attempts = AttemptIndexes(store)
        self._texts: Mapping[int, str] | None = None
        self._live, self._live_until, self._reads_live = Json(), 0.0, asyncio.Lock()
        self._credits: dict[Any, BatchCredit] = {}

    @contextmanager
    def reading(self) -> Generator[None]:
        """Within it, its store stays open."""
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1

    @property
    def name(self) -> str:
        return STORE if self.files is None else self.files.name

    def run(self) -> RunFiles:
        """Raises as `files_of_run`."""
        return files_of_run(self.name, self.files)

    @property
    def run_id(self) -> str:
        """What the ids of its rollouts contain. Raises as `run`."""
        return self.run().state().run_id

    @property
    def in_ids(self) -> str | None:
        """What the ids of its rollouts and resources contain; None: all of the store are its own."""
        return self.run_id if self.shares_store else None

    @property
    def config(self) -> TrainConfig | None:
        return self.files and self.files.config()

    @property
    def weights(self) -> dict[str, float] | None:
        """Those that a run gives the dimensions of a reward."""
        return getattr(self.config and self.config.algorithm, "reward_weights", None)

    def updates(self, version: int) -> int:
        """By the resumes of a run as they are now; the version itself where there is no run."""
        return version if self.files is None else updates_of(version, self.files.state().resumes)

    async def rollout(self, rollout_id: str) -> Rollout:
        """Raises NotFoundError."""
        found = await self.store.get_rollout_by_id(rollout_id)
        if found is None:
            raise NotFoundError(f"no rollout {rollout_id!r} in this store")
        return found

    async def by_ids(self, rollout_ids: Sequence[str]) -> list[Rollout]:
        """Those that there are, in the given order."""
        found = {each.rollout_id: each for each in await self.store.query_rollouts(rollout_id_in=rollout_ids)}
        return [found[each] for each in rollout_ids if each in found]

    async def group(self, rollout: Rollout) -> list[Rollout]:
        """The rollouts of the same group, itself included, in order of creation: by the group they name, else by the
        same task; among those created around it where ids do not tell groups."""
        key = _group_key(rollout)
        named = await self.by_group_name(key[0]) if key[0] else None
        own = [each for each in named or () if _group_key(each) == key]
        if all(each.rollout_id != rollout.rollout_id for each in own):
            near = partial(self.store.query_rollouts, after=rollout.rollout_id, limit=MOST_NEAR)
            around = [*(await near(newest_first=True))[::-1], rollout, *await near()]
            own = [each for each in around if each is rollout or (key[-1] and _group_key(each) == key)]
        return own

    async def by_group_name(self, group: str) -> list[Rollout] | None:
        """Those whose ids say that they may be of a group, as those of training runs do: they contain its name without
        the number at its end, which ids write with zeros. None: ids do not tell the group."""
        named = partial(self.store.query_rollouts, rollout_id_contains=group.rstrip(digits))
        first = await named(limit=1)
        return await named(limit=MOST_NAMED) if first and _tells_group(first[0]) else None

    async def facts(self, rollout: Rollout, rollout_ids: Sequence[str]) -> TokenFacts:
        """Of some rollouts of the same group."""
        credit, step = await self.credit(rollout)
        files, ratios = self.files, CallRatios()
        if files is not None and step is not None:
            ratios = await asyncio.to_thread(read_ratios, files.path, step, rollout_ids)
        if files is not None and self._texts is None:  # a tokenizer that is still to be written is looked for again
            model = self.config and self.config.policy.model
            self._texts = await asyncio.to_thread(find_texts, files.path, model)
        return TokenFacts(self.updates, credit, step, ratios, self._texts)

    async def step_of(self, rollout: Rollout) -> int | None:
        """The step that learned from a rollout; None: none did, or the audit log does not say."""
        if self.files is None or rollout.mode != "train":
            return None
        learned = await asyncio.to_thread(self.files.learned)
        return next((step for step, rollouts in learned.items() if rollout.rollout_id in rollouts), None)

    # -- what happens now ----------------------------------------------------------------------------------------------
    #
    # The model calls are those among the spans that were stored last, so that what they cost does not grow with the
    # rollouts that run, nor with the calls of one of them. They are read again only if the numbers of the store have
    # changed.

    async def live(self, run_id: str | None) -> Json:
        """What happens now. `run_id`: only in rollouts whose ids contain it."""
        async with self._reads_live:
            if time.monotonic() >= self._live_until:
                statistics = await self.store.statistics()
                running = await running_rollouts(self.store, rollout_id_contains=run_id, most=NEWEST)
                is_known = statistics == self._live.get("statistics")
                self._live = {
                    "now": time.time(),
                    "statistics": statistics,
                    "calls": self._live["calls"] if is_known else await self._newest_calls(run_id),
                    "running": await self.summaries.of(running, open_spans=False),
                    "queues": await self.store.query_queues(),
                    "workers": await self.store.query_workers(limit=MOST_WORKERS),
                }
                self._live_until = time.monotonic() + SECONDS
            return self._live

    async def _newest_calls(self, run_id: str | None) -> list[Json]:
        """The model calls that were stored last, the newest first. A call is stored when it ends."""
        spans = await self.store.newest_spans(SPANS if run_id is None else SPANS_OF_SHARED)
        found = [span for span in spans if is_call(span) and (run_id is None or run_id in span.rollout_id)]
        lines = [call_line(span, self.updates) for span in found[:NEWEST]]
        return sorted(lines, key=lambda call: -(call["end_time"] or 0.0))

    # -- credit --------------------------------------------------------------------------------------------------------

    async def credit(self, rollout: Rollout) -> tuple[BatchCredit, int | None]:
        """The credit of the step that learned from a rollout, and that step. The rollouts of validation and evaluation
        have none."""
        run = self.config
        if self.files is None or run is None:
            why = "only rollouts of a run have advantages: a store has no credit rule"
        elif not isinstance(run.algorithm, LightningRLConfig):
            why = f'algorithm "{run.algorithm.type}" learns from text, not from tokens'
        elif rollout.mode != "train":
            why = "this rollout measures the policy: nothing is learned from it"
        else:
            step = await self.step_of(rollout)
            batch = None if step is None else self.files.learned().get(step)
            if batch is not None and len(batch) <= MOST_IN_BATCH:
                return await self._credit_of(("step", step), batch, run, run.algorithm), step
            members = [each.rollout_id for each in await self.group(rollout) if each.status == "succeeded"]
            found = await self._credit_of(("group", *members), members, run, run.algorithm)
            alone = _why_alone(step, bool(self.files.audit()), rollout)
            return replace(found, notes=(*found.notes, alone)), step
        return BatchCredit(notes=(why,)), None

    async def _credit_of(
        self, key: Any, ids: Sequence[str], run: TrainConfig, config: LightningRLConfig
    ) -> BatchCredit:
        if (known := self._credits.pop(key, None)) is None:
            turns = run.curriculum.turns
            reward, weights = turns and turns.reward, config.reward_weights
            reader = TrajectoryReader(self.store, run.policy.name, turn_limit_reward=reward, weights=weights)
            plans = [
                RolloutPlan(each.rollout_id, each.input, group_of(each) or task_key(each.input))
                for each in await self.by_ids(ids)
            ]
            try:
                trajectories, rejected = await reader.read(plans)
                known = await asyncio.to_thread(credit_of, trajectories, config)
                if rejected:
                    known = replace(known, notes=(*known.notes, f"{len(rejected)} rollouts cannot be read"))
            except AgentLightningError as error:
                known = BatchCredit(notes=(f"the rollouts of the step cannot be read: {error}",))
        self._credits[key] = known
        if len(self._credits) > MOST_CREDITS:
            self._credits.pop(next(iter(self._credits)))
        return known


def call_line(span: Span, updates: Updates) -> Json:
    """A model call as a line of a table."""
    answer = [part for message in messages_of(span, names.OUTPUT_MESSAGES) for part in message_json(message)["parts"]]
    return {
        **call_facts(span, updates),
        "rollout_id": span.rollout_id,
        "end_time": span.end_time,
        "answer": shortened(" ".join(str(part.get("text") or part.get("name") or "") for part in answer)),
    }


def _why_alone(step: int | None, has_audit: bool, rollout: Rollout) -> str:
    if step is not None:
        return "the step is too large: advantages are computed over this group alone, weights are relative to it"
    if not has_audit:
        return "the run has no audit log: advantages are computed over this group alone, weights are relative to it"
    if rollout.status != "succeeded":
        return "this rollout did not succeed: nothing is learned from it"
    return "no step has learned from this rollout (yet); shown is what its group alone would teach"


def _tells_group(rollout: Rollout) -> bool:
    return rollout.rollout_id.startswith(group_of(rollout).rstrip(digits) or "-")


def _group_key(rollout: Rollout) -> tuple[str, str]:
    """Equal for those of a group. Without anything in it, it is of no other."""
    group = group_of(rollout)
    return group, group or digest_of(rollout.input)


# -- the catalog ------------------------------------------------------------------------------------------------------


STORE = "store"
"""The name of a store that is shown by itself."""
MOST_OPEN = 16
"""Databases that stay open, unless more are being read."""


class Catalog:
    """Finds runs: each root, and what is in it. `store` is shown by itself, unless it is that of the run `own`, which
    this process has open. `writable`: requests with the token may change stores."""

    def __init__(
        self,
        store: LightningStoreBase | None = None,
        *,
        roots: Iterable[Path] = (),
        own: Path | None = None,
        writable: bool = False,
    ) -> None:
        self._store, self._own, self.writable = store, own and own.resolve(), writable
        self._roots = [path.resolve() for path in roots]
        self._files: dict[Path, RunFiles] = {}
        self._data: dict[Any, RunData] = {}
        """By files, and whether they have a database; the one asked for last comes last."""

    def sources(self) -> dict[str, RunFiles | None]:
        """The runs by name, which is that of the directory, and at the end a store by itself, which has no files."""
        states = [root.glob(pattern) for root in self._roots for pattern in ("state.json", "*/state.json")]
        paths = [each.parent for found in states for each in sorted(found)]
        found: dict[str, RunFiles | None] = {}
        for path in dict.fromkeys([self._own, *paths] if self._own in paths else paths):
            name, number = path.name, 2
            while name in found or name == STORE:
                name, number = f"{path.name}-{number}", number + 1
            found[name] = files = self._files.setdefault(path, RunFiles(path))
            files.name = name
        return found | ({STORE: None} if self._store is not None and self._own is None else {})

    def source(self, name: str) -> RunFiles | None:
        """The files of a run; None for a store by itself. Raises NotFoundError."""
        known = self.sources()
        if name not in known:
            raise NotFoundError(f"there is no run {name!r} here; /dashboard/api/runs lists all")
        return known[name]

    async def run(self, name: str) -> RunData:
        """Raises NotFoundError for an unknown name, and ConfigError for a run whose store is not known. `reading` is
        to be entered before anything else is awaited."""
        files = self.source(name)
        opened = [key for key, each in self._data.items() if each.store is not self._store]
        idle = next((key for key in opened if not self._data[key].readers), None)
        if len(opened) > MOST_OPEN and idle is not None:
            await self._close(idle)
        key = files, files is not None and (files.path / "store.db").exists()
        known = self._data[key] = self._data.pop(key, None) or self._open(*key)
        return known

    def _open(self, files: RunFiles | None, has_store: bool) -> RunData:
        store = self._store
        if files is not None and has_store and files.path != self._own:
            store = LightningStore(files.path / "store.db")
        if store is None:
            raise ConfigError(
                f"the rollouts of {STORE if files is None else files.path} are in another store, which the run was"
                " given; open that as well: agl dashboard DATABASE"
            )
        return RunData(files, store, files is not None and not has_store, self.writable)

    async def _close(self, key: Any) -> None:
        """Stop reading, and close the store if it was opened here."""
        run = self._data.pop(key)
        await run.attempts.close()
        if run.store is not self._store:
            await run.store.close()

    async def close(self) -> None:
        """Stop reading, and close the stores that were opened here."""
        while self._data:
            await self._close(next(iter(self._data)))


def catalog_of_run(directory: Path, store: LightningStoreBase) -> Catalog:
    """A run in this process, which has its store open, and the runs beside it."""
    return Catalog(store, roots=[directory.resolve().parent], own=directory, writable=True)
