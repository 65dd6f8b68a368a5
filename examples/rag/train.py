"""Trains the agent of `agent.py` to answer multi-hop questions, and prints the reward on questions it has not seen.

    python train.py                                # generated questions and a new tiny model: minutes on two cores
    python train.py --musique train.jsonl --index wiki/ --model path/to/model

Without --model a tiny one is made and warmed up on demonstrations. Without --index the documents are those that come
with the questions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import agentlightning as agl
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

TASKS, GROUP = 8, 8
"""Questions of a step, and rollouts of each."""
HELD_OUT, VALIDATION = 96, 32
"""Generated questions that the gain is measured on, and that choose the best checkpoint."""
COPY, WARM, BATCH, CLEAN, HABIT = 100, 420, 16, 0.8, 0.5
"""Updates of the warm start with exercises in copying and with demonstrations, and conversations of each. After the
CLEAN share of the demonstrations, a HABIT share answers after one search, and so does the policy that reinforcement
learning starts from."""
LAYERS = 3
"""Of the tiny model."""
SFT = {"type": "muon", "muon_lr": 0.02, "lr": 6e-3, "schedule": "linear"}


def train(options: argparse.Namespace) -> agl.TrainingResult:
    folder = options.run_dir or Path("runs") / time.strftime("rag-%Y%m%d-%H%M%S")
    documents, tasks = from_musique(options.musique) if options.musique else generated(options)
    model = {"policy": {"model": options.model}} if options.model else tiny(folder, options.seed)
    rate = {} if options.model and options.lr is None else {"lr": options.lr or 3e-4}
    settings = {
        **model,
        "algorithm": {
            "steps": options.steps,
            "tasks_per_step": TASKS,
            "group_size": GROUP,
            "credit": options.credit,
            "reward_weights": reward.WEIGHTS,
            "aggregate": "token",
            "optimizer": {**rate, "schedule": "cosine", "warmup_steps": min(2, options.steps - 1)},
        },
        "runner": {"concurrency": TASKS * GROUP, "timeout_seconds": 300, "hide": ["answer", "aliases"]},
        "evaluation": {"every": 6, "tasks": VALIDATION, "modes": ["sampled"]},
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


def generated(options: argparse.Namespace) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """(documents, tasks) of a generated world."""
    world = World(options.seed)
    tasks = {
        "train_dataset": world.tasks("train", options.steps * TASKS),
        "val_dataset": world.tasks("val", VALIDATION),
        "held_out_dataset": world.tasks("test", HELD_OUT),
    }
    return world.documents, tasks


def tiny(folder: Path, seed: int) -> dict[str, Any]:
    """Settings of a run that starts with a new tiny model and warms it up on demonstrations, with real searches."""
    world = World(seed)
    index = Index.of(world.documents)

    @cache
    def found(query: str) -> str:
        return "\n".join(f"{each['title']}: {each['text']}" for each in index.search(query, 2))

    tool = {"name": search.name, "description": search.description, "parameters": search.params_json_schema}
    opening = [{"role": "system", "content": INSTRUCTIONS}]
    tools = [{"type": "function", "function": tool}]
    shown = world.demonstrations(WARM * BATCH, found, opening, tools, clean=CLEAN, habit=HABIT)
    exercises = world.exercises(COPY * BATCH, opening, tools)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "demonstrations.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in [*exercises, *shown]))
    os.environ.setdefault("MAX_TOKENS", "64")
    steps = COPY + WARM
    optimizer = {**SFT, "warmup_steps": min(10, steps // 2)}
    warm_start = {"dataset": str(file), "steps": steps, "batch_size": BATCH, "shuffle": False, "optimizer": optimizer}
    return {
        "policy": {"model": str(make_tiny(folder / "tiny", shown, seed=seed, layers=LAYERS))},
        "warm_start": warm_start,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--musique", type=Path, help="questions in the JSONL format of MuSiQue")
    parser.add_argument("--index", type=Path, help="an index of documents: see retriever.py --save")
    parser.add_argument("--k", type=int, default=2, help="documents that a search gives")
    parser.add_argument("--model", help="a model that transformers loads; needed with --musique")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, help="default: 3e-4 for the tiny model, else by the size of the model")
    parser.add_argument("--credit", default="group_relative", help="the credit rule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("settings", nargs="*", help="section.key=value, as for agl train")
    options = parser.parse_args()
    if (options.musique or options.index) and not options.model:
        parser.error(
            "--musique and --index need a --model: the tiny one knows the words of the generated questions only"
        )
    return options


if __name__ == "__main__":
    try:
        print(json.dumps(train(parse()).as_json()["held_out"], indent=2))
    except (agl.AgentLightningError, OSError, RuntimeError) as error:
        sys.exit(str(error))
