"""Trains the writer and the rewriter of `agent.py`, and measures the gain on databases that it has not seen.

python train.py                                               # generated databases, a tiny model: minutes on a CPU
python train.py --model smollm2-135m                          # the same databases, a pretrained model
python train.py --config full.toml --spider PATH --model PATH # Spider and a model of your own
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from generate import write_demonstrations, write_spider
from spider_files import DEV, read_spider

import agentlightning as agl
from agentlightning.errors import MissingExtraError
from agentlightning.util.settings import load_settings

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """What depends on the model, for those that begin with a warm start."""

    config: str
    """The settings of the run."""
    clean: float
    """The share of the demonstrations, the first ones, without bad habits."""
    max_tokens: int
    """Of an answer."""


RECIPES = {"tiny": Recipe("small.toml", 0.7, 128), "smollm2-135m": Recipe("smollm2-135m.toml", 1.0, 48)}


def main(arguments: list[str] | None = None) -> agl.TrainingResult:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="settings of the run; default: by the model")
    parser.add_argument("--spider", type=Path, help="a folder as Spider is distributed; default: a small one is made")
    parser.add_argument("--model", default="tiny", help=f"{', '.join(RECIPES)}, or one of your own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path("runs") / time.strftime("spider-%Y%m%d-%H%M%S"))
    parser.add_argument("settings", nargs="*", help="section.key=value, as for agl train")
    options = parser.parse_args(arguments)
    for package in ("langgraph", "langchain_openai"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "examples")
    recipe = RECIPES.get(options.model)
    toml = options.config or HERE / (recipe.config if recipe else "small.toml")
    config = load_settings(agl.TrainConfig, toml=toml, overrides=options.settings)
    spider = options.spider or write_spider(options.run_dir / "spider", seed=options.seed)
    tasks, held_out = read_spider(spider), read_spider(spider, DEV)
    if recipe:
        os.environ.setdefault("SQL_TOKENS", str(recipe.max_tokens))
        number = (config.warm_start.steps or 360) * config.warm_start.batch_size
        file = options.run_dir / "demonstrations.jsonl"
        shown = write_demonstrations(file, options.seed, number, clean=recipe.clean)
        dataset = f"warm_start.dataset={json.dumps(str(shown))}"
        config = load_settings(agl.TrainConfig, toml=toml, overrides=[*options.settings, dataset])
    trainer = agl.Trainer(
        config, model=options.model, reward=f"{HERE / 'reward.py'}:score", run_dir=options.run_dir, seed=options.seed
    )
    return trainer.fit(f"{HERE / 'agent.py'}:answer", tasks, held_out_dataset=held_out)


if __name__ == "__main__":
    result = main()
    for mode, gain in result.held_out.items():
        low, high = gain.interval
        shown = f"gain {gain.gain:+.2f}, 95% interval {low:.2f} to {high:.2f}"
        print(f"{mode}: {gain.before:.2f} -> {gain.after:.2f}, {shown}")
    print(f"{result.seconds:.0f} s; curve: {result.curve}")
