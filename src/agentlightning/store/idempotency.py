"""Calls that are done once, however often they arrive.

A caller that may have to repeat a call gives it an idempotency key. The store writes the key, a digest of the arguments
and the answer in the transaction of the call; a call with a key that is there already is not done: its caller gets the
answer of the first one. That holds for every process that has the database open, and after a restart.

The key travels beside the arguments, in a context variable, as no method of the contract has one. A store that is not
in a database ignores it.
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
"""Of a longer answer is only known that there was one."""


@dataclass(frozen=True, slots=True)
class IdempotentCall:
    """A call that has a key."""

    key: str
    """32 hexadecimal digits: of the method and of what its caller gave."""
    digest: bytes
    """Of the arguments."""
    encode: Callable[[Any], bytes]
    """Makes bytes of what the method returns. Called in the store's thread."""

    @classmethod
    def of(cls, method: str, key: str, sent: bytes, encode: Callable[[Any], bytes]) -> IdempotentCall:
        """`key` is what its caller gave, of any length; `sent` are the arguments as they came."""
        name = blake2b(f"{method} {key}".encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES)
        return cls(name.hexdigest(), blake2b(sent, digest_size=DIGEST_BYTES).digest(), encode)

    def encoded(self, result: Any) -> bytes | None:
        """The answer as it is kept; None where it is too long."""
        answer = self.encode(result)
        return answer if len(answer) <= MAX_ANSWER_BYTES else None


class AlreadyAnsweredError(Exception):
    """Not a failure: the call was done before. `answer` is None where it was too long to be kept."""

    def __init__(self, answer: bytes | None) -> None:
        super().__init__("the call was done before")
        self.answer = answer


_current: ContextVar[IdempotentCall | None] = ContextVar("agentlightning_idempotent_call", default=None)
current = _current.get
"""The idempotent call that this task makes; None for any other."""


@contextmanager
def making(call: IdempotentCall) -> Generator[None]:
    """Within, the method that is called is done once. It raises AlreadyAnsweredError where it was done before."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)
