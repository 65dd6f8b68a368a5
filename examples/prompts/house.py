"""Requests for rooms, the rules of the house, and the reward of a booking."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAMES = ("Oslo", "Rome", "Lima", "Kyiv", "Cairo", "Delhi", "Board")


@dataclass(frozen=True)
class Room:
    name: str
    seats: int
    floor: int
    screen: bool
    quiet: bool
    free_from: int
    """Minutes before the meeting since when the room has been free."""

    def __str__(self) -> str:
        extras = f"{'screen' if self.screen else 'no screen'}, {'quiet' if self.quiet else 'street side'}"
        return (
            f"{self.name}: {self.seats} seats, floor {self.floor}, {extras}, free for {self.free_from} minutes before"
        )


@dataclass(frozen=True)
class Request:
    people: int
    wheelchair: bool
    remote: bool
    interview: bool
    director: bool

    def __str__(self) -> str:
        what = "an interview" if self.interview else "a meeting"
        notes = {
            "one uses a wheelchair": self.wheelchair,
            "one joins remotely": self.remote,
            "a director attends": self.director,
        }
        return ", ".join([f"{what} of {self.people} people", *(note for note, holds in notes.items() if holds)])


def allowed(rule: str, request: Request, room: Room) -> bool:
    """Whether a room keeps to a rule, by its name, as far as that concerns one room alone."""
    checks = {
        "seats": room.seats >= request.people,
        "wheelchair": not request.wheelchair or room.floor == 0,
        "screen": not request.remote or room.screen,
        "quiet": not request.interview or room.quiet,
        "board": request.director or room.name != "Board",
        "gap": room.free_from >= 15,
    }
    return checks[rule]


RULES = {
    "seats": "There must be a seat for everybody.",
    "smallest": "Of the rooms that are allowed, take the one with the fewest seats.",
    "wheelchair": "Where somebody uses a wheelchair, take a room on floor 0.",
    "screen": "Where somebody joins remotely, take a room with a screen.",
    "quiet": "Interviews are held in quiet rooms.",
    "board": "The room Board is for meetings with a director.",
    "gap": "A room must have been free for 15 minutes.",
}
"""What the house wants; by name, as the reward names them."""
OF_ONE_ROOM = tuple(rule for rule in RULES if rule != "smallest")
WEIGHTS = {"right": 1.0, **dict.fromkeys(RULES, 0.0)}
"""Only the right room counts. The rest tells the critic which rule was broken."""


def right_room(request: Request, rooms: Sequence[Room]) -> Room | None:
    fitting = [room for room in rooms if all(allowed(rule, request, room) for rule in OF_ONE_ROOM)]
    return min(fitting, key=lambda room: room.seats, default=None)


def make(rng: random.Random) -> tuple[Request, list[Room]]:
    """A request, and rooms of which one is right."""
    while True:
        request = Request(rng.randint(2, 9), *(rng.random() < 0.4 for _ in range(4)))
        rooms = [
            Room(
                name,
                seats,
                rng.choice((0, 0, 1, 2)),
                rng.random() < 0.6,
                rng.random() < 0.6,
                rng.choice((0, 20, 45, 60)),
            )
            for name, seats in zip(NAMES, rng.sample(range(3, 15), len(NAMES)), strict=True)
        ]
        if right_room(request, rooms):
            return request, rooms


def tasks(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    made = [make(rng) for _ in range(count)]
    return [{"request": str(request), "rooms": "\n".join(map(str, rooms))} for request, rooms in made]


ROOM = re.compile(r"(\w+): (\d+) seats, floor (\d+), (no )?screen, (quiet|street side), free for (\d+) minutes before")


def read(text: str) -> tuple[Request, list[Room]]:
    """Request and rooms that a text, such as a prompt, has in the words above."""
    asked = re.search(r"an? (meeting|interview) of (\d+) people.*", text)
    if asked is None:
        raise ValueError(f"there is no request in {text[:200]!r}")
    notes = [note in asked[0] for note in ("wheelchair", "remotely", "director")]
    request = Request(int(asked[2]), notes[0], notes[1], asked[1] == "interview", notes[2])
    rooms = [
        Room(name, int(seats), int(floor), not without, side == "quiet", int(minutes))
        for name, seats, floor, without, side, minutes in ROOM.findall(text)
    ]
    return request, rooms


def score(task: Mapping[str, Any], output: str) -> dict[str, float]:
    """1 for the right room, and for each rule whether it was kept."""
    request, rooms = read(f"{task['request']}\n{task['rooms']}")
    found = next((room for room in rooms if room.name == output.strip().rstrip(".")), None)
    if found is None:
        return dict.fromkeys(WEIGHTS, 0.0)
    kept = {rule: float(allowed(rule, request, found)) for rule in OF_ONE_ROOM}
    right = right_room(request, rooms)
    fitting = all(kept.values())
    return {"right": float(found == right), **kept, "smallest": float(not fitting or found == right)}
