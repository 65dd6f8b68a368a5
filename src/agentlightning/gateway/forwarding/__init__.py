"""Calls that are forwarded to a provider in the caller's own dialect."""
