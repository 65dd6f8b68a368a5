"""What a prompt search says of itself when it has ended."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.prompt_worlds import START, PromptWorld

import agentlightning as agl
from agentlightning.algorithms.apo.beam import BeamSearch
from agentlightning.algorithms.apo.reflective import ReflectiveSearch

ADVICE = "The prompt lacks the colour."


class Run:
    """A run around what the searches of these tests are given."""

    def __init__(self, training: Any) -> None:
        self._training = training
        self.resources = {"prompt": agl.PromptTemplate(template=START)}
        self.step, self.held_out_tasks = 0, 10
        self.warnings: dict[str, str] = {}
        self.lines: list[dict[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._training, name)

    def note(self, text: str) -> None: ...

    def warn(self, name: str, text: str) -> None:
        self.warnings.setdefault(name, text)

    async def publish(self, resources: Any) -> None: ...

    async def finish_step(self, collected: Any, metrics: dict[str, float]) -> None:
        self.step += 1
        self.lines.append(metrics)


async def test_an_edit_that_cannot_be_used_is_counted_and_warned_of_once(made):
    edits = iter(['{"edits": [{"op": "delete", "line": 2}]}', '{"edits": [{"op": "delete", "line": 99}]}', "No."])

    async def create(messages, **_):
        text = ADVICE if "# Advice" not in messages[-1]["content"] else next(edits, '{"edits": []}')
        return SimpleNamespace(
            choices=[SimpleNamespace(message=SimpleNamespace(content=text), finish_reason="stop")], usage=None
        )

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    beam = {"beam_rounds": 1, "branch_factor": 3, "val_batch_size": 2}
    run: Any = Run(made(BeamSearch, PromptWorld()).training)
    algorithm = agl.APO(client, critic={"model": "m"}, search="beam", beam=beam, rounds=1)
    await algorithm.run(run)
    assert set(run.warnings) == {"apo_schema_violations", "apo_edit_unknown_line", "apo_editor_nonsense"}
    assert "1 replies" in run.warnings["apo_edit_unknown_line"]
    assert "names line 99 of a text of 2" in run.warnings["apo_edit_unknown_line"]
    assert run.lines[-1]["apo_edit_unknown_line"] == 1
    state = algorithm.state_dict()
    assert state["skips"] == {"schema_violations": 1, "edit_unknown_line": 1, "editor_nonsense": 1}
    assert not state["skips"].keys() & state["counts"].keys()


async def test_a_search_that_ended_for_its_rounds_goes_on_where_there_are_more(made):
    def algorithm(rounds: int) -> agl.APO:
        models = {part: {"model": part} for part in ("critic", "editor")}
        found = agl.APO(client, **models, rounds=rounds, budget={"calls": 300})
        found.load_state_dict(state)
        return found

    async def create(model, messages, **_):
        text = {"critic": world.critique, "editor": world.edits}[model](messages[-1]["content"])
        return SimpleNamespace(
            choices=[SimpleNamespace(message=SimpleNamespace(content=text), finish_reason="stop")], usage=None
        )

    world, state = PromptWorld(), {}
    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    run: Any = Run(made(ReflectiveSearch, world).training)
    for rounds in (3, 3, 6):
        running = algorithm(rounds)
        await running.run(run)
        assert run.step == rounds
        state = json.loads(json.dumps(running.state_dict()))
    assert "its 3 rounds are done" in run.warnings["apo_budget"]
    assert state["state"]["number"] == 6


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"critic": "gpt-5-mini", "diversity_temperature": 0.5}, r'critic = "gpt-5-mini".*such as critic\.model'),
        ({"beam": 3, "beam_width": 2}, r"beam = 3.*such as beam\.beam_width"),
    ],
)
def test_a_value_in_place_of_a_section_is_named(arguments: Any, named: str) -> None:
    with pytest.raises(agl.errors.ConfigError, match=named):
        agl.APO(**arguments)
