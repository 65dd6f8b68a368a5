"""Loads settings from TOML or JSON files and `section.key=value` overrides into pydantic models, and writes TOML.

Every mistake is reported in one line: the full name of the setting, where it came from, and what would work. TOML has
no null: the text "none" stands for it in optional settings.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from datetime import date, time
from difflib import SequenceMatcher
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, core_schema, to_jsonable_python

from agentlightning.errors import ConfigError
from agentlightning.util.json_values import is_list, is_table
from agentlightning.util.plugins import Registry, reference_to

M = TypeVar("M", bound=BaseModel)
Table = dict[str, Any]
Source = tuple[str, Table]
"""Where settings are from, in words, and what it sets."""

NONE = "none"
_SECRET = re.compile(r"(^|_)(key|token|secret|password)$|^(headers|proxy)$", re.IGNORECASE)
_ITEM = "*"
"""Stands for the index of a list item in the name of a setting."""


AtLeastOne = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
OpenShare = Annotated[float, Field(gt=0, lt=1)]
"""A share that is neither nothing nor all."""
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """The base of sections of settings: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def by_type(value: Any) -> Any:
    """A setting given as the name of a type, as a table with that `type`; a validator to run before."""
    return {"type": value} if isinstance(value, str) else value


class Part(Section):
    """The base of settings of what is chosen by name."""

    type: str = ""
    """Which one this is: its name, `module:Class` or `path/file.py:Class`."""


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """In the annotation of a setting: one of a registry, by name, as a table with its `type` and settings, as a class
    or as an object. The settings are those of the class, or of its `config_class`; others are refused."""

    registry: Registry

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(
            lambda value, info: value.model_dump(mode=info.mode), info_arg=True
        )
        return core_schema.no_info_plain_validator_function(self.read, serialization=dump)

    def read(self, value: Any) -> Any:
        """The settings of a value, whose `type` brings them back from a file. Raises ConfigError or ValidationError."""
        if isinstance(value, BaseModel):
            made, name = value, getattr(value, "type", "")
            if not name or (":" not in name and name not in self.registry.names()):
                name = reference_to(self.registry.check(type(value)))
        else:
            table = _as_table(self.registry.canonical(value))
            name = table.pop("type", None)
            model = _settings_class(self.registry.find(name))
            _read_none(table, model)
            made = model.model_validate(table)
        return made if getattr(made, "type", name) == name else made.model_copy(update={"type": name})

    def classes(self) -> Iterator[type[BaseModel]]:
        """The settings of all that are ours, and of those of others that were imported."""
        ours = {name: self.registry.find(name) for name in self.registry}
        yield from map(_settings_class, {**ours, **self.registry.found}.values())


def _settings_class(part: Any) -> type[BaseModel]:
    return getattr(part, "config_class", part)


def _as_table(setting: Any) -> Table:
    return dict(cast(Table, setting)) if isinstance(setting, Mapping) else {"type": setting}


def chosen(setting: Any, registry: Registry) -> Any:
    """The settings of one of a registry, as `Chosen` reads them. Raises ConfigError."""
    try:
        return Chosen(registry).read(setting)
    except ValidationError as error:
        table = _as_table(setting)
        lines = _explain(error, table, [], _settings_class(registry.find(table["type"])))
        raise ConfigError(f'{registry.noun} "{table["type"]}" cannot be used: {"; ".join(lines)}') from error


C = TypeVar("C")

OneOrSeveral: TypeAlias = Annotated[
    Annotated[C, Tag("one")] | Annotated[tuple[C, ...], Field(min_length=1), Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list | tuple) else "one"),
]
"""One of what is annotated, or a list of such."""


# -- reading ---------------------------------------------------------------------------------------------------------


def load_settings(model: type[M], *, toml: Path | None = None, overrides: Sequence[str] = ()) -> M:
    """The settings of a file, changed by overrides such as `algorithm.optimizer.lr=1e-4`. A file whose name ends in
    `.json` is read as JSON.

    The value of an override is parsed as TOML, else as a JSON object or array, else it is plain text. Raises
    ConfigError with a line for each setting that is unknown (with the nearest known one, if one is like it) or has an
    invalid value.
    """
    sources = [] if toml is None else [(f"from {toml}", _read_file(toml))]
    sources += [(f"from the override {_named(text)}", _read_override(text)) for text in overrides]
    table: Table = {}
    for _, own in sources:
        _merge(table, deepcopy(own))
    _read_none(table, model)
    return _made(model, table, sources)


def _made(model: type[M], table: Table, sources: Sequence[Source], base: M | None = None) -> M:
    if base is None:
        _fill(table, {name: each.get_default(call_default_factory=True) for name, each in model.model_fields.items()})
    else:
        _fill(table, dict(base))
        table = {**_set(base), **table}
    try:
        return model.model_validate(table, extra="forbid")
    except ValidationError as error:
        lines = _explain(error, table, sources, model)
    head = f"{len(lines)} invalid settings:\n  " if len(lines) > 1 else ""
    raise ConfigError(head + "\n  ".join(lines))


class SettingsSignature:
    """The signature of a class whose `__init__` takes the fields of its `config_class` as `**settings`: it names these
    fields, so that editors show and complete them."""

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")
        parameters = list(inspect.signature(owner.__init__).parameters.values())[1:]
        fixed = [each for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
        takes_settings = len(fixed) < len(parameters)
        fields = inspect.signature(owner.config_class).parameters.values() if takes_settings else ()
        named = {"type", *(each.name for each in fixed)}
        return inspect.Signature([*fixed, *(each for each in fields if each.name not in named)])


def settings_from(
    model: type[M], values: Mapping[str, Any], *, base: M | None = None, source: str = "from the arguments"
) -> M:
    """Settings from arguments, over those of `base` or the defaults; partial sections are completed.

    Raises ConfigError as `load_settings` does; `source` is what its message says about the origin of the values.
    """
    if base is not None and not isinstance(base, model):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"{base!r:.80} is no {model.__name__}; give one, or its settings by their names")
    kind = model if base is None else type(base)
    return _made(kind, _expanded(kind, dict(values)), [(source, dict(values))], base)


def is_secret(name: str) -> bool:
    """Whether the full name of a setting (`runner.env.HF_TOKEN`) or a part of it says that its value is for no message,
    tracker or page."""
    return any(map(_SECRET.search, name.split(".")))


def _named(override: str) -> str:
    name, _, value = override.partition("=")
    return f"{name}=..." if is_secret(name.strip()) or "{" in value else override


def _read_file(path: Path) -> Table:
    kind, read = ("JSON", json.loads) if path.suffix.lower() == ".json" else ("TOML", tomllib.loads)
    try:
        table = read(path.read_text("utf-8-sig"))
    except OSError as error:
        found = "there is no" if isinstance(error, FileNotFoundError) else f"{error.strerror}: the"
        raise ConfigError(f"{found} settings file {str(path)!r}; give the path of a TOML file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not {kind}: {error}") from error
    if not is_table(table):
        raise ConfigError(f"{path} holds a JSON {type(table).__name__}; it must hold an object")
    return table


def _read_override(text: str) -> Table:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text!r} sets nothing; write section.key=value, as in algorithm.steps=50")
    try:
        table = tomllib.loads(f"{key}=0")
    except tomllib.TOMLDecodeError:
        raise ConfigError(f"{key!r} is not the name of a setting; write section.key=value") from None
    return _with_value(table, _read_value(value))


def _with_value(table: Table, value: Any) -> Table:
    return {key: _with_value(inner, value) if is_table(inner) else value for key, inner in table.items()}


def _read_value(text: str) -> Any:
    """TOML, but for dates; JSON, as people paste objects and lists; else text."""
    try:
        [value] = tomllib.loads(f"value={text}").values()
        return text if isinstance(value, date | time) else value
    except ValueError:
        with suppress(ValueError):
            return json.loads(text) if text.lstrip().startswith(("{", "[")) else text
        return text


def _merge(into: Any, table: Table, name: str = "") -> None:
    """Set what the table sets: keys of a table, and items of a list by their place, as in `stages.1.steps=50`."""
    for key, value in table.items():
        if is_list(into) and int(key) >= len(into):
            raise ConfigError(f"there is no {name}.{key}: {name} has {len(into)} items, counted from 0")
        place: Any = int(key) if is_list(into) else key
        inner = into.get(key) if is_table(into) else into[place]
        is_place = is_list(inner) and is_table(value) and all(map(str.isdecimal, value))
        if is_table(value) and (is_place or is_table(inner)):
            _merge(inner, value, key)
        else:
            into[place] = value


def _read_none(table: Table, model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        given = table.get(name)
        if given == NONE and (field.annotation is Any or NoneType in get_args(field.annotation)):
            table[name] = None
        kind: Any = field
        if get_origin(field.annotation) is dict and is_table(given):
            kind, given = get_args(field.annotation)[1], list(given.values())
        tables = [each for each in (given if is_list(given) else [given]) if is_table(each)]
        for part, _ in _models(kind, name) if tables else ():
            for each in tables:
                _read_none(each, part)


def _fill(table: Table, defaults: Mapping[str, Any]) -> None:
    """Complete partial sections by what the defaults set: pydantic would use those of the class, not of the section."""
    for name, default in defaults.items():
        given = table.get(name)
        if is_table(given) and isinstance(default, BaseModel):
            section, inner = _expanded(type(default), given), dict(default)
            if section.get("type", inner.get("type")) == inner.get("type"):
                _fill(section, inner)
                table[name] = {**_set(default), **section}


def _set(settings: BaseModel) -> Table:
    """What was set of the settings, and `type`, which says whose they are."""
    return {name: value for name, value in settings if name == "type" or name in settings.model_fields_set}


def _expanded(model: type[BaseModel], settings: Table) -> Table:
    """The settings with those of a preset among them, which `model.expand_preset` fills in."""
    expand = getattr(model, "expand_preset", None)
    return settings if expand is None else expand(settings)


# -- the schema ------------------------------------------------------------------------------------------------------


def _known(model: type[BaseModel], prefix: str = "", outer: tuple[Any, ...] = ()) -> Iterator[str]:
    """Every setting by its dotted name, including sections, all members of unions, and items of lists (as `*`)."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for part, full in _models(field, prefix + name):
            if part not in (*outer, model):
                yield from _known(part, f"{full}.", (*outer, model))


def _models(setting: Any, name: str) -> Iterator[tuple[type[BaseModel], str]]:
    """The models that a setting, or a part of its annotation, may hold, with their names."""
    if isinstance(setting, FieldInfo):
        setting = Annotated[setting.annotation, None, *setting.metadata]
    origin, arguments = get_origin(setting), get_args(setting)
    if chosen := [each for each in arguments if isinstance(each, Chosen)]:
        yield from ((each, name) for each in chosen[0].classes())
    elif origin in (Annotated, Union, UnionType, tuple, list):
        for each in arguments:
            yield from _models(each, f"{name}.{_ITEM}" if origin in (tuple, list) else name)
    elif isinstance(setting, type) and issubclass(setting, BaseModel):
        yield setting, name


# -- mistakes --------------------------------------------------------------------------------------------------------


def _explain(errors: ValidationError, table: Table, sources: Sequence[Source], model: type[BaseModel]) -> list[str]:
    """One line for each setting. The errors of the members of a union are joined."""
    lines, known = dict[str, str](), [*_known(model)]
    for error in errors.errors():
        path = _path(error, table)
        if error["type"] == "extra_forbidden":
            for full in _leaves(path, error["input"]):
                lines[".".join(full)] = _unknown(full, sources, known)
            continue
        name, own = ".".join(path), COMPLAINTS.get(error["type"])
        complaint = own.format(**error.get("ctx", {})) if own else error["msg"].replace("Input should", "should", 1)
        below = [each for each in known if each.startswith(f"{name}.") and not each.endswith(".type")]
        if error["type"] == "model_type" and below:
            complaint = f"has settings of its own; set one of these, such as {below[0]}"
            complaint += f"; {OF_RUN}" if name in DIRECTORIES and RUN_SETTING in known else ""
        if name in lines:
            lines[name] += f", or {complaint.removeprefix('should be ')}"
        else:
            lines[name] = _subject(path, error, sources) + complaint
    # A list whose item is invalid is also reported as too short.
    return [line for name, line in lines.items() if not any(other.startswith(f"{name}.") for other in lines)]


def _path(error: ErrorDetails, table: Table) -> list[str]:
    """The path of the setting, without the names of union members, which pydantic adds to the location."""
    path: list[str] = []
    value: Any = table
    for number, part in enumerate(error["loc"], 1):
        if is_table(value) and part in value:
            value = value[str(part)]
        elif is_list(value) and isinstance(part, int):
            value = value[part]
        elif not (error["type"] == "missing" and number == len(error["loc"])):
            continue
        path.append(str(part))
    return path


def _leaves(path: list[str], value: Any) -> Iterator[list[str]]:
    if not is_table(value) or not value:
        yield path
        return
    for key, inner in value.items():
        yield from _leaves([*path, key], inner)


def _unknown(path: Sequence[str], sources: Sequence[Source], known: Sequence[str]) -> str:
    name, numbers = ".".join(path), [part for part in path if part.isdecimal()]
    shape = ".".join(_ITEM if part.isdecimal() else part for part in path)
    if shape in known:
        return f"{name}{_origin(path, sources)} belongs to another type than the selected one; leave it out"
    line = f"unknown setting {name}{_origin(path, sources)}"
    if not known:
        return line
    of_run = RUN_SETTING in known
    if of_run and path[-1].lower() in DIRECTORIES:
        return f"{line}; {OF_RUN}"
    found = _synonym(shape, known) or nearest(shape, known)
    if found is None:
        return f"{line}; no known one is like it" + (" (all of them: agl train --print-config)" if of_run else "")
    for number in numbers:
        found = found.replace(_ITEM, number, 1)
    return f"{line}; the nearest known one is {found}"


RUN_SETTING = "run.seed"
"""Known where the settings are those of a training run."""
OF_RUN = "the directory of a run is no setting: give --run DIR, or Trainer(run_dir=DIR)"
DIRECTORIES = frozenset(
    {"run", "dir", "out", "output", "out_dir", "output_dir", "run_dir", "log_dir", "logging_dir", "save_dir"}
)
"""Names that other trainers have for the directory of a run."""
PRESET_NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo", "reinforce++", "rloo", "loop")
"""Those of `LightningRL`, which other trainers have as algorithms."""
SYNONYMS = {
    "lr learning_rate": "optimizer.lr",
    "rank lora_rank lora_r": "policy.lora.r lora.r",
    "lora_alpha": "policy.lora.alpha lora.alpha",
    "kl kl_coef": "kl_in_reward",
    "weight_decay": "optimizer.weight_decay",
    "warmup warmup_ratio": "optimizer.warmup_steps",
    "eval_steps": "evaluation.every",
    "max_grad_norm": "optimizer.clip_norm",
    "epochs num_epochs num_train_epochs max_steps iterations": "steps",
    "batch_size train_batch_size per_device_train_batch_size": "tasks_per_step batch_size",
    "num_generations n_samples": "group_size",
    " ".join(PRESET_NAMES): "preset",
    "ppo": "algorithm.loss",
    "epsilon clip_range": "loss.clip_low",
    "model_name model_path": "policy.model",
    "timeout": "runner.timeout_seconds",
    "n_workers num_workers": "runner.hosts",
    "max_concurrency": "runner.concurrency",
}
"""Names of settings in other trainers -> how the name ends here. Tried before similarity of spelling, which finds
`aggregate` for `learning_rate`."""


def _synonym(name: str, known: Sequence[str]) -> str | None:
    """The setting that has this name in another trainer; settings of the algorithm come first."""
    section, _, last = name.rpartition(".")

    def distance(other: str) -> tuple[bool, bool, int, str]:
        return not other.startswith(section), not other.startswith("algorithm"), other.count("."), other

    ours = next((ours for theirs, ours in SYNONYMS.items() if last.lower() in theirs.split()), "")
    found = ([other for other in known if f".{other}".endswith(f".{each}")] for each in ours.split())
    return min(next(filter(None, found), ()), key=distance, default=None)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known dotted name whose last part is that of `name`, else like it in the same section, else like it; None
    where no last part is similar, or begins with that of `name`."""
    section, _, last = name.rpartition(".")

    def similarity(other: str) -> tuple[bool, float, float]:
        other_section, _, own = other.rpartition(".")
        short = ALIKE if len(last) > 2 and own.startswith(last) else 0.0
        alike = max(short, SequenceMatcher(None, last.lower(), own).ratio())
        first = alike == 1 or (alike >= ALIKE and other_section == section)
        return first, alike, SequenceMatcher(None, name, other).ratio()

    found = max(known, key=similarity)
    return found if similarity(found)[1] >= ALIKE else None


ALIKE = 0.7
"""The least similarity of a name to one that may be meant: "dir" and "editor" have 0.67."""


def _subject(path: Sequence[str], error: ErrorDetails, sources: Sequence[Source]) -> str:
    if not path:
        return f"what comes {', '.join(name for name, _ in sources)} " if sources else ""
    if error["type"] == "missing":
        return f"{'.'.join(path)} "
    value, shown = error["input"], ""
    if _may_be_shown(path, value):
        shown = f" = {NONE if value is None else json.dumps(value, ensure_ascii=False, default=str)}"
    return f"{'.'.join(path)}{shown}{_origin(path, sources)} "


def _may_be_shown(path: Sequence[str], value: Any) -> bool:
    """Whether a message may show the value: no tables, as their settings are named, and no secrets."""
    if isinstance(value, dict | BaseModel):
        return False
    items = value if is_list(value) else []
    return not any(map(is_secret, path)) and all(_may_be_shown((), inner) for inner in items)


COMPLAINTS = {
    "missing": "is required; set it",
    "union_tag_invalid": "has no type {tag!r}; it should be {expected_tags}",
    "union_tag_not_found": "does not say which one it is; set its {discriminator}",
    **dict.fromkeys(("value_error", "assertion_error"), "cannot work: {error}"),
}
"""By the type of pydantic's error."""


def _origin(path: Sequence[str], sources: Sequence[Source]) -> str:
    """The last source that sets the setting, in brackets; empty where no sources are known."""
    found = next((name for name, table in reversed(sources) if _sets(table, path)), "the default")
    return f" ({found})" if sources else ""


def _sets(table: Table, path: Sequence[str]) -> bool:
    """Whether a table sets a setting, or one that holds it."""
    value: Any = table
    for part in path:
        if not is_table(value):
            return True
        if part not in value:
            return False
        value = value[part]
    return True


# -- writing ---------------------------------------------------------------------------------------------------------


def dump_toml(settings: BaseModel) -> str:
    """All settings, including defaults, as TOML that `load_settings` reads back, each with its description."""
    return "\n".join(_lines(settings, "")).strip("\n") + "\n"


def _lines(settings: BaseModel, prefix: str) -> Iterator[str]:
    texts = field_texts(type(settings))
    for name, value in sorted(_fields(settings).items(), key=lambda field: isinstance(field[1], BaseModel)):
        section = value if isinstance(value, BaseModel) else None
        if section is not None:
            yield ""
        yield from (f"# {line}".rstrip() for line in texts.get(name, "").splitlines())
        if section is not None:
            yield f"[{prefix}{name}]"
            yield from _lines(section, f"{prefix}{name}.")
        else:
            yield f"{name} = {_value(value, prefix + name)}"


def _fields(model: BaseModel) -> Table:
    """The settings as files have them, but for models, which stay, also in a list or a table."""
    dumped, parts = model.model_dump(), (BaseModel, tuple, dict)
    return {
        name: NONE if value is None else value if isinstance(value, parts) else dumped[name] for name, value in model
    }


@cache
def field_texts(kind: type) -> dict[str, str]:
    """The text below each field of a class and its bases, as far as their source is at hand. Reading that takes longer
    than the rest of an import, which is why pydantic does not."""
    found: dict[str, str] = {}
    for base in (each for each in reversed(kind.__mro__) if each is not BaseModel):
        with suppress(OSError, TypeError):
            [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for field, text in pairwise(cast(ast.ClassDef, tree).body):
                match field, text:
                    case ast.AnnAssign(target=target), ast.Expr(value=ast.Constant(value=str(own))):
                        found[ast.unparse(target)] = inspect.cleandoc(own)
                    case _:
                        pass
    return found


def _value(value: Any, name: str) -> str:
    import tomlkit

    if isinstance(value, BaseModel):
        value = {key: each for key, each in _fields(value).items() if key in _set(value)}
    if is_table(value):
        items = value.items()
        inner = ", ".join(f"{tomlkit.key(key).as_string()} = {_value(item, name)}" for key, item in items)
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item, name) for item in value)}]"
    if value is None:
        raise ConfigError(f"{name} holds a None inside, which TOML cannot represent; leave that key out")
    return tomlkit.item(to_jsonable_python(value)).as_string()
