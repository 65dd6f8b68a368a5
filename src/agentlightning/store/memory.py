"""A store in memory."""

from __future__ import annotations

from agentlightning.store.sql.store import SqlStore


class InMemoryLightningStore(SqlStore):
    """A store that ends with the process, for tests and experiments. It supports everything a durable store does.

    >>> store = agl.InMemoryLightningStore()
    >>> asyncio.run(store.enqueue_rollout({"question": "6 x 7"})).status
    'queuing'
    >>> asyncio.run(store.close())
    """

    def __init__(self) -> None:
        super().__init__(":memory:")
