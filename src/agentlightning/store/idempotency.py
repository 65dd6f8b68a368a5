"""Idempotency keys: a call that is repeated with the same key takes effect once.

The store writes the key, a digest of the arguments and the result in the transaction of the call. A call whose key is
known does nothing; its caller gets the result of the first call. That holds for every process that has the database
open, and after a restart.

The key is passed in a context variable beside the arguments, as no method of the contract has a parameter for it. A
store without a database ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

DIGEST_BYTES: Final = 16
MAX_ANSWER_BYTES: Final = 16 * 1024
"""Of a longer result, only the key is stored."""


@dataclass(frozen=True, slots=True)
class IdempotentCall:
    """A call that has an idempotency key."""

    key: str
    """32 hexadecimal digits: a hash of the method and the caller's key."""
    digest: bytes
    """Of the arguments."""
    encode: Callable[[Any], bytes]
    """Encodes the result of the method. Called in the store's thread."""

    @classmethod
    def of(cls, method: str, key: str, body: bytes, encode: Callable[[Any], bytes]) -> IdempotentCall:
        """key: the caller's, of any length; body: the arguments as received."""
        name = blake2b(f"{method} {key}".encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES)
        return cls(name.hexdigest(), blake2b(body, digest_size=DIGEST_BYTES).digest(), encode)

    def encoded(self, result: Any) -> bytes | None:
        """The result as stored; None if it is too long."""
        answer = self.encode(result)
        return answer if len(answer) <= MAX_ANSWER_BYTES else None


class AlreadyAnsweredError(Exception):
    """Not a failure: the call was executed before. `answer` is None if it was too long to be stored."""

    def __init__(self, answer: bytes | None) -> None:
        super().__init__("the call was done before")
        self.answer = answer


_current: ContextVar[IdempotentCall | None] = ContextVar("agentlightning_idempotent_call", default=None)
current = _current.get
"""The call that this task makes with a key; None without one."""


@contextmanager
def use_key(call: IdempotentCall) -> Generator[None]:
    """Give the store call made within an idempotency key. It raises AlreadyAnsweredError if it was executed before."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)
