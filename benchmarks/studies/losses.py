"""Every loss and preset trains the calculator of `agl demo` to a greedy reward of 0.9: rollouts and seconds.

    python benchmarks/studies/losses.py [--quick] [--json]

All arms begin with the same warm start, which its seed makes once, and keep the demo's batches and optimiser. A loss
that has no policy gradient of its own (entropy, KL) is added to `ppo`. The reward is that of 64 validation tasks,
measured every second step; seconds are those of the whole run, start and evaluations included. An arm that has not
arrived counts with all the rollouts it was given, marked `>`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tasks.calculator import Calculator, CalculatorRun

from agentlightning.policy.losses import LOSSES

TARGET = 0.9
ADDED = ("entropy", "kl")
"""Losses that regularise another one."""
OTHERS = {
    "nll": "supervised learning: the warm start is made with it",
    "value": "trains a value head beside a policy loss",
    "distill": "needs a teacher",
    "sdpo": "needs feedback in the conversation",
    **dict.fromkeys(("dpo", "ipo", "kto", "simpo"), "learns from preferences"),
}
"""Losses that cannot train the calculator by themselves, with the reason."""


def presets() -> list[str]:
    """The presets of this version, if it has any."""
    module = "agentlightning.algorithms.lightning_rl"
    return list(import_module(module).PRESETS) if find_spec(module) else []


def arms() -> dict[str, Mapping[str, Any]]:
    """Settings of the algorithm, by name."""
    losses = {name: {"loss": name, "aggregate": "token"} for name in LOSSES if name not in (*ADDED, *OTHERS)}
    added = {f"ppo + {name}": {"loss": ["ppo", name], "aggregate": "token"} for name in ADDED if name in LOSSES}
    return losses | added | {f"preset {name}": {"preset": name} for name in presets()}


def row(runs: list[CalculatorRun]) -> dict[str, Any]:
    return {
        "arrived": sum(run.arrived for run in runs),
        "runs": len(runs),
        "rollouts": statistics.median(run.rollouts for run in runs),
        "seconds": statistics.median(run.seconds for run in runs),
        "best": statistics.median(max(run.rewards, default=0.0) for run in runs),
    }


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"{'loss':20}{'rollouts to 0.9':>16}{'seconds':>9}{'best reward':>13}{'arrived':>9}")
    for name, each in rows.items():
        mark = "" if each["arrived"] == each["runs"] else ">"
        arrived = f"{each['arrived']} of {each['runs']}"
        rollouts = mark + format(each["rollouts"], ".0f")
        print(f"{name:20}{rollouts:>16}{each['seconds']:>9.0f}{each['best']:>13.3f}{arrived:>9}")
    for name, reason in OTHERS.items():
        print(f"{name:20}not measured: {reason}")
    missed = [name for name, each in rows.items() if each["arrived"] < each["runs"]]
    print(f"MISSED  {', '.join(missed)}" if missed else f"MET     every loss and preset reaches {TARGET}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=list(arms()), default=list(arms()))
    parser.add_argument("--quick", action="store_true", help="ppo alone, four steps from a short warm start")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = ["ppo"] if options.quick else options.arms
    length = {"steps": 4, "warm_start_steps": 12} if options.quick else {}
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        calculator = Calculator(Path(folder), **length)
        for name in chosen:
            runs = [calculator.learn(seed, TARGET, "greedy", **arms()[name]) for seed in range(options.seeds)]
            rows[name] = row(runs)
            print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"measured": rows, "not_measured": OTHERS}))
    else:
        show(rows)


if __name__ == "__main__":
    main()
