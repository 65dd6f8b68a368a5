"""The pages of all settings: of `agl train`, `agl sft` and `agl dpo`, and of the parts chosen by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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

| section | |
| --- | --- |
"""
TABLE = "| setting | type, default | meaning |\n| --- | --- | --- |"
FAMILIES = {
    "credit": ("Credit rules", "algorithm.credit", RULES, "../../concepts/credit.md"),
    "losses": ("Losses", "algorithm.loss", LOSSES, "../../concepts/losses.md"),
}
"""Page -> title, setting, the parts, and the page that explains them."""


@dataclass
class _Page:
    """A page of one section, and of the tables below it."""

    title: str
    about: str
    lines: list[str] = field(default_factory=list[str])


def pages() -> dict[str, str]:
    """File name -> text: an index with the settings outside of sections, and a page for each section."""
    found: dict[str, _Page] = {}
    seen: dict[type[BaseModel], str] = {}
    for place, kind in sections(TrainConfig, ""):
        title = _title(place, kind)
        if not place or place.startswith("algorithm.stages."):
            continue  # a stage has the settings of its algorithm
        if "." not in place:
            name = title.replace("[", "").replace("]", "").replace(" ", "-").replace("_", "-")
            page = found[name] = _Page(f"`{title}`", _summary(kind))
        else:
            page = found[name]
        if any(title in line for line in page.lines):
            continue
        if kind in seen and "." in place:
            page.lines.append(f"\n## `{title}`\n\n{seen[kind]}\n")
        elif kind not in LOSSES.values():
            heading = f"\n## `{title}`\n\n" if "." in place else "\n"
            page.lines += [f"{heading}{_summary(kind)}\n", TABLE, *_rows(kind)]
            anchor = "" if "." not in place else f"#{title.lower().translate(_DROPPED).replace(' ', '-')}"
            seen[kind] = f"The settings are those of [`{title}`]({name}.md{anchor})."
    made = {f"{name}.md": f"# {page.title}\n\n{MADE}\n" + "\n".join(page.lines) for name, page in found.items()}
    made |= {f"{name}.md": "\n".join(_family(*given)) for name, given in FAMILIES.items()}
    return {"index.md": _index(found), **made}


_DROPPED = str.maketrans("", "", '[]."=`+')


def _title(place: str, kind: type[BaseModel]) -> str:
    """`[algorithm] type apo`: where several kinds of table may stand at one place, with the name of each."""
    chosen = kind.model_fields.get("type")
    return f"[{place}] {chosen.default}" if chosen is not None and chosen.default else f"[{place}]"


def _summary(kind: type[BaseModel]) -> str:
    return cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _index(found: dict[str, _Page]) -> str:
    lines = [START.format(made=MADE).rstrip()]
    lines += [f"| [{page.title}]({name}.md) | {cell(page.about)} |" for name, page in found.items()]
    lines += [f"| [{title}]({name}.md) | by name in `{setting}` |" for name, (title, setting, *_) in FAMILIES.items()]
    tables = {name.partition("-")[0] for name in found} | {"warm_start"}
    rows = [row for row in _rows(TrainConfig) if row.split("`")[1] not in tables]
    return "\n".join([*lines, "\n## Outside of sections\n", TABLE, *rows])


def _rows(kind: type[BaseModel]) -> Iterator[str]:
    for name, annotation, default, text in field_rows(kind):
        kind_and_default = "<br>".join(filter(None, [code(annotation), code(default)]))
        yield f"| `{name}` | {kind_and_default} | {cell(text)} |"


def _family(title: str, setting: str, kinds: Any, explained: str) -> Iterator[str]:
    yield f"# {title}\n\n{MADE}\n`{setting}` is one of these names, or a table with `type` and these settings."
    yield f"What each does is [explained here]({explained}).\n"
    yield "| `type` | setting | default | meaning |\n| --- | --- | --- | --- |"
    for name, kind in sorted(kinds.items()):
        rows = [row for row in field_rows(kind) if row[0] != "type"]
        for number, (each, _, default, text) in enumerate(rows):
            yield f"| {f'`{name}`' if not number else ''} | `{each}` | {code(default)} | {cell(text)} |"
        if not rows:
            yield f"| `{name}` | | | |"


def sections(
    model: type[BaseModel], path: str, outer: tuple[type[BaseModel], ...] = ()
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Each table of settings with its name: the model itself and, below it, the models its fields may hold."""
    yield path, model
    for name, each in model.model_fields.items():
        kinds = _models(Annotated[each.annotation, None, *each.metadata])
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
