"""A search in a simulated world, without a store or a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.prompt_worlds import START, PromptWorld, grade, report_tasks

from agentlightning.algorithms.apo.config import APOConfig, PromptModel, Spending
from agentlightning.algorithms.apo.search import Completion, Outcome, SearchContext, Trial, Writer
from agentlightning.algorithms.apo.text import Texts, digest
from agentlightning.resources import PromptTemplate


class Follower:
    """Evaluates candidates, and remembers what it was asked."""

    def __init__(self, world: PromptWorld) -> None:
        self.world = world
        self.splits = {"train": report_tasks(100), "validation": report_tasks(60, 1000)}
        self.asked: list[tuple[str, Trial]] = []
        self.parents: dict[str, str | None] = {}
        """What each candidate was made from, by digest."""

    async def evaluate(self, texts: Texts, trials: Sequence[Trial], parent: str | None) -> list[Outcome]:
        self.parents.setdefault(digest(texts), parent)
        self.asked += [(texts["prompt"], trial) for trial in trials]
        answers = [
            self.world.answer(texts["prompt"].format(**self.splits[trial.split][trial.task])) for trial in trials
        ]
        return [Outcome(trial.task, grade(answer), answer) for trial, answer in zip(trials, answers, strict=True)]


class Model:
    """A language model that is a function of the text it is asked."""

    def __init__(self, reply: Callable[[str], str]) -> None:
        self.reply, self.settings = reply, PromptModel(model="m", input_price=1e6)
        self.asked: list[str] = []

    async def complete(self, messages: Sequence[dict[str, str]]) -> Completion:
        self.asked.append(messages[-1]["content"])
        return Completion(self.reply(messages[-1]["content"]), 3, 2)


def _context(world: PromptWorld, **settings: Any) -> SearchContext:
    config = APOConfig.model_validate(settings)
    spending = Spending(config.budget)
    writer = Writer(Model(world.critique), Model(world.edits), spending, config.max_edits, config.max_transcript_chars)
    start = {"prompt": PromptTemplate(template=START)}
    return SearchContext(config, start, 100, 60, Follower(world), writer, spending)


@pytest.fixture
def context() -> Callable[..., SearchContext]:
    return _context


@pytest.fixture
def model() -> type[Model]:
    return Model
