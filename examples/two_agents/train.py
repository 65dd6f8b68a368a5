"""Trains the scout and the guide of `agent.py` together, then each alone, and prints what each run reached.

    python train.py [DIRECTORY]

Before training each says the right word half of the time, and another one otherwise: 37.5% of the doors are found. The
best that one of them can learn alone is 50%, because the other still errs half of the time. Together they find nearly
all doors. The adapters of both are trained in the same rollouts, over one tiny model.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from agent import WORDS, messages

import agentlightning as agl
from agentlightning.models.tiny import make_tiny

SEED = 0
RUNS: dict[str, dict[str, Any]] = {
    "together": {"scout": agl.Lora(r=8), "guide": agl.Lora(r=8)},
    "scout alone": {"scout": agl.Lora(r=8), "guide": "frozen"},
    "guide alone": {"scout": "frozen", "guide": agl.Lora(r=8)},
}


def make_speaker(directory: Path) -> Path:
    """A tiny model that answers with the word it heard half of the time, and with each other word a quarter of it."""
    conversations = [
        [*messages(agent, heard), {"role": "assistant", "content": word}]
        for agent in ("scout", "guide")
        for heard in WORDS
        for word in (*WORDS, heard)
    ]
    model = make_tiny(directory / "new", conversations, seed=SEED)
    trained = directory / "model"
    settings: Any = {"steps": 200, "batch_size": len(conversations), "optimizer": {"lr": 3e-3}, "seed": SEED}
    agl.SFTAlgorithm(model, conversations, output=trained, **settings).train()
    return trained


def train(name: str, model: Path, directory: Path, steps: int) -> float:
    """The share of doors that are found after training the agents of a run."""
    tasks = [{"open": WORDS[number % len(WORDS)]} for number in range(60)]
    random.Random(SEED).shuffle(tasks)
    trainer = agl.Trainer(
        agl.TrainConfig(
            policy=agl.PolicyConfig(model=str(model), device="cpu"),
            evaluation=agl.EvaluationConfig(modes=("sampled",), every=0),
        ),
        algorithm=agl.LightningRL(
            steps=steps, tasks_per_step=3, group_size=16, agents=RUNS[name], optimizer={"lr": 3e-3}
        ),
        run_dir=directory / name.replace(" ", "-"),
        seed=SEED,
    )
    agent = f"{Path(__file__).with_name('agent.py')}:play"
    result = trainer.fit(agent, tasks, tasks[:6], held_out_dataset=tasks)
    return result.held_out["sampled"].after


def main(directory: Path, steps: int = 25) -> dict[str, float]:
    """The share of doors found after each run."""
    model = make_speaker(directory)
    found = {name: train(name, model, directory, steps) for name in RUNS}
    for name, share in found.items():
        print(f"{name:12} {share:.0%} of the doors")
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary))
