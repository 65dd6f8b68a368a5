"""Offline learning: sessions of a mediocre policy on the demo's calculator, and what `train`, DPO and SFT make of them.

    python benchmarks/studies/offline.py [--seeds 5] [--folder DIR] [--algorithms lightning_rl,dpo,sft]

For each seed: the demo's policy after its warm start (kept in the folder), 2,000 sessions of it at temperature 1 (250
tasks, 8 each), and for each algorithm the reward on 128 held-out tasks before and after, sampled at temperature 1, with
the 95% interval of the paired difference. No algorithm sees another task or runs the agent.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from tasks.calculator import Calculator

import agentlightning as agl
from agentlightning.config import EvaluationConfig, PolicyConfig, RunConfig, RunnerConfig, TrainConfig
from agentlightning.demo import job
from agentlightning.demo.agent import solve
from agentlightning.demo.problems import make_tasks, score
from agentlightning.policy import open as opening
from agentlightning.policy.config import OptimizerConfig
from agentlightning.server.serve import serve
from agentlightning.store import LightningStore
from agentlightning.training.agent_runner import credentials, load_agent, make_runner, rollout_config
from agentlightning.training.sources.collector import RolloutCollector, RolloutPlan, TrajectoryReader
from agentlightning.util.progress import Progress

TASKS, SESSIONS = 250, 8
HELD_OUT = 128
ITERATIONS = 20
RUNNER = RunnerConfig(concurrency=128, timeout_seconds=300)


async def record(model: Path, path: Path, seed: int) -> None:
    """2,000 sessions of the policy, unless they are there."""
    if await asyncio.to_thread(path.exists):
        return
    store = LightningStore(path.with_suffix(".new"))
    policy = await opening.open_policy(opening.policy_config(PolicyConfig(), str(model), seed=seed))
    try:
        token, secret = credentials()
        async with AsyncExitStack() as stack:
            runner = make_runner(RUNNER, store, solve, score, secret)
            listener = await load_agent(runner, stack, policy=True)
            engines = {policy.model: policy}
            serving = serve(store, engines, secret=secret, token=token, listener=listener)
            server = await stack.enter_async_context(serving)
            await runner.start(server.url)
            stack.push_async_callback(runner.stop)
            sampled = agl.LLM(endpoint=server.url, model=policy.model, sampling_parameters={"temperature": 1.0})
            resources = await store.add_resources({"llm": sampled})
            plans = [
                RolloutPlan(f"session-{index:05d}-{number}", task, f"task-{index:05d}")
                for index, task in enumerate(make_tasks("train", TASKS, seed + job.FRESH))
                for number in range(SESSIONS)
            ]
            collector = RolloutCollector(TrajectoryReader(store, policy.model), rollout_config(RUNNER))
            found = await collector.collect(plans, resources_id=resources.resources_id, max_rejected_share=1.0)
            rewards = [each.reward for each in found.trajectories if isinstance(each.reward, float)]
            print(f"seed {seed}: {len(rewards)} sessions, mean reward {sum(rewards) / len(rewards):.3f}", flush=True)
    finally:
        await policy.close()
        await store.close()
    await asyncio.to_thread(path.with_suffix(".new").rename, path)


def optimizer(lr: float) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, schedule="cosine", warmup_steps=2)


ALGORITHMS: Final[dict[str, Callable[[agl.LightningStore], Any]]] = {
    "lightning_rl": lambda store: agl.LightningRL(store=store, aggregate="token", optimizer=optimizer(3e-4)),
    "awr": lambda store: agl.LightningRL(store=store, aggregate="token", loss="awr", optimizer=optimizer(1e-3)),
    "dpo": lambda store: agl.DPO(optimizer=optimizer(1e-4)),
    "sft": lambda store: agl.SFTAlgorithm(
        dataset=store.get_successful_trajectories(), batch_size=64, optimizer=optimizer(1e-3)
    ),
}
NEEDED: Final = {"lightning_rl": 0.15, "awr": 0.15, "dpo": 0.1, "sft": 0.1}
"""The gain that a seed must reach."""


def learn(folder: Path, seed: int, name: str) -> agl.TrainingResult:
    """One algorithm on the sessions of one seed."""
    store = agl.LightningStore(folder / f"sessions-{seed}.db")
    run_dir = folder / f"run-{seed}-{name}"
    shutil.rmtree(run_dir, ignore_errors=True)
    config = TrainConfig(evaluation=EvaluationConfig(modes=("sampled",)), runner=RUNNER, run=RunConfig(seed=seed))
    try:
        trainer = agl.Trainer(
            config,
            store=store,
            algorithm=ALGORITHMS[name](store),
            model=folder / f"start-{seed}",
            run_dir=run_dir,
            reward=score,
            progress=Progress(enabled=False),
        )
        return trainer.train(
            ITERATIONS,
            method="awr" if name == "awr" else "auto",
            eval_agent=solve,
            held_out_dataset=make_tasks("test", HELD_OUT, seed),
        )
    finally:
        asyncio.run(store.close())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="keep starts and sessions here")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        calculator = Calculator(folder)
        passed = dict.fromkeys(arguments.algorithms.split(","), 0)
        for seed in range(arguments.seeds):
            asyncio.run(record(calculator.start(seed), folder / f"sessions-{seed}.db", seed))
            for name in passed:
                result = learn(folder, seed, name)
                gain = result.held_out["sampled"]
                low, high = gain.interval
                passed[name] += gain.gain >= NEEDED[name] and low > 0
                print(
                    f"seed {seed}, {name} ({result.recorded.method or 'all'}): {gain.before:.3f} -> {gain.after:.3f},"
                    f" gain {gain.gain:+.3f} ({low:+.3f} to {high:+.3f}), {result.recorded.sessions} sessions,"
                    f" {result.seconds:.0f} s",
                    flush=True,
                )
        for name, count in passed.items():
            print(f"{name}: {count} of {arguments.seeds} seeds gain {NEEDED[name]:g} or more, interval above 0")


if __name__ == "__main__":
    main()
