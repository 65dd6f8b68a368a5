"""How much sooner asynchronous training reaches a reward where agents differ 20-fold in speed.

    python benchmarks/async.py [--seeds 5] [--steps 80] [--staleness 4] [--quick] [--json]

Both arms are whole runs of `Trainer.fit` that learn from the same tasks: a tiny model with random weights is asked to
say a word, and its reward is the share of letters in what it says. Agents sleep before and after their call, for a time
that is the task's own, from 0.1 to 2 seconds, uniform in its logarithm (`--quick`: a quarter). `max_staleness=0`
waits for the slowest agent of each step; the other arm takes the first groups that are complete.

For each seed the arms take turns, and each trains until the mean reward of three steps reaches the target. Printed are
the seconds and steps of training that takes, the ratio of the times, the held-out reward before and after, and the
largest age of a token in updates. Medians, with the 95% bootstrap interval over seeds.

    python benchmarks/async.py --updates 1000

One run of that many asynchronous updates, with agents that take up to 20 milliseconds: the largest age, rollouts that
were lost, the longest step as a multiple of the median, and the memory of the trainer's process at a quarter of the way
and at the end, which is flat if it grows by less than 5%.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import orjson
import psutil

import agentlightning as agl

LIMIT = 0.5
"""The asynchronous run needs at most this share of the synchronous one's time."""
WORDS = ["red", "green", "blue", "white", "black", "pink", "grey", "brown", "gold", "teal"]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
TASKS_PER_STEP, GROUP_SIZE, SPREAD, WINDOW, HELD_OUT, LEARNING_RATE = 4, 4, 20, 3, 16, 2e-3


def say(task: dict[str, Any], base_url: str) -> str:
    """The agent: half of its time passes before the model call, half after."""
    body = {"model": "policy", "messages": [{"role": "user", "content": f"say {task['word']}"}], "max_tokens": 4}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)
    time.sleep(task["seconds"] / 2)
    with DIRECT.open(request, timeout=120) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    time.sleep(task["seconds"] / 2)
    return text or ""


def letters(task: dict[str, Any], output: str) -> float:
    return sum(character.isalpha() for character in output) / max(1, len(output))


class UntilTarget(agl.LightningRL):
    """Trains until the mean reward of the last steps reaches the target."""

    seconds: float | None = None
    """What that took; None: the target was not reached."""

    def __init__(self, target: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.target = target

    async def run(self, training: Any) -> None:
        started = time.perf_counter()
        while training.step < self.total_steps and self.seconds is None:
            await self._step(training)
            rewards = [record.reward for record in training.account.records[-WINDOW:]]
            if len(rewards) == WINDOW and statistics.fmean(rewards) >= self.target:
                self.seconds = time.perf_counter() - started


def tasks(count: int, seed: int, scale: float) -> list[dict[str, Any]]:
    """Tasks whose agents take up to `SPREAD` times as long as the quickest."""
    chance = random.Random(seed)
    return [{"word": chance.choice(WORDS), "n": n, "seconds": scale * SPREAD ** chance.random()} for n in range(count)]


def train(directory: Path, seed: int, staleness: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run, and what came of it."""
    algorithm = UntilTarget(
        options.target,
        steps=options.steps,
        tasks_per_step=TASKS_PER_STEP,
        group_size=GROUP_SIZE,
        optimizer={"lr": LEARNING_RATE},
    )
    config = agl.TrainConfig(
        run={"seed": seed, "max_staleness": staleness, "checkpoint_every": options.steps},
        policy={"in_flight": True},
        runner={"concurrency": TASKS_PER_STEP * GROUP_SIZE * (staleness + 1)},
        evaluation={"every": 0, "modes": ("sampled",)},
    )
    quick = [{**task, "seconds": 0.0} for task in tasks(HELD_OUT, seed + 1, options.scale)]
    trainer = agl.Trainer(config, algorithm=algorithm, reward=letters, run_dir=directory)
    result = trainer.fit(
        say,
        tasks(options.steps * TASKS_PER_STEP, seed, options.scale),
        val_dataset=quick[:1],
        held_out_dataset=quick[1:],
    )
    lines = [orjson.loads(line) for line in (directory / "metrics.jsonl").read_bytes().splitlines()]
    return {
        "seconds": algorithm.seconds,
        "steps": len(lines),
        "before": result.held_out["sampled"].before,
        "after": result.held_out["sampled"].after,
        "oldest": max(line.get("staleness_max", 0.0) for line in lines),
        "stale_groups": sum(line.get("groups_stale", 0) for line in lines),
    }


def compare(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both arms on one seed, and the ratio of their times."""
    order = [0, options.staleness] if seed % 2 else [options.staleness, 0]
    with tempfile.TemporaryDirectory() as folder:
        runs = {each: train(Path(folder) / f"k{each}", seed, each, options) for each in order}
    times = [runs[each]["seconds"] for each in (0, options.staleness)]
    ratio = None if None in times else times[1] / times[0]
    return {"synchronous": runs[0], "asynchronous": runs[options.staleness], "ratio": ratio}


class Sampled(agl.LightningRL):
    """Notes the memory of the process and the time after each step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.memory: list[int] = []
        self.times: list[float] = []

    async def run(self, training: Any) -> None:
        while training.step < self.total_steps:
            await self._step(training)
            self.memory.append(psutil.Process().memory_info().rss)
            self.times.append(time.perf_counter())


def endure(options: argparse.Namespace) -> dict[str, Any]:
    """Many asynchronous updates of one run."""
    count, per_step, group_size = options.updates, 2, 2
    algorithm = Sampled(steps=count, tasks_per_step=per_step, group_size=group_size, optimizer={"lr": 1e-4})
    config = agl.TrainConfig(
        run={"max_staleness": options.staleness, "checkpoint_every": count},
        policy={"in_flight": True},
        runner={"concurrency": per_step * group_size * (options.staleness + 1)},
        evaluation={"every": 0, "modes": ("sampled",)},
    )
    given = tasks(256, 0, 0.001)
    with tempfile.TemporaryDirectory() as folder:
        trainer = agl.Trainer(config, algorithm=algorithm, reward=letters, run_dir=Path(folder) / "run")
        trainer.fit(say, given, val_dataset=given[:1], held_out_dataset=given[:2])
        lines = [orjson.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_bytes().splitlines()]
    quarter, end = (statistics.fmean(part) / 2**20 for part in _quarters(algorithm.memory))
    steps = sorted(after - before for before, after in zip(algorithm.times, algorithm.times[1:], strict=False))
    return {
        "updates": len(lines),
        "seconds": algorithm.times[-1] - algorithm.times[0],
        "oldest": max(line.get("staleness_max", 0.0) for line in lines),
        "stale_groups": sum(line.get("groups_stale", 0) for line in lines),
        "rollouts_missing": count * per_step * group_size - lines[-1]["rollouts"],
        "longest_step": steps[-1] / statistics.median(steps),
        "memory_mb": [quarter, end],
        "growth": end / quarter - 1,
    }


def _quarters(values: list[int]) -> tuple[list[int], list[int]]:
    """The last tenths of the first quarter, and of all."""
    tenth, quarter = max(1, len(values) // 10), max(1, len(values) // 4)
    return values[max(0, quarter - tenth) : quarter], values[-tenth:]


def median(values: list[float | None]) -> str:
    """The median of what is known, and its 95% bootstrap interval."""
    known = [value for value in values if value is not None]
    if not known:
        return "       -"
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(known, k=len(known))) for _ in range(2000))
    return f"{statistics.median(known):8.3f}   {medians[50]:.3f} to {medians[1949]:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80, help="the most steps of a run")
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument("--scale", type=float, default=0.1, help="the seconds of the quickest agent")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one seed, 6 steps, quicker agents")
    parser.add_argument("--updates", type=int, help="instead: one run of so many updates, and its memory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.updates is not None:
        found = endure(options)
        print(json.dumps(found) if options.json else "\n".join(f"{name:18}{value}" for name, value in found.items()))
        return 0 if found["growth"] < 0.05 and not found["rollouts_missing"] else 1
    if options.quick:
        options.seeds, options.steps, options.target, options.scale = 1, 6, 0.0, 0.025
    rounds = [compare(seed, options) for seed in range(options.seeds)]
    if options.json:
        print(json.dumps(rounds))
    for arm in () if options.json else ("synchronous", "asynchronous"):
        for name in rounds[0][arm]:
            print(f"{arm:14} {name:14} {median([each[arm][name] for each in rounds])}")
    ratios = [each["ratio"] for each in rounds]
    kept = None not in ratios and statistics.median(ratios) <= LIMIT
    if not options.json:
        print(f"{'ratio of seconds':29} {median(ratios)}   limit {LIMIT}: {'kept' if kept else 'MISSED'}")
    return 0 if kept or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
