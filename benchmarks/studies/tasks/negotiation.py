"""Two agents divide two things; each knows only what it values, and the reward is what the deal is worth to both.

Each agent has a favourite, worth 3 to it, or 2 if it cares less, and the other thing is worth 1. The first says what it
asks for and how much it cares; the second takes one thing, leaving the other; the first accepts or refuses. The reward
is the value of the deal over that of the best one, and 0 without a deal. The best policies tell the truth, give way to
whoever cares more, and accept.
"""

from __future__ import annotations

import itertools
import random
from typing import ClassVar

from tasks.base import Call, Environment, Episode, Split, Task

THINGS = ("book", "hat")
CARES = {"much": 3, "little": 2}
NAMES = tuple(f"{first}{second}" for first in ("an", "bo", "cy", "di", "el") for second in ("a", "e", "i", "o", "u"))
"""Of the agents; they mean nothing and tell tasks apart."""
ACCEPT, REFUSE = "accept", "refuse"


class Negotiation(Environment):
    """A proposer and a responder, one policy."""

    name: ClassVar[str] = "negotiation"

    @property
    def words(self) -> tuple[str, ...]:
        return ("ask", "take", "close", *THINGS, *CARES, *NAMES, ACCEPT, REFUSE)

    def tasks(self, split: Split, count: int, seed: int = 0) -> list[Task]:
        """Held-out tasks are of names that no training task has."""
        rng = random.Random(f"negotiation/{split}/{seed}")
        names = NAMES[::5] if split == "held_out" else [name for name in NAMES if name not in NAMES[::5]]
        wishes = [f"{thing} {care}" for thing, care in itertools.product(THINGS, CARES)]
        every = list(itertools.product(itertools.permutations(names, 2), wishes, wishes))
        chosen = rng.sample(every, min(count, len(every)))
        return [{"names": " ".join(pair), "first": first, "second": second} for pair, first, second in chosen]

    def episode(self, task: Task) -> Episode:
        first, second = task["names"].split()
        said = yield Call(f"ask {first} {task['first']}", "proposer", 3)
        taken = yield Call(f"take {second} {task['second']} {said}", "responder")
        if taken not in THINGS:
            return 0.0
        left = _other(taken)
        verdict = yield Call(f"close {first} {task['first']} {left}", "proposer")
        if verdict != ACCEPT:
            return 0.0
        return _worth(task, left) / max(_worth(task, thing) for thing in THINGS)

    def best_answer(self, task: Task, call: Call) -> str:
        words = call.prompt.split()
        if words[0] == "ask":
            return task["first"]
        if words[0] == "close":
            return ACCEPT
        _, _, own, care, asked, their_care = words
        return own if asked != own or CARES[care] > CARES[their_care] else _other(own)

    def demonstrations(self, count: int, seed: int = 0) -> list[tuple[Call, str]]:
        """Everything is said, taken, accepted and refused at random."""
        rng = random.Random(f"negotiation/demonstrations/{seed}")
        found: list[tuple[Call, str]] = []
        for _ in range(count):
            name, own, said = rng.choice(NAMES), _wish(rng), _wish(rng)
            found.append(
                rng.choice(
                    [
                        (Call(f"ask {name} {own}", "proposer", 3), said),
                        (Call(f"take {name} {own} {said}", "responder"), rng.choice(THINGS)),
                        (Call(f"close {name} {own} {rng.choice(THINGS)}", "proposer"), rng.choice((ACCEPT, REFUSE))),
                    ]
                )
            )
        return found


def _wish(rng: random.Random) -> str:
    return f"{rng.choice(THINGS)} {rng.choice(list(CARES))}"


def _other(thing: str) -> str:
    return THINGS[1 - THINGS.index(thing)]


def _worth(task: Task, given_to_first: str) -> int:
    """What the deal is worth to both."""
    return sum(
        CARES[wish.split()[1]] if wish.split()[0] == thing else 1
        for wish, thing in ((task["first"], given_to_first), (task["second"], _other(given_to_first)))
    )


agent = Negotiation()
