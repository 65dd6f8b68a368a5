"""What importing the package promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning as agl

LIGHT = ("config", "algorithms", "credit", "assemble", "chat", "policy.losses", "policy.config", "policy.base")


def test_configuration_and_what_is_pure_import_no_torch() -> None:
    modules = "; ".join(f"import agentlightning.{name}" for name in LIGHT)
    program = f"{modules}; import sys; print([n for n in ('torch', 'transformers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_public_names_are_sorted_and_all_of_them_can_be_had():
    assert agl.__all__ == sorted(agl.__all__)
    for name in agl.__all__:
        assert getattr(agl, name) is not None


def test_importing_the_package_loads_no_heavy_library():
    heavy = ["torch", "transformers", "openai", "matplotlib", "sqlite3", "uvicorn"]
    program = f"import agentlightning, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_a_server_starts_without_what_few_of_them_need():
    """`agl run -- COMMAND` starts one for each command."""
    few = ["httpx", "jinja2", "opentelemetry.sdk.trace", "agentlightning.server.joining", "agentlightning.dashboard"]
    program = f"import agentlightning.server.serve, sys; print([name for name in {few} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_a_trainer_is_made_without_the_parts_of_a_run():
    parts = ["httpx", "uvicorn", "jinja2", "google.protobuf", "agentlightning.server", "agentlightning.dashboard"]
    program = f"import agentlightning, sys; agentlightning.Trainer(); print([n for n in {parts} if n in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_defining_an_agent_loads_no_torch():
    names = "agl.rollout, agl.emit_reward, agl.LightningStore"
    program = f"import agentlightning as agl, sys; {names}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


WITHOUT_EXTRAS = """
import sys
for name in "torch transformers tokenizers safetensors numpy peft llguidance matplotlib openai".split():
    sys.modules[name] = None  # as if it were not installed
"""


def run_without_extras(program: str) -> str:
    given = [sys.executable, "-c", WITHOUT_EXTRAS + program]
    return subprocess.run(given, text=True, capture_output=True, check=True).stdout


@pytest.mark.slow
def test_every_public_name_can_be_had_without_an_extra():
    program = "import agentlightning as agl\nfor name in agl.__all__: getattr(agl, name)\nprint('all')"
    assert run_without_extras(program).strip() == "all"


@pytest.mark.slow
def test_the_first_example_of_the_readme_runs_without_an_extra():
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    [example] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert "agl.evaluate" in example
    printed = run_without_extras(example)
    assert printed.startswith("0.500 (95% interval"), printed


NEEDING_TRAIN = [
    "agl.Trainer(run_dir='must-not-be-made').fit(len, [1, 2, 3, 4])",
    "agl.evaluate(len, [[1]], model='anywhere')",
    "agl.SFTAlgorithm(model='anywhere', dataset=[[]], output='must-not-be-made').train()",
]


@pytest.mark.slow
def test_what_needs_an_extra_says_which(tmp_path: Path):
    program = f"""
import agentlightning as agl, os
os.chdir({str(tmp_path)!r})
for work in {NEEDING_TRAIN!r}:
    try: eval(work)
    except agl.errors.AgentLightningError as error: print(type(error).__name__, error)
print(os.listdir())
"""
    *errors, left = run_without_extras(program).strip().splitlines()
    assert errors == ["MissingExtraError torch is not installed; run: pip install 'agentlightning[train]'"] * 3
    assert left == "[]"


def test_importing_takes_at_most_a_few_times_what_an_empty_python_takes():
    """Under 0.3 s is the aim; a share of an empty interpreter's start is what holds on any machine."""

    def fastest(program: str) -> float:
        code = f"import time; t = time.perf_counter(); {program}; print(time.perf_counter() - t)"
        return min(float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(5))

    assert fastest("import agentlightning") < 3 * fastest("import asyncio, json, http.client, email")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        agl.no_such_name  # noqa: B018
