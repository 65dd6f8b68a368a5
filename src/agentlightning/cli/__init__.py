"""The command line, `agl`: a file per verb."""

from __future__ import annotations

from agentlightning.cli.app import main

__all__ = ["main"]
