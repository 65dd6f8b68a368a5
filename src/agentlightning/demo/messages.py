"""The demo on a pretrained model: an ordinary agent that reads customers' messages, its tasks and their score.

A task is a JSON object `{"id", "message", "product", "order"}`; the agent sees only the message. No sentence and no
product of the training tasks occurs in another, so what is measured is reading and not remembering.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from agentlightning.demo.agent import client

SYSTEM = "Read the customer's message. Reply with the order number, nothing else."
WORDS: Any = orjson.loads(Path(__file__).with_name("words.json").read_bytes())["messages"]
SENTENCES: list[str] = WORDS["sentences"]
PRODUCTS: list[str] = WORDS["products"]
UNSEEN = 4
"""The last of SENTENCES and PRODUCTS, which no training task has."""
TASKS = 84
"""As many as the steps train on."""
HELD_OUT = 64


def read(message: str, base_url: str, model: str = "policy") -> str:
    chat = client().with_options(base_url=base_url).chat.completions
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": message}]
    return chat.create(model=model, messages=messages, max_tokens=12).choices[0].message.content or ""


def score(task: Mapping[str, Any], output: str) -> float:
    """F1 of the answer's words: 1 for the order number alone, less for each word beside it, 0 without it."""
    words = re.findall(r"[a-z0-9]+", output.lower())
    return 2 * (task["order"].lower() in words) / (len(words) + 1)


def make_tasks(split: str, count: int, seed: int) -> list[dict[str, Any]]:
    rng, seen = random.Random(f"{split}/{seed}"), slice(None, -UNSEEN) if split == "train" else slice(-UNSEEN, None)
    tasks: list[dict[str, Any]] = []
    for number in range(count):
        product, order = rng.choice(PRODUCTS[seen]), f"{rng.choice('ABKRTX')}{rng.randint(1000, 9999)}"
        sentence = rng.choice(SENTENCES[seen]).format(product=product, days=rng.randint(2, 30))
        message = rng.choice(WORDS["frames"]).format(sentence=sentence, order=order)
        tasks.append({"id": f"{split}-{number}", "message": message, "product": product, "order": order})
    return tasks


def tasks(seed: int) -> dict[str, list[Any]]:
    """The arguments of `Trainer.fit` that are tasks."""
    return {"train_dataset": make_tasks("train", TASKS, seed), "held_out_dataset": make_tasks("test", HELD_OUT, seed)}
