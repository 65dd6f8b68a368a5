"""Command lines of `agl` in files for deployment."""

import typer

from agentlightning.cli.main import build


def check_command(words):
    """Parse a command line without running it. Raises a UsageError for what `agl` does not know."""
    verb = typer.main.get_command(build()).load(words[0])
    with verb.make_context(words[0], list(words[1:])):
        pass
