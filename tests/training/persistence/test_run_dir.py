"""A run directory continues from any crash."""

import json
import signal
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError, ResumeError
from agentlightning.training.persistence.run_dir import (
    RunDir,
    RunState,
    append_lines,
    forget_after,
    read_state,
    write_atomically,
)


@pytest.fixture
def run_dir(tmp_path):
    made = RunDir.create(tmp_path / "run")
    yield made
    made.close()


def test_state_survives_a_round_trip(run_dir):
    state = RunState(
        run_id="r1",
        step=3,
        rollouts=24,
        checkpoint="checkpoints/step-000003",
        evaluations={"before-greedy": [1.0, None]},
    )
    run_dir.write_state(state)
    assert read_state(run_dir.path) == state


def test_a_second_process_is_kept_out(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by another process"):
        RunDir.create(tmp_path / "run")
    run_dir.close()
    RunDir.create(tmp_path / "run").close()


def test_a_directory_that_holds_a_run_is_not_overwritten(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.write_state(RunState(run_id="r1"))
    run_dir.close()
    with pytest.raises(ConfigError, match="--resume"):
        RunDir.create(tmp_path / "run")


def test_a_directory_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(ResumeError, match="holds no run"):
        RunDir.open(tmp_path)


def test_a_place_that_cannot_be_written_to_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"is no directory, or lies in a file; give another --run"):
            RunDir.create(path)
    with pytest.raises(ConfigError, match=r"/proc/run cannot be written to .*; give another --run"):
        RunDir.create(Path("/proc/run"))


def test_a_run_that_did_not_begin_is_removed_and_nothing_else(tmp_path):
    run_dir = RunDir.create(tmp_path / "runs" / "first")
    run_dir.write_state(RunState(run_id="r1"))
    run_dir.data("train").parent.mkdir()
    run_dir.discard()
    run_dir.close()
    assert list(tmp_path.iterdir()) == []
    mine = tmp_path / "mine" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("kept")
    run_dir = RunDir.create(mine.parent)
    run_dir.write_state(RunState(run_id="r1"))
    run_dir.discard()
    run_dir.close()
    assert list(mine.parent.iterdir()) == [mine]


def test_a_state_file_that_is_broken_is_named(tmp_path):
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ResumeError, match=r"state\.json cannot be read"), closing(RunDir.open(tmp_path)) as run_dir:
        read_state(run_dir.path)


@pytest.mark.parametrize(
    "fields", [{"step": "seven"}, {"step": None}, {"warnings": []}, {"seconds": "1"}, {"callbacks": 3}, {"stages": {}}]
)
def test_a_state_with_a_value_of_another_type_is_named(tmp_path, fields):
    (tmp_path / "state.json").write_text(json.dumps({"run_id": "r1", **fields}))
    [name] = fields
    with pytest.raises(ResumeError, match=rf"Expected .*, got .* - at `\$\.{name}`; start a new run"):
        read_state(tmp_path)


def test_every_state_that_is_written_is_read(tmp_path):
    kept = {"directory": "c", "step": 1, "version": None}
    state = RunState(
        "r1",
        seconds=1,
        best_score=0.5,
        resumes=[[1, 2]],
        callbacks={"gate": {"promoted": kept, "guard_scores": {"start": [None, 0.5]}}, "lab": {"best": 3}},
    )
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.write_state(state)
    run_dir.close()
    assert read_state(tmp_path / "run") == state
    assert state.kept == {"promoted": kept}


@pytest.mark.parametrize("version", [0, 99])
def test_a_state_of_another_version_is_refused(tmp_path, version):
    (tmp_path / "state.json").write_text(json.dumps({"run_id": "r1", "version": version}))
    with pytest.raises(ResumeError, match=rf"was written by another version \(state {version}\); use that version"):
        read_state(tmp_path)


def test_a_line_of_metrics_cut_by_a_crash_is_dropped(run_dir):
    append_lines(run_dir.path / "metrics.jsonl", {"step": 1, "reward": 0.5})
    with (run_dir.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "rew')
    assert [record["step"] for record in run_dir.read_metrics()] == [1]


def test_metrics_of_steps_that_are_done_again_are_forgotten(run_dir):
    for step in (1, 2, 3):
        append_lines(run_dir.path / "metrics.jsonl", {"step": step})
    forget_after(run_dir.path / "metrics.jsonl", 2)
    assert [record["step"] for record in run_dir.read_metrics()] == [1, 2]


@pytest.mark.parametrize("name", ["metrics", "changes", "audit", "transcripts"])
def test_what_is_added_after_a_resume_is_no_part_of_a_line_that_a_full_disk_cut_off(run_dir, name):
    run_dir.write_state(RunState(run_id="r1"))
    lines, own = run_dir.path / f"{name}.jsonl", run_dir.path / "tasks.jsonl"
    for file in (lines, own):
        file.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    run_dir.close()
    with closing(RunDir.open(run_dir.path)):
        assert lines.read_bytes() == b'{"step": 1}\n'
        assert own.read_bytes() == b'{"step": 1}\n{"step": 2, "rew', "a file of the user's"


def test_a_last_line_that_lacks_only_its_end_stays(run_dir):
    """An editor may have left it out; the step of a line that is gone would not run again."""
    run_dir.write_state(RunState(run_id="r1"))
    (run_dir.path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}')
    (run_dir.path / "audit.jsonl").write_bytes(b'{"step": 1}\n')
    run_dir.close()
    with closing(RunDir.open(run_dir.path)) as opened:
        append_lines(opened.path / "metrics.jsonl", {"step": 3})
        assert [each["step"] for each in opened.read_metrics()] == [1, 2, 3]
        assert (run_dir.path / "audit.jsonl").read_bytes() == b'{"step": 1}\n'
        assert not (run_dir.path / "changes.jsonl").exists()


def test_a_line_of_metrics_that_cannot_be_read_is_named(run_dir):
    (run_dir.path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "rew{"step": 3}\n')
    for read in (run_dir.read_metrics, partial(forget_after, run_dir.path / "metrics.jsonl", 1)):
        with pytest.raises(ResumeError, match=r"line 2 of \S+metrics\.jsonl cannot be read: .*; remove that line"):
            read()


def test_only_old_checkpoints_that_nobody_needs_are_removed(run_dir):
    for step in (1, 2, 3, 4, 5):
        run_dir.checkpoint(step).mkdir(parents=True)
    state = RunState(run_id="r", checkpoint="checkpoints/step-000005", best_checkpoint="checkpoints/step-000002")
    run_dir.prune_checkpoints(state, keep=2)
    left = sorted(entry.name for entry in (run_dir.path / "checkpoints").iterdir())
    assert left == ["step-000002", "step-000004", "step-000005"]


def test_what_may_hold_a_key_is_nobody_elses_to_read(tmp_path):
    write_atomically(tmp_path / "config.toml", b"key", private=True)
    assert (tmp_path / "config.toml").stat().st_mode & 0o077 == 0


DIE_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from agentlightning.models import checkpoint

class Model:
    def save_pretrained(self, folder):
        (folder / "model.safetensors").write_bytes(b"half of it")
        if not REPLACES:
            os.kill(os.getpid(), signal.SIGKILL)

class Tokenizer:
    def save_pretrained(self, folder):
        pass

def die(self, target):
    rename(self, target)
    os.kill(os.getpid(), signal.SIGKILL)

REPLACES = sys.argv[2] == "replaces"
rename, Path.rename = Path.rename, die
checkpoint.save(Path(sys.argv[1]), None, Model().save_pretrained, Tokenizer().save_pretrained)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["saves", "replaces"])
def test_what_a_kill_left_of_a_checkpoint_is_gone_when_the_run_is_resumed(tmp_path, what):
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.write_state(RunState(run_id="r1"))
    whole = run_dir.checkpoint(1)
    whole.mkdir(parents=True)
    (whole / "model.safetensors").write_bytes(b"whole")
    run_dir.close()
    saved = whole if what == "replaces" else run_dir.checkpoint(2)
    ended = subprocess.run([sys.executable, "-c", DIE_WHILE_SAVING, str(saved), what])
    assert ended.returncode == -signal.SIGKILL
    assert [path for path in whole.parent.iterdir() if path.name.startswith(".step-")]
    with closing(RunDir.open(run_dir.path)):
        assert list(whole.parent.iterdir()) == [whole]
        assert (whole / "model.safetensors").read_bytes() == b"whole"


def test_resuming_removes_what_was_not_finished_and_nothing_else(run_dir):
    run_dir.write_state(RunState(run_id="r1"))
    folder = run_dir.path / "checkpoints"
    for name in (".step-000001.ab12cd_9/new", ".hidden", ".step-000001.ab12cd_8/mine", "step-000001"):
        (folder / name).mkdir(parents=True)
    (run_dir.path / ".state.json.4711").write_bytes(b"{")
    (run_dir.path / ".env").write_bytes(b"mine")
    run_dir.close()
    with closing(RunDir.open(run_dir.path)):
        assert sorted(path.name for path in folder.iterdir()) == [".hidden", ".step-000001.ab12cd_8", "step-000001"]
        assert sorted(path.name for path in run_dir.path.glob(".*")) == [".env"]
