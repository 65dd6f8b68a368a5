"""Writes what both algorithms learn from: word problems, and the demonstrations of the warm start.

python prepare.py [SEED]
"""

import json
import sys
from pathlib import Path

from agentlightning.demo.problems import demonstrations, make_tasks

FRESH = 1_000_000
"""Added to the seed of the problems to train on, so that few of them occur in the demonstrations."""


def main(folder: Path, seed: int) -> None:
    files = {
        "demonstrations": demonstrations(400 * 16, seed),
        "train": make_tasks("train", 256, seed + FRESH),
        "held_out": make_tasks("test", 128, seed),
    }
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main(Path(), int(sys.argv[1]) if len(sys.argv) > 1 else 0)
