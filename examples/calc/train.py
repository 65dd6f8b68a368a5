"""Trains the agent of `agent.py` to solve word problems, and prints the reward on problems it has not seen.

    python train.py                                # generated problems and a new tiny model: minutes on two cores
    python train.py --calcx train.parquet --model path/to/model

Without --model a tiny one is made and warmed up on demonstrations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.models.tiny import make_tiny
from agentlightning.util.settings import load_settings

HERE = Path(__file__).parent
try:
    from agent import SERVER, SYSTEM, Calculator
    from calcx import read_problems
    from generated import demonstrations, problems
except ModuleNotFoundError as error:
    sys.exit(f"this example needs the module {error.name}: pip install -r {HERE / 'requirements.txt'}")

TASKS, GROUP = 8, 8
"""Problems of a step, and rollouts of each."""
HELD_OUT, VALIDATION = 96, 32
"""Generated problems that the gain is measured on, and that choose the best checkpoint."""
WARM, BATCH, CLEAN, HABIT = 240, 16, 0.75, 0.65
"""Updates of the warm start, demonstrations of each. After the CLEAN share of them, a HABIT share guesses without the
calculator, and so does the policy that reinforcement learning starts from."""
SFT = {"type": "muon", "muon_lr": 0.02, "lr": 6e-3, "schedule": "linear"}
FRESH = 1_000_000
"""Added to the seed of the problems to train on, so that few of them occur in the demonstrations."""


def train(options: argparse.Namespace) -> agl.TrainingResult:
    folder = options.run_dir or Path("runs") / time.strftime("calc-%Y%m%d-%H%M%S")
    tasks = {"train_dataset": read_problems(options.calcx)} if options.calcx else generated(options)
    model = {"policy": {"model": options.model}} if options.model else tiny(folder, options.seed)
    rate = {} if options.model and options.lr is None else {"lr": options.lr or 3e-4}
    hidden = ["chain", "result", "result_float"]
    settings = {
        **model,
        "algorithm": {
            "steps": options.steps,
            "tasks_per_step": TASKS,
            "group_size": GROUP,
            "credit": options.credit,
            "aggregate": "token",
            "optimizer": {**rate, "schedule": "cosine", "warmup_steps": min(2, options.steps - 1)},
        },
        "runner": {"concurrency": TASKS * GROUP, "timeout_seconds": 300, "hide": hidden},
        "evaluation": {"every": 6, "tasks": VALIDATION, "modes": ["sampled"]},
    }
    config = load_settings(agl.TrainConfig, toml=written(folder, settings), overrides=options.settings)
    trainer = agl.Trainer(config, reward=f"{HERE}/reward.py:score", run_dir=folder, seed=options.seed)
    return trainer.fit(f"{HERE}/agent.py:solve", **tasks)


def written(folder: Path, settings: dict[str, Any]) -> Path:
    """The file of the settings that the run begins with."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    file.write_text(json.dumps(settings, indent=2))
    return file


def generated(options: argparse.Namespace) -> dict[str, Any]:
    """Tasks of a run."""
    return {
        "train_dataset": problems("train", options.steps * TASKS, options.seed + FRESH),
        "val_dataset": problems("val", VALIDATION, options.seed),
        "held_out_dataset": problems("test", HELD_OUT, options.seed),
    }


async def tools() -> list[dict[str, Any]]:
    """What the calculator's server offers."""
    async with Calculator(SERVER) as workbench:
        return [{"type": "function", "function": dict(tool)} for tool in await workbench.list_tools()]


def tiny(folder: Path, seed: int) -> dict[str, Any]:
    """Settings of a run that starts with a new tiny model and warms it up on demonstrations."""
    opening = [{"role": "system", "content": SYSTEM}]
    shown = demonstrations(WARM * BATCH, seed, opening, asyncio.run(tools()), clean=CLEAN, habit=HABIT)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "demonstrations.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in shown))
    os.environ.setdefault("MAX_TOKENS", "96")
    optimizer = {**SFT, "warmup_steps": min(10, WARM // 2)}
    warm_start = {"dataset": str(file), "steps": WARM, "batch_size": BATCH, "shuffle": False, "optimizer": optimizer}
    return {"policy": {"model": str(make_tiny(folder / "tiny", shown, seed=seed))}, "warm_start": warm_start}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calcx", type=Path, help="problems in the format of Calc-X: .jsonl or .parquet")
    parser.add_argument("--model", help="a model that transformers loads; needed with --calcx")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--lr", type=float, help="default: 3e-4 for the tiny model, else by the size of the model")
    parser.add_argument("--credit", default="group_relative", help="the credit rule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("settings", nargs="*", help="section.key=value, as for agl train")
    options = parser.parse_args()
    if options.calcx and not options.model:
        parser.error("--calcx needs a --model: the tiny one knows the words of the generated problems only")
    return options


if __name__ == "__main__":
    try:
        print(json.dumps(train(parse()).as_json()["held_out"], indent=2))
    except (agl.AgentLightningError, OSError) as error:
        sys.exit(str(error))
