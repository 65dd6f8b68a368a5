"""Names of the 0.x API whose work other parts do here: adapters, hooks, a store server, a runner, algorithms.

`agl.NAME` finds them, too.
"""

from __future__ import annotations

from importlib import import_module

from agentlightning.util.stubs import stub_names

NAMES = stub_names(__name__)
"""Each name of 0.x beside those at the top -> the module that defines it."""


def __getattr__(name: str) -> object:
    if name not in NAMES:
        raise AttributeError(f"module 'agentlightning.compat' has no attribute {name!r}")
    return getattr(import_module(NAMES[name]), name)
