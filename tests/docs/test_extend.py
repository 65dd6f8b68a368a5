"""The files of "Extend it", installed as a distribution of their own, are used through the public entries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.docs.test_docs import ROOT, blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AGL = str(Path(sys.executable).parent / "agl")
SMALL = [
    "data.train=words:any?size=6&seed=3",
    "agent=lab_dataset:say",
    "evaluation.every=0",
    'evaluation.modes=["greedy"]',
    "data.validation_share=0",
    "runner.concurrency=4",
    "policy.threads=1",
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that pip has installed the files of the page into."""
    source, target = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("installed")
    for block in blocks(ROOT / "docs" / "guides" / "extend.md"):
        if block.file:
            (source / block.file).write_text(block.body)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, timeout=300)
    return target


def agl(installed: Path, folder: Path, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "200"}
    run = subprocess.run([AGL, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert bool(run.returncode) == fails, run.stdout + run.stderr
    return run


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_what_a_distribution_announces_is_known_by_its_name(installed: Path, tmp_path: Path) -> None:
    text = agl(installed, tmp_path, "train", "--help").stdout
    for kind, name in {
        "losses": "plain",
        "credit_rules": "last_call",
        "trackers": "lines",
        "callbacks": "best_batch",
    }.items():
        assert any(line.split()[:1] == [kind] and name in line for line in text.splitlines()), text
    run = agl(installed, tmp_path, "train", "--print-config", "algorithm.loss=plane", fails=True)
    assert "there is no loss 'plane'; did you mean 'plain'" in run.stderr
    shown = agl(installed, tmp_path, "env", "--json").stdout
    found = {(each["kind"], each["name"]): each for each in json.loads(shown.splitlines()[-1])["extensions"]}
    assert not [each for each in found.values() if "problem" in each], found
    assert f"lab_engine:Near ({installed / 'lab_engine.py'})" in found["engines", "near"]["part"]
    assert {kind for kind, _ in found} >= {"algorithms", "rewards", "datasets", "backends"}


def test_a_run_is_made_of_parts_of_others_and_resumes_with_them(installed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    parts = [
        'algorithm.loss.type="plain"',
        "algorithm.loss.beta=0.5",
        'algorithm.credit.type="last_call"',
        "algorithm.credit.baseline=0.1",
        "reward=brevity",
        'tracking.trackers=["lines"]',
        'run.callbacks=["best_batch"]',
        'runner.hooks=["timer"]',
        "policy.kind=logged",
        'policy.backend={name = "ours"}',
        "algorithm.steps=1",
        "algorithm.tasks_per_step=2",
        "algorithm.group_size=2",
    ]
    agl(installed, tmp_path, "train", *SMALL, *parts, "--run", str(run))
    assert "plain_gain" in metrics(run)[0]
    assert json.loads((run / "lines.jsonl").read_text().splitlines()[0])["step"] == 1
    assert any(b"lab.seconds" in file.read_bytes() for file in run.glob("store.db*"))
    named = json.loads((run / "state.json").read_text())["extensions"]
    assert named["algorithm.loss.type=plain"]["file"] == str(installed / "lab_loss.py")
    assert len(named) == 7, named
    assert metrics(run)[0]["best_batch"] == metrics(run)[0]["reward"]

    changed = installed / "lab_loss.py"
    before = changed.read_text()
    changed.write_text(before + "\n# another formula\n")
    try:
        refused = agl(installed, tmp_path, "train", "--resume", str(run), "algorithm.steps=2", fails=True)
        assert f"plain of algorithm.loss.type has changed since the run began: {changed}" in refused.stderr
        agl(installed, tmp_path, "train", "--resume", str(run), "algorithm.steps=2", "algorithm.loss.type=plain")
    finally:
        changed.write_text(before)
    assert [each["step"] for each in metrics(run)] == [1, 2]


def test_an_algorithm_of_others_trains_and_names_its_file_where_it_fails(installed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = (installed / "lab_algorithm.py").read_text()
    (tmp_path / "mine.py").write_text(
        own.replace("        while", "        assert training.step < 1, 'too far'\n        while", 1).replace(
            "            collected =", "            assert training.step < 1, 'too far'\n            collected =", 1
        )
    )
    given = ['algorithm.type="mine.py:LeaveOneOut"', "algorithm.steps=2", "reward=lab_reward:brevity"]
    failed = agl(installed, tmp_path, "train", *SMALL, *given, "--run", str(run), fails=True)
    assert f"algorithm mine:LeaveOneOut ({tmp_path / 'mine.py'}) failed with AssertionError: too far" in failed.stderr
    assert "continue with  agl train --resume" in failed.stderr
    again = ["algorithm.type=mine.py:LeaveOneOut"]
    wants = "            await training.collect([agl.Want(task=10**6)])\n            collected ="
    (tmp_path / "mine.py").write_text(own.replace("            collected =", wants, 1))
    failed = agl(installed, tmp_path, "train", "--resume", str(run), *again, fails=True)
    text = f"mine:LeaveOneOut ({tmp_path / 'mine.py'}) failed with ValueError: task 1000000 is none of the run's"
    assert text in failed.stderr
    assert "continue with  agl train --resume" in failed.stderr
    (tmp_path / "mine.py").write_text(own)
    agl(installed, tmp_path, "train", "--resume", str(run), *again)
    assert [each["step"] for each in metrics(run)] == [1, 2]
