"""Prompt search: evaluations until a prompt is as good as 95% of the best, ours beside gepa and Agent Lightning 0.3.

All search the same seeded worlds (`tests.support.prompt_worlds`), served over HTTP: twelve hidden instructions,
tasks that need one to three of them, a noisy follower, a critic that is right with probability .6. The second world is
one that ours was not designed for: instructions interact, and edits lose other lines. An evaluation is a call of the
follower, those on validation tasks included; a search has reached the goal when the prompt that it would return has a
true expected reward of 95% of the best prompt's. gepa has the validation set and minibatch that were best for it here.

    python benchmarks/studies/prompt_search.py [--gepa PYTHON] [--agl03 PYTHON] [--seeds 10] [--check]

A peer runs in an environment of its own, which `benchmarks/peers.sh` makes; one that is not there is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import HERE, PYTHONS

sys.path.append(str(HERE.parent))
from tests.support.prompt_worlds import START, InteractingWorld, PromptWorld, PromptWorldServer, report_tasks

WORLDS = {"instructions": PromptWorld, "interacting": InteractingWorld}
LIMITS = {"instructions": 1 / 4, "interacting": 1 / 2}
"""The most that ours may need, as a share of the best of the others."""


def run(name: str, python: Path, kind: type[PromptWorld], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The results of one search in the worlds of all seeds."""
    with ExitStack() as stack:
        servers = [stack.enter_context(PromptWorldServer(kind(seed))) for seed in range(options.seeds)]
        given = {
            "urls": [server.url for server in servers],
            "budget": options.budget,
            "share": options.share,
            "template": START,
            "train": report_tasks(100),
            "validation": report_tasks(60, 1000),
            "held_out": report_tasks(1, 2000),
            "gepa_validation": 20,
            "agl03_validation": 20,
            "agl03": {"val_batch_size": 16, "gradient_batch_size": 4, "beam_width": 4, "branch_factor": 4},
        }
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # 0.3 imports litellm, which would fetch it
        command = [str(python), "-W", "ignore", str(HERE / "arms" / f"prompt_search_{name}.py"), json.dumps(given)]
        results: list[dict[str, Any]] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    results.append(json.loads(line))
                    print(f"  {name}, seed {len(results) - 1}: {results[-1]}", file=sys.stderr, flush=True)
        if process.returncode or len(results) != options.seeds:
            sys.exit(f"{name} ended with {process.returncode} after {len(results)} of {options.seeds} seeds")
    return results


def median(results: list[dict[str, Any]], budget: int) -> float:
    """The median of the evaluations; a seed that never got there counts as the whole budget."""
    return statistics.median(budget if each["calls"] is None else each["calls"] for each in results)


def ends(results: list[dict[str, Any]]) -> str:
    """The quality of the last prompts, as a share of the optimum."""
    shares = [each["share"] for each in results]
    return f"at the end: median {statistics.median(shares):.2f}, worst {min(shares):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--budget", type=int, default=8000, help="evaluations that each search may make")
    gepa = os.environ.get("AGL_PEER_GEPA") or HERE.parent / ".peers/gepa/bin/python"
    parser.add_argument("--gepa", default=gepa, help="a Python with gepa==0.1.4")
    parser.add_argument("--agl03", default=PYTHONS["agl03"], help="a Python with agentlightning==0.3.0")
    parser.add_argument("--worlds", nargs="*", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--arms", nargs="*", choices=["ours", "gepa", "agl03"], default=["ours", "gepa", "agl03"])
    parser.add_argument("--share", type=float, default=0.95, help="of the optimum; above 1, budgets are spent whole")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is not kept")
    options = parser.parse_args()
    pythons = {"ours": Path(sys.executable), "gepa": Path(options.gepa), "agl03": Path(options.agl03)}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for world in options.worlds:
        for name in options.arms:
            if not pythons[name].exists():
                print(f"{name} is left out: there is no {pythons[name]}; benchmarks/peers.sh makes it", file=sys.stderr)
                continue
            found.setdefault(world, {})[name] = run(name, pythons[name], WORLDS[world], options)
    if options.json:
        print(json.dumps(found))
    kept = [report(world, arms, options) for world, arms in found.items()]
    if options.check and not all(kept):
        sys.exit(1)


def report(world: str, arms: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> bool:
    """Print a world's figures. Whether ours keeps the limit."""
    print(f"{world}: evaluations to {options.share:.0%} of the optimum, {options.seeds} seeds, budget {options.budget}")
    for name, results in arms.items():
        calls = sorted(each["calls"] for each in results if each["calls"] is not None)
        spread = f"{calls[0]} to {calls[-1]}" if calls else "never"
        middle = median(results, options.budget)
        print(f"  {name:<6} median {middle:>7,.0f}   {spread:<14} reached {len(calls)}   {ends(results)}")
    peers = [median(results, options.budget) for name, results in arms.items() if name != "ours"]
    if "ours" not in arms or not peers:
        return True
    ratio = median(arms["ours"], options.budget) / min(peers)
    stuck = sum(each["calls"] is None for each in arms["ours"])
    print(f"  ours / the best of the others: {ratio:.3f} (limit {LIMITS[world]:.2f}); {stuck} seeds of ours stuck")
    return ratio <= LIMITS[world] and not stuck


if __name__ == "__main__":
    main()
