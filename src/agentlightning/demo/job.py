"""The demo as a training job: tasks, demonstrations and settings, all generated from one seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.config import (
    EvaluationConfig,
    PolicyConfig,
    RunConfig,
    RunnerConfig,
    TrainConfig,
    WarmStartConfig,
)
from agentlightning.demo import recipe
from agentlightning.demo.problems import demonstrations, make_tasks

FRESH = 1_000_000
"""Added to the seed of the training tasks, so that few of them occur in the demonstrations."""


def tasks(seed: int) -> dict[str, list[Any]]:
    """The arguments of `Trainer.fit` that are tasks; no two parts share a problem."""
    return {
        "train_dataset": make_tasks("train", recipe.TASKS_PER_STEP * recipe.RL_STEPS, seed + FRESH),
        "val_dataset": make_tasks("val", recipe.VALIDATION, seed),
        "held_out_dataset": make_tasks("test", recipe.HELD_OUT, seed),
    }


def write_demonstrations(path: Path, seed: int) -> Path:
    """Conversations for the warm start, as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = recipe.SFT_STEPS * recipe.SFT_BATCH
    records = demonstrations(count, seed, clean=recipe.CLEAN, habit=recipe.HABIT)
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))
    return path


def settings(demonstrations_file: Path, seed: int, steps: int | None = None) -> TrainConfig:
    """The demo's configuration. `steps` replaces the recipe's number of reinforcement learning steps."""
    return TrainConfig(
        agent="agentlightning.demo.agent:solve",
        reward="agentlightning.demo.problems:score",
        run=RunConfig(seed=seed),
        policy=PolicyConfig(model="tiny"),
        warm_start=WarmStartConfig(
            dataset=str(demonstrations_file),
            steps=recipe.SFT_STEPS,
            batch_size=recipe.SFT_BATCH,
            shuffle=False,
            optimizer=recipe.SFT_OPTIMIZER,
        ),
        algorithm=LightningRLConfig(
            steps=steps or recipe.RL_STEPS,
            tasks_per_step=recipe.TASKS_PER_STEP,
            group_size=recipe.GROUP_SIZE,
            minibatches=recipe.MINIBATCHES,
            equal_groups="filter",
            aggregate="token",
            optimizer=recipe.RL_OPTIMIZER,
        ),
        runner=RunnerConfig(concurrency=recipe.TASKS_PER_STEP * recipe.GROUP_SIZE, timeout_seconds=60),
        evaluation=EvaluationConfig(every=8, tasks=recipe.VALIDATION),
    )
