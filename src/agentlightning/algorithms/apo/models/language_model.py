"""Language models that read and write prompts: an OpenAI-compatible endpoint, a client object, a local model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from agentlightning.algorithms.apo.config import PromptModel
from agentlightning.errors import AgentLightningError, ConfigError, PolicyError
from agentlightning.transport import Transport, TransportError, open_transport

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
