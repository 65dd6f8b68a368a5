"""What calls to providers may cost, for each rollout and for the whole server, and what they have cost.

A call is let through only where its worst case still fits, and that much is set aside until its true cost is known: so
nothing is overspent, however many calls are under way. The cost of a rollout is read from its spans when its first call
comes, and the server's own total lives in a file that outlives the process, calls under way counted at their worst.
Called by `upstream.call` around each call to a provider.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import struct
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentlightning import span as names
from agentlightning.errors import ConfigError
from agentlightning.gateway.errors import ApiError
from agentlightning.gateway.upstream.pricing import BudgetConfig
from agentlightning.span import Span
from agentlightning.store.base import LightningStoreBase
from agentlightning.util.file_lock import lock_file

_LAYOUT: Final = struct.Struct("<8sdd")
_MAGIC: Final = b"aglspent"
_MAX_ROLLOUTS: Final = 65536
_MOST: Final = 1e15
"""Dollars or tokens of one call."""


@dataclass(slots=True)
class Account:
    """What one payer has spent, and what is set aside for calls under way."""

    dollars: float = 0.0
    tokens: int = 0
    reserved_dollars: float = 0.0
    reserved_tokens: int = 0


class Budgets:
    """The accounts of the server and of each rollout. Raises ConfigError where the file cannot be used."""

    def __init__(
        self,
        config: BudgetConfig | None = None,
        store: LightningStoreBase | None = None,
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.config = config or BudgetConfig()
        self._store = store
        path = self.config.file or file
        self._spend_file = (
            _SpendFile(Path(path)) if path is not None and (self.config.dollars or self.config.tokens) else None
        )
        self.total = self._spend_file.read() if self._spend_file else Account()
        self.num_rejected = 0
        """Calls turned away."""
        self._rollouts: OrderedDict[str, Account] = OrderedDict()
        self._opening: dict[str, asyncio.Future[Account]] = {}

    def spent(self, rollout_id: str) -> Account | None:
        """The account of a rollout whose calls came lately."""
        return self._rollouts.get(rollout_id)

    async def reserve(self, rollout_id: str, dollars: float, tokens: int) -> Reservation:
        """Set aside the worst that a call can cost. Raises ApiError 402 where it does not fit any more."""
        account = self._rollouts.get(rollout_id) if rollout_id else Account()
        if account is None:
            account = await self._open(rollout_id)
        self.check(account, rollout_id, dollars, tokens)
        return Reservation(self, account, rollout_id, dollars, tokens)

    def check(self, account: Account, rollout_id: str, dollars: float, tokens: int) -> None:
        """Raises ApiError 402 where so much more does not fit: into the server's budget, or the rollout's. A call that
        belongs to no rollout is bound by the server's alone."""
        self._check(self.total, dollars, tokens, self.config.dollars, self.config.tokens, "this server")
        if rollout_id:
            mine = (self.config.rollout_dollars, self.config.rollout_tokens)
            self._check(account, dollars, tokens, *mine, f"rollout {rollout_id!r}")

    def forget(self, rollout_id: str) -> None:
        """Drop the account of a rollout that has no call under way; its spans say what it has spent."""
        if (account := self._rollouts.get(rollout_id)) is not None and account.reserved_tokens == 0:
            del self._rollouts[rollout_id]

    def close(self) -> None:
        """Let go of the file. What is spent from now on is counted in memory only."""
        if self._spend_file is not None:
            self._spend_file.close()
            self._spend_file = None

    def persist(self) -> None:
        """An account has changed."""
        if self._spend_file is not None:
            self._spend_file.write(self.total)

    def _check(
        self,
        account: Account,
        dollars: float,
        tokens: int,
        most_dollars: float | None,
        max_prompt_tokens: int | None,
        whose: str,
    ) -> None:
        said = None
        if most_dollars is not None and account.dollars + account.reserved_dollars + dollars > most_dollars:
            held = (
                f" and has ${account.reserved_dollars:.4f} set aside for calls under way"
                if account.reserved_dollars
                else ""
            )
            said = f"${account.dollars:.4f} of ${most_dollars:g}{held}; this call may cost ${dollars:.4f}"
        elif max_prompt_tokens is not None and account.tokens + account.reserved_tokens + tokens > max_prompt_tokens:
            held = (
                f" and has {account.reserved_tokens} set aside for calls under way" if account.reserved_tokens else ""
            )
            said = f"{account.tokens} of {max_prompt_tokens} tokens{held}; this call may use {tokens}"
        if said is not None:
            self.num_rejected += 1
            message = f"the budget of {whose} is spent: it has used {said}. Ask for fewer tokens, or raise the budget"
            raise ApiError(402, message, code="budget_exceeded", retry=False)

    async def _open(self, rollout_id: str) -> Account:
        """The account of a rollout, with what its spans say was spent. Calls that come together read it once."""
        if (opening := self._opening.get(rollout_id)) is None:
            opening = self._opening[rollout_id] = asyncio.ensure_future(self._read(rollout_id))
            opening.add_done_callback(lambda _: self._opening.pop(rollout_id, None))
        account = self._rollouts.setdefault(rollout_id, await asyncio.shield(opening))
        self._make_room()
        return account

    async def _read(self, rollout_id: str) -> Account:
        if self._store is None:
            return Account()
        if self.config.rollout_dollars is None and self.config.rollout_tokens is None:
            return Account()
        return spend_of_spans(await self._store.query_spans(rollout_id))

    def _make_room(self) -> None:
        if len(self._rollouts) <= _MAX_ROLLOUTS:
            return
        for rollout_id in list(self._rollouts)[: len(self._rollouts) - _MAX_ROLLOUTS]:
            if self._rollouts[rollout_id].reserved_tokens == 0:
                del self._rollouts[rollout_id]


def spend_of_spans(spans: Iterable[Span]) -> Account:
    """What the calls of spans cost: those that went to providers, whose spans say how often they were sent."""
    account, known = Account(), set[str]()
    for span in spans:
        kept = span.attributes
        if names.PROVIDER_RETRIES not in kept:
            continue
        account.dollars += _amount(kept.get(names.COST))
        account.tokens += int(_amount(kept.get(names.OUTPUT_TOKENS)))
        call = str(kept.get(names.RESPONSE_ID, span.span_id))
        if call not in known:  # Each answer of a call has a span, and they share its prompt.
            known.add(call)
            account.tokens += int(_amount(kept.get(names.INPUT_TOKENS)))
    return account


def _amount(value: object) -> float:
    """Nothing that is recorded gives money back."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= _MOST else 0.0


class Reservation:
    """What is set aside for one call. Ends with `settle` or `release`, whichever comes first."""

    __slots__ = ("_account", "_budgets", "_dollars", "_open", "_rollout_id", "_tokens")

    def __init__(self, budgets: Budgets, account: Account, rollout_id: str, dollars: float, tokens: int) -> None:
        self._budgets, self._account, self._rollout_id = budgets, account, rollout_id
        self._dollars, self._tokens = dollars, tokens
        self._open = True
        self._reserve(1)

    def charge(self, dollars: float, tokens: int) -> None:
        """One try of the call has cost so much, and another is to follow. Raises ApiError 402 where that does not fit
        any more."""
        self._spend(dollars, tokens)
        self._budgets.persist()
        self._budgets.check(self._account, self._rollout_id, 0.0, 0)

    def settle(self, dollars: float, tokens: int) -> None:
        """The call has cost so much, besides what was charged."""
        if self._open:
            self._spend(dollars, tokens)
            self.release()

    def _spend(self, dollars: float, tokens: int) -> None:
        for account in (self._account, self._budgets.total):
            account.dollars += dollars
            account.tokens += tokens

    def release(self) -> None:
        """The call has cost nothing more."""
        if self._open:
            self._open = False
            self._reserve(-1)

    def _reserve(self, sign: int) -> None:
        for account in (self._account, self._budgets.total):
            account.reserved_dollars += sign * self._dollars
            account.reserved_tokens += sign * self._tokens
        self._budgets.persist()


class _SpendFile:
    """Two numbers in a mapped file: a write costs no system call, and outlives a process that is killed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError as error:
            raise ConfigError(f"the budget's file {str(path)!r} cannot be opened: {error}; set budget.file") from error
        try:
            self._map = self._open()
        except BaseException:
            os.close(self._file)
            raise

    def _open(self) -> mmap.mmap:
        if not lock_file(self._file):
            raise ConfigError(
                f"the budget's file {str(self._path)!r} is in use by another server; give each its own budget.file"
            )
        if os.fstat(self._file).st_size == 0:
            os.write(self._file, _LAYOUT.pack(_MAGIC, 0.0, 0.0))
        mapped = mmap.mmap(self._file, 0)
        if len(mapped) != _LAYOUT.size or mapped[: len(_MAGIC)] != _MAGIC:
            raise ConfigError(f"{str(self._path)!r} is no file of a budget; set budget.file to another, or remove it")
        return mapped

    def read(self) -> Account:
        _, dollars, tokens = _LAYOUT.unpack_from(self._map)
        return Account(dollars, int(tokens))

    def write(self, account: Account) -> None:
        spent = (account.dollars + account.reserved_dollars, float(account.tokens + account.reserved_tokens))
        _LAYOUT.pack_into(self._map, 0, _MAGIC, *spent)

    def close(self) -> None:
        self._map.close()
        os.close(self._file)
