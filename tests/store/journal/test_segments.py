"""The files of a journal: none is taken from a process that lives, none is lost, whatever it is called."""

import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.errors import StoreError
from agentlightning.store.journal import segments
from agentlightning.store.journal.segments import Segments


def orphaned(stem):
    """What others find there, and remove."""
    return [record for _, records in Segments(stem).orphaned() for record in records]


def fail_to_take_over(stem):
    for path, _ in Segments(stem).orphaned():
        raise StoreError(f"{path}: the disk is full")


@pytest.mark.parametrize("name", ["store.db-calls", "runs[1].db-calls", "*.db-calls"])
def test_what_a_process_leaves_is_found_once(tmp_path, name):
    ours = Segments(tmp_path / name)
    for record in (b"one", b"two", b""):
        ours.append(record)
    assert orphaned(tmp_path / name) == []  # its process lives
    ours.close(keep=True)
    assert orphaned(tmp_path / name) == [b"one", b"two", b""]
    assert orphaned(tmp_path / name) == []
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_could_not_be_taken_over_stays_for_the_next(tmp_path):
    ours = Segments(tmp_path / "calls")
    ours.append(b"one")
    ours.close(keep=True)
    with pytest.raises(StoreError, match="full"):
        fail_to_take_over(tmp_path / "calls")
    assert orphaned(tmp_path / "calls") == [b"one"]


def test_containers_with_one_process_id_share_a_folder(tmp_path):
    first, second = Segments(tmp_path / "calls"), Segments(tmp_path / "calls")
    first.append(b"one")
    second.append(b"two")
    assert len(list(tmp_path.iterdir())) == 2
    first.close(keep=True)
    assert orphaned(tmp_path / "calls") == [b"one"]
    second.close(keep=True)
    assert orphaned(tmp_path / "calls") == [b"two"]


def test_a_file_that_was_taken_for_one_left_behind_is_not_written_to(tmp_path, monkeypatch):
    real, stolen = segments.fcntl.flock, []

    def flock(file, operation):
        if not stolen:  # somebody else is quicker between opening and locking
            (path,) = tmp_path.iterdir()
            stolen.append(path)
            path.unlink()
        real(file, operation)

    monkeypatch.setattr(segments.fcntl, "flock", flock)
    ours = Segments(tmp_path / "calls")
    ours.append(b"one")
    ours.close(keep=True)
    assert stolen
    assert orphaned(tmp_path / "calls") == [b"one"]


def test_a_record_that_does_not_fit_its_sum_ends_the_file(tmp_path):
    ours = Segments(tmp_path / "calls")
    for record in (b"one", b"two", b"three"):
        ours.append(record)
    ours.close(keep=True)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"two", b"owt"))
    assert orphaned(tmp_path / "calls") == [b"one"]


def test_files_go_when_what_they_hold_is_written_and_the_last_one_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 20)
    ours = Segments(tmp_path / "calls")
    for number in range(20):
        ours.append(b"record %d" % number)
    many = len(list(tmp_path.iterdir()))
    ours.written(19)
    few = len(list(tmp_path.iterdir()))
    assert many > few == 1
    for number in range(5):
        ours.append(b"record %d again" % number)
    ours.written(6)
    assert len(list(tmp_path.iterdir())) == 1
    ours.close(keep=True)
    assert list(tmp_path.iterdir()) == []


@given(
    rounds=st.lists(
        st.tuples(st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 30)), min_size=1, max_size=12
    )
)
def test_what_is_left_is_what_was_not_written_whatever_was_there_before(rounds):
    """Files are written over: nothing of what they held comes back, and nothing that counts is lost."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(segments, "SEGMENT_BYTES", 60):
        ours, pending = Segments(Path(folder) / "calls"), []
        for records, many in rounds:
            for record in records:
                ours.append(record)
                pending.append(record)
            done = min(many, len(pending))
            ours.written(done)
            del pending[:done]
        ours.close(keep=True)
        left = orphaned(Path(folder) / "calls")
    assert left[len(left) - len(pending) :] == pending
