"""A prompt search: its candidates in the order of their first evaluation, what each was made from and has changed, and
what it earned."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.algorithms.apo.text import PARENT
from agentlightning.dashboard.data.catalog import Catalog
from agentlightning.dashboard.data.summary import RolloutSummary
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views.resources import changed_prompts
from agentlightning.dashboard.views.runs import measured, prompts_now
from agentlightning.resources import PromptTemplate, prompts_in
from agentlightning.util.json_values import Json

TRIAL: Final = re.compile(r"-([0-9a-f]{16})-(train|validation)\d{5}-\d+(-again|$)")
"""In the id of a rollout: a digest of the candidate's texts, and the tasks that it was tried on."""


@dataclass(slots=True)
class Candidate:
    """The texts of a candidate, and its rollouts."""

    number: int
    at: int
    """The evaluation of the search that was its first."""
    prompts: dict[str, PromptTemplate]
    rows: dict[str, list[RolloutSummary]]
    parent: Candidate | None
    """The one that it was made from. None: the first of a search, or not known."""
    led: bool = False
    """Whether it is the result, or came before it."""

    @property
    def texts(self) -> dict[str, str]:
        return {name: each.template for name, each in self.prompts.items()}

    def as_json(self, result: Mapping[str, str]) -> Json:
        found = {split: measured([row.reward_number for row in rows]) for split, rows in self.rows.items()}
        tokens = sum(row.prompt_tokens + row.sampled_tokens for rows in self.rows.values() for row in rows)
        changed = [] if self.parent is None else changed_prompts(self.parent.prompts, self.prompts)
        parent = self.parent and self.parent.number
        return {
            "number": self.number,
            "at": self.at,
            "parent": parent,
            "led": self.led,
            "texts": self.texts,
            **found,
            "tokens": tokens,
            "changed": changed,
            "result": self.texts == result,
        }


async def show_search(data: Catalog, query: Query) -> Json:
    """The candidates of a search, as far as the store has their rollouts."""
    run = await data.run(query.part("run"))
    trials = f"{run.source.run_id}-trial-"
    updates = await run.store.query_resources(resources_id_contains=trials)
    prompts = {each.resources_id: prompts_in(each.resources) for each in updates}
    rollouts = await run.store.query_rollouts(rollout_id_contains=trials)
    parents = [each.metadata.get(PARENT) for each in rollouts]
    rows = zip(await run.summaries.of(rollouts), parents, strict=True)
    return {"candidates": await asyncio.to_thread(_candidates, rows, prompts, prompts_now(run.source.run())["prompts"])}


def _candidates(
    rows: Iterable[tuple[RolloutSummary, Any]],
    prompts: Mapping[str, dict[str, PromptTemplate]],
    result: Mapping[str, str],
) -> list[Json]:
    found: dict[str, Candidate] = {}
    for at, (row, parent) in enumerate(rows, 1):
        named, own = TRIAL.search(row.rollout_id), prompts.get(row.resources_id or "")
        if named is not None and own is not None:
            new = Candidate(len(found), at, own, {"train": [], "validation": []}, found.get(parent))
            found.setdefault(named[1], new).rows[named[2]].append(row)
    every = list(found.values())
    best = next((each for each in every if each.texts == result), None)
    while best is not None:
        best.led, best = True, best.parent
    return [each.as_json(result) for each in every]
