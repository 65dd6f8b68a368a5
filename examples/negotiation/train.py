"""Trains both agents of `agent.py` in the same games, and prints what they reach in games that they have not seen.

    python train.py --rewards shared      # both are credited with the joint value
    python train.py --rewards own         # each is credited with its own value

Each has an adapter of its own over one tiny model, which begins with the rules of the game and no sense of value.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from agent import DEAL, NO, THINGS, WORTH, best, messages, offers, tasks

import agentlightning as agl
from agentlightning.models.tiny import make_tiny

HERE = Path(__file__).parent
HELD_OUT = 200
VALIDATION, TEST = 1000, 2000
"""Added to the seed of these games."""
TASKS, GROUP = 6, 12
"""Games of a step, and rollouts of each."""
DEALS = 1 / 3
"""How often the start says "deal" to anything."""
WARM, BATCH = 150, 48
Rewards = dict[str, float]


def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Moves that keep to the rules, by agents that do not look at their values."""
    rng, asks = random.Random(seed), offers()
    every = [dict(zip(THINGS, worth, strict=True)) for worth in itertools.permutations(WORTH)]

    def move() -> dict[str, Any]:
        kind, values, heard = rng.randrange(3), rng.choice(every), rng.choice(asks)
        if kind == 0:
            asked, answer = messages("ann", values, "asks"), rng.choice(asks)
        elif kind == 1:
            asked = messages("bob", values, f"hears {heard}")
            answer = DEAL if rng.random() < DEALS else rng.choice(asks)
        else:
            asked, answer = messages("ann", values, f"hears {heard}"), DEAL if rng.random() < DEALS else NO
        return {"messages": [*asked, {"role": "assistant", "content": answer}]}

    return [move() for _ in range(count)]


def make_start(folder: Path, seed: int) -> Path:
    """A tiny model that plays like the demonstrations."""
    shown = demonstrations(WARM * BATCH, seed)
    model = make_tiny(folder / "new", shown, seed=seed)
    settings: Any = {"steps": WARM, "batch_size": BATCH, "optimizer": {"lr": 3e-3}, "seed": seed}
    agl.SFTAlgorithm(model, shown, output=folder / "start", **settings).train()
    return folder / "start"


def held_out_games(seed: int) -> list[dict[str, Any]]:
    return tasks(HELD_OUT, seed + TEST, held_out=True)


def train(options: argparse.Namespace) -> agl.TrainingResult:
    folder = options.run_dir or Path("runs") / time.strftime("negotiation-%Y%m%d-%H%M%S")
    model = options.model or make_start(folder / "model", options.seed)
    algorithm = agl.LightningRL(
        steps=options.steps,
        tasks_per_step=TASKS,
        group_size=GROUP,
        agents={"ann": agl.Lora(r=8), "bob": agl.Lora(r=8)},
        agent_rewards=options.rewards,
        reward_weights={"ann": 1.0, "bob": 1.0},
        optimizer={"lr": options.lr},
    )
    trainer = agl.Trainer(
        agl.TrainConfig(
            policy={"model": str(model)},
            runner={"concurrency": TASKS * GROUP, "timeout_seconds": 600},
            evaluation={"modes": ["sampled"], "every": 0},
        ),
        algorithm=algorithm,
        run_dir=folder / "run",
        seed=options.seed,
    )
    games = {"train_dataset": tasks(1000, options.seed), "val_dataset": tasks(TASKS, options.seed + VALIDATION)}
    return trainer.fit(f"{HERE}/agent.py:play", **games, held_out_dataset=held_out_games(options.seed))


def held_out(run_dir: Path, when: str) -> dict[int, Rewards]:
    """The rewards of the held-out games, by number. `when`: before or after."""

    async def read() -> dict[int, Rewards]:
        store = agl.LightningStore(run_dir / "store.db")
        found = await store.query_rollouts(rollout_id_contains=f"-{when}-", status_in=["succeeded"])
        rewards = {
            each.input["number"]: agl.find_final_reward(await store.query_spans(each.rollout_id)) for each in found
        }
        await store.close()
        return {number: reward for number, reward in rewards.items() if isinstance(reward, dict)}

    return asyncio.run(read())


def figures(options: argparse.Namespace, result: agl.TrainingResult) -> dict[str, Any]:
    """What both reach before and after, in games that were played both times."""
    before, after = (held_out(result.run_dir, when) for when in ("before", "after"))
    games = {each["number"]: each for each in held_out_games(options.seed)}
    numbers = sorted(before.keys() & after.keys() & games.keys())
    measures = {
        "joint value": lambda _, got: sum(got.values()),
        "share of the best joint value": lambda game, got: sum(got.values()) / best(game),
        "agreements": lambda _, got: float(any(got.values())),
        "ann's value": lambda _, got: got["ann"],
        "bob's value": lambda _, got: got["bob"],
    }
    found: dict[str, Any] = {"games": len(numbers)}
    for name, measure in measures.items():
        then, now = (tuple(measure(games[number], played[number]) for number in numbers) for played in (before, after))
        gain = agl.Evaluation(now).compare(agl.Evaluation(then))
        found[name] = {
            "before": round(statistics.fmean(then), 3),
            "after": round(statistics.fmean(now), 3),
            "interval of the gain": [round(bound, 3) for bound in gain.interval],
        }
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rewards", choices=("shared", "own"), default="shared", help="whose value credits an agent")
    parser.add_argument("--model", help="a model that transformers loads; default: a new tiny one")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=3e-3, help="for a model of usual size some 1e-5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        chosen = parse()
        print(json.dumps(figures(chosen, train(chosen)), indent=2))
    except agl.errors.AgentLightningError as error:
        sys.exit(str(error))
