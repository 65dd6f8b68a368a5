"""Replies that later requests name: kept for their attempt, each message once, within bounds."""

import orjson
import pytest

from agentlightning.gateway.dialects.message_digest import extend_digest, message_digests
from agentlightning.gateway.dialects.openai.responses_request import RESPONSES
from agentlightning.gateway.dialects.response_store import ResponseLookup, ResponseStore
from agentlightning.gateway.errors import ApiError

ATTEMPT = ("ro-1", "at-1")


def say(kept, name, messages, answer, *, attempt=ATTEMPT, leading=0, body=b"{}"):
    answer = {"role": "assistant", "content": answer}
    kept.add(attempt, name, message_digests(messages), messages, answer, body, [{"id": f"item-{name}"}], leading)
    return [*messages, answer]


def user(text):
    return {"role": "user", "content": text}


def test_a_conversation_is_recalled_up_to_any_of_its_replies_without_instructions():
    kept, system = ResponseStore(), {"role": "system", "content": "Be brief."}
    one = say(kept, "r1", [system, user("a")], "A", leading=1)
    say(kept, "r2", [*one, user("b")], "B", leading=1)
    recall = kept.lookup(ATTEMPT)
    assert [message["content"] for message in recall.messages("r1")] == ["a", "A"]
    assert [message["content"] for message in recall.messages("r2")] == ["a", "A", "b", "B"]
    assert recall.item("item-r1") == {"id": "item-r1"}


def test_a_long_conversation_costs_what_its_messages_cost():
    kept, messages = ResponseStore(), []
    for turn in range(50):
        messages = say(kept, f"r{turn}", [*messages, user("x" * 1000)], "y" * 1000)
    assert kept.size < 50 * 2200


def test_another_attempt_and_a_stranger_find_nothing():
    kept = ResponseStore()
    say(kept, "r1", [user("a")], "A")
    for attempt in (("ro-1", "at-2"), None):
        with pytest.raises(ApiError, match="'r1' is not stored here"):
            kept.lookup(attempt).messages("r1")
        with pytest.raises(ApiError, match="'item-r1' is not stored here"):
            kept.lookup(attempt).item("item-r1")


def test_what_is_kept_is_bounded_and_forgotten_with_its_attempt():
    kept = ResponseStore(max_bytes=3000)
    for index in range(5):
        say(kept, "r", [user("x" * 1000)], "A", attempt=("ro", str(index)))
        assert kept.size <= 3000
    assert len(kept) == 2
    for index in range(5):
        kept.forget(("ro", str(index)))
    assert (len(kept), kept.size) == (0, 0)


def test_a_reply_that_was_not_stored_is_continued_and_not_retrieved():
    kept = ResponseStore()
    say(kept, "r1", [user("a")], "A", body=None)
    assert len(kept.lookup(ATTEMPT).messages("r1")) == 2
    with pytest.raises(ApiError) as refused:
        kept.body(ATTEMPT, "r1")
    assert refused.value.status == 404


def test_a_deleted_reply_gives_its_room_back():
    kept = ResponseStore()
    say(kept, "r1", [user("a")], "A", body=b"x" * 100)
    size = kept.size
    kept.delete(ATTEMPT, "r1")
    assert kept.size == size - 100
    with pytest.raises(ApiError, match="no response 'r1'"):
        kept.delete(ATTEMPT, "r1")


def test_turns_that_a_provider_wants_back_count_and_make_room():
    kept, block = ResponseStore(max_bytes=1000), [{"type": "redacted_thinking", "data": "x" * 200}]
    for _ in range(10):
        kept.add_turn(("ro-0", "at"), b"the same turn", block)
    assert 200 < kept.size < 300
    for number in range(10):
        kept.add_turn((f"ro-{number}", "at"), b"a turn", block)
    assert len(kept) < 10
    assert kept.size <= 1000
    assert kept.lookup(("ro-9", "at")).turn(b"a turn") == block


def test_a_reply_to_an_image_is_not_gone_on_with_by_a_model_that_reads_text():
    image = {"type": "input_image", "image_url": "https://host/a.png"}
    asked = {"input": [{"role": "user", "content": [image, {"type": "input_text", "text": "What is it?"}]}]}
    messages = RESPONSES.read(orjson.dumps(asked), ResponseLookup(), attachments=True).messages
    kept, attempt = ResponseStore(), ("ro", "at")
    digests = (b"agentlightning", extend_digest(b"agentlightning", messages[0]))
    kept.add(attempt, "resp_1", digests, messages, {"role": "assistant", "content": "A cat."}, None, ())
    more = orjson.dumps({"input": "Sure?", "previous_response_id": "resp_1"})
    assert len(RESPONSES.read(more, kept.lookup(attempt), attachments=True).messages) == 3
    with pytest.raises(ApiError, match="continues a conversation with images or files"):
        RESPONSES.read(more, kept.lookup(attempt))
