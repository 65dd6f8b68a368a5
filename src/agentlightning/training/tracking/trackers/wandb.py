"""Weights & Biases: offline below `RUN/wandb` unless the settings or WANDB_MODE say otherwise."""

# The package is an extra, which type checks do without.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.training.tracking.base import COLUMNS, TrackedRun, Transcript, result_numbers, rows_of


class WandbTracker:
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

        self._run.summary.update({f"result/{name}": value for name, value in result_numbers(result).items()})
        if curve is not None:
            self._run.log({"curve": wandb.Image(str(curve))}, step=step)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
