"""Imports and annotations as the examples of 0.3 write them."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError

pytestmark = pytest.mark.integration

WRITTEN = {
    "adapter": "TraceToMessages TracerTraceToTriplet",
    "algorithm": "algo APO",
    "algorithm.apo": "APO",
    "emitter": "emit_reward",
    "litagent": "LitAgent rollout",
    "reward": "find_final_reward",
    "runner": "LitAgentRunner",
    "store": "InMemoryLightningStore LightningStore",
    "tracer": "AgentOpsTracer OtelTracer",
    "tracer.agentops": "AgentOpsTracer",
    "types": "Dataset Hook LLM NamedResources PromptTemplate Rollout",
}
SCRIPT = """
import threading

import agentlightning as agl

LOCK = threading.RLock()  # cannot be sent to another process


@agl.rollout
def agent(task: str) -> float:
    with LOCK:
        return float(len(task))


if __name__ == "__main__":
    print(agl.evaluate(agent, ["four", "sixsix"]).mean)
"""


@pytest.mark.parametrize("path", WRITTEN)
def test_names_are_found_where_0_3_has_them(path: str) -> None:
    module = import_module(f"agentlightning.{path}")
    for name in WRITTEN[path].split():
        assert getattr(module, name) is getattr(agl, name)


@pytest.mark.parametrize(
    ("line", "way_out"),
    [
        ("from agentlightning.reward import reward", "leave the decorator out"),
        ("from agentlightning.algorithm import VERL", "LightningRL"),
        ("from agentlightning.tracer import WeaveTracer", "OpenTelemetry"),
    ],
)
def test_names_without_a_place_here_say_what_to_write_instead(line: str, way_out: str) -> None:
    with pytest.raises(ImportError, match=way_out):
        exec(line)


def test_a_path_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("agentlightning.litagents")


def test_generic_classes_take_the_type_of_a_task() -> None:
    class Agent(agl.LitAgent[dict[str, Any]]):
        pass

    assert issubclass(Agent, agl.LitAgent)
    assert agl.APO[dict] is agl.APO
    assert agl.LitAgentRunner[dict] is agl.LitAgentRunner


def test_the_tracer_of_agentops_is_accepted_and_what_it_does_not_record_is_said(caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "agentlightning")  # an earlier test may have set it
    agl.Trainer(tracer=agl.AgentOpsTracer())
    assert not caplog.records
    agl.LitAgentRunner(agl.AgentOpsTracer())
    assert "track_all" in caplog.text


def test_an_agent_has_a_tracer_without_a_handler_for_langchain() -> None:
    assert agl.LitAgent().tracer.get_langchain_handler() is None


def test_the_log_goes_to_stderr_once(capsys: Any) -> None:
    logger = logging.getLogger("an_agent_of_0_3")
    for level in ("ERROR", "INFO"):
        agl.setup_logging(level, apply_to=[logger.name])
    logger.info("hello")
    assert capsys.readouterr().err.count("hello") == 1


def test_workers_are_runners() -> None:
    assert agl.Trainer(n_workers=3).config.runner.hosts == 3


def test_apo_reads_messages_whether_told_or_not() -> None:
    assert agl.Trainer(algorithm=agl.APO(gradient_model="m"), adapter=agl.TraceToMessages()).algorithm is not None
    with pytest.raises(ConfigError, match="target_agent"):
        agl.Trainer(algorithm=agl.LightningRL(), adapter=agl.TraceToMessages())
    with pytest.raises(ConfigError, match="POML"):
        agl.APO(gradient_model="m", _poml_trace=True)  # type: ignore[call-arg]


def test_an_agent_of_the_script_itself_runs_though_it_cannot_be_pickled(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "5.0\n", done.stderr


def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "Move it to a module" in done.stderr
