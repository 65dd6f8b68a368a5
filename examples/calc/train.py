"""Trains the agent of `agent.py` to solve word problems, and prints the reward on problems it has not seen.

    python train.py                                # generated problems and a new tiny model: a minute on two cores
    python train.py --model smollm2-135m           # the same problems and a pretrained model
    python train.py --calcx train.parquet --model path/to/model

The first two begin with a warm start on demonstrations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.models.resolve import TINY
from agentlightning.models.tiny import make_tiny
from agentlightning.util.settings import load_settings

HERE = Path(__file__).parent
try:
    from agent import SERVER, SYSTEM, Calculator
    from calcx import read_problems
    from generated import demonstrations, problems
except ModuleNotFoundError as error:
    sys.exit(f"this example needs the module {error.name}: pip install -r {HERE / 'requirements.txt'}")

FRESH = 1_000_000
"""Added to the seed of the problems to train on, so that few of them occur in the demonstrations."""
VALIDATION = 32
"""Generated problems that choose the best checkpoint."""


@dataclass(frozen=True)
class Recipe:
    """What depends on the model."""

    steps: int = 32
    """Updates by reinforcement learning."""
    tasks: int = 8
    group: int = 8
    """Problems of each, and rollouts of each of these."""
    held_out: int = 96
    """Generated problems that the gain is measured on."""
    every: int | None = 6
    """Updates between checkpoints, of which VALIDATION problems choose the best. None: the last one is written."""
    max_tokens: int = 96
    """Of an answer."""
    truncated_reward: float | None = None
    """The reward of a rollout in which an answer was cut off there. None: the one it was given."""
    lr: float | None = None
    """Their learning rate. None: by the size of the model."""
    warm_steps: int = 0
    """Updates of the warm start. 0: there is none."""
    batch: int = 16
    """Demonstrations of each."""
    clean: float = 1.0
    habit: float = 0.0
    """After the `clean` share of the demonstrations, a `habit` share guesses without the calculator, and so does the
    policy that reinforcement learning starts from."""
    optimizer: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the warm start."""
    policy: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further settings of the policy."""


SMALL = {"token_budget": 2048, "kv_cache_bytes": 1 << 30, "prefix_cache_bytes": 1 << 28}
"""Bounds of memory: of an update, and of the engine."""
MUON = {"type": "muon", "muon_lr": 0.02, "lr": 6e-3, "schedule": "linear", "warmup_steps": 10}
RECIPES = {
    "tiny": Recipe(lr=3e-4, warm_steps=240, clean=0.75, habit=0.65, optimizer=MUON),
    "smollm2-135m": Recipe(
        steps=20,
        tasks=8,
        group=6,
        held_out=160,
        every=None,
        max_tokens=56,
        truncated_reward=0.0,
        lr=3e-5,
        warm_steps=4,
        batch=8,
        optimizer={"lr": 1e-4},
        policy=SMALL,
    ),
}


def train(options: argparse.Namespace) -> agl.TrainingResult:
    folder = options.run_dir or Path("runs") / time.strftime("calc-%Y%m%d-%H%M%S")
    recipe = Recipe() if options.calcx else RECIPES.get(options.model, Recipe())
    steps = options.steps or recipe.steps
    rate = options.lr or recipe.lr
    settings = {
        **start(folder, options.model, recipe, options.seed),
        "algorithm": {
            "steps": steps,
            "tasks_per_step": recipe.tasks,
            "group_size": recipe.group,
            "credit": options.credit,
            "aggregate": "token",
            **({} if recipe.truncated_reward is None else {"truncated_reward": recipe.truncated_reward}),
            "optimizer": {"schedule": "cosine", "warmup_steps": min(2, steps - 1), **({"lr": rate} if rate else {})},
        },
        "runner": {
            "concurrency": recipe.tasks * recipe.group,
            "timeout_seconds": 300,
            "hide": ["chain", "result", "result_float"],
        },
        "run": {"checkpoint_every": recipe.every or steps},
        "evaluation": {"every": recipe.every or 0, "tasks": VALIDATION, "modes": ["sampled"]},
    }
    tasks = {"train_dataset": read_problems(options.calcx)} if options.calcx else generated(recipe, steps, options.seed)
    config = load_settings(agl.TrainConfig, toml=written(folder, settings), overrides=options.settings)
    trainer = agl.Trainer(config, reward=f"{HERE}/reward.py:score", run_dir=folder, seed=options.seed)
    return trainer.fit(f"{HERE}/agent.py:solve", **tasks)


def written(folder: Path, settings: dict[str, Any]) -> Path:
    """The file of the settings that the run begins with."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    file.write_text(json.dumps(settings, indent=2))
    return file


def generated(recipe: Recipe, steps: int, seed: int) -> dict[str, Any]:
    """Tasks of a run."""
    return {
        "train_dataset": problems("train", steps * recipe.tasks, seed + FRESH),
        "val_dataset": problems("val", VALIDATION, seed),
        "held_out_dataset": problems("test", recipe.held_out, seed),
    }


async def tools() -> list[dict[str, Any]]:
    """What the calculator's server offers."""
    async with Calculator(SERVER) as workbench:
        return [{"type": "function", "function": dict(tool)} for tool in await workbench.list_tools()]


def start(folder: Path, model: str, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Settings of the model that a run starts with, and of its warm start on demonstrations."""
    if not recipe.warm_steps:
        return {"policy": {"model": model, **recipe.policy}}
    opening = [{"role": "system", "content": SYSTEM}]
    count = recipe.warm_steps * recipe.batch
    shown = demonstrations(count, seed, opening, asyncio.run(tools()), clean=recipe.clean, habit=recipe.habit)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "demonstrations.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in shown))
    os.environ.setdefault("MAX_TOKENS", str(recipe.max_tokens))
    if model == TINY:
        model = str(make_tiny(folder / TINY, shown, seed=seed))
    warm_start = {
        "dataset": str(file),
        "steps": recipe.warm_steps,
        "batch_size": recipe.batch,
        "shuffle": False,
        "optimizer": recipe.optimizer,
    }
    return {"policy": {"model": model, **recipe.policy}, "warm_start": warm_start}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calcx", type=Path, help="problems in the format of Calc-X: .jsonl or .parquet")
    parser.add_argument("--model", default=TINY, help=f"{', '.join(RECIPES)}, or one of your own; needed with --calcx")
    parser.add_argument("--steps", type=int, help="default: by the model")
    parser.add_argument("--lr", type=float, help="default: by the model")
    parser.add_argument("--credit", default="group_relative", help="the credit rule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("settings", nargs="*", help="section.key=value, as for agl train")
    options = parser.parse_args()
    if options.calcx and options.model == TINY:
        parser.error("--calcx needs a --model: the tiny one knows the words of the generated problems only")
    return options


if __name__ == "__main__":
    try:
        print(json.dumps(train(parse()).as_json()["held_out"], indent=2))
    except (agl.errors.AgentLightningError, OSError) as error:
        sys.exit(str(error))
