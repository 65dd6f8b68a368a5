"""A seeded world for prompt optimisation: a noisy rule-follower with hidden instructions, its critic and its editor.

Each task needs one to three of twelve instructions. The follower keeps to an instruction that is in its prompt with
probability .95, and to one that is not with .15; an answer scores the share of the instructions that its task needs and
it keeps to. The critic reads failed answers and names an ignored instruction with probability .6, else useless advice.
The editor adds what the critic named.

All noise follows from the seed and from how often the same question was asked, so that results do not depend on the
order of concurrent calls. `PromptWorldServer` serves a world over HTTP.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse

from agentlightning.testing import ScriptedServer

HEAD: Final = "You write reports."
TAIL: Final = "Write report {task}."
START: Final = f"{HEAD}\n{TAIL}"
"""The template to begin with: no instruction, one placeholder."""
INSTRUCTIONS: Final = (
    "Give the date of every figure.",
    "Name the source of every figure.",
    "Write amounts in euros.",
    "Put the conclusion first.",
    "Use metric units.",
    "End with open questions.",
    "Spell out abbreviations.",
    "Number the sections.",
    "Address the reader formally.",
    "Give a range for estimates.",
    "State who is responsible.",
    "Mark what is confidential.",
)
ADVICE: Final = (
    "Be careful.",
    "Think step by step.",
    "Be concise.",
    "Check your work.",
    "Use a friendly tone.",
    "Avoid repetition.",
    "Write like an expert.",
    "Take your time.",
)
"""What an unhelpful critic says: it changes nothing."""
_PROMPT = re.compile(re.escape(HEAD) + r"(.*?)" + re.escape(TAIL).replace(r"\{task\}", r"\{?\w*\}?"), re.DOTALL)
_IGNORED = re.compile(r"report (\d+) ignores: ([\d, ]+) of")


def report_tasks(count: int, start: int = 0) -> list[dict[str, str]]:
    """Tasks of the world: the numbers of reports. `start` keeps splits apart."""
    return [{"task": f"{number:04d}"} for number in range(start, start + count)]


def grade(answer: object) -> float:
    """The reward of an answer: the share of the instructions that its task needs and it keeps to."""
    found = re.search(r"ignores: ([\d, ]+) of (\d) points", str(answer))
    if found is not None:
        return 1 - (found[1].count(",") + 1) / int(found[2])
    return float("is complete" in str(answer))


class PromptWorld:
    """The rule-follower, its critic and its editor, without a server."""

    def __init__(self, seed: int = 0, *, follow: float = 0.95, luck: float = 0.15, insight: float = 0.6) -> None:
        self.seed = seed
        self.follow, self.luck, self.insight = follow, luck, insight
        self._asked: Counter[str] = Counter()
        self.instructions = list(INSTRUCTIONS)
        random.Random(f"{seed}/instructions").shuffle(self.instructions)

        self.models: dict[str, Callable[[str], str]] = {
            "follower": self.answer,
            "critic": self.critique,
            "editor": self.edits,
            "rewriter": self.rewrite,
            "reflector": self.reflect,
        }
        """The models of the world, each from the text of a request to its reply: follower (tasks), critic (a critique),
        editor (bounded edits in JSON), rewriter (the whole prompt anew), reflector (a critique and the whole prompt, in
        a code block)."""

    # -- what is true ----------------------------------------------------------------------------------------------

    def needs(self, task: str) -> tuple[int, ...]:
        """The instructions that a task needs."""
        rng = random.Random(f"{self.seed}/needs/{int(task)}")
        return tuple(sorted(rng.sample(range(len(self.instructions)), rng.randint(1, 3))))

    def given(self, prompt: str) -> frozenset[int]:
        """The instructions that a prompt gives."""
        return frozenset(number for number, text in enumerate(self.instructions) if text in prompt)

    def probability(self, number: int, given: frozenset[int], prompt: str) -> float:
        """How likely an answer keeps to an instruction."""
        return self.follow if number in given else self.luck

    def quality(self, prompt: str) -> float:
        """The expected reward of a prompt over all possible tasks, exactly."""
        given = self.given(prompt)
        chances = [self.probability(number, given, prompt) for number in range(len(self.instructions))]
        if not re.search(r"\{\{?\s*task\s*\}?\}", prompt):
            return 0.0
        return sum(chances) / len(chances)

    @property
    def optimum(self) -> float:
        """The quality of the best prompt: all instructions and nothing else."""
        return self.quality("\n".join([HEAD, *(f"- {text}" for text in self.instructions), TAIL]))

    # -- what its models say ---------------------------------------------------------------------------------------

    def _random(self, *question: str) -> random.Random:
        key = "/".join([str(self.seed), *question])
        self._asked[key] += 1
        return random.Random(f"{key}/{self._asked[key]}")

    def answer(self, prompt: str) -> str:
        """What the follower writes for a formatted prompt."""
        found = re.search(r"report (\d{4})", prompt)
        if found is None:
            return "Which report? It ignores: the task."
        task = found[1]
        rng, given = self._random("answer", prompt), self.given(prompt)
        ignored = [n for n in self.needs(task) if rng.random() >= self.probability(n, given, prompt)]
        if not ignored:
            return f"report {task} is complete"
        return f"report {task} ignores: {', '.join(map(str, ignored))} of {len(self.needs(task))} points"

    def critique(self, text: str) -> str:
        """What the critic says to a text that holds answers."""
        rng = self._random("critique", text)
        failed = [list(map(int, numbers.split(", "))) for _, numbers in _IGNORED.findall(text)]
        if failed and rng.random() < self.insight:
            return f"The answers lack this: {self.instructions[rng.choice(rng.choice(failed))]}"
        return f"The answers lack this: {rng.choice(ADVICE)}"

    def advised(self, text: str) -> str | None:
        """The instruction or advice that a critique names last."""
        found = [(text.rfind(each), each) for each in (*INSTRUCTIONS, *ADVICE) if f"lack this: {each}" in text]
        return max(found)[1] if found else None

    def edited(self, lines: Sequence[str], critique: str) -> list[str]:
        """The lines of a prompt's instructions after the editor has worked on them."""
        advised = self.advised(critique)
        known = advised is None or any(advised in line for line in lines)
        return list(lines) if known else [*lines, f"- {advised}"]

    def rewrite(self, text: str) -> str:
        """The whole prompt, edited: `text` holds the prompt and a critique of it."""
        return "\n".join([HEAD, *self.edited(_lines(text), text), TAIL])

    def reflect(self, text: str) -> str:
        """Critique and rewrite in one call."""
        advice = self.critique(text)
        edited = self.edited(_lines(text), advice)
        return "\n".join([advice, "```", HEAD, *edited, TAIL, "```"])

    def edits(self, text: str) -> str:
        """The same change as bounded edits: JSON, as `algorithms.apo` asks for them."""
        before = re.findall(r"^\[(\d+)\] (.*)$", text, re.MULTILINE)
        numbered = {line: int(number) for number, line in before}
        own = [line for line in numbered if line.startswith("- ")]
        after = self.edited(own, text)
        found: list[dict[str, Any]] = [{"op": "delete", "line": numbered[line]} for line in own if line not in after]
        last = max([numbered.get(HEAD, 1), *(numbered[line] for line in own)])
        found += [{"op": "add", "after": last, "text": line} for line in after if line not in own]
        return json.dumps({"edits": found})


def _prompt(text: str) -> str:
    found = _PROMPT.search(text)
    return found[0] if found else START


def _lines(text: str) -> list[str]:
    return [line for line in _prompt(text).splitlines() if line.startswith("- ")]


class InteractingWorld(PromptWorld):
    """Instructions that interact, and edits that are not localised.

    Four instructions help only beside their partner, two pairs weaken each other (.95 to .85), and each line that is no
    instruction costs all .01. With probability .3 an edit also loses another line.
    """

    partners: Final = {2: 0, 5: 3, 7: 6, 10: 9}
    rivals: Final = {1: 4, 4: 1, 8: 11, 11: 8}
    loss: Final = 0.3

    def probability(self, number: int, given: frozenset[int], prompt: str) -> float:
        if number not in given or self.partners.get(number, number) not in given:
            return self.luck
        clutter = 0.01 * sum(advice in prompt for advice in ADVICE)
        rivalry = 0.1 if self.rivals.get(number) in given else 0.0
        return self.follow - clutter - rivalry

    def edited(self, lines: Sequence[str], critique: str) -> list[str]:
        kept = list(lines)
        rng = self._random("edit", critique)
        if kept and rng.random() < self.loss:
            kept.remove(rng.choice(kept))
        return super().edited(kept, critique)


class PromptWorldServer(ScriptedServer):
    """Serves a world. `POST /quality {"prompt": ...}` answers with the `quality` of a prompt, the `optimum` of the
    world, and the `calls` of the follower so far."""

    def __init__(self, world: PromptWorld) -> None:
        super().__init__(world.models)
        self.world = world
        self.app.add_route("/v1/quality", self._quality, methods=["POST"])

    async def _quality(self, request: Request) -> JSONResponse:
        quality = self.world.quality(str((await request.json())["prompt"]))
        return JSONResponse({"quality": quality, "optimum": self.world.optimum, "calls": self.calls["follower"]})
