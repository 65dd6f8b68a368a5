"""Anthropic's wire format: messages."""
