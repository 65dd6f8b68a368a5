"""Trains the roles of a werewolf game by playing it, and prints what each side wins against the untrained other side.

python train.py                       # all roles learn, each by its own reward
python train.py --learn village       # seer and villagers, against the werewolf of the start
python train.py --learn werewolf
python train.py --mafia --model path/to/model --lr 1e-5   # textarena's SecretMafia, for a model of usual size
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from game import SEER, VILLAGER, WEREWOLF
from secret_mafia import MAFIA
from secret_mafia import ROLES as MAFIA_ROLES
from start import make_start

import agentlightning as agl

HERE = Path(__file__).parent
TASKS, GROUP = 6, 16
"""Games of a step, by who has which role, and rollouts of each."""
HELD_OUT = 200
"""Games of each measurement."""
SIDES = {"village": (SEER, VILLAGER), "werewolf": (WEREWOLF,), "all": (SEER, VILLAGER, WEREWOLF)}
MAFIA_SIDES = {"village": MAFIA_ROLES[:-1], "werewolf": (MAFIA,), "all": MAFIA_ROLES}


def seeds(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(2**31), count)


def held_out_games(seed: int, learn: str, roles: dict[str, tuple[str, ...]] = SIDES) -> list[dict[str, Any]]:
    """Games of each trained side against the other one as it was at the start, and of all as they are."""
    sides = ("village", "werewolf") if learn == "all" else (learn,)
    found = [{"seed": each, "untrained": []} for each in seeds(HELD_OUT, seed)] if learn == "all" else []
    for side in sides:
        other = [role for role in roles["all"] if role not in roles[side]]
        found += [{"seed": each, "untrained": other} for each in seeds(HELD_OUT, seed)]
    return found


def train(options: argparse.Namespace) -> agl.TrainingResult:
    folder = options.run_dir or Path("runs") / time.strftime("werewolf-%Y%m%d-%H%M%S")
    model = options.model or make_start(folder / "model", options.seed)
    sides = MAFIA_SIDES if options.mafia else SIDES
    algorithm = agl.LightningRL(
        steps=options.steps,
        tasks_per_step=TASKS,
        group_size=GROUP,
        agents={role: agl.Lora(r=8) if role in sides[options.learn] else "frozen" for role in sides["all"]},
        agent_rewards="own",
        optimizer={"lr": options.lr},
    )
    trainer = agl.Trainer(
        agl.TrainConfig(
            policy={"model": str(model)},
            runner={"concurrency": TASKS * GROUP, "timeout_seconds": 1800 if options.mafia else 600},
            evaluation={"modes": ["sampled"], "every": 0},
        ),
        algorithm=algorithm,
        run_dir=folder / "run",
        seed=options.seed,
    )
    training, validation = seeds(1000, 2 * options.seed), seeds(TASKS, 10**6)
    return trainer.fit(
        f"{HERE}/{'secret_mafia' if options.mafia else 'agent'}.py:play",
        [{"seed": each, "untrained": []} for each in training],
        [{"seed": each, "untrained": []} for each in validation],
        held_out_dataset=held_out_games(2 * options.seed + 1, options.learn, sides),
    )


def wins(run_dir: Path, when: str) -> dict[tuple[str, ...], dict[int, float]]:
    """Whether the village won each held-out game, by the roles of the start and the seed. `when`: before or after."""

    async def read() -> dict[tuple[str, ...], dict[int, float]]:
        store = agl.LightningStore(run_dir / "store.db")
        found: dict[tuple[str, ...], dict[int, float]] = {}
        for each in await store.query_rollouts(rollout_id_contains=f"-{when}-", status_in=["succeeded"]):
            won = agl.find_final_reward(await store.query_spans(each.rollout_id))
            if isinstance(won, float):
                found.setdefault(tuple(each.input["untrained"]), {})[each.input["seed"]] = won
        await store.close()
        return found

    return asyncio.run(read())


def figures(result: agl.TrainingResult) -> dict[str, Any]:
    """The share of games that a side wins before and after, in games that were played both times."""
    before, after = wins(result.run_dir, "before"), wins(result.run_dir, "after")
    found: dict[str, Any] = {}
    for untrained in sorted(before.keys() & after.keys()):
        games = sorted(before[untrained].keys() & after[untrained].keys())
        wolf = bool(untrained) and not {WEREWOLF, MAFIA} & set(untrained)
        then, now = (
            tuple(1 - won[untrained][game] if wolf else won[untrained][game] for game in games)
            for won in (before, after)
        )
        gain = agl.Evaluation(now).compare(agl.Evaluation(then))
        name = f"{'werewolf' if wolf else 'village'}, {'other side untrained' if untrained else 'all trained'}"
        found[name] = {
            "games": gain.tasks,
            "before": round(gain.before, 3),
            "after": round(gain.after, 3),
            "interval of the gain": [round(bound, 3) for bound in gain.interval],
        }
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learn", choices=list(SIDES), default="all", help="whose adapters are trained")
    parser.add_argument("--model", help="a model that transformers loads; default: a new tiny one")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=2e-3, help="for a model of usual size some 1e-5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--mafia", action="store_true", help="play SecretMafia of textarena; needs a --model")
    options = parser.parse_args(arguments)
    if options.mafia and not options.model:
        parser.error("--mafia needs a --model: the tiny one knows the words of the small game only")
    return options


if __name__ == "__main__":
    try:
        print(json.dumps(figures(train(parse())), indent=2))
    except agl.errors.AgentLightningError as error:
        sys.exit(str(error))
