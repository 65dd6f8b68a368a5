from __future__ import annotations

import pickle
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.rollouts import Attempt, AttemptedRollout, RolloutConfig
from agentlightning.runner.hosts.messages import Cancel, Done, FrameDecoder, FromHost, Job, MessageError, encode


@given(
    st.lists(st.integers(0, 300).map(lambda n: Done("at", output="x" * n)) | st.builds(Cancel, st.text())), st.data()
)
def test_messages_arrive_whole_however_the_stream_is_cut(messages: list[Done | Cancel], data: st.DataObject) -> None:
    stream = b"".join(map(encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    frames = FrameDecoder(Done | Cancel)
    assert [message for piece in pieces for message in frames.feed(piece)] == messages


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.parametrize(
    "body",
    [
        pickle.dumps(Evil()),
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["Done", 1]),
        msgspec.msgpack.encode(["Job", 1]),
        msgspec.msgpack.encode(["Spans", "at", [{"rollout_id": 7}]]),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_message_of_a_host_is_an_error_and_nothing_else(body: bytes) -> None:
    with pytest.raises(MessageError):
        list(FrameDecoder(FromHost).feed(struct.pack("!Q", len(body)) + body))


def test_a_message_beyond_the_limit_is_not_waited_for() -> None:
    with pytest.raises(MessageError, match="at most"):
        list(FrameDecoder(FromHost).feed(struct.pack("!Q", 1 << 60)))


def test_a_job_arrives_as_it_was_sent() -> None:
    rollout = AttemptedRollout(
        "ro", {"a": [1, None, 0.5]}, 1.0, config=RolloutConfig(max_attempts=3), attempt=Attempt("ro", "at", 1, 2.0)
    )
    job = Job(rollout, {"llm": {"resource_type": "llm"}}, "http://h", {"A": "b"})
    assert list(FrameDecoder(Job | Cancel).feed(encode(job))) == [job]
