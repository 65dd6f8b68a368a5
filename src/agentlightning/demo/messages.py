"""The demo on a pretrained model: an ordinary agent that reads customers' messages, its tasks and their score.

A task is a JSON object `{"id", "message", "product", "order"}`; the agent sees only the message. No sentence and no
product of the training tasks occurs in another, so what is measured is reading and not remembering.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any, Final

from agentlightning.demo.agent import client

SYSTEM: Final = "Read the customer's message. Reply with the order number, nothing else."
SENTENCES: Final = (
    "I was charged twice for my {product}.",
    "I want my money back for the {product}.",
    "My {product} has not arrived yet.",
    "The parcel with the {product} is {days} days late.",
    "Where is my {product}? The tracking page shows nothing.",
    "You sent the {product} to the wrong address.",
    "The courier left my {product} in the rain.",
    "When will the {product} be delivered?",
    "The {product} does not turn on.",
    "The screen of my {product} flickers.",
    "My {product} makes a loud noise and stops.",
    "The {product} shows an error after the update.",
    "The battery of the {product} is empty after {days} days.",
    "How do I reset the {product}?",
    "My invoice for the {product} shows the wrong amount.",
    "Can you send the {product} by express mail?",
)
PRODUCTS: Final = (
    "kettle", "lamp", "phone", "printer", "camera", "router", "speaker", "watch",
    "blender", "heater", "fridge", "radio", "toaster", "scale", "drill", "tent",
)  # fmt: skip
UNSEEN: Final = 4
"""The last of SENTENCES and PRODUCTS, which no training task has."""
FRAMES: Final = (
    "{sentence} My order is {order}.",
    "Order {order}: {sentence}",
    "Hello, this is about order {order}. {sentence}",
    "{sentence} (order {order})",
)
TASKS: Final = 84
"""As many as the steps train on."""
HELD_OUT: Final = 64


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
        message = rng.choice(FRAMES).format(sentence=sentence, order=order)
        tasks.append({"id": f"{split}-{number}", "message": message, "product": product, "order": order})
    return tasks


def tasks(seed: int) -> dict[str, list[Any]]:
    """The arguments of `Trainer.fit` that are tasks."""
    return {
        "train_dataset": make_tasks("train", TASKS, seed),
        "held_out_dataset": make_tasks("test", HELD_OUT, seed),
    }
