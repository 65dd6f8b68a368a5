"""The command line: `agl demo`, `agl train`, `agl eval`. A file per verb."""

from __future__ import annotations

from agentlightning.cli.app import main

__all__ = ["main"]
