"""From the arguments of `Trainer.train` to a job on recorded data: a new one, or the continuation of one in a run
directory."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentlightning.algorithms import make_algorithm
from agentlightning.algorithms.base import Algorithm
from agentlightning.config import TrainConfig
from agentlightning.errors import ConfigError, ResumeError
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.persistence.run_dir import OFFLINE_FILE
from agentlightning.training.recorded.offline import OfflineJob, reads_store
from agentlightning.training.recorded.plan import OfflineOptions, resumed_options
from agentlightning.training.recorded.position import (
    HELD_OUT_FILE,
    OfflinePosition,
    read_position,
    restored_algorithm,
)
from agentlightning.util.progress import Progress


def is_offline(run_dir: Path) -> bool:
    """Whether a directory holds a run on recorded data."""
    return (run_dir / OFFLINE_FILE).exists()


@asynccontextmanager
async def offline_job(
    config: TrainConfig,
    algorithm: Algorithm[Any] | None,
    store: LightningStoreBase | None,
    options: OfflineOptions,
    run_dir: Path,
    progress: Progress,
    *,
    trained: Path | None,
    reward: Any,
    resumes: bool,
) -> AsyncGenerator[OfflineJob]:
    """The job; closes the store that it opened. Raises ResumeError where a part of a resumed run was an object in
    memory and is not given again."""
    position = read_position(run_dir) if resumes else None
    if position is None:
        made = algorithm if algorithm is not None else make_algorithm(config.algorithm)
        given = store if store is not None else getattr(made, "store", None)
        file = None
    else:
        tasks = run_dir / HELD_OUT_FILE
        options = resumed_options(options, position.options, tasks if tasks.exists() else None)
        _check_given(position, run_dir, store=store, reward=reward, eval_agent=options.eval_agent)
        made, given, file = algorithm, store, position.store
    opened = given if given is not None else _open_store(made, position, file)
    try:
        if position is not None:
            made = restored_algorithm(algorithm, position, config, opened, run_dir)
        assert made is not None
        yield OfflineJob(config, made, opened, options, run_dir, progress, trained, reward, position)
    finally:
        if given is None:
            await opened.close()


def _open_store(
    algorithm: Algorithm[Any] | None, position: OfflinePosition | None, file: str | None
) -> LightningStoreBase:
    if position is None:
        assert algorithm is not None
        return LightningStore() if reads_store(algorithm) else InMemoryLightningStore()
    if file is None:
        return InMemoryLightningStore()  # It learns from data of its own.
    if not Path(file).exists():
        raise ResumeError(f"the sessions of this run are in {file}, which does not exist any more; give store=...")
    return LightningStore(file)


def _check_given(position: OfflinePosition, run_dir: Path, **given: Any) -> None:
    for name, value in given.items():
        if name in position.objects and value is None:
            where = "train(" if name == "eval_agent" else f"Trainer.resume({str(run_dir)!r}, "
            option = {"store": "--store", "reward": "--reward", "eval_agent": "--eval-agent"}[name]
            raise ResumeError(
                f"{run_dir} was started with {name} given as an object in memory; give it again: {where}{name}=...), or"
                f" {option}"
            )


def check_live(algorithm: Algorithm[Any] | None) -> None:
    """Raises ConfigError for an algorithm whose data a run with an agent would not learn from."""
    from agentlightning.algorithms.preference import DPO

    if isinstance(algorithm, DPO) and algorithm.has_dataset:
        raise ConfigError(
            "DPO was given data, and with an agent it learns from preferences between its rollouts; leave data out, or"
            " leave the agent out: Trainer(...).train(eval_agent=agent, held_out_dataset=tasks) measures it"
        )
