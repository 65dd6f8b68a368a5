"""The reference is complete, explained and current: every public name, setting, verb, span attribute and metric."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from tools.reference import command_line, python_names, settings, signs, spans
from tools.reference.__main__ import pages

import agentlightning as agl
from agentlightning.config import TrainConfig
from agentlightning.credit.base import RULES
from agentlightning.policy.losses import LOSSES
from agentlightning.training.health.step_record import StepRecord

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "agentlightning"
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text()


def test_no_generated_page_is_in_git() -> None:
    tracked = subprocess.run(["git", "ls-files", "docs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {ROOT / line for line in tracked.splitlines()} & pages().keys()


def test_every_section_of_settings_has_a_page_and_every_setting_a_row() -> None:
    made = settings.pages()
    assert set(TrainConfig.model_fields) - {"agent", "env", "reward", "group_reward", "air"} <= {
        name.partition("-")[0].removesuffix(".md") for name in made
    } | {"warm_start"}
    text = "\n".join(made.values())
    rows = {row[0] for _, kind in settings.sections(TrainConfig, "") for row in python_names.field_rows(kind)}
    sections = {name for name in TrainConfig.model_fields if f"`[{name}]" in made["index.md"]}
    assert not [name for name in rows - sections if f"| `{name}` |" not in text]


def test_every_public_name_is_on_one_page_and_explained() -> None:
    found = [name for names in python_names.groups().values() for name in names]
    assert sorted(found) == sorted(python_names.homes())
    assert set(agl.__all__) | set(agl.config.__all__) <= set(found)
    assert not [name for name in found if not python_names.describe(name).strip()]


def test_guides_import_nothing_that_the_reference_does_not_have() -> None:
    homes = python_names.homes()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for module, names in re.findall(r"^from (agentlightning\S*) import (.+)$", page.read_text(), re.MULTILINE):
            for name in (name for name in re.findall(r"\w+", names) if not name.isupper()):
                home = homes.get(name, "").replace("agl", "agentlightning")
                assert home == module, f"{page.name} imports {name} from {module}"


def test_every_setting_has_a_meaning() -> None:
    rows = [
        (f"{place}.{row[0]}", row[3])
        for model in (TrainConfig,)
        for place, kind in settings.sections(model, "")
        for row in python_names.field_rows(kind)
    ]
    assert len(rows) > 200
    assert not [name for name, text in rows if not text]


def test_parts_of_others_are_in_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    own = pages()
    monkeypatch.setitem(LOSSES.found, "other:Loss", type("Loss", (LOSSES["ppo"],), {"__module__": "other"}))
    assert pages() == own


@pytest.mark.parametrize("family", [RULES, LOSSES], ids=["credit", "losses"])
def test_every_setting_of_a_part_chosen_by_name_has_a_meaning(family: dict[str, type]) -> None:
    rows = {name: list(python_names.field_rows(kind)) for name, kind in family.items()}
    assert not [(name, row[0]) for name, found in rows.items() for row in found if row[0] != "type" and not row[3]]


def test_every_verb_and_option_is_explained() -> None:
    verbs = dict(command_line.verbs())
    assert {"train", "eval", "serve", "store show"} <= set(verbs)
    assert not [name for name, verb in verbs.items() if not verb.help]
    assert not [(name, each.name) for name, verb in verbs.items() for each in verb.params if not each.help]


def test_every_name_and_attribute_of_spans_is_explained() -> None:
    written = {*re.findall(r"\"(agentlightning\.[a-z_.]+)\"", (SOURCE / "span.py").read_text())}
    assert written <= {*spans.attributes(), *spans.names()}
    assert not [name for name, text in {**spans.attributes(), **spans.names()}.items() if not text]


def test_every_sign_of_trouble_says_what_is_wrong_and_what_to_try() -> None:
    named = set(re.findall(r"Sign\(\s*\"(\w+)\"", (SOURCE / "training" / "health" / "signs.py").read_text()))
    made = signs.texts()
    assert named - {"truncated"} <= made.keys()  # that one is in a docstring
    assert {"echo_trap", "large_updates", "rewards_without_spread"} <= made.keys()
    assert not [name for name, said in made.items() if any(text.strip("… ") == "" for text in said)]


# -- metrics -----------------------------------------------------------------------------------------------------------

FOLDERS = ("algorithms", "credit", "policy", "training")
NUMBERS = re.compile(r"(dict|Mapping)\[str, (float|int)\]|LossValue")
"""What functions return that make metrics."""
NOT_METRICS = {
    *("after", "before", "gain", "guard", "high", "low"),  # of the result, as trackers get them, and of the audit log
    *("betas", "eps", "weight_decay"),
    "loss_sum",
    "mismatch",
    "modes_val_and_test",
    "return_square",
    "temperature",
    "token_budget",
    "top_k",
    "top_p",
    "value_error_mean",
    "value_error_square",
}
"""Keys of such mappings that are no metrics: parameters, and sums and counts that no step logs."""
BY_PREFIX = {"dimensions", "validation", "rejected", "not_finite", "stopped"}
"""Fields of a step's record that hold several metrics, or marks of its line."""


def keys_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    displays = [each for each in ast.walk(function) if isinstance(each, ast.Dict)]
    found = {key.value for each in displays for key in each.keys if isinstance(key, ast.Constant)}
    return {str(key) for key in found if re.fullmatch(r"[a-z][a-z_]+", str(key))}


def metrics_in_the_code() -> set[str]:
    found: set[str] = set()
    for file in (file for folder in FOLDERS for file in (SOURCE / folder).rglob("*.py")):
        for each in ast.walk(ast.parse(file.read_text())):
            returns = getattr(each, "returns", None)
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and returns is not None:
                found |= keys_of(each) if NUMBERS.search(ast.unparse(returns)) else set()
    return (found | set(StepRecord.__struct_fields__)) - NOT_METRICS - BY_PREFIX


def test_every_metric_of_a_step_is_explained() -> None:
    found = metrics_in_the_code()
    assert {"reward", "entropy", "grad_norm", "groups_in_flight", "staleness"} <= found
    assert not sorted(name for name in found if f"`{name}`" not in METRICS)


def test_a_metric_that_nobody_explains_is_found() -> None:
    function = ast.parse("def made() -> dict[str, float]:\n    return {'quite_new': 1.0}").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert keys_of(function) == {"quite_new"}
    assert "`quite_new`" not in METRICS
