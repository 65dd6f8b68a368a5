"""What a user is told of every public name: a signature, a docstring, an example that runs."""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import os
import subprocess
import sys
import typing
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from tools.reference import python_names
from tools.reference.python_names import GUIDES, homes

import agentlightning as agl
from agentlightning.compat import NAMES
from agentlightning.config import DPOConfig, LightningRLConfig, SFTConfig
from agentlightning.errors import AgentLightningError

FOR_PARTS = {name for names in GUIDES.values() for name in names.split()}
"""What the guides import for parts of one's own: they show how it is used."""
PUBLIC: dict[str, Any] = {name: python_names.value(name) for name in homes().keys() - FOR_PARTS}
ERRORS = {name for name, value in PUBLIC.items() if inspect.isclass(value) and issubclass(value, AgentLightningError)}
RECEIVED = {
    "ChatFormat",
    "DryRun",
    "DryRunCheck",
    "DryRunRollout",
    "Gain",
    "Learner",
    "NamedResources",
    "Policy",
    "RolloutCounts",
    "RolloutSource",
    "Runner",
    "SFTResult",
    "Training",
    "TrainingResult",
    "Transition",
}
"""What a user is given, or builds with a server beside it: described, without an example."""
DOORS = {"ChatFormat", "GatewayConfig", "Policy", "PolicyConfig"}
"""What leads to a part of its own, whose own types its own guide names."""


def own_members(value: Any) -> Iterator[Any]:
    """Public functions and methods of ours. What a kind of store has beside the contract is not public."""
    if not inspect.isclass(value):
        if inspect.isroutine(value):
            yield value
        return
    for name, member in inspect.getmembers(value):
        function = member.fget if isinstance(member, property) else member
        beside = issubclass(value, agl.LightningStore) and not hasattr(agl.LightningStore, name)
        if name.startswith("_") and name != "__init__":
            continue
        if inspect.isfunction(function) and function.__module__.startswith("agentlightning") and not beside:
            yield function


def classes_in(hint: Any) -> Iterator[type]:
    if inspect.isclass(hint) and not typing.is_typeddict(hint):  # one stands for arguments
        yield hint
    for inner in typing.get_args(hint):
        for each in inner if isinstance(inner, list) else [inner]:
            yield from classes_in(each)


def test_every_type_named_in_a_public_signature_is_public() -> None:
    from agentlightning.algorithms.lightning_rl import Feedback, OverlongPenalty, Replay
    from agentlightning.credit import ConstantNormalizer, Normalization
    from agentlightning.policy.config import Objective
    from agentlightning.policy.losses import LOSSES, TokenLoss
    from agentlightning.policy.mismatch import CORRECTIONS, Correction

    by_type = [*LOSSES.values(), TokenLoss, *CORRECTIONS.values(), Correction, ConstantNormalizer]  # As a table.
    by_type += [Normalization, Feedback, OverlongPenalty, Replay]
    known = {*map(id, PUBLIC.values()), *map(id, by_type)}
    names = {**PUBLIC, "ReadableSpan": ReadableSpan, "Objective": Objective}
    missing: dict[str, str] = {}
    for name, value in PUBLIC.items():
        holders = [] if name in DOORS else [*own_members(value), *([value] if inspect.isclass(value) else [])]
        for holder in holders:
            for field, hint in typing.get_type_hints(holder, localns=names).items():
                for kind in () if field.startswith("_") else classes_in(hint):
                    if kind.__module__.startswith("agentlightning") and id(kind) not in known:
                        missing[f"{kind.__module__}.{kind.__qualname__}"] = name
    assert not missing


WITH_EXAMPLE = sorted(PUBLIC.keys() - ERRORS - RECEIVED)
STARTING_PROCESSES = {"evaluate"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in STARTING_PROCESSES else []) for name in WITH_EXAMPLE],
)
def test_every_public_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(PUBLIC[name]) or ""
    example = doctest.DocTestParser().get_doctest(text, {"agl": agl, "asyncio": asyncio}, name, None, 0)
    assert example.examples, f"the docstring of {name} has no example"
    told: list[str] = []
    doctest.DocTestRunner().run(example, out=told.append)
    assert not told, "".join(told)


@pytest.mark.parametrize("name", sorted(ERRORS | RECEIVED))
def test_every_other_public_name_is_described(name: str) -> None:
    assert inspect.getdoc(PUBLIC[name])


def test_every_error_there_is_is_public() -> None:
    assert {
        name
        for name, value in vars(agl.errors).items()
        if inspect.isclass(value) and issubclass(value, AgentLightningError)
    } == ERRORS


def imported(stub: Path) -> dict[str, set[str]]:
    """Module -> the names that a stub imports from it."""
    found: dict[str, set[str]] = {}
    for each in ast.walk(ast.parse(stub.read_text())):
        if isinstance(each, ast.ImportFrom):
            found.setdefault(str(each.module).removeprefix("agentlightning."), set()).update(a.name for a in each.names)
    return found


def test_editors_see_the_names_that_there_are_and_where_they_come_from() -> None:
    package = Path(agl.__file__).parent
    top, compat = imported(package / "__init__.pyi"), imported(package / "compat" / "__init__.pyi")
    assert top.pop("agentlightning") == {"compat", "config", "errors"}
    assert top.pop("compat") == set(NAMES)
    assert {name for names in top.values() for name in names} == set(agl.__all__)
    for module, names in {**compat, **top}.items():
        for name in names:
            assert getattr(import_module(f"agentlightning.{module}"), name) is python_names.value(name)


def test_the_names_are_found_in_an_archive_too(tmp_path: Path) -> None:
    package, archive = Path(agl.__file__).parent, tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as packages:
        for path in [*package.rglob("*.py"), *package.rglob("*.pyi")]:
            packages.write(path, path.relative_to(package.parent))
    program = "import agentlightning as agl; print(agl.__file__, agl.Span.__module__, agl.compat.Worker.__module__)"
    environment = {**os.environ, "PYTHONPATH": str(archive)}
    printed = subprocess.check_output([sys.executable, "-c", program], text=True, env=environment, cwd=tmp_path)
    init = archive / "agentlightning" / "__init__.py"
    assert printed.split() == [str(init), "agentlightning.span", "agentlightning.store.types"]


def test_the_names_of_0_x_need_no_other_place() -> None:
    for name in NAMES:
        assert getattr(agl, name) is getattr(agl.compat, name)


def test_the_overview_names_every_public_name_and_stands_first() -> None:
    overview = agl.__doc__ or ""
    assert [name for name in agl.__all__ if name not in overview] == []
    assert "makes a function an agent" in overview.splitlines()[2]


def test_a_store_is_a_class_that_opens_one_and_that_all_of_them_are() -> None:
    store: agl.LightningStore = agl.LightningStore(":memory:")
    stores = [store, agl.InMemoryLightningStore(), agl.LightningStoreClient("http://127.0.0.1:9")]
    assert all(isinstance(each, agl.LightningStore) for each in stores)
    for each in stores:
        asyncio.run(each.close())
    assert list(inspect.signature(agl.LightningStore).parameters) == ["url"]
    assert "token" in inspect.signature(agl.LightningStoreClient).parameters
    half: Any = type("Half", (agl.LightningStore,), {})
    with pytest.raises(TypeError, match="add_span"):
        half()


def test_settings_are_completed_by_name() -> None:
    fields = list(inspect.signature(agl.LightningRL).parameters)
    assert fields[0] == "config"
    assert {"steps", "group_size", "credit", "optimizer"} <= set(fields)
    assert {"model", "dataset", "epochs", "batch_size"} <= set(inspect.signature(agl.SFTAlgorithm).parameters)

    class Mine(agl.LightningRL):
        def __init__(self, depth: int) -> None:
            super().__init__()

    assert list(inspect.signature(Mine).parameters) == ["depth"]

    class Settings(agl.config.AlgorithmConfig):
        depth: int = 1

    class Own(agl.Algorithm[Settings]):
        config_class = Settings

    assert list(inspect.signature(Own).parameters) == ["config", "depth"]


def test_a_decorated_agent_keeps_the_signature_of_its_function() -> None:
    def agent(task: dict[str, str], llm: agl.LLM, depth: int = 3) -> float:
        """Answers."""
        return float(depth)

    for decorated in (agl.rollout(agent), agl.llm_rollout(agent)):
        assert inspect.signature(decorated) == inspect.signature(agent)
        assert (getattr(decorated, "__name__", None), decorated.__doc__) == ("agent", "Answers.")
        assert decorated({}, agl.LLM(endpoint="http://127.0.0.1", model="m"), depth=4) == 4.0


def test_trainers_and_algorithms_show_what_they_are() -> None:
    algorithm = agl.LightningRL(steps=7)
    trainer = agl.Trainer(algorithm=algorithm, model="tiny", run_dir="runs/a")
    assert repr(trainer) == "Trainer(algorithm='lightning_rl', model='tiny', run_dir='runs/a')"
    assert repr(algorithm).startswith("LightningRL(")
    assert "steps=7" in repr(algorithm)


@pytest.mark.parametrize(
    ("algorithm", "config"), [(agl.LightningRL, LightningRLConfig), (agl.SFTAlgorithm, SFTConfig), (agl.DPO, DPOConfig)]
)
def test_editors_complete_every_setting_of_an_algorithm(algorithm: Any, config: Any) -> None:
    parameters = inspect.signature(algorithm).parameters
    assert set(config.model_fields) - {"type"} <= set(parameters)
    assert parameters["optimizer"].annotation == inspect.signature(config).parameters["optimizer"].annotation
