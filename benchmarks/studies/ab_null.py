"""How often an agent seems different from itself: the permutation test and the sequential test, 200 comparisons each.

    python benchmarks/studies/ab_null.py [--comparisons 200] [--seed 0]

An agent solves task i with probability p_i, drawn evenly from 0 to 1, and is measured twice. Both tests should find
p < 0.05 in about 5%, and the last column says how often they find a gain of 0.1 instead.
"""

from __future__ import annotations

import argparse
import random

from agentlightning.evaluation.intervals import sign_flip_p_value
from agentlightning.evaluation.sequential import PairedSequentialTest

SIZES = ((50, 4), (100, 1), (100, 4), (200, 1))


def differences(rng: random.Random, tasks: int, repeats: int, gain: float) -> list[float]:
    """Of the two measurements, task by task."""
    solve = [rng.random() for _ in range(tasks)]
    first = [sum(rng.random() < p for _ in range(repeats)) / repeats for p in solve]
    second = [sum(rng.random() < p + gain for _ in range(repeats)) / repeats for p in solve]
    return [b - a for a, b in zip(first, second, strict=True)]


def sequential_p_value(found: list[float]) -> tuple[float, int]:
    """The p-value, and the pairs it took."""
    test = PairedSequentialTest(max_pairs=len(found))
    for each in found:
        if test.update(each) != "continue":
            break
    return test.p_value, test.pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("tasks  repeats  gain  permutation p<0.05  sequential p<0.05  pairs used")
    for tasks, repeats in SIZES:
        for gain in (0.0, 0.1):
            rng = random.Random(f"{options.seed}:{tasks}:{repeats}:{gain}")
            drawn = [differences(rng, tasks, repeats, gain) for _ in range(options.comparisons)]
            whole = sum(sign_flip_p_value(each) < 0.05 for each in drawn) / len(drawn)
            stepwise = [sequential_p_value(each) for each in drawn]
            early = sum(p < 0.05 for p, _ in stepwise) / len(drawn)
            pairs = sum(count for _, count in stepwise) / len(drawn)
            print(f"{tasks:5}  {repeats:7}  {gain:4.1f}  {whole:18.1%}  {early:17.1%}  {pairs:10.0f}")


if __name__ == "__main__":
    main()
