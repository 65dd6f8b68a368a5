"""Versions: of prompts and models as the store has them, with what changed; of weights, with what each learned from."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping
from typing import Any, Final

from agentlightning.dashboard.data.catalog import Catalog
from agentlightning.dashboard.data.run_files import RunFiles
from agentlightning.dashboard.data.summary import Updates
from agentlightning.dashboard.query import Query
from agentlightning.policy.learner import Resumes, updates_of
from agentlightning.resources import PromptTemplate, ResourcesUpdate, named_resources, prompts_in
from agentlightning.training.governance import AuditRecord
from agentlightning.util.json_values import Json

PAGE: Final = 50
MOST_LINES: Final = 2000


async def list_resources(data: Catalog, query: Query) -> Json:
    """Versions of the resources, the newest first, each with what it changed against the one published before it."""
    run = await data.run(query.part("run"))
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
    return {
        "resources_id": update.resources_id,
        "version": update.version,
        "create_time": update.create_time,
        "resources": {name: _without_key(each) for name, each in resources.items()},
        "changed": []
        if before is None
        else changed_prompts(prompts_in(before.resources), prompts_in(update.resources)),
        "before": None if before is None else before.resources_id,
    }


def _without_key(resource: Mapping[str, Any]) -> Json:
    return {name: "(hidden)" if name == "api_key" and value else value for name, value in resource.items()}


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


async def list_weights(data: Catalog, query: Query) -> Json:
    """Versions of the weights by the audit log, the newest first: from which rollouts, with which scores, what the gate
    decided, and which checkpoints hold them."""
    run = await data.run(query.part("run"))
    files = run.source.run()
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
