"""Trains the planner of `agent.py` inside the running system, and prints the share of right answers.

    python train.py                                   # a tiny model: minutes on one CPU core
    python train.py --model path/to/model --steps 200 # a model of your own
    python train.py --agents planner executor         # others learn, too

Flow-GRPO (arXiv:2510.05592): the one reward of a rollout is that of every turn of the planner, relative to the other
rollouts of the task, with the clipped ratio of PPO and a KL term. The other three answer from the same model, whose
weights stay as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from agent import PROMPTS
from shop import demonstrations, tasks

import agentlightning as agl
from agentlightning.models.tiny import make_tiny

HERE = Path(__file__).parent
TASKS, GROUP, HELD_OUT = 8, 8, 100
VALIDATION, TEST = 1000, 2000
"""Added to the seed of these tasks."""
WARM, BATCH, CLEAN, HABIT = 400, 32, 0.75, 0.6
"""Updates of the warm start, and demonstrations of each. After the CLEAN share of them, the planner guesses in a HABIT
share of its turns, and so does the one that reinforcement learning starts from."""
KL = 0.001
"""Of the divergence from the start; it and the bounds of the ratio are those of the authors' configuration."""


def make_start(folder: Path, seed: int) -> Path:
    """A tiny model whose planner often guesses, and whose other agents do their work."""
    clean = round(CLEAN * WARM * BATCH)
    shown = demonstrations(clean, seed, 0.0) + demonstrations(WARM * BATCH - clean, seed + 1, HABIT)
    model = make_tiny(folder / "new", shown, seed=seed, context_length=512)
    optimizer: Any = {"type": "muon", "muon_lr": 0.02, "lr": 6e-3, "schedule": "linear", "warmup_steps": 10}
    settings: Any = {"steps": WARM, "batch_size": BATCH, "shuffle": False, "optimizer": optimizer, "seed": seed}
    agl.SFTAlgorithm(model, shown, output=folder / "start", **settings).train()
    return folder / "start"


def train(options: argparse.Namespace) -> agl.TrainingResult:
    folder = options.run_dir or Path("runs") / time.strftime("flow-grpo-%Y%m%d-%H%M%S")
    model = options.model or make_start(folder / "model", options.seed)
    algorithm = agl.LightningRL(
        steps=options.steps,
        tasks_per_step=TASKS,
        group_size=GROUP,
        credit="group_relative",
        loss=[{"type": "ppo", "clip_low": 0.2, "clip_high": 0.3}, {"type": "kl", "coefficient": KL}],
        agents={agent: agl.Lora(r=8) if agent in options.agents else "frozen" for agent in PROMPTS},
        optimizer={"lr": options.lr},
    )
    config = agl.TrainConfig(
        policy={"model": str(model)},
        runner={"concurrency": TASKS * GROUP, "hide": ["answer"], "timeout_seconds": 600},
        evaluation={"modes": ["sampled"], "every": 0},
        gateway={"agents": [{"name": agent, "contains": prompt} for agent, prompt in PROMPTS.items()]},
    )
    trainer = agl.Trainer(
        config, algorithm=algorithm, reward=f"{HERE}/shop.py:score", run_dir=folder / "run", seed=options.seed
    )
    return trainer.fit(
        f"{HERE}/agent.py:answer",
        tasks(1000, options.seed),
        tasks(TASKS, options.seed + VALIDATION),
        held_out_dataset=tasks(HELD_OUT, options.seed + TEST),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", nargs="+", choices=list(PROMPTS), default=["planner"], help="which of them learn")
    parser.add_argument("--model", help="a model that transformers loads; default: a new tiny one")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-3, help="for a model of usual size some 1e-5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        print(json.dumps(train(parse()).as_json()["held_out"], indent=2))
    except agl.errors.AgentLightningError as error:
        sys.exit(str(error))
