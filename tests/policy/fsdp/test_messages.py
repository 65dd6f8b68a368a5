"""The connections between the trainer's process and the ranks."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest
import torch

from agentlightning.errors import ConfigError, MissingExtraError, PolicyError, RankError
from agentlightning.policy.fsdp.messages import (
    Failure,
    TensorHeader,
    authenticate,
    connect,
    receive_tensor,
    send_tensor,
)


def joined(here: bytes, there: bytes) -> tuple[Connection | None, Connection]:
    """Both ends of a connection over loopback, with the tokens that they know."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(20)
        accepting = pool.submit(lambda: authenticate(listener.accept()[0], here))
        try:
            connection = connect(listener.getsockname(), there, 5)
        finally:
            end = accepting.result()
        return end, connection


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_arrive_as_they_were_sent(dtype: torch.dtype) -> None:
    here, there = joined(b"secret", b"secret")
    assert here is not None
    sent = torch.arange(6, dtype=dtype).reshape(2, 3).T
    send_tensor(there, "model", "weight", sent)
    header = here.recv()
    assert isinstance(header, TensorHeader)
    received = receive_tensor(here, header)
    assert (header.owner, header.name, received.dtype) == ("model", "weight", dtype)
    assert torch.equal(received, sent)
    here.close(), there.close()


def test_a_process_that_does_not_know_the_token_is_not_let_in() -> None:
    with pytest.raises(ConfigError, match="does not take the token"):
        joined(b"secret", b"guess")


def test_a_trainer_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(RankError, match=f"no trainer at 127.0.0.1:{address[1]}"):
        connect(address, b"secret", 0)


def test_errors_keep_their_type_and_unknown_ones_are_of_a_rank() -> None:
    assert type(Failure.of(PolicyError("a")).exception()) is PolicyError
    assert type(Failure.of(MissingExtraError("torch", "train")).exception()) is ConfigError
    assert str(Failure.of(ZeroDivisionError("b")).exception()) == "ZeroDivisionError: b"
    assert not Failure.of(ZeroDivisionError("b")).is_typed
    assert not Failure.of(PolicyError("a"), changed=True).is_typed
