"""What the searches for better texts have in common; `reflective.py`, `beam.py` and `gepa.py` are the three of them.

A search proposes candidates, has them tried, and says which is the best. It is a state machine with one proposal a
step. After each step `state_dict` holds all it needs to go on, so a run that is interrupted continues from its last
step; rollouts of the broken step are found in the store again.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, cast

from pydantic import TypeAdapter

from agentlightning import span as names
from agentlightning.algorithms.apo.config import APOConfig, PromptModel, SearchBudget, Spending, price
from agentlightning.algorithms.apo.text import (
    PARENT,
    Playbook,
    ReplyError,
    Texts,
    apply_edits,
    digest,
    numbered,
    read_edits,
    schema_violation,
)
from agentlightning.algorithms.training import RolloutReport, Training
from agentlightning.assemble import calls, steps
from agentlightning.errors import (
    ConfigError,
    MissingRewardError,
    TrainingStopped,
)
from agentlightning.resources import PromptTemplate
from agentlightning.rewards.base import post_json
from agentlightning.span import Span
from agentlightning.util.json_values import as_text, recorded_objects

# -- models ------------------------------------------------------------------------------------------------------------

# Language models that read and write prompts: an OpenAI-compatible endpoint, a client object, a local model.

Message = dict[str, str]
DEFAULT_URL: Final = "https://api.openai.com/v1"
RETRIES: Final = 2
BACKOFF_SECONDS: Final = 0.5


class ModelError(ReplyError):
    """A model gave no reply. `reason`: timeout or failed."""


class Completion(NamedTuple):
    """A reply, and the tokens it took."""

    text: str
    input_tokens: int = 0
    output_tokens: int = 0
    truncated: bool = False
    """Whether it was cut off at its limit of tokens."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A model that completes a conversation."""

    settings: PromptModel
    send: Callable[[PromptModel, list[Message]], Awaitable[Completion]]

    async def complete(self, messages: Sequence[Message]) -> Completion:
        """Raises ModelError where there is no reply in time, ConfigError for a rejected key or model."""
        settings, name = self.settings, self.settings.path or self.settings.model
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                return await self.send(settings, list(messages))
        except (TimeoutError, MissingRewardError) as error:
            text = f"{name} gave no reply within {settings.timeout_seconds:g} s"
            raise ModelError("timeout", text) from error
        except Exception as error:  # The boundary of the model, which may be a client of the user's.
            if getattr(error, "status", None) in (401, 403, 404):
                raise ConfigError(
                    f"{error}; set its model and base_url, and the key in {settings.api_key_env}, or api_key_env"
                    " to the variable that holds it"
                ) from error
            raise ModelError("failed", f"{name} gave no reply: {type(error).__name__}: {error}") from error


async def ask_endpoint(settings: PromptModel, messages: list[Message]) -> Completion:
    """The reply of a model behind an OpenAI-compatible endpoint."""
    url = (settings.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL).rstrip("/")
    body = {"model": settings.model, "messages": messages, "temperature": settings.temperature}
    reply = await post_json(
        f"{url}/chat/completions",
        body | {"max_tokens": settings.max_tokens},
        key_variable=settings.api_key_env,
        timeout=settings.timeout_seconds,
        retries=RETRIES,
        backoff=BACKOFF_SECONDS,
        source=f"the model {settings.model!r}",
    )
    return _completion(reply)


async def ask_client(client: Any, settings: PromptModel, messages: list[Message]) -> Completion:
    """The reply of a client object with the interface of `openai.AsyncOpenAI`."""
    reply = await client.chat.completions.create(
        model=settings.model, messages=messages, temperature=settings.temperature
    )
    return _completion(reply)


def _completion(reply: Any) -> Completion:
    """A chat completion, in JSON or as an object of a client."""

    def read(value: Any, name: str) -> Any:
        return value.get(name) if isinstance(value, dict) else getattr(value, name, None)

    choice, usage = read(reply, "choices")[0], read(reply, "usage")
    tokens = (int(read(usage, name) or 0) for name in ("prompt_tokens", "completion_tokens"))
    message = read(choice, "message")
    return Completion(read(message, "content") or "", *tokens, truncated=read(choice, "finish_reason") == "length")


async def ask_engine(engine: Any, settings: PromptModel, messages: list[Message]) -> Completion:
    """The reply of a model in this process."""
    from agentlightning.engine.base import SamplingParams

    prompt = engine.chat.encode(engine.chat.render(messages))
    params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
    sample = await engine.sample(prompt, params)
    text = engine.chat.decode(sample.token_ids, skip_special_tokens=True)
    return Completion(text, len(prompt), len(sample.token_ids), sample.finish_reason == "length")


async def open_model(
    settings: PromptModel, client: Any, stack: AsyncExitStack, part: str, *, load: bool = True
) -> LanguageModel:
    """The model that settings name; the stack closes it. Raises ConfigError where they name none. Without `load` a
    model of this machine cannot be asked."""
    if settings.path is not None and not load:
        return LanguageModel(settings, partial(ask_engine, None))
    if settings.path is not None:
        from agentlightning.policy.open import open_frozen

        policy = await open_frozen(part, settings.path)
        stack.push_async_callback(policy.close)
        return LanguageModel(settings, partial(ask_engine, policy))
    if not settings.model:
        raise ConfigError(f"algorithm.{part} names no model; set its model (and base_url), or its path")
    if client is not None:
        return LanguageModel(settings, partial(ask_client, client))
    return LanguageModel(settings, ask_endpoint)


# -- record ----------------------------------------------------------------------------------------------------------

# The record of a search: which candidate earned what on which task. Nothing in it is bought twice.

Split = Literal["train", "validation"]
"""The tasks that a search may see. Those held out are the trainer's alone."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluation to make: a task by its place in a split; `repeat` tells repetitions apart."""

    task: int
    repeat: int = 0
    split: Split = "train"


class Outcome(NamedTuple):
    """What a candidate earned in one rollout."""

    task: int
    score: float | None
    """None: the rollout failed or has no usable reward; it counts as the lowest score seen, or 0."""
    transcript: str = ""
    """The rollout as the critic reads it."""
    tokens: int = 0
    money: float = 0.0


# -- transcript ------------------------------------------------------------------------------------------------------

# A rollout as text, for the critic: task, model calls, tool calls, output, named rewards, failure.


def transcript(task: Any, report: RolloutReport) -> str:
    """What happened in a rollout. A message that several calls share is shown once."""
    parts = [f"Task: {as_text(task)}", *_events(report.spans)]
    if report.output is not None:
        parts.append(f"Output: {as_text(report.output)}")
    if isinstance(report.reward, dict):
        parts.append(f"Rewards: {as_text(report.reward)}")
    if report.failure is not None:
        parts.append(f"Failure: {report.failure}")
    return "\n".join(parts)


def usage(spans: Sequence[Span], budget: SearchBudget) -> tuple[int, float]:
    """Tokens of the recorded model calls of a rollout, and what they cost: what the gateway has recorded, for calls
    without a price there by the prices of the budget."""
    tokens, money = 0, 0.0
    for span in calls(spans):
        read, written, cost = (_number(span, name) for name in (names.INPUT_TOKENS, names.OUTPUT_TOKENS, names.COST))
        tokens += int(read + written)
        money += cost or price(read, written, budget.agent_input_price, budget.agent_output_price)
    return tokens, money


def _number(span: Span, name: str) -> float:
    value = span.attributes.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _events(spans: Sequence[Span]) -> Iterator[str]:
    events: list[tuple[int, Span | str]] = [(span.sequence_id, span) for span in calls(spans)]
    for step in steps(spans):
        shown = (
            f"Tool {step.name}({as_text(step.arguments)}): {as_text(step.result)}" if step.kind == "tool" else "Error"
        )
        events.append((step.sequence_id, shown + (f": {step.error}" if step.error else "")))
    seen: set[str] = set()
    for _, event in sorted(events, key=lambda each: each[0]):
        if isinstance(event, str):
            yield event
            continue
        for name in (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES):
            for line in _messages(event.attributes.get(name)):
                if line not in seen:
                    seen.add(line)
                    yield line


def _messages(recorded: object) -> Iterator[str]:
    for message in recorded_objects(recorded):
        parts = [_part(part) for part in message.get("parts") or ()]
        yield f"{message.get('role', 'message')}: {' '.join(part for part in parts if part)}"


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    fields = cast("dict[str, Any]", part)
    if fields.get("type") == "tool_call":
        return f"calls {fields.get('name')}({as_text(fields.get('arguments'))})"
    return as_text(fields.get("content", fields.get("response", "")))


@dataclass(frozen=True, slots=True)
class RunEvaluator:
    """Runs the agent of a training run with candidates."""

    training: Training
    start: Mapping[str, PromptTemplate]
    budget: SearchBudget
    """With the prices of the agent's calls."""

    async def evaluate(self, texts: Texts, trials: Sequence[Trial], parent: str | None) -> list[Outcome]:
        """One rollout for each trial, in their order; they run at the same time. `parent`: the digest of the candidate
        that this one was made from."""
        splits = {"train": self.training.train_tasks, "validation": self.training.validation_tasks}
        names = [f"{digest(texts)}-{each.split}{each.task:05d}-{each.repeat}" for each in trials]
        tasks = dict(zip(names, (splits[each.split][each.task] for each in trials), strict=True))
        made_from = {} if parent is None else {PARENT: parent}
        reports = await self.training.try_resources(dict(templates(self.start, texts)), tasks, made_from)
        found = dict(zip(tasks, reports, strict=True))
        return [
            Outcome(
                trial.task,
                found[name].score,
                transcript(tasks[name], found[name]),
                *usage(found[name].spans, self.budget),
            )
            for name, trial in zip(names, trials, strict=True)
        ]


def templates(start: Mapping[str, PromptTemplate], texts: Texts) -> dict[str, PromptTemplate]:
    """The templates with other texts."""
    return {name: start[name].model_copy(update={"template": text}) for name, text in texts.items()}


# -- critic ----------------------------------------------------------------------------------------------------------

# The critic and the editor: what they are asked, and what their replies mean.
#
# The critic reads failed rollouts and says what the texts lack; the editor turns that into bounded edits. A reply that
# is empty, over-long, or no edit, and one that does not come, is skipped and counted by its reason; after `MAX_SKIPS`
# in a row the search ends with the first of them, because nothing can be learned from such a model.

MAX_SKIPS: Final = 8
MAX_CRITIQUE_CHARS: Final = 8000

CRITIC_ROLE: Final = (
    "You improve the texts that steer an AI agent: prompts, tool descriptions, playbooks. You are shown the texts and"
    " rollouts in which the agent earned less than it could."
)
CRITIC_TASK: Final = (
    "Find the one cause that explains most of these failures and that a change of the texts can remove. Say in at most"
    " 120 words what the texts lack or what in them misleads the agent, as general advice for tasks of this kind, not"
    " for these tasks alone."
)
COUNTERS_TASK: Final = (
    "The lines of {names} are items of a playbook. End with two lines: `HELPFUL:` and `HARMFUL:`, each followed by the"
    " numbers of the items that helped or misled the agent here."
)
EDITOR_ROLE: Final = "You edit the texts that steer an AI agent. You make small changes and keep what works."
EDITOR_TASK: Final = (
    "Carry out the advice with at most {max_edits} edits of single lines. Keep all placeholders in braces as they are,"
    ' and invent none. Reply with JSON only: {{"edits": [{{"op": "add", "resource": NAME, "after": LINE, "text":'
    ' TEXT}}, {{"op": "delete", "resource": NAME, "line": LINE}}, {{"op": "replace", "resource": NAME, "line": LINE,'
    ' "text": TEXT}}]}}. Line numbers are those shown; `after` 0 adds before the first line.'
)
_COUNTER = re.compile(r"^\W*(HELPFUL|HARMFUL)\b(.*)$", re.MULTILINE)


class Critique(NamedTuple):
    """What the critic says, and the items of playbooks that it counts as helpful or harmful, by line number."""

    text: str
    helpful: tuple[int, ...] = ()
    harmful: tuple[int, ...] = ()


@dataclass(slots=True)
class Writer:
    """Asks critic and editor, counts what cannot be used, and accounts for what they cost."""

    critic: LanguageModel
    editor: LanguageModel
    spending: Spending
    max_edits: int
    max_transcript_chars: int
    skips: Counter[str] = field(default_factory=Counter[str])
    """Replies that could not be used, by reason."""
    in_a_row: Counter[str] = field(default_factory=Counter[str])
    """By part, critic or editor: its unusable replies since the last one that was of use."""
    _first: dict[str, str] = field(default_factory=dict[str, str])

    async def critique(
        self, texts: Mapping[str, str], rollouts: Sequence[Outcome], playbooks: Sequence[str] = ()
    ) -> Critique | None:
        """What the texts lack, from these rollouts. None: skipped and counted."""
        counters = [COUNTERS_TASK.format(names=", ".join(playbooks))] if playbooks else []
        shown = [show_rollout(each, number, self.max_transcript_chars) for number, each in enumerate(rollouts, 1)]
        parts = ["# Texts", show_texts(texts, {}), "# Rollouts", *shown, "# Your task", CRITIC_TASK, *counters]
        reply = await self.ask("critic", CRITIC_ROLE, "\n\n".join(parts))
        if reply is None:
            return None
        text = reply.text.strip()
        if len(text) > MAX_CRITIQUE_CHARS or reply.truncated:
            return self.skip("critic", "critic_over_long", f"the critic wrote {len(text)} characters, or was cut off")
        if not re.search(r"\w+\W+\w+", text):
            return self.skip("critic", "critic_nonsense", f"the critic said {text[:100]!r}, which is no advice")
        self.in_a_row["critic"] = 0
        helpful, harmful = (_numbers(text, word) for word in ("HELPFUL", "HARMFUL"))
        return Critique(_COUNTER.sub("", text).strip(), helpful, harmful)

    async def edit(
        self,
        texts: Mapping[str, str],
        critique: str,
        rejected: Sequence[str] = (),
        notes: Mapping[str, str] | None = None,
    ) -> str | None:
        """The editor's reply. `rejected` are edits of these texts that did not help; `notes` follow the texts they are
        named after. None: skipped and counted."""
        parts = ["# Texts", show_texts(texts, notes or {}), "# Advice", critique]
        if rejected:
            parts += ["# Edits tried before that did not help", "\n".join(f"- {each}" for each in rejected)]
        parts += ["# Your task", EDITOR_TASK.format(max_edits=self.max_edits)]
        reply = await self.ask("editor", EDITOR_ROLE, "\n\n".join(parts))
        return None if reply is None else reply.text

    async def ask(self, part: str, role: str, text: str) -> Completion | None:
        """A reply of the critic or the editor; None: there was none, which is counted."""
        model = self.critic if part == "critic" else self.editor
        try:
            reply = await model.complete([{"role": "system", "content": role}, {"role": "user", "content": text}])
        except ModelError as error:
            return self.skip(part, f"{part}_{error.reason}", str(error))
        self.spending.count_model(model.settings, reply.input_tokens, reply.output_tokens)
        if not reply.text.strip():
            return self.skip(part, f"{part}_empty", f"the {part}'s reply is empty")
        return reply

    @property
    def skipped(self) -> str:
        """How many replies could not be used, by reason."""
        return ", ".join(f"{count} {name}" for name, count in self.skips.items())

    def skip(self, part: str, reason: str, message: str) -> None:
        """Count a skipped reply. Raises TrainingStopped after too many of critic or editor in a row."""
        self.skips[reason] += 1
        if not self.in_a_row[part]:
            self._first[part] = message
        self.in_a_row[part] += 1
        if self.in_a_row[part] >= MAX_SKIPS:
            raise TrainingStopped(
                f"{MAX_SKIPS} replies of the {part} in a row could not be used ({self.skipped}). The first: "
                f"{self._first[part]}. Use another model (algorithm.{part}), or raise its max_tokens or timeout_seconds"
                "; the run can be resumed"
            )


def show_texts(texts: Mapping[str, str], notes: Mapping[str, str]) -> str:
    """The texts with numbered lines."""
    shown = {name: [f"## {name}", numbered(text), notes.get(name)] for name, text in texts.items()}
    return "\n\n".join("\n".join(filter(None, parts)) for parts in shown.values())


def show_rollout(outcome: Outcome, number: int, limit: int) -> str:
    """A rollout as the critic reads it; the middle of a long one is left out."""
    text = outcome.transcript
    if len(text) > limit:
        text = f"{text[: limit // 2]}\n[{len(text) - limit} characters left out]\n{text[-(limit // 2) :]}"
    reward = "none" if outcome.score is None else f"{outcome.score:g}"
    return f"## Rollout {number}, reward {reward}\n{text}"


def _numbers(text: str, word: str) -> tuple[int, ...]:
    found = [numbers for name, numbers in _COUNTER.findall(text) if name == word]
    return tuple(int(each) for numbers in found for each in re.findall(r"\d+", numbers))


# -- search -----------------------------------------------------------------------------------------------------------


class BudgetSpentError(Exception):
    """The budget does not allow the evaluations that a step needs: the step ends there."""


@dataclass(slots=True)
class SearchContext:
    """What a search works with."""

    config: APOConfig
    start: Mapping[str, PromptTemplate]
    """The templates to begin with."""
    train_tasks: int
    validation_tasks: int
    evaluator: RunEvaluator
    writer: Writer
    spending: Spending
    counts: Counter[str] = field(default_factory=Counter[str])
    """What was proposed, accepted, rejected and skipped, by reason."""
    first: dict[str, str] = field(default_factory=dict[str, str])
    """The first message of each kind of refused edit."""
    on_favourite: Callable[[Texts], object] = lambda texts: None
    """Called with the candidate that would be the result if the search ended now."""
    parents: dict[str, str] = field(default_factory=dict[str, str])
    """Digest of a candidate -> that of the one it was made from. Rollouts record it, so that no checkpoint has to."""
    directory: Path = Path()
    """Where a search may keep files of its own."""
    playbook: Playbook = field(init=False)

    def __post_init__(self) -> None:
        self.playbook = Playbook(self.config.playbooks)

    @property
    def seed(self) -> Texts:
        return {name: template.template for name, template in self.start.items()}

    async def evaluate(self, texts: Texts, trials: Sequence[Trial]) -> list[Outcome]:
        """Outcomes, accounted for. Raises BudgetSpentError where the budget does not allow so many."""
        if self.spending.left() < len(trials):
            raise BudgetSpentError
        parent = self.parents.get(digest(texts))
        outcomes = await self.evaluator.evaluate(texts, trials, parent) if trials else []
        for outcome in outcomes:
            self.spending.count_evaluation(outcome.tokens, outcome.money)
        self.counts["failed_rollouts"] += sum(outcome.score is None for outcome in outcomes)
        return outcomes

    def descend(self, child: Texts, parent: Texts) -> None:
        """Remember what a candidate was made from. The first of several counts."""
        self.parents.setdefault(digest(child), digest(parent))

    def check(self, texts: Texts) -> None:
        """Raises ReplyError, and counts it, for texts that do not keep the placeholders of their templates."""
        for name, template in self.start.items():
            problem = schema_violation(template, texts[name])
            if problem is not None:
                raise self.refused(ReplyError("schema_violations", f"an edit of {name!r} {problem}"))

    def refused(self, error: ReplyError) -> ReplyError:
        """The error of an edit that cannot be used, counted."""
        self.counts[error.reason] += 1
        self.first.setdefault(error.reason, str(error))
        return error

    async def write(
        self, parent: Texts, rollouts: Sequence[Outcome], rejected: Sequence[str] = ()
    ) -> tuple[Texts, str] | None:
        """A child of the critic's and the editor's, after these rollouts, and the edits in words. None: there is none,
        which is counted. `rejected`: edits that did not help."""
        critique = await self.writer.critique(parent, rollouts, self.playbook.names)
        if critique is None:
            return None
        self.playbook.count(parent, critique.helpful, critique.harmful)
        return await self.propose(parent, critique.text, rejected)

    async def propose(self, parent: Texts, critique: str, rejected: Sequence[str] = ()) -> tuple[Texts, str] | None:
        """A child with the editor's bounded edits, and these in words. None: there was none, which is counted."""
        reply = await self.writer.edit(parent, critique, rejected, self.playbook.notes(parent))
        if reply is None:
            return None
        try:
            edits, dropped = read_edits(reply, self.config.max_edits, self.config.max_edit_chars)
            self.counts["edits_left_out"] += dropped
            try:
                child = self.playbook.pruned(apply_edits(parent, edits))
            except ReplyError as error:
                raise self.refused(error) from None
            self.check(child)
        except ReplyError as error:
            self.writer.skip("editor", error.reason, f"{error}; the editor said {reply[:200]!r}")
            return None
        self.writer.in_a_row["editor"] = 0
        if child == parent:
            self.counts["unchanged"] += 1
            return None
        self.descend(child, parent)
        return child, "; ".join(map(str, edits))


class Search(ABC):
    """A way to find better texts."""

    learned: ClassVar[Mapping[str, Any]]
    """The attributes that its state consists of, by name, and their types."""
    reserved = 0
    """Evaluations that are put aside for validation."""

    def __init__(self, context: SearchContext) -> None:
        self.context = context
        self.random = random.Random(context.config.seed)
        self.best: Texts = context.seed
        self.ended: str | None = None
        """Why the search ended, in words; None while it goes on."""
        self.ended_for_budget = False

    @property
    def favourite(self) -> Texts:
        """The candidate that would be the result if the search ended now."""
        return self.best

    @property
    @abstractmethod
    def smallest_budget(self) -> int:
        """Evaluations below which nothing can be shown."""

    @abstractmethod
    async def step(self) -> None:
        """One proposal. Sets `ended` where it is the last."""

    def state_dict(self) -> dict[str, Any]:
        """All that the search has learned, as JSON holds it."""
        own = {
            name: TypeAdapter(kind).dump_python(getattr(self, name), mode="json") for name, kind in self.learned.items()
        }
        version, internal, gauss = self.random.getstate()
        playbook = {"counts": self.context.playbook.counts}
        return {**own, "playbook": playbook, "random": [version, list(internal), gauss]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for name, kind in self.learned.items():
            setattr(self, name, TypeAdapter(kind).validate_python(state[name]))
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))
        self.context.playbook.counts = {item: list(counts) for item, counts in state["playbook"]["counts"].items()}

    def reopen(self) -> None:
        """Go on with a search that ended, because its budget has grown."""
        self.ended, self.ended_for_budget = None, False

    def end(self, why: str, *, budget: bool = False) -> None:
        self.ended, self.ended_for_budget = why, budget


def score_of(outcome: Outcome) -> float:
    """The score of an outcome; a failed rollout has 0."""
    return outcome.score or 0.0
