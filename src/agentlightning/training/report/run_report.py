"""The report of a finished run as text: Markdown, or one HTML page without anything from elsewhere.

It says what changed: held-out reward before and after with its interval, that of each stage where there are several,
tasks won and lost, what it cost, and how the agent answered some of these tasks before and after. Everything is read
from the run directory.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.persistence.run_dir import RunState, read_state
from agentlightning.training.sources.group_rewards import transcript_of
from agentlightning.training.tracking.samples import said
from agentlightning.util.json_values import dumps, loads

MOST_SHOWN: Final = 1500
"""Characters of a task, an output or a message that are shown."""
MOST_TASKS: Final = 30
"""Tasks that are listed as won, and as lost."""


@dataclass(frozen=True, slots=True)
class Change:
    """A held-out task before and after."""

    index: int
    task: Any
    before: float | None
    after: float | None

    @property
    def difference(self) -> float:
        return 0.0 if self.before is None or self.after is None else self.after - self.before


async def markdown_report(run_dir: Path, examples: int, store: LightningStoreBase | None = None) -> str:
    """The report in Markdown. Raises ConfigError where the run is not finished."""
    path = run_dir / "report.json"
    if not path.exists():
        raise ConfigError(f"{run_dir} has no report.json: the run is not finished; finish it with --resume")
    report, state = loads(path.read_bytes()), read_state(run_dir)
    modes = list(report["held_out"])
    parts = [_summary(run_dir, report), _stages(report), _prompts(report), _cost(report), _warnings(report)]
    for mode in modes:
        changes = changes_of(run_dir, state, mode)
        parts.append(_tasks(mode, changes))
        if mode == modes[0] and examples:
            parts.append(await _examples(run_dir, state, mode, changes, examples, store))
    return "\n\n".join(part for part in parts if part) + "\n"


def changes_of(run_dir: Path, state: RunState, mode: str) -> list[Change]:
    """The held-out tasks, with their rewards before and after."""
    tasks = [loads(line) for line in (run_dir / "data" / "held_out.jsonl").read_bytes().splitlines()]
    before, after = (state.evaluations.get(f"{when}-{mode}", []) for when in ("before", "after"))
    rows = zip(tasks, before, after, strict=False)
    return [Change(index, *row) for index, row in enumerate(rows)]


def _summary(run_dir: Path, report: Mapping[str, Any]) -> str:
    lines = [f"# Report of {run_dir.name}", "", "| held out | before | after | gain | 95% interval | tasks |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    lines += [f"| {mode} | {_gain(gain)} |" for mode, gain in report["held_out"].items()]
    return "\n".join(lines)


def _gain(gain: Mapping[str, Any]) -> str:
    """The cells of a gain: before, after, gain, interval, tasks."""
    low, high = gain["interval"]
    numbers = f"{_number(gain['before'])} | {_number(gain['after'])} | {_number(gain['gain'], sign=True)}"
    return f"{numbers} | {_number(low, sign=True)} to {_number(high, sign=True)} | {gain['tasks']}"


def _stages(report: Mapping[str, Any]) -> str:
    """What each stage of a run of several algorithms has gained and cost."""
    stages = report.get("stages", [])
    if not stages:
        return ""
    lines = ["## Stages", "", "| stage | held out | before | after | gain | 95% interval | tasks |", "| --- " * 7 + "|"]
    for number, stage in enumerate(stages, 1):
        rows = [f"{mode} | {_gain(gain)}" for mode, gain in stage["held_out"].items()] or ["not measured | | | | | "]
        lines += [f"| {number} {stage['name']} | {row} |" for row in rows]
    lines += [
        "",
        "| stage | steps | rollouts | sampled tokens of training | tokens of the search | money of the search |",
    ]
    lines.append("| --- " * 6 + "|")
    for number, stage in enumerate(stages, 1):
        cost = stage["cost"]
        money = _money(cost["search_money"]) if cost["search_tokens"] else ""
        tokens = f"{cost['sampled_tokens']} | {cost['search_tokens']}"
        lines.append(f"| {number} {stage['name']} | {stage['steps']} | {stage['rollouts']} | {tokens} | {money} |")
    return "\n".join(lines)


def _prompts(report: Mapping[str, Any]) -> str:
    """The prompt templates of the result, and what the run changed in them."""
    prompts: Mapping[str, str] = report.get("prompts") or {}
    if not prompts:
        return ""
    diff = report.get("prompt_diff") or ""
    texts = [f"### {name}\n\n{_block(text)}" for name, text in prompts.items()]
    return "\n\n".join(["## Prompts", *texts, _block(diff) if diff else "The run has changed none of them."])


def _money(value: float | None) -> str:
    return "unknown, no price is set" if value is None else f"{value:.4f}"


def _number(value: float | None, *, sign: bool = False) -> str:
    return "unknown" if value is None else f"{value:+.3f}" if sign else f"{value:.3f}"


def _cost(report: Mapping[str, Any]) -> str:
    cost = report["cost"]
    rows = {
        "steps": report["steps"],
        "training rollouts": report["rollouts"],
        "failed rollouts": report["failed_rollouts"],
        "rejected rollouts": sum(report["rejected_rollouts"].values()),
        "sampled tokens of training": cost["sampled_tokens"],
        **_searches(cost),
        **_providers(cost),
        "seconds": report["seconds"],
        "returns to an earlier checkpoint": report["rollbacks"],
        "versions refused by the gate": report.get("gate_rejections", 0),
    }
    return "## Cost\n\n| | |\n| --- | --- |\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _searches(cost: Mapping[str, Any]) -> dict[str, Any]:
    if not cost["search_tokens"]:
        return {}
    return {
        "calls of critic and editor": cost["search_calls"],
        "tokens of the prompt search, agent included": cost["search_tokens"],
        "money of the prompt search": _money(cost["search_money"]),
    }


def _providers(cost: Mapping[str, Any]) -> dict[str, Any]:
    if not cost["provider_calls"]:
        return {}
    without = cost["provider_calls_without_price"]
    missing = (
        f", without {without} calls that have no price" if without and cost["provider_dollars"] is not None else ""
    )
    beside = " beside the search" if cost["search_tokens"] else ""
    return {
        f"calls to providers{beside}": cost["provider_calls"],
        f"tokens of providers{beside}": cost["provider_tokens"],
        f"US dollars of providers{beside}": _money(cost["provider_dollars"]) + missing,
    }


def _warnings(report: Mapping[str, Any]) -> str:
    found = report["warnings"]
    return "## Warnings\n\n" + "\n".join(f"- {_inline(each)}" for each in found) if found else ""


def _tasks(mode: str, changes: Sequence[Change]) -> str:
    won = sorted((each for each in changes if each.difference > 0), key=lambda each: -each.difference)
    lost = sorted((each for each in changes if each.difference < 0), key=lambda each: each.difference)
    known = [each for each in changes if each.before is not None and each.after is not None]
    missing = len(changes) - len(known)
    same = len(known) - len(won) - len(lost)
    lines = [
        f"## Tasks, {mode}",
        "",
        f"{len(won)} won, {len(lost)} lost, {same} unchanged, {missing} without a reward.",
    ]
    for name, found in (("Won", won), ("Lost", lost)):
        if found:
            lines += ["", f"### {name}", "", "| task | before | after |", "| --- | --- | --- |"]
            lines += [
                f"| {_inline(_text(each.task))[:120]} | {_number(each.before)} | {_number(each.after)} |"
                for each in found[:MOST_TASKS]
            ]
            if len(found) > MOST_TASKS:
                lines.append(f"| ... and {len(found) - MOST_TASKS} more | | |")
    return "\n".join(lines)


async def _examples(
    run_dir: Path,
    state: RunState,
    mode: str,
    changes: Sequence[Change],
    examples: int,
    given: LightningStoreBase | None,
) -> str:
    ranked = sorted((each for each in changes if each.difference), key=lambda each: -abs(each.difference))
    chosen = [each for each in ranked if each.difference > 0][:examples]
    chosen += [each for each in ranked if each.difference < 0][:examples]
    if not chosen:
        return ""
    if given is None and not (run_dir / "store.db").exists():
        return "## Changed behaviour\n\nThe rollouts are in the store that the run was given; pass `store=`."
    store = given or LightningStore(run_dir / "store.db")
    step = f"after-{state.measured_step or 0:06d}"
    try:
        parts = ["## Changed behaviour"]
        for each in chosen:
            parts.append(f"### {_inline(_text(each.task))[:120]}")
            for when, reward in (("before", each.before), (step, each.after)):
                rollout_id = f"{state.run_id}-{when}-{mode}{state.suffix}-{each.index:05d}"
                parts.append(f"**{when.partition('-')[0]}**, reward {_number(reward)} (`{rollout_id}`)")
                parts.append(_block(await _transcript(store, rollout_id)))
        return "\n\n".join(parts)
    finally:
        if given is None:
            await store.close()


async def _transcript(store: LightningStoreBase, rollout_id: str) -> str:
    attempt = await store.get_latest_attempt(rollout_id)
    if attempt is None:
        return "(this rollout is no longer in the store)"
    spans = await store.query_spans(rollout_id, attempt.attempt_id)
    messages = [(each.get("role", "?"), said(each, "\n")) for each in transcript_of(spans)]
    lines = [f"{role}: {_shortened(text)}" for role, text in messages]
    output = attempt.metadata.get("output")
    return "\n".join([*lines, *([f"result: {_shortened(_text(output))}"] if output is not None else [])]) or "(nothing)"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value, default=repr).decode()


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} [... {len(text) - MOST_SHOWN} characters]"


def _inline(text: str) -> str:
    """Text within a line of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _block(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"


# -- HTML ------------------------------------------------------------------------------------------------------------

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1e293b}"
    "table{border-collapse:collapse}td,th{border:1px solid #cbd5e1;padding:.25rem .6rem;text-align:left}"
    "pre{background:#f1f5f9;padding:.75rem;white-space:pre-wrap;overflow-wrap:anywhere}"
)


def as_html(markdown: str) -> str:
    """The Markdown of `markdown_report` as a page: headings, tables, lists, blocks of text."""
    body: list[str] = []
    lines = iter(markdown.splitlines())
    for line in lines:
        if line.startswith("```"):
            fence, block = line.removesuffix("text"), list[str]()
            for inner in lines:
                if inner == fence:
                    break
                block.append(inner)
            body.append(f"<pre>{html.escape(chr(10).join(block))}</pre>")
        elif line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            body.append(f"<h{level}>{_span(line[level:].strip())}</h{level}>")
        elif line.startswith("|"):
            body.append(_row(line))
        elif line.startswith("- "):
            body.append(f"<li>{_span(line[2:])}</li>")
        elif line:
            body.append(f"<p>{_span(line)}</p>")
    content = "\n".join(body).replace("</tr>\n<tr>", "</tr><tr>")
    content = content.replace("\n<tr>", "\n<table><tr>").replace("</tr>\n", "</tr></table>\n")
    if content.endswith("</tr>"):
        content += "</table>"
    head = f'<meta charset="utf-8"><title>Report of a run</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>\n{content}\n</body></html>\n"


def _row(line: str) -> str:
    cells = [cell.strip() for cell in line.strip().strip("|").replace("\\|", "\0").split("|")]
    if all(set(cell) <= {"-"} and cell for cell in cells):
        return "<tr></tr>"
    return "<tr>" + "".join(f"<td>{_span(cell.replace(chr(0), '|'))}</td>" for cell in cells) + "</tr>"


def _span(text: str) -> str:
    text = html.escape(text.replace("&lt;", "<"))
    for mark, tag in (("**", "b"), ("`", "code")):
        pieces = text.split(mark)
        if len(pieces) % 2:
            text = "".join(piece if place % 2 == 0 else f"<{tag}>{piece}</{tag}>" for place, piece in enumerate(pieces))
    return text
