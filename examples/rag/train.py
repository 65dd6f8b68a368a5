"""Trains the agent of `agent.py` to answer multi-hop questions, and prints the reward on questions it has not seen.

    python train.py                                # generated questions and a new tiny model: minutes on two cores
    python train.py --model smollm2-135m           # the same questions and a pretrained model
    python train.py --musique train.jsonl --index wiki/ --model path/to/model

The first two begin with a warm start on demonstrations. Without --index the documents are those that come with the
questions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.models.resolve import TINY
from agentlightning.models.tiny import make_tiny
from agentlightning.util.settings import load_settings

HERE = Path(__file__).parent
try:
    import reward
    from agent import INSTRUCTIONS, search
    from generated import World
    from musique import read_questions
    from retriever import Index, serving
except ModuleNotFoundError as error:
    sys.exit(f"this example needs the module {error.name}: pip install -r {HERE / 'requirements.txt'}")

VALIDATION = 32
"""Generated questions that choose the best checkpoint."""


@dataclass(frozen=True)
class Recipe:
    """What depends on the model."""

    steps: int = 12
    """Updates by reinforcement learning."""
    tasks: int = 8
    group: int = 8
    """Questions of each, and rollouts of each of these."""
    held_out: int = 96
    """Generated questions that the gain is measured on."""
    every: int | None = 6
    """Updates between checkpoints, of which VALIDATION questions choose the best. None: the last one is written."""
    max_tokens: int = 64
    """Of an answer."""
    truncated_reward: float | None = None
    """The reward of a rollout in which an answer was cut off there. None: the one it was given."""
    lr: float | None = None
    """Their learning rate. None: by the size of the model."""
    copy_steps: int = 0
    warm_steps: int = 0
    """Updates of the warm start, first with exercises in copying, then with demonstrations. 0: there are none."""
    batch: int = 16
    """Conversations of each."""
    clean: float = 1.0
    habit: float = 0.0
    """After the `clean` share of the demonstrations, a `habit` share answers after one search, and so does the policy
    that reinforcement learning starts from."""
    optimizer: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the warm start."""
    policy: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further settings of the policy."""


SMALL = {"token_budget": 1024, "kv_cache_bytes": 1 << 30, "prefix_cache_bytes": 1 << 28}
"""Bounds of memory: of an update, and of the engine."""
MUON = {"type": "muon", "muon_lr": 0.02, "lr": 6e-3, "schedule": "linear", "warmup_steps": 10}
RECIPES = {
    "tiny": Recipe(lr=3e-4, copy_steps=100, warm_steps=420, clean=0.8, habit=0.5, optimizer=MUON),
    "smollm2-135m": Recipe(
        steps=6,
        tasks=6,
        group=6,
        held_out=64,
        every=None,
        max_tokens=48,
        truncated_reward=0.0,
        lr=3e-5,
        warm_steps=5,
        batch=8,
        optimizer={"lr": 1e-4},
        policy=SMALL,
    ),
}
LAYERS = 3
"""Of the tiny model."""


def train(options: argparse.Namespace) -> agl.TrainingResult:
    folder = options.run_dir or Path("runs") / time.strftime("rag-%Y%m%d-%H%M%S")
    recipe = Recipe() if options.musique else RECIPES.get(options.model, Recipe())
    steps = options.steps or recipe.steps
    rate = options.lr or recipe.lr
    documents, tasks = from_musique(options.musique) if options.musique else generated(recipe, steps, options.seed)
    settings = {
        **start(folder, options.model, recipe, options.seed),
        "algorithm": {
            "steps": steps,
            "tasks_per_step": recipe.tasks,
            "group_size": recipe.group,
            "credit": options.credit,
            "reward_weights": reward.WEIGHTS,
            "aggregate": "token",
            **({} if recipe.truncated_reward is None else {"truncated_reward": recipe.truncated_reward}),
            "optimizer": {"schedule": "cosine", "warmup_steps": min(2, steps - 1), **({"lr": rate} if rate else {})},
        },
        "runner": {"concurrency": recipe.tasks * recipe.group, "timeout_seconds": 300, "hide": ["answer", "aliases"]},
        "run": {"checkpoint_every": recipe.every or steps},
        "evaluation": {"every": recipe.every or 0, "tasks": VALIDATION, "modes": ["sampled"]},
    }
    config = load_settings(agl.TrainConfig, toml=written(folder, settings), overrides=options.settings)
    with serving(documents=documents, index=options.index, k=options.k) as url:
        os.environ["RETRIEVER_URL"] = url
        trainer = agl.Trainer(config, reward=f"{HERE}/reward.py:score", run_dir=folder, seed=options.seed)
        return trainer.fit(f"{HERE}/agent.py:answer", **tasks)


def written(folder: Path, settings: dict[str, Any]) -> Path:
    """The file of the settings that the run begins with."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    file.write_text(json.dumps(settings, indent=2))
    return file


def from_musique(path: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """(documents, tasks) of a file."""
    questions = read_questions(path)
    print(f"{len(questions.tasks)} questions; {questions.unanswerable} that have no answer left out", file=sys.stderr)
    return questions.documents, {"train_dataset": questions.tasks}


def generated(recipe: Recipe, steps: int, seed: int) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """(documents, tasks) of a generated world."""
    world = World(seed)
    tasks = {
        "train_dataset": world.tasks("train", steps * recipe.tasks),
        "val_dataset": world.tasks("val", VALIDATION),
        "held_out_dataset": world.tasks("test", recipe.held_out),
    }
    return world.documents, tasks


def start(folder: Path, model: str, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Settings of the model that a run starts with, and of its warm start on demonstrations, with real searches."""
    steps = recipe.copy_steps + recipe.warm_steps
    if not steps:
        return {"policy": {"model": model, **recipe.policy}}
    world = World(seed)
    index = Index.of(world.documents)

    @cache
    def found(query: str) -> str:
        return "\n".join(f"{each['title']}: {each['text']}" for each in index.search(query, 2))

    tool = {"name": search.name, "description": search.description, "parameters": search.params_json_schema}
    opening = [{"role": "system", "content": INSTRUCTIONS}]
    tools = [{"type": "function", "function": tool}]
    count = recipe.warm_steps * recipe.batch
    shown = world.demonstrations(count, found, opening, tools, clean=recipe.clean, habit=recipe.habit)
    exercises = world.exercises(recipe.copy_steps * recipe.batch, opening, tools)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "demonstrations.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in [*exercises, *shown]))
    os.environ.setdefault("MAX_TOKENS", str(recipe.max_tokens))
    if model == TINY:
        model = str(make_tiny(folder / TINY, shown, seed=seed, layers=LAYERS))
    warm_start = {
        "dataset": str(file),
        "steps": steps,
        "batch_size": recipe.batch,
        "shuffle": False,
        "optimizer": recipe.optimizer,
    }
    return {"policy": {"model": model, **recipe.policy}, "warm_start": warm_start}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--musique", type=Path, help="questions in the JSONL format of MuSiQue")
    parser.add_argument("--index", type=Path, help="an index of documents: see retriever.py --save")
    parser.add_argument("--k", type=int, default=2, help="documents that a search gives")
    parser.add_argument("--model", default=TINY, help=f"{', '.join(RECIPES)}, or your own; needed with --musique")
    parser.add_argument("--steps", type=int, help="default: by the model")
    parser.add_argument("--lr", type=float, help="default: by the model")
    parser.add_argument("--credit", default="group_relative", help="the credit rule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("settings", nargs="*", help="section.key=value, as for agl train")
    options = parser.parse_args()
    if (options.musique or options.index) and options.model == TINY:
        parser.error(
            "--musique and --index need a --model: the tiny one knows the words of the generated questions only"
        )
    return options


if __name__ == "__main__":
    try:
        print(json.dumps(train(parse()).as_json()["held_out"], indent=2))
    except (agl.errors.AgentLightningError, OSError, RuntimeError) as error:
        sys.exit(str(error))
