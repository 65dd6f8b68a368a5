"""What transitions and training samples say of themselves."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentlightning.errors import PolicyError
from agentlightning.trajectory import Node, TokenTree, TrainingSample, Transition

TREE = TokenTree((Node(-1, (5, 6)), Node(0, (7, 8), sampled=True, logprobs=(-0.1, -0.2))))


def call(*messages: dict[str, Any], prompt: tuple[int, ...] = (1, 2)) -> Transition:
    text = json.dumps(messages) if messages else None
    return Transition("r", "a", "s", 1, prompt, (3,), (-1.0,), input_messages=text)


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text, **more}]}


def test_messages_are_read_when_they_are_asked_for() -> None:
    assert call(said("user", "Hi")).messages == [said("user", "Hi")]
    assert call().messages == []
    for broken in ("{", "3", '["text"]'):
        assert Transition("r", "a", "s", 1, (1,), (2,), (0.0,), input_messages=broken).messages == []


def test_a_state_is_what_was_observed_since_the_last_answer() -> None:
    first = call(said("system", "Play."), said("user", "You see a door."))
    later = call(said("user", "Go."), said("assistant", "open"), said("tool", "You see a key.", id="call-1"))
    elsewhere = call(said("user", "Stop."), said("assistant", "wait"), said("tool", "You see a key.", id="call-2"))
    assert later.state == elsewhere.state != first.state
    assert len(first.state) == 16


def test_a_state_is_computed_once_and_belongs_to_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    digests: list[Any] = []

    def digest(value: Any) -> str:
        digests.append(value)
        return str(len(digests))

    monkeypatch.setattr("agentlightning.trajectory._digest", digest)
    first = call(said("user", "Hi"))
    assert [first.state, first.state] == ["1", "1"]
    assert replace(first, input_messages=json.dumps([said("user", "Ho")])).state == "2"
    assert first == call(said("user", "Hi")), "whether it was computed makes no difference"


def test_without_messages_a_state_is_the_prompt() -> None:
    assert call(prompt=(1, 2)).state == call(prompt=(1, 2)).state != call(prompt=(1, 3)).state


def test_columns_are_float32_and_empty_where_nothing_was_sampled() -> None:
    sample = TrainingSample(TREE, advantages=[(9.0, 9.0), (0.5, 1.0)], weights=[(), np.array([0.25, 0.25])])
    assert [values.tolist() for values in sample.advantages] == [[], [0.5, 1.0]]
    assert {values.dtype for column in sample.columns.values() for values in column} == {np.dtype("float32")}
    assert (sample.share, sample.adapter) == (0.5, None)
    assert TrainingSample(TREE, columns={"weights": [(), (1, 1)]}, adapter="writer", share=0.1).share == 0.1
    again = replace(copy.deepcopy(sample), adapter="writer", values=[(), (1.0, 2.0)])
    assert sorted(again.columns) == ["advantages", "values", "weights"]


def test_one_number_stands_for_all_tokens_of_a_node() -> None:
    sample = TrainingSample(TREE, weights=[7.0, 0.25])
    assert [values.tolist() for values in sample.weights] == [[], [0.25, 0.25]]
    assert sample.share == 0.5
    assert sample.weights[1].dtype == np.float32


@pytest.mark.parametrize("column", [[(0.5, 1.0)], [(), (0.5,)]])
def test_a_column_that_does_not_fit_its_tree_is_refused(column: Any) -> None:
    with pytest.raises(PolicyError, match="column 'advantages' has"):
        TrainingSample(TREE, advantages=column)
