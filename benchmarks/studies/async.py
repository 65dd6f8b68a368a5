"""How much sooner asynchronous training reaches a reward where agents differ 20-fold in speed.

    python benchmarks/studies/async.py [--seeds 5] [--steps 80] [--staleness 4] [--quick] [--json]

Both arms are whole runs of `Trainer.fit` that learn from the same tasks: a tiny model with random weights is asked to
say a word, and its reward is the share of letters in what it says. Agents sleep before and after their call, for a time
that is the task's own, from 0.1 to 2 seconds, uniform in its logarithm (`--quick`: a quarter). `max_staleness=0`
waits for the slowest agent of each step; the other arm takes the first groups that are complete.

For each seed the arms take turns, and each trains until the mean reward of three steps reaches the target. Printed are
the seconds and steps of training that takes, the ratio of the times, the held-out reward before and after, and the
largest age of a token in updates. Medians, with the 95% bootstrap interval over seeds.

    python benchmarks/studies/async.py --updates 1000

One run of that many asynchronous updates, with agents that take up to 20 milliseconds: the largest age, rollouts that
were lost, the longest step as a multiple of the median, and what the trainer's process holds at updates 200, 1,000,
2,500 and the last one: resident memory (the mean of 20 updates), objects that the garbage collector tracks, and the
types whose number grew most. It is flat if memory grows by less than 5% between the first and the last of these.

Then how the process's CPU seconds were divided. Updates and sampling take turns in the policy's thread, so neither
slows the other's arithmetic down, and no token is sampled during an update. Printed are the share of the thread's
processor time that went to updates, the share of the run during which one ran, and, against a shorter run with
`max_staleness=0`, where nothing is sampled during an update: the ratio of the median seconds of an update and of its
processor time, and of the processor time of sampling for each rollout. About 1: neither takes longer than alone.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import psutil

import agentlightning as agl
from agentlightning.policy.local import LocalPolicy

LIMIT = 0.5
"""The asynchronous run needs at most this share of the synchronous one's time."""
WORDS = ["red", "green", "blue", "white", "black", "pink", "grey", "brown", "gold", "teal"]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PER_STEP = 2
"""Tasks, and rollouts of each, in the steps of a long run."""
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
            rewards = [record.reward for record in training.records[-WINDOW:]]
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


class Watched(agl.LightningRL):
    """Notes the memory and the objects of the process, and the time after each step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.memory: list[int] = []
        self.times: list[float] = []
        self.objects: dict[int, Counter[str]] = {}
        """By update."""
        self.policy_seconds = 0.0
        """Processor time of the policy's thread."""

    async def run(self, training: Any) -> None:
        marks = set(marked(self.total_steps))
        before = policy_seconds()
        while training.step < self.total_steps:
            await self._step(training)
            self.memory.append(psutil.Process().memory_info().rss)
            self.times.append(time.perf_counter())
            if training.step in marks:
                gc.collect()
                self.objects[training.step] = Counter(type(each).__qualname__ for each in gc.get_objects())
        self.policy_seconds = policy_seconds() - before


def marked(count: int) -> list[int]:
    """The updates after which memory is looked at."""
    return [*(mark for mark in (200, 1000, 2500) if mark < count), count]


def policy_seconds() -> float:
    ids = {thread.native_id for thread in threading.enumerate() if thread.name == "policy-engine"}
    return sum(each.user_time + each.system_time for each in psutil.Process().threads() if each.id in ids)


class Updates:
    """Seconds and processor time of each update, as the policy's thread does it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.processor: list[float] = []

    def __enter__(self) -> Updates:
        self._train = train = LocalPolicy._train

        def timed(*args: Any, **kwargs: Any) -> Any:
            began, used = time.perf_counter(), time.thread_time()
            try:
                return train(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - began)
                self.processor.append(time.thread_time() - used)

        LocalPolicy._train = timed
        return self

    def __exit__(self, *error: object) -> None:
        LocalPolicy._train = self._train


def long_run(count: int, staleness: int) -> tuple[Watched, Updates, list[dict[str, Any]]]:
    """The algorithm and the updates of one run, and the metrics of its steps."""
    algorithm = Watched(steps=count, tasks_per_step=PER_STEP, group_size=PER_STEP, optimizer={"lr": 1e-4})
    config = agl.TrainConfig(
        run={"max_staleness": staleness, "checkpoint_every": count},
        policy={"in_flight": True},
        runner={"concurrency": PER_STEP**2 * (staleness + 1)},
        evaluation={"every": 0, "modes": ("sampled",)},
    )
    given = tasks(256, 0, 0.001)
    with tempfile.TemporaryDirectory() as folder, Updates() as updates:
        trainer = agl.Trainer(config, algorithm=algorithm, reward=letters, run_dir=Path(folder) / "run")
        trainer.fit(say, given, val_dataset=given[:1], held_out_dataset=given[:2])
        lines = [orjson.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_bytes().splitlines()]
    return algorithm, updates, lines


def endure(options: argparse.Namespace) -> dict[str, Any]:
    """Many asynchronous updates of one run."""
    count = options.updates
    algorithm, updates, lines = long_run(count, options.staleness)
    memory = {mark: statistics.fmean(algorithm.memory[max(0, mark - 20) : mark]) / 2**20 for mark in marked(count)}
    first, last = algorithm.objects[marked(count)[0]], algorithm.objects[count]
    steps = sorted(after - before for before, after in zip(algorithm.times, algorithm.times[1:], strict=False))
    return {
        "updates": len(lines),
        "seconds": algorithm.times[-1] - algorithm.times[0],
        "oldest": max(line.get("staleness_max", 0.0) for line in lines),
        "stale_groups": sum(line.get("groups_stale", 0) for line in lines),
        "rollouts_missing": count * PER_STEP**2 - lines[-1]["rollouts"],
        "longest_step": steps[-1] / statistics.median(steps),
        "memory_mb": {mark: round(value, 1) for mark, value in memory.items()},
        "growth": memory[count] / memory[marked(count)[0]] - 1,
        "objects": {mark: each.total() for mark, each in algorithm.objects.items()},
        "grew_most": dict((last - first).most_common(12)),
    } | division(algorithm, updates, min(count, 200))


def division(algorithm: Watched, updates: Updates, count: int) -> dict[str, float]:
    """How updates and sampling share the policy's thread, beside a run in which they are never under way at once."""
    alone, alone_updates, _ = long_run(count, 0)
    sampling = (algorithm.policy_seconds - sum(updates.processor)) / len(updates.seconds)
    sampling_alone = (alone.policy_seconds - sum(alone_updates.processor)) / len(alone_updates.seconds)
    return {
        "update_share_of_thread": sum(updates.processor) / algorithm.policy_seconds,
        "update_share_of_run": sum(updates.seconds) / (algorithm.times[-1] - algorithm.times[0]),
        "update_seconds_ratio": statistics.median(updates.seconds) / statistics.median(alone_updates.seconds),
        "update_cpu_ratio": statistics.median(updates.processor) / statistics.median(alone_updates.processor),
        "sampling_cpu_ratio": sampling / sampling_alone,
    }


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
        print(json.dumps(found) if options.json else "\n".join(f"{name:24}{value}" for name, value in found.items()))
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
