"""An agent that books meeting rooms with one call of an API model."""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from openai import AsyncOpenAI

TEMPLATE = """\
You book meeting rooms.
Request: {request}
Rooms:
{rooms}
Reply with the name of one room, and nothing else."""
"""The prompt to begin with. The rules of the house are not in it."""


@cache
def client() -> AsyncOpenAI:
    """One for all requests of a process."""
    return AsyncOpenAI()


async def book(task: Mapping[str, Any], resources: Mapping[str, Any]) -> str:
    """The name of a room."""
    prompt = resources["prompt"].format(request=task["request"], rooms=task["rooms"])
    reply = await client().chat.completions.create(
        model=os.environ.get("BOOKING_MODEL", "gpt-5-mini"), messages=[{"role": "user", "content": prompt}]
    )
    return (reply.choices[0].message.content or "").strip()
