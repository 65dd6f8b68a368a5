"""A run on recorded data that is killed with SIGKILL, again and again, ends as one that was left alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from agentlightning.cli.main import build
from agentlightning.demo.problems import demonstrations
from agentlightning.models.tiny import make_tiny

pytestmark = pytest.mark.chaos

AGL = str(Path(sys.executable).with_name("agl"))
LIMIT = 240.0
STEPS = 60
PAIRS = [{"prompt": f"question {number}", "chosen": "yes", "rejected": "no"} for number in range(8)]
CONVERSATIONS = [
    {"messages": [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair["chosen"]}]}
    for pair in PAIRS
]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of its metrics."""
    path = run_dir / "metrics.jsonl"
    written = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in written if line.endswith("\n")]


def run_here(words: list[str]) -> None:
    """A run that nobody kills; in this process, where what is heavy is imported."""
    done = CliRunner().invoke(build(), words)
    assert done.exit_code == 0, done.output


def wait_for(process: Any, condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + LIMIT
    while not condition():
        assert process.popen.poll() is None, process.said()
        assert time.monotonic() < ends, process.said()
        time.sleep(0.01)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("verb", "records", "settings"),
    [
        ("dpo", ["--data", PAIRS], ["tasks_per_step=3"]),
        ("sft", ["--data", CONVERSATIONS], ["batch_size=3", "validation_share=0.25", "validate_every=10"]),
    ],
)
def test_kill_9_costs_a_run_on_recorded_data_nothing_but_time(
    verb: str, records: list[Any], settings: list[str], start_process: Any, tmp_path: Path
) -> None:
    tiny = make_tiny(tmp_path / "tiny", demonstrations(40), hidden_size=32, heads=2)
    option, data = records
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in data))
    words = [verb, *settings, f"steps={STEPS}", "optimizer.lr=1e-4", option, str(tmp_path / "data.jsonl")]
    words += ["--model", str(tiny), "--checkpoint-every", "4", "--run"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_here([*words, str(whole)])
    for kill_at in (10, 30):
        command = [*words, str(cut)] if kill_at == 10 else [verb, "--resume", str(cut)]
        process = start_process([AGL, *command], tmp_path / "log")
        wait_for(process, lambda reached=kill_at: len(lines(cut)) > reached)
        process.kill()
        assert process.popen.returncode == -9, "it was killed, and had not ended"
    run_here([verb, "--resume", str(cut)])
    steps = [line["step"] for line in lines(cut)]
    assert steps == list(range(1, STEPS + 1)), "no step is missing, and none is there twice"
    left, right = (load_file(run / "checkpoint" / "model.safetensors") for run in (whole, cut))
    assert all(torch.equal(left[name], right[name]) for name in left)
    first, second = (json.loads((run / "report.json").read_text()) for run in (whole, cut))
    timed = {"seconds", "checkpoint", "curve", "run_dir"}
    for each in (first, second):
        each["recorded"].pop("metrics")
    assert {k: v for k, v in first.items() if k not in timed} == {k: v for k, v in second.items() if k not in timed}
