"""Two made-up run directories: one finished, one that has stopped half way; the second learned with another rule."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
from tests.support.made_up_rollouts import Problem, Vocabulary, Writer, problem, skill_at

from agentlightning import span as names
from agentlightning.algorithms.lightning_rl import LightningRLConfig
from agentlightning.config import DataConfig, PolicyConfig, RunConfig, TrainConfig
from agentlightning.evaluation.intervals import paired_gain
from agentlightning.resources import PromptTemplate, ProxyLLM
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.store.types import RolloutRecord
from agentlightning.training.governance import AUDIT_FILE, AuditRecord
from agentlightning.training.health.signs import sign_history
from agentlightning.training.persistence.run_dir import RunState
from agentlightning.training.report.result import cost_of_steps, read_records
from agentlightning.training.tracking import CallRatios, write_ratios
from agentlightning.util.settings import dump_toml

BEGAN: Final = 1_760_000_000.0
TASKS, GROUP, VALIDATION, HELD_OUT = 4, 6, 8, 24
EVERY: Final = 6
PROMPTS: Final = (
    "Solve the problem.\nReply with a number.",
    "Solve the problem.\nUse the calculator for every product.\nReply with a number.",
    "Solve the problem.\nUse the calculator for every product.\nReply ### ANSWER: number ###",
)


@dataclass(slots=True)
class MadeUpRun:
    """One run that is made up."""

    name: str
    credit: str
    steps: int
    done: int
    pace: float
    seed: int
    records: list[RolloutRecord] = field(default_factory=list[RolloutRecord])
    metrics: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    audit: list[AuditRecord] = field(default_factory=list[AuditRecord])
    ratios: dict[int, CallRatios] = field(default_factory=dict[int, CallRatios])
    """By step."""
    state: RunState = field(default_factory=lambda: RunState(""))


async def write_runs(root: Path) -> list[Path]:
    """Write both runs below a directory; returns theirs."""
    runs = [
        MadeUpRun("calculator-grpo", "group_relative", 24, 24, 9.0, 1),
        MadeUpRun("calculator-rloo", "leave_one_out", 24, 14, 6.0, 2),
    ]
    return [await write_run(root, run) for run in runs]


async def write_run(root: Path, run: MadeUpRun) -> Path:
    """Write one run below a directory; returns its own."""
    path = root / run.name
    vocabulary = Vocabulary()
    _make(run, vocabulary)
    _write_files(run, path, vocabulary)
    store = LightningStore(path / "store.db")
    try:
        await _fill(run, store)
    finally:
        await store.close()
    return path


def _make(run: MadeUpRun, vocabulary: Vocabulary) -> None:
    writer = Writer(vocabulary, random.Random(run.seed), BEGAN + 10_000 * run.seed)
    run.state = state = RunState(f"r{run.seed:08x}")
    for mode in ("greedy", "sampled"):
        state.evaluations[f"before-{mode}"] = _evaluate(run, writer, "before", mode, 0, HELD_OUT, 900)
    for step in range(1, run.done + 1):
        _step(run, writer, step)
    if run.done == run.steps:
        for mode in ("greedy", "sampled"):
            state.evaluations[f"after-{mode}"] = _evaluate(
                run, writer, f"after-{run.done:06d}", mode, run.done, HELD_OUT, 900
            )
        state.measured_step = run.done
    state.step, state.seconds = run.done, 31.0 * run.done
    state.best_step = run.done - run.done % EVERY
    state.checkpoint, state.checkpoint_version = f"checkpoints/step-{run.done:06d}", run.done

    state.best_checkpoint = f"checkpoints/step-{state.best_step:06d}"


def _step(run: MadeUpRun, writer: Writer, step: int) -> None:
    state, skill = run.state, skill_at(step - 1, run.steps, run.pace)
    groups: list[list[float]] = []
    learned: list[str] = []
    failed = 0
    for index in range(TASKS):
        group = f"{state.run_id}-train-{step:06d}-{index:04d}"
        rewards: list[float] = []
        members: list[tuple[RolloutRecord, float]] = []
        for place in range(GROUP):
            asked = problem((step - 1) % 6 * TASKS + index)
            record, reward = writer.rollout(f"{group}-{place:03d}", asked, skill, step - 1, group=group)
            run.records.append(record)
            if reward is None:
                failed += 1
            else:
                rewards.append(reward)
                members.append((record, reward))
                learned.append(record.rollout.rollout_id)
        groups.append(rewards)
        run.ratios.setdefault(step, {}).update(_ratios(members, writer.rng))
    line = _line(run, writer.rng, step, groups, failed, skill)
    state.rollouts += TASKS * GROUP
    state.failed_rollouts += failed
    line["rollouts"] = state.rollouts
    if step % EVERY == 0:
        for mode in ("greedy", "sampled"):
            values = _evaluate(run, writer, f"validation-{step:06d}", mode, step, VALIDATION, 800)
            line[f"validation_{mode}"] = statistics.fmean(value for value in values if value is not None)
    run.metrics.append(line)
    scores = {name: value for name, value in line.items() if name == "reward" or name.startswith("validation_")}
    run.audit.append(AuditRecord("learned", step, step, "lightning_rl", writer.clock, tuple(learned), scores))


def _ratios(members: Sequence[tuple[RolloutRecord, float]], rng: random.Random) -> CallRatios:
    """Unlikely tokens move the most: up in the better half of a group, down in the other."""
    mean = statistics.fmean(reward for _, reward in members) if members else 0.0
    found: CallRatios = {}
    for record, reward in members:
        for span in record.spans:
            logprobs: Any = span.attributes.get(names.LOGPROBS) or ()
            if logprobs:
                moved = [0.35 * (reward - mean) * (1 - math.exp(each)) + rng.gauss(0, 0.008) for each in logprobs]
                found[record.rollout.rollout_id, span.span_id] = [round(each, 4) for each in moved]
    return found


def _line(
    run: MadeUpRun, rng: random.Random, step: int, groups: Sequence[Sequence[float]], failed: int, skill: float
) -> dict[str, Any]:
    rewards = [reward for group in groups for reward in group]
    flat = sum(len(set(group)) < 2 for group in groups)
    noise = rng.uniform(0.9, 1.1)
    return {
        "step": step,
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.fmean(statistics.pstdev(group) for group in groups if len(group) > 1),
        "reward_lowest": min(rewards),
        "reward_highest": max(rewards),
        "rollouts_trained": len(rewards),
        "groups": TASKS,
        "groups_trained": TASKS - flat,
        "groups_without_spread": flat,
        "groups_solved": sum(set(group) == {1.0} for group in groups),
        "groups_failed": sum(set(group) == {0.0} for group in groups),
        "entropy": (0.1 + 1.3 * (1 - skill)) * noise,
        "sampling_entropy": (0.12 + 1.3 * (1 - skill)) * noise,
        "grad_norm": (0.2 + 1.5 * (1 - skill)) * noise,
        "approx_kl": 0.004 * noise,
        "clip_fraction": 0.03 * noise * (1.2 - skill),
        "loss": 0.01 * (noise - 1),
        "lr": 3e-4 * 0.5 * (1 + math.cos(math.pi * step / run.steps)),
        "response_tokens": 24 + 14 * skill * noise,
        "truncated": 0.62 if run.seed == 2 and step > 8 else 0.01,
        "staleness": 0.15 * noise,
        "staleness_max": 1.0,
        "failed": failed,
        "timeouts": 0,
        "rejected": 0,
        "rejected_missing_reward": 0,
        "sampled_tokens": 17_000,
        "tokens_per_second": 820 * noise,
        "collect_seconds": 21 * noise,
        "drain_seconds": 0.4 * noise,
        "update_seconds": 8 * noise,
    }


def _evaluate(
    run: MadeUpRun, writer: Writer, label: str, mode: str, version: int, count: int, first: int
) -> list[float | None]:
    """The rewards of a validation or of the held-out tasks."""
    name = f"{run.state.run_id}-{label}-{mode}"
    skill = skill_at(version, run.steps, run.pace) + (0.04 if mode == "greedy" else 0)
    found: list[float | None] = []
    for index in range(count):
        split: Any = "val" if label.startswith("validation") else "test"
        record, reward = writer.rollout(
            f"{name}-{index:05d}", problem(first + index), skill, version, mode=split, group=f"{name}-{index}"
        )
        run.records.append(record)
        found.append(reward)
    return found


# -- files -------------------------------------------------------------------------------------------------------------


def _write_files(run: MadeUpRun, path: Path, vocabulary: Vocabulary) -> None:
    for folder in ("data", "start", "checkpoints"):
        (path / folder).mkdir(parents=True)
    for step in sorted({run.state.best_step or 0, run.done}):
        (path / "checkpoints" / f"step-{step:06d}").mkdir()
        (path / "checkpoints" / f"step-{step:06d}" / "made-up.txt").write_text("no weights: this run is made up\n")
    (path / "start" / "tokenizer.json").write_bytes(orjson.dumps(vocabulary.document()))
    (path / "config.toml").write_text(dump_toml(_config(run)))
    _lines(path / "metrics.jsonl", run.metrics)
    for each in sign_history(read_records(path / "metrics.jsonl")[0]):
        run.state.warnings[each.sign.name] = f"step {each.since}: {each.sign.what}"
    (path / "state.json").write_bytes(msgspec.json.encode(run.state))
    _lines(path / AUDIT_FILE, [msgspec.to_builtins(each) for each in run.audit])
    for step, ratios in run.ratios.items():
        write_ratios(path, step, ratios)
    for name, first, count in (("train", 0, 6 * TASKS), ("validation", 800, VALIDATION), ("held_out", 900, HELD_OUT)):
        _lines(path / "data" / f"{name}.jsonl", [problem(first + index).task() for index in range(count)])
    if run.done == run.steps:
        (path / "report.json").write_bytes(orjson.dumps(_report(run, path)))


def _lines(path: Path, rows: Sequence[Any]) -> None:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def _config(run: MadeUpRun) -> TrainConfig:
    return TrainConfig(
        agent="examples/calculator.py:solve",
        reward="examples/calculator.py:score",
        run=RunConfig(seed=run.seed, token_ratios=True),
        data=DataConfig(train="data/train.jsonl"),
        policy=PolicyConfig(model="tiny"),
        algorithm=LightningRLConfig(steps=run.steps, tasks_per_step=TASKS, group_size=GROUP, credit=run.credit),
    )


def _report(run: MadeUpRun, path: Path) -> dict[str, Any]:
    gains: dict[str, Mapping[str, Any]] = {}
    for mode in ("greedy", "sampled"):
        before, after = (run.state.evaluations[f"{when}-{mode}"] for when in ("before", "after"))
        gains[mode] = asdict(paired_gain(before, after))
    return {
        "held_out": gains,
        "rollouts": run.state.rollouts,
        "failed_rollouts": run.state.failed_rollouts,
        "rejected_rollouts": {},
        "skipped_groups": 0,
        "warnings": [],
        "steps": run.done,
        "best_step": run.state.best_step,
        "seconds": run.state.seconds,
        "rollbacks": 0,
        "cost": cost_of_steps(run.metrics).as_json(),
        "checkpoint": str(path / "checkpoint"),
        "run_dir": str(path),
    }


async def _fill(run: MadeUpRun, store: LightningStoreBase) -> None:
    for start in range(0, len(run.records), 100):
        await store.add_records(run.records[start : start + 100])
    for version, text in enumerate(PROMPTS):
        llm = ProxyLLM(endpoint="http://127.0.0.1:4747", model="policy", policy_version=version * EVERY)
        await store.add_resources(
            {"llm": llm, "instructions": PromptTemplate(template=text)},
            f"{run.state.run_id}-train-{version * EVERY + 1:06d}",
        )
    for number in range(3):
        await store.update_worker(f"worker-{number}", {"finished": 190 + 7 * number, "failed": number})
    await store.update_queue("train", 24)
    await store.update_queue("val", None)
    waiting: Problem = problem(3)
    for number in range(2):
        await store.enqueue_rollout(
            waiting.task(), "train", rollout_id=f"{run.state.run_id}-train-{run.done + 1:06d}-0000-{number:03d}"
        )
