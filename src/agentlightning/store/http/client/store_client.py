"""The store contract (base.py) over HTTP: `LightningStoreClient("http://host:4747")`.

Every call may arrive twice without harm: the client generates the ids, a claim is repeated by its `claim_id`, and a
call that is not idempotent by nature carries a key under which the store remembers its result (store/idempotency.py).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Final

from agentlightning.attempt_variables import PATIENCE_SECONDS
from agentlightning.errors import StoreError
from agentlightning.rollouts import AttemptedRollout, EnqueueRolloutRequest, Rollout
from agentlightning.span import Span
from agentlightning.store.base import store_url
from agentlightning.store.http.client.forwarding import ForwardingStore
from agentlightning.store.http.client.transport import ClientSettings, ClientTransport
from agentlightning.store.http.encoding import span_fields, stored_span
from agentlightning.store.ids import claimed_id, new_hex, new_id

WAIT_SECONDS: Final = 25.0
"""A call that waits is repeated after this time, so that nothing on the way takes the connection for dead."""
RELEASE_SECONDS: Final = 5.0
"""How long a cancelled claim, and `close`, wait until what was claimed is queued again."""
ROLLOUTS_PER_READ: Final = 32
"""Rollouts whose spans `iter_spans` reads at once."""


class LightningStoreClient(ForwardingStore):
    """A store in another process or on another machine. Any number of tasks, event loops and threads may use one
    object at the same time; it can be pickled.

    url: of the server, as `agl serve` prints it; AGL_STORE by default. token: its access token; AGL_TOKEN by default.
    timeout: seconds a request may take. patience: seconds a call is retried while no server answers, so that it
    survives a restart.

    Raises ConfigError for an invalid url or token. Calls raise what the store raises, StoreServerError if no server
    answers or it has another version, and StoreAuthError if it requires another token.

        >>> store = agl.LightningStoreClient("http://127.0.0.1:4747")
        >>> isinstance(store, agl.LightningStore)
        True
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 60.0,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        url = str(store_url(url))
        token = (os.environ.get("AGL_TOKEN") or None) if token is None else token
        self._transport = ClientTransport(ClientSettings.validated(url, token, timeout, patience))
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def token(self) -> str | None:
        """The access token that calls carry."""
        return self._transport.settings.token

    @property
    def url(self) -> str:
        return self._transport.settings.url

    def __repr__(self) -> str:
        return f"LightningStoreClient({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        settings = self._transport.settings
        return _open, (settings.url, settings.token, settings.timeout, settings.retry_seconds)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        if releases := [task for task in self._releases if task.get_loop() is loop]:
            await asyncio.wait(releases, timeout=RELEASE_SECONDS)
        await self._transport.close()

    # -- rollouts ----------------------------------------------------------------------------------------------------

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        requests = [
            replace(request, rollout_id=new_id("ro")) if request.rollout_id is None else request for request in rollouts
        ]
        return await self._call("enqueue_many_rollouts", {"rollouts": requests})

    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        timeout: float | None = None,
        *,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
    ) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(1, worker_id, timeout, queues=queues, claim_id=claim_id)
        return claimed[0] if claimed else None

    async def dequeue_many_rollouts(
        self,
        limit: int = 1,
        worker_id: str | None = None,
        timeout: float | None = None,
        *,
        queues: Sequence[str] | None = None,
        claim_id: str | None = None,
    ) -> list[AttemptedRollout]:
        claim_id = new_id("cl") if claim_id is None else claim_id
        arguments = {"limit": limit, "worker_id": worker_id, "queues": queues, "claim_id": claim_id}
        clock = asyncio.get_running_loop().time
        deadline = clock() + (timeout or 0.0)
        # The first call does not wait, so that it can share a request with other calls.
        claiming = asyncio.ensure_future(self._call("dequeue_many_rollouts", arguments))
        try:
            claimed = await asyncio.shield(claiming)
            while not claimed and (left := deadline - clock()) > 0:
                claimed = await self._call_and_wait("dequeue_many_rollouts", min(left, WAIT_SECONDS), arguments)
        except asyncio.CancelledError:
            release = asyncio.ensure_future(self._release_claim(claiming, claim_id, limit))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
            await asyncio.wait({release}, timeout=RELEASE_SECONDS)  # its caller may end the event loop next
            raise
        return claimed

    async def _release_claim(self, claiming: asyncio.Future[Any], claim_id: str, limit: int) -> None:
        """Requeue what was claimed for a caller that was cancelled."""
        try:
            await claiming
            attempts = await asyncio.gather(*(self.get_attempt(claimed_id(claim_id, each)) for each in range(limit)))
            unseen = [each.rollout_id for each in attempts if each is not None and each.status == "preparing"]
            await asyncio.gather(*(self.requeue_rollout(each, "its claim was cancelled") for each in unseen))
        except StoreError:
            return  # the timeouts of the rollout, or of its worker, requeue it

    async def wait_for_rollouts(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None, minimum: int | None = None
    ) -> list[Rollout]:
        ids = list(dict.fromkeys(rollout_ids))
        arguments = {"rollout_ids": ids, "minimum": minimum}
        clock = asyncio.get_running_loop().time
        deadline = None if timeout is None else clock() + timeout
        finished: list[Rollout] = await self._call("wait_for_rollouts", {**arguments, "timeout": 0.0})
        while len(finished) < (len(ids) if minimum is None else minimum):
            left = WAIT_SECONDS if deadline is None else min(deadline - clock(), WAIT_SECONDS)
            if left <= 0:
                break
            finished = await self._call_and_wait("wait_for_rollouts", left, arguments)
        return finished

    # -- spans -------------------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span:
        span_id = span.span_id or new_hex()
        return stored_span(span, span_id, await self._send("add_span", {"span": span_fields(span, span_id)}))

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        ids = [span.span_id or new_hex() for span in spans]
        fields = [span_fields(span, span_id) for span, span_id in zip(spans, ids, strict=True)]
        results: list[int | Span] = await self._send("add_many_spans", {"spans": fields})
        return [stored_span(*each) for each in zip(spans, ids, results, strict=True)]

    async def iter_spans(
        self, rollout_ids: Sequence[str], tokens: bool = True
    ) -> AsyncIterator[tuple[str, list[Span]]]:
        for start in range(0, len(rollout_ids), ROLLOUTS_PER_READ):
            ids = rollout_ids[start : start + ROLLOUTS_PER_READ]
            lists = await asyncio.gather(*(self.query_spans(each, "latest", tokens=tokens) for each in ids))
            for rollout_id, spans in zip(ids, lists, strict=True):
                yield rollout_id, spans


def _open(url: str, token: str | None, timeout: float, retry_seconds: float) -> LightningStoreClient:
    return LightningStoreClient(url, token, timeout=timeout, patience=retry_seconds)
