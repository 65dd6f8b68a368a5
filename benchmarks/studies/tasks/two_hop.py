"""Two-hop retrieval: where does the author of a book live? One document has the author, another the city.

The agent searches by a name and sees what it has found so far, or answers; it has four calls. Books, authors and cities
are the same words in all tasks, their relations differ: nothing can be learned by heart. The reward is 1 for the right
city.
"""

from __future__ import annotations

import random
import zlib
from typing import ClassVar

from tasks.base import Call, Environment, Episode, Split, Task

BOOKS = ("atlas", "dune", "emma", "ivanhoe", "kim", "ulysses")
PEOPLE = ("ada", "ben", "cleo", "dora", "emil", "fay")
CITIES = ("cairo", "delhi", "kyoto", "lagos", "milan", "quito")
SEARCH, ANSWER, UNKNOWN = "search", "answer", "nothing"
CALLS = 4


class TwoHop(Environment):
    """One agent, two documents to find."""

    name: ClassVar[str] = "two_hop"

    @property
    def words(self) -> tuple[str, ...]:
        return ("question", "by", "in", SEARCH, ANSWER, UNKNOWN, *BOOKS, *PEOPLE, *CITIES)

    def tasks(self, split: Split, count: int, seed: int = 0) -> list[Task]:
        rng = random.Random(f"two_hop/{split}/{seed}")
        found: dict[str, Task] = {}
        while len(found) < count:
            authors, homes = rng.sample(PEOPLE, len(PEOPLE)), rng.sample(CITIES, len(CITIES))
            documents = {book: f"{book} by {author}" for book, author in zip(BOOKS, authors, strict=True)}
            documents |= {person: f"{person} in {city}" for person, city in zip(PEOPLE, homes, strict=True)}
            book = rng.choice(BOOKS)
            key = f"{book} {' '.join(documents.values())}"
            if (zlib.crc32(key.encode()) % 5 == 0) == (split == "held_out"):
                found[key] = {"book": book, "documents": documents}
        return list(found.values())

    def episode(self, task: Task) -> Episode:
        seen = f"question {task['book']}"
        for _ in range(CALLS):
            action, _, name = (yield Call(seen, max_words=3)).partition(" ")
            if action == ANSWER:
                return float(name == _city(task))
            seen += f" {task['documents'].get(name, UNKNOWN) if action == SEARCH else UNKNOWN}"
        return 0.0

    def best_answer(self, task: Task, call: Call) -> str:
        words = call.prompt.split()
        author = _author(task)
        if _city(task) in words:
            return f"{ANSWER} {_city(task)}"
        return f"{SEARCH} {author if author in words else task['book']}"

    def demonstrations(self, count: int, seed: int = 0) -> list[tuple[Call, str]]:
        """Episodes in which a third of the actions searches for, or answers with, a name at random."""
        rng = random.Random(f"two_hop/demonstrations/{seed}")
        found: list[tuple[Call, str]] = []
        for task in self.tasks("train", count, seed):
            episode = self.episode(task)
            call = next(episode)
            while True:
                action = self.best_answer(task, call)
                if rng.random() < 1 / 3:
                    action = rng.choice([f"{SEARCH} {rng.choice(BOOKS + PEOPLE)}", f"{ANSWER} {rng.choice(CITIES)}"])
                found.append((call, action))
                try:
                    call = episode.send(action)
                except StopIteration:
                    break
        rng.shuffle(found)
        return found[:count]


def _author(task: Task) -> str:
    return task["documents"][task["book"]].split()[-1]


def _city(task: Task) -> str:
    return task["documents"][_author(task)].split()[-1]


agent = TwoHop()
