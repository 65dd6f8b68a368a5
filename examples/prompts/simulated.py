"""A simulated API model on loopback, to try the example without a key: it books, criticises and edits.

It keeps to a rule of the house with probability .95 if the sentence of `house.RULES` is in its prompt, else with .2. As
a critic it names a rule that was broken in 6 of 10 cases and useless advice in the others; as an editor it adds what
the critic named. A real model is asked through the same endpoint, `/v1/chat/completions`.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from typing import Any

from house import OF_ONE_ROOM, RULES, allowed, read

from agentlightning.testing import ScriptedServer

FOLLOWS, LUCK, INSIGHT = 0.95, 0.2, 0.6
ADVICE = ("Be careful.", "Think step by step.", "Be concise.", "Check your work.", "Use a friendly tone.")


class BookingWorld:
    """What each model says. It follows from the seed and from how often the same was asked, in whatever order."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._asked = Counter[str]()

    def _random(self, *question: str) -> random.Random:
        key = "/".join([str(self.seed), *question])
        self._asked[key] += 1
        return random.Random(f"{key}/{self._asked[key]}")

    def answer(self, prompt: str) -> str:
        """The name of a room."""
        rng = self._random("answer", prompt)
        request, rooms = read(prompt)
        heeded = {rule for rule, text in RULES.items() if rng.random() < (FOLLOWS if text in prompt else LUCK)}
        fitting = [
            room for room in rooms if all(allowed(r, request, room) for r in OF_ONE_ROOM if r in heeded)
        ] or rooms
        chosen = min(fitting, key=lambda room: room.seats) if "smallest" in heeded else rng.choice(fitting)
        return chosen.name

    def critique(self, text: str) -> str:
        """What the texts lack, by the named rewards of a failed rollout."""
        rng = self._random("critique", text)
        rewards = [json.loads(each) for each in re.findall(r"^Rewards: (\{.*\})$", text, re.MULTILINE)]
        broken = [RULES[name] for each in rewards for name in RULES if each["right"] == 0 and each[name] == 0]
        useful = broken and rng.random() < INSIGHT
        return f"The texts lack this: {rng.choice(broken) if useful else rng.choice(ADVICE)}"

    def edits(self, text: str) -> str:
        """Adds the advice as a line after the first one, unless it is there."""
        advised = re.findall(r"^The texts lack this: (.*)$", text, re.MULTILINE)
        if not advised or f"- {advised[-1]}" in text:
            return json.dumps({"edits": []})
        edit: dict[str, Any] = {"op": "add", "after": 1, "text": f"- {advised[-1]}"}
        return json.dumps({"edits": [edit]})


def simulated(seed: int) -> ScriptedServer:
    """with simulated(0) as server: server.url"""
    world = BookingWorld(seed)
    return ScriptedServer({"follower": world.answer, "critic": world.critique, "editor": world.edits})
