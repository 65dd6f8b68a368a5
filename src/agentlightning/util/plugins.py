"""Parts that are chosen by name: those of this package, and those of others, which are imported when they are named.

A `Registry` holds the parts of one kind. Whatever it holds is named in the same ways:

    name              one of this package, or one that a distribution announces as an entry point `agentlightning.KIND`
    module:Class      a class (for a reward: a function) in any module that can be imported
    path/file.py:Class    the same in a file

The kinds that have a registry are `losses`, `credit_rules`, `algorithms`, `rewards`, `air_rules`, `trackers`, `hooks`,
`datasets`, `engines` and `backends`; docs/guides/extend.md shows each. Four more are found by their entry points alone:

    agents          a kind of agent: `kubernetes`, for `JobTemplate` and `agl runner --job`
    publishers      a class that publishes each version of the weights of a run: `policy.weights`
    server_routes   a function that opens routes of `agl serve` for models of this machine
    commands        a function that adds a verb to the `agl` program

Those of this repository are below plugins/, one directory each.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import reduce
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar, cast

from agentlightning.errors import AgentLightningError, ConfigError, ExtensionError, MissingExtraError

P = TypeVar("P")
PACKAGE: Final = str(Path(__file__).parents[1])


def plugin_names(kind: str) -> set[str]:
    """The names of the installed parts of a kind."""
    return entry_points(group=f"agentlightning.{kind}").names


def installed() -> dict[str, list[str]]:
    """The names of all installed parts by kind."""
    found = entry_points()
    groups = sorted(each for each in found.groups if each.startswith("agentlightning."))
    return {group.partition(".")[2]: sorted(found.select(group=group).names) for group in groups}


def announced(kind: str, name: str) -> str:
    """`module:Class` of what is installed as `name` of a kind. Raises MissingExtraError where nothing is, and
    ConfigError where two distributions have that name."""
    found = tuple(entry_points(group=f"agentlightning.{kind}", name=name))
    if not found:
        raise MissingExtraError(f"agentlightning-{name}", name, plugin=True)
    if len({entry.value for entry in found}) > 1:
        owners = ", ".join(
            f"{entry.value} of {entry.dist.name if entry.dist else 'unknown'} ({file_of(entry.value)})"
            for entry in found
        )
        raise ConfigError(f"several distributions announce {name!r} in agentlightning.{kind}: {owners}; uninstall one")
    return found[0].value


def load_plugin(kind: str, name: str) -> Any:
    """What is installed as `name` of a kind. Raises as `announced` and `load` do."""
    return load(announced(kind, name))


def load(reference: str) -> Any:
    """The object of `module:name` or `path/file.py:name`. Raises ConfigError, which says what failed in which file."""
    place, _, name = reference.rpartition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # As for a script: programs have the folder of `agl` there instead.
    try:
        module = load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        return reduce(getattr, name.split("."), module)
    except (Exception, SystemExit) as error:  # importing runs the code of others
        frames = traceback.extract_tb(error.__traceback__)
        own = [each for each in frames if "importlib" not in each.filename and not each.filename.startswith(PACKAGE)]
        where = f"{own[-1].filename}:{own[-1].lineno}" if own else file_of(reference)
        where = where or f"not found in {os.getcwd()} or on the Python path"
        raise ConfigError(f"{reference} ({where}) cannot be imported: {type(error).__name__}: {error}") from error


def load_file(path: Path, otherwise: str = "agentlightning_extension") -> ModuleType:
    """The module in a file, under the name of the file; where another module has that, `otherwise` and its path."""
    path = path.resolve()
    if getattr(main := sys.modules["__main__"], "__file__", None) == str(path):
        return main
    name = path.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        name = f"{otherwise}{path.with_suffix('')}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} cannot be read as Python")
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # modules beside it are importable, as for a script
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def file_of(reference: str) -> str | None:
    """The file of `module:name` or `path/file.py:name`, which is not imported; None where there is none."""
    place = reference.rpartition(":")[0]
    if place.endswith(".py"):
        return str(Path(place).resolve())
    found = find_module(place)
    return found and found.origin


def find_module(name: str) -> ModuleSpec | None:
    """Where a process with this `sys.path` finds a module. Nothing is imported, as `importlib.util.find_spec` imports
    the packages above; and `sys.modules` is not looked at, which may hold modules that others cannot import."""
    found: ModuleSpec | None = None
    path: Sequence[str] | None = None
    below = ""
    for part in name.split("."):
        if not part.isidentifier() or (found is not None and path is None):  # Only packages have modules below.
            return None
        below = f"{below}.{part}".removeprefix(".")
        finders = [each for each in sys.meta_path if hasattr(each, "find_spec")]
        try:
            found = next((spec for each in finders if (spec := each.find_spec(below, path)) is not None), None)
        except KeyError:  # A folder that is a package without an __init__.py, in one that is not imported.
            path = [os.path.join(each, part) for each in path or ()]
            continue
        if found is None:
            return None
        path = found.submodule_search_locations
    return found


def reference_to(part: Any) -> str:
    """`module:Class` of a class, or of a function; of one in the script that runs, `path/file.py:Class`."""
    main = part.__module__ == "__main__" and getattr(sys.modules["__main__"], "__file__", None)
    return f"{Path(main).resolve() if main else part.__module__}:{part.__qualname__}"


def described(part: Any) -> str:
    """A class or a function of others in words: its name, and its file."""
    try:
        return f"{part.__module__}:{part.__qualname__} ({inspect.getfile(inspect.unwrap(part))})"
    except (AttributeError, OSError, TypeError):
        return repr(part)


def is_own(part: Any) -> bool:
    """Whether a class is one of this package."""
    return part.__module__.startswith("agentlightning.")


@contextmanager
def calls_of(part: Any, noun: str) -> Generator[None]:
    """Name the class of others, and its file, in what its calls raise. Raises ExtensionError."""
    try:
        yield
    except (AgentLightningError, OSError):
        raise
    except Exception as error:
        if is_own(part):
            raise
        trace = "".join(traceback.format_exception(error))
        raise ExtensionError(
            f"{noun} {described(part)} failed with {type(error).__name__}: {error}; mend it, and go on\n{trace}"
        ) from error


class Registry(dict[str, Any]):
    """The parts of one kind: those of this package by name, and where others are found.

    A value that is text is `module:Class`, imported when it is asked for, as a `base` is; None, a plugin of this
    repository. Without a base the parts are functions.
    """

    def __init__(
        self, kind: str, noun: str, base: type | str | None = None, known: dict[str, Any] | None = None
    ) -> None:
        super().__init__(known or {})
        self.kind, self.noun, self.base = kind, noun, base
        self.aliases: dict[str, str] = {}
        """Other names -> names."""
        self.elsewhere: dict[str, str] = {}
        """Names of what is no part of this kind -> what is to be set instead."""
        self.found = dict[str, Any]()
        """Those of others that were named so far."""

    def register(self, part: P) -> P:
        """Make a class known by its `name`, or the default of its `type`, and by its aliases; a class decorator."""
        made: Any = part
        name = getattr(made, "name", None) or made.model_fields["type"].default
        self[name] = part
        self.aliases |= dict.fromkeys(getattr(made, "aliases", ()), name)
        return part

    def names(self) -> list[str]:
        """All names that there are, in alphabetical order."""
        return sorted({*self, *plugin_names(self.kind)})

    def canonical(self, setting: Any) -> Any:
        """A name, or a table with a `type`, as a file can keep it: no alias, no class, and no path that depends on the
        working directory."""
        if isinstance(setting, Mapping):
            table = dict(cast("Mapping[str, Any]", setting))
            return table | {"type": self.canonical(table["type"])} if "type" in table else table
        if isinstance(setting, type):
            return reference_to(self.check(setting))
        if isinstance(setting, str) and setting.partition(":")[0].endswith(".py"):
            return str(Path(setting).absolute())
        return self.aliases.get(setting, setting) if isinstance(setting, str) else setting

    def named(self, setting: Any) -> Any:
        """`canonical`, for what is not imported yet. Raises ConfigError for a name that there is not."""
        setting = self.canonical(setting)
        if isinstance(setting, str):
            self.reference(setting)
        return setting

    def reference(self, name: Any) -> str:
        """`module:Class` of what a name stands for. Raises ConfigError for an unknown one, and as `announced` does."""
        if isinstance(name, str) and ":" in name:
            return name
        name = name if name is None else str(name)  # a file may have a table or a list there
        names = self.names()
        if name in names:
            return self.get(name) or announced(self.kind, name)
        known = [*names, *self.aliases]
        near = [self.elsewhere[name]] if name in self.elsewhere else get_close_matches(str(name), known, 1, 0.7)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        no_type = f"settings without a type name no {self.noun}."
        problem = no_type if name is None else f"there is no {self.noun} {name!r}{hint}"
        raise ConfigError(
            f"{problem} Known: {', '.join(sorted(known))}; one of your own is module:name or path/file.py:name"
        )

    def find(self, name: Any) -> Any:
        """The part of a name. Raises ConfigError for an unknown one, and for one that cannot be used; MissingExtraError
        for a plugin of this repository that is not installed."""
        name = self.canonical(name)
        found = self.get(name) if isinstance(name, str) else None
        if found is None or isinstance(found, str):
            found = self.found[name] = self.check(load(self.reference(name)))
        return found

    def check(self, part: Any) -> Any:
        """The part. Raises ConfigError where it cannot be one of this kind."""
        base = load(self.base) if isinstance(self.base, str) else self.base
        if not (callable(part) if base is None else isinstance(part, type) and issubclass(part, base)):
            wanted = "function" if base is None else f"subclass of {reference_to(base)}"
            raise ConfigError(f"{described(part)} is no {self.noun}; it should be a {wanted}")
        if inspect.isabstract(part):
            missing = ", ".join(sorted(part.__abstractmethods__))
            raise ConfigError(f"{self.noun} {described(part)} defines no {missing}")
        return part
