"""A pretrained model on a CPU: sampling, updates, and training until a reward, beside other programs.

    python benchmarks/real_model.py [sampling|update|reward ...] [--rounds 5] [--out FILE.json]

The model is SmolLM2-135M-Instruct (`--model` names another one). The arms take turns, each in a process of its own. The
main measure is CPU seconds, those of all threads of a process together, with seconds of wall clock and the peak of its
resident memory beside. Every figure is a median of the rounds; ratios to the peers have a 95% interval (bootstrap over
the rounds). `make peers` makes TRL's environment (or AGL_TRL_PYTHON names its python). LLAMA_CPP_PYTHON is the python
of an environment with llama-cpp-python, AGL_VLLM the directory of one with vLLM for the CPU. What is not there is left
out, and named.

sampling: so many callers at once, each with a prompt of 60 or 1,000 random tokens, and 64 new tokens at temperature 1.
  64 callers are 8 groups of 8 that share a prompt; fewer share nothing. Prompts are computed anew in each round, which
  counts as work, but not as tokens. One round warms up.
update: the GRPO loss on recorded rollouts of 100 tokens (20 are a prompt that 8 of them share) or 1,000 (200 are), in
  micro-batches of at most 8,192 tokens, with AdamW, of all weights or LoRA of rank 16. The second of two updates in a
  new process is measured.
reward: steps of 8 tasks and 8 rollouts ("What is 31 + 28? Reply with only the number.", at most 16 tokens) at a
  learning rate of 2e-5, until the mean reward of a step is at least 0.5: `agl train` with all that belongs to it, and
  GRPOTrainer, both from the start of the program to the end of that step. Round r has seed r. The memory of ours is the
  sum of the peaks of its processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from arms.line import resident_mb
from harness import HERE, PYTHONS, Arm, ArmError

QUESTION, MAX_TOKENS = "What is {a} + {b}? Reply with only the number.", 16
NAMES = {
    "real_ours": "ours",
    "real_transformers": "transformers.generate",
    "real_llama_cpp": "llama.cpp",
    "real_vllm": "vLLM",
    "real_trl": "TRL",
}
HAVE = {
    "real_llama_cpp": "install llama-cpp-python in an environment and set LLAMA_CPP_PYTHON to its python",
    "real_vllm": "set AGL_VLLM to the directory of an environment with vLLM for the CPU (tests/vllm/setup.sh)",
    "real_trl": "run make peers, or set AGL_TRL_PYTHON",
}
UPDATE_LR, SUMS_LR, TASKS_PER_STEP, GROUP, THRESHOLD = 1e-5, 2e-5, 8, 8, 0.5


class DifferentWorkError(Exception):
    """The arms did not compute the same, so their times say nothing."""


@dataclass
class Row:
    """One arm in one case."""

    part: str
    case: str
    dtype: str
    arm: str
    answers: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def costs(self) -> list[float]:
        """What is compared: CPU seconds for the same work."""
        return [answer["cpu_seconds"] for answer in self.answers]

    def median(self, name: str) -> float:
        return statistics.median(answer[name] for answer in self.answers)


@dataclass(frozen=True)
class Setup:
    options: argparse.Namespace
    directory: str
    """Of the model."""
    vocabulary: int
    folder: Path
    """For what lives as long as this run."""

    def start(self, name: str) -> Arm:
        threads = str(self.options.threads)
        return Arm(name, {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})

    def rows(self, part: str, case: str, dtype: str, arms: Sequence[str]) -> list[Row]:
        wanted = self.options.arms
        return [
            Row(part, case, dtype, name)
            for name in arms
            if PYTHONS[name].exists() and (wanted is None or NAMES[name] in wanted)
        ]


# -- sampling --------------------------------------------------------------------------------------------------------


def make_prompts(callers: int, length: int, vocabulary: int) -> list[list[int]]:
    """Above 8 callers, groups of 8 share a prompt."""
    draw = random.Random(length)
    distinct = callers if callers <= GROUP else callers // GROUP
    prompts = [[draw.randrange(10, vocabulary) for _ in range(length)] for _ in range(distinct)]
    return [prompts[i * distinct // callers] for i in range(callers)]


def sampling(setup: Setup) -> list[Row]:
    options, found = setup.options, list[Row]()
    arms = ("real_ours", "real_transformers", "real_llama_cpp", "real_vllm")
    for dtype in options.dtypes:
        for length in options.prompts:
            for callers in options.callers:
                shared = f", groups of {GROUP} share one" if callers > GROUP else ""
                case = f"{callers} callers, prompts of {length} tokens{shared}"
                rows = setup.rows("sampling", case, dtype, arms)
                job = {"prompts": make_prompts(callers, length, setup.vocabulary), "new": options.new}
                found += sample_in_turns(setup, rows, job, length + options.new + 1)
                show(rows)
    return found


def sample_in_turns(setup: Setup, rows: list[Row], job: dict[str, Any], context: int) -> list[Row]:
    processes = {row.arm: setup.start(row.arm) for row in rows}
    try:
        for turn in range(setup.options.rounds + 1):
            for row in list(rows):
                arm = processes[row.arm]
                try:
                    if not turn:
                        load(setup, arm, row, context)
                    answer = arm.ask("sample", **job)
                except ArmError as error:
                    leave_out(rows, row, error)
                    continue
                if turn:  # The first one of each warms up.
                    row.answers.append(answer)
    finally:
        for arm in processes.values():
            arm.close()
    check_same_work(rows)
    return rows


def load(setup: Setup, arm: Arm, row: Row, context: int) -> None:
    model = str(gguf_file(setup)) if row.arm == "real_llama_cpp" else setup.directory
    arm.ask("load", model=model, dtype=row.dtype, threads=setup.options.threads, context=context)


def gguf_file(setup: Setup) -> Path:
    path = setup.folder / "model.gguf"
    if not path.exists():
        writer = setup.start("real_ours")
        writer.ask("prepare", model=setup.directory, gguf=str(path))
        writer.close()
    return path


# -- updates ---------------------------------------------------------------------------------------------------------


def make_groups(rollouts: int, length: int, vocabulary: int) -> list[dict[str, Any]]:
    """A fifth of each rollout is the prompt of its group. Rewards differ within each group."""
    draw = random.Random(length)
    prompt, answer = length // 5, length - length // 5

    def tokens(number: int) -> list[int]:
        return [draw.randrange(10, vocabulary) for _ in range(number)]

    size = min(GROUP, rollouts)
    return [
        {"prompt": tokens(prompt), "answers": [tokens(answer) for _ in range(size)]}
        | {"rewards": [draw.random() for _ in range(size)]}
        for _ in range(rollouts // size)
    ]


def update(setup: Setup) -> list[Row]:
    options, found = setup.options, list[Row]()
    for dtype in options.dtypes:
        for length in options.lengths:
            rollouts = options.rollouts if length <= 100 else options.long_rollouts
            groups = make_groups(rollouts, length, setup.vocabulary)
            for lora in (False, True):
                case = f"{rollouts} rollouts of {length} tokens, {'LoRA r=16' if lora else 'all weights'}"
                rows = setup.rows("update", case, dtype, ("real_ours", "real_trl"))
                job = {"model": setup.directory, "dtype": dtype, "threads": options.threads, "lora": lora}
                update_in_turns(setup, rows, {**job, "groups": groups, "lr": UPDATE_LR})
                check_same_work(rows)
                show(rows)
                found += rows
    return found


def update_in_turns(setup: Setup, rows: list[Row], job: dict[str, Any]) -> None:
    """Each measurement has a new process, so that its memory is its own."""
    for _ in range(setup.options.rounds):
        for row in list(rows):
            arm = setup.start(row.arm)
            try:
                row.answers.append(arm.ask("update", **job))
            except ArmError as error:
                leave_out(rows, row, error)
            finally:
                arm.close()


# -- training until a reward -----------------------------------------------------------------------------------------


def make_tasks(number: int) -> list[dict[str, int]]:
    draw = random.Random(0)
    return [{"a": draw.randint(10, 99), "b": draw.randint(10, 99)} for _ in range(number)]


def reward(setup: Setup) -> list[Row]:
    options, found = setup.options, list[Row]()
    tasks = make_tasks(TASKS_PER_STEP * options.max_steps)
    for dtype in options.dtypes:
        case = f"sums until the reward is {THRESHOLD}, at most {options.max_steps} steps"
        rows = setup.rows("reward", case, dtype, ("real_ours", "real_trl"))
        for seed in range(options.rounds):
            for row in list(rows):
                try:
                    row.answers.append((our_run if row.arm == "real_ours" else trl_run)(setup, dtype, tasks, seed))
                except ArmError as error:
                    leave_out(rows, row, error)
        show(rows)
        found += rows
    return found


def trl_run(setup: Setup, dtype: str, tasks: list[dict[str, int]], seed: int) -> dict[str, Any]:
    arm = setup.start("real_trl")
    try:
        return arm.ask(
            "reward", model=setup.directory, dtype=dtype, threads=setup.options.threads, tasks=tasks, question=QUESTION,
            seed=seed, steps=setup.options.max_steps, threshold=THRESHOLD, tasks_per_step=TASKS_PER_STEP,
            group_size=GROUP, max_tokens=MAX_TOKENS, lr=SUMS_LR,
        )  # fmt: skip
    finally:
        arm.close()


def our_run(setup: Setup, dtype: str, tasks: list[dict[str, int]], seed: int) -> dict[str, Any]:
    """`agl train`, ended once the step is written."""
    folder = Path(tempfile.mkdtemp(dir=setup.folder))
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    # One held-out task and no validation: only training is compared. No checkpoint in between either, as in TRL.
    (folder / "held_out.jsonl").write_text(json.dumps({"a": 31, "b": 28}) + "\n")
    settings = {
        "algorithm.steps": setup.options.max_steps,
        "algorithm.tasks_per_step": TASKS_PER_STEP,
        "algorithm.group_size": GROUP,
        "algorithm.optimizer.lr": SUMS_LR,
        "policy.dtype": dtype,
        "policy.threads": setup.options.threads,
        "data.held_out": folder / "held_out.jsonl",
        "data.validation_share": 0,
        "evaluation.every": 0,
        "evaluation.modes": '["greedy"]',
        "run.checkpoint_every": 10**6,
    }
    command = [str(Path(sys.executable).with_name("agl")), "train", "--agent", str(HERE / "arms/sums.py") + ":solve"]
    command += ["--dataset", str(folder / "tasks.jsonl"), "--model", setup.directory, "--run-dir", str(folder / "run")]
    command += ["--seed", str(seed), *(f"{name}={value}" for name, value in settings.items())]
    log = folder / "log"
    with log.open("w") as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
    try:
        return watch(process, folder / "run" / "metrics.jsonl", log, started, setup.options.max_steps)
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(30)
        if process.poll() is None:
            process.kill()
            process.wait()


def watch(process: subprocess.Popen[bytes], metrics: Path, log: Path, started: float, max_steps: int) -> dict[str, Any]:
    """What was spent when the first step with the reward was written. Raises ArmError where the run ended before."""
    steps: list[dict[str, Any]] = []
    while not steps or (steps[-1]["reward"] < THRESHOLD and len(steps) < max_steps):
        if process.poll() is not None:
            raise ArmError(f"agl train ended with {process.returncode}: {log.read_text()[-2000:]}")
        time.sleep(0.1)
        text = metrics.read_text() if metrics.exists() else ""
        steps = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    wall = time.perf_counter() - started
    family = processes_below(process.pid)
    return {
        "cpu_seconds": sum(map(cpu_seconds, family)),
        "wall_seconds": wall,
        "peak_mb": sum(resident_mb(pid, "VmHWM") for pid in family),
        "steps": len(steps),
        "rollouts": steps[-1]["rollouts"],
        "rewards": [step["reward"] for step in steps],
        "reached": steps[-1]["reward"] >= THRESHOLD,
    }


def processes_below(pid: int) -> list[int]:
    """This process and all that it has started, directly or not."""
    children = [int(each) for task in Path(f"/proc/{pid}/task").glob("*/children") for each in task.read_text().split()]
    return [pid, *(each for child in children for each in processes_below(child))]


def cpu_seconds(pid: int) -> float:
    """Of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


# -- the report ------------------------------------------------------------------------------------------------------


def leave_out(rows: list[Row], row: Row, error: ArmError) -> None:
    last = str(error).strip().splitlines()[-1]
    print(f"{row.part}, {row.case}, {row.dtype}: {NAMES[row.arm]} is left out: {last}", file=sys.stderr)
    rows.remove(row)


def check_same_work(rows: Sequence[Row]) -> None:
    """Raises DifferentWorkError where arms did not compute the same number of tokens."""
    counts = {NAMES[row.arm]: {answer["tokens"] for answer in row.answers} for row in rows}
    if len(set().union(*counts.values())) > 1:
        raise DifferentWorkError(f"{rows[0].case}, {rows[0].dtype}: tokens of the arms differ: {counts}")


def ratio(row: Row, peer: Row) -> tuple[float, float, float]:
    """How many times the CPU seconds of ours the peer took: the median over the rounds and its 95% interval."""
    each = [b / a for a, b in zip(row.costs, peer.costs, strict=False)]
    draw = random.Random(0)
    drawn = sorted(statistics.median(draw.choices(each, k=len(each))) for _ in range(2000))
    return statistics.median(each), drawn[50], drawn[1949]


def show(rows: Sequence[Row]) -> None:
    if not rows:
        return
    ours = next((row for row in rows if row.arm == "real_ours"), None)
    print(f"\n{rows[0].part}: {rows[0].case}, {rows[0].dtype}", flush=True)
    for row in rows:
        cells = [f"{row.median('cpu_seconds'):9.2f} CPU s ({min(row.costs):.2f} to {max(row.costs):.2f})"]
        cells.append(f"{row.median('wall_seconds'):9.2f} s")
        if row.part == "sampling":
            cells.append(f"{row.median('tokens') / row.median('cpu_seconds'):8.1f} tokens/CPU s")
            cells.append(f"{row.median('tokens') / row.median('wall_seconds'):8.1f} tokens/s")
        elif row.part == "reward":
            reached = sum(answer["reached"] for answer in row.answers)
            cells.append(f"{row.median('rollouts'):.0f} rollouts, reached in {reached} of {len(row.answers)}")
        cells.append(f"peak {row.median('peak_mb'):6.0f} MB")
        if ours is not None and row is not ours:
            middle, low, high = ratio(ours, row)
            cells.append(f"{middle:.2f} times ours ({low:.2f} to {high:.2f})")
        print(f"  {NAMES[row.arm]:22}" + "  ".join(cells), flush=True)


def as_json(rows: Sequence[Row], setup: Setup) -> dict[str, Any]:
    options = {name: value for name, value in vars(setup.options).items() if name != "out"}
    return {
        "title": "real model",
        "options": options,
        "cores": os.cpu_count(),
        "load_at_the_end": os.getloadavg()[0],
        "rows": [
            {"part": row.part, "case": row.case, "dtype": row.dtype, "arm": NAMES[row.arm], "answers": row.answers}
            for row in rows
        ],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help="sampling, update, reward; none: all")
    parser.add_argument("--model", default="smollm2-135m", help="a directory, a short name or a hub name")
    parser.add_argument("--rounds", type=int, default=5, help="how often the arms take turns")
    parser.add_argument("--out", type=Path, help="also write every measurement to this JSON file")
    parser.add_argument("--json", action="store_true", help="print the same JSON on the last line")
    parser.add_argument("--threads", type=int, default=2, help="of every arm")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--arms", nargs="+", choices=list(NAMES.values()), help="only these")
    parser.add_argument("--callers", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--prompts", nargs="+", type=int, default=[60, 1000], help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--lengths", nargs="+", type=int, default=[100, 1000], help="tokens of a rollout of an update")
    parser.add_argument("--rollouts", type=int, default=64, help="of an update, at most 100 tokens long")
    parser.add_argument("--long-rollouts", type=int, default=16, help="of an update, more than 100 tokens long")
    parser.add_argument("--max-steps", type=int, default=40, help="of training until the reward")
    options = parser.parse_args()
    options.parts = options.parts or ["sampling", "update", "reward"]
    if unknown := set(options.parts) - {"sampling", "update", "reward"}:
        parser.error(f"{', '.join(unknown)}: choose sampling, update or reward")
    if odd := [n for n in (*options.callers, options.rollouts, options.long_rollouts) if n > GROUP and n % GROUP]:
        parser.error(f"{odd[0]} is no multiple of {GROUP}, the size of a group")
    return options


def main() -> int:
    options = parse()
    for name, how in HAVE.items():
        if not PYTHONS[name].exists() and (options.arms is None or NAMES[name] in options.arms):
            print(f"{NAMES[name]} is left out: {PYTHONS[name]} is not there; {how}", file=sys.stderr)
    if "update" in options.parts and options.long_rollouts != 64:
        print(f"Updates of long rollouts have {options.long_rollouts} in place of 64, which take minutes each.")
    with tempfile.TemporaryDirectory() as folder:
        first = Arm("real_ours")
        found = first.ask("prepare", model=options.model)
        first.close()
        setup = Setup(options, found["directory"], found["vocabulary"], Path(folder))
        parts = {"sampling": sampling, "update": update, "reward": reward}
        rows = [row for name in options.parts for row in parts[name](setup)]
        whole = as_json(rows, setup)
    if options.out is not None:
        options.out.write_text(json.dumps(whole, indent=1) + "\n")
    if options.json:
        print(json.dumps(whole))
    return 0


if __name__ == "__main__":
    sys.exit(main())
