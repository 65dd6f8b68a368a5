"""Replies that later requests name: stored for their attempt, each message once, within bounds."""

import pytest

from agentlightning.gateway.dialects.content_parts import extend_digest, message_digests
from agentlightning.gateway.dialects.response_store import ResponseLookup, ResponseStore
from agentlightning.gateway.dialects.responses import RESPONSES
from agentlightning.gateway.errors import ApiError

ATTEMPT = ("ro-1", "at-1")


def say(store, name, messages, answer, *, attempt=ATTEMPT, leading=0, body=b"{}"):
    answer = {"role": "assistant", "content": answer}
    store.add(attempt, name, message_digests(messages), messages, answer, body, [{"id": f"item-{name}"}], leading)
    return [*messages, answer]


def user(text):
    return {"role": "user", "content": text}


def test_a_conversation_is_recalled_up_to_any_of_its_replies_without_instructions():
    store, system = ResponseStore(), {"role": "system", "content": "Be brief."}
    one = say(store, "r1", [system, user("a")], "A", leading=1)
    say(store, "r2", [*one, user("b")], "B", leading=1)
    recall = ResponseLookup(store, ATTEMPT)
    assert [message["content"] for message in recall.messages("r1")] == ["a", "A"]
    assert [message["content"] for message in recall.messages("r2")] == ["a", "A", "b", "B"]
    assert recall.item("item-r1") == {"id": "item-r1"}


def test_a_long_conversation_costs_what_its_messages_cost():
    store, messages = ResponseStore(), []
    for turn in range(50):
        messages = say(store, f"r{turn}", [*messages, user("x" * 1000)], "y" * 1000)
    assert store.size < 50 * 2200


def test_another_attempt_and_a_stranger_find_nothing():
    store = ResponseStore()
    say(store, "r1", [user("a")], "A")
    for attempt in (("ro-1", "at-2"), None):
        with pytest.raises(ApiError, match="'r1' is not stored here"):
            ResponseLookup(store, attempt).messages("r1")
        with pytest.raises(ApiError, match="'item-r1' is not stored here"):
            ResponseLookup(store, attempt).item("item-r1")


def test_the_store_is_bounded_and_forgets_an_attempt():
    store = ResponseStore(max_bytes=3000)
    for index in range(5):
        say(store, "r", [user("x" * 1000)], "A", attempt=("ro", str(index)))
        assert store.size <= 3000
    assert len(store) == 2
    for index in range(5):
        store.forget(("ro", str(index)))
    assert (len(store), store.size) == (0, 0)


def test_processes_that_share_a_folder_share_replies_and_their_bound(tmp_path):
    one, other = ResponseStore(tmp_path, max_bytes=3000), ResponseStore(tmp_path, max_bytes=3000)
    messages = say(one, "r1", [user("a")], "A")
    say(other, "r2", [*messages, user("b")], "B")
    assert [message["content"] for message in ResponseLookup(one, ATTEMPT).messages("r2")] == ["a", "A", "b", "B"]
    one.note_provider(ATTEMPT, "r3", "them", {"is": "pending"})
    assert other.take_pending(ATTEMPT, "r3") == {"is": "pending"}
    assert (one.take_pending(ATTEMPT, "r3"), one.provider_of(ATTEMPT, "r3")) == (None, "them")
    for index in range(5):
        say((one, other)[index % 2], "r", [user("x" * 1000)], "A", attempt=("ro", str(index)))
    assert one.size == other.size <= 3000
    assert (len(one), ResponseLookup(one, ("ro", "4")).messages("r")[0]) == (2, user("x" * 1000))
    other.forget(("ro", "4"))
    assert (len(one), one.size) == (1, other.size)


def test_a_reply_that_was_not_stored_is_continued_and_not_retrieved():
    store = ResponseStore()
    say(store, "r1", [user("a")], "A", body=None)
    assert len(ResponseLookup(store, ATTEMPT).messages("r1")) == 2
    with pytest.raises(ApiError) as refused:
        store.body(ATTEMPT, "r1")
    assert refused.value.status == 404


def test_a_deleted_reply_gives_its_room_back():
    store = ResponseStore()
    say(store, "r1", [user("a")], "A", body=b"x" * 100)
    size = store.size
    store.delete(ATTEMPT, "r1")
    assert store.size == size - 100
    with pytest.raises(ApiError, match="no response 'r1'"):
        store.delete(ATTEMPT, "r1")


def test_turns_that_a_provider_wants_back_count_and_make_room():
    store, block = ResponseStore(max_bytes=1000), [{"type": "redacted_thinking", "data": "x" * 200}]
    for _ in range(10):
        store.add_turn(("ro-0", "at"), b"the same turn", block)
    assert 200 < store.size < 300
    for number in range(10):
        store.add_turn((f"ro-{number}", "at"), b"a turn", block)
    assert len(store) < 10
    assert store.size <= 1000
    assert ResponseLookup(store, ("ro-9", "at")).turn(b"a turn") == block


def test_a_reply_to_an_image_is_not_gone_on_with_by_a_model_that_reads_text():
    image = {"type": "input_image", "image_url": "https://host/a.png"}
    body = {"input": [{"role": "user", "content": [image, {"type": "input_text", "text": "What is it?"}]}]}
    messages = RESPONSES.read(body, ResponseLookup(), attachments=True).messages
    store, attempt = ResponseStore(), ("ro", "at")
    digests = (b"agentlightning", extend_digest(b"agentlightning", messages[0]))
    store.add(attempt, "resp_1", digests, messages, {"role": "assistant", "content": "A cat."}, None, ())
    more = {"input": "Sure?", "previous_response_id": "resp_1"}
    assert len(RESPONSES.read(more, ResponseLookup(store, attempt), attachments=True).messages) == 3
    with pytest.raises(ApiError, match="continues a conversation with images or files"):
        RESPONSES.read(more, ResponseLookup(store, attempt))
