"""The client side of the store's HTTP API: the store contract, forwarded to a server."""

from agentlightning.store.http.client.store_client import LightningStoreClient

__all__ = ["LightningStoreClient"]
