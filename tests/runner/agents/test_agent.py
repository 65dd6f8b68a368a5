from __future__ import annotations

import inspect
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support import agents

from agentlightning.errors import AgentError
from agentlightning.runner.agents.agent import CommandLine, Pickled, Reference, agent_spec, function_spec, load_agent
from agentlightning.runner.agents.arguments import RewardFunction
from agentlightning.runner.agents.command import Command


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("pkg.module:Agent", Reference("pkg.module", "Agent")),
        ("module:Class.method", Reference("module", "Class.method")),
        ("some dir/agent.py:solve", Reference("some dir/agent.py", "solve")),
        ("python agent.py --fast", CommandLine(("python", "agent.py", "--fast"))),
        ("sh -c 'echo a:b'", CommandLine(("sh", "-c", "echo a:b"))),
        ("agent", CommandLine(("agent",))),
    ],
)
def test_module_and_file_names_are_python_and_anything_else_is_a_command(text: str, spec: Any) -> None:
    assert agent_spec(text) == spec


def test_a_list_of_words_is_a_command() -> None:
    assert agent_spec(["node", "my agent.mjs"]) == CommandLine(("node", "my agent.mjs"))


def test_a_function_that_can_be_imported_travels_by_name() -> None:
    assert agent_spec(agents.echo) == Reference("tests.support.agents", "echo")
    assert agent_spec(agents.decorated) == Reference("tests.support.agents", "decorated")


def test_a_closure_travels_whole(make_call: Any) -> None:
    factor = 3
    spec = agent_spec(lambda task: task * factor)
    assert isinstance(spec, Pickled)
    assert load_agent(spec)(make_call(5))() == 15


def test_an_object_that_cannot_travel_says_what_to_do_instead() -> None:
    lock = threading.Lock()
    with pytest.raises(AgentError, match=r"cannot be sent .*pickle '_thread.lock'.*pass 'module:name'"):
        agent_spec(lambda task: lock.locked())


KINDS = {"reward_of_task": False, "reward_of_task_async": True, "decorated": True, "Sync": False, "Posting": True}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_agent_says_whether_it_blocks(name: str, make_call: Any) -> None:
    found = load_agent(f"tests.support.agents:{name}")(make_call({"reward": 1}))
    assert inspect.iscoroutinefunction(found) is KINDS[name]


async def test_a_partial_of_an_async_function_does_not_block(make_call: Any) -> None:
    found = load_agent(partial(agents.reward_of_task_async))(make_call({"reward": 1}))
    assert inspect.iscoroutinefunction(found)
    assert await found() == 1.0


def test_a_command_is_recognised() -> None:
    assert load_agent("sh -c true") == Command(("sh", "-c", "true"))


def test_a_file_is_loaded_with_its_neighbours_importable(tmp_path: Path, make_call: Any) -> None:
    (tmp_path / "the_neighbour_of_an_agent.py").write_text("VALUE = 42")
    path = tmp_path / "an_agent_in_a_file.py"
    path.write_text("import the_neighbour_of_an_agent as n\ndef solve(task): return n.VALUE")
    assert load_agent(f"{path}:solve")(make_call(None))() == 42


METHODS = """
class Agent:
    made = 0

    def __init__(self, temperature: float = 1.0):
        Agent.made += 1
        self.calls = 0

    def answer(self, question: str) -> str:
        self.calls += 1
        return f"{question} {self.calls} of {Agent.made}"

    async def think(self, question: str) -> str:
        return self.answer(question)

    @staticmethod
    def guess(question: str) -> str:
        return "guessed"

class Closed:
    def __init__(self, address):
        pass

    def answer(self, question: str) -> str:
        return ""
"""


@pytest.mark.parametrize(("method", "asynchronous"), [("answer", False), ("think", True)])
async def test_a_method_of_a_class_is_an_agent_with_a_new_instance_for_each_attempt(
    tmp_path: Path, make_call: Any, method: str, asynchronous: bool
) -> None:
    path = tmp_path / f"a_class_whose_agent_is_{method}.py"
    path.write_text(METHODS)
    agent = load_agent(f"{path}:Agent.{method}")
    given = make_call({"question": "what?"})
    assert inspect.iscoroutinefunction(agent(given)) is asynchronous
    for made in (1, 2):
        answer = agent(given)()
        assert (await answer if asynchronous else answer) == f"what? 1 of {made}"


def test_a_static_method_needs_no_instance(tmp_path: Path, make_call: Any) -> None:
    path = tmp_path / "a_class_with_a_static_agent.py"
    path.write_text(METHODS)
    assert load_agent(f"{path}:Agent.guess")(make_call({"question": "what?"}))() == "guessed"


def test_a_method_whose_class_needs_arguments_is_refused_before_any_attempt(tmp_path: Path) -> None:
    path = tmp_path / "a_class_that_needs_arguments.py"
    path.write_text(METHODS)
    with pytest.raises(AgentError, match=r"constructor of Closed requires address; the class of the agent is"):
        load_agent(f"{path}:Closed.answer")


BROKEN = {
    "no module": ("no_such_package.agent:solve", "no module 'no_such_package'"),
    "no name": ("tests.support.agents:ecoh", "has no 'ecoh'; did you mean tests.support.agents:echo"),
    "no file": ("/nowhere/agent.py:solve", "file not found: /nowhere/agent.py"),
    "no program": ("no-such-program --x", "there is no program 'no-such-program'.*any other text is a command"),
    "a script that is no program": ("agent.py --x", r"did you mean `python agent.py --x` or `agent.py:NAME`"),
    "an open quote": ("sh -c 'oops", "is not a valid command line"),
    "nothing": ("  ", "an empty string"),
    "no callable": ("agentlightning.span:REWARD", "cannot be called"),
    "a class without run": ("agentlightning.span:Span", "requires rollout_id, attempt_id"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_agent_that_cannot_be_had_says_why(case: str) -> None:
    given, message = BROKEN[case]
    with pytest.raises(AgentError, match=message):
        load_agent(given)


def test_the_nearest_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    with pytest.raises(AgentError, match=r"did you mean agent\.py\?"):
        load_agent(f"{tmp_path}/agnet.py:solve")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import not_installed_anywhere", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("def solve(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit('no config')", "SystemExit: no config"),
        ("raise KeyError('OPENAI_API_KEY')", "create it inside the agent"),
    ],
)
def test_a_module_that_fails_shows_the_real_cause_and_where_it_is(tmp_path: Path, text: str, cause: str) -> None:
    path = tmp_path / f"broken_{abs(hash(text))}.py"
    path.write_text(f"# a comment\n{text}\n")
    with pytest.raises(AgentError, match=r"(?s)could not be imported") as caught:
        load_agent(f"{path}:solve")
    assert cause in str(caught.value)
    assert f'{path}", line 2' in str(caught.value)


def test_a_generator_is_no_agent() -> None:
    def streams(task: Any) -> Any:
        yield task

    with pytest.raises(AgentError, match="is a generator"):
        load_agent(streams)


def test_an_instance_with_run_is_told_to_be_its_class() -> None:
    class Agent:
        async def run(self) -> None: ...

    with pytest.raises(AgentError, match=r"pass the class .*Agent itself"):
        load_agent(Agent())  # pyright: ignore[reportArgumentType]


def test_a_graph_of_langgraph_is_told_to_be_invoked_by_a_function() -> None:
    class CompiledStateGraph:
        def invoke(self, state: Any) -> Any: ...

    with pytest.raises(AgentError, match="give a function of the task that calls its invoke"):
        load_agent(CompiledStateGraph())  # pyright: ignore[reportArgumentType]


def test_a_reward_must_be_a_function() -> None:
    with pytest.raises(AgentError, match="there is no reward function 'score it'"):
        function_spec("score it")
    with pytest.raises(AgentError, match="which cannot be called"):
        RewardFunction.of(3)


class Still:
    @staticmethod
    def run() -> float:
        return 0.25


class Shared:
    @classmethod
    def run(cls) -> float:
        return 0.5


class Own:
    async def run(self) -> float:
        return 1.0


@pytest.mark.parametrize(("kind", "blocks"), [(Still, True), (Shared, True), (Own, False)])
async def test_a_class_runs_by_any_kind_of_method(kind: type[Any], blocks: bool, make_call: Any) -> None:
    agent, call = load_agent(kind), make_call(task=1)
    found = agent(call)()
    assert inspect.iscoroutinefunction(agent(call)) is not blocks
    assert (found if blocks else await found) == {Still: 0.25, Shared: 0.5, Own: 1.0}[kind]


def test_a_class_that_yields_is_no_agent() -> None:
    class Streams:
        def run(self) -> Any:
            yield 1

    with pytest.raises(AgentError, match="is a generator"):
        load_agent(Streams)
