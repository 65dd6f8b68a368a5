"""MLflow: a database beside the runs (`runs/mlflow.db`) unless the settings or MLFLOW_TRACKING_URI name a server."""

# The package is an extra, which type checks do without.
# pyright: reportMissingImports=false
from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Final

from agentlightning.training.tracking.base import TrackedRun, Transcript, result_numbers

MOST_PARAMS: Final = 90
"""Parameters in one request; MLflow takes 100."""
MOST_TEXT: Final = 500
"""Characters of a parameter."""


class MlflowTracker:
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
        self.log(step, {f"result/{name}": value for name, value in result_numbers(result).items()})
        self._client.log_dict(self._id, dict(result), "result.json")
        if curve is not None:
            self._client.log_artifact(self._id, str(curve))

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")
