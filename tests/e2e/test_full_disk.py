"""The disk of a run fills up; once there is space again the run goes on."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from agentlightning.errors import PolicyError
from agentlightning.models.tiny import make_tiny
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_space(job, small_disk):
    run = small_disk / "run"
    command = job.command("--run", str(run), "--json", "algorithm.steps=8")
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (18 * 1024 * 1024))
    failed = job.run(command)
    assert failed.returncode != 0
    assert "disk" in failed.stderr, failed.stderr
    assert "Traceback (most recent call last)" not in failed.stderr
    assert shutil.disk_usage(small_disk).free < 8 * 1024 * 1024
    filler.unlink()
    again = [command[0], "train", "--resume", str(run), "--json"] if (run / "state.json").exists() else command
    done = job.run(again)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"] == 8
    assert Path(report["checkpoint"]).exists()


@pytest.mark.chaos
async def test_a_checkpoint_that_the_disk_refuses_is_named_with_the_way_out(small_disk, tmp_path):
    policy = LocalPolicy.open(LocalPolicyConfig(model=str(make_tiny(tmp_path / "tiny", [{"word": "red"}]))))
    (small_disk / "filler").write_bytes(b"x" * (24 * 1024 * 1024 - 200 * 1024))
    with pytest.raises(PolicyError, match=r"cannot save a checkpoint to .*No space left on device.*free space"):
        await policy.save(small_disk / "checkpoint", training_state=True)
    assert [entry.name for entry in small_disk.iterdir()] == ["filler"]
    await policy.close()
