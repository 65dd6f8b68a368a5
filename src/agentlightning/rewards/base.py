"""What rewards from elsewhere have in common: requests with a timeout and retries, objects that travel to a runner.

A request that times out gives a *missing* reward (MissingRewardError): the rollout is counted, left out of the update,
and never 0.0. A service that is unreachable or answers nonsense is an error of the infrastructure (RewardServiceError):
the attempt fails, and may be repeated.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Final, Generic, TypeVar, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import httpx

from agentlightning.errors import ConfigError, MissingRewardError, RewardServiceError
from agentlightning.transport.base import retry_after
from agentlightning.util.decompression import CodingError, decompress
from agentlightning.util.printable import shown_url
from agentlightning.util.random_ids import random_uniform

RETRIED: Final = frozenset({408, 409, 425, 429, *range(500, 600)})
"""Statuses of a service that may answer the next time."""
LONGEST_WAIT: Final = 60.0
"""Seconds between two tries, whatever the service asks for."""
MOST_BYTES: Final = 16 * 2**20
"""Of an answer, decompressed."""
OPENAI: Final = "https://api.openai.com/v1"
_NEW_LIMIT_HOSTS: Final = ("api.openai.com", ".openai.azure.com")
SHOWN: Final = 200
"""Characters of an unexpected response that are shown."""
T = TypeVar("T")


class PerLoop(Generic[T]):
    """One value for each event loop: locks and queues belong to one."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: WeakKeyDictionary[asyncio.AbstractEventLoop, T] = WeakKeyDictionary()

    def get(self) -> T:
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            self._values[loop] = self._make()
        return self._values[loop]


class Portable:
    """A dataclass that is pickled as the arguments it was made of, without its connections and queues."""

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = {each.name: getattr(self, each.name) for each in fields(self) if each.init}  # type: ignore[arg-type]
        return _make, (type(self), arguments)


def _make(kind: type[Any], arguments: dict[str, Any]) -> Any:
    return kind(**arguments)


def check_url(url: str, what: str) -> None:
    """Raises ConfigError for anything but the address of an HTTP server."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError(f"{what}={shown_url(str(url))!r} is no URL: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{what}={shown_url(url)!r} is no address of an HTTP server; write http://host:port/path")


def check_at_least(least: float, **values: float) -> None:
    """Raises ConfigError for a smaller number."""
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name}={value} is too small; use at least {least:g}")


def last_object(text: str, key: str) -> Mapping[str, Any] | None:
    """The last JSON object in a text that has a key; None where there is none.

    >>> last_object('Good. {"score": 1} or better {"score": 2, "why": "{}"}.', "score")
    {'score': 2, 'why': '{}'}
    """
    decoder, found, place = json.JSONDecoder(), None, text.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            if isinstance(value, dict) and key in value:
                found = cast("Mapping[str, Any]", value)
        place = text.find("{", end)
    return found


def limited(base_url: str, max_tokens: int) -> dict[str, int]:
    """The limit of a chat completion under the name that an endpoint takes. The newer models of OpenAI refuse
    `max_tokens`; other servers may not know the new name."""
    is_new = (urlsplit(base_url).hostname or "").endswith(_NEW_LIMIT_HOSTS)
    return {"max_completion_tokens" if is_new else "max_tokens": max_tokens}


async def complete_chat(base_url: str, body: Mapping[str, Any], max_tokens: int, **request: Any) -> Any:
    """The chat completion, not yet checked, of an OpenAI-compatible endpoint. `request`, and what it raises: as of
    `post_json`."""
    url = f"{base_url.rstrip('/')}/chat/completions"
    return await post_json(url, {**body, **limited(base_url, max_tokens)}, **request)


async def post_json(
    url: str, body: Any, *, key_variable: str | None, timeout: float, retries: int, backoff: float, source: str
) -> Any:
    """The JSON that a service answers, which is sent the bearer token that an environment variable holds.

    Waits backoff, 2 backoff, 4 backoff ... seconds between tries, or as long as the service asks for; each try has
    `timeout` seconds from its start to the last byte of the answer. Raises MissingRewardError if the last try times
    out, RewardServiceError for any other failure."""
    failure: MissingRewardError | RewardServiceError | None = None
    source = f"{source} at {shown_url(url)}"
    key = os.environ.get(key_variable) if key_variable else None
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for attempt in range(retries + 1):
        wait = backoff * 2**attempt * random_uniform(0.5, 1.0)
        try:
            # httpx's own limit is of each read, and a service may send a byte a second.
            async with (
                asyncio.timeout(timeout),
                httpx.AsyncClient(timeout=timeout, verify=_tls()) as client,
                client.stream("POST", url, json=body, headers=headers) as reply,
            ):
                text = await _text(reply, source)
        except (httpx.TimeoutException, TimeoutError):
            failure = MissingRewardError(f"{source} did not answer within {timeout:g} s, {attempt + 1} times")
        except httpx.HTTPError as error:
            failure = RewardServiceError(f"{source} cannot be reached: {error!r}; is it running?")
        else:
            if reply.is_success:
                return _json(text, source)
            failure = RewardServiceError(f"{source} answered {reply.status_code}: {text[:SHOWN]!r}")
            failure.status = reply.status_code
            if reply.status_code not in RETRIED:
                break
            wait = max(wait, retry_after([(name.lower(), value) for name, value in reply.headers.raw]) or 0.0)
        if attempt < retries:
            await asyncio.sleep(min(wait, LONGEST_WAIT))
    assert failure is not None
    raise failure


async def _text(reply: httpx.Response, source: str) -> str:
    """The body, of bounded size however it is compressed."""
    raw = bytearray()
    async for part in reply.aiter_raw():
        raw += part
        if len(raw) > MOST_BYTES:
            raise RewardServiceError(f"{source} answered more than {MOST_BYTES} bytes")
    try:
        body = await decompress(bytes(raw), reply.headers.get("content-encoding", ""), MOST_BYTES)
    except CodingError as error:
        raise RewardServiceError(f"{source} answered what cannot be read: {error}") from error
    return body.decode(errors="replace")


def _json(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the latter for [[[[...
        raise RewardServiceError(f"{source} answered no JSON: {text[:SHOWN]!r}") from None


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
