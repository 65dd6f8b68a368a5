"""Improves the prompt of `agent.py`, and prints it with the gain on requests that the search has not seen.

python train.py --simulated                            # a simulated model on loopback, no key: seconds
OPENAI_API_KEY=... python train.py --model gpt-5-mini --budget 300
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from agent import TEMPLATE
from house import WEIGHTS, tasks
from simulated import simulated

import agentlightning as agl

HERE = Path(__file__).parent
TRAINING, VALIDATION, HELD_OUT = 150, 40, 120
"""Requests that the search learns from, that choose between its finalists, and that certify the gain."""


def train(options: argparse.Namespace) -> agl.TrainingResult:
    with contextlib.ExitStack() as stack:
        models: dict[str, Any] = {part: {"model": options.critic or options.model} for part in ("critic", "editor")}
        os.environ["BOOKING_MODEL"] = options.model
        if options.simulated:
            url = stack.enter_context(simulated(options.seed)).url
            models = {part: {"model": part, "base_url": url} for part in ("critic", "editor")}
            os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "BOOKING_MODEL": "follower"}
        elif options.prices:
            prices = dict(zip(("input_price", "output_price"), options.prices, strict=True))
            models = {part: {**model, **prices} for part, model in models.items()}
        trainer = agl.Trainer(
            algorithm=agl.APO(
                **models,
                search=options.search,
                budget={"calls": options.budget, "money": options.money},
                reward_weights=WEIGHTS,
            ),
            initial_resources={"prompt": agl.PromptTemplate(template=TEMPLATE)},
            reward=f"{HERE}/house.py:score",
            run_dir=options.run_dir or Path("runs") / time.strftime("prompts-%Y%m%d-%H%M%S"),
            seed=options.seed,
        )
        seed = 3 * options.seed
        return trainer.fit(
            f"{HERE}/agent.py:book",
            tasks(TRAINING, seed),
            tasks(VALIDATION, seed + 1),
            held_out_dataset=tasks(HELD_OUT, seed + 2),
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="a simulated model in place of an API")
    parser.add_argument("--model", default="gpt-5-mini", help="the model that books")
    parser.add_argument("--critic", help="the model that criticises and edits; default: the one that books")
    parser.add_argument("--search", choices=("reflective", "gepa", "beam"), default="reflective")
    parser.add_argument("--budget", type=int, default=400, help="bookings that the search may try")
    parser.add_argument("--money", type=float, help="what critic and editor may cost; needs --prices")
    parser.add_argument("--prices", type=float, nargs=2, metavar=("INPUT", "OUTPUT"), help="of a million tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    options = parser.parse_args(arguments)
    if not options.simulated and not os.environ.get("OPENAI_API_KEY"):
        parser.error("OPENAI_API_KEY is not set; set it, or try --simulated")
    return options


if __name__ == "__main__":
    try:
        result = train(parse())
    except agl.errors.AgentLightningError as error:
        sys.exit(str(error))
    gain = result.held_out["sampled"]
    print(result.best_prompt.template, result.diff(), sep="\n\n")
    low, high = gain.interval
    print(f"\n{gain.before:.2f} -> {gain.after:.2f}, gain {gain.gain:+.2f}, 95% interval {low:.2f} to {high:.2f}")
