"""Rollouts that credit rules need to reach 0.8 of the optimum, on tasks with a known one.

    python benchmarks/studies/credit.py [--quick] [--json]

On the corridor with 1, 3 and 5 decisive steps, and on text-to-SQL, every rule trains the same starting policies on the
same tasks with the same settings: two rollouts of one task and one small step at a time, so that noise in the credit
costs rollouts. `--group-size` gives all rules larger groups, which hide some of it. On the calculator of `agl demo` the
rules train its own recipe through `Trainer`, from the same warm start. A run that has not arrived counts with all the
rollouts it was given, marked `>`.

Figures are medians over seeds with a bootstrap interval, and ratios to `group_relative` with a bootstrap over seeds.
`--critic` gives the rules that can use one (`hierarchical`, `value`) a value head, trained beside the policy; the goals
are then those of `hierarchical` with it.

Before anything is trained, `compare_credit` ranks the rules on 768 rollouts of the first starting policy, in groups as
large as those of training and in the same order of tasks, so that what rules remember of tasks counts as it will; the
rank correlation (Spearman) says how well that predicts the order of the rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tasks.calculator import Calculator
from tasks.corridor import Corridor
from tasks.learning import Recipe, learn, make_start, record
from tasks.sql import TextToSql

from agentlightning.credit import base
from agentlightning.evaluation.credit_comparison import compare_credit
from agentlightning.policy.config import ValueHeadConfig
from agentlightning.trajectory import Trajectory

UNIFORM = "group_relative"
RULES = (UNIFORM, "hierarchical", "state_value", "group_step", "graph")
TARGET = 0.8
PAIRS: dict[str, Any] = {"lr": 1e-3, "group_size": 2, "evaluate_every": 12, "most_rollouts": 6000}
RECIPES = {
    "corridor 1": Recipe(Corridor(1, 4), **PAIRS),
    "corridor 3": Recipe(Corridor(3), **PAIRS),
    "corridor 5": Recipe(Corridor(5), **PAIRS),
    "sql": Recipe(TextToSql(), imitation_steps=300, train_tasks=32, **PAIRS),
}
CALCULATOR = "calculator"
GOALS = {"corridor 1": 1 / 3, "corridor 3": 1 / 3, "corridor 5": 1 / 3, "sql": 1 / 2, CALCULATOR: None}
"""The most that `hierarchical` may need, as a share of what `group_relative` needs; None: not significantly more."""
PREDICTED_FROM = 768
"""Rollouts of the starting policy for the prediction."""
CRITIC = ValueHeadConfig(type="mlp", lr=0.01)
WITH_CRITIC = ("hierarchical", "value")
"""Rules that `--critic` gives one."""
Found = dict[str, list[Any]]
"""By rule, a run for each seed."""


def known(rules: Iterable[str]) -> list[str]:
    """The rules that this version has; the others are named."""
    chosen = list(rules)
    if missing := sorted({*chosen} - {*base.RULES}):
        print(f"left out, because this version has no such rule: {', '.join(missing)}", file=sys.stderr)
    return [rule for rule in chosen if rule not in missing]


def critic_of(rule: str, critic: bool) -> dict[str, Any]:
    """The settings of `learn` for a rule with a critic; empty for one without."""
    if not critic or rule not in WITH_CRITIC:
        return {}
    return {"value_head": CRITIC, "loss": ["ppo", {"type": "value", "clip": None}]}


def measure(task: str, recipe: Recipe, rules: Sequence[str], seeds: int, critic: bool = False) -> Found:
    found: Found = {rule: [] for rule in rules}
    for seed in range(seeds):
        start = make_start(recipe, seed)
        for rule in rules:
            found[rule].append(asyncio.run(learn(start, rule, target=TARGET, **critic_of(rule, critic))))
            note(task, seed, rule, found[rule][-1])
    return found


def predict(recipe: Recipe, rules: Sequence[str]) -> dict[str, float]:
    """Rollouts to signal-to-noise 1 by rule, of the starting policy."""
    start = make_start(recipe, 0)
    groups = record(start, PREDICTED_FROM // recipe.group_size)
    asyncio.run(start.policy.local.close())
    return signals(groups, rules)


def signals(groups: Sequence[Sequence[Trajectory]], rules: Sequence[str]) -> dict[str, float]:
    return {each.rule: each.rollouts for each in compare_credit(groups, rules).signals}


def measure_calculator(calculator: Calculator, rules: Sequence[str], seeds: int) -> tuple[Found, dict[str, float]]:
    """The same two for the calculator, predicted from the first steps of a run of the first seed."""
    found: Found = {rule: [] for rule in rules}
    predicted: dict[str, float] = {}
    for seed in range(seeds):
        for rule in rules:
            found[rule].append(calculator.learn(seed, TARGET, "sampled", credit=rule, aggregate="token"))
            note(CALCULATOR, seed, rule, found[rule][-1])
            if not predicted:
                predicted = signals(calculator.recorded(32), rules)
    return found, predicted


def note(task: str, seed: int, rule: str, run: Any) -> None:
    needed = f"{'' if run.arrived else '>'}{run.rollouts} rollouts, {run.seconds:.0f} s"
    print(f"{task}, seed {seed}, {rule}: {needed}", file=sys.stderr, flush=True)


# -- statistics ------------------------------------------------------------------------------------------------------


def bootstrap(values: Sequence[Sequence[float]], statistic: Any, samples: int = 2000) -> tuple[float, float]:
    """95% interval of a statistic of paired values, drawn with replacement."""
    rng = random.Random(0)
    size = len(values[0])
    drawn = []
    for _ in range(samples):
        chosen = rng.choices(range(size), k=size)
        drawn.append(statistic(*([each[i] for i in chosen] for each in values)))
    drawn.sort()
    return drawn[int(0.025 * samples)], drawn[int(0.975 * samples) - 1]


def ratio_of_medians(own: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(own) / statistics.median(theirs)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation, ties sharing their mean rank; NaN where all are equal."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]

    a, b = ranks(left), ranks(right)
    if len(set(a)) < 2 or len(set(b)) < 2:
        return float("nan")
    return statistics.correlation(a, b)


def summary(task: str, found: Found, predicted: Mapping[str, float]) -> dict[str, Any]:
    rollouts = {rule: [float(run.rollouts) for run in runs] for rule, runs in found.items()}
    uniform = rollouts[UNIFORM]
    rows = {}
    for rule, own in rollouts.items():
        rows[rule] = {
            "rollouts": own,
            "arrived": sum(run.arrived for run in found[rule]),
            "median": statistics.median(own),
            "interval": bootstrap([own], statistics.median),
            "ratio": ratio_of_medians(own, uniform),
            "ratio_interval": bootstrap([own, uniform], ratio_of_medians),
            "predicted": predicted.get(rule),
        }
    common = [rule for rule in rows if rule in predicted]
    goal = GOALS[task]
    ours = rows.get("hierarchical")
    met = None
    if ours is not None:
        met = ours["ratio"] <= goal if goal is not None else ours["ratio_interval"][0] <= 1
    return {
        "rules": rows,
        "rank_correlation": spearman([predicted[rule] for rule in common], [rows[rule]["median"] for rule in common]),
        "goal": goal,
        "met": met,
    }


# -- output ----------------------------------------------------------------------------------------------------------


def show(task: str, result: Mapping[str, Any]) -> None:
    print(f"\n{task}: rollouts to {TARGET} of the optimum")
    print(
        f"  {'rule':16}{'median':>8}  {'95% interval':18}{'ratio':>7}  {'95% interval':16}{'arrived':>8}"
        f"{'predicted':>11}"
    )
    for rule, row in sorted(result["rules"].items(), key=lambda item: item[1]["median"]):
        mark = "" if row["arrived"] == len(row["rollouts"]) else ">"
        low, high = row["interval"]
        ratio_low, ratio_high = row["ratio_interval"]
        predicted = "" if row["predicted"] is None else f"{row['predicted']:.0f}"
        print(
            f"  {rule:16}{mark + format(row['median'], '.0f'):>8}  {f'{low:.0f} to {high:.0f}':18}{row['ratio']:>7.2f}"
            f"  {f'{ratio_low:.2f} to {ratio_high:.2f}':16}{row['arrived']:>4} of {len(row['rollouts'])}{predicted:>9}"
        )
    print(f"  rank correlation of predicted and needed rollouts: {result['rank_correlation']:.2f}")
    if result["met"] is not None:
        limit = "not significantly more" if result["goal"] is None else f"at most {result['goal']:.2f}"
        print(f"  {'MET   ' if result['met'] else 'MISSED'}  hierarchical: {limit} of {UNIFORM}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=[*RECIPES, CALCULATOR], default=[*RECIPES, CALCULATOR])
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--lr", type=float, help="another learning rate for the corridor and SQL")
    parser.add_argument("--group-size", type=int, help="rollouts of a task and step on the corridor and SQL")
    parser.add_argument(
        "--critic", action="store_true", help=f"a value head for {' and '.join(WITH_CRITIC)} on the corridor and SQL"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the corridor with 1 decisive step, 400 rollouts, two seeds"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tasks, seeds = (["corridor 1"], 2) if options.quick else (options.tasks, options.seeds)
    changes: dict[str, Any] = {"most_rollouts": 400, "imitation_steps": 60} if options.quick else {}
    changes |= {} if options.lr is None else {"lr": options.lr}
    if options.group_size is not None:
        changes |= {"group_size": options.group_size, "evaluate_every": max(1, 24 // options.group_size)}
    recipes = {task: replace(recipe, **changes) for task, recipe in RECIPES.items()}
    rules = known(dict.fromkeys([UNIFORM, *options.rules]))
    if "value" in rules and (not options.critic or CALCULATOR in tasks):
        parser.error('the rule "value" needs --critic, and --tasks without the calculator')
    torch.set_num_threads(1)
    results = {}
    for task in tasks:
        if task == CALCULATOR:
            with tempfile.TemporaryDirectory() as folder:
                found, predicted = measure_calculator(Calculator(Path(folder)), rules, seeds)
                results[task] = summary(task, found, predicted)
        else:
            predicted = predict(recipes[task], rules)
            results[task] = summary(task, measure(task, recipes[task], rules, seeds, options.critic), predicted)
        if not options.json:
            show(task, results[task])
    if options.json:
        print(json.dumps({"measured": results}))


if __name__ == "__main__":
    main()
