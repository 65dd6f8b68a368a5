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
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Literal, NamedTuple

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
from agentlightning.assemble import calls, said, steps
from agentlightning.errors import ConfigError, MissingRewardError, ResumeError, TrainingStopped
from agentlightning.resources import PromptTemplate
from agentlightning.rewards.base import OPENAI, complete_chat, limited
from agentlightning.span import Span
from agentlightning.trajectory import Step
from agentlightning.util.json_values import as_text, recorded_objects

# -- models ------------------------------------------------------------------------------------------------------------

# Language models that read and write prompts: an OpenAI-compatible endpoint, a client object, a local model.

Message = dict[str, str]
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
    url = settings.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI
    body = {"model": settings.model, "messages": messages, "temperature": settings.temperature}
    reply = await complete_chat(
        url,
        body,
        settings.max_tokens,
        key_variable=settings.api_key_env,
        timeout=settings.timeout_seconds,
        retries=RETRIES,
        backoff=BACKOFF_SECONDS,
        source=f"the model {settings.model!r}",
    )
    return _completion(reply)


async def ask_client(client: Any, settings: PromptModel, messages: list[Message]) -> Completion:
    """The reply of a client object with the interface of `openai.AsyncOpenAI`."""
    limit = limited(str(getattr(client, "base_url", "")), settings.max_tokens)
    reply = await client.chat.completions.create(
        model=settings.model, messages=messages, temperature=settings.temperature, **limit
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


async def open_model(settings: PromptModel, client: Any, stack: AsyncExitStack, part: str) -> LanguageModel:
    """The model that settings name; the stack closes it. Raises ConfigError where they name none."""
    if settings.path is not None:
        from agentlightning.policy.open import open_frozen

        policy = await open_frozen(part, settings.path)
        stack.push_async_callback(policy.close)
        return LanguageModel(settings, partial(ask_engine, policy))
    if not settings.model:
        raise ConfigError(f"algorithm.{part} names no model; set its model (and base_url), or its path")
    return LanguageModel(settings, ask_endpoint if client is None else partial(ask_client, client))


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
    seen: set[str] = set()
    for event in sorted([*calls(spans), *steps(spans)], key=lambda event: event.sequence_id):
        if isinstance(event, Step):
            tool = f"Tool {event.name}({as_text(event.arguments)}): {as_text(event.result)}"
            yield (tool if event.kind == "tool" else "Error") + (f": {event.error}" if event.error else "")
            continue
        recorded = (event.attributes.get(name) for name in (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES))
        lines = dict.fromkeys(line for messages in recorded for line in _messages(messages) if line not in seen)
        seen.update(lines)
        yield from lines


def _messages(recorded: object) -> Iterator[str]:
    for message in recorded_objects(recorded):
        yield f"{message.get('role', 'message')}: {said(message, most=None)}"


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
TASK: Final = "# Your task"
_COUNTER = re.compile(r"^\W*(HELPFUL|HARMFUL)\b(.*)$", re.MULTILINE)


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


class Search(ABC):
    """A way to find better texts: what its strategies have in common."""

    learned: ClassVar[Mapping[str, Any]]
    """The attributes that the state of a strategy consists of, by name, and their types."""
    reserved = 0
    """Evaluations that are put aside for validation."""

    def __init__(
        self,
        config: APOConfig,
        start: Mapping[str, PromptTemplate],
        training: Training,
        models: Mapping[str, LanguageModel],
    ) -> None:
        """`start`: the templates to begin with; `training` runs the agent, on the tasks that a search may see;
        `models`: the critic and the editor by these names, without an editor the critic edits."""
        self.config, self.start, self.training, self.models = config, start, training, models
        self.train_tasks, self.validation_tasks = len(training.train_tasks), len(training.validation_tasks)
        self.spending = Spending(config.budget)
        self.playbook = Playbook(config.playbooks)
        self.random = random.Random(config.seed)
        self.counts = Counter[str]()
        """What was proposed, accepted and rejected, by reason."""
        self.skips = Counter[str]()
        """Replies of critic and editor that could not be used, by reason."""
        self.first: dict[str, str] = {}
        """The first message of each of these reasons."""
        self.parents: dict[str, str] = {}
        """Digest of a candidate -> that of the one it was made from. Rollouts record it, so that no checkpoint has
        to."""
        self.best: Texts = {name: template.template for name, template in start.items()}
        self.ended: str | None = None
        """Why the search ended, in words; None while it goes on."""
        self.ended_for_budget = False
        self.on_favourite: Callable[[Mapping[str, str], int], object] | None = None
        """See `APO.on_favourite`."""
        self._in_a_row: dict[str, list[str]] = {}
        """By part, critic or editor: what was wrong with its replies since the last one that was of use."""

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
        """One proposal; the last one calls `end`."""

    async def end(self, why: str, *, budget: bool = False) -> None:
        """End the search: for its `budget`, or a number of rounds, with which it goes on where they have grown, or for
        good."""
        self.ended, self.ended_for_budget = why, budget

    # -- candidates ------------------------------------------------------------------------------------------------

    def templates(self, texts: Texts) -> dict[str, PromptTemplate]:
        """The templates with these texts."""
        return {name: self.start[name].model_copy(update={"template": text}) for name, text in texts.items()}

    async def run_trials(self, texts: Texts, trials: Sequence[Trial]) -> list[Outcome]:
        """One rollout for each trial, in their order, accounted for; they run at the same time. Raises BudgetSpentError
        where the budget does not allow so many."""
        if self.spending.left() < len(trials):
            raise BudgetSpentError
        if not trials:
            return []
        splits = {"train": self.training.train_tasks, "validation": self.training.validation_tasks}
        candidate = digest(texts)
        keys = [f"{candidate}-{each.split}{each.task:05d}-{each.repeat}" for each in trials]
        tasks = {key: splits[each.split][each.task] for key, each in zip(keys, trials, strict=True)}
        made_from = {PARENT: self.parents[candidate]} if candidate in self.parents else {}
        reports = await self.training.try_resources(dict(self.templates(texts)), tasks, made_from)
        found = dict(zip(tasks, reports, strict=True))  # A trial may be among them twice.
        outcomes: list[Outcome] = []
        for key, trial in zip(keys, trials, strict=True):
            report = found[key]
            self.spending.add(*usage(report.spans, self.config.budget))
            self.spending.calls += 1
            self.counts["failed_rollouts"] += report.score is None
            outcomes.append(Outcome(trial.task, report.score, transcript(tasks[key], report)))
        return outcomes

    def descend(self, child: Texts, parent: Texts) -> None:
        """Remember what a candidate was made from. The first of several counts."""
        self.parents.setdefault(digest(child), digest(parent))

    def check(self, texts: Texts) -> None:
        """Raises ReplyError for texts that do not keep the placeholders of their templates."""
        for name, template in self.start.items():
            problem = schema_violation(template, texts[name])
            if problem is not None:
                raise ReplyError("schema_violations", f"an edit of {name!r} {problem}")

    def show_favourite(self) -> None:
        """Tell who listens that the favourite may have changed."""
        if self.on_favourite is not None:
            self.on_favourite(dict(self.favourite), self.spending.calls)

    # -- critic and editor -----------------------------------------------------------------------------------------

    async def write(
        self, parent: Texts, rollouts: Sequence[Outcome], rejected: Sequence[str] = ()
    ) -> tuple[Texts, str] | None:
        """A child of the critic's and the editor's, after these rollouts, and the edits in words. None: there is none,
        which is counted. `rejected`: edits that did not help."""
        critique = await self.critique(parent, rollouts)
        return None if critique is None else await self.edit(parent, critique, rejected)

    async def critique(self, texts: Texts, rollouts: Sequence[Outcome]) -> str | None:
        """What the texts lack, from these rollouts; what it says of the items of playbooks is counted. None: skipped
        and counted."""
        names = ", ".join(self.playbook.names)
        counters = [COUNTERS_TASK.format(names=names)] if names else []
        limit = self.config.max_transcript_chars
        shown = [show_rollout(each, number, limit) for number, each in enumerate(rollouts, 1)]
        reply = await self.ask(
            "critic", CRITIC_ROLE, "# Texts", show_texts(texts, {}), "# Rollouts", *shown, TASK, CRITIC_TASK, *counters
        )
        if reply is None:
            return None
        text = reply.text.strip()
        if len(text) > MAX_CRITIQUE_CHARS or reply.truncated:
            return self.skip("critic_over_long", f"the critic wrote {len(text)} characters, or was cut off", "critic")
        if not re.search(r"\w+\W+\w+", text):
            return self.skip("critic_nonsense", f"the critic said {text[:100]!r}, which is no advice", "critic")
        self._in_a_row.pop("critic", None)
        self.playbook.count(texts, _numbers(text, "HELPFUL"), _numbers(text, "HARMFUL"))
        return _COUNTER.sub("", text).strip()

    async def edit(self, parent: Texts, critique: str, rejected: Sequence[str] = ()) -> tuple[Texts, str] | None:
        """A child with the editor's bounded edits, and these in words. None: there was none, which is counted."""
        parts = ["# Texts", show_texts(parent, self.playbook.notes(parent)), "# Advice", critique]
        if rejected:
            parts += ["# Edits tried before that did not help", "\n".join(f"- {each}" for each in rejected)]
        reply = await self.ask("editor", EDITOR_ROLE, *parts, TASK, EDITOR_TASK.format(max_edits=self.config.max_edits))
        if reply is None:
            return None
        try:
            edits, dropped = read_edits(reply.text, self.config.max_edits, self.config.max_edit_chars)
            self.counts["edits_left_out"] += dropped
            child = self.playbook.pruned(apply_edits(parent, edits))
            self.check(child)
        except ReplyError as error:
            return self.skip(error.reason, f"{error}; the editor said {reply.text[:200]!r}", "editor")
        self._in_a_row.pop("editor", None)
        if child == parent:
            self.counts["unchanged"] += 1
            return None
        self.descend(child, parent)
        return child, "; ".join(map(str, edits))

    async def ask(self, part: str, role: str, *parts: str) -> Completion | None:
        """A reply of the critic or the editor; None: there was none, which is counted."""
        model = self.models.get(part) or self.models["critic"]
        question = [{"role": "system", "content": role}, {"role": "user", "content": "\n\n".join(parts)}]
        try:
            reply = await model.complete(question)
        except ModelError as error:
            return self.skip(f"{part}_{error.reason}", str(error), part)
        settings, tokens = model.settings, (reply.input_tokens, reply.output_tokens)
        self.spending.add(sum(tokens), price(*tokens, settings.input_price, settings.output_price))
        self.spending.model_calls += 1
        if not reply.text.strip():
            return self.skip(f"{part}_empty", f"the {part}'s reply is empty", part)
        return reply

    def skip(self, reason: str, message: str, part: str | None = None) -> None:
        """Count a reply that cannot be used. Raises TrainingStopped after too many of a part, critic or editor, in a
        row."""
        self.skips[reason] += 1
        self.first.setdefault(reason, message)
        if part is None:
            return
        row = self._in_a_row.setdefault(part, [])
        row.append(message)
        if len(row) >= MAX_SKIPS:
            counted = ", ".join(f"{count} {name}" for name, count in self.skips.items())
            raise TrainingStopped(
                f"{MAX_SKIPS} replies of the {part} in a row could not be used ({counted}). The first: {row[0]}."
                f" Use another model (algorithm.{part}), or raise its max_tokens or timeout_seconds; the run can be"
                " resumed"
            )

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the search has learned, as JSON holds it."""
        own = {
            name: TypeAdapter(kind).dump_python(getattr(self, name), mode="json") for name, kind in self.learned.items()
        }
        return {
            "search": self.config.search,
            "state": {**own, "playbook": {"counts": self.playbook.counts}, "random": self.random.getstate()},
            "spending": self.spending.state_dict(),
            "counts": dict(self.counts),
            "skips": dict(self.skips),
            "ended": self.ended,
            "for_budget": self.ended_for_budget,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned. One that ended for its budget or its rounds goes on if these have
        grown since. Raises ConfigError for the state of another strategy, ResumeError for that of another version."""
        if state["search"] != self.config.search:
            raise ConfigError(f"the run is a search {state['search']!r}; resume it with search={state['search']!r}")
        own = state["state"]
        if missing := self.learned.keys() - own.keys():
            raise ResumeError(
                f"the search was begun by another version: its state lacks {min(missing)!r}; use that version, or start"
                " a new run"
            )
        for name, kind in self.learned.items():
            setattr(self, name, TypeAdapter(kind).validate_python(own[name]))
        version, internal, gauss = own["random"]
        self.random.setstate((version, tuple(internal), gauss))
        self.playbook.counts = {item: list(counts) for item, counts in own["playbook"]["counts"].items()}
        self.spending.load_state_dict(state["spending"])
        self.counts, self.skips = Counter(state["counts"]), Counter(state["skips"])
        if not state["for_budget"] or self.spending.exhausted() is not None:
            self.ended, self.ended_for_budget = state["ended"], state["for_budget"]


def score_of(outcome: Outcome) -> float:
    """The score of an outcome; a failed rollout has 0."""
    return outcome.score or 0.0
