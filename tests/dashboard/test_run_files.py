"""Files of a run that grow are read on where they were read to, and again where they were replaced or cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from agentlightning.dashboard.data import run_files
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.dashboard.views.runs import summary
from agentlightning.errors import ConfigError
from agentlightning.training.health.signs import sign_history
from agentlightning.training.persistence.run_dir import RunDir, RunState, write_atomically


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.write_state(RunState("r1"))
    run_dir.close()
    return RunFiles(tmp_path / "run")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines of the audit log that were decoded."""
    seen: list[bytes] = []
    decode: Callable[..., object] = run_files.audit_record

    def watched(path: Path, number: int, line: bytes) -> object:
        seen.append(line)
        return decode(path, number, line)

    monkeypatch.setattr(run_files, "audit_record", watched)
    return seen


def learned(step: int, *rollouts: str) -> bytes:
    record = {"action": "learned", "step": step, "version": step, "algorithm": "a", "time": 0.0, "rollouts": rollouts}
    return json.dumps(record).encode() + b"\n"


def append(path: Path, *lines: bytes) -> None:
    with path.open("ab") as file:
        file.writelines(lines)


def test_of_an_audit_log_that_grows_each_line_is_decoded_once(files: RunFiles, decoded: list[bytes]) -> None:
    path = files.path / "audit.jsonl"
    append(path, learned(1, "a"), learned(2, "b"))
    assert files.learned() == {2: ("b",), 1: ("a",)}
    append(path, learned(3, "c")[:10])
    assert [each.step for each in files.audit()] == [1, 2], "the last line is being written"
    append(path, learned(3, "c")[10:], learned(2, "d"))
    assert [each.step for each in files.audit()] == [1, 3, 2], "of a step that was repeated, the last time counts"
    assert files.learned() == {2: ("d",), 3: ("c",), 1: ("a",)}
    assert len(decoded) == 4


def test_a_line_of_the_audit_log_that_cannot_be_read_is_named_whenever_it_was_written(files: RunFiles) -> None:
    path = files.path / "audit.jsonl"
    append(path, learned(1, "a"), learned(2, "b"))
    assert len(files.audit()) == 2
    append(path, b"{}\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"line 3 of .*audit\.jsonl cannot be read"):
            files.audit()
    path.write_bytes(learned(1, "a") + learned(2, "b") + learned(3, "c"))
    assert len(files.audit()) == 3


def test_a_file_that_was_replaced_or_cut_is_read_again(files: RunFiles) -> None:
    path = files.path / "metrics.jsonl"
    rows = [{"step": step, "reward": step / 10} for step in range(1, 5)]
    lines = [orjson.dumps(row) + b"\n" for row in rows]
    append(path, *lines[:3])
    assert files.metrics() == rows[:3]
    write_atomically(path, b"".join(lines[:1]))  # as a run does that goes back to a checkpoint
    assert files.metrics() == rows[:1]
    append(path, lines[3])
    assert files.metrics() == [rows[0], rows[3]]
    path.write_bytes(b"".join(lines))  # the same file, with other lines where the earlier ones ended
    assert files.metrics() == rows
    path.unlink()
    assert files.metrics() == []
    append(path, b"no json\n", lines[0])
    assert files.metrics() == rows[:1]
    assert [each.step for each in files.records()] == [1]


def test_the_signs_of_a_run_that_goes_on_are_those_of_all_its_steps(files: RunFiles) -> None:
    path = files.path / "metrics.jsonl"
    rows = [{"step": step, "reward": 0.5, "truncated": 0.5 if 10 < step < 17 else 0.0} for step in range(1, 25)]
    lines = [orjson.dumps(row) + b"\n" for row in rows]
    for line in lines:
        append(path, line)
        assert files.signs() == sign_history(files.records())
    assert files.signs()
    write_atomically(path, b"".join(lines[:5]))
    assert files.signs() == []


SETTINGS = (
    'algorithm = "grpo"',
    "algorithm = 3",
    "[algorithm]",
    "steps = 3",
    "[[algorithm]]",
    '[algorithm]\ntype = ["grpo"]',
    "[algorithm]\ntype = { name = 'grpo' }",
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_settings_that_were_edited_to_none_leave_the_run_in_the_list(files: RunFiles, settings: str) -> None:
    (files.path / "config.toml").write_text(settings)
    steps = 100 if settings == "[algorithm]" else None  # as a resume would run them
    found = summary(files)
    assert (found["state"], found["steps"]) == ("unfinished", steps)
    record, _ = run_files.status_record(files)
    assert record["steps"] == steps


def test_the_steps_of_a_run_whose_settings_cannot_be_read_are_known(files: RunFiles) -> None:
    (files.path / "config.toml").write_text('[algorithm]\ntype = "module.not.here:Algorithm"\nsteps = 7\n')
    assert files.config() is None
    assert summary(files)["steps"] == 7


def test_what_is_no_object_in_a_file_of_objects_is_left_out(files: RunFiles) -> None:
    append(files.path / "metrics.jsonl", b"3\n", b'{"step": 1, "reward": 0.5}\n')
    (files.path / "report.json").write_bytes(b"[]")
    assert files.metrics() == [{"step": 1, "reward": 0.5}]
    assert files.report() is None
    assert summary(files)["rewards"] == [0.5]
