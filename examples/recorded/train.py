"""Records sessions of an agent on a pretrained model, learns from them, and measures the agent before and after.

    python train.py --algorithm sft          # imitates the best session of each task
    python train.py --algorithm rejection    # imitates all sessions that were good enough, as a method of LightningRL
    python train.py --algorithm dpo          # prefers the better session of a task to the worse one

The agent reads a customer's message and is to reply with the order number, and nothing else: it is that of `agl demo
--model smollm2-135m`. `agl serve` records its sessions once, for all three.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

import agentlightning as agl
from agentlightning.demo.messages import make_tasks, read, score

AGENT, REWARD = "agentlightning.demo.messages:read", "agentlightning.demo.messages:score"
TASKS, SESSIONS = 24, 32
"""Tasks that are recorded, and sessions of each."""
HELD_OUT = 64
"""Tasks that the agent is measured on."""
GOOD = 0.15
"""The reward that a session must have to be imitated: the order number is among at most a dozen words."""
STEPS, BATCH = 8, 8
"""Updates, and sessions of each; with dpo, tasks of each."""
LR = {"sft": 5e-5, "rejection": 5e-5, "dpo": 1e-5}


@contextlib.contextmanager
def serving(model: str, store: Path, log: Path) -> Iterator[str]:
    """The address of `agl serve`, from when it answers until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agl_program = str(Path(sys.executable).with_name("agl"))
    command = [agl_program, "serve", "--store", str(store), "--port", str(port), "--model", f"policy={model}"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", trust_env=False).is_success:
                    break
            if process.poll() is not None:
                raise RuntimeError(f"agl serve does not start: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def record(model: str, store: Path, seed: int) -> None:
    """SESSIONS sessions of each of TASKS tasks, with rewards."""
    with serving(model, store, store.with_suffix(".log")) as url, ThreadPoolExecutor(64) as threads:

        def session(task: dict[str, str]) -> None:
            with agl.track_session(task, store=url, name="reader"):
                agl.emit_reward(score(task, read(task["message"], f"{url}/v1")))

        list(threads.map(session, make_tasks("train", TASKS, seed) * SESSIONS))
        agl.flush_recording()


def algorithm(name: str, store: agl.LightningStore) -> Any:
    optimizer = agl.config.OptimizerConfig(lr=LR[name])
    if name == "sft":
        best = store.get_successful_trajectories(threshold=GOOD, best_of=1)
        return agl.SFTAlgorithm(dataset=best, steps=STEPS, batch_size=BATCH, optimizer=optimizer)
    if name == "rejection":
        return agl.LightningRL(steps=STEPS, tasks_per_step=BATCH, optimizer=optimizer)
    return agl.DPO(steps=STEPS, tasks_per_step=BATCH, optimizer=optimizer)


def main(options: argparse.Namespace) -> agl.TrainingResult:
    options.directory.mkdir(parents=True, exist_ok=True)
    file = options.directory / f"sessions-{options.seed}.db"
    if not file.exists():
        record(options.model, file, options.seed)
    store = agl.LightningStore(file)
    trainer = agl.Trainer(
        agl.TrainConfig(evaluation={"modes": ["sampled"]}, run={"seed": options.seed}),
        store=store,
        algorithm=algorithm(options.algorithm, store),
        model=options.model,
        reward=REWARD,
        run_dir=options.directory / f"{options.algorithm}-{options.seed}",
    )
    method = {"method": "rejection", "success_threshold": GOOD} if options.algorithm == "rejection" else {}
    held_out = make_tasks("test", HELD_OUT, options.seed)
    return trainer.train(**method, eval_agent=AGENT, held_out_dataset=held_out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=LR, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path("runs/recorded"), help="of the sessions and the runs")
    result = main(parser.parse_args())
    learned = result.recorded
    print(f"{learned.sessions} sessions, left out: {dict(learned.left_out)}; {result.held_out['sampled']}")
