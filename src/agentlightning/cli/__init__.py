"""The command line, `agl`: a file per verb."""

from __future__ import annotations

from agentlightning.cli.main import main

__all__ = ["main"]
