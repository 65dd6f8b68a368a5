"""A store that lives in memory."""

from __future__ import annotations

from agentlightning.store.sql.store import SqlStore


class InMemoryLightningStore(SqlStore):
    """A store that is gone with the process: for tests and quick tries. It does all that a durable one does.

    >>> store = agl.InMemoryLightningStore()
    >>> asyncio.run(store.enqueue_rollout({"question": "6 x 7"})).status
    'queuing'
    >>> asyncio.run(store.close())
    """

    def __init__(self) -> None:
        super().__init__(":memory:")
