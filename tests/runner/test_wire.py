from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.runner.wire import Cancel, Done, Frames, encode


@given(
    st.lists(st.integers(0, 300).map(lambda n: Done(n, output="x" * n)) | st.builds(Cancel, st.integers())), st.data()
)
def test_messages_arrive_whole_however_the_stream_is_cut(messages: list[Done | Cancel], data: st.DataObject) -> None:
    stream = b"".join(map(encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    frames = Frames()
    assert [message for piece in pieces for message in frames.feed(piece)] == messages
