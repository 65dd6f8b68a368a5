"""One process of those that train:

    AGL_RANK_TOKEN=... python -m agentlightning.policy.fsdp.rank HOST:PORT

It joins the trainer at that address, is told its number and what to train, and follows its commands until the trainer
closes. When the trainer is gone, it ends with status 3; a launcher such as `torchrun --max-restarts` then starts it
again, to join the resumed run.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import socket
import sys
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.policy.config import parse_address, shared_token
from agentlightning.policy.fsdp.group import Failure, Hello, Reply, Welcome, code, connect, model_digest
from agentlightning.policy.fsdp.learner import GATHER, RankLearner
from agentlightning.policy.fsdp.sharding import Ranks

logger = logging.getLogger(__name__)

TRAINER_GONE: Final = 3
"""Exit status."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m agentlightning.policy.fsdp.rank", description=__doc__)
    parser.add_argument("address", help="HOST:PORT of the trainer")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for the trainer")
    options = parser.parse_args(arguments)
    try:
        address = parse_address(options.address)
        connection = connect(address, shared_token(), options.timeout)
        return _serve(connection, address[0])
    except AgentLightningError as error:
        logger.error("%s", error)
        return 1


def _serve(connection: Connection, trainer: str) -> int:
    connection.send(Hello(socket.gethostname(), os.getpid(), code(), *map(_number, ("RANK", "LOCAL_RANK"))))
    try:
        welcome = connection.recv()
    except (EOFError, OSError):
        welcome = None
    if welcome is None:
        return TRAINER_GONE
    if isinstance(welcome, str):
        raise ConfigError(f"the trainer refuses this rank: {welcome}")
    assert isinstance(welcome, Welcome)
    logging.getLogger("agentlightning").setLevel(logging.WARNING if welcome.rank == 0 else logging.ERROR)
    commands = _read_in_background(connection)
    try:
        ranks = _join(welcome, trainer)
        learner = RankLearner(welcome.config, ranks)
        reply = Reply(model_digest(welcome.config.model))
    except Exception as error:  # noqa: BLE001
        connection.send(Reply(failure=Failure(type(error).__name__, str(error))))
        return 1
    while True:
        try:
            connection.send(reply)
        except OSError:
            return TRAINER_GONE
        reply = _answer(*commands.get(), learner, ranks, connection)


def _number(variable: str) -> int | None:
    """That which a launcher, torchrun or Slurm, has given this process."""
    names = (variable, {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID"}[variable])
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit()), None)


def _read_in_background(connection: Connection) -> queue.SimpleQueue[tuple[str, Any]]:
    """The commands that arrive. When the trainer closes or is gone, this process ends, wherever it is: it may wait for
    a rank that will not answer."""
    commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        try:
            while (command := connection.recv()) is not None:
                commands.put(command)
            os._exit(0)
        except (EOFError, OSError):
            os._exit(TRAINER_GONE)

    threading.Thread(target=read, name="commands", daemon=True).start()
    return commands


def _join(welcome: Welcome, trainer: str) -> Ranks:
    """The process group. Raises ConfigError for a device that this machine has not."""
    config = welcome.config
    device = _device(config.device, welcome.local_rank)
    torch.set_num_threads(config.threads)
    wait = timedelta(seconds=config.rank_timeout_seconds)
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        trainer, welcome.port, is_master=False, timeout=wait
    )
    backend = (
        "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    )
    dist.init_process_group(backend, store=store, rank=welcome.rank, world_size=welcome.count, timeout=wait)
    mesh = init_device_mesh(device.type, (welcome.count,))
    control: Any = dist.new_group(backend="gloo", timeout=wait)
    return Ranks(mesh, control, device)


def _device(name: str, local_rank: int) -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True) if name == "auto" else torch.device(name)
    if found is None or found.type == "cpu":
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"rank {local_rank} of this machine has no device: {socket.gethostname()} has {count} of type {found.type};"
            " start at most one rank for each"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(found.type, local_rank)


def _answer(name: str, given: Any, learner: RankLearner, ranks: Ranks, connection: Connection) -> Reply:
    learner.changed_names.clear()
    try:
        found: Any = getattr(learner, name)(*ranks.from_first(given))
        if name == GATHER:
            for part in found:
                if ranks.rank == 0:
                    connection.send(part)
            found = None
        return Reply(found if ranks.rank == 0 else None)
    except Exception as error:  # noqa: BLE001
        return Reply(failure=Failure(type(error).__name__, str(error), bool(learner.changed_names)))


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    status = main()
    sys.stdout.flush()
    os._exit(status)  # Threads of the process group may wait for ranks that have ended.
