"""How the trainer's process follows its ranks, here played by the test."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from agentlightning.errors import ConfigError, PolicyError, RankError
from agentlightning.policy.config import LocalPolicyConfig
from agentlightning.policy.fsdp import group as module
from agentlightning.policy.fsdp.group import Failure, Hello, Member, RankGroup, Reply, code, connect, number


def hello(host: str = "a", pid: int = 1, rank: int | None = None) -> Hello:
    return Hello(host, pid, code(), rank)


class Played:
    """A group of two ranks, each of which answers with what the test has prepared."""

    def __init__(self) -> None:
        ends = [Pipe() for _ in range(2)]
        self.ranks: list[Connection] = [end for _, end in ends]
        self.group = RankGroup([Member(hello(pid=10 + i), end, i, 2) for i, (end, _) in enumerate(ends)])

    def call(self, *answers: Reply | None) -> Any:
        """`None`: the rank ends instead."""
        for rank, answer in zip(self.ranks, answers, strict=True):
            if answer is None:
                rank.close()
            else:
                rank.send(answer)
        return self.group.call("train", "samples")


def failed(error: BaseException, changed: bool = False) -> Reply:
    return Reply(failure=Failure(type(error).__name__, str(error), changed))


def test_the_arguments_go_to_rank_0_and_its_answer_comes_back() -> None:
    played = Played()
    assert played.call(Reply("metrics"), Reply("other")) == "metrics"
    assert [rank.recv() for rank in played.ranks] == [("train", ("samples",)), ("train", None)]


def test_what_all_ranks_refuse_alike_is_raised_and_the_group_goes_on() -> None:
    played = Played()
    with pytest.raises(PolicyError, match="no column") as caught:
        played.call(failed(PolicyError("no column")), failed(PolicyError("no column")))
    assert not isinstance(caught.value, RankError)
    assert played.call(Reply(1), Reply(1)) == 1


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            Reply(1),
            failed(MemoryError("no memory")),
            "rank 1 of 2 .process 11 on a. failed during 'train': MemoryError",
        ),
        (Reply(1), failed(PolicyError("alone")), "rank 1 of 2 .* PolicyError: alone"),
        (failed(PolicyError("x"), True), failed(PolicyError("x"), True), "rank 0 of 2 .* PolicyError: x"),
        (Reply(1), None, "rank 1 of 2 .process 11 on a. closed its connection during 'train'"),
        (failed(RuntimeError("Connection closed by peer")), None, "rank 1 of 2 .* closed its connection"),
    ],
)
def test_a_rank_that_fails_alone_or_ends_is_named_and_the_group_is_over(
    first: Reply, second: Reply | None, words: str
) -> None:
    played = Played()
    with pytest.raises(RankError, match=words):
        played.call(first, second)
    with pytest.raises(RankError, match=words):
        played.group.call("score")


def test_ranks_that_wait_for_one_that_failed_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.1)
    played = Played()
    played.ranks[0].send(failed(MemoryError("no memory")))
    with pytest.raises(RankError, match=r"rank 0 .* MemoryError: no memory; no answer from rank 1 of 2"):
        played.group.call("train")


def test_parts_come_before_the_answer_and_a_model_that_differs_is_named() -> None:
    played = Played()
    played.ranks[0].send(("model", "weight", b"1"))
    parts: list[Any] = []
    for rank in played.ranks:
        rank.send(Reply())
    played.group.call("gather", on_part=lambda *part: parts.append(part))
    assert parts == [("model", "weight", b"1")]
    for rank, digest in zip(played.ranks, ("same", "another"), strict=True):
        rank.send(Reply(digest))
    with pytest.raises(ConfigError, match=r"rank 1 of 2 .* has loaded another model under here: .*another"):
        played.group.check("same", "here")


def test_ranks_are_numbered_by_their_launchers_else_by_machine() -> None:
    def places(*hellos: Hello) -> list[tuple[str, int]]:
        members = number([Member(each, Pipe()[0]) for each in hellos])
        assert [(member.rank, member.count) for member in members] == [(i, len(hellos)) for i in range(len(hellos))]
        return [(member.hello.host, member.hello.pid) for member in members]

    assert places(hello("b", 1), hello("a", 2), hello("b", 3)) == [("a", 2), ("b", 1), ("b", 3)]
    assert places(hello("a", 1, 1), hello("a", 2), hello("b", 3, 0)) == [("b", 3), ("a", 1), ("a", 2)]
    with pytest.raises(ConfigError, match=r"process 7 on a is rank 2, and policy.processes=1"):
        places(hello("a", 7, 2))
    with pytest.raises(ConfigError, match=r"process 2 on a is rank 0, .* each once"):
        places(hello("a", 1, 0), hello("a", 2, 0))


def joining(*play: Callable[[Connection], Any], processes: int = 2, seconds: float = 20) -> Any:
    """Who has joined, where each of `play` is a process with a connection."""
    settings = LocalPolicyConfig(model="", processes=processes, rank_timeout_seconds=seconds)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(0.1)
        address = listener.getsockname()

        def run() -> list[Any]:
            return [each(connect(address, b"secret", 5)) for each in play]

        playing = pool.submit(run)
        group = RankGroup()
        try:
            group._await(settings, listener, b"secret")
            return [each.hello.pid for each in group.members]
        finally:
            playing.result()


def test_a_rank_that_its_launcher_has_started_again_takes_its_place() -> None:
    kept: list[Connection] = []

    def ends(connection: Connection) -> None:
        connection.send(hello(pid=1, rank=0))
        connection.close()

    def stays(pid: int, rank: int) -> Callable[[Connection], None]:
        def play(connection: Connection) -> None:
            connection.send(hello(pid=pid, rank=rank))
            kept.append(connection)

        return play

    assert joining(ends, stays(2, 1), stays(3, 0)) == [2, 3]


def test_a_rank_whose_code_differs_is_named() -> None:
    kept: list[Connection] = []

    def differs(connection: Connection) -> None:
        connection.send(replace(hello(), code={**code(), "torch": "0.1"}))
        kept.append(connection)

    with pytest.raises(ConfigError, match=r"process 1 on a cannot be a rank: it runs torch 0.1 .* the same version"):
        joining(differs)


@pytest.mark.parametrize("words", [None, b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x08"])
def test_connections_that_say_nothing_or_something_else_keep_no_rank_waiting(words: bytes | None) -> None:
    kept: list[Any] = []
    settings = LocalPolicyConfig(model="", processes=2, rank_timeout_seconds=15)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(0.1)
        for _ in range(5):  # each would hold the others up for HANDSHAKE_SECONDS
            kept.append(socket.create_connection(listener.getsockname()))
            if words is not None:
                kept[-1].sendall(words)

        def join() -> None:
            for pid in (1, 2):
                kept.append(connect(listener.getsockname(), b"secret", 5))
                kept[-1].send(hello(pid=pid))

        playing = pool.submit(join)
        group = RankGroup()
        group._await(settings, listener, b"secret")
        assert sorted(each.hello.pid for each in group.members) == [1, 2]
        playing.result()
    for each in kept:
        each.close()


def test_ranks_that_do_not_come_are_counted() -> None:
    with pytest.raises(RankError, match=r"0 of 2 ranks have joined in 0.2 seconds"):
        joining(seconds=0.2)
