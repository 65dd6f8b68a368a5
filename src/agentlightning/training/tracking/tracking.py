"""The trackers of a run: each is called in a thread of its own, and none can delay, fail or stop the run.

What a run reports is in its directory always: metrics.jsonl, report.json, curve.png, config.toml, and transcripts.jsonl
with sample rollouts of each validation. `tracking.json` names the trackers' own runs, so that a resumed run continues
them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson

from agentlightning.config import TRACKERS, TrackingConfig, TrainConfig
from agentlightning.errors import MissingExtraError, StoreError
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.account import RunAccount
from agentlightning.training.callbacks import Callback, FinishedStep, NoState
from agentlightning.training.measurements import Measurements
from agentlightning.training.persistence.run_dir import forget_after, write_atomically
from agentlightning.training.sources.transcripts import MOST_TEXT, said, text_of, transcript_of
from agentlightning.training.tracking.trackers import TrackedRun, Tracker, Transcript
from agentlightning.util.settings import SECRETS

if TYPE_CHECKING:
    from agentlightning.training.report.result import TrainingResult

# -- samples ---------------------------------------------------------------------------------------------------------

# Sample rollouts of a validation as transcripts: those of its first tasks, the same each time.


async def validation_transcripts(
    store: LightningStoreBase, names: Mapping[str, str], results: Mapping[str, Evaluation], tasks: list[Any]
) -> list[Transcript]:
    """One for each of `tasks` in each mode. `names`: by mode, the beginning of the ids of its rollouts."""
    wanted = [(mode, index, f"{name}-{index:05d}") for mode, name in names.items() for index in range(len(tasks))]
    ids = [rollout_id for _, _, rollout_id in wanted]
    attempts = {each.rollout_id: each for each in await store.get_latest_attempts(ids)} if ids else {}
    spans = {rollout_id: found async for rollout_id, found in store.iter_spans(ids)} if ids else {}
    return [
        Transcript(
            mode,
            text_of(tasks[index]),
            "\n".join(f"{each.get('role', '?')}: {said(each)}" for each in transcript_of(spans.get(rollout_id, [])))[
                -MOST_TEXT:
            ],
            text_of(attempts[rollout_id].metadata.get("output")) if rollout_id in attempts else "",
            results[mode].rewards[index],
            rollout_id,
        )
        for mode, index, rollout_id in wanted
    ]


logger = logging.getLogger(__name__)

FILE: Final = "tracking.json"
TRANSCRIPTS: Final = "transcripts.jsonl"
MOST_WAITING: Final = 1000
"""Calls that may wait for one tracker; further ones are dropped and counted."""
CLOSE_SECONDS: Final = 60.0
"""How long the end of a run waits for a tracker."""

T = TypeVar("T")


def check_installed(config: TrackingConfig) -> None:
    """Raises MissingExtraError for a tracker whose package is not installed."""
    for name in config.trackers:
        package = TRACKERS.find(name).package
        if package and find_spec(package) is None:
            raise MissingExtraError(package, name)


def load_tracker(name: str) -> Tracker:
    """A tracker by its name."""
    return TRACKERS.find(name)()


class _Channel:
    """One tracker and the thread that calls it. What it raises is counted, and changes nothing."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self.failures = name, 0
        self.warning: str | None = None
        """The first failure."""
        self.begun: str | None = None
        """The name of its own run. None: it did not start, or takes too long to."""
        self._thread = ThreadPoolExecutor(1, f"tracker-{name}")
        self._waiting = set[Future[Any]]()
        self._tracker = self._submit("start", lambda: self._start(run))
        self.flush()

    def send(self, what: str, call: Callable[[Tracker], object]) -> None:
        """Call it when its turn comes."""
        if len(self._waiting) >= MOST_WAITING:
            self._fail(what, "it is too slow, and what it was sent is dropped")
        else:
            self._submit(what, lambda: call(self._tracker.result()))

    def flush(self) -> None:
        """Wait for what it was sent."""
        if late := wait(set(self._waiting), CLOSE_SECONDS).not_done:
            self._fail("answer", f"{len(late)} calls are not done after {CLOSE_SECONDS:.0f} s")

    def end(self) -> None:
        self.flush()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, run: TrackedRun) -> Tracker:
        tracker = load_tracker(self.name)
        self.begun = tracker.start(run)
        return tracker

    def _submit(self, what: str, work: Callable[[], T]) -> Future[T]:
        def guarded() -> T:
            try:
                return work()
            except BaseException as error:  # The boundary of a tracker, which may raise anything, and exit.
                self._fail(what, f"{type(error).__name__}: {error}")
                raise

        future = self._thread.submit(guarded)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def _fail(self, what: str, why: str) -> None:
        self.failures += 1
        if self.warning is None:
            self.warning = f"{self.name} failed to {what}: {why}. The run goes on; further failures are counted"
        logger.info("tracker %s failed to %s: %s", self.name, what, why)


class Tracking(Callback[NoState]):
    """The trackers of one run.

    Making it starts them: a resumed run continues the runs of its trackers.
    """

    name = "tracking"

    def __init__(self, config: TrainConfig, account: RunAccount, measurements: Measurements) -> None:
        """Raises MissingExtraError."""
        check_installed(config.tracking)
        self.config, self.account, self.measurements = config.tracking, account, measurements
        self.run_dir, step = account.run_dir.path, account.state.step
        self._ended = False
        known = _read(self.run_dir / FILE)
        settings = flat_settings(config.model_dump(mode="json"))
        self._channels: list[_Channel] = []
        for name in dict.fromkeys(self.config.trackers):
            run = TrackedRun(
                run_dir=self.run_dir,
                project=self.config.project,
                name=self.config.name or self.run_dir.absolute().name,
                settings=settings,
                step=step,
                tracker_run=known.get(name),
                options=self.config.model_dump(),
            )
            self._channels.append(channel := _Channel(name, run))
            known |= {name: channel.begun} if channel.begun else {}
        if self._channels:
            write_atomically(self.run_dir / FILE, orjson.dumps(known, option=orjson.OPT_INDENT_2))
        if (transcripts := self.run_dir / TRANSCRIPTS).exists():
            forget_after(transcripts, step)
        account.warn(self._warnings())

    def _warnings(self) -> dict[str, str]:
        """What went wrong first with each tracker that failed, by the kind of the warning; only what is new."""
        found = {f"tracker_{each.name}": each.warning for each in self._channels if each.warning}
        return {kind: text for kind, text in found.items() if kind not in self.account.state.warnings}

    async def on_step_end(self, step: FinishedStep) -> None:
        """The numbers of its line in metrics.jsonl."""
        number, metrics = self.account.state.step, numbers_of(step.line)
        self._send("log metrics", lambda tracker: tracker.log(number, metrics))
        self.account.warn(self._warnings())

    async def on_validation(self, results: Mapping[str, Evaluation]) -> None:
        """Sample rollouts: those of the first tasks."""
        tasks = list(self.measurements.validation[: self.config.transcripts])
        names = {mode: self.measurements.validation_name(mode) for mode in results}
        try:
            rows = await validation_transcripts(self.account.collector.store, names, results, tasks)
        except StoreError as error:  # somebody has pruned them meanwhile
            self.account.warn({"transcripts": f"the transcripts of a validation were not kept: {error}"})
            return
        step = self.account.state.step
        if rows:
            with (self.run_dir / TRANSCRIPTS).open("ab") as file:
                file.writelines(orjson.dumps({"step": step, **asdict(row)}) + b"\n" for row in rows)
            self._send("log transcripts", lambda tracker: tracker.transcripts(step, rows))

    async def on_end(self, result: TrainingResult) -> TrainingResult:
        """What came of the run. Waits for the trackers, and counts the calls that failed."""
        step, table = self.account.state.step, result.as_json()
        self._send("log the result", lambda tracker: tracker.result(step, table, result.curve))
        self._send("finish", lambda tracker: tracker.close(finished=True))
        await self._end()
        failures = {each.name: each.failures for each in self._channels if each.failures}
        warnings = (*result.warnings, *sorted(self._warnings().values()))
        return replace(result, tracker_failures=failures, warnings=warnings)

    async def close(self) -> None:
        """End the trackers' runs, to be continued, unless the run is finished."""
        if not self._ended:
            self._send("close", lambda tracker: tracker.close(finished=False))
            await self._end()

    async def _end(self) -> None:
        self._ended = True
        for channel in self._channels:
            await asyncio.to_thread(channel.end)

    def _send(self, what: str, call: Callable[[Tracker], object]) -> None:
        for channel in self._channels:
            channel.send(what, call)


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Its finite numbers, but for `step`."""
    return {
        name: float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def flat_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by full names (`algorithm.steps`); lists as JSON. Secrets are left out."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if name in SECRETS:
            continue
        if isinstance(value, Mapping):
            found |= flat_settings(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            found[prefix + name] = orjson.dumps([_without_secrets(each) for each in value]).decode()
        else:
            found[prefix + name] = value
    return found


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_secrets(inner) for name, inner in value.items() if name not in SECRETS}
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value


def _read(path: Path) -> dict[str, str]:
    try:
        return dict(orjson.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}
