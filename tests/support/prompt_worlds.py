"""Worlds for prompt optimisation whose best prompt is known, and a harder one than `PromptWorld`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse

from agentlightning.testing.prompt_server import PromptWorldServer
from agentlightning.testing.prompt_world import ADVICE, HEAD, START, TAIL, PromptWorld

_PROMPT = re.compile(re.escape(HEAD) + r"(.*?)" + re.escape(TAIL).replace(r"\{task\}", r"\{?\w*\}?"), re.DOTALL)


class MeasuredWorld(PromptWorld):
    """A world that says how good a prompt is, and has models that write whole prompts: rewriter, and reflector (a
    critique and the prompt, in a code block)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.models |= {"rewriter": self.rewrite, "reflector": self.reflect}

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

    def rewrite(self, text: str) -> str:
        """The whole prompt, edited: `text` holds the prompt and a critique of it."""
        return "\n".join([HEAD, *self.edited(_lines(text), text), TAIL])

    def reflect(self, text: str) -> str:
        """Critique and rewrite in one call."""
        advice = self.critique(text)
        edited = self.edited(_lines(text), advice)
        return "\n".join([advice, "```", HEAD, *edited, TAIL, "```"])


class InteractingWorld(MeasuredWorld):
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


class MeasuredWorldServer(PromptWorldServer):
    """`POST /quality {"prompt": ...}` answers with the `quality` of a prompt, the `optimum` of the world, and the
    `calls` of the follower so far."""

    def __init__(self, world: MeasuredWorld) -> None:
        super().__init__(world)
        self.measured = world
        self.app.add_route("/v1/quality", self._quality, methods=["POST"])

    async def _quality(self, request: Request) -> JSONResponse:
        quality = self.measured.quality(str((await request.json())["prompt"]))
        return JSONResponse({"quality": quality, "optimum": self.measured.optimum, "calls": self.calls["follower"]})


def _prompt(text: str) -> str:
    found = _PROMPT.search(text)
    return found[0] if found else START


def _lines(text: str) -> list[str]:
    return [line for line in _prompt(text).splitlines() if line.startswith("- ")]
