"""A corridor of 30 steps with a reward at its end: 1 if every decision on the way was right.

At each step the agent sees its position, the scenery, and whether it is still on the right way, and goes in one of
a few directions. At the decisive steps one direction is right, always the same, and any other leads astray, which the
next observation shows; at all other steps nothing depends on it. Scenery means nothing; it tells tasks apart.
"""

from __future__ import annotations

import random
import zlib
from typing import ClassVar

from tasks.base import Call, Environment, Episode, Split, Task

LENGTH = 30
SCENERY = ("oak", "elm", "fir", "ash")
DIRECTIONS = ("left", "right", "up", "down")
ON_THE_WAY, ASTRAY = "fine", "lost"


class Corridor(Environment):
    """`decisive` steps of 30 matter, with `directions` to choose from at each."""

    name: ClassVar[str] = "corridor"

    def __init__(self, decisive: int = 3, directions: int = 2) -> None:
        rng = random.Random(f"corridor/{decisive}/{directions}")
        self.directions = DIRECTIONS[:directions]
        positions = sorted(rng.sample(range(LENGTH), decisive))
        self.right = {position: rng.choice(self.directions) for position in positions}
        """By position, the direction to take."""

    @property
    def words(self) -> tuple[str, ...]:
        return (*(f"step{i}" for i in range(LENGTH)), *SCENERY, ON_THE_WAY, ASTRAY, *self.directions)

    def tasks(self, split: Split, count: int, seed: int = 0) -> list[Task]:
        rng = random.Random(f"corridor/{split}/{seed}")
        found: dict[str, Task] = {}
        while len(found) < count:
            scenery = " ".join(rng.choices(SCENERY, k=LENGTH))
            if (zlib.crc32(scenery.encode()) % 5 == 0) == (split == "held_out"):
                found[scenery] = {"scenery": scenery}
        return list(found.values())

    def episode(self, task: Task) -> Episode:
        status = ON_THE_WAY
        for position, scenery in enumerate(task["scenery"].split()):
            direction = yield Call(f"step{position} {scenery} {status}")
            if self.right.get(position, direction) != direction:
                status = ASTRAY
        return float(status == ON_THE_WAY)

    def best_answer(self, task: Task, call: Call) -> str:
        position = int(call.prompt.split()[0].removeprefix("step"))
        return self.right.get(position, self.directions[0])

    def demonstrations(self, count: int, seed: int = 0) -> list[tuple[Call, str]]:
        """Every direction is equally likely, everywhere."""
        rng = random.Random(f"corridor/demonstrations/{seed}")

        def observation() -> str:
            return f"step{rng.randrange(LENGTH)} {rng.choice(SCENERY)} {rng.choice((ON_THE_WAY, ASTRAY))}"

        return [(Call(observation()), rng.choice(self.directions)) for _ in range(count)]


agent = Corridor()
