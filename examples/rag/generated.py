"""A generated corpus of two-hop facts, questions about it, and demonstrations of mixed quality.

One document says who made a work, another where that person was born and with what trade:

    Amber Harbor: a novel by Mara Holt
    Mara Holt: born in Paris, pilot by trade

A question names a work and asks for a fact about its maker, so that both have to be found, one after the other. Each
maker has one work. A work's split follows from its title alone: no work or maker of one split is asked for in another.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "val", "test"]
Search = Callable[[str], str]
"""The retriever as the agent sees it: a query -> the text of what was found."""

KINDS = {"novel": "author", "film": "director", "song": "singer"}
FACTS = {
    "city": "In which city was the {maker} of the {kind} {title} born?",
    "job": "What was the trade of the {maker} of the {kind} {title}?",
}
FIRST = (
    "Ada Ben Cleo Dan Emil Fay Gus Hana Ivo Jill Kai Lea Mara Ned Olga Pia Quin Ron Sia Ted Uma Vic Wes Xenia"
    " Yuri Zoe Amos Bela Cora Dirk Elsa Finn Gwen Hugo Iris Joan Kurt Lola Milo Nora"
)
LAST = (
    "Abel Bond Cole Dahl Eco Ford Gray Holt Ibsen Jung Kerr Lang Mann Nash Otto Park Quade Roth Shaw Tate Udall"
    " Voss West Young Zorn Adler Bloch Crane Drake Evans Frost Glass Hess Irwin Joyce Klein Lowe Marsh Nolan Orr"
)
LIGHT = (
    "Amber Blue Cold Dark Early Final Golden Hidden Iron Jade Kind Late Mad New Old Pale Quiet Red Silent Tall"
    " Upper Vast White Plain Zero Azure Brave Crimson Deep Empty Fallen Green Half Inner Lost Misty Noble Open"
    " Proud Rare"
)
THING = (
    "Anchor Bridge Castle Dawn Engine Forest Garden Harbor Island Jungle Key Lake Moon Night Ocean Palace Queen"
    " River Star Tower Valley Winter Yard Arrow Bell Clock Door Echo Flame Gate House Ink Jewel Kite Lamp Mirror"
    " Nest Orchard Path Road"
)
CITIES = (
    "Accra Berlin Cairo Delhi Essen Fargo Genoa Hanoi Izmir Jena Kyoto Lagos Milan Nice Oslo Paris Quito Riga"
    " Sofia Tokyo Utica Vienna Warsaw York Zagreb"
)
JOBS = (
    "actor baker clerk dentist editor farmer guard hunter judge lawyer miner nurse painter pilot porter sailor"
    " tailor teacher vet waiter"
)
ANSWERS = {"city": CITIES.split(), "job": JOBS.split()}


@dataclass(frozen=True, slots=True)
class Work:
    title: str
    kind: str
    maker: str
    city: str
    job: str

    @property
    def split(self) -> Split:
        """80% of the titles are for training, 10% for validation, 10% for the final measurement."""
        bucket = zlib.crc32(self.title.encode()) % 10
        return "test" if bucket == 0 else "val" if bucket == 1 else "train"

    @property
    def documents(self) -> list[dict[str, str]]:
        return [
            {"title": self.title, "text": f"a {self.kind} by {self.maker}"},
            {"title": self.maker, "text": f"born in {self.city}, {self.job} by trade"},
        ]

    def task(self, fact: str) -> dict[str, Any]:
        question = FACTS[fact].format(maker=KINDS[self.kind], kind=self.kind, title=self.title)
        return {"id": f"{self.title}/{fact}", "question": question, "answer": self.city if fact == "city" else self.job}


class World:
    """Who made what, drawn from a seed."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(f"world/{seed}")
        makers = [f"{first} {last}" for first in FIRST.split() for last in LAST.split()]
        rng.shuffle(makers)
        titles = [f"{light} {thing}" for light in LIGHT.split() for thing in THING.split()]
        self.works = [
            Work(title, rng.choice(list(KINDS)), maker, rng.choice(ANSWERS["city"]), rng.choice(ANSWERS["job"]))
            for title, maker in zip(titles, makers, strict=True)
        ]
        self._seed = seed

    @property
    def documents(self) -> list[dict[str, str]]:
        """All documents, in an order of their own."""
        found = [document for work in self.works for document in work.documents]
        random.Random(f"documents/{self._seed}").shuffle(found)
        return found

    def tasks(self, split: Split, count: int) -> list[dict[str, Any]]:
        """`count` different questions of a split. Raises ValueError where it has fewer."""
        return [work.task(fact) for work, fact in self._questions(split, count)]

    def _questions(self, split: Split, count: int) -> list[tuple[Work, str]]:
        found = [(work, fact) for work in self.works if work.split == split for fact in FACTS]
        if count > len(found):
            raise ValueError(f"the split {split} has {len(found)} questions, not {count}")
        random.Random(f"{split}/{self._seed}").shuffle(found)
        return found[:count]

    def exercises(self, count: int, opening: Sequence[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
        """`count` conversations of one turn that teach a new model to copy: names into a query, or a fact from a
        document into an answer. From whole conversations alone some seeds do not learn it in time."""
        rng = random.Random(f"exercises/{self._seed}")
        works = [work for work in self.works if work.split == "train"]
        make = (_repeat, _read)
        return [{"messages": [*opening, *rng.choice(make)(works, rng)], "tools": list(tools)} for _ in range(count)]

    def demonstrations(
        self,
        count: int,
        search: Search,
        opening: Sequence[dict[str, Any]],
        tools: Sequence[Any],
        *,
        clean: float,
        habit: float,
    ) -> list[dict[str, Any]]:
        """`count` conversations on training questions, each after the messages of `opening`. The first `clean` share
        looks both facts up; of the rest, a `habit` share answers after the first search with what it found."""
        rng = random.Random(f"demonstrations/{self._seed}")
        questions = self._questions("train", min(count, 2 * sum(work.split == "train" for work in self.works)))
        found: list[dict[str, Any]] = []
        for number in range(count):
            work, fact = questions[number % len(questions)]
            hasty = number >= clean * count and rng.random() < habit
            answer = work.maker if hasty else work.task(fact)["answer"]
            queries = [work.title] if hasty else [work.title, work.maker]
            user = {"role": "user", "content": work.task(fact)["question"]}
            turns = [turn for query in queries for turn in _lookup(query, search)]
            last = {"role": "assistant", "content": f"<answer>{answer}</answer>"}
            found.append({"messages": [*opening, user, *turns, last], "tools": list(tools)})
        return found


def _lookup(query: str, search: Search) -> list[dict[str, Any]]:
    return [_call(query), {"role": "tool", "tool_call_id": "call_0", "content": search(query)}]


def _call(query: str) -> dict[str, Any]:
    call = {"name": "search", "arguments": json.dumps({"query": query})}
    return {"role": "assistant", "tool_calls": [{"id": "call_0", "type": "function", "function": call}]}


def _repeat(works: Sequence[Work], rng: random.Random) -> list[dict[str, Any]]:
    """A search for up to three names."""
    names = ", ".join(rng.choice([work.title, work.maker]) for work in rng.sample(works, rng.randint(1, 3)))
    return [{"role": "user", "content": names}, _call(names)]


def _read(works: Sequence[Work], rng: random.Random) -> list[dict[str, Any]]:
    """A question with the document that has its answer, and another one."""
    work, other = rng.sample(works, 2)
    task = work.task(rng.choice(list(FACTS)))
    documents = [f"{each['title']}: {each['text']}" for each in (work.documents[1], other.documents[0])]
    return [
        {"role": "user", "content": "\n".join([*documents, task["question"]])},
        {"role": "assistant", "content": f"<answer>{task['answer']}</answer>"},
    ]
