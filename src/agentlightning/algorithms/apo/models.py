"""Language models that read and write prompts: an OpenAI-compatible endpoint, a client object, a local model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from agentlightning.algorithms.apo.config import PromptModel
from agentlightning.errors import (
    AgentLightningError,
    ConfigError,
    MissingRewardError,
    PolicyError,
    RewardServiceError,
)
from agentlightning.rewards.base import post_json

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
        return LanguageModel(settings, partial(ask_engine, policy), (PolicyError,))
    if not settings.model:
        raise ConfigError(f"algorithm.{part} names no model; set its model (and base_url), or its path")
    if client is not None:
        return LanguageModel(settings, partial(ask_client, client), (Exception,))
    return LanguageModel(settings, ask_endpoint)
