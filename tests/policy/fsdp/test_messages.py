"""The connections between the trainer's process and the ranks."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest

from agentlightning.errors import ConfigError, PolicyError, RankError
from agentlightning.policy.fsdp.group import Failure, authenticate, connect


def test_both_ends_of_a_connection_know_the_token() -> None:
    here, there = joined(b"secret", b"secret")
    there.send({"any": (1, 2)})
    assert here.recv() == {"any": (1, 2)}
    here.close(), there.close()


def joined(here: bytes, there: bytes) -> tuple[Connection, Connection]:
    """Both ends of a connection over loopback, with the tokens that they know."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(20)
        accepting = pool.submit(lambda: authenticate(listener.accept()[0], here, listens=True))
        connection = connect(listener.getsockname(), there, 5)
        return accepting.result(), connection


def test_a_process_that_does_not_know_the_token_is_not_let_in() -> None:
    with pytest.raises(ConfigError, match="does not take the token"):
        joined(b"secret", b"guess")


def test_a_trainer_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(RankError, match=f"no trainer at 127.0.0.1:{address[1]}"):
        connect(address, b"secret", 0)


def test_errors_keep_their_type_unless_weights_have_changed() -> None:
    assert type(Failure("PolicyError", "a").error) is PolicyError
    assert type(Failure("MissingExtraError", "no torch").error) is ConfigError
    assert Failure("ZeroDivisionError", "b").error is None
    assert Failure("PolicyError", "a", changed=True).error is None
