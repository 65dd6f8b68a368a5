"""Enforces the budgets for calls to providers, of each rollout and of the whole server, and the rates of a provider.

A call is sent only if its worst case fits the budget, and that amount is reserved until the actual cost is known, so
concurrent calls cannot overspend. The spend of a rollout is read from its spans at its first call. The total of the
server is kept in a file that outlives the process and includes the reservations of calls in flight.

Calls beyond the rates or the concurrency of a provider wait in order of arrival, up to a maximum. Rates are token
buckets with the capacity of one minute, refilled evenly. What a prompt takes of both is estimated from its bytes.
"""

from __future__ import annotations

import asyncio
import math
import os
import struct
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from itertools import islice
from operator import mul
from pathlib import Path
from typing import Any, Final, cast

import orjson

from agentlightning import span as names
from agentlightning.errors import ConfigError
from agentlightning.gateway.answer import object_of
from agentlightning.gateway.config import BudgetConfig, Provider
from agentlightning.gateway.errors import ApiError
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.tracing.messages import IMAGES, image_url
from agentlightning.util.file_lock import lock_file
from agentlightning.util.json_values import Json, dumps, loads

_LAYOUT: Final = struct.Struct("<8sdd")
_MAGIC: Final = b"aglspent"
_MAX_ROLLOUTS: Final = 65536
_MAX_AMOUNT: Final = 1e15
"""Upper limit for the recorded dollars or tokens of one call."""


@dataclass(slots=True)
class Account:
    """The spend of a rollout or the server, and its reservations for calls in flight."""

    dollars: float = 0.0
    tokens: int = 0
    reserved_dollars: float = 0.0
    reserved_tokens: int = 0


class Budgets:
    """The accounts of the server and of each rollout. Raises ConfigError if the file cannot be used."""

    def __init__(
        self,
        config: BudgetConfig | None = None,
        store: LightningStoreBase | None = None,
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.config = config or BudgetConfig()
        self._store = store
        path = self.config.file or file
        self._file: FileIO | None = None
        self.total = Account()
        if path is not None and (self.config.dollars or self.config.tokens):
            self._file, self.total = _open_total(Path(path))
        self.num_rejected = 0
        """Rejected calls."""
        self._rollouts: dict[str, Account] = {}

    def spent(self, rollout_id: str) -> Account | None:
        """The account of a rollout that made calls lately; None for others."""
        return self._rollouts.get(rollout_id)

    def spend(self, rollout_id: str, dollars: float, tokens: int) -> None:
        """Record a cost that was not reserved: of an answer that came with a poll."""
        self.record(self.spent(rollout_id) or Account(), dollars, tokens)

    async def reserve(self, rollout_id: str, dollars: float, tokens: int) -> Reservation:
        """Reserve the worst case of a call. Raises ApiError 402 if it exceeds a budget."""
        account = self._rollouts.get(rollout_id) if rollout_id else Account()
        if account is None:
            account = self._rollouts.setdefault(rollout_id, await self._read(rollout_id))
            for evicted in [*islice(self._rollouts, max(0, len(self._rollouts) - _MAX_ROLLOUTS))]:
                self.forget(evicted)
        self.check(account, rollout_id, dollars, tokens)
        self.record(account, 0.0, 0, dollars, tokens)
        return Reservation(self, account, rollout_id, dollars, tokens)

    def check(self, account: Account, rollout_id: str, dollars: float, tokens: int) -> None:
        """Raises ApiError 402 if the amount exceeds the budget of the server or of the rollout, if there is one."""
        config, reserved = self.config, ""
        limits = [(self.total, "this server", config.dollars, config.tokens)]
        if rollout_id:
            limits.append((account, f"rollout {rollout_id!r}", config.rollout_dollars, config.rollout_tokens))
        for each, owner, max_dollars, max_tokens in limits:
            if max_dollars is not None and each.dollars + each.reserved_dollars + dollars > max_dollars:
                used, wanted = f"${each.dollars:.4f} of ${max_dollars:g}", f"cost ${dollars:.4f}"
                reserved = each.reserved_dollars and f"${each.reserved_dollars:.4f}"
            elif max_tokens is not None and each.tokens + each.reserved_tokens + tokens > max_tokens:
                used, wanted = f"{each.tokens} of {max_tokens} tokens", f"use {tokens}"
                reserved = each.reserved_tokens
            else:
                continue
            self.num_rejected += 1
            held = f" and has {reserved} reserved for calls in flight" if reserved else ""
            message = f"the budget of {owner} is spent: it has used {used}{held}; this call may {wanted}."
            hint = "Ask for fewer tokens, or raise the budget"
            raise ApiError(402, f"{message} {hint}", code="budget_exceeded", retry=False)

    def forget(self, rollout_id: str) -> None:
        """Drop the account of a rollout without calls in flight; it can be read from its spans again."""
        if (account := self._rollouts.get(rollout_id)) is not None and account.reserved_tokens == 0:
            del self._rollouts[rollout_id]

    def close(self) -> None:
        """Close the file. Later spend is counted in memory only."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def record(
        self, account: Account, dollars: float, tokens: int, reserved_dollars: float = 0.0, reserved_tokens: int = 0
    ) -> None:
        """Add to an account and to the total of the server, and write that to its file: at once, so that a killed
        process leaves no half of it."""
        for each in (account, self.total):
            each.dollars += dollars
            each.tokens += tokens
            each.reserved_dollars += reserved_dollars
            each.reserved_tokens += reserved_tokens
        if self._file is not None:
            total = self.total
            self._file.seek(0)
            dollars, used = total.dollars + total.reserved_dollars, float(total.tokens + total.reserved_tokens)
            self._file.write(_LAYOUT.pack(_MAGIC, dollars, used))

    async def _read(self, rollout_id: str) -> Account:
        """What a rollout has spent, from its spans."""
        if self._store is None or not (self.config.rollout_dollars or self.config.rollout_tokens):
            return Account()
        return spend_of_spans(await self._store.query_spans(rollout_id))


def spend_of_spans(spans: Iterable[Span]) -> Account:
    """The cost of the calls to providers among spans; only their spans have a retry count."""
    account, calls = Account(), set[str]()
    for span in spans:
        attributes = span.attributes
        if names.PROVIDER_RETRIES not in attributes:
            continue
        account.dollars += _amount(attributes.get(names.COST))
        account.tokens += int(_amount(attributes.get(names.OUTPUT_TOKENS)))
        call = str(attributes.get(names.RESPONSE_ID, span.span_id))
        if call not in calls:  # Each choice of a call has a span, and they share its prompt.
            calls.add(call)
            account.tokens += int(_amount(attributes.get(names.INPUT_TOKENS)))
    return account


def _amount(value: object) -> float:
    """A recorded amount; 0 for one that is negative, too large or not a number."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= _MAX_AMOUNT else 0.0


@dataclass(slots=True)
class Reservation:
    """The amount reserved for one call. Ends with `settle` or `release`, whichever comes first."""

    budgets: Budgets
    account: Account
    rollout_id: str
    dollars: float
    tokens: int
    is_open: bool = True

    def spend(self, dollars: float, tokens: int) -> None:
        """Record the cost of a try."""
        self.budgets.record(self.account, dollars, tokens)

    def check(self) -> None:
        """Raises ApiError 402 if the budget is spent."""
        self.budgets.check(self.account, self.rollout_id, 0.0, 0)

    def settle(self, dollars: float, tokens: int) -> None:
        """Record the cost of the last try, and end the reservation: in one write, since a crash between two would count
        the call twice."""
        if self.is_open:
            self.is_open = False
            self.budgets.record(self.account, dollars, tokens, -self.dollars, -self.tokens)

    def release(self) -> None:
        """End the reservation without further cost. Idempotent."""
        self.settle(0.0, 0)


def _open_total(path: Path) -> tuple[FileIO, Account]:
    """The total spend so far, and its file, which survives a killed process. Raises ConfigError.

    It is written twice for each call on the event loop, so a write must be cheap: some microseconds, where `os.replace`
    of a new file takes a millisecond on a busy disk. The lock on the file also requires that it is not replaced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        file = path.open("r+b", buffering=0)
    except OSError as error:
        raise ConfigError(f"the budget file {str(path)!r} cannot be opened: {error}; set budget.file") from error
    with ExitStack() as undo:
        undo.callback(file.close)
        if not lock_file(file.fileno()):
            raise ConfigError(
                f"the budget file {str(path)!r} is in use by another server; give each its own budget.file"
            )
        found = file.read() or _LAYOUT.pack(_MAGIC, 0.0, 0.0)
        if len(found) != _LAYOUT.size or not found.startswith(_MAGIC):
            raise ConfigError(f"{str(path)!r} is not a budget file; set budget.file to another, or remove it")
        undo.pop_all()
    _, dollars, tokens = _LAYOUT.unpack(found)
    return file, Account(dollars, int(tokens))


# -- rates -------------------------------------------------------------------------------------------------------------


_ROUNDING: Final = 1e-6
"""Seconds."""


class TokenBucket:
    """A rate per minute; None: no limit."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self._seconds = 60 / per_minute if per_minute else 0.0
        """Seconds for each."""
        self._clock = clock
        self._full_at = clock()
        """When the bucket is full again."""

    def seconds_until(self, amount: float, most: float = 60.0) -> float:
        """Seconds until a call of `amount` may start. One beyond the capacity starts when the bucket is full; with
        `most` infinite, when `amount` is available in full."""
        seconds = max(0.0, self._full_at - self._clock()) + min(most, amount * self._seconds) - 60
        return seconds if seconds > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Take an amount; the balance may become negative."""
        self._full_at = max(self._full_at, self._clock()) + amount * self._seconds


class RateLimiter:
    """The limits of one provider: `acquire` before a call, `release` after it."""

    def __init__(self, provider: Provider, clock: Callable[[], float]) -> None:
        self.in_flight = 0
        self._provider, self._max_wait_seconds = provider, provider.max_wait_seconds
        self._requests = TokenBucket(provider.requests_per_minute, clock)
        self._tokens = TokenBucket(provider.tokens_per_minute, clock)
        self._waiting: list[int] = []
        """The estimates of the calls that wait."""
        self._turn = asyncio.Lock()
        """Held by the first of these."""
        self._released = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, tokens: int) -> None:
        """Wait until a call with an estimate of `tokens` may start. Raises ApiError 429 if that would take too long."""
        if not self._waiting and self._may_start(tokens):
            return self._record_start(tokens)
        # The duration of the calls in flight is unknown.
        queued = self._tokens.seconds_until(tokens + sum(self._waiting), math.inf)
        seconds = max(self._requests.seconds_until(len(self._waiting) + 1, math.inf), queued)
        if seconds > self._max_wait_seconds or self._max_wait_seconds == 0:
            raise self._limit_error(seconds)
        self._waiting.append(tokens)
        try:
            async with asyncio.timeout(self._max_wait_seconds), self._turn:
                while not self._may_start(tokens):
                    self._released.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._seconds_until(tokens) or None):
                            await self._released.wait()
                return self._record_start(tokens)
        except TimeoutError:
            pass
        finally:
            self._waiting.remove(tokens)
        raise self._limit_error(1.0)

    def record_retry(self) -> None:
        """Count a retry, which is a further request and does not wait."""
        self._requests.take(1)

    def release(self, estimated: int, used: int) -> None:
        """Count the end of a call, and replace its estimate by the `used` tokens."""
        self.in_flight -= 1
        self._tokens.take(used - estimated)
        self._released.set()

    def _may_start(self, tokens: int) -> bool:
        return self.in_flight < self._provider.max_concurrency and self._seconds_until(tokens) == 0

    def _record_start(self, tokens: int) -> None:
        self.in_flight += 1
        self._requests.take(1)
        self._tokens.take(tokens)

    def _seconds_until(self, tokens: int) -> float:
        return max(self._requests.seconds_until(1), self._tokens.seconds_until(tokens))

    def _limit_error(self, seconds: float) -> ApiError:
        message = (
            f"the provider {self._provider.name!r} is at its configured limits: {self.in_flight} calls in flight, "
            f"{self.num_waiting} waiting; try again in {math.ceil(seconds)} s"
        )
        return ApiError(429, message, code="rate_limit_exceeded", retry=True, retry_after=max(1, math.ceil(seconds)))


# -- the tokens of a prompt --------------------------------------------------------------------------------------------

# Estimated without a tokenizer, from the bytes of a request: an upper bound is reserved from budgets and rate limits; a
# likely number answers clients that ask for a token count.

BYTES_PER_TOKEN: Final = 2
"""Lower bound for text: most tokens have three or four bytes."""
BYTES_PER_AUDIO_TOKEN: Final = 32
"""Lower bound for audio in base64: the tightest encodings have a kilobyte per second, and no provider counts more
than 32 tokens for it."""
_IMAGES: Final = frozenset({*IMAGES, "computer_screenshot"})
_AUDIO: Final = "input_audio"


def max_prompt_tokens(body: bytes, image_tokens: int) -> int:
    """An upper bound for a prompt in any dialect: one token for two bytes of text, `image_tokens` for each image,
    inline or not, and one token for 32 bytes of audio. Other files count as text."""
    request = None
    if b"image" in body or b"input_audio" in body:
        with suppress(orjson.JSONDecodeError):
            request = loads(body)
    parts = [part for part in _walk(request) if not isinstance(part, str)]
    images = [size for part in parts if (size := _image_bytes(part)) is not None]
    audio = sum(_length(object_of(each, _AUDIO).get("data")) for each in parts if each.get("type") == _AUDIO)
    text = max(0, len(body) - sum(images) - audio)
    return text // BYTES_PER_TOKEN + len(images) * image_tokens + audio // BYTES_PER_AUDIO_TOKEN


def _walk(value: Any, skipped: Container[str] = ()) -> Iterator[str | Json]:
    """The texts and objects of nested JSON, without those below `skipped` names or in images."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            left += cast("list[Any]", value)
        elif isinstance(value, dict):
            part = cast(Json, value)
            yield part
            if _image_bytes(part) is None:
                left += [inner for name, inner in part.items() if name not in skipped]


def _image_bytes(part: Json) -> int | None:
    """Bytes of an inline image, 0 for one given by its address; None if it is no image."""
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _IMAGES:
        return None
    if kind == "image":  # JSON schemas use this word as well.
        source = part.get("source")
        return _length(cast(Json, source).get("data")) if isinstance(source, dict) else None
    url = image_url(part)
    return len(url) if url is not None and url.startswith("data:") else 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


_TOKENS_PER_CHARACTER: Final = (1 / 3.5, 0.6, 1.15, 2.0)
"""By the length of the character in UTF-8: English and code; accents, Greek, Cyrillic; Chinese, Japanese, Korean;
emoji. Against OpenAI's cl100k: English 12% too high, Python 27%, German 3%, Russian 33%; Chinese exact, JSON 5% too
low. Bytes / 3.5 would be simpler, but 25% too low for Chinese, so that clients would shorten conversations too late."""
_TOKENS_PER_MESSAGE: Final = 4
"""Tokens that a chat template adds to a message."""
_TOKENS_PER_IMAGE: Final = 1600
_BYTES_PER_FILE_TOKEN: Final = 20
"""For files in base64."""
_FILES: Final = frozenset({"data", "file_data", "encrypted_content"})
_NOT_CONTENT: Final = _FILES | {
    *("type", "role", "id", "tool_use_id", "tool_call_id", "call_id", "signature", "media_type"),
    *("input", "cache_control"),
}


def estimate_prompt_tokens(body: Json) -> int:
    """An estimate for a prompt in any dialect: its system prompt, messages or items, and tools. Rather too high than
    too low, since agents shorten their conversations by it."""
    messages = body.get("messages", body.get("input"))
    tokens = sum(_content_tokens(part) for part in (body.get("system"), body.get("instructions"), messages))
    if body.get("tools"):
        tokens += _text_tokens(dumps(body["tools"]).decode())
    count = len(cast("list[Any]", messages)) if isinstance(messages, list) else 0
    return math.ceil(tokens) + count * _TOKENS_PER_MESSAGE


def _content_tokens(value: Any) -> float:
    """The tokens of nested content."""
    tokens = 0.0
    for part in _walk(value, _NOT_CONTENT):
        if isinstance(part, str):
            tokens += _text_tokens(part)
        elif _image_bytes(part) is not None:
            tokens += _TOKENS_PER_IMAGE
        else:
            if part.get("type") == "tool_use":
                tokens += _text_tokens(dumps(part.get("input")).decode())
            tokens += sum(_length(part[name]) for name in _FILES & part.keys()) / _BYTES_PER_FILE_TOKEN
    return tokens


def _text_tokens(text: str) -> float:
    """By the number of characters with one, two, three and four bytes in UTF-8, counted without a loop."""
    if text.isascii():
        return len(text) * _TOKENS_PER_CHARACTER[0]
    one = len(text.encode("ascii", "ignore"))
    four = len(text.encode("utf-16-le", "surrogatepass")) // 2 - len(text)
    rest = len(text) - one - four
    three = len(text.encode("utf-8", "surrogatepass")) - one - 4 * four - 2 * rest
    return sum(map(mul, _TOKENS_PER_CHARACTER, (one, rest - three, three, four)))
