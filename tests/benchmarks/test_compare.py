"""The comparison of two checkouts: both run in turn, their figures are read, and what is slower is marked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

COMPARE = Path(__file__).parents[2] / "benchmarks" / "compare.py"
TABLE = """
0.4M, conversations
                               tokens  CPU seconds   ratio   gradient apart
  one padded row per call        7648        0.363   1.000          7.3e-08
  rows by length                 7648        0.300   0.827          7.3e-08
  merged                         7648        0.300   0.842          7.3e-08
  shared                         2076        0.100   0.277          4.4e-07
  auto                           2076        0.100   0.277          4.4e-07

met     0.4M, conversations: ratio at most 0.30
"""


def checkout(folder: Path, name: str, printed: str) -> Path:
    """One whose benchmark prints this, and notes that it ran. It knows `--json`, if it prints JSON."""
    (folder / "benchmarks").mkdir(parents=True)
    note = f"open({str(folder.parent / 'order')!r}, 'a').write({folder.name!r} + ' ')"
    known = 'assert sys.argv[-1] == "--json"' if printed.startswith("{") else "assert len(sys.argv) == 1 + 4"
    (folder / "benchmarks" / f"{name}.py").write_text(f"import sys\n{known}\n{note}\nprint({printed!r})\n")
    return folder


def compare(old: Path, new: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", str(COMPARE), str(old), "--new", str(new), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def cases(throughput: float, cpu_us: float, control: float = 100.0) -> str:
    def case(median: float, **last: float) -> dict[str, Any]:
        return {"median": median, "values": [median], "last": last}

    measured = {"ours": case(throughput, cpu_us=cpu_us), "raw SQLite, rows/s": case(control)}
    return json.dumps({"title": "store", "measured": measured, "verdicts": []})


def test_checkouts_take_turns_and_what_is_slower_is_marked(tmp_path: Path) -> None:
    old = checkout(tmp_path / "old", "store", cases(1000, 50))
    new = checkout(tmp_path / "new", "store", cases(800, 40, control=50))
    done = compare(old, new, "store", "--rounds", "4", "--json", "--check")
    assert (tmp_path / "order").read_text().split() == ["old", "new"] * 4
    figures = {each["name"]: each for each in json.loads(done.stdout.splitlines()[-1])["store"]}
    slower, faster, control = figures.values()
    assert (slower["ratio"], slower["low"], slower["high"], slower["verdict"]) == (0.8, 0.8, 0.8, "SLOWER")
    assert (faster["name"], faster["ratio"], faster["verdict"]) == ("ours, us of CPU", 1.25, "")
    assert (control["ratio"], control["verdict"]) == (0.5, "control")
    assert "below 0.95: store: ours, a second\n" in done.stdout
    assert done.returncode == 1


def test_a_version_that_prints_tables_is_read_as_one_that_prints_json(tmp_path: Path) -> None:
    arms = {"one padded row per call": 1.0, "rows by length": 0.3, "merged": 0.4, "shared": 0.1, "auto": 0.08}
    old = checkout(tmp_path / "old", "train_step", TABLE)
    new = checkout(tmp_path / "new", "train_step", json.dumps({"seconds": {"0.4M, conversations": arms}}))
    done = compare(old, new, "train_step", "--rounds", "1", "--json", "--options", "--part sharing --rounds 1")
    found = json.loads(done.stdout.splitlines()[-1])["train_step"]
    assert [round(each["ratio"], 3) for each in found] == [1.0, 0.75, 1.0, 1.25]
    assert [each["verdict"] for each in found] == ["", "slower?", "", ""], "one round proves nothing"
    assert done.returncode == 0


def test_a_benchmark_that_fails_is_named(tmp_path: Path) -> None:
    old = checkout(tmp_path / "old", "store", "{}")
    done = compare(old, old, "store")
    assert done.returncode == 1
    assert "benchmarks/store.py" in done.stderr
