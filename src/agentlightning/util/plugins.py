"""Parts that distributions of their own bring, found by entry points: nothing here imports them before they are named.

A distribution announces a part by a name in the group `agentlightning.KIND` of its entry points. The kinds:

    backends        a class with `async open(config, settings)` that trains and samples: `policy.kind`
    model_servers   a class that implements `engine.servers.base.ModelServer`: `policy.engine`
    publishers      a class that publishes each version of the weights of a run: `policy.weights`
    server_routes   a function that opens routes of `agl serve` for models of this machine
    commands        a function that adds a verb to the `agl` program

Those of this repository are below plugins/, one directory each.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from agentlightning.errors import ConfigError, MissingExtraError


def plugin_names(kind: str) -> set[str]:
    """The names of the installed parts of a kind."""
    return set(entry_points(group=f"agentlightning.{kind}").names)


def load_plugin(kind: str, name: str) -> Any:
    """What is installed as `name` of a kind. Raises MissingExtraError where nothing is, and ConfigError where two
    distributions have that name, or it cannot be imported."""
    found = tuple(entry_points(group=f"agentlightning.{kind}", name=name))
    if not found:
        raise MissingExtraError(f"agentlightning-{name}", name, plugin=True)
    if len({entry.value for entry in found}) > 1:
        owners = ", ".join(f"{entry.value} of {entry.dist.name if entry.dist else 'unknown'}" for entry in found)
        raise ConfigError(f"several distributions announce {name!r} in agentlightning.{kind}: {owners}; uninstall one")
    try:
        return found[0].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the plugin {name!r} cannot be loaded from {found[0].value}: {error}; install it again, or uninstall it"
        ) from error
