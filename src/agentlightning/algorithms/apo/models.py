"""The models of prompt optimisation: how they are called, and what critic and editor are asked."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from agentlightning.algorithms.apo.config import PromptModel, Spending
from agentlightning.algorithms.apo.text import ReplyError, numbered
from agentlightning.algorithms.apo.trials import Outcome
from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    MissingRewardError,
    PolicyError,
    RewardServiceError,
    TrainingStopped,
)
from agentlightning.rewards.base import post_json

# -- language model --------------------------------------------------------------------------------------------------

# Language models that read and write prompts: an OpenAI-compatible endpoint, a client object, a local model.

Message = dict[str, str]
DEFAULT_URL: Final = "https://api.openai.com/v1"
RETRIES: Final = 2
BACKOFF_SECONDS: Final = 0.5


class ModelError(AgentLightningError):
    """A model gave no reply. `reason`: timeout or failed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Completion:
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
    failures: tuple[type[Exception], ...] = (RewardServiceError, LookupError, TypeError, AttributeError)
    """What `send` raises where there is no reply."""

    async def complete(self, messages: Sequence[Message]) -> Completion:
        """Raises ModelError where there is no reply in time, ConfigError for a rejected key or model."""
        settings, name = self.settings, self.settings.path or self.settings.model
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                return await self.send(settings, list(messages))
        except (TimeoutError, MissingRewardError) as error:
            text = f"{name} gave no reply within {settings.timeout_seconds:g} s"
            raise ModelError("timeout", text) from error
        except self.failures as error:
            if getattr(error, "status", None) in (401, 403, 404):
                raise ConfigError(
                    f"{error}; set its model and base_url, and the key in {settings.api_key_env}, or api_key_env"
                    " to the variable that holds it"
                ) from error
            raise ModelError("failed", f"{name} gave no reply: {type(error).__name__}: {error}") from error


async def ask_endpoint(settings: PromptModel, messages: list[Message]) -> Completion:
    """The reply of a model behind an OpenAI-compatible endpoint."""
    url = (settings.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL).rstrip("/")
    key = os.environ.get(settings.api_key_env)
    body = {"model": settings.model, "messages": messages, "temperature": settings.temperature}
    reply = await post_json(
        f"{url}/chat/completions",
        body | {"max_tokens": settings.max_tokens},
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=settings.timeout_seconds,
        retries=RETRIES,
        backoff=BACKOFF_SECONDS,
        source=f"the model {settings.model!r}",
    )
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    return Completion(
        choice["message"].get("content") or "",
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        choice.get("finish_reason") == "length",
    )


async def ask_client(client: Any, settings: PromptModel, messages: list[Message]) -> Completion:
    """The reply of a client object with the interface of `openai.AsyncOpenAI`."""
    reply = await client.chat.completions.create(
        model=settings.model, messages=messages, temperature=settings.temperature
    )
    usage, choice = getattr(reply, "usage", None), reply.choices[0]
    return Completion(
        choice.message.content or "",
        int(getattr(usage, "prompt_tokens", 0) or 0),
        int(getattr(usage, "completion_tokens", 0) or 0),
        getattr(choice, "finish_reason", None) == "length",
    )


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
        return LanguageModel(settings, partial(ask_engine, policy), (PolicyError,))
    if not settings.model:
        raise ConfigError(f"algorithm.{part} names no model; set its model (and base_url), or its path")
    if client is not None:
        return LanguageModel(settings, partial(ask_client, client), (Exception,))
    return LanguageModel(settings, ask_endpoint)


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


@dataclass(frozen=True, slots=True)
class Critique:
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
    _in_a_row: Counter[str] = field(default_factory=Counter[str])
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
        self._in_a_row["critic"] = 0
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

    def accept(self) -> None:
        """An edit could be used: the editor is of use."""
        self._in_a_row["editor"] = 0

    def refuse(self, error: ReplyError, reply: str) -> None:
        """Count a reply of the editor that cannot be used."""
        self.skip("editor", error.reason, f"{error}; the editor said {reply[:200]!r}")

    def skip(self, part: str, reason: str, message: str) -> None:
        """Count a skipped reply. Raises TrainingStopped after too many of critic or editor in a row."""
        self.skips[reason] += 1
        if not self._in_a_row[part]:
            self._first[part] = message
        self._in_a_row[part] += 1
        if self._in_a_row[part] >= MAX_SKIPS:
            counted = ", ".join(f"{count} {name}" for name, count in self.skips.items())
            raise TrainingStopped(
                f"{MAX_SKIPS} replies of the {part} in a row could not be used ({counted}). The first: "
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
