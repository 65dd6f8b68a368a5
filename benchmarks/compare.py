"""How fast a commit is beside an earlier one: runs the same benchmarks from two checkouts in turn.

    git worktree add ../before COMMIT && make -C ../before .venv/.installed
    python benchmarks/compare.py ../before [--new .] [store gateway ...] [--quick] [--rounds N] [--check] [--json]

Each run is a process of its own: a checkout's script, package and environment (`.venv`). The checkouts take turns,
old, new, old, new, so that a change in the machine's load falls on both. For each figure this prints the median of the
rounds' ratios new / old, inverted for times so that above 1 is faster, and its 95% interval (percentile bootstrap over
the rounds). A ratio below the limit of 0.95 is marked: SLOWER where the whole interval lies below it, `slower?` where
more rounds are needed to tell. Figures marked `control` measure code that is not the package's:
how far they are from 1 is what the machine did.

On two idle cores a full comparison of all six takes about an hour, `--quick` about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT = 0.95
MIN_ROUNDS = 4
"""With fewer, the interval says nothing."""
RESAMPLES = 2000
CONTROLS = ("raw SQLite", "the stub itself", "model.generate")
"""What the names of figures begin with that measure no code of the package."""


@dataclass(frozen=True)
class Reading:
    """One measurement of one figure."""

    name: str
    value: float
    is_time: bool = False
    """Less is better."""


@dataclass
class Figure:
    """One figure of both checkouts, a value for each round."""

    name: str
    is_time: bool
    old: list[float] = field(default_factory=list[float])
    new: list[float] = field(default_factory=list[float])

    @property
    def is_control(self) -> bool:
        return self.name.startswith(CONTROLS)

    def ratios(self) -> list[float]:
        """new / old of each round, inverted for a time."""
        pairs = zip(self.old, self.new, strict=True)
        return [old / new if self.is_time else new / old for old, new in pairs]

    def summary(self) -> dict[str, Any]:
        ratios = self.ratios()
        low, high = interval(ratios)
        ratio = statistics.median(ratios)
        certain = high < LIMIT and len(ratios) >= MIN_ROUNDS
        verdict = "control" if self.is_control else "" if ratio >= LIMIT else "SLOWER" if certain else "slower?"
        return {
            **{"name": self.name, "ratio": ratio, "low": low, "high": high, "verdict": verdict},
            **{"old": statistics.median(self.old), "new": statistics.median(self.new)},
        }


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the median, by resampling the rounds."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[round(0.025 * (RESAMPLES - 1))], medians[round(0.975 * (RESAMPLES - 1))]


# -- what the benchmarks print -----------------------------------------------------------------------------------------


def read_cases(printed: str) -> Iterator[Reading]:
    """Of `harness.report`: the throughput of each case, and its CPU time."""
    for name, case in last_json(printed)["measured"].items():
        yield Reading(f"{name}, a second", case["median"])
        if "cpu_us" in case["last"]:
            yield Reading(f"{name}, us of CPU", case["last"]["cpu_us"], is_time=True)


def read_gateway(printed: str) -> Iterator[Reading]:
    """CPU and the median latency of a call under each load; of streams, seconds and memory."""
    found = last_json(printed)
    for arm, runs in found["measured"].items():
        for load, (run,) in runs.items():
            if run["cpu"]:
                yield Reading(f"{arm}, ms of CPU a call, {load}", run["cpu"], is_time=True)
            yield Reading(f"{arm}, p50 in ms, {load}", run["p50"], is_time=True)
    if found["streams"]:
        yield Reading("ours, seconds of all streams", found["streams"]["seconds"], is_time=True)
        yield Reading("ours, MB at most with streams", found["streams"]["mb"], is_time=True)


def read_generate(printed: str) -> Iterator[Reading]:
    for case, arms in last_json(printed).items():
        for arm, speed in arms.items():
            yield Reading(f"{arm}, {case}, tokens a CPU second", speed)


def read_train_step(printed: str) -> Iterator[Reading]:
    """CPU seconds of each way to compute a step, but for the padded rows, which no trainer of ours computes."""
    try:
        cases = last_json(printed)["seconds"]
    except ValueError:
        cases = read_tables(printed)
    for case, arms in cases.items():
        for arm in ("rows by length", "merged", "shared", "auto"):
            yield Reading(f"{case}: {arm}, CPU s", arms[arm], is_time=True)


def read_tables(printed: str) -> dict[str, dict[str, float]]:
    """`train_step.py` of a version that prints text only: a title, and a line for each arm with tokens and seconds."""
    cases: dict[str, dict[str, float]] = {}
    title = ""
    for line in printed.splitlines():
        if row := re.fullmatch(r"  (\S.*?) +\d+ +([\d.]+) +[\d.]+ +\S+", line):
            cases.setdefault(title, {})[row[1]] = float(row[2])
        elif line and not line.startswith(" "):
            title = line
    return cases


def last_json(printed: str) -> Any:
    lines = printed.strip().splitlines()
    return json.loads(lines[-1] if lines else "")


# -- running them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """A script, how it is run, and how what it prints is read."""

    full: str
    quick: str
    read: Callable[[str], Iterator[Reading]]
    full_rounds: int = 10


BENCHMARKS = {
    "gateway": Benchmark(
        "--ours --rounds 1 --seconds 10 --streams 1000", "--ours --rounds 1 --seconds 4 --streams 0", read_gateway
    ),
    "store": Benchmark("--ours --rounds 1 --seconds 2", "--ours --rounds 1 --seconds 1", read_cases),
    "store_http": Benchmark("--ours --rounds 1 --seconds 2", "--ours --rounds 1 --seconds 1", read_cases),
    "rollouts": Benchmark("--ours --rounds 1 --number 2000", "--ours --rounds 1", read_cases),
    "train_step": Benchmark(
        "--part sharing --rounds 2", "--part sharing --rounds 1 --sizes 0.4M", read_train_step, full_rounds=5
    ),
    "generate": Benchmark("--no-peer --runs 3", "--no-peer --runs 1", read_generate),
}
QUICK_ROUNDS = 5


def run(checkout: Path, name: str, options: Sequence[str]) -> list[Reading]:
    """One run of a checkout's script. Raises RuntimeError where it fails."""
    script = checkout / "benchmarks" / f"{name}.py"
    python = checkout / ".venv/bin/python"
    command = [str(python if python.exists() else sys.executable), "-W", "ignore", str(script), *options]
    if any(word in script.read_text() for word in ('"--json"', "add_options")):
        command.append("--json")
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}  # its package, whatever the environment holds
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    try:
        readings = list(BENCHMARKS[name].read(done.stdout))
    except (KeyError, ValueError):
        readings = []
    if done.returncode != 0 or not readings:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-500:]}{done.stderr[-2000:]}")
    return readings


def compare(name: str, old: Path, new: Path, rounds: int, options: Sequence[str]) -> list[Figure]:
    """Run one benchmark from both, in turn. A figure that only one of them has is left out."""
    figures: dict[str, Figure] = {}
    for number in range(rounds):
        readings = {side: {each.name: each for each in run(side, name, options)} for side in (old, new)}
        for key, reading in readings[old].items():
            if key in readings[new]:
                figure = figures.setdefault(key, Figure(key, reading.is_time))
                figure.old.append(reading.value)
                figure.new.append(readings[new][key].value)
        if missing := readings[old].keys() ^ readings[new].keys():
            print(f"{name}: only one of the checkouts has {', '.join(sorted(missing))}", file=sys.stderr)
        print(f"{name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return list(figures.values())


def show(name: str, summaries: Sequence[dict[str, Any]], rounds: int, seconds: float) -> None:
    print(f"\n{name}, {rounds} rounds in {seconds:.0f} s, load {os.getloadavg()[0]:.1f}")
    print(f"  {'':72}{'old':>12}{'new':>12}{'ratio':>8}   95% interval")
    for each in summaries:
        cells = f"{each['old']:12,.5g}{each['new']:12,.5g}{each['ratio']:8.3f}"
        print(f"  {each['name']:72}{cells}   {each['low']:.3f} to {each['high']:.3f}  {each['verdict']}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the earlier commit")
    parser.add_argument("names", nargs="*", help=f"which benchmarks: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--new", type=Path, default=HERE.parent, help="the other checkout (default: this one)")
    parser.add_argument("--rounds", type=int, help="how often the checkouts take turns")
    parser.add_argument("--quick", action="store_true", help="short measurements, few rounds")
    parser.add_argument("--options", help="given to the script instead of its usual ones, as one text")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 where a ratio is below {LIMIT}")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_intermixed_args()
    if unknown := set(options.names) - BENCHMARKS.keys():
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    results: dict[str, list[dict[str, Any]]] = {}
    for name in options.names or BENCHMARKS:
        benchmark, started = BENCHMARKS[name], time.monotonic()
        rounds = options.rounds or (QUICK_ROUNDS if options.quick else benchmark.full_rounds)
        given = options.options or (benchmark.quick if options.quick else benchmark.full)
        try:
            figures = compare(name, options.old.resolve(), options.new.resolve(), rounds, given.split())
        except RuntimeError as error:
            sys.exit(str(error))
        results[name] = [figure.summary() for figure in figures]
        show(name, results[name], rounds, time.monotonic() - started)
    below = [
        f"{name}: {each['name']}" for name in results for each in results[name] if "slower" in each["verdict"].lower()
    ]
    print(f"\nbelow {LIMIT}: " + ("; ".join(below) or "none"))
    if options.json:
        print(json.dumps(results))
    return int(options.check and bool(below))


if __name__ == "__main__":
    sys.exit(main())
