"""The models of prompt optimisation: how they are called, and what critic and editor are asked."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson

from agentlightning.algorithms.apo.config import PromptModel, Spending
from agentlightning.algorithms.apo.text import ReplyError, numbered
from agentlightning.algorithms.apo.trials import Outcome
from agentlightning.errors import AgentLightningError, ConfigError, PolicyError, TrainingStopped
from agentlightning.transport import Transport, TransportError, open_transport

# -- language model --------------------------------------------------------------------------------------------------

# Language models that read and write prompts: an OpenAI-compatible endpoint, a client object, a local model.

Message = dict[str, str]
DEFAULT_URL: Final = "https://api.openai.com/v1"
RETRIED: Final = frozenset({408, 409, 429, 500, 502, 503, 504})
ATTEMPTS: Final = 3
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


class LanguageModel(Protocol):
    """A model that completes a conversation."""

    settings: PromptModel

    async def complete(self, messages: Sequence[Message]) -> Completion:
        """Raises ModelError where there is no reply in time, ConfigError for a rejected key or model."""
        ...


@dataclass(slots=True)
class EndpointModel:
    """A model behind an OpenAI-compatible endpoint."""

    settings: PromptModel
    transport: Transport

    @property
    def base_url(self) -> str:
        return (self.settings.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL).rstrip("/")

    async def complete(self, messages: Sequence[Message]) -> Completion:
        settings = self.settings
        body = orjson.dumps(
            {
                "model": settings.model,
                "messages": list(messages),
                "temperature": settings.temperature,
                "max_tokens": settings.max_tokens,
            }
        )
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                return await self._send(body)
        except TimeoutError as error:
            seconds = settings.timeout_seconds
            raise ModelError("timeout", f"{settings.model} gave no reply within {seconds:g} s") from error

    async def _send(self, body: bytes) -> Completion:
        key = os.environ.get(self.settings.api_key_env, "")
        headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {key}".encode())]
        url, problem = f"{self.base_url}/chat/completions", ""
        for attempt in range(ATTEMPTS):
            try:
                async with await self.transport.send("POST", url, headers, body) as response:
                    status, content = response.status, await response.read()
            except TransportError as error:
                problem = str(error)
            else:
                if status == 200:
                    return read_completion(content)
                problem = f"status {status}: {content[:300].decode(errors='replace')}"
                if status not in RETRIED:
                    raise self._refused(status, problem)
            await asyncio.sleep(BACKOFF_SECONDS * 2**attempt)
        raise ModelError("failed", f"{self.settings.model} at {self.base_url} gave no reply: {problem}")

    def _refused(self, status: int, problem: str) -> AgentLightningError:
        if status in (401, 403):
            return ConfigError(
                f"{self.base_url} refuses the key in {self.settings.api_key_env} ({problem}); set that variable, or"
                " api_key_env to the one that holds the key"
            )
        if status == 404:
            return ConfigError(
                f"{self.base_url} does not serve the model {self.settings.model!r} ({problem}); set model and base_url"
            )
        return ModelError("failed", f"{self.settings.model} at {self.base_url} refuses the request: {problem}")


@dataclass(slots=True)
class ClientModel:
    """A model called through a client object with the interface of `openai.AsyncOpenAI`."""

    settings: PromptModel
    client: Any

    async def complete(self, messages: Sequence[Message]) -> Completion:
        settings = self.settings
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                reply = await self.client.chat.completions.create(
                    model=settings.model, messages=list(messages), temperature=settings.temperature
                )
        except TimeoutError as error:
            seconds = settings.timeout_seconds
            raise ModelError("timeout", f"{settings.model} gave no reply within {seconds:g} s") from error
        except Exception as error:
            raise ModelError("failed", f"{settings.model} gave no reply: {type(error).__name__}: {error}") from error
        usage, choice = getattr(reply, "usage", None), reply.choices[0]
        return Completion(
            choice.message.content or "",
            int(getattr(usage, "prompt_tokens", 0) or 0),
            int(getattr(usage, "completion_tokens", 0) or 0),
            getattr(choice, "finish_reason", None) == "length",
        )


@dataclass(slots=True)
class LocalModel:
    """A model in this process."""

    settings: PromptModel
    engine: Any

    async def complete(self, messages: Sequence[Message]) -> Completion:
        from agentlightning.engine.base import SamplingParams

        chat, settings = self.engine.chat, self.settings
        prompt = chat.encode(chat.render([dict(each) for each in messages]))
        params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens)
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                sample = await self.engine.sample(prompt, params)
        except TimeoutError as error:
            seconds = settings.timeout_seconds
            raise ModelError("timeout", f"{settings.path} gave no reply within {seconds:g} s") from error
        except PolicyError as error:
            raise ModelError("failed", f"{settings.path} gave no reply: {error}") from error
        text = chat.decode(sample.token_ids, skip_special_tokens=True)
        return Completion(text, len(prompt), len(sample.token_ids), sample.finish_reason == "length")


def read_completion(content: bytes) -> Completion:
    """A response of `/chat/completions`. Raises ModelError for anything else."""
    try:
        reply = orjson.loads(content)
        choice, usage = reply["choices"][0], reply.get("usage") or {}
        return Completion(
            choice["message"].get("content") or "",
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or 0),
            choice.get("finish_reason") == "length",
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError("failed", f"the reply is no chat completion: {content[:200]!r}") from error


async def open_model(settings: PromptModel, client: Any, stack: AsyncExitStack, part: str) -> LanguageModel:
    """The model that settings name; the stack closes it. Raises ConfigError where they name none."""
    if settings.path is not None:
        from agentlightning.policy.open import open_frozen

        policy = await open_frozen(part, settings.path)
        stack.push_async_callback(policy.close)
        return LocalModel(settings, policy)
    if not settings.model:
        raise ConfigError(f"algorithm.{part} names no model; set its model (and base_url), or its path")
    if client is not None:
        return ClientModel(settings, client)
    transport = open_transport()
    stack.push_async_callback(transport.close)
    return EndpointModel(settings, transport)


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
        parts = ["# Texts", show_texts(texts), "# Rollouts", *shown, "# Your task", CRITIC_TASK, *counters]
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
        earlier = ["# Edits tried before that did not help", "\n".join(f"- {each}" for each in rejected)]
        parts = ["# Texts", show_texts(texts, notes), "# Advice", critique, *(earlier if rejected else [])]
        task = EDITOR_TASK.format(max_edits=self.max_edits)
        reply = await self.ask("editor", EDITOR_ROLE, "\n\n".join([*parts, "# Your task", task]))
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


def show_texts(texts: Mapping[str, str], notes: Mapping[str, str] | None = None) -> str:
    """The texts with numbered lines."""
    notes = notes or {}
    return "\n\n".join(
        "\n".join([f"## {name}", numbered(text), *([notes[name]] if notes.get(name) else [])])
        for name, text in texts.items()
    )


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
