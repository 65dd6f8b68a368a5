"""Versions of resources and weights; and a prompt search: its candidates, what each has changed, and what it earned."""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.algorithms.apo.text import PARENT
from agentlightning.dashboard.data.rollouts import RolloutSummary, Updates
from agentlightning.dashboard.data.run_data import RunData
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.dashboard.query import Query
from agentlightning.dashboard.views.runs import measured
from agentlightning.policy.learner import Resumes, updates_of
from agentlightning.resources import PromptTemplate, ResourcesUpdate, named_resources, prompts_in
from agentlightning.training.governance import AuditRecord
from agentlightning.util.json_values import Json

PAGE: Final = 50
MOST_LINES: Final = 2000


async def list_resources(run: RunData, query: Query) -> Json:
    """Versions of the resources, the newest first, each with what it changed against the one published before it."""
    limit, offset = query.integer("limit", PAGE, 1, 200), query.integer("after", 0)
    contains = query.text("id") or run.in_ids
    newest = await run.store.query_resources(
        resources_id_contains=contains, sort_by="version", sort_order="desc", limit=limit + 1, offset=offset
    )
    shown = newest[:limit]
    before = [*newest[1:], None][: len(shown)]
    return {
        "versions": [_version(*each, run.summaries.updates) for each in zip(shown, before, strict=True)],
        "next": str(offset + limit) if len(newest) > limit else None,
    }


def _version(update: ResourcesUpdate, before: ResourcesUpdate | None, updates: Updates) -> Json:
    resources = named_resources.dump_python(update.resources, mode="json")
    for each in resources.values():
        if (version := each.get("policy_version")) is not None:
            each["policy_version"] = updates(version)
        if each.get("api_key"):
            each["api_key"] = "(hidden)"
    return {
        "resources_id": update.resources_id,
        "version": update.version,
        "create_time": update.create_time,
        "resources": resources,
        "changed": changed_prompts(prompts_in(before.resources if before else {}), prompts_in(update.resources)),
        "before": before and before.resources_id,
    }


def changed_prompts(old: Mapping[str, PromptTemplate], new: Mapping[str, PromptTemplate]) -> list[Json]:
    """The prompt templates that differ, line by line. One without a counterpart is left out: it is new."""
    return [
        {"name": name, "lines": diff_of(old[name], each)}
        for name, each in new.items()
        if name in old and old[name] != each
    ]


def diff_of(before: PromptTemplate, after: PromptTemplate) -> list[dict[str, str]]:
    """The lines of two templates: kind `same`, `added` or `removed`."""
    kinds = {" ": "same", "+": "added", "-": "removed"}
    lines = difflib.ndiff(before.template.splitlines(), after.template.splitlines())
    return [{"kind": kinds[line[0]], "text": line[2:]} for line in lines if line[0] in kinds][:MOST_LINES]


async def list_weights(run: RunData, query: Query) -> Json:
    """Versions of the weights by the audit log, the newest first: from which rollouts, with which scores, what the gate
    decided, and which checkpoints hold them."""
    files = run.run()
    return await asyncio.to_thread(_weights, files, query.integer("limit", 200, 1, 2000), query.integer("after", 0))


def _weights(files: RunFiles, limit: int, offset: int) -> Json:
    records, state = files.audit(), files.state()
    newest = records[::-1]
    kept = {path.name for path in (files.path / "checkpoints").glob("step-*")}
    return {
        "records": [_record(each, kept, state.resumes) for each in newest[offset : offset + limit]],
        "next": str(offset + limit) if offset + limit < len(newest) else None,
        "best_step": state.best_step,
        "has_audit": bool(records),
    }


def _record(record: AuditRecord, kept: set[str], resumes: Resumes) -> Json:
    version = None if record.version is None else updates_of(record.version, resumes)
    return {
        "action": record.action,
        "step": record.step,
        "version": version,
        "parent": version - 1 if version else None,
        "time": record.time,
        "rollouts": len(record.rollouts),
        "scores": record.scores,
        "reason": record.reason,
        "returned_to": record.returned_to,
        "has_checkpoint": f"step-{record.step:06d}" in kept,
    }


# -- a prompt search --------------------------------------------------------------------------------------------------


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


async def show_search(run: RunData, query: Query) -> Json:
    """The candidates of a search, as far as the store has their rollouts."""
    trials = f"{run.run_id}-trial-"
    updates = await run.store.query_resources(resources_id_contains=trials)
    prompts = {each.resources_id: prompts_in(each.resources) for each in updates}
    rollouts = await run.store.query_rollouts(rollout_id_contains=trials)
    parents = [each.metadata.get(PARENT) for each in rollouts]
    rows = zip(await run.summaries.of(rollouts), parents, strict=True)
    return {"candidates": await asyncio.to_thread(_candidates, rows, prompts, run.run().prompts()["prompts"])}


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
