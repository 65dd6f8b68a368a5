"""The result of a training run, its report as text, and what is found in its directory while it runs or has crashed."""

from __future__ import annotations

import asyncio
import difflib
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from agentlightning import span as names
from agentlightning.assemble import said, transcript_of
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.evaluation.evaluation import Evaluation, gain_of
from agentlightning.evaluation.intervals import Gain
from agentlightning.gateway.upstream.limits import spend_of_spans
from agentlightning.resources import PromptTemplate
from agentlightning.rollouts import Attempt
from agentlightning.store import LightningStore
from agentlightning.store.base import LightningStoreBase
from agentlightning.task import Overlap
from agentlightning.training.health.signs import SignHistory, sign_history
from agentlightning.training.health.step_record import StepRecord
from agentlightning.training.persistence.run_dir import (
    ERROR_FILE,
    RunState,
    check_run,
    is_locked,
    read_state,
    unfinished,
    whole_lines,
)
from agentlightning.training.sources.collector import cause_of_failure
from agentlightning.util.event_loop import run_sync
from agentlightning.util.frozen_struct import FrozenStruct, as_dataclass
from agentlightning.util.json_values import as_text, dumps, loads

# -- cost ------------------------------------------------------------------------------------------------------------

# What a run has cost: tokens where calls were recorded, money where prices are set.


@as_dataclass
class Cost(FrozenStruct, frozen=True):
    """What a run, or a stage of it, has used.

    >>> from agentlightning.training.report.result import Cost
    >>> Cost(search_tokens=1200).search_money is None
    True
    """

    sampled_tokens: int = 0
    """Tokens that the policy sampled in the rollouts that were trained on."""
    search_calls: int = 0
    """Calls of critic and editor."""
    search_tokens: int = 0
    """Tokens, read and written, of critic, editor, and the agent's recorded calls in prompt searches."""
    search_money: float | None = None
    """What these cost by the prices of `PromptModel` and `SearchBudget`. None: none is set."""
    provider_calls: int = 0
    """Calls of agents that the gateway has sent to providers, in the last attempt of each rollout, evaluations
    included. Those of a prompt search are among its tokens and its money."""
    provider_tokens: int = 0
    provider_dollars: float | None = None
    """What those calls cost that have a price (`gateway.providers`, `gateway.routes`), in US dollars. None: no call has
    one."""
    provider_calls_without_price: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cost_of_steps(lines: Sequence[Mapping[str, Any]]) -> Cost:
    """The cost of steps by their metrics. What a prompt search counts is its total so far, so its last step has it."""
    sampled = sum(int(line.get("sampled_tokens") or 0) for line in lines)
    searches: dict[int, Mapping[str, Any]] = {line.get("stage", 0): line for line in lines if "apo_tokens" in line}
    ends = searches.values()
    return Cost(
        sampled,
        sum(int(line["apo_model_calls"]) for line in ends),
        sum(int(line["apo_tokens"]) for line in ends),
        sum(float(line["apo_money"]) for line in ends) or None,
    )


async def with_providers(cost: Cost, store: LightningStoreBase, run_id: str) -> Cost:
    """The cost with the calls to providers that the spans of a run record, without those of its searches, which are
    counted."""
    found = [each.rollout_id for each in await store.query_rollouts(rollout_id_contains=run_id)]
    calls = priced = tokens = 0
    dollars = 0.0
    async for _, spans in store.iter_spans([each for each in found if not each.startswith(f"{run_id}-trial-")]):
        sent = [span for span in spans if names.PROVIDER_RETRIES in span.attributes]
        spent = spend_of_spans(sent)
        calls, tokens, dollars = calls + len(sent), tokens + spent.tokens, dollars + spent.dollars
        priced += sum(names.COST in span.attributes for span in sent)
    return replace(
        cost,
        provider_calls=calls,
        provider_tokens=tokens,
        provider_dollars=dollars if priced else None,
        provider_calls_without_price=calls - priced,
    )


# -- stage result ----------------------------------------------------------------------------------------------------

# What each stage of a run of several algorithms has gained, and at what cost.


@as_dataclass
class StageResult(FrozenStruct, frozen=True):
    """What a stage has gained.

    >>> from agentlightning.training.report.result import StageResult
    >>> StageResult("apo", first_step=0, steps=30, rollouts=200).cost.search_tokens
    0
    """

    name: str
    """That of its algorithm."""
    first_step: int
    """The steps of the run before it."""
    steps: int
    rollouts: int
    held_out: Mapping[str, Gain] = {}
    """Held-out reward before and after it by sampling mode, with the 95% interval of the paired gain. Empty where it
    was not measured: rewards changed their meaning after it."""
    cost: Cost = Cost()
    """Without the calls to providers, which are counted for the whole run."""


def stage_results(state: RunState, lines: Sequence[Mapping[str, Any]], modes: Sequence[str]) -> tuple[StageResult, ...]:
    """The stages of a finished run; none for a run of one algorithm. `lines`: the metrics of its steps."""
    records = state.stages
    ends: list[Mapping[str, Any]] = [*records[1:], {"first_step": state.step, "rollouts": state.rollouts}]
    measured = ["before", *(f"stage-{place}" for place in range(len(records) - 1)), "after"]

    def gains(place: int) -> dict[str, Gain]:
        found: dict[str, Gain] = {}
        for mode in modes:
            before, after = (state.evaluations.get(f"{when}-{mode}") for when in measured[place : place + 2])
            if before and after:
                found[mode] = gain_of(Evaluation(tuple(before)), Evaluation(tuple(after)))
        return found

    return tuple(
        StageResult(
            record["name"],
            record["first_step"],
            end["first_step"] - record["first_step"],
            end["rollouts"] - record["rollouts"],
            gains(place),
            cost_of_steps([line for line in lines if line.get("stage") == place + 1]),
        )
        for place, (record, end) in enumerate(zip(records, ends, strict=False))
    )


def prompt_diff(before: Mapping[str, PromptTemplate], after: Mapping[str, PromptTemplate]) -> str:
    """What has changed in prompt templates, as a unified diff; empty where nothing has."""
    return "\n".join(
        line
        for name, template in after.items()
        for line in difflib.unified_diff(
            before[name].template.splitlines() if name in before else [],
            template.template.splitlines(),
            f"{name} before",
            f"{name} after",
            lineterm="",
        )
    )


@as_dataclass
class RecordedResult(FrozenStruct, frozen=True):
    """What a run on recorded data learned from, and what it could not use.

    >>> from agentlightning.training.report.result import RecordedResult
    >>> RecordedResult("lightning_rl", method="awr", sessions=12).left_out
    {}
    """

    algorithm: str
    method: str | None = None
    """How rollouts of another policy were learned from: importance, awr or rejection; None for other algorithms."""
    sessions: int = 0
    """Sessions that were learned from."""
    left_out: Mapping[str, int] = {}
    """Sessions that were not, by reason."""
    rendered_calls: int = 0
    """Model calls whose text was put into the model's tokens, because theirs were not recorded."""
    foreign_calls: int = 0
    """Among those, calls that were recorded in tokens of another tokenizer."""
    metrics: Mapping[str, float] = {}
    """Of the last step."""
    counts: Mapping[str, int] = {}
    """What steps skipped and trained, summed over all of them: groups_without_spread, tokens_trained ..."""
    notes: tuple[str, ...] = ()
    """What was said while it ran."""


@as_dataclass
class TrainingResult(FrozenStruct, frozen=True):
    """What improved, by how much, at what cost, and where the trained model is."""

    held_out: Mapping[str, Gain]
    """Held-out reward before and after by sampling mode (greedy, sampled), with the 95% interval of the paired gain.
    NaN if no task has a reward both before and after."""
    missing: Mapping[str, Mapping[str, int]]
    """Held-out tasks without a reward: their number by reason, by measurement (`before-greedy`, `after-greedy` ...)."""
    rollouts: int
    """Training rollouts, the failed ones included."""
    failed_rollouts: int
    rejected_rollouts: Mapping[str, int]
    """Training rollouts that succeeded and could not be learned from, by reason."""
    skipped_groups: int
    warnings: tuple[str, ...]
    """Signs that the run learned too little, with the way out: those shown while it ran, and those of its end."""
    warning_counts: Mapping[str, int]
    """The number of steps at which each kind of warning was found, by its name."""
    rollbacks: int
    """Returns to a healthy checkpoint after a collapse (`run.on_collapse`)."""
    gate_rejections: int
    """Versions that lost on the guard set and were not promoted (`gate`)."""
    steps: int
    best_step: int | None
    """The step whose weights are in `checkpoint`. None: the last one."""
    seconds: float
    checkpoint: Path
    """A directory that transformers loads. The run's prompts, and resources that the algorithm published, are in its
    `resources.json`."""
    curve: Path | None
    """The picture of the reward curve; None where matplotlib is not installed."""
    run_dir: Path
    start_prompts: Mapping[str, PromptTemplate] = {}
    """The prompt templates that the run began with, by name."""
    prompts: Mapping[str, PromptTemplate] = {}
    """Those it ended with."""
    stages: tuple[StageResult, ...] = ()
    """What each stage has gained, in a run of several algorithms (`agl.Sequential`)."""
    cost: Cost = Cost()
    """Tokens, and money where prices are set."""

    tracker_failures: Mapping[str, int] = {}
    """The number of calls that failed, by experiment tracker; empty where all went well."""
    recorded: RecordedResult | None = None
    """What was learned from, in a run on recorded data. None: from rollouts of an agent."""
    gateways: Mapping[str, Any] | None = None
    """What the gateways of `run.gateways` did since the run was last started: `urls`, `joins`, `calls`, `tokens`,
    `failed`, `held` (calls that waited for an update), `updates` and `held_seconds`, summed. None: the trainer's own
    process answered."""

    @property
    def best_prompt(self) -> PromptTemplate:
        """The prompt template of the result: the only one, else the first that was changed. Raises ConfigError for a
        run without prompt templates."""
        changed = [each for name, each in self.prompts.items() if each != self.start_prompts.get(name)]
        for each in (*changed, *self.prompts.values()):
            return each
        raise ConfigError("the run had no prompt template; give some: Trainer(initial_resources={'prompt': ...})")

    def diff(self) -> str:
        """What the run changed in its prompt templates, as a unified diff; empty where nothing changed."""
        return prompt_diff(self.start_prompts, self.prompts)

    def report(
        self, *, format: Literal["markdown", "html"] = "markdown", examples: int = 3, store: Any | None = None
    ) -> str:
        """The result as text: held-out reward before and after with its interval, the gain of each stage where there
        are several, tasks won and lost, what it cost in tokens and, where prices are set, in money, and transcripts of
        `examples` tasks of either kind before and after. `store`: that of the run, where it was given
        one. Raises ConfigError for another format."""

        if format not in ("markdown", "html"):
            raise ConfigError(f"format={format!r} is not one of markdown, html")
        text = run_sync(markdown_report(self.run_dir, examples, store))
        return as_html(text) if format == "html" else text

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values, as `--json` prints it."""
        table = {name: getattr(self, name) for name in self.__dataclass_fields__}
        del table["missing"], table["start_prompts"]
        table["held_out"] = {
            mode: asdict(gain)
            | {f"reasons_{when}": self.missing.get(f"{when}-{mode}", {}) for when in ("before", "after")}
            for mode, gain in self.held_out.items()
        }
        table["seconds"] = round(self.seconds, 2)
        table["prompts"] = {name: each.template for name, each in self.prompts.items()}
        return loads(dumps(table | {"prompt_diff": self.diff()}, default=str))


# -- run report ------------------------------------------------------------------------------------------------------

# The report of a finished run as text: `report.md.jinja` filled in with what the run directory holds, as Markdown or as
# one HTML page without anything from elsewhere.

MOST_SHOWN = 1500
"""Characters of an output or a message that are shown."""


class Change(NamedTuple):
    """A task with a reward before and after."""

    place: int
    task: Any
    before: float
    after: float
    gain: float


def won_and_lost(rows: Iterable[tuple[Any, float | None, float | None]]) -> tuple[list[Change], list[Change]]:
    """The tasks whose reward rose, and those whose reward fell, the largest change first, of (task, reward before,
    reward after)."""
    found = [Change(i, task, b, a, a - b) for i, (task, b, a) in enumerate(rows) if b is not None and a is not None]
    found.sort(key=lambda each: -abs(each.gain))
    return [each for each in found if each.gain > 0], [each for each in found if each.gain < 0]


async def markdown_report(run_dir: Path, examples: int, store: LightningStoreBase | None = None) -> str:
    """The report in Markdown. Raises ConfigError where the run is not finished."""
    path = run_dir / "report.json"
    if not path.exists():
        raise ConfigError(f"{run_dir} has no report.json: {unfinished(run_dir)}")
    report, state = loads(path.read_bytes()), read_state(run_dir)
    tasks = run_dir / "data/held_out.jsonl"
    titles = [_inline(as_text(loads(line)))[:120] for line in tasks.read_bytes().splitlines()]
    changes: list[Any] = []
    shown = None
    for mode in report["held_out"]:
        rewards = (state.evaluations.get(f"{when}-{mode}", ()) for when in ("before", "after"))
        rows = [*zip(titles, *rewards, strict=False)]
        won, lost = won_and_lost(rows)
        missing = sum(None in row for row in rows)
        changes.append((mode, won, lost, len(rows) - missing - len(won) - len(lost), missing))
        if len(changes) == 1 and (chosen := [*won[:examples], *lost[:examples]]):
            shown = await _examples(run_dir, state, mode, chosen, store)
    return fill_report(run_dir.name, report, changes, shown)


def fill_report(
    name: str, report: Mapping[str, Any], changes: Sequence[Any] = (), examples: Sequence[Any] | None = None
) -> str:
    """The report of the run `name`, from its `report.json`; `changes` and `examples` as the template names them."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("agentlightning.training", "report"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"block": _block, "inline": _inline}
    template = environment.get_template("report.md.jinja")
    return template.render(name=name, report=report, changes=changes, examples=examples)


async def _examples(
    run_dir: Path, state: RunState, mode: str, chosen: Sequence[Change], given: LightningStoreBase | None
) -> list[Any]:
    """What was said in these tasks before and after; nothing where the store is not known."""
    if given is None and not (run_dir / "store.db").exists():
        return []
    store = given or LightningStore(run_dir / "store.db")
    found: list[Any] = []
    labels = {"before": "before", "after": f"after-{state.measured_step or 0:06d}"}
    try:
        for each in chosen:
            rollouts: list[Any] = []
            for when, label in labels.items():
                rollout_id = f"{state.run_id}-{label}-{mode}{state.suffix}-{each.place:05d}"
                rollouts.append((when, getattr(each, when), rollout_id, await _transcript(store, rollout_id)))
            found.append((each.task, rollouts))
    finally:
        if given is None:
            await store.close()
    return found


async def _transcript(store: LightningStoreBase, rollout_id: str) -> str:
    attempt = await store.get_latest_attempt(rollout_id)
    if attempt is None:
        return "(this rollout is no longer in the store)"
    spans = await store.query_spans(rollout_id, attempt.attempt_id)
    messages = [(each.get("role", "?"), said(each, "\n")) for each in transcript_of(spans)]
    if (output := attempt.metadata.get("output")) is not None:
        messages.append(("result", as_text(output)))
    return "\n".join(f"{role}: {_shortened(text)}" for role, text in messages) or "(nothing)"


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

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1e293b}"
    "table{border-collapse:collapse}td,th{border:1px solid #cbd5e1;padding:.25rem .6rem;text-align:left}"
    "pre{background:#f1f5f9;padding:.75rem;white-space:pre-wrap;overflow-wrap:anywhere}"
)


def as_html(markdown: str) -> str:
    """The Markdown of `markdown_report` as a page."""
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    content = reader.disable(["image", "link", "autolink"]).render(markdown)  # Agents wrote a part of it.
    head = f'<meta charset="utf-8"><title>Report of a run</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>\n{content}</body></html>\n"


# -- examination -----------------------------------------------------------------------------------------------------

# Examines the directory of a run, running, finished or crashed: its steps, its state, the failures in its store.

# -- milestones ------------------------------------------------------------------------------------------------------

# Warnings at the start and the end of a run: what is known before its first rollout, and what it did not achieve.

LEAST_MOVED = 1e-5
"""Learning rates of a run that add up to less leave the policy what it was: adaptive optimizers move a weight by about
the rate at each update, and weights have a size of about 0.01."""


def starting_warnings(*, random_weights: bool, shared: Sequence[Overlap] = ()) -> dict[str, str]:
    """What is known before the first rollout: kind -> sentence. `shared`: tasks that are in several of the run's
    datasets."""
    found = {
        f"overlap_{each.first}_{each.second}": (
            f"{each}. A measurement on tasks that were learned from, or that chose the checkpoint, promises too much:"
            f" leave them out of {each.first}"
        )
        for each in shared
    }
    if not random_weights:
        return found
    return found | {
        "random_weights": (
            'policy.model is "tiny", a small model with random weights: it shows that everything works, and learns next'
            " to nothing from rewards alone. Give a model (--model smollm2-135m, or a directory), or demonstrations to"
            " begin with (warm_start.dataset)"
        )
    }


CLOSING = ("nothing_learned", "not_compared_", "worse_", "no_gain_")
"""What the kinds of warnings at the end begin with: a run that continues has none of them."""


def closing_warnings(records: Sequence[StepRecord], gains: Mapping[str, Gain]) -> dict[str, str]:
    """What a finished run did not achieve: kind -> sentence."""
    found: dict[str, str] = {}
    if any(record.groups for record in records) and not any(record.groups_trained for record in records):
        found["nothing_learned"] = "nothing was learned: no group of rollouts had rewards that differ"
    moved = sum(each.optimizer_steps * (each.lr or 0.0) for each in records)
    updates = sum(each.optimizer_steps for each in records)
    more = "train for more steps (of a prompt search, raise algorithm.budget), or"
    if updates and moved < LEAST_MOVED:
        more = (
            f"the weights hardly moved: {updates} updates, whose learning rates add up to {moved:.2g}, change no weight"
            " by more than about that. Raise algorithm.optimizer.lr (1e-6 to 1e-4 is usual, ten times that with LoRA);"
        )
    for mode, gain in gains.items():
        low, high = gain.interval
        if not gain.tasks:
            found[f"not_compared_{mode}"] = (
                f"no held-out task has a reward both before and after ({mode}: {gain.missing_before} have none before,"
                f" {gain.missing_after} none after), so nothing is known of a gain; the failures are counted in"
                " report.json (reasons_before, reasons_after), and `agl dashboard` shows them"
            )
        elif high < 0:
            found[f"worse_{mode}"] = (
                f"the trained policy is worse than the one it started from ({mode}: {gain.gain:+.3f}); lower"
                " algorithm.optimizer.lr, and see in curve.png where it turned"
            )
        elif low <= 0:
            found[f"no_gain_{mode}"] = (
                f"no gain is shown ({mode}): the interval {low:+.3f} to {high:+.3f} of {gain.tasks} held-out tasks"
                f" includes 0; {more} measure on more tasks (a file as data.held_out, or a larger data.held_out_share)"
            )
    return found


MOST_TEXT = 240
"""Characters of an example."""
MOST_FAILURES = 2000
"""Failed rollouts that are read from the store, the newest ones."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Failed rollouts of one cause."""

    cause: str
    """The type of the error, or how the attempt ended."""
    count: int
    example: str
    """`ROLLOUT: message` of one of them."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What is found in the directory of a run."""

    run_dir: Path
    status: Literal["running", "finished", "unfinished"]
    """unfinished: no process has it open, and there is no report."""
    state: RunState
    steps: int
    """Steps with readable metrics."""
    signs: tuple[SignHistory, ...]
    warnings: Mapping[str, str]
    """By kind, what the run itself has warned of and its steps do not show, and how it `ended`, if not well."""
    failures: tuple[Failures, ...]
    damaged_lines: tuple[int, ...]
    """Numbers of the lines of metrics.jsonl that cannot be read."""
    notes: tuple[str, ...] = ()
    """What could not be examined, and why."""

    @property
    def is_healthy(self) -> bool:
        return not (self.signs or self.warnings or self.damaged_lines)


def examine(run_dir: Path) -> Examination:
    """Raises ConfigError for a directory that holds no run, ResumeError for a state that cannot be read."""
    check_run(run_dir)
    state, status = read_state(run_dir), status_of(run_dir)
    records, damaged = read_records(run_dir / "metrics.jsonl")
    notes = [] if records else ["no step is finished yet, so that there is nothing to judge"]
    failures = failures_of(run_dir / "store.db", state, notes)
    warnings = state.warnings
    if status != "running":
        warnings = warnings | _ending(run_dir, has_worked=status == "finished" or bool(records))
    if status == "unfinished" and "ended" not in warnings:
        notes.append(f"it is not finished, and no process works on it; go on with {_resume(run_dir)}")
    signs = tuple(sign_history(records))
    for each in signs:
        warnings = {kind: text for kind, text in warnings.items() if kind != each.sign.name}
    return Examination(run_dir, status, state, len(records), signs, warnings, failures, damaged, tuple(notes))


def _ending(run_dir: Path, *, has_worked: bool) -> dict[str, str]:
    """How the last process of a run ended, if not well: `ended` -> sentence. One that `has_worked`, with a step to show
    or a result, may have been stopped on purpose."""
    try:
        error = (run_dir / ERROR_FILE).read_text(errors="replace").strip()
    except OSError:
        error = ""
    again = _resume(run_dir)
    if error:
        first, _, more = error.partition("\n")
        rest = f" (all of it: {run_dir / ERROR_FILE})" if more or len(first) > MOST_TEXT else ""
        return {"ended": f"the run ended with an error: {first[:MOST_TEXT]}{rest}. Mend its cause, then: {again}"}
    if has_worked:
        return {}
    return {
        "ended": "its process ended before the first step and left no error: it was interrupted or killed, as the"
        " system does where memory runs out (policy.token_budget=N or a smaller policy.model needs less). Go on with"
        f" {again}"
    }


def _resume(run_dir: Path) -> str:
    return f"agl train --resume {shlex.quote(str(run_dir))}"


def status_of(run_dir: Path) -> Literal["running", "finished", "unfinished"]:
    """unfinished: no process has the run open, and there is no report."""
    if is_locked(run_dir):
        return "running"
    return "finished" if (run_dir / "report.json").exists() else "unfinished"


def read_records(path: Path) -> tuple[list[StepRecord], tuple[int, ...]]:
    """The steps in a file of metrics, and the numbers of the lines that cannot be read. A last line without an end is
    being written."""
    lines = [*map(read_record, whole_lines(path))]
    damaged = tuple(number for number, record in enumerate(lines, 1) if record is None)
    return [record for record in lines if record is not None], damaged


def read_record(line: bytes) -> StepRecord | None:
    """The step in a line of metrics; None for one that cannot be read."""
    try:
        found: Any = orjson.loads(line)
        return StepRecord.read(found | {"step": int(found["step"])})
    except (ValueError, TypeError, LookupError):
        return None


def failures_of(path: Path, state: RunState, notes: list[str]) -> tuple[Failures, ...]:
    """The failed rollouts of the run by cause, the most frequent first."""
    if not path.exists():
        if state.failed_rollouts:
            notes.append("its rollouts are in another store, so that failures are not listed by cause")
        return ()

    async def failed_attempts() -> list[Attempt]:
        store = LightningStore(path)
        try:
            rollouts = await store.query_rollouts(
                status_in=["failed"], rollout_id_contains=state.run_id, newest_first=True, limit=MOST_FAILURES
            )
            return await store.get_latest_attempts([rollout.rollout_id for rollout in rollouts])
        finally:
            await store.close()

    try:
        attempts = asyncio.run(failed_attempts())
    except AgentLightningError as error:
        notes.append(f"{path} cannot be read, so that failures are not listed by cause: {error}")
        return ()
    counts = Counter(map(_cause, attempts))
    examples = {_cause(each): f"{each.rollout_id}: {cause_of_failure(each)}" for each in attempts}
    return tuple(Failures(cause, count, examples[cause][:MOST_TEXT]) for cause, count in counts.most_common())


def _cause(attempt: Attempt) -> str:
    error = attempt.metadata.get("error")
    kind = error.get("type") if isinstance(error, dict) else None
    return str(kind) if kind else attempt.status
