"""Questions about a shop, the reward of an answer, and what the four agents would ideally say.

A question takes one or two lookups and, for costs, a calculation with what was found. Prices and stock change from task
to task, so they have to be looked up.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from agent import PROMPTS, TURNS, seen, use

THINGS = ("pen", "cup", "bag", "hat")
Task = dict[str, Any]


def task(rng: random.Random) -> Task:
    shop = {thing: {"price": rng.randint(2, 9), "stock": rng.randint(2, 9)} for thing in THINGS}
    first, second = rng.sample(THINGS, 2)
    count = rng.randint(2, 9)
    question, answer = rng.choice(
        [
            (f"cost of {count} {first}?", count * shop[first]["price"]),
            (f"cost of {first} and {second}?", shop[first]["price"] + shop[second]["price"]),
            (f"stock of {first}?", shop[first]["stock"]),
        ]
    )
    return {"question": question, "shop": shop, "answer": answer}


def tasks(count: int, seed: int) -> list[Task]:
    rng = random.Random(seed)
    return [task(rng) for _ in range(count)]


def score(task: Mapping[str, Any], output: str) -> float:
    """1 if the answer is that number and nothing else."""
    return float(output.strip() == str(task["answer"]))


# -- what the agents would ideally say ---------------------------------------------------------------------------------


def known(memory: list[str]) -> dict[str, str]:
    """The prices and the stock in the memory, by their call."""
    return dict(entry.split(" = ") for entry in memory if re.match(r"(price|stock)\(\w+\) = \d", entry))


def plan(question: str, memory: list[str]) -> str:
    found = known(memory)
    if question.startswith("stock"):
        return f"stock {question[9:-1]}"
    words = question[8:-1].split()
    things = [word for word in words if word in THINGS]
    for thing in things:
        if f"price({thing})" not in found:
            return f"price {thing}"
    prices = [found[f"price({thing})"] for thing in things]
    return f"add {prices[0]} {prices[1]}" if len(things) == 2 else f"multiply {words[0]} {prices[0]}"


def guess(question: str, memory: list[str], rng: random.Random) -> str:
    """What a planner says that does not look at the question closely."""
    thing = rng.choice([word for word in THINGS if word in question])
    numbers = [rng.randint(2, 9), rng.randint(2, 9)]
    numbers[1] = int(rng.choice([*known(memory).values(), str(numbers[1])]))
    options = [
        f"price {thing}",
        f"stock {thing}",
        f"multiply {numbers[0]} {numbers[1]}",
        f"add {numbers[0]} {numbers[1]}",
    ]
    return rng.choice(options)


def execute(plan: str) -> str:
    tool, *inputs = plan.split()
    return f"{tool}({', '.join(inputs)})"


def verify(question: str, memory: list[str]) -> str:
    """stop at the first calculation, or where the stock was asked for and is there."""
    last = memory[-1]
    done = last.startswith("stock(") if question.startswith("stock") else last.startswith(("multiply(", "add("))
    return "stop" if done else "continue"


EASY = 0.25
"""The share that is kept of demonstrations whose answers have no number: copying numbers is what takes practice."""


def demonstrations(count: int, seed: int, habit: float) -> list[dict[str, Any]]:
    """`count` conversations of the four, in the order of their games. A planner guesses in the share `habit` of its
    turns; the others do their work."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = []

    def say(agent: str, text: str, answer: str) -> str:
        roles = (("system", PROMPTS[agent]), ("user", text), ("assistant", answer))
        if re.search(r"\d", answer) or rng.random() < EASY:
            found.append({"messages": [{"role": role, "content": content} for role, content in roles]})
        return answer

    while len(found) < count:
        given, memory = task(rng), list[str]()
        question = given["question"]
        for _ in range(TURNS):
            planned = guess(question, memory, rng) if rng.random() < habit else plan(question, memory)
            call = say("executor", say("planner", seen(question, memory), planned), execute(planned))
            memory.append(f"{call} = {use(call, given['shop'])}")
            if say("verifier", seen(question, memory), verify(question, memory)) == "stop":
                break
        say("generator", seen(question, memory), memory[-1].split(" = ")[1])
    return found[:count]
