"""Anthropic's wire format: requests, replies and events of /v1/messages."""
