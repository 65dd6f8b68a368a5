"""Reads what the views show: run directories, rollouts with their spans, conversations, the credit of tokens."""
