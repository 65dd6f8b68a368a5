"""The HTTP server: one ASGI application for the store, traces, metrics and model calls, and the protocol it runs on."""
