"""What a run measures arrives at each tracker and is read back by its own API; a failing one never stops the run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from agentlightning.algorithms.training import Collected
from agentlightning.config import TrainConfig
from agentlightning.errors import MissingExtraError
from agentlightning.training import tracking as module
from agentlightning.training.callbacks import FinishedStep
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.tracking import Tracking, Transcript

ROW = Transcript("greedy", '{"word": "red"}', "user: say <red> | now\nassistant: red", "red", 0.5, "r1-validation-0")
RESULT = {
    "held_out": {"greedy": {"before": 0.25, "after": 0.75, "gain": 0.5, "interval": [0.25, 0.75], "tasks": 8}},
    "steps": 3,
}
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360606060000000050001a5f64540"
    "0000000049454e44ae426082"
)


def config(*trackers: str, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({"agent": "mine.py:solve", "tracking": {"trackers": trackers, **changes}})


@dataclass
class Result:
    """As far as trackers see it."""

    curve: Path | None
    warnings: tuple[str, ...] = ()
    tracker_failures: dict[str, int] = field(default_factory=dict[str, int])

    def as_json(self) -> dict[str, Any]:
        return RESULT


class Reported:
    """The trackers of a run, and what it was warned of."""

    def __init__(self, settings: TrainConfig, run_dir: Path, step: int) -> None:
        self.warnings: dict[str, str] = {}
        self.state = RunState("r", step=step)
        run: Any = SimpleNamespace(
            config=settings,
            directory=run_dir,
            state=self.state,
            warn_of=self.warnings.update,
            collector=SimpleNamespace(store=None),
            validation_tasks=[],
            validation_name=str,
        )
        self.tracking = Tracking(run)

    async def log(self, step: int, line: dict[str, Any]) -> None:
        self.state.step = step
        await self.tracking.on_step_end(FinishedStep(Collected(()), line))

    async def transcripts(self, step: int) -> None:
        self.state.step = step
        await self.tracking.on_validation({})

    async def result(self, curve: Path) -> Result:
        found: Any = await self.tracking.on_end(Result(curve))  # type: ignore[arg-type]
        return found


@pytest.fixture(autouse=True)
def _one_transcript(monkeypatch: pytest.MonkeyPatch) -> None:
    async def rows(*_: Any) -> list[Transcript]:
        return [ROW]

    monkeypatch.setattr(module, "validation_transcripts", rows)


def report(run_dir: Path, settings: TrainConfig) -> dict[str, int]:
    """A run of three steps that is interrupted after the second, and resumed from the first."""
    run_dir.mkdir(exist_ok=True)
    return asyncio.run(_report(run_dir, settings))


async def _report(run_dir: Path, settings: TrainConfig) -> dict[str, int]:
    first = Reported(settings, run_dir, 0)
    for step in (1, 2):
        await first.log(step, {"step": step, "reward": step / 10, "note": "text", "entropy": float("nan")})
        await first.transcripts(step)
    await first.tracking.close()
    again = Reported(settings, run_dir, 1)
    for step in (2, 3):
        await again.log(step, {"step": step, "reward": step / 10})
    await again.transcripts(3)
    (run_dir / "curve.png").write_bytes(PNG)
    return (await again.result(run_dir / "curve.png")).tracker_failures


class Broken:
    """A tracker that starts, and raises from then on."""

    package = "broken"

    def start(self, run: Any) -> str:
        return "one"

    def log(self, step: int, metrics: Any) -> None:
        raise ConnectionError("the server is gone")

    def transcripts(self, step: int, rows: Any) -> None:
        raise SystemExit(3)

    def result(self, step: int, result: Any, curve: Any) -> None: ...

    def close(self, *, finished: bool) -> None: ...


class Absent(Broken):
    def start(self, run: Any) -> str:
        raise TimeoutError("no answer")


@pytest.fixture
def tracker_is(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "check_installed", lambda config: None)
    return lambda kind: monkeypatch.setattr(module, "load_tracker", lambda name: kind())


def test_transcripts_are_in_a_file_whether_there_is_a_tracker_or_not(tmp_path: Path) -> None:
    assert report(tmp_path, config()) == {}
    rows = [orjson.loads(line) for line in (tmp_path / "transcripts.jsonl").read_bytes().splitlines()]
    assert [row["step"] for row in rows] == [1, 3], "the step that was lost is not there twice"
    assert rows[0]["output"] == "red"


async def test_a_tracker_that_fails_is_named_once_and_counted(tmp_path: Path, tracker_is: Any) -> None:
    tracker_is(Broken)
    run = Reported(config("tensorboard"), tmp_path, 0)
    for step in (1, 2, 3):
        await run.log(step, {"reward": 0.5})
    await run.transcripts(3)
    result = await run.result(tmp_path / "curve.png")
    assert result.tracker_failures == {"tensorboard": 4}
    (text,) = run.warnings.values() or result.warnings
    assert text.startswith("tensorboard failed to log metrics: ConnectionError: the server is gone. The run goes on")


async def test_a_tracker_that_does_not_start_is_named_and_every_call_counted(tmp_path: Path, tracker_is: Any) -> None:
    tracker_is(Absent)
    run = Reported(config("tensorboard"), tmp_path, 0)
    assert "failed to start: TimeoutError: no answer" in run.warnings["tracker_tensorboard"]
    await run.log(1, {"reward": 0.5})
    assert (await run.result(tmp_path / "curve.png")).tracker_failures == {"tensorboard": 4}


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentlightning\[mlflow\]'"):
        Reported(config("mlflow"), tmp_path, 0)


async def test_no_secret_is_among_the_settings(tmp_path: Path, tracker_is: Any) -> None:
    shown: list[Any] = []

    class Settings(Broken):
        def start(self, run: Any) -> str:
            shown.append(run.settings)
            return "one"

    tracker_is(Settings)
    provider = {
        "name": "known",
        "base_urls": ["http://127.0.0.1:1/v1"],
        "api_key": "s3cret",
        "headers": {"x": "s3cret"},
    }
    settings = config("tensorboard").model_dump()
    settings |= {"gateway": {"providers": [provider]}, "runner": {"env": {"HF_TOKEN": "s3cret", "CITY": "Paris"}}}
    run = Reported(TrainConfig.model_validate(settings), tmp_path, 0)
    await run.result(tmp_path / "curve.png")
    (found,) = shown
    assert found["runner.env.CITY"] == "Paris"
    assert "http://127.0.0.1:1/v1" in found["gateway.providers"]
    assert "s3cret" not in str(found)


@pytest.mark.slow
def test_tensorboard_reads_the_run_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert report(tmp_path, config("tensorboard")) == {}
    events = EventAccumulator(str(tmp_path / "tensorboard"), purge_orphaned_data=True).Reload()
    assert [(each.step, round(each.value, 3)) for each in events.Scalars("reward")] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert events.Scalars("result/held_out_greedy_gain")[0].value == 0.5
    assert (
        "say &lt;red> \\| now<br>assistant: red"
        in events.Tensors("transcripts")[-1].tensor_proto.string_val[0].decode()
    )
    assert "mine.py:solve" in events.Tensors("settings")[0].tensor_proto.string_val[0].decode()
    assert events.Images("curve")[0].encoded_image_string == PNG


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the package's own
def test_mlflow_reads_the_run_back(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    run_dir = tmp_path / "first"
    assert report(run_dir, config("mlflow", project="words")) == {}
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("words")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["agent"] == "mine.py:solve"
    assert run.data.metrics["result/held_out_greedy_gain"] == 0.5
    assert {each.step for each in client.get_metric_history(run.info.run_id, "reward")} == {1, 2, 3}
    assert {each.path for each in client.list_artifacts(run.info.run_id)} == {"curve.png", "result.json", "transcripts"}


@pytest.mark.slow
def test_trackio_reads_the_run_back(tmp_path: Path) -> None:
    """In a process of its own: Trackio reads the place of its files when it is imported."""
    pytest.importorskip("trackio")
    program = """
import sys; sys.path.insert(0, sys.argv[1])
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from test_tracking import config, report
assert report(Path(sys.argv[2]), config("trackio", project="words")) == {}
import trackio
(run,) = trackio.Api().runs("words")
from trackio.sqlite_storage import SQLiteStorage
rows = {row["step"]: row for row in SQLiteStorage.get_logs("words", run.name)}
print(run.name, sorted(rows), rows[3].get("reward"))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path / "first")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("first [1, 2, 3]")


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of an offline run: blocks of 32 KiB, after a header of 7 bytes, as a LevelDB log has them."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the package's own
def test_wandb_reads_the_offline_run_back(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    assert report(tmp_path, config("wandb", project="words")) == {}
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    ids = {file.stem.removeprefix("run-") for file in files}
    assert len(ids) == 1, "a resumed run continues the same one"
    rewards: list[str] = []
    for file in files:
        for data in wandb_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rewards += [items["reward"]] if "reward" in items else []
    assert rewards == ["0.1", "0.2", "0.2", "0.3"], "the repeated step is sent again; the server keeps the first"
