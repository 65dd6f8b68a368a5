"""Promises of `DPO(data=...)`: pairs of a file in the format of TRL are learned from, and a wrong line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.algorithms.preference import load_preferences, to_preferences
from agentlightning.algorithms.recorded.sessions import Tokenizer
from agentlightning.chat.hf import HFChatFormat
from agentlightning.cli.main import build
from agentlightning.errors import ConfigError, DatasetError
from agentlightning.policy.config import OptimizerConfig

FAST = OptimizerConfig(lr=3e-3)
QUESTION = [{"role": "user", "content": "question 0"}]
YES, NO = ([{"role": "assistant", "content": answer}] for answer in ("yes", "no"))
PAIR = {"prompt": QUESTION, "chosen": YES, "rejected": NO}


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path


def test_pairs_of_a_file_move_the_model_towards_what_was_chosen(tiny: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "pairs.jsonl", PAIR, "", {"prompt": "question 1", "chosen": "yes", "rejected": "no"})
    result: Any = agl.Trainer(algorithm=agl.DPO(data=path, optimizer=FAST), model=tiny, run_dir=tmp_path / "run").train(
        6
    )
    assert (result.recorded.algorithm, result.steps, result.recorded.sessions) == ("dpo", 6, 2)
    assert result.recorded.counts["pairs"] == 12
    assert result.recorded.metrics["accuracy"] == 1.0
    assert result.recorded.metrics["margin"] > 0.1


@pytest.mark.parametrize(
    "record",
    [
        PAIR,
        {"prompt": "question 0", "chosen": "yes", "rejected": "no"},
        {"chosen": [*QUESTION, *YES], "rejected": [*QUESTION, *NO]},
    ],
)
def test_messages_texts_and_whole_conversations_are_the_same_pair(
    record: Any, chat: HFChatFormat, tmp_path: Path
) -> None:
    [found] = load_preferences(written(tmp_path / "pairs.jsonl", record))
    assert (found.prompt, found.chosen, found.rejected) == (tuple(QUESTION), tuple(YES), tuple(NO))
    assert load_preferences([record])[0].chosen == found.chosen, "a list is read as a file is"


def test_only_the_turns_after_the_prompt_are_compared(chat: HFChatFormat) -> None:
    prompt = [*QUESTION, *NO, {"role": "user", "content": "sure?"}]
    pair = {"prompt": prompt, "chosen": [*YES, *QUESTION, *YES], "rejected": NO}
    trajectories, rejected = to_preferences(load_preferences([pair]), Tokenizer(chat, 4096))
    assert ([len(each.transitions) for each in trajectories], rejected) == ([2, 1], [])
    assert [each.reward for each in trajectories] == [1.0, 0.0]
    assert chat.decode(trajectories[1].transitions[0].response_token_ids).startswith("no")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "is not JSON"),
        ([1], "is a list, not an object"),
        ({"prompt": "q", "chosen": "a"}, "rejected is missing"),
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "chosen is empty"),
        ({"prompt": "q", "chosen": 3, "rejected": "b"}, "chosen is 3"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, r"prompt is \[\]"),
        ({"prompt": "q", "chosen": ["a"], "rejected": "b"}, r"chosen\[0\] is 'a'; a message has a role"),
        ({"prompt": [{"role": "king", "content": ""}], "chosen": "a", "rejected": "b"}, r"prompt\[0\] is .*king"),
        ({"prompt": "q", "chosen": [{"role": "assistant"}], "rejected": "b"}, r"chosen\[0\]\.content is None"),
        ({"prompt": "q", "chosen": QUESTION, "rejected": "b"}, "chosen has no message of the assistant"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
        ({"chosen": "a", "rejected": "b"}, "prompt is missing"),
        ({**PAIR, "tools": "search"}, "tools is 'search'"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(line: Any, complaint: str, tmp_path: Path) -> None:
    path = written(tmp_path / "pairs.jsonl", PAIR, "", line)
    with pytest.raises(DatasetError, match=rf"pairs\.jsonl, line 3:? ?.*{complaint}"):
        load_preferences(path)


def test_data_that_is_not_there_or_empty_is_said(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not found"):
        load_preferences(tmp_path / "none.jsonl")
    with pytest.raises(DatasetError, match="has no preference pair"):
        load_preferences(written(tmp_path / "empty.jsonl"))


def test_pairs_that_cannot_be_learned_from_are_counted_and_named(tiny: Path, tmp_path: Path) -> None:
    long = {**PAIR, "chosen": [{"role": "assistant", "content": "yes " * 4000}]}
    path = written(tmp_path / "pairs.jsonl", PAIR, long)

    def learned(data: Any, name: str, **settings: Any) -> Any:
        algorithm = agl.DPO(data=data, optimizer=FAST, **settings)
        return agl.Trainer(algorithm=algorithm, model=tiny, run_dir=tmp_path / name).train(1)

    result = learned(path, "run")
    assert (result.recorded.sessions, result.recorded.left_out) == (1, {"too_long": 1})
    assert any("pairs.jsonl, line 2 is left out (too long)" in note for note in result.recorded.notes)
    with pytest.raises(DatasetError, match=r"none of 1 preference pairs.*line 1: no answer is of an agent 'writer'"):
        learned(written(tmp_path / "one.jsonl", PAIR), "writer", target_agent="writer")
    assert not (tmp_path / "writer").exists(), "a run that never began is left"


def test_data_and_what_does_not_go_with_it_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pairs='branches' is for recorded sessions"):
        agl.DPO(data=[PAIR], pairs="branches")
    with pytest.raises(ConfigError, match="leave data out, or leave the agent out"):
        agl.Trainer(algorithm=agl.DPO(data=[PAIR]), run_dir=tmp_path / "run").fit(print, [{"a": 1}])


def test_agl_dpo_learns_from_a_file_and_makes_no_store(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "pairs.jsonl", PAIR)
    words = ["dpo", "steps=2", "--data", "pairs.jsonl", "--model", str(tiny), "--run", "run"]
    done = CliRunner().invoke(build(), [*words, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["recorded"]["counts"]["pairs"] == 2
    assert not (tmp_path / ".agentlightning").exists()
    both = CliRunner().invoke(build(), [*words[:4], "--store", "x.db", "--model", str(tiny)])
    assert "give --data FILE or --store STORE, not both" in both.output
