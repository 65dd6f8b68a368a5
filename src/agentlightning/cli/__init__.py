"""The command line, `agl`: a file for each verb, and the options and output that they share."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point of `agl`."""
    try:
        from agentlightning.cli.main import build

        build()()
    except KeyboardInterrupt:  # while its modules load; later ones say how to go on
        print("interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)
