"""Makes a tiny model that can hand over, as a start for training `handoffs.py` on a laptop.

    python examples/frameworks/teams/handoffs_start.py --agent "ENV/bin/python examples/frameworks/teams/handoffs.py" \
        --output model

The team runs twice and its model calls are recorded, answered by a script: the triage agent hands over to each of the
specialists once. With other questions in place of the recorded one these calls become demonstrations for a new model.
The specialists of the model answer what is theirs; its triage agent often hands over to either of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from start import Record, call, imitate, recorded

QUESTION, ANSWER = "qqqq", "zzzz"
"""Those of the recorded runs, which occur nowhere else in a prompt."""
SPECIALISTS = ("sums", "words")
CLEAN, EITHER = 0.6, 0.9
"""In the first share of the demonstrations the right specialist is chosen; of the others, a share chooses either."""
STEPS, BATCH = 150, 24
QUESTIONS_FILE = Path(__file__).with_name("questions.jsonl")


def script(specialist: str) -> Callable[[list[dict[str, Any]]], str]:
    """What the agents say if the triage agent chooses this specialist, as text of the model."""

    def answer(messages: list[dict[str, Any]]) -> str:
        system = " ".join(each["content"] for each in messages if each["role"] == "system")
        return call(f"transfer_to_{specialist}", {}) if "You are the triage agent" in system else ANSWER

    return answer


def answer(question: str) -> str:
    """What a specialist says to a question of its own."""
    numbers = [int(word) for word in question.rstrip("?").split() if word.isdigit()]
    return str(sum(numbers)) if numbers else question.split()[3][0]


def demonstrations(runs: dict[str, list[Record]], count: int, seed: int) -> list[Record]:
    """The recorded calls with the questions of the tasks, in the order of their runs."""
    tasks = [json.loads(line) for line in QUESTIONS_FILE.read_text().splitlines()]
    rng, texts, found = random.Random(seed), {name: json.dumps(run) for name, run in runs.items()}, list[Record]()
    while len(found) < count:
        task = rng.choice(tasks)
        guesses = len(found) >= CLEAN * count and rng.random() < EITHER
        chosen = rng.choice(SPECIALISTS) if guesses else task["specialist"]
        said = answer(task["question"]) if chosen == task["specialist"] else "I cannot say."
        found += json.loads(texts[chosen].replace(QUESTION, task["question"]).replace(ANSWER, said))
    return found[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a tiny model that can hand over.")
    parser.add_argument("--agent", required=True, help="the command line of the team")
    parser.add_argument("--output", required=True, type=Path, help="the directory for the model")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    command = shlex.split(given.agent)
    runs = {name: asyncio.run(recorded(command, {"question": QUESTION}, script(name))) for name in SPECIALISTS}
    imitate(demonstrations(runs, STEPS * BATCH, given.seed), given.output, STEPS, BATCH, given.seed)


if __name__ == "__main__":
    main()
