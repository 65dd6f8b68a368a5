"""What an update of the weights costs those who are being answered: drained, and in flight.

    python benchmarks/updates.py [--rounds 5] [--answers 256] [--json]

Callers that never stop asking, answers of uneven length, and four real optimiser steps among them, through the gate
that the gateway uses. The arms take turns; each has the same answers to give. `seconds` is the whole work,
`cpu` its processor seconds; `held` is how long an update held new calls back, `drain` how much of that passed before
the step began; `rows` is how many answers were being drawn in the mean while it waited for them (all of them, when
nothing is updated); `again` is how many tokens were computed once more for an update.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentlightning.engine.base import SamplingParams
from agentlightning.gateway.local import UpdateGate
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.local import LocalPolicy
from agentlightning.trajectory import Node, TokenTree, TrainingSample

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tests.support.models import model_tokenizer

CALLERS, UPDATES, PROMPT, SHORTEST, LONGEST, LESSON = 32, 4, 100, 16, 400, 100
ARMS = {"drained": {"in_flight": False}, "in flight": {"in_flight": True}}


def make_policy() -> LocalPolicy:
    torch.manual_seed(0)
    tokenizer = model_tokenizer()
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **shape)).eval()
    policy = LocalPolicy(LocalPolicyConfig(model="none", device="cpu", max_batch_size=CALLERS), model, tokenizer)
    policy._generator._eos = frozenset()  # Answers are as long as they are asked to be, in both arms.
    return policy


def lesson(rng: random.Random) -> list[TrainingSample]:
    """32 answers to learn from."""
    samples = []
    for _ in range(32):
        prompt, drawn = (tuple(rng.choices(range(3, 300), k=LESSON)) for _ in range(2))
        tree = TokenTree((Node(-1, prompt), Node(0, drawn, True, (-5.5,) * LESSON, "ro", "call")))
        weights = (1 / 32 / LESSON,) * LESSON
        samples.append(TrainingSample(tree, advantages=((), (1.0,) * LESSON), weights=((), weights)))
    return samples


class Work:
    """One arm's share: callers, and an update after every (UPDATES + 1)th part of the answers."""

    def __init__(self, policy: LocalPolicy, mode: dict[str, bool], answers: int) -> None:
        self.policy, self.mode, self.gate, self.answers = policy, mode, UpdateGate(), answers
        self.done = 0
        self.ended = asyncio.Event()
        self.held: list[float] = []
        self.drain: list[float] = []
        self.rows: list[int] = []
        self.again = 0

    async def run(self) -> dict[str, float]:
        rng = random.Random(0)
        calls = iter(
            [(rng.choices(range(3, 300), k=PROMPT), rng.randint(SHORTEST, LONGEST)) for _ in range(self.answers)]
        )
        wall, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._call(calls))
            group.create_task(self._update())
        return {
            "seconds": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            "held": statistics.mean(self.held),
            "drain": statistics.mean(self.drain),
            "rows": statistics.mean(self.rows) if self.rows else float(CALLERS),
            "again": self.again / UPDATES,
        }

    async def _call(self, calls: Any) -> None:
        for prompt, length in calls:
            visitor = await self.gate.enter()
            await self.policy.sample(prompt, SamplingParams(max_tokens=length))
            self.gate.leave(visitor)
            self.done += 1
            self.ended.set()

    async def _update(self) -> None:
        rng = random.Random(1)
        for number in range(1, UPDATES + 1):
            while self.done < number * self.answers // (UPDATES + 1):
                self.ended.clear()
                await self.ended.wait()
            started = time.perf_counter()
            watching = asyncio.create_task(self._watch())
            async with self.gate.update(**self.mode) as under_way:
                watching.cancel()
                self.drain.append(time.perf_counter() - started)
                self.again += sum(len(row.tokens) - 1 for row in self.policy._generator._rows)
                await self.policy.train(lesson(rng), in_flight=under_way)
            self.held.append(time.perf_counter() - started)

    async def _watch(self) -> None:
        while True:
            self.rows.append(self.gate.num_in_flight)
            await asyncio.sleep(0.002)


async def measure(rounds: int, answers: int) -> dict[str, dict[str, list[float]]]:
    policy = make_policy()
    found: dict[str, dict[str, list[float]]] = {arm: {} for arm in ARMS}
    for number in range(rounds):
        for arm, mode in ARMS.items() if number % 2 else reversed(ARMS.items()):
            for name, value in (await Work(policy, mode, answers).run()).items():
                found[arm].setdefault(name, []).append(value)
    await policy.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(options.rounds, options.answers))
    medians = {
        arm: {name: statistics.median(values) for name, values in figures.items()} for arm, figures in found.items()
    }
    if options.json:
        print(json.dumps({"measured": {arm: {"median": medians[arm]["seconds"], **medians[arm]} for arm in ARMS}}))
        return
    names = list(next(iter(medians.values())))
    print(f"{'':12}" + "".join(f"{name:>10}" for name in names))
    for arm, figures in medians.items():
        print(f"{arm:12}" + "".join(f"{figures[name]:>10.3g}" for name in names))


if __name__ == "__main__":
    main()
