"""The tokens and dollars of one upstream call: estimated and reserved before it is sent, settled after it.

A try whose response breaks off is charged for by the provider, so it counts as well.
"""

from __future__ import annotations

from typing import Any, Final

from agentlightning import span as names
from agentlightning.gateway.dialects.provider_events import Usage
from agentlightning.gateway.upstream.budget import Reservation
from agentlightning.gateway.upstream.pricing import Price
from agentlightning.gateway.upstream.request import UpstreamRequest
from agentlightning.gateway.upstream.servers import ServerPool
from agentlightning.gateway.upstream.token_bound import max_prompt_tokens
from agentlightning.transport import Headers

BYTES_PER_TOKEN: Final = 4
"""Bytes of a JSON response for each output token, roughly."""
_CACHE_MARK: Final = b'"cache_control"'
_HOUR_MARK: Final = b'"1h"'


class CallAccounting:
    """The account of one call. Ends with `release`."""

    __slots__ = (
        "_pool",
        "_request",
        "_reservation",
        "_uncharged",
        "cost",
        "estimated_tokens",
        "is_settled",
        "lost",
        "usage",
    )

    def __init__(self, pool: ServerPool, request: UpstreamRequest) -> None:
        self.usage: Usage | None = None
        """Usage of the response."""
        self.lost = Usage()
        """Usage of the tries whose response broke off."""
        self.cost: float | None = None
        """US dollars of all tries; None without a price or a response."""
        self.estimated_tokens = 0
        """The tokens that the rate limit reckons with until the usage is known."""
        self.is_settled = False
        self._pool = pool
        self._request = request
        self._reservation: Reservation | None = None
        self._uncharged = Usage()
        """The part of `lost` that is not charged to the budget yet."""

    @property
    def price(self) -> Price | None:
        return self._request.price or self._pool.provider.price

    @property
    def used_tokens(self) -> int:
        return (self.usage.tokens if self.usage else 0) + self.lost.tokens

    def attributes(self) -> dict[str, Any]:
        """Attributes of the call's span: the usage and cost of all tries."""
        attributes: dict[str, Any] = {}
        if self.usage is not None:
            attributes[names.INPUT_TOKENS] = self.usage.input_tokens + self.lost.input_tokens
            attributes[names.OUTPUT_TOKENS] = self.usage.output_tokens + self.lost.output_tokens
        if self.cost is not None:
            attributes[names.COST] = self.cost
        return attributes

    def estimate_tokens(self) -> int:
        """An upper bound of the call's tokens. The prompt counts only if a budget or a token limit is configured."""
        needs_prompt = self._pool.budgets.config or self._pool.provider.tokens_per_minute
        self.estimated_tokens = (self._max_prompt_tokens if needs_prompt else 0) + self._max_output_tokens
        return self.estimated_tokens

    async def reserve(self) -> None:
        """Reserve the worst case of the call. Raises ApiError 402 if it exceeds the budget."""
        prompt_tokens = self.estimated_tokens - self._max_output_tokens
        dollars = self.price.dollars(self._worst_usage(prompt_tokens)) if self.price else 0.0
        self._reservation = await self._pool.budgets.reserve(self._request.rollout_id, dollars, self.estimated_tokens)

    def settle(self, usage: Usage | None, output_tokens: int = 0) -> None:
        """Record the usage that the provider reports. None: it reports none, so it is estimated from `output_tokens`.
        Idempotent."""
        if self.is_settled:
            return
        self.is_settled = True
        self.usage = usage or Usage(self._max_prompt_tokens // 2, output_tokens)
        if self.price is not None:
            self.cost = self.price.dollars(self.usage) + self.price.dollars(self.lost)
            self._pool.dollars += self.cost
        if self._reservation is not None:
            self._reservation.settle(*self._spend_of(self.usage + self._uncharged))

    def record_lost(self, headers: Headers) -> None:
        """Record a response that broke off, by its Content-Length or else by the output limit."""
        length = next((value for name, value in headers if name == b"content-length"), b"")
        limit = 0 if self._request.stream else self._max_output_tokens
        output_tokens = min(limit, int(length) // BYTES_PER_TOKEN) if length.isdigit() else limit
        lost = Usage(self._max_prompt_tokens // 2, output_tokens)
        self.lost, self._uncharged = self.lost + lost, self._uncharged + lost

    def charge_lost(self) -> None:
        """Charge the broken-off tries before the next one. Raises ApiError 402 if the budget is spent."""
        uncharged, self._uncharged = self._uncharged, Usage()
        if self._reservation is not None and uncharged.tokens:
            self._reservation.charge(*self._spend_of(uncharged))

    def release(self) -> None:
        """Release the reservation. Idempotent."""
        if self._reservation is not None:
            self._reservation.release()

    def _spend_of(self, usage: Usage) -> tuple[float, int]:
        """(US dollars, tokens)."""
        return self.price.dollars(usage) if self.price is not None else 0.0, usage.tokens

    def _worst_usage(self, prompt_tokens: int) -> Usage:
        """The most expensive usage: writing a prompt to a cache costs more than reading it."""
        if _CACHE_MARK not in self._request.body:
            return Usage(prompt_tokens, self._max_output_tokens)
        hour = prompt_tokens if _HOUR_MARK in self._request.body else 0
        return Usage(
            prompt_tokens, self._max_output_tokens, written_tokens=prompt_tokens - hour, written_hour_tokens=hour
        )

    @property
    def _max_prompt_tokens(self) -> int:
        return max_prompt_tokens(self._request.body, self._pool.provider.image_tokens)

    @property
    def _max_output_tokens(self) -> int:
        limit = self._request.max_output_tokens
        return self._pool.provider.max_output_tokens if limit is None else limit
