"""The command line, `agl`: a file for each verb, and the options and output that they share."""

from __future__ import annotations

from agentlightning.cli.main import main

__all__ = ["main"]
