"""Trackio: local, in the folder that TRACKIO_DIR names; `trackio show` displays it."""

# The package is an extra, which type checks do without.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.training.tracking.base import TrackedRun, Transcript, result_numbers


class TrackioTracker:
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

        found: dict[str, Any] = {f"result/{name}": value for name, value in result_numbers(result).items()}
        if curve is not None:
            found["curve"] = trackio.Image(str(curve))
        self._run.log(found, step=step)

    def close(self, *, finished: bool) -> None:
        self._run.finish()
