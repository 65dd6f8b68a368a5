from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from agentlightning.errors import AgentError, ConfigError
from agentlightning.runner.attempt_environ import check_variables, task_variables

TASK = {"question": "1 + 1?", "answer": 2, "path": "x", "with space": 1, "nul": "a\0b"}


def test_fields_of_a_task_are_variables_only_where_they_are_named() -> None:
    assert task_variables(TASK, {}) == {}
    assert task_variables(TASK, {"Q": "question", "A": "answer"}) == {"Q": "1 + 1?", "A": "2"}


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "http_proxy",
        "HTTPS_PROXY",
        "no_proxy",
        "NODE_OPTIONS",
        "BASH_ENV",
        "AGL_TOKEN",
        "OPENAI_BASE_URL",
        "SSL_CERT_FILE",
        "HOME",
        "CLASSPATH",
    ],
)
def test_a_name_that_decides_what_is_run_or_where_calls_go_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"variable {name} decides what is run"):
        check_variables({name: "field"}, ())


def test_names_of_ones_own_are_taken_and_hidden_fields_are_not() -> None:
    fields = {"QUESTION": "question", "MY_PATH": "path", "NODES": "nodes"}
    assert check_variables(fields, ("answer",)) == fields
    with pytest.raises(ConfigError, match="would show the field 'answer'"):
        check_variables({"A": "answer"}, ("answer",))
    with pytest.raises(ConfigError, match="'A-B' is not a valid name"):
        check_variables({"A-B": "answer"}, ())


@pytest.mark.parametrize("value", ["a\0b", "x" * 200_000])
def test_a_value_no_variable_can_hold_is_an_error_that_names_it(value: str) -> None:
    with pytest.raises(AgentError, match="field 'nul' cannot be held by the variable V"):
        task_variables({"nul": value}, {"V": "nul"})


def test_a_field_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(AgentError, match=r"variable Q is to hold .*'qestion', but the task has: question, answer"):
        task_variables(TASK, {"Q": "qestion"})


@pytest.mark.parametrize("task", ["text", 3, None, ["a"]])
def test_a_task_without_fields_gives_no_variables(task: Any) -> None:
    assert task_variables(task, {}) == {}


SCRIPT = """
import asyncio, os, subprocess, sys, threading
from os import environ as early
from agentlightning.runner.attempt_environ import install, overlay
os.environ["SHARED"] = "process"
before = dict(os.environ)
install(); install()
assert dict(os.environ) == before and len(os.environ) == len(before)

def shell():
    return subprocess.check_output(["sh", "-c", "echo $SHARED,$MINE"], text=True).strip()

async def attempt(name):
    with overlay({"MINE": name}):
        await asyncio.sleep(0.01)
        assert os.environ["MINE"] == os.getenv("MINE") == early["MINE"] == os.environ.copy()["MINE"] == name
        os.environ["SHARED"] = name
        await asyncio.sleep(0.01)
        assert early["SHARED"] == name and list(os.environ).count("SHARED") == 1
        assert await asyncio.to_thread(shell) == f"{name},{name}"
        assert subprocess.check_output(["/bin/sh", "-c", "echo $MINE"], env={}, text=True) == "\\n"
        del os.environ["SHARED"]
        assert "SHARED" not in os.environ and os.environ.get("SHARED", 1) == 1
        assert os.environ.pop("MINE") == name and "MINE" not in os.environ
        for key, value in ((1, "x"), ("x", 1)):
            try:
                os.environ[key] = value
            except TypeError:
                continue
            raise AssertionError

async def main():
    await asyncio.gather(*(attempt(f"a{i}") for i in range(5)))

asyncio.run(main())
assert dict(os.environ) == before and shell() == "process,"
os.environ["NEW"] = "1"
assert subprocess.check_output(["sh", "-c", "echo $NEW"], text=True) == "1\\n"
with overlay({"MINE": "1"}):
    helper = threading.Thread(target=os.environ.__setitem__, args=("LATER", "2"))
    helper.start(); helper.join()
    assert os.environ["LATER"] == "2" and "LATER" in list(os.environ)
print("fine")
"""


def test_each_context_has_its_own_environment_and_the_process_keeps_its() -> None:
    assert subprocess.check_output([sys.executable, "-c", SCRIPT], text=True) == "fine\n"
