"""A calculator over MCP with AutoGen: problems, reward, reader, and training with the real framework."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

HERE = Path(__file__).parents[2] / "examples" / "calc"
Load = Callable[[str, str], Any]

RECORD = {
    "id": "gsm8k__1",
    "question": "Natalia sold clips to 48 friends in April, and half as many in May. How many in all?",
    "chain": 'In May <gadget id="calculator">48/2</gadget>\n<output>24</output>\nIn all'
    ' <gadget id="calculator">48+24</gadget>\n<output>72</output>\n<result>72</result>',
    "result": "72",
    "result_float": 72.0,
}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_generated_problems_are_records_of_calc_x_and_no_split_has_those_of_another(module_of: Load) -> None:
    generated, calcx = module_of("calc", "generated"), module_of("calc", "calcx")
    found = {split: generated.problems(split, 200, 0) for split in ("train", "val", "test")}
    for problem in (each for part in found.values() for each in part):
        calcx.Problem.model_validate(problem)
        [(expression, value)] = calcx.steps(problem["chain"])
        assert eval(expression) == problem["result_float"] == float(value)
    expressions = [{calcx.steps(each["chain"])[0][0] for each in part} for part in found.values()]
    assert len(set.union(*expressions)) == sum(map(len, expressions))


def test_the_last_demonstrations_may_answer_without_the_calculator(module_of: Load) -> None:
    shown = module_of("calc", "generated").demonstrations(60, 0, [], [{"type": "function"}], clean=0.5, habit=1.0)
    for number, each in enumerate(shown):
        roles = [message["role"] for message in each["messages"]]
        assert roles == ["user", *(["assistant", "tool"] if number < 30 else []), "assistant"]
        assert each["tools"]


def test_a_demonstration_follows_the_chain(module_of: Load) -> None:
    messages = module_of("calc", "calcx").demonstration(RECORD, [], [])["messages"]
    called = [json.loads(each["tool_calls"][0]["function"]["arguments"]) for each in messages if "tool_calls" in each]
    assert called == [{"expression": "48/2"}, {"expression": "48+24"}]
    assert [each["content"] for each in messages if each["role"] == "tool"] == ["24", "72"]
    assert messages[-1] == {"role": "assistant", "content": "### ANSWER: 72 ###"}


@pytest.mark.parametrize(
    ("result", "value", "output", "reward"),
    [
        ("72", 72.0, "### ANSWER: 72 ###", 1.0),
        ("72", 72.0, "first ### ANSWER: 7 ### then ###ANSWER: 72.0###", 1.0),
        ("72", 72.0, "### ANSWER: 72.1 ###", 0.0),
        ("1200", 1200.0, "### ANSWER: $1,200 ###", 1.0),
        ("1/3", 0.333333, "### ANSWER: 0.33333 ###", 1.0),
        ("1/3", None, "### ANSWER: 2/6 ###", 1.0),
        ("36%", None, "### ANSWER: 0.36 ###", 1.0),
        ("B", None, "### ANSWER: b ###", 1.0),
        ("B", None, "### ANSWER: 2 ###", 0.0),
        ("72", 72.0, "### ANSWER: many ###", 0.0),
        ("72", 72.0, "### ANSWER: 1/0 ###", 0.0),
        ("72", 72.0, "72", 0.0),
    ],
)
def test_the_result_alone_earns_the_reward(
    module_of: Load, result: str, value: float | None, output: str, reward: float
) -> None:
    score = module_of("calc", "reward").score
    assert score({"result": result, "result_float": value}, output) == reward


def test_problems_are_read_from_jsonl_and_parquet(module_of: Load, tmp_path: Path) -> None:
    read = module_of("calc", "calcx").read_problems
    lines = write(tmp_path / "p.jsonl", RECORD, {**RECORD, "id": "2", "equation": "x=72"})
    assert [each["id"] for each in read(lines)] == ["gsm8k__1", "2"]
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'agentlightning[parquet]'")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist([RECORD] * 3), tmp_path / "p.parquet")
    assert read(tmp_path / "p.parquet") == read(write(tmp_path / "q.jsonl", RECORD, RECORD, RECORD))
    parquet.write_table(pyarrow.Table.from_pylist([{**RECORD, "chain": None}]), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"bad.parquet, row 1: chain: "):
        read(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (json.dumps({**RECORD, "result": ""}), ":2: result: "),
        (json.dumps({**RECORD, "result_float": "many"}), ":2: result_float: "),
        (json.dumps({key: value for key, value in RECORD.items() if key != "chain"}), ":2: chain: Field required"),
        ("[]", ":2: record: "),
        ('{"id": ', ":2: not JSON: "),
    ],
)
def test_what_is_not_in_the_format_is_named_by_line_and_field(
    module_of: Load, tmp_path: Path, line: str, named: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f"{json.dumps(RECORD)}\n{line}\n")
    with pytest.raises(ValueError, match=r"p\.jsonl") as raised:
        module_of("calc", "calcx").read_problems(path)
    assert named in str(raised.value)


def test_a_file_that_is_not_there_is_named(module_of: Load, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*missing.parquet; Calc-X is at https"):
        module_of("calc", "calcx").read_problems(tmp_path / "missing.parquet")


# -- with the real framework -------------------------------------------------------------------------------------------

Python = Callable[[str, str], Path]
NEEDED = "autogen_agentchat, autogen_ext.tools.mcp, torch"
SHORT = (
    "import dataclasses; train.VALIDATION = 2; sizes = dict(tasks=2, group=2, held_out=2);"
    " train.Recipe = functools.partial(train.Recipe, **sizes);"
    " train.RECIPES = {k: dataclasses.replace(v, **sizes, warm_steps=12) for k, v in train.RECIPES.items()}"
)
PROGRAM = (
    f"import dataclasses, functools, json, train; {SHORT}; print(json.dumps(train.train(train.parse()).as_json()))"
)
CONFIG = (
    "import train; train.agl.Trainer.fit = lambda trainer, *_, **tasks: trainer.config;"
    " print(train.train(train.parse()).model_dump_json())"
)


def run(python: Path, program: str, *options: str | Path, **environment: str) -> str:
    """The last line that a program in the folder of the example prints."""
    known = {**os.environ, "OMP_NUM_THREADS": "1", "MAX_TOKENS": "16", **environment}
    command = [python, "-c", program, *options]
    ran = subprocess.run(command, cwd=HERE, capture_output=True, text=True, env=known, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_agent_trains_on_generated_problems(python_of: Python, tmp_path: Path) -> None:
    options = ["--steps", "2", "--credit", "hierarchical", "--run-dir", tmp_path / "run"]
    result = json.loads(run(python_of("calc", NEEDED), PROGRAM, *options))
    assert (result["steps"], result["rollouts"], result["failed_rollouts"]) == (2, 8, 0)
    assert result["held_out"]["sampled"]["tasks"] == 2


@pytest.mark.parametrize(("model", "warm"), [("smollm2-135m", True), ("path/to/model", False)])
def test_a_model_that_is_named_is_the_policy_and_brings_its_warm_start(
    python_of: Python, tmp_path: Path, model: str, warm: bool
) -> None:
    folder = tmp_path / "run"
    config = json.loads(run(python_of("calc", NEEDED), CONFIG, "--model", model, "--run-dir", folder))
    assert config["policy"]["model"] == model
    dataset, steps, batch = (config["warm_start"][name] for name in ("dataset", "steps", "batch_size"))
    assert (dataset is not None) == warm
    if warm:
        shown = [json.loads(line) for line in Path(dataset).read_text().splitlines()]
        assert len(shown) == steps * batch
        assert all(len(each["messages"]) == 5 for each in shown), "each of them calculates"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_agent_trains_on_calc_x_with_a_larger_model(python_of: Python, tmp_path: Path) -> None:
    python = python_of("calc", NEEDED)
    problems = write(tmp_path / "p.jsonl", *({**RECORD, "id": str(number)} for number in range(10)))
    model = tmp_path / "model"
    making = (
        "import sys; from agentlightning.models.tiny import make_tiny;"
        " print(make_tiny(sys.argv[1], [open(sys.argv[2]).read()], hidden_size=512, layers=8, heads=8))"
    )
    run(python, making, model, problems)
    options = ["--steps", "1", "--calcx", problems, "--model", model, "--run-dir", tmp_path / "run"]
    result = json.loads(run(python, PROGRAM, *options, "algorithm.group_size=3"))
    assert (result["steps"], result["rollouts"], result["failed_rollouts"]) == (1, 6, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bad_expression_is_an_error_for_the_model_and_not_for_the_run(python_of: Python) -> None:
    program = """
import asyncio, json
from agent import SERVER, Calculator

async def main():
    async with Calculator(SERVER) as workbench:
        asked = ["6*7", "7/2", "9**9**9", "1/0", "2*", "open('x')", "1" * 300]
        said = [await workbench.call_tool("calculate", {"expression": each}) for each in asked]
        said.append(await workbench.call_tool("sum", {}))
        print(json.dumps([(each.is_error, each.to_text()) for each in said]))

asyncio.run(main())
"""
    answers = json.loads(run(python_of("calc", NEEDED), program, OPENAI_API_KEY="none"))
    assert answers[:2] == [[False, "42"], [False, "3.5"]]
    assert all(error and text for error, text in answers[2:])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_attempt_whose_server_dies_fails_and_the_next_one_starts_another(python_of: Python) -> None:
    program = """
import asyncio, json, os, signal
from agentlightning.gateway.app import Gateway
from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore
from agentlightning.testing import ScriptedEngine


CALL = '<tool_call>\\n{"name": "calculate", "arguments": {"expression": "6*7"}}\\n</tool_call>'
killing = False

def model(messages):
    if messages[-1]["role"] == "tool":
        return f"### ANSWER: {messages[-1]['content']} ###"
    if killing:
        for name in os.listdir("/proc"):
            if name.isdigit() and os.getpid() == parent(name):
                os.kill(int(name), signal.SIGKILL)
    return CALL

def parent(pid):
    try:
        return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
        return None

async def main():
    global killing
    store = InMemoryLightningStore()
    gateway = Gateway(store, {"policy": ScriptedEngine(model)}, secret="s", default_model="policy",
                      accept_any_model=True, allow_unattributed=True)
    async with Server(store, gateway, secret="s") as server:
        os.environ |= {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "none"}
        import agent
        said = []
        for killing in (False, True, False):
            try:
                said.append(await agent.solve("What is 6*7?"))
            except ConnectionError as error:
                said.append(repr(error))
        await agent.calculator.stop()
    await store.close()
    print(json.dumps(said))

asyncio.run(main())
"""
    first, second, third = json.loads(run(python_of("calc", NEEDED), program, MAX_TOKENS="64"))
    assert first == third == "### ANSWER: 42 ###"
    assert "the MCP server of the calculator does not answer" in second


@pytest.mark.slow
def test_what_is_missing_is_named() -> None:
    program = "import sys; sys.modules['autogen_agentchat'] = None; import train"
    ran = subprocess.run([sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "this example needs the module autogen_" in ran.stderr
    assert "pip install -r " in ran.stderr
