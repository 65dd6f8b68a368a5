"""The benchmark of a pretrained model runs on a tiny one, and its arms compute the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.models import tiny_checkpoint

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import real_model
finally:
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.timeout(120)
def test_arms_sample_the_same_number_of_tokens(tmp_path: Path) -> None:
    model, out = tiny_checkpoint(tmp_path / "model"), tmp_path / "found.json"
    size = ("--callers", "16", "--prompts", "20", "--new", "4", "--dtypes", "float32", "--threads", "1")
    arms = ("--arms", "ours", "transformers.generate")
    command = [sys.executable, str(BENCHMARKS / "real_model.py"), "sampling", "--model", str(model), "--rounds", "1"]
    done = subprocess.run(
        [*command, *size, *arms, "--out", str(out)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["arm"] for row in rows] == ["ours", "transformers.generate"]
    assert [[answer["tokens"] for answer in row["answers"]] for row in rows] == [[64], [64]]
    assert "16 callers, prompts of 20 tokens, groups of 8 share one, float32" in done.stdout


def test_arms_that_computed_different_numbers_of_tokens_are_refused() -> None:
    rows = [real_model.Row("sampling", "case", "float32", name) for name in ("real_ours", "real_transformers")]
    for row, tokens in zip(rows, (64, 60), strict=True):
        row.answers.append({"tokens": tokens})
    with pytest.raises(real_model.DifferentWorkError, match=r"'transformers\.generate': \{60\}"):
        real_model.check_same_work(rows)
