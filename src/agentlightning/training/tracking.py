"""The trackers of a run: each is called in a thread of its own, and none can delay, fail or stop the run.

What a run reports is in its directory always: metrics.jsonl, report.json, curve.png, config.toml, and transcripts.jsonl
with sample rollouts of each validation. `tracking.json` names the trackers' own runs, so that a resumed run continues
them.
"""

# The packages of trackers are extras, which type checks do without.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import logging
import math
import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import orjson
from msgspec import Struct, structs

from agentlightning.config import TRACKERS, TrackingConfig
from agentlightning.errors import MissingExtraError, StoreError
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.policy.base import Metrics
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.callbacks import FinishedStep, NoState
from agentlightning.training.governance import RunCallback
from agentlightning.training.persistence.run_changes import flat_settings
from agentlightning.training.persistence.run_dir import append_lines, forget_after, write_atomically
from agentlightning.training.sources.collector import MOST_TEXT, conversation_of, read_recordings, text_of

if TYPE_CHECKING:
    from agentlightning.training.report.result import TrainingResult
    from agentlightning.training.run import TrainingRun

# -- trackers ----------------------------------------------------------------------------------------------------------

# What a tracker is told of a run: its settings, the metrics of each step, sample transcripts, its result.
#
# A tracker may raise and may take its time: `Tracking` calls it from a thread of its own, in order. Its package is
# imported when it is used.


class TrackedRun(Struct, frozen=True):
    """A run, as a tracker is told of it."""

    run_dir: Path
    project: str
    name: str
    settings: Mapping[str, Any]
    """The configuration by full names (`algorithm.steps`), without secrets."""
    step: int
    """The steps that are done; later ones were lost in a crash and come again."""
    tracker_run: str | None
    """What `start` returned when the run began. None: it begins now."""
    options: Mapping[str, Any]
    """The settings of the section [tracking]."""


class Transcript(Struct, frozen=True):
    """A rollout of a validation."""

    mode: str
    task: str
    conversation: str
    output: str
    reward: float | None
    rollout_id: str


COLUMNS = Transcript.__struct_fields__
"""Of a table of transcripts."""


class Tracker(ABC):
    """One experiment tracker. Made and called in one thread."""

    package: ClassVar[str] = ""
    """The module that it needs, which the extra of its name installs; empty: none."""

    @abstractmethod
    def start(self, run: TrackedRun) -> str:
        """Begin, or continue `run.tracker_run`. Returns what names the tracker's own run."""

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """The metrics of a step."""

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        """Sample rollouts of a validation."""

    def result(self, step: int, result: Mapping[str, Any], curve: Path | None) -> None:
        """What came of the run; `curve`: a PNG."""

    def close(self, *, finished: bool) -> None:
        """The run ends, `finished` or to be continued."""


def result_numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a result by name: `result/held_out_greedy_gain` and the like."""
    found: dict[str, float] = {}
    for mode, gain in result.get("held_out", {}).items():
        low, high = gain["interval"]
        numbers = {"before": gain["before"], "after": gain["after"], "gain": gain["gain"], "low": low, "high": high}
        found |= {f"held_out_{mode}_{name}": value for name, value in numbers.items() if value is not None}
    found |= {name: float(value) for name, value in result.items() if isinstance(value, int | float)}
    return {f"result/{name}": value for name, value in found.items()}


def markdown_table(transcripts: Sequence[Transcript]) -> str:
    """The table as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    for row in map(structs.astuple, transcripts):
        cells = (str(cell).replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# -- tensorboard -----------------------------------------------------------------------------------------------------

# TensorBoard: event files in `RUN/tensorboard`. Written with the package `tensorboard` alone, without torch.


class TensorBoardTracker(Tracker):
    """Scalars of each step; transcripts, settings and result as text; the curve as an image."""

    package: ClassVar[str] = "tensorboard"

    def start(self, run: TrackedRun) -> str:
        """A resumed run writes a further file; what was lost in a crash is purged where it is read."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory = str(run.run_dir / "tensorboard")
        self._writer = EventFileWriter(directory)
        if run.tracker_run is not None:
            self._add(run.step + 1, session_log=SessionLog(status=SessionLog.START))
        else:
            self._text(0, "settings", _as_block(run.settings))
        self._writer.flush()
        return directory

    def log(self, step: int, metrics: Metrics) -> None:
        self._add_summary(step, *({"tag": name, "simple_value": value} for name, value in metrics.items()))
        self._writer.flush()

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        self._text(step, "transcripts", markdown_table(rows))

    def result(self, step: int, result: Mapping[str, Any], curve: Path | None) -> None:
        self._text(step, "result", _as_block(result))
        self.log(step, result_numbers(result))
        if curve is not None:
            png = curve.read_bytes()
            width, height = struct.unpack(">II", png[16:24])
            image = {"height": height, "width": width, "colorspace": 4, "encoded_image_string": png}
            self._add_summary(step, {"tag": "curve", "image": image})

    def close(self, *, finished: bool) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def _add_summary(self, step: int, *values: Mapping[str, Any]) -> None:
        self._add(step, summary={"value": values})

    def _text(self, step: int, tag: str, text: str) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(step, summary=text_pb(tag, text))


def _as_block(value: Mapping[str, Any]) -> str:
    return f"```\n{orjson.dumps(dict(value), option=orjson.OPT_INDENT_2, default=str).decode()}\n```"


# -- wandb -----------------------------------------------------------------------------------------------------------

# Weights & Biases: offline below `RUN/wandb` unless the settings or WANDB_MODE say otherwise.


class WandbTracker(Tracker):
    """A run of W&B with the id of the first start: resumed, it is the same one."""

    package: ClassVar[str] = "wandb"

    def start(self, run: TrackedRun) -> str:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._client: Any = wandb
        mode = run.options.get("wandb_mode") or os.environ.get("WANDB_MODE") or "offline"
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run.tracker_run,
            resume=None if run.tracker_run is None else "allow",
            dir=str(run.run_dir),
            config=dict(run.settings),
            mode=mode,
            settings=wandb.Settings(console="off"),
        )
        return str(self._run.id)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        table = self._client.Table(columns=list(COLUMNS), data=[list(structs.astuple(row)) for row in rows])
        self._run.log({"transcripts": table}, step=step)

    def result(self, step: int, result: Mapping[str, Any], curve: Path | None) -> None:
        picture = {} if curve is None else {"curve": self._client.Image(str(curve))}
        self._run.log(result_numbers(result) | picture, step=step)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


# -- mlflow ----------------------------------------------------------------------------------------------------------

# MLflow: a database beside the runs (`runs/mlflow.db`) unless the settings or MLFLOW_TRACKING_URI name a server.

MOST_PARAMS = 90
"""Parameters in one request; MLflow takes 100."""
MOST_VALUE = 500
"""Characters of a parameter."""


class MlflowTracker(Tracker):
    """A run of MLflow; transcripts, result and curve are its artefacts."""

    package: ClassVar[str] = "mlflow"

    def start(self, run: TrackedRun) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        folder = run.run_dir.absolute().parent
        uri = run.options.get("mlflow_uri") or os.environ.get("MLFLOW_TRACKING_URI")
        self._client: Any = MlflowClient(tracking_uri=uri or f"sqlite:///{folder / 'mlflow.db'}")
        if run.tracker_run is not None:
            self._id = run.tracker_run
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        found = self._client.get_experiment_by_name(run.project)
        artefacts = None if uri else (folder / "mlflow-artifacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(run.project, artefacts)
        self._id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        params = [Param(name, str(value)[:MOST_VALUE]) for name, value in run.settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MOST_PARAMS])
        return self._id

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in metrics.items()])

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        table = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
        self._client.log_table(self._id, table, f"transcripts/step-{step:06d}.json")

    def result(self, step: int, result: Mapping[str, Any], curve: Path | None) -> None:
        self.log(step, result_numbers(result))
        self._client.log_dict(self._id, dict(result), "result.json")
        if curve is not None:
            self._client.log_artifact(self._id, str(curve))

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


# -- trackio ---------------------------------------------------------------------------------------------------------

# Trackio: local, in the folder that TRACKIO_DIR names; `trackio show` displays it. Its interface is that of wandb.


class TrackioTracker(WandbTracker):
    """A run of Trackio under the name of the run."""

    package: ClassVar[str] = "trackio"

    def start(self, run: TrackedRun) -> str:
        for name, value in (("GRADIO_ANALYTICS_ENABLED", "False"), ("HF_HUB_DISABLE_TELEMETRY", "1")):
            os.environ.setdefault(name, value)
        import trackio

        self._client = trackio
        name = run.tracker_run or run.name
        resume = "never" if run.tracker_run is None else "must"
        config = {
            key: value if isinstance(value, int | float | str) else str(value) for key, value in run.settings.items()
        }
        self._run = trackio.init(project=run.project, name=name, config=config, resume=resume, embed=False)
        return name

    def close(self, *, finished: bool) -> None:
        self._run.finish()


# -- samples ---------------------------------------------------------------------------------------------------------

# Sample rollouts of a validation as transcripts: those of its first tasks, the same each time.


async def validation_transcripts(
    store: LightningStoreBase, names: Mapping[str, str], results: Mapping[str, Evaluation], tasks: list[Any]
) -> list[Transcript]:
    """One for each of `tasks` in each mode. `names`: by mode, the beginning of the ids of its rollouts."""
    wanted = [(mode, index, f"{name}-{index:05d}") for mode, name in names.items() for index in range(len(tasks))]
    found = await read_recordings(store, [rollout_id for _, _, rollout_id in wanted])
    return [
        Transcript(
            mode,
            text_of(tasks[index]),
            "\n".join(conversation_of(found[rollout_id].spans))[-MOST_TEXT:],
            text_of(found[rollout_id].output),
            results[mode].rewards[index],
            rollout_id,
        )
        for mode, index, rollout_id in wanted
    ]


logger = logging.getLogger(__name__)

FILE = "tracking.json"
TRANSCRIPTS = "transcripts.jsonl"
MOST_WAITING = 1000
"""Calls that may wait for one tracker; further ones are dropped and counted."""
CLOSE_SECONDS = 60.0
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


class Tracking(RunCallback[NoState]):
    """The trackers of one run.

    Making it starts them: a resumed run continues the runs of its trackers.
    """

    name = "tracking"

    def __init__(self, run: TrainingRun) -> None:
        """Raises MissingExtraError."""
        super().__init__(run)
        self.config, self.run_dir, step = run.config.tracking, run.directory, run.state.step
        check_installed(self.config)
        self._ended = False
        known, settings = _read(self.run_dir / FILE), flat_settings(run.config)
        self._channels: list[_Channel] = []
        for name in dict.fromkeys(self.config.trackers):
            tracked = TrackedRun(
                run_dir=self.run_dir,
                project=self.config.project,
                name=self.config.name or self.run_dir.absolute().name,
                settings=settings,
                step=step,
                tracker_run=known.get(name),
                options=self.config.model_dump(),
            )
            self._channels.append(channel := _Channel(name, tracked))
            known |= {name: channel.begun} if channel.begun else {}
        if self._channels:
            write_atomically(self.run_dir / FILE, orjson.dumps(known, option=orjson.OPT_INDENT_2))
        if (transcripts := self.run_dir / TRANSCRIPTS).exists():
            forget_after(transcripts, step)
        run.warn_of(self._warnings())

    def _warnings(self) -> dict[str, str]:
        """What went wrong first with each tracker that failed, by the kind of the warning; only what is new."""
        found = {f"tracker_{each.name}": each.warning for each in self._channels if each.warning}
        return {kind: text for kind, text in found.items() if kind not in self.run.state.warnings}

    async def on_step_end(self, step: FinishedStep) -> None:
        """The finite numbers of its line in metrics.jsonl."""
        number = self.run.state.step
        metrics = {
            name: float(value)
            for name, value in step.line.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        self._send("log metrics", lambda tracker: tracker.log(number, metrics))
        self.run.warn_of(self._warnings())

    async def on_validation(self, results: Mapping[str, Evaluation]) -> None:
        """Sample rollouts: those of the first tasks."""
        tasks = list(self.run.validation_tasks[: self.config.transcripts])
        names = {mode: self.run.validation_name(mode) for mode in results}
        try:
            rows = await validation_transcripts(self.run.collector.store, names, results, tasks)
        except StoreError as error:  # somebody has pruned them meanwhile
            self.run.warn("transcripts", f"the transcripts of a validation were not kept: {error}")
            return
        step = self.run.state.step
        if rows:
            append_lines(self.run_dir / TRANSCRIPTS, *({"step": step, **structs.asdict(row)} for row in rows))
            self._send("log transcripts", lambda tracker: tracker.transcripts(step, rows))

    async def on_end(self, result: TrainingResult) -> TrainingResult:
        """What came of the run. Waits for the trackers, and counts the calls that failed."""
        step, table = self.run.state.step, result.as_json()
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


def _read(path: Path) -> dict[str, str]:
    try:
        return dict(orjson.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}
