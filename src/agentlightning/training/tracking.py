"""What a run reports while it goes on: to experiment trackers, in sample transcripts, a reward curve, and the ratios of
its tokens.

Each tracker is called in a thread of its own, and none can delay, fail or stop the run. What a run reports is in its
directory always: metrics.jsonl, report.json, curve.png, config.toml, and transcripts.jsonl with sample rollouts of each
validation. `tracking.json` names the trackers' own runs, so that a resumed run continues them.
"""

# The packages of trackers are extras, which type checks do without.
# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import logging
import math
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import orjson
from msgspec import Struct, structs

from agentlightning.assemble import MOST_TEXT, said, text_of, transcript_of
from agentlightning.config import TRACKERS, TrackingConfig
from agentlightning.errors import MissingExtraError, StoreError
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.evaluation.intervals import Gain
from agentlightning.policy.base import Metrics
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.callbacks import FinishedStep, NoState
from agentlightning.training.governance import RunCallback
from agentlightning.training.health.step_record import VALIDATION
from agentlightning.training.persistence.run_dir import append_lines, flat_settings, forget_after, write_atomically
from agentlightning.training.sources.collector import read_recordings
from agentlightning.trajectory import CallId, TrainingSample

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
        lines = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
        for row in map(structs.astuple, rows):
            cells = (str(cell).replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>") for cell in row)
            lines.append(f"| {' | '.join(cells)} |")
        self._text(step, "transcripts", "\n".join(lines))

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
            "\n".join(f"{each.get('role', '?')}: {said(each)}" for each in transcript_of(found[rollout_id].spans))[
                -MOST_TEXT:
            ],
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
        self._waiting = set[Future[None]]()
        self._tracker: Any = None
        """None: it did not start."""
        self.send("start", lambda _: self._start(run))
        self.flush()

    def send(self, what: str, call: Callable[[Tracker], object]) -> None:
        """Call it when its turn comes."""
        if len(self._waiting) >= MOST_WAITING:
            self._fail(what, "it is too slow, and what it was sent is dropped")
            return
        future = self._thread.submit(self._call, what, call)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)

    def flush(self) -> None:
        """Wait for what it was sent."""
        if late := wait(set(self._waiting), CLOSE_SECONDS).not_done:
            self._fail("answer", f"{len(late)} calls are not done after {CLOSE_SECONDS:.0f} s")

    def end(self) -> None:
        self.flush()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, run: TrackedRun) -> None:
        tracker = load_tracker(self.name)
        self.begun = tracker.start(run)
        self._tracker = tracker

    def _call(self, what: str, call: Callable[[Tracker], object]) -> None:
        try:
            call(self._tracker)
        except BaseException as error:  # noqa: BLE001  The boundary of a tracker, which may raise anything, and exit.
            self._fail(what, f"{type(error).__name__}: {error}")

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
        known, settings = dict[str, str](), flat_settings(run.config)
        with suppress(OSError, ValueError):
            known |= orjson.loads((self.run_dir / FILE).read_bytes())
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


# -- reward curve ----------------------------------------------------------------------------------------------------

# The reward curve of a run as a PNG. Needs matplotlib (the extra `train`) and no display.

COLORS = {"greedy": "#c2410c", "sampled": "#0f766e"}
TRAINING = "#2563eb"
INK = "#334155"


def draw_curve(metrics: Sequence[Mapping[str, Any]], gains: Mapping[str, Gain], path: Path) -> None:
    """Write a PNG: training reward of each step with its running mean, validation, held-out reward before and after.

    `metrics`: a record for each step with `step`, `reward`, and `validation_<mode>` if it was measured; a reward that
    is absent, None or NaN leaves a gap. `gains`: by mode. Raises MissingExtraError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise MissingExtraError("matplotlib", "train") from error
    figure = Figure(figsize=(9, 4.8), dpi=150, layout="constrained")
    axes: Any = figure.add_subplot()
    steps, rewards = [float(record["step"]) for record in metrics], _series(metrics, "reward")
    if not all(map(math.isnan, rewards)):
        window = max(3, round(len(steps) / 10))
        axes.plot(steps, rewards, ".-", color=TRAINING, alpha=0.3, label="training batch")
        axes.plot(steps, running_mean(rewards, window), color=TRAINING, label=f"mean of {window} batches")
    validated = [name.removeprefix(VALIDATION) for record in metrics for name in record if name.startswith(VALIDATION)]
    for mode in dict.fromkeys([*gains, *validated]):
        color, values = COLORS.get(mode, INK), _series(metrics, VALIDATION + mode)
        known = [(step, value) for step, value in zip(steps, values, strict=True) if value == value]
        if known:
            axes.plot(*zip(*known, strict=True), "D:", color=color, label=f"validation, {mode}")
        if (gain := gains.get(mode)) is not None:
            for reward, style, when in ((gain.before, ":", "before"), (gain.after, "--", "after")):
                label = f"held out, {mode}, {when}: {reward:.3f}"
                axes.axhline(reward, color=color, linestyle=style, label=label, zorder=1)
    held_out = [f"{mode} {gain.before:.2f} \N{RIGHTWARDS ARROW} {gain.after:.2f}" for mode, gain in gains.items()]
    title = "Held-out reward: " + ",  ".join(held_out) if held_out else "Reward during training"
    axes.set_title(title, loc="left", color=INK)
    axes.set(xlabel="training step", ylabel="mean reward", xlim=(0, max([1.0, *steps]) * 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    low, high = axes.get_ylim()
    if low >= -0.1 and high <= 1.1:
        axes.set_ylim(-0.04, 1.04)
    axes.grid(axis="y", alpha=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values up to each value, without gaps (NaN)."""
    parts = ([each for each in values[max(0, end - window) : end] if each == each] for end in range(1, len(values) + 1))
    return [sum(known) / len(known) if known else math.nan for known in parts]


def _series(metrics: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    values = [record.get(name) for record in metrics]
    return [math.nan if value is None else value for value in values]


# -- live curve ------------------------------------------------------------------------------------------------------

# The reward curve of a run that is not over: drawn again every half minute, in a thread.

CURVE_SECONDS = 30.0
"""The least time between two drawings; drawing one takes less than one."""


class Curve(RunCallback[NoState]):
    """Draws the curve while the run goes on, and at its end. Without matplotlib it draws nothing in between; what fails
    there is logged once."""

    name = "curve"

    def __init__(self, run: TrainingRun, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(run)
        self._path, self._clock = run.directory / "curve.png", clock
        self._works = find_spec("matplotlib") is not None
        self._required = run.learner is not None or self._works
        """Whether a run that ends without matplotlib is an error; else it has no curve."""
        self._drawn = clock()
        self._thread: threading.Thread | None = None

    async def on_step_end(self, step: FinishedStep) -> None:
        """Draw the steps so far, unless this was done a moment ago."""
        now, busy = self._clock(), self._thread is not None and self._thread.is_alive()
        if self._works and not busy and now - self._drawn >= CURVE_SECONDS:
            self._drawn = now
            self._thread = threading.Thread(target=self._draw, args=[self.run.run_dir.read_metrics()], daemon=True)
            self._thread.start()

    async def on_end(self, result: TrainingResult) -> TrainingResult:
        await self.close()
        if self._required:
            gains = {mode: gain for mode, gain in result.held_out.items() if gain.tasks}
            draw_curve(self.run.run_dir.read_metrics(), gains, self._path)
        return replace(result, curve=self._path if self._path.exists() else None)

    async def close(self) -> None:
        """Wait for a drawing to end, and begin no other."""
        self._works = False
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _draw(self, metrics: Sequence[Mapping[str, Any]]) -> None:
        beside = self._path.with_name(f".{self._path.name}")
        try:
            draw_curve(metrics, {}, beside)
            beside.replace(self._path)
        except Exception as error:  # noqa: BLE001  A picture must not end a run.
            self._works = False
            logger.warning("%s is not drawn while the run goes on: %s: %s", self._path, type(error).__name__, error)


# -- token ratios ----------------------------------------------------------------------------------------------------

# How far each update moved the probability of the tokens it learned from, written for the token view of the dashboard.
#
# The ratio of new to old of a token is exp(log p under the weights after the update - log p when it was sampled). After
# an update of one minibatch this is what the update has done; a loss that clips stops counting a token whose ratio
# leaves the clip range in a later minibatch.
#
# A line of `ratios/step-000012.jsonl` is one call: `{"rollout": ..., "call": span_id, "log_ratios": [...]}`, a number
# for each sampled token, rounded to four digits. A step that is repeated after a crash writes its lines once more: the
# last one of a call counts.

FOLDER = "ratios"
DIGITS = 4
CallRatios = dict[CallId, list[float]]
"""Log-ratios of the sampled tokens of each call, by (rollout_id, span_id)."""


def ratios_file(run_dir: Path, step: int) -> Path:
    """Where the ratios of a step are."""
    return run_dir / FOLDER / f"step-{step:06d}.jsonl"


class TokenRatios(RunCallback[NoState]):
    """Scores the tokens of each update once more, and writes their ratios (`run.token_ratios`)."""

    name = "token_ratios"

    async def on_update(self, samples: Sequence[TrainingSample]) -> Metrics:
        """Returns what that cost. Raises PolicyError for a policy that cannot score tokens."""
        began, run = time.monotonic(), self.run
        found: CallRatios = {}
        assert run.learner is not None
        for adapter in dict.fromkeys(sample.adapter for sample in samples):
            own = [sample for sample in samples if sample.adapter == adapter]
            columns = await run.learner.score([sample.tree for sample in own], {"logprobs"}, adapter=adapter)
            for sample, logprobs in zip(own, columns["logprobs"], strict=True):
                # The nodes of a call stand in order: an update of the weights or a later prompt may have split it.
                for node, new in zip(sample.tree.nodes, logprobs, strict=True):
                    if node.sampled and node.call is not None and node.rollout_id is not None and node.logprobs:
                        ratios = [round(float(now) - old, DIGITS) for now, old in zip(new, node.logprobs, strict=True)]
                        found.setdefault((node.rollout_id, node.call), []).extend(ratios)
        await asyncio.to_thread(write_ratios, run.directory, run.state.step + 1, found)
        return {"ratio_seconds": time.monotonic() - began}


def write_ratios(run_dir: Path, step: int, found: CallRatios) -> None:
    """Add a line for each call."""
    path = ratios_file(run_dir, step)
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        if file.tell():
            file.write(b"\n")  # ends a line that a crash cut off
        for (rollout, call), ratios in found.items():
            file.write(orjson.dumps({"rollout": rollout, "call": call, "log_ratios": ratios}) + b"\n")


def read_ratios(run_dir: Path, step: int, rollout_ids: Collection[str]) -> CallRatios:
    """Those of some rollouts in a step; empty where none were recorded."""
    found: CallRatios = {}
    needles = [orjson.dumps({"rollout": each})[:-1] + b"," for each in rollout_ids]
    try:
        with ratios_file(run_dir, step).open("rb") as file:
            lines = [line for line in file if any(line.startswith(each) for each in needles)]
    except OSError:
        return found
    for line in lines:
        try:
            each: Any = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # a line that a crash cut off
        found[each["rollout"], each["call"]] = each["log_ratios"]
    return found
