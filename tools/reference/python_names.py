"""The pages of the public names: one for each group in the docstring of the package, and one for each other place."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import msgspec
from pydantic import BaseModel

import agentlightning as agl
from agentlightning.compat import NAMES
from agentlightning.util.settings import Section, field_texts
from tools.reference.docstrings import cell, code, markdown

GROUP = re.compile(r"^([A-Z][\w .,]*?): (.+?)(?=^[A-Z][\w .,]*?: |^The rest|\Z)", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"\b[A-Za-z]\w+\b(?= \(|,|\.$|$)")
PAGES = {
    "Agents": "agents",
    "Training": "training",
    "Rewards": "rewards",
    "What an agent says": "emit",
    "Recording": "recording",
    "The store": "store",
    "Data": "data",
    "Classes of settings": "settings",
    "Errors": "errors",
    "Names of 0.x": "compat",
    "Other modules": "modules",
}
TITLES = {"The store": "Stores", "Recording": "Recording sessions"}
"""Where the heading alone would be taken for another page."""
OTHERS = {
    "algorithms.sft": "SFTResult",
    "algorithms.training": "Collected RolloutReport RolloutRequest RolloutSource Stage",
    "chat.base": "ChatFormat",
    "config": (
        "APOConfig AlgorithmConfig BeamSearchConfig Branching CurriculumConfig DPOConfig DataConfig EvaluationConfig "
        "GateConfig GatewayConfig GepaSearchConfig LightningRLConfig OptimizerConfig PolicyConfig PromptModel "
        "RejectionSamplingConfig RewardGuard RunConfig RunnerConfig SFTConfig SearchBudget SequentialConfig "
        "TinkerConfig TrackingConfig TurnLimit WarmStartConfig WeightsConfig"
    ),
    "credit.rejection": "Rejection",
    "errors": (
        "AgentError AgentLightningError AgentTimeoutError ConfigError ConflictError ContextLengthError DatasetError "
        "ExtensionError MissingExtraError MissingRewardError ModelNotFoundError NotFoundError PolicyError RankError "
        "ResumeError RewardError RewardServiceError RolloutRejectedError ServerError StoreAuthError StoreClosedError "
        "StoreError StoreFullError StoreLostError StoreServerError StoreVersionError TrainingStopped "
        "UnfaithfulSampleError UnknownTokensError"
    ),
    "evaluation.intervals": "Comparison Gain",
    "evaluation.sequential": "NullTest PairedSequentialTest",
    "hierarchy": "LevelStep",
    "policy.base": "Capabilities Policy UpdateOptions",
    "policy.learner": "Learner",
    "policy.losses": "NLLLoss PPOLoss",
    "recording.instrumentors": "Instrumentation",
    "recording.session": "CriticalPath Session",
    "rescorer": "Rescoring",
    "rewards.judges": "JudgedRollout",
    "runner": "JobTemplate RunnerStatistics",
    "store.trajectory_query": "TrajectoryQuery",
    "store.types": "Pruned Queue RolloutRecord UNSET Unset",
    "task": "DatasetKind",
    "tracing.air": "air_rule",
    "tracing.outbox": "RecordingStatus",
    "training.callbacks": "FinishedStep",
    "training.dry_run": "DryRun DryRunCheck DryRunRollout",
    "training.governance": "AuditRecord read_audit",
    "training.report.result": "Cost RecordedResult StageResult",
    "trajectory": "Node Step TokenTree TrainingSample",
    "util.kept_sets": "KeptSets",
    "util.progress": "Progress RolloutCounts",
}
"""Module -> the names of it that are public beside those at the top."""
GUIDES = {
    "assemble": "token_tree",
    "attempt_address": "attempt_secret",
    "attempt_variables": "attempt_environment",
    "credit": "CreditRule group_trajectories training_samples",
    "engine.servers.clients.vllm": "VllmServer",
    "integrations.ray": "RayRunners",
    "integrations.text_gym": "gym_agent",
    "policy.config": "default_lr",
    "policy.losses": "LossValue TokenBatch TokenLoss",
    "policy.open": "open_policy",
    "testing": "ScriptedServer",
    "training.tracking": "Tracker",
}
"""Module -> what the guides import from it beside them."""
SPLIT = {"LightningRL": "Algorithms", "Algorithm": "Algorithms of your own", "evaluate": "Evaluation"}
"""Names of the group Training at which a page of its own begins, with its title."""
MADE = "<!-- made from the code (tools/reference): change its docstrings -->\n"


@cache
def homes() -> dict[str, str]:
    """Every public name -> where it is imported from."""
    others = {module: names for module, names in OTHERS.items() if module not in ("config", "errors")}
    found = {
        name: f"agentlightning.{module}"
        for table in (others, GUIDES)
        for module, names in table.items()
        for name in names.split()
    }
    found |= dict.fromkeys(NAMES, "agl.compat")
    for module in ("config", "errors"):
        found |= dict.fromkeys(OTHERS[module].split(), f"agl.{module}")
    return found | dict.fromkeys(agl.__all__, "agl")


def value(name: str) -> Any:
    """What a public name is."""
    return getattr(import_module(homes()[name].replace("agl", "agentlightning", 1)), name)


def groups() -> dict[str, list[str]]:
    """Heading of each group in the docstring of the package, and of each other place -> its names, in order. A name is
    in the first group that has it."""
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    for heading, text in GROUP.findall(inspect.cleandoc(agl.__doc__ or "")):
        words = re.findall(r"\w+", re.sub(r"\([^()]*\)", "", text))
        names = [word for word in dict.fromkeys(words) if word in agl.__all__ and word not in seen]
        seen.update(names)
        if heading in PAGES:
            found |= _split(heading, names)
    places = {"Classes of settings": "agl.config", "Errors": "agl.errors", "Names of 0.x": "agl.compat"}
    rest = {name: home for name, home in homes().items() if home != "agl"}
    found |= {heading: [name for name, home in rest.items() if home == place] for heading, place in places.items()}
    return found | {"Other modules": [name for name, home in rest.items() if not home.startswith("agl.")]}


def _split(heading: str, names: list[str]) -> dict[str, list[str]]:
    """A group in parts, each from the name of a page of its own on."""
    parts: dict[str, list[str]] = {heading: []}
    for name in names:
        heading = SPLIT.get(name, heading)
        parts.setdefault(heading, []).append(name)
    return parts


def pages() -> dict[str, str]:
    """File name -> text, with an index of all names."""
    made = {_file(heading): _page(heading, names) for heading, names in groups().items()}
    return {"index.md": _index(), **made}


def _file(heading: str) -> str:
    return f"{PAGES.get(heading) or heading.lower().replace(' ', '-')}.md"


def _index() -> str:
    lines = [
        "# Python",
        "",
        MADE,
        "`import agentlightning as agl` loads a name when it is first used, and never torch. Every public name,"
        " `agl.NAME` where no other place is given:",
        "",
    ]
    for heading, names in groups().items():
        page = _file(heading)
        lines += [f"## {_title(heading)}", "", "| name | |", "| --- | --- |"]
        lines += [f"| [`{_listed(name)}`]({page}#{name.lower()}) | {cell(summary(name))} |" for name in names]
        lines.append("")
    return "\n".join(lines)


def _title(heading: str) -> str:
    return TITLES.get(heading, heading.partition(",")[0])


def _page(heading: str, names: list[str]) -> str:
    return f"# {_title(heading)}\n\n{MADE}\n" + "\n".join(entry(name) for name in names)


def _listed(name: str) -> str:
    """A name, with its place where it is not at the top."""
    home = homes()[name]
    return name if home in ("agl", "agl.compat") else f"{home.removeprefix('agentlightning.')}.{name}"


def _shown(name: str) -> str:
    """A name as one writes it."""
    home = homes()[name]
    return name if home.startswith("agentlightning") else f"{home.removesuffix('.compat')}.{name}"


def describe(name: str) -> str:
    """The docstring of a public name; "" if it has none of its own."""
    found = value(name)
    if get_origin(found) is not None:
        return f"The type `{_plain(str(found))}`."
    return inspect.getdoc(found) or ""


def summary(name: str) -> str:
    """The first sentence of the docstring."""
    first = re.split(r"\n\s*\n", describe(name))[0]
    return re.split(r"(?<=[.:]) (?=[A-Z`])", re.sub(r"\s+", " ", first), maxsplit=1)[0]


def entry(name: str) -> str:
    """The section of one public name."""
    found, home = value(name), homes()[name]
    where = f"`from {home} import {name}`\n\n" if home.startswith("agentlightning") else ""
    parts = [f"## {name}\n", where + markdown(describe(name)) + "\n"]
    if isinstance(found, type):
        parts += _class(found, name)
    elif callable(found) and get_origin(found) is None:
        parts.insert(1, _code(f"{_shown(name)}{_signature(found)}"))
    return "\n".join(parts)


def _class(kind: type, name: str) -> Iterator[str]:
    if issubclass(kind, BaseException):
        yield f"A {', '.join(f'`{base.__name__}`' for base in kind.__bases__)}.\n"
        return
    fields = list(field_rows(kind))
    if issubclass(kind, Section) and kind.__name__.endswith("Config"):
        yield "Its fields are the [settings](../settings/index.md) of its section.\n"
    elif fields:
        yield "| field | type | default | |\n| --- | --- | --- | --- |"
        yield "\n".join(f"| `{row[0]}` | {code(row[1])} | {code(row[2])} | {cell(row[3])} |" for row in fields) + "\n"
    elif not getattr(kind, "_is_protocol", False) and "__init__" in vars(kind):
        yield _code(f"{_shown(name)}{_signature(kind.__init__, skip_self=True)}")
    bases = [base.__name__ for base in kind.__mro__[1:] if base.__name__ in homes()]
    if bases:
        yield "Also has what these have: " + ", ".join(f"`{base}`" for base in bases) + ".\n"
    known = {method for base in kind.__mro__[1:] if base.__name__ in homes() for method in dir(base)}
    yield from (_member(method, found) for method, found in members(kind) if method not in known)


def field_rows(kind: type) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each public field of a model, a dataclass or a struct."""
    texts = field_texts(kind)
    if issubclass(kind, BaseModel):
        for name, model_field in kind.model_fields.items():
            default = "" if model_field.is_required() else _default(model_field.get_default(call_default_factory=False))
            if model_field.default_factory is not None:
                default = _default(model_field.get_default(call_default_factory=True, validated_data={}))
            yield name, type_text(model_field.annotation), default, texts.get(name, "")
    elif issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            factory = field.default_factory
            value = field.default if factory is msgspec.NODEFAULT else factory()
            default = "" if field.required else _default(value)
            yield field.name, type_text(field.type), default, texts.get(field.name, "")
    elif dataclasses.is_dataclass(kind):
        for each in dataclasses.fields(kind):
            if not each.name.startswith("_"):
                yield each.name, _plain(str(each.type)), _dataclass_default(each), texts.get(each.name, "")


def _dataclass_default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return _default(field.default)
    return "" if field.default_factory is dataclasses.MISSING else _default(field.default_factory())


def _default(value: object) -> str:
    if isinstance(value, BaseModel):
        return f"{type(value).__name__}()"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def type_text(kind: Any) -> str:
    """A type as one writes it, without what validates it; of a long union, the first three."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        names = list(dict.fromkeys(type_text(each) for each in arguments))
        return " | ".join(names if len(names) < 6 else [*names[:3], "..."])
    if origin is not None and not isinstance(kind, str):
        return f"{_plain(getattr(origin, '__name__', str(origin)))}[{', '.join(map(_argument, arguments))}]"
    return "None" if kind is type(None) else _plain(kind.__name__ if isinstance(kind, type) else str(kind))


def _argument(kind: Any) -> str:
    """A type within brackets; of a function the list of its arguments."""
    if isinstance(kind, list):
        return f"[{', '.join(map(type_text, cast('list[Any]', kind)))}]"
    return "..." if kind is ... else type_text(kind)


def _plain(text: str) -> str:
    text = re.sub(r"\bForwardRef\('([^']*)'[^)]*\)", r"\1", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z_a-z])", "", text).replace("NoneType", "None")


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that this package defines, by the order in the source."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("agentlightning"):
            continue
        for name, found in vars(base).items():
            plain = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            if name.startswith("_") or name in seen or not isinstance(plain, types.FunctionType | property):
                continue
            seen.add(name)
            yield name, found


def _member(name: str, found: Any) -> str:
    text = inspect.getdoc(found.fget if isinstance(found, property) else found) or ""
    if isinstance(found, property):
        return f"**`{name}`**\n\n{markdown(text)}\n"
    plain = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    before = "async " if inspect.iscoroutinefunction(plain) else ""
    shown = _signature(plain, skip_self=not isinstance(found, staticmethod))
    return f"**`{name}`**\n\n{_code(before + name + shown)}\n{markdown(text)}\n"


def _signature(function: Any, *, skip_self: bool = False) -> str:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if skip_self else 0 :]
    text = str(signature.replace(parameters=parameters))
    text = re.sub(r" at 0x[0-9a-f]+", "", _plain(text)).replace("'", "")
    return text if len(text) < 90 else _wrapped(text)


def _wrapped(text: str) -> str:
    """A signature with a line for each parameter."""
    depth, lines, start = 0, [], 1
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            lines.append(f"    {text[start:place].strip()},")
            start = place + 1
            if depth == 0:
                return "(\n" + "\n".join(lines) + "\n)" + text[start:]
    return text


def _code(text: str) -> str:
    return f"```py\n{text}\n```\n"
