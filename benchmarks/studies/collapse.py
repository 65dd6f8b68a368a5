"""Is a collapse found before the reward falls? Ten collapsing and ten healthy runs of a tiny model, each seeded.

    python benchmarks/studies/collapse.py                  # 20 runs of 60 steps: about four minutes on an idle core
    python benchmarks/studies/collapse.py --runs 2

A policy learns to recall four digits for each of 16 words, from a warm start that has them right in part. The healthy
runs have an ordinary learning rate, the collapsing ones fifteen times as much. Both are the same code: sampling,
credit, loss and update of a real policy. `health.signs_of` judges each step as a training run does. The reward has
*fallen* at the first step at which the mean of five steps is below 75% of the best such mean before it.

Limits were chosen on runs with other seeds (0 to 9); these are 100 and up.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentlightning.algorithms.sft import SFTAlgorithm
from agentlightning.credit import group_trajectories, training_samples
from agentlightning.engine.base import SamplingParams
from agentlightning.models.tiny import make_tiny
from agentlightning.policy.config import LocalPolicyConfig, OptimizerConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.training.health.signs import signs_of
from agentlightning.training.health.step_record import StepRecord, batch_metrics
from agentlightning.trajectory import Trajectory, Transition

COLORS = ("red", "green", "blue", "white", "black", "pink", "grey", "brown")
WORDS = (*COLORS, "gold", "teal", "lime", "navy", "rose", "sand", "plum", "mint")
FIRST_SEED = 100
TASKS, GROUP = 8, 8
DEMONSTRATIONS, NOISE, WARM_STEPS = 2400, 0.35, 150
HEALTHY = OptimizerConfig(lr=3e-4)
COLLAPSING = OptimizerConfig(lr=4.5e-3, warmup_steps=24, total_steps=400)
FALL_WINDOW, FALL_SHARE = 5, 0.75
COLLAPSE_SIGNS = ("echo_trap", "policy_broken")


@dataclass(frozen=True)
class Outcome:
    """One run."""

    warned: int | None
    """The first step with a sign of collapse."""
    fell: int | None
    best: float
    last: float
    other_signs: tuple[str, ...]


def digits(word: str) -> str:
    rng = random.Random(word)
    return "".join(rng.choice("0123456789") for _ in range(4))


def demonstrations() -> list[dict[str, object]]:
    """Conversations in which a digit is wrong now and then."""
    rng, records = random.Random(0), []
    for _ in range(DEMONSTRATIONS):
        word = rng.choice(WORDS)
        noisy = "".join(digit if rng.random() > NOISE else rng.choice("0123456789") for digit in digits(word))
        records.append({"messages": [*question(word), {"role": "assistant", "content": noisy}]})
    return records


def question(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"code of {word}"}]


async def warm_start(directory: Path) -> Path:
    records = demonstrations()
    tiny = make_tiny(directory / "tiny", records, seed=0)
    optimizer = OptimizerConfig(type="muon", lr=6e-3, schedule="linear", total_steps=WARM_STEPS)
    policy = open_policy(tiny, optimizer, seed=0, objective="supervised")
    await SFTAlgorithm(model=policy, dataset=records, steps=WARM_STEPS, batch_size=16, seed=0).run()
    await policy.save(directory / "start")
    await policy.close()
    return directory / "start"


def open_policy(model: Path, optimizer: OptimizerConfig, seed: int, objective: str = "reinforcement") -> LocalPolicy:
    config = {"model": str(model), "device": "cpu", "threads": 1, "seed": seed, "objective": objective}
    return LocalPolicy.open(LocalPolicyConfig.model_validate({**config, "optimizer": optimizer}))


async def rollout(policy: LocalPolicy, word: str, group: int, name: str) -> Trajectory:
    prompt = policy.chat.encode(policy.chat.render(question(word)))
    sample = await policy.sample(prompt, SamplingParams(max_tokens=8))
    text = policy.chat.decode(sample.token_ids, skip_special_tokens=True).strip()
    right = sum(a == b for a, b in zip(text, digits(word), strict=False)) / 4 if len(text) == 4 else 0.0
    call = Transition(
        name, "a", name, 1, tuple(prompt), sample.token_ids, sample.logprobs,
        policy_version=sample.policy_version, finish_reason=sample.finish_reason,
    )  # fmt: skip
    return Trajectory(name, "a", (call,), right, group=str(group))


async def train(start: Path, optimizer: OptimizerConfig, seed: int, steps: int) -> list[StepRecord]:
    policy, rng, records = open_policy(start, optimizer, seed), random.Random(seed), list[StepRecord]()
    for step in range(1, steps + 1):
        words = rng.sample(WORDS, TASKS)
        places = [(word, i, f"{step}-{i}-{k}") for i, word in enumerate(words) for k in range(GROUP)]
        batch = await asyncio.gather(*(rollout(policy, *place) for place in places))
        samples, report = training_samples(group_trajectories(batch))
        line = {"step": step, "reward": statistics.fmean(float(str(each.reward)) for each in batch)}
        line |= {**batch_metrics(batch), **report.metrics()}
        records.append(StepRecord.read({**line, **(await policy.train(samples) if samples else {})}))
    await policy.close()
    return records


def judge(records: Sequence[StepRecord]) -> Outcome:
    first: dict[str, int] = {}
    for end in range(1, len(records) + 1):
        for sign in signs_of(records[:end]):
            first.setdefault(sign.name, records[end - 1].step)
    rewards = [record.reward or 0.0 for record in records]
    warned = min((first[name] for name in COLLAPSE_SIGNS if name in first), default=None)
    others = tuple(f"{name} {step}" for name, step in first.items() if name not in COLLAPSE_SIGNS)
    last = statistics.fmean(rewards[-FALL_WINDOW:])
    return Outcome(warned, fall_of(rewards), max(means(rewards)), last, others)


def means(rewards: Sequence[float]) -> list[float]:
    return [statistics.fmean(rewards[i : i + FALL_WINDOW]) for i in range(len(rewards) - FALL_WINDOW + 1)]


def fall_of(rewards: Sequence[float]) -> int | None:
    """The first step at which the reward has fallen; None where it never does."""
    best = 0.0
    for index, mean in enumerate(means(rewards)):
        if mean < FALL_SHARE * best:
            return index + FALL_WINDOW
        best = max(best, mean)
    return None


def show(kind: str, seed: int, outcome: Outcome) -> None:
    warned, fell = (f"step {step}" if step else "never" for step in (outcome.warned, outcome.fell))
    others = f"   also: {', '.join(outcome.other_signs)}" if outcome.other_signs else ""
    print(
        f"{kind:<10} seed {seed}   warned {warned:<8} reward fell {fell:<8}"
        f" best {outcome.best:.2f} last {outcome.last:.2f}{others}",
        flush=True,
    )


def found_in_time(outcome: Outcome) -> bool:
    return outcome.warned is not None and (outcome.fell is None or outcome.warned < outcome.fell)


async def main(runs: int, steps: int) -> int:
    with tempfile.TemporaryDirectory() as directory:
        start = await warm_start(Path(directory))
        outcomes: dict[str, list[Outcome]] = {"collapsing": [], "healthy": []}
        for kind, optimizer in (("collapsing", COLLAPSING), ("healthy", HEALTHY)):
            for seed in range(FIRST_SEED, FIRST_SEED + runs):
                outcomes[kind].append(judge(await train(start, optimizer, seed, steps)))
                show(kind, seed, outcomes[kind][-1])
    fallen = sum(each.fell is not None for each in outcomes["collapsing"])
    found = sum(map(found_in_time, outcomes["collapsing"]))
    false = sum(each.warned is not None for each in outcomes["healthy"])
    ahead = [each.fell - each.warned for each in outcomes["collapsing"] if each.fell and each.warned]
    print(f"collapsing: reward fell in {fallen} of {runs}; found before it in {found} of {runs}", end="")
    print(f", {statistics.median(ahead):g} steps ahead (median; least {min(ahead)})" if ahead else "")
    print(f"healthy: {false} of {runs} false alarms")
    return 0 if found == runs and not false else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.runs, arguments.steps)))
