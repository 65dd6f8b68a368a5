"""A search in a simulated world, without a store or a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.prompt_worlds import START, PromptWorld, grade, report_tasks

from agentlightning.algorithms.apo.config import APOConfig, PromptModel
from agentlightning.algorithms.apo.search import Completion, Search
from agentlightning.algorithms.apo.text import PARENT
from agentlightning.algorithms.training import RolloutReport
from agentlightning.resources import PromptTemplate


class Follower:
    """A training run whose agent lives in a simulated world; remembers what it was asked."""

    def __init__(self, world: PromptWorld) -> None:
        self.world = world
        self.train_tasks, self.validation_tasks = report_tasks(100), report_tasks(60, 1000)
        self.directory = Path()
        self.asked: list[tuple[str, str]] = []
        """The text of each rollout and its name, of the candidate, the split, the task and the repetition."""
        self.parents: dict[str, str | None] = {}
        """What each candidate was made from, by digest."""

    async def try_resources(
        self, resources: Mapping[str, PromptTemplate], tasks: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> list[RolloutReport]:
        text = resources["prompt"].template
        reports: list[RolloutReport] = []
        for name, task in tasks.items():
            self.parents.setdefault(name.split("-")[0], metadata.get(PARENT))
            self.asked.append((text, name))
            answer = self.world.answer(text.format(**task))
            reports.append(RolloutReport(name, score=grade(answer), output=answer))
        return reports

    @property
    def splits(self) -> set[str]:
        """Of which tasks there were rollouts."""
        return {name.split("-")[1].rstrip("0123456789") for _, name in self.asked}


class Model:
    """A language model that is a function of the text it is asked."""

    def __init__(self, reply: Callable[[str], str]) -> None:
        self.reply, self.settings = reply, PromptModel(model="m", input_price=1e6)
        self.asked: list[str] = []

    async def complete(self, messages: Sequence[dict[str, str]]) -> Completion:
        self.asked.append(messages[-1]["content"])
        return Completion(self.reply(messages[-1]["content"]), 3, 2)


def _made(kind: type[Search], world: PromptWorld, **settings: Any) -> Any:
    config, start = APOConfig.model_validate(settings), {"prompt": PromptTemplate(template=START)}
    training: Any = Follower(world)
    models: Any = {"critic": Model(world.critique), "editor": Model(world.edits)}
    return kind(config, start, training, models)


@pytest.fixture
def made() -> Callable[..., Any]:
    """Makes a search of a kind."""
    return _made


@pytest.fixture
def model() -> type[Model]:
    return Model
