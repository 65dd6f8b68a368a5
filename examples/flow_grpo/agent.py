"""A planner, an executor, a verifier and a generator around a shared memory, as in AgentFlow (arXiv:2510.05592).

At each turn the planner names a tool and what to use it on, the executor writes the call, which is made, and the
verifier says whether the memory is enough. Then the generator answers from the memory. The program knows nothing of
training: the gateway tells the four apart by their system prompts.
"""

import os
import re
from functools import cache

from openai import AsyncOpenAI

TURNS = 4
PROMPTS = {
    "planner": "You plan: name the next tool (price, stock, multiply, add) and what to use it on.",
    "executor": "You execute: write the call of a tool.",
    "verifier": "You verify: say stop if the memory answers the question, else continue.",
    "generator": "You generate: reply with the answer alone.",
}
CALL = re.compile(r"(price|stock)\((\w+)\)|(multiply|add)\((\d+), (\d+)\)")
Shop = dict[str, dict[str, int]]


@cache
def client() -> AsyncOpenAI:
    """One for all questions of a process."""
    return AsyncOpenAI()


def seen(question: str, memory: list[str]) -> str:
    """What planner, verifier and generator read."""
    return "\n".join([question, *memory])


def use(call: str, shop: Shop) -> str:
    """The result of a tool call, or what is wrong with it."""
    found = CALL.fullmatch(call)
    if found is None:
        return "no such call"
    lookup, thing, operation, left, right = found.groups()
    if lookup:
        return str(shop[thing][lookup]) if thing in shop else "no such thing"
    a, b = int(left), int(right)
    return str(a * b if operation == "multiply" else a + b)


async def answer(question: str, shop: Shop) -> str:
    """The generator's answer."""
    limit = int(os.environ.get("MAX_TOKENS", "24"))
    memory: list[str] = []

    async def ask(agent: str, text: str) -> str:
        messages = [{"role": "system", "content": PROMPTS[agent]}, {"role": "user", "content": text}]
        reply = await client().chat.completions.create(model="policy", messages=messages, max_tokens=limit)
        return (reply.choices[0].message.content or "").strip()

    for _ in range(TURNS):
        plan = await ask("planner", seen(question, memory))
        call = await ask("executor", plan)
        memory.append(f"{call} = {use(call, shop)}")
        if await ask("verifier", seen(question, memory)) == "stop":
            break
    return await ask("generator", seen(question, memory))
