"""What importing the package promises."""

import subprocess
import sys

import pytest

import agentlightning as agl


def test_the_public_names_are_sorted_and_all_of_them_can_be_had():
    assert agl.__all__ == sorted(agl.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    for name in agl.__all__:
        assert getattr(agl, name) is not None


def test_importing_the_package_loads_no_heavy_library():
    heavy = ["torch", "transformers", "openai", "matplotlib", "sqlalchemy", "uvicorn"]
    program = f"import agentlightning, sys; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_defining_an_agent_loads_no_torch():
    names = "agl.rollout, agl.emit_reward, agl.LightningStore"
    program = f"import agentlightning as agl, sys; {names}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


def test_importing_takes_at_most_a_few_times_what_an_empty_python_takes():
    """Under 0.3 s is the aim; a share of an empty interpreter's start is what holds on any machine."""

    def fastest(program: str) -> float:
        code = f"import time; t = time.perf_counter(); {program}; print(time.perf_counter() - t)"
        return min(float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(5))

    assert fastest("import agentlightning") < 3 * fastest("import asyncio, json, http.client, email")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        agl.no_such_name  # noqa: B018
