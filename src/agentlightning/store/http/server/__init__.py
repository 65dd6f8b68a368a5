"""The server side of the store's HTTP API: routes, the REST endpoints and the batch endpoint, as plain ASGI."""
