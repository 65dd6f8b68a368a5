"""The page of all settings: of `agl train`, `agl sft` and `agl dpo`, and of the parts chosen by name."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc
from typing import Annotated, Any, get_args

from pydantic import BaseModel

from agentlightning.config import TrainConfig
from agentlightning.credit.base import RULES
from agentlightning.policy.losses import LOSSES
from agentlightning.util.plugins import is_own
from agentlightning.util.settings import Chosen
from tools.reference.docstrings import cell, code
from tools.reference.python_names import MADE, field_rows

START = """# Settings

{made}
A run is described by a TOML file (`agl train --config FILE.toml`), by `section.key=value` on the command line, or by
`agl.TrainConfig` in Python; `agl sft` and `agl dpo` take those of their `[algorithm]` without its name.
`agl train --print-config` prints the settings in effect. Unknown settings are refused with the nearest known one. TOML
has no null: where the default is `None`, the text `"none"` stands for it.
"""


def page() -> str:
    """The whole page."""
    parts, seen = [START.format(made=MADE)], set[type[BaseModel]](LOSSES.values())
    parts += _sections(TrainConfig, "", "A training run", seen)
    parts += _family("Credit rules", "algorithm.credit", RULES)
    parts += _family("Losses", "algorithm.loss", LOSSES)
    return "\n".join(parts)


def _family(title: str, setting: str, kinds: Any) -> Iterator[str]:
    yield f"\n## {title}\n\n`{setting}` is one of these names, or a table with `type` and these settings:\n"
    yield "| `type` | setting | default | meaning |\n| --- | --- | --- | --- |"
    for name, kind in sorted(kinds.items()):
        rows = [row for row in field_rows(kind) if row[0] != "type"]
        for number, (field, _, default, text) in enumerate(rows):
            yield f"| {f'`{name}`' if not number else ''} | `{field}` | {code(default)} | {cell(text)} |"
        if not rows:
            yield f"| `{name}` | | | |"


def sections(
    model: type[BaseModel], path: str, outer: tuple[type[BaseModel], ...] = ()
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Each table of settings with its name: the model itself and, below it, the models its fields may hold."""
    yield path, model
    for name, field in model.model_fields.items():
        kinds = _models(Annotated[field.annotation, None, *field.metadata])
        for kind in sorted(kinds, key=lambda kind: "stages" in kind.model_fields):  # Those of stages are named before.
            if kind not in (*outer, model):
                yield from sections(kind, f"{path}.{name}".lstrip("."), (*outer, model))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    for each in getattr(annotation, "__metadata__", ()):
        if isinstance(each, Chosen):
            yield from filter(is_own, each.classes())  # not those that a script has named
            return
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _sections(model: type[BaseModel], path: str, title: str | None, seen: set[type[BaseModel]]) -> Iterator[str]:
    first = True
    for place, kind in sections(model, path):
        if kind in seen:
            continue
        seen.add(kind)
        if place or title:
            kind_of = kind.model_fields.get("type")
            tail = f', `type = "{kind_of.default}"`' if kind_of is not None and kind_of.default else ""
            yield f"\n{'##' if not place else '###'} " + (f"`[{place}]`{tail}" if place else str(title)) + "\n"
        if not first and kind.__doc__:
            yield cleandoc(kind.__doc__).split("\n\n")[0].replace("\n", " ") + "\n"
        first = False
        yield "| setting | type | default | meaning |\n| --- | --- | --- | --- |"
        for name, annotation, default, text in field_rows(kind):
            yield f"| `{name}` | {code(annotation)} | {code(default)} | {cell(text)} |"
