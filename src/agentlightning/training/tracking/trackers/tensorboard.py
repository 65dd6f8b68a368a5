"""TensorBoard: event files in `RUN/tensorboard`. Written with the package `tensorboard` alone, without torch."""

# The package is an extra, which type checks do without.
# pyright: reportMissingImports=false
from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import orjson

from agentlightning.training.tracking.base import TrackedRun, Transcript, markdown_table, result_numbers


class TensorBoardTracker:
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
        self.log(step, {f"result/{name}": value for name, value in result_numbers(result).items()})
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
