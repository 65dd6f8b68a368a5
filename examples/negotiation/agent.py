"""Two agents divide a book, a hat and a ball. Each knows only what the things are worth to itself.

Ann names the things that she wants. Bob answers "deal", or names what he wants instead; Ann then answers "deal" or
"no". Who asks gets what was asked for, the other one the rest. Without a deal nobody gets anything.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx

import agentlightning as agl

THINGS = ("book", "hat", "ball")
WORTH = (5, 3, 1)
"""What the things are worth to an agent, in an order of its own."""
DEAL, NO = "deal", "no"
Values = Mapping[str, int]


def tasks(count: int, seed: int, *, held_out: bool = False) -> list[dict[str, Any]]:
    """Games with private values. Of the 36 pairs of values a quarter occurs in held-out games alone. `number` tells
    equal games apart."""
    rng = random.Random(seed)
    every = [dict(zip(THINGS, worth, strict=True)) for worth in itertools.permutations(WORTH)]
    pairs = [
        {"ann": ann, "bob": bob}
        for (i, ann), (j, bob) in itertools.product(enumerate(every), repeat=2)
        if ((i + j) % 4 == 0) == held_out
    ]
    return [{"number": seed * 100_000 + number, **rng.choice(pairs)} for number in range(count)]


def best(task: Mapping[str, Any]) -> int:
    """The joint value if everything goes to whoever values it more."""
    return sum(max(task["ann"][thing], task["bob"][thing]) for thing in THINGS)


def messages(agent: str, values: Values, said: str) -> list[dict[str, str]]:
    """What an agent is asked."""
    worth = ", ".join(f"{thing} {values[thing]}" for thing in THINGS)
    return [{"role": "user", "content": f"{agent} {said}: {worth}"}]


def read_offer(text: str) -> frozenset[str] | None:
    """The things that are asked for; None for anything else."""
    words = text.split()
    return frozenset(words) if words and set(words) <= set(THINGS) else None


def offers() -> list[str]:
    """All ways to ask for one or two things."""
    return [" ".join(chosen) for size in (1, 2) for chosen in itertools.combinations(THINGS, size)]


def shares(task: Mapping[str, Any], asked: frozenset[str], by: str) -> dict[str, float]:
    """What both get if `by` gets what was asked for."""
    other = "bob" if by == "ann" else "ann"
    own, rest = (task[by][thing] for thing in asked), (task[other][thing] for thing in set(THINGS) - asked)
    return {by: float(sum(own)), other: float(sum(rest))}


@cache
def http_client() -> httpx.AsyncClient:
    """One for all rollouts of a process."""
    return httpx.AsyncClient(trust_env=False, timeout=60)


async def play(task: dict[str, Any], llm: agl.LLM) -> None:
    """One game. The reward of each agent is its own value; that of the rollout has both, by name."""

    async def say(agent: str, said: str) -> str:
        limit = int(os.environ.get("MAX_TOKENS", "8"))
        body = {"model": llm.model, "messages": messages(agent, task[agent], said), "max_tokens": limit}
        with agl.track_agent(agent):
            reply = await http_client().post(f"{llm.base_url}/chat/completions", json=body)
        reply.raise_for_status()
        return str(reply.json()["choices"][0]["message"]["content"]).strip()

    async def bargain() -> dict[str, float]:
        nothing = {"ann": 0.0, "bob": 0.0}
        asked = await say("ann", "asks")
        answer = await say("bob", f"hears {asked}")
        offer, counter = read_offer(asked), read_offer(answer)
        if answer == DEAL and offer is not None:
            return shares(task, offer, "ann")
        if counter is not None and await say("ann", f"hears {answer}") == DEAL:
            return shares(task, counter, "bob")
        return nothing

    got = await bargain()
    for agent, value in got.items():
        agl.emit_reward(value, agent=agent)
    agl.emit_reward(got)
