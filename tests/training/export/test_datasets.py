"""Rollouts of a run as data sets, in the shapes that OpenAI and TRL document."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentlightning import span as names
from agentlightning.chat.messages import chat_messages
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.span import Span, new_span_id
from agentlightning.store import LightningStore
from agentlightning.training.export import ExportedDataset, Selection, export_dataset
from agentlightning.training.persistence.run_dir import RunDir, RunState

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}


ASKS = {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "add", "arguments": {"a": 1}}]}
GIVES = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "3"}]}


class Recorded:
    """A run directory with rollouts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        made = RunDir.create(path)
        made.write_state(RunState("run1"))
        made.close()

    def add(
        self,
        name: str,
        task: Any,
        reward: Any,
        calls: Iterable[tuple[list[Any], Any]],
        agent: str | None = None,
        tools: Any = None,
    ) -> None:
        asyncio.run(self._add(name, task, reward, calls, agent, tools))

    async def _add(self, name: str, task: Any, reward: Any, calls: Any, agent: Any, tools: Any) -> None:
        store = LightningStore(self.path / "store.db")
        rollout = await store.start_rollout(task, mode="train", rollout_id=f"run1-{name}")
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        for before, answer in calls:
            attributes = {
                names.OPERATION_NAME: "chat",
                names.INPUT_MESSAGES: orjson.dumps(before).decode(),
                names.OUTPUT_MESSAGES: orjson.dumps([answer]).decode(),
                **({names.AGENT_NAME: agent} if agent else {}),
                **({names.TOOL_DEFINITIONS: orjson.dumps(tools).decode()} if tools else {}),
            }
            await store.add_span(Span(*ids, "chat", 0.0, span_id=new_span_id(), attributes=attributes))
        if reward is not None:
            key = names.REWARD_VALUES if isinstance(reward, dict) else names.SCORE_VALUE
            await store.add_span(Span(*ids, names.REWARD, 0.0, span_id=new_span_id(), attributes={key: reward}))
        await store.update_attempt(*ids, status="succeeded")
        await store.close()

    def export(self, form: Any, **selection: Any) -> tuple[ExportedDataset, list[dict[str, Any]]]:
        exporting = export_dataset(self.path, form, self.path / "out" / "set.jsonl", Selection(**selection))
        found = asyncio.run(exporting)
        return found, [json.loads(line) for line in found.path.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path / "run")


ASK = text("user", "1 + 2")
WITH_TOOL = [([ASK], ASKS), ([ASK, ASKS, GIVES], text("assistant", "3"))]


def test_a_conversation_with_tools_is_one_record_for_openai(run: Recorded) -> None:
    run.add("train-0", {"q": 1}, 1.0, WITH_TOOL, tools=[TOOL])
    found, records = run.export("openai-jsonl")
    assert (found.records, found.rollouts) == (1, 1)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert records == [
        {
            "messages": [
                {"role": "user", "content": "1 + 2"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "3"},
                {"role": "assistant", "content": "3"},
            ],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        }
    ]


def test_the_last_answer_is_the_completion_for_trl(run: Recorded) -> None:
    run.add("train-0", 1, 1.0, WITH_TOOL)
    _, [record] = run.export("trl-jsonl")
    assert record["completion"] == [{"role": "assistant", "content": "3"}]
    assert [message["role"] for message in record["prompt"]] == ["user", "assistant", "tool"]


def test_the_best_and_the_worst_of_a_task_are_a_preference(run: Recorded) -> None:
    for number, reward in enumerate((0.5, 0.0, 1.0)):
        run.add(f"train-{number}", 1, reward, [([ASK], text("assistant", f"answer {number}"))])
    run.add("train-3", 2, 1.0, [([text("user", "another")], text("assistant", "alone"))])
    found, records = run.export("dpo-jsonl")
    assert records == [
        {
            "prompt": [{"role": "user", "content": "1 + 2"}],
            "chosen": [{"role": "assistant", "content": "answer 2"}],
            "rejected": [{"role": "assistant", "content": "answer 1"}],
        }
    ]
    assert found.skipped == {"tasks whose rollouts have equal rewards": 1}


def test_conversations_with_different_prompts_are_no_preference(run: Recorded) -> None:
    run.add("train-0", 1, 1.0, [([ASK], text("assistant", "a"))])
    run.add("train-1", 1, 0.0, [([text("user", "other words")], text("assistant", "b"))])
    with pytest.raises(DatasetError, match="2 tasks whose rollouts have equal rewards"):
        run.export("dpo-jsonl")


def test_filters_select_and_count(run: Recorded) -> None:
    say = [([ASK], text("assistant", "a"))]
    run.add("train-0", 1, 1.0, say, agent="writer")
    run.add("train-1", 1, 0.2, say, agent="writer")
    run.add("train-2", 1, None, say, agent="writer")
    run.add("train-3", 1, 1.0, say, agent="critic")
    run.add("train-4", 1, {"a": 1.0}, say, agent="writer")
    found, records = run.export("openai-jsonl", min_reward=0.5, agent="wr.*")
    assert len(records) == 1
    assert found.skipped == {
        "below the reward asked for": 1,
        "without a reward": 1,
        "without a call of the agent": 1,
        "with a reward of a, without weights (--reward-weights)": 1,
    }
    weighed, _ = run.export("openai-jsonl", min_reward=0.5, agent="writer", reward_weights={"a": 1.0})
    assert weighed.records == 2


def test_rollouts_of_evaluations_stay_out(run: Recorded) -> None:
    run.add("before-greedy-0", 1, 1.0, [([ASK], text("assistant", "held out"))])
    with pytest.raises(DatasetError, match=r"none of 0 rollouts .* \(there are none\)"):
        run.export("openai-jsonl")


def test_a_rewritten_history_is_a_conversation_of_its_own(run: Recorded) -> None:
    run.add("train-0", 1, 1.0, [([ASK], text("assistant", "a")), ([text("user", "summary")], text("assistant", "b"))])
    _, records = run.export("openai-jsonl")
    assert [record["messages"][-1]["content"] for record in records] == ["a", "b"]


def test_thoughts_are_left_out() -> None:
    thought = {
        "role": "assistant",
        "parts": [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "yes"}],
    }
    assert chat_messages([thought]) == [{"role": "assistant", "content": "yes"}]


def test_what_is_no_run_or_no_pattern_is_named(run: Recorded, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(ConfigError, match="holds no run"):
        asyncio.run(export_dataset(tmp_path, "openai-jsonl", out, Selection()))
    with pytest.raises(ConfigError, match=r"no store.db"):
        asyncio.run(export_dataset(run.path, "openai-jsonl", out, Selection()))
    with pytest.raises(ConfigError, match="no regular expression"):
        asyncio.run(export_dataset(run.path, "openai-jsonl", out, Selection(agent="(")))
