"""The calculator task of `agl demo`, learned through `Trainer` from one warm start by many arms.

An arm is a run of the demo's recipe with another credit rule or loss: agents in processes, model calls over HTTP, a
store for each run. A seed's warm start is made once. The reward is measured on validation tasks every `EVERY` steps.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.algorithms.sft import SFTAlgorithm
from agentlightning.config import EvaluationConfig, PolicyConfig, TrainConfig, WarmStartConfig
from agentlightning.credit import group_trajectories
from agentlightning.demo import job
from agentlightning.demo.agent import solve
from agentlightning.models.tiny import make_tiny
from agentlightning.store import LightningStore
from agentlightning.task import load_dataset
from agentlightning.trainer import Trainer
from agentlightning.training.sources.collector import TrajectoryReader, find_groups
from agentlightning.trajectory import Trajectory
from agentlightning.util.progress import Progress
from agentlightning.util.settings import settings_from

EVERY = 2


@dataclass
class CalculatorRun:
    """What one arm did."""

    rollouts: int
    arrived: bool
    """Whether it reached the target; else `rollouts` are those it was given."""
    seconds: float
    rewards: list[float] = field(default_factory=list[float])
    """Of each validation."""


RECIPE: Any = job.settings("calculator.toml")


class Calculator:
    """Starts and runs in one folder."""

    def __init__(
        self, folder: Path, *, steps: int = RECIPE.algorithm.steps, warm_start_steps: int = RECIPE.warm_start.steps
    ) -> None:
        self.folder, self.steps, self.warm_start_steps = folder, steps, warm_start_steps

    def start(self, seed: int) -> Path:
        """The demo's policy after its warm start."""
        output = self.folder / f"start-{seed}"
        if not output.exists():
            demonstrations = job.write_demonstrations(self.folder / f"demonstrations-{seed}.jsonl", seed)
            records = load_dataset(demonstrations)
            tiny = make_tiny(self.folder / f"tiny-{seed}", [*job.tasks(seed)["train_dataset"], *records], seed=seed)
            SFTAlgorithm(
                tiny,
                records,
                output=output,
                steps=self.warm_start_steps,
                batch_size=RECIPE.warm_start.batch_size,
                shuffle=False,
                seed=seed,
                optimizer=RECIPE.warm_start.optimizer,
            ).train()
        return output

    def learn(self, seed: int, target: float, mode: str, **algorithm: Any) -> CalculatorRun:
        """One run with these settings of the algorithm; `mode`: how validation samples."""
        config = self._config(seed, mode, algorithm)
        run_dir = self.folder / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        began = time.perf_counter()
        Trainer(config, run_dir=run_dir, progress=Progress(enabled=False)).fit(solve, **job.tasks(seed))
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        rewards = [line[f"validation_{mode}"] for line in lines if f"validation_{mode}" in line]
        arrived = next((place for place, reward in enumerate(rewards, 1) if reward >= target), None)
        steps = self.steps if arrived is None else min(self.steps, EVERY * arrived)
        rollouts = steps * RECIPE.algorithm.tasks_per_step * RECIPE.algorithm.group_size
        return CalculatorRun(rollouts, arrived is not None, seconds, rewards)

    def recorded(self, groups: int) -> list[list[Trajectory]]:
        """The first groups of the last run."""
        return asyncio.run(_read(self.folder / "run" / "store.db", groups))

    def _config(self, seed: int, mode: str, algorithm: Mapping[str, Any]) -> TrainConfig:
        demo = job.settings("calculator.toml", run__seed=seed, algorithm__steps=self.steps)
        kept = {name: getattr(demo.algorithm, name) for name in ("steps", "tasks_per_step", "group_size", "optimizer")}
        return demo.model_copy(
            update={
                "policy": PolicyConfig(model=str(self.start(seed))),
                "warm_start": WarmStartConfig(),
                "algorithm": settings_from(LightningRLConfig, kept | dict(algorithm), source="of the arm"),
                "evaluation": EvaluationConfig(every=EVERY, tasks=job.VALIDATION, held_out_tasks=1, modes=(mode,)),
            }
        )


async def _read(path: Path, groups: int) -> list[list[Trajectory]]:
    store = LightningStore(path)
    try:
        found = await find_groups(store, ["train"])
        chosen = {rollout_id: group for group, ids in found[:groups] for rollout_id in ids}
        return group_trajectories((await TrajectoryReader(store).read(chosen))[0])
    finally:
        await store.close()
