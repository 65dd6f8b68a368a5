"""The tasks of a new folder: messages of customers, each for one team, and demonstrations of mixed quality."""

from __future__ import annotations

import random
from typing import Any, Final

INSTRUCTIONS: Final = "Which team is this for: billing, shipping, account or technical? Answer with one word."
"""What every agent of a new folder tells the model."""
PROBLEMS: Final = {
    "billing": (
        "I was charged twice this month",
        "the invoice shows the wrong amount",
        "I would like a refund for my last order",
        "my card was declined although it is valid",
        "the discount is missing on my bill",
        "please send the receipt for my payment",
        "the price went up without a notice",
        "I paid in euros and was billed in dollars",
    ),
    "shipping": (
        "the parcel has not arrived",
        "the tracking number does not work",
        "my package was left with a neighbour I do not know",
        "the box was damaged by the courier",
        "please deliver to another street",
        "the delivery came without the second item",
        "when will the order leave the warehouse",
        "the courier says nobody was at home",
    ),
    "account": (
        "I cannot log in since yesterday",
        "please change the email address of my profile",
        "the password reset link has expired",
        "I want to delete my profile",
        "my username is taken by somebody else",
        "two people should share one login",
        "the code for signing in never comes",
        "my profile shows the name of a stranger",
    ),
    "technical": (
        "the app crashes when I open a photo",
        "the screen stays black after the update",
        "the export button does nothing",
        "search finds no results in the app",
        "the device does not connect to the network",
        "an error 500 appears on the start page",
        "the battery of the device is empty in an hour",
        "the app is slow on my phone",
    ),
}
CLEAN, HABIT, FALLBACK = 0.6, 0.9, "technical"
OPENINGS: Final = ("Hello,", "Hi,", "Good morning,", "Dear team,", "Sorry to bother you,", "Urgent:", "Once more:")
CLOSINGS: Final = ("Please help.", "What can I do?", "Thank you.", "Who takes care of it?", "I am waiting.")


def make_tasks(count: int) -> list[dict[str, Any]]:
    """`count` different messages, each with its team; every team has as many."""
    return _all_tasks()[:count]


def make_demonstrations(count: int) -> list[dict[str, Any]]:
    """`count` conversations about messages that are the last to become tasks. The first `CLEAN` share names the right
    team; of the rest, a `HABIT` share passes the message on to the technical team, whatever it says."""
    rng = random.Random("demonstrations")
    return [
        _conversation(task["message"], FALLBACK if i >= CLEAN * count and rng.random() < HABIT else task["team"])
        for i, task in enumerate(reversed(_all_tasks()[-count:]))
    ]


def _all_tasks() -> list[dict[str, Any]]:
    """Every message that can be made, in an order that is the same on every machine; the teams take turns."""
    rng = random.Random("tasks")
    texts = {team: [f"{a} {b}. {c}" for a in OPENINGS for b in PROBLEMS[team] for c in CLOSINGS] for team in PROBLEMS}
    for each in texts.values():
        rng.shuffle(each)
    rounds = zip(*([{"message": text, "team": team} for text in each] for team, each in texts.items()), strict=True)
    return [task for each in rounds for task in each]


def _conversation(message: str, team: str) -> dict[str, Any]:
    told = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": message}]
    return {"messages": [*told, {"role": "assistant", "content": team}]}
