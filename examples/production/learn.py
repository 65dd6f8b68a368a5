"""The night's work: learn from the sessions that have feedback, and put the new model in place if it is better.

    python learn.py --store store.db --current models/current --golden golden.jsonl

Exit status 0: the link --current points to a better model, which `agl serve` loads when it starts again. 3: it is what
it was, because the new one is not shown to be better on the golden questions, or because there is no feedback.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import agentlightning as agl

HERE = Path(__file__).parent
SAME = 3


def learn(options: argparse.Namespace, run_dir: Path) -> agl.TrainingResult:
    algorithm = agl.LightningRL(tasks_per_step=options.tasks_per_step, group_size=8, optimizer={"lr": options.lr})
    trainer = agl.Trainer(
        agl.TrainConfig(runner={"hide": ["department"]}, evaluation={"modes": ["sampled"]}),
        store=agl.LightningStore(options.store),
        algorithm=algorithm,
        model=str(options.current.resolve()),
        reward=f"{HERE}/support.py:score",
        run_dir=run_dir,
    )
    return trainer.train(
        options.updates,
        target_agent="support",
        eval_agent=f"{HERE}/support.py:route",
        held_out_dataset=str(options.golden),
    )


def point(link: Path, target: Path) -> None:
    """Let a link point to a directory. It never points nowhere: the new link takes the place of the old one."""
    new = link.with_name(f".{link.name}-{os.getpid()}")
    new.symlink_to(target.resolve(), target_is_directory=True)
    new.replace(link)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="a file, or postgresql://...")
    parser.add_argument("--current", required=True, type=Path, help="the link to the model that is served")
    parser.add_argument("--golden", required=True, type=Path, help="questions and departments; never learned from")
    parser.add_argument("--runs", type=Path, default=Path("nights"), help="where the runs are kept")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--tasks-per-step", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-4, help="for a model of usual size some 1e-5")
    options = parser.parse_args(arguments)
    try:
        result = learn(options, options.runs / time.strftime("%Y%m%d-%H%M%S"))
    except agl.errors.DatasetError as error:
        print(f"nothing learned: {error}", file=sys.stderr)
        return SAME
    print(json.dumps(result.as_json()))
    gain = result.held_out["sampled"]
    if not gain.interval[0] > 0:
        print(f"not shown to be better, interval of the gain {gain.interval}; nothing changed", file=sys.stderr)
        return SAME
    point(options.current, result.checkpoint)
    print(f"{options.current} is now {result.checkpoint}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
