"""What a tracker is told of a run (its settings, the metrics of each step, sample transcripts, its result), and the
trackers.

A tracker may raise and may take its time: `Tracking` calls it from a thread of its own, in order. Its package is
imported when it is used.
"""

# The packages are extras, which type checks do without.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import orjson

# -- base ------------------------------------------------------------------------------------------------------------

# What a tracker is told of a run: its settings, the metrics of each step, sample transcripts, its result.
#
# A tracker may raise and may take its time: `Tracking` calls it from a thread of its own, in order.


@dataclass(frozen=True, slots=True)
class TrackedRun:
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


@dataclass(frozen=True, slots=True)
class Transcript:
    """A rollout of a validation."""

    mode: str
    task: str
    conversation: str
    output: str
    reward: float | None
    rollout_id: str


COLUMNS = ("mode", "task", "conversation", "output", "reward", "rollout_id")
"""Of a table of transcripts."""


class Tracker(ABC):
    """One experiment tracker. Made and called in one thread."""

    package: ClassVar[str] = ""
    """The module that it needs, which the extra of its name installs; empty: none."""

    @abstractmethod
    def start(self, run: TrackedRun) -> str:
        """Begin, or continue `run.tracker_run`. Returns what names the tracker's own run."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step."""

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        """Sample rollouts of a validation."""

    def result(self, step: int, result: Mapping[str, Any], curve: Path | None) -> None:
        """What came of the run; `curve`: a PNG."""

    def close(self, *, finished: bool) -> None:
        """The run ends, `finished` or to be continued."""


def rows_of(transcripts: Sequence[Transcript]) -> list[list[Any]]:
    """The cells of a table, in the order of `COLUMNS`."""
    return [[getattr(each, name) for name in COLUMNS] for each in transcripts]


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
    for row in rows_of(transcripts):
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
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory = run.run_dir / "tensorboard"
        self._writer = EventFileWriter(str(directory))
        if run.tracker_run is not None:
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(run.step + 1, session_log=log)
        else:
            self._text(0, "settings", _as_block(run.settings))
        self._writer.flush()
        return str(directory)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import summary_pb2

        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=summary_pb2.Summary(value=values))
        self._writer.flush()

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        self._text(step, "transcripts", markdown_table(rows))

    def result(self, step: int, result: Mapping[str, Any], curve: Path | None) -> None:
        from tensorboard.compat.proto import summary_pb2

        self._text(step, "result", _as_block(result))
        self.log(step, result_numbers(result))
        if curve is not None:
            png = curve.read_bytes()
            width, height = struct.unpack(">II", png[16:24])
            image = summary_pb2.Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
            self._add(step, summary=summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag="curve", image=image)]))

    def close(self, *, finished: bool) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, **content))

    def _text(self, step: int, tag: str, text: str) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        size = tensor_shape_pb2.TensorShapeProto.Dim(size=1)
        tensor = tensor_pb2.TensorProto(
            dtype=types_pb2.DT_STRING,
            string_val=[text.encode()],
            tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=[size]),
        )
        value = summary_pb2.Summary.Value(
            tag=tag, metadata=summary_pb2.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )
        self._add(step, summary=summary_pb2.Summary(value=[value]))


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

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        import wandb

        self._run.log({"transcripts": wandb.Table(columns=list(COLUMNS), data=rows_of(rows))}, step=step)

    def result(self, step: int, result: Mapping[str, Any], curve: Path | None) -> None:
        import wandb

        self._run.summary.update(result_numbers(result))
        if curve is not None:
            self._run.log({"curve": wandb.Image(str(curve))}, step=step)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


# -- mlflow ----------------------------------------------------------------------------------------------------------

# MLflow: a database beside the runs (`runs/mlflow.db`) unless the settings or MLFLOW_TRACKING_URI name a server.

MOST_PARAMS: Final = 90
"""Parameters in one request; MLflow takes 100."""
MOST_TEXT: Final = 500
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
        params = [Param(name, str(value)[:MOST_TEXT]) for name, value in run.settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MOST_PARAMS])
        return self._id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in metrics.items()])

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        table = {name: [asdict(each)[name] for each in rows] for name in asdict(rows[0])}
        self._client.log_table(self._id, table, f"transcripts/step-{step:06d}.json")

    def result(self, step: int, result: Mapping[str, Any], curve: Path | None) -> None:
        self.log(step, result_numbers(result))
        self._client.log_dict(self._id, dict(result), "result.json")
        if curve is not None:
            self._client.log_artifact(self._id, str(curve))

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


# -- trackio ---------------------------------------------------------------------------------------------------------

# Trackio: local, in the folder that TRACKIO_DIR names; `trackio show` displays it.


class TrackioTracker(Tracker):
    """A run of Trackio under the name of the run."""

    package: ClassVar[str] = "trackio"

    def start(self, run: TrackedRun) -> str:
        for name, value in (("GRADIO_ANALYTICS_ENABLED", "False"), ("HF_HUB_DISABLE_TELEMETRY", "1")):
            os.environ.setdefault(name, value)
        import trackio

        name = run.tracker_run or run.name
        resume = "never" if run.tracker_run is None else "must"
        config = {
            key: value if isinstance(value, int | float | str) else str(value) for key, value in run.settings.items()
        }
        self._run: Any = trackio.init(project=run.project, name=name, config=config, resume=resume, embed=False)
        return name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        import pandas
        import trackio

        table = pandas.DataFrame([asdict(each) for each in rows])
        self._run.log({"transcripts": trackio.Table(dataframe=table)}, step=step)

    def result(self, step: int, result: Mapping[str, Any], curve: Path | None) -> None:
        import trackio

        found: dict[str, Any] = {**result_numbers(result)}
        if curve is not None:
            found["curve"] = trackio.Image(str(curve))
        self._run.log(found, step=step)

    def close(self, *, finished: bool) -> None:
        self._run.finish()
