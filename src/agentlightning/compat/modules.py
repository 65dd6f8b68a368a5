"""Module paths of 0.x: `from agentlightning.types import PromptTemplate` finds what `agentlightning.PromptTemplate` is.

The modules are made when they are first imported, and have every public name: 0.x moved its names between them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "agentlightning"
PATHS = (
    "adapter", "algorithm", "algorithm.apo", "emitter", "litagent",
    "reward", "tracer", "tracer.agentops", "tracer.otel", "types",
)  # fmt: skip
GONE = {
    "reward": "a function that scores is an ordinary one here; leave the decorator out",
    "MongoLightningStore": 'agl.LightningStore("postgresql://...") is the store for many machines',
    "WeaveTracer": "attempts are traced with OpenTelemetry, and the gateway records model calls; leave it out",
    "LlmProxyTraceToTriplet": "LightningRL reads token trees; leave the adapter out",
    "VERL": "agl.LightningRL trains; docs/migrating.md translates its settings",
}
"""Names of 0.x without a place here, and the way out."""


class OldModules:
    """Finds and loads the module paths of 0.x."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != PACKAGE or rest not in PATHS:
            return None
        # The base class would take longer to import than the package.
        return ModuleSpec(fullname, self, is_package=True)  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def find(name: str) -> object:
            if name in GONE:
                raise ImportError(f"agentlightning has no {name}: {GONE[name]}")
            return getattr(import_module(PACKAGE), name)

        module.__doc__ = "The names of `agentlightning`, at a path of 0.x."
        module.__dict__["__getattr__"] = find


def install() -> None:
    """Let the paths be imported."""
    if not any(isinstance(each, OldModules) for each in sys.meta_path):
        sys.meta_path.append(OldModules())
