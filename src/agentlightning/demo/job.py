"""The demo as a training job: tasks and demonstrations, all generated from one seed, and the settings of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson

from agentlightning.config import TrainConfig
from agentlightning.demo.problems import demonstrations, make_tasks
from agentlightning.util.settings import load_settings

DEMONSTRATIONS = 6400
"""As many as the warm start shows."""
TASKS = 288
"""As many as the steps train on."""
HELD_OUT = 128
VALIDATION = 64
FRESH = 1_000_000
"""Added to the seed of the training tasks, so that few of them occur in the demonstrations."""


def tasks(seed: int) -> dict[str, list[Any]]:
    """The arguments of `Trainer.fit` that are tasks; no two parts share a problem."""
    return {
        "train_dataset": make_tasks("train", TASKS, seed + FRESH),
        "val_dataset": make_tasks("val", VALIDATION, seed),
        "held_out_dataset": make_tasks("test", HELD_OUT, seed),
    }


def write_demonstrations(path: Path, seed: int) -> str:
    """Conversations for the warm start, as JSONL; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in demonstrations(DEMONSTRATIONS, seed)))
    return str(path)


def settings(file: str, **changes: Any) -> TrainConfig:
    """The settings of a file of this folder, with changes by name, in which `__` stands for a dot; None changes
    nothing."""
    overrides = [
        f"{name.replace('__', '.')}={json.dumps(value, ensure_ascii=False)}"
        for name, value in changes.items()
        if value is not None
    ]
    return load_settings(TrainConfig, toml=Path(__file__).with_name(file), overrides=overrides)
