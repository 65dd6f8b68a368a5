"""Trains the scout and the guide of `agent.py` together, then each alone, and prints what each run reached.

    python train.py [--model smollm2-135m] [--directory DIRECTORY]

Before training each says the right word half of the time, and another one otherwise: 37.5% of the doors are found. The
best that one of them can learn alone is 50%, because the other still errs half of the time. Together they find nearly
all doors. The adapters of both are trained in the same rollouts, over one model: a tiny new
one, or a pretrained one.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import WORDS, messages

import agentlightning as agl
from agentlightning.evaluation.intervals import Gain
from agentlightning.models.tiny import make_tiny

SEED = 0
RUNS: dict[str, dict[str, Any]] = {
    "together": {"scout": agl.Lora(r=8), "guide": agl.Lora(r=8)},
    "scout alone": {"scout": agl.Lora(r=8), "guide": "frozen"},
    "guide alone": {"scout": "frozen", "guide": agl.Lora(r=8)},
}


@dataclass(frozen=True)
class Recipe:
    """What depends on the model."""

    imitation_steps: int
    """Updates of the supervised learning that makes the speaker."""
    imitation_lr: float
    steps: int
    """Updates by reinforcement learning."""
    lr: float


RECIPES = {"tiny": Recipe(200, 3e-3, 25, 3e-3), "smollm2-135m": Recipe(10, 1e-4, 32, 5e-4)}


def make_speaker(directory: Path, model: str, recipe: Recipe) -> Path:
    """A model that answers with the word it heard half of the time, and with each other word a quarter of it."""
    conversations = [
        [*messages(agent, heard), {"role": "assistant", "content": word}]
        for agent in ("scout", "guide")
        for heard in WORDS
        for word in (*WORDS, heard)
    ]
    if model == "tiny":
        model = str(make_tiny(directory / "new", conversations, seed=SEED))
    trained = directory / "model"
    agl.SFTAlgorithm(
        model,
        conversations,
        output=trained,
        steps=recipe.imitation_steps,
        batch_size=len(conversations),
        optimizer=agl.config.OptimizerConfig(lr=recipe.imitation_lr),
        seed=SEED,
    ).train()
    return trained


def train(name: str, model: Path, directory: Path, recipe: Recipe) -> Gain:
    """The share of doors that are found before and after training the agents of a run."""
    tasks = [{"open": WORDS[number % len(WORDS)]} for number in range(60)]
    random.Random(SEED).shuffle(tasks)
    trainer = agl.Trainer(
        agl.TrainConfig(
            policy=agl.config.PolicyConfig(model=str(model), device="cpu"),
            evaluation=agl.config.EvaluationConfig(modes=("sampled",), every=0),
        ),
        algorithm=agl.LightningRL(
            steps=recipe.steps, tasks_per_step=3, group_size=16, agents=RUNS[name], optimizer={"lr": recipe.lr}
        ),
        run_dir=directory / name.replace(" ", "-"),
        seed=SEED,
    )
    agent = f"{Path(__file__).with_name('agent.py')}:play"
    return trainer.fit(agent, tasks, tasks[:6], held_out_dataset=tasks).held_out["sampled"]


def main(directory: Path, model: str = "tiny") -> dict[str, float]:
    """The share of doors found after each run."""
    recipe = RECIPES[model]
    speaker = make_speaker(directory, model, recipe)
    found = {name: train(name, speaker, directory, recipe) for name in RUNS}
    for name, gain in found.items():
        low, high = gain.interval
        print(f"{name:12} {gain.before:.0%} -> {gain.after:.0%} of the doors, gain {low:+.2f} to {high:+.2f}")
    return {name: gain.after for name, gain in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=RECIPES, default="tiny")
    parser.add_argument("--directory", type=Path, help="of the models and the runs; default: one that is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(options.directory or Path(temporary), options.model)
