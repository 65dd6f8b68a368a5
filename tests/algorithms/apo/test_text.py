"""Edits change lines, keep placeholders, and are refused in words where they cannot be carried out."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning import span as names
from agentlightning.algorithms.apo.search import transcript
from agentlightning.algorithms.apo.text import (
    PRUNE_MARGIN,
    Edit,
    Playbook,
    ReplyError,
    Texts,
    apply_edits,
    digest,
    numbered,
    placeholders,
    read_edits,
    schema_violation,
)
from agentlightning.algorithms.training import RolloutReport
from agentlightning.resources import PromptTemplate
from agentlightning.span import Span

TWO = {"prompt": "one\ntwo\nthree"}


def edited(*edits: dict[str, Any], candidate: Texts = TWO) -> str:
    return apply_edits(candidate, [Edit.model_validate(each) for each in edits])["prompt"]


def test_lines_are_added_deleted_and_replaced_by_their_numbers_before_any_edit():
    changes = [
        {"op": "add", "after": 0, "text": "zero"},
        {"op": "delete", "line": 1},
        {"op": "replace", "line": 2, "text": "TWO"},
        {"op": "add", "after": 3, "text": "four"},
    ]
    assert edited(*changes) == "zero\nTWO\nthree\nfour"


def test_edits_with_and_without_the_name_of_the_only_text_count_the_same_lines():
    changes = [{"op": "delete", "line": 1}, {"op": "replace", "line": 2, "text": "TWO", "resource": "prompt"}]
    assert edited(*changes) == "TWO\nthree"


def test_a_line_that_is_there_already_is_not_added_again():
    assert edited({"op": "add", "text": "  two "}) == "one\ntwo\nthree"


@pytest.mark.parametrize("edit", [{"op": "delete", "line": 4}, {"op": "replace", "line": 0}, {"op": "add", "after": 9}])
def test_a_line_that_does_not_exist_is_refused(edit):
    with pytest.raises(ReplyError, match="of a text of 3") as error:
        edited(edit)
    assert error.value.reason == "edit_unknown_line"


def test_a_text_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ReplyError, match="changes 'system'; there are prompt"):
        edited({"op": "delete", "line": 1, "resource": "system"})


@given(st.lists(st.text("ab ", min_size=1), min_size=1, max_size=6), st.data())
def test_an_edit_changes_one_line_and_no_other(lines, data):
    candidate = {"prompt": "\n".join(lines)}
    line = data.draw(st.integers(1, len(lines)))
    for edit in ({"op": "delete", "line": line}, {"op": "replace", "line": line, "text": "new"}):
        after = edited(edit, candidate=candidate)
        old, new = (Counter(text.splitlines()) for text in (candidate["prompt"], after))
        assert max((old - new).total(), (new - old).total()) == 1


def test_edits_are_found_among_words_and_fences():
    reply = 'Sure {here}!\n```json\n{"edits": [{"op": "delete", "line": 2}]}\n```'
    [edit], left_out = read_edits(reply, 3, 100)
    assert (edit.op, edit.line, left_out) == ("delete", 2, 0)


def test_no_more_edits_than_allowed_are_made_and_the_rest_is_counted():
    reply = json.dumps({"edits": [{"op": "delete", "line": line} for line in (1, 2, 3)]})
    edits, left_out = read_edits(reply, 2, 100)
    assert [edit.line for edit in edits] == [1, 2]
    assert left_out == 1


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("I would rather not.", "editor_nonsense"),
        ('{"changes": []}', "editor_nonsense"),
        ('{"edits": [{"op": "shuffle"}]}', "editor_nonsense"),
        (json.dumps({"edits": [{"op": "add", "text": "x" * 101}]}), "editor_over_long"),
    ],
)
def test_a_reply_that_is_no_edit_is_refused_under_its_reason(reply, reason):
    with pytest.raises(ReplyError) as error:
        read_edits(reply, 3, 100)
    assert error.value.reason == reason


def test_the_editor_sees_numbered_lines():
    assert numbered("a\nb") == "[1] a\n[2] b"


def test_a_candidate_is_known_by_its_texts():
    assert digest({"a": "1", "b": "2"}) == digest({"b": "2", "a": "1"})
    assert digest({"a": "1"}) != digest({"a": "2"})


@pytest.mark.parametrize(
    ("engine", "before", "after", "problem"),
    [
        ("f-string", "Say {word}.", "Please say {word}!", None),
        ("f-string", "Say {word}.", "Say it.", "drops the placeholder word"),
        ("f-string", "Say {word}.", "Say {word} {loud}.", "invents loud"),
        ("f-string", "Say {word}.", "Say {word", "drops the placeholder word"),
        ("jinja", "Say {{ word }}.", "{% if word %}{{ word }}{% endif %}", None),
        ("jinja", "Say {{ word }}.", "Say {word}.", "drops the placeholder word"),
        ("jinja", "Say {{ word }}.", "{% if word %}", "is no jinja template"),
        ("plain", "Say {word}.", "Anything {goes", None),
    ],
)
def test_an_edit_keeps_the_placeholders(engine, before, after, problem):
    found = schema_violation(PromptTemplate(template=before, engine=engine), after)
    assert found is None if problem is None else problem in (found or "")


def test_a_placeholder_is_known_by_its_name_alone():
    assert placeholders(PromptTemplate(template="{task.name!r:>10} {rows[0]}")) == {"task", "rows"}


def test_a_playbook_counts_its_items_and_drops_those_that_harm():
    playbook = Playbook(["book"])
    candidate = {"book": "- Keep.\n- Drop.", "prompt": "- Drop."}
    playbook.count(candidate, helpful=[1], harmful=[2])
    assert "[1] helped 1 and harmed 0" in playbook.notes(candidate)["book"]
    assert playbook.pruned(candidate) == candidate
    for _ in range(PRUNE_MARGIN - 1):
        playbook.count(candidate, helpful=[], harmful=[2, 99])
    assert playbook.pruned(candidate) == {"book": "- Keep.", "prompt": "- Drop."}


def test_an_item_keeps_its_counts_wherever_it_stands():
    playbook = Playbook(["book"])
    playbook.count({"book": "- Check units."}, [1], [])
    copy = Playbook(["book"], playbook.counts)
    assert "[2] helped 1" in copy.notes({"book": "new\n* check  UNITS."})["book"]


def test_the_critic_reads_all_of_what_a_tool_was_given_and_has_returned() -> None:
    text = "x" * 5000
    parts = [
        {"type": "tool_call", "name": "look", "arguments": {"text": f"{text} wrong"}},
        {"type": "tool_call_response", "id": "c", "response": f"{text} here is the answer"},
    ]
    attributes = {names.OPERATION_NAME: "chat", names.INPUT_MESSAGES: json.dumps([{"role": "tool", "parts": parts}])}
    span = Span("ro", "at", "chat", start_time=1.0, end_time=2.0, span_id="s", attributes=attributes)
    read = transcript("task", RolloutReport("ro", spans=(span,)))
    assert "x wrong" in read
    assert "here is the answer" in read
