"""A policy that several processes train and this one samples from: `policy.kind = "fsdp"`.

This process is one of them, rank 0. It has the whole weights in the dtype that is sampled from, and the ranks
divide the master copies, gradients and moments. After an update rank 0 gathers the weights that have changed, and they
take the place of the old ones between two tokens, as those of a local policy do. Sampling goes on during training.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import math
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NoReturn, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.errors import AgentLightningError, ConfigError, PolicyError, RankError
from agentlightning.models import checkpoint
from agentlightning.policy.base import (
    UPDATE,
    Capabilities,
    Columns,
    Metrics,
    ScoreColumn,
    SeparatePolicy,
    UpdateOptions,
)
from agentlightning.policy.config import LocalPolicyConfig, ModelSettings
from agentlightning.policy.fsdp.learner import (
    FOLDER,
    Load,
    RankLearner,
    Ranks,
    Weights,
    check_complete,
    modules_by_owner,
)
from agentlightning.policy.local import RANK_STATE as STATE
from agentlightning.policy.local import LocalPolicy
from agentlightning.policy.model_loading import find_device
from agentlightning.trajectory import TokenTree, TrainingSample


class FsdpPolicy(SeparatePolicy, LocalPolicy):
    """Make it with `FsdpPolicy.open`."""

    group: RankGroup

    def __init__(self, config: LocalPolicyConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, model, tokenizer, make_updater=None)
        self._unpublished: list[str | None] = []
        """The names of what has been trained since the weights were published."""
        self._turn = asyncio.Lock()
        """Held while the ranks compute: some of that needs the worker thread, which in `save` waits for them."""

    @classmethod
    def open(cls, config: LocalPolicyConfig) -> FsdpPolicy:
        """Load the model, then start the ranks or wait for them. Raises as `LocalPolicy.open` and `RankGroup.open`."""
        policy = cast(FsdpPolicy, super().open(config))
        try:
            policy.group = RankGroup.open(config, lambda read: asyncio.run(policy._engine.run(read)))
        except BaseException:
            asyncio.run(LocalPolicy.close(policy))
            raise
        return policy

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, separate=True)

    # -- learning --------------------------------------------------------------------------------------------------

    async def train_apart(self, samples: Sequence[TrainingSample], options: UpdateOptions = UPDATE) -> Metrics:
        """See `SeparatePolicy.train_apart`. Raises RankError for a rank that ends or fails: the policy is of no
        more use then."""
        metrics, names = await self._call("train", list(samples), options)
        self._unpublished = list(dict.fromkeys([*self._unpublished, *names]))
        return metrics

    async def check_idle(self, in_flight: bool) -> None:
        """See `SeparatePolicy.check_idle`."""
        await self._engine.run(lambda: self._generator.check_idle(in_flight))

    async def publish_update(self, *, in_flight: bool = False) -> Metrics:
        """See `SeparatePolicy.publish_update`. Returns publish_bytes, of what has changed, and publish_seconds."""
        started, names = time.monotonic(), self._unpublished
        weights = await self._call("gather", names)
        await self._engine.run(lambda: self._publish(weights, names, in_flight))
        self._unpublished = []
        size = sum(each.nbytes for own in weights.values() for each in own.values())
        return {"publish_bytes": float(size), "publish_seconds": time.monotonic() - started}

    async def score(
        self,
        trees: Sequence[TokenTree],
        what: AbstractSet[ScoreColumn],
        *,
        reference: Path | None = None,
        adapter: str | None = None,
    ) -> Columns:
        """See `LocalPolicy.score`. Computed by the ranks, which read `reference` themselves."""
        return await self._call("score", list(trees), frozenset(what), reference and _absolute(reference), adapter)

    async def load(self, directory: Path, *, in_flight: bool = False, above: int = 0) -> None:
        """See `Policy.load`; saved by any number of ranks. Raises as `LocalPolicy.load`, and RankError."""
        path = _absolute(Path(directory))
        await self.check_idle(in_flight)
        state = await asyncio.to_thread(_state_in, path)
        names = await self._call("load_state", path / FOLDER)
        weights = await self._call("gather", names)
        await self._engine.run(lambda: self._resume(state, in_flight, above, lambda: self._copy(weights)))
        self._unpublished = []

    async def save(self, directory: Path, *, training_state: bool = False) -> None:
        async with self._turn:
            await super().save(directory, training_state=training_state)

    async def close(self) -> None:
        await asyncio.to_thread(self.group.close)
        await super().close()

    async def _call(self, name: str, *arguments: Any) -> Any:
        async with self._turn:
            return await asyncio.to_thread(self.group.call, name, *arguments)

    # -- in the worker thread --------------------------------------------------------------------------------------

    def _publish(self, weights: Weights, names: Sequence[str | None], in_flight: bool) -> None:
        self._prepare_weight_change(in_flight, names)
        self._copy(weights)
        self._set_version(self._version + 1, names)

    def _copy(self, weights: Weights) -> None:
        """Sample from new weights."""
        modules = modules_by_owner(self._learner)
        for owner, own in weights.items():
            modules[owner].load_state_dict(own, strict=False)

    def _save(self, directory: Path, training_state: bool) -> None:
        if self._unpublished:
            raise PolicyError("an update has been trained and not published; call publish_update before save")
        if not training_state:
            self._learner.save(directory, None)
            return
        state = self._own_state()

        def save_ranks(beside: Path) -> None:
            state[STATE] = self.group.call("save_state", beside / FOLDER)
            check_complete(beside / FOLDER)

        self._learner.save(directory.absolute(), state, save_ranks)


def _state_in(directory: Path) -> dict[str, Any]:
    """The training state in a checkpoint. Raises PolicyError for that of a local policy."""
    state = checkpoint.load_state(directory)
    if STATE not in state:
        raise PolicyError(
            f'{directory} was saved by policy.kind = "local"; continue with that, or start a new run from its weights'
            " with policy.model"
        )
    return state


def _absolute(path: Path) -> Path:
    """What ranks with another working directory can read."""
    return path.absolute()


# -- ranks -------------------------------------------------------------------------------------------------------------

# The processes that train together, called ranks. The trainer's process is rank 0, and the others follow it.
#
#     torchrun --nproc-per-node 4 -m -- agentlightning train ... policy.kind=fsdp policy.processes=4
#
# runs the same command as every rank, on one machine or several. Where torchrun has not started the trainer, it starts
# the others itself, on its own machine.
#
# Rank 0 sends each command, (method of `RankLearner`, arguments), to all ranks, which compute it together and tell one
# another how it went. It computes in a thread of its own: a collective that waits for a rank that is gone need not end.
# When a rank ends or fails alone, the group is over and the error names it. Commands are pickled: ranks trust one
# another.

logger = logging.getLogger(__name__)

STDERR = 2
IDLE = timedelta(days=365)
"""How long a rank waits for a command."""
POLL_SECONDS = 0.2
CLOSE_SECONDS = 5.0
"""How long a computation may take to end after a rank has."""
GRACE_SECONDS = 10.0
"""After a rank has failed: time for the others to fail alike."""
RESUME = "the run continues from its last checkpoint when it is resumed"
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
"""Variables that programs with torch which this one starts, such as model servers, must not inherit."""
OPEN = "open"
SETTINGS = "settings"
"""A file for ranks that the trainer has started."""

# -- rank ------------------------------------------------------------------------------------------------------------


class Rank:
    """This process among those that train. Each of them calls the same method at the same time."""

    learner: RankLearner | None = None

    def __init__(self, settings: ModelSettings, url: str, number: int, count: int) -> None:
        """Wait for the others. Raises ConfigError for a device that this machine has not."""
        device = _device(settings.device, int(os.environ.get("LOCAL_RANK", number)))
        backend = "gloo"
        if device.type != "cpu":
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        wait = timedelta(seconds=settings.rank_timeout_seconds)
        store, *_ = next(rendezvous(url, number, count, timeout=wait))
        store.set(f"rank/{number}", "")
        store.wait([f"rank/{each}" for each in range(count)], wait)  # Before torch begins what it cannot take back.
        hook = sys.excepthook
        dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=wait)
        sys.excepthook = hook  # That of torch puts the rank before each line of what the trainer says.
        mesh = init_device_mesh(device.type, (count,))
        groups: Any = [dist.new_group(backend="gloo", timeout=timeout) for timeout in (wait, IDLE)]
        self.ranks, self.commands = (Ranks(mesh, group, device) for group in groups)
        self.names = self.ranks.gather(_name(number, count, os.getpid()))

    def run(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """What a command gives here. Raises what all ranks raised alike, RankError where not all did, and foreign
        exceptions at once."""
        value = failure = None
        changed: list[str | None] = []
        try:
            if name == OPEN:
                (config,) = arguments
                torch.set_num_threads(config.threads)
                self.learner = None  # Frees its memory.
                self.learner = RankLearner(config, self.ranks)
            else:
                assert self.learner is not None
                changed = self.learner.changed
                changed.clear()
                value = getattr(self.learner, name)(*arguments)
        except AgentLightningError as error:
            failure = error
        alone = threading.Timer(GRACE_SECONDS, _end_process, (failure,))
        if failure is not None and self.ranks.rank:
            alone.start()
        said = self.commands.gather(failure and f"{type(failure).__name__}: {failure}")
        alone.cancel()
        if failure is not None and len(set(said)) == 1 and not changed:
            raise failure
        for rank, words in zip(self.names, said, strict=True):
            if words:
                raise RankError(f"{rank} failed during {name!r}: {words}")
        return value


def _name(number: int, count: int, pid: int) -> str:
    return f"rank {number} of {count} (process {pid} on {socket.gethostname()})"


def _device(name: str, local_rank: int) -> torch.device:
    found = find_device(name)
    if found.type == "cpu":
        return found
    count = torch.accelerator.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"rank {local_rank} of this machine has no device: {socket.gethostname()} has {count} of type {found.type};"
            " start at most one rank for each"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(found.type, local_rank)


def store_url(directory: str) -> str:
    """Where ranks that the trainer has started find one another."""
    return f"file://{directory}/store"


def follow(settings: ModelSettings, url: str = "env://") -> NoReturn:
    """Compute what rank 0 commands until it ends, and then end this process."""
    logging.getLogger("agentlightning").setLevel(logging.ERROR)  # Rank 0 says the rest.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        rank = Rank(settings, url, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # Rank 0 decides what is still computed.
        while (command := rank.commands.from_first(None)) is not None:
            with suppress(AgentLightningError):  # Rank 0 raises it.
                rank.run(*command)
    except Exception as error:  # noqa: BLE001
        _end_process(error)
    _end_process()


def _end_process(error: Exception | None = None) -> NoReturn:
    """At once, since threads of the process group may wait for ranks that have ended. Whoever has started this process
    reads the error."""
    if error is not None:
        get_error_handler().record_exception(error)
        logger.error("%s: %s", type(error).__name__, error)
    sys.stdout.flush()
    os._exit(error is not None)


# -- group -----------------------------------------------------------------------------------------------------------


class RankGroup:
    """The ranks as the trainer sees them. Make it with `RankGroup.open`. Calls block, from any thread."""

    rank: Rank
    _of_torchrun: ClassVar[RankGroup | None] = None
    """Trains one policy of this process after another."""

    def __init__(self, config: LocalPolicyConfig) -> None:
        """Start the other ranks, unless torchrun has, and wait for them. Raises ConfigError where torchrun has started
        another number, and RankError for one that ends or does not come."""
        started, count, url = os.environ.get("WORLD_SIZE"), config.processes, "env://"
        if started not in (None, str(count)):
            raise ConfigError(
                f"policy.processes={count}, and torchrun has started WORLD_SIZE={started}; make them equal"
            )
        self._over: str | None = None
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directory = TemporaryDirectory(prefix="agl-ranks-", ignore_cleanup_errors=True)
        self._works: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._compute, name="rank", daemon=True)
        if started is None:
            url = store_url(self._directory.name)
            Path(self._directory.name, SETTINGS).write_bytes(pickle.dumps(config))
            self._processes += [_start(self._directory.name, number, config) for number in range(1, count)]
        self._thread.start()
        try:
            self.rank = self._do("join", lambda: Rank(config, url, 0, count))
        except BaseException as error:
            self._end(str(error))
            raise
        if started is not None:
            RankGroup._of_torchrun = self
            atexit.register(self._end, "the process ends")
            for name in TORCHRUN:
                os.environ.pop(name, None)

    @classmethod
    def open(cls, config: LocalPolicyConfig, load: Load) -> RankGroup:
        """Ranks that have loaded the model. `load`: see `RankLearner`. Raises as `RankGroup` and `call` do."""
        group = cls._of_torchrun
        if dist.is_initialized() and (group is None or group.rank.learner is not None):
            raise ConfigError(
                'this process trains a policy of kind = "fsdp" already, or has a process group of its own; close it'
                " first"
            )
        group = group or cls(config)
        try:
            group.call(OPEN, config)
            assert group.rank.learner is not None
            group.rank.learner.load = load
        except BaseException:
            group.close()
            raise
        return group

    def call(self, name: str, *arguments: Any) -> Any:
        """What rank 0 has computed. Raises what all ranks raised alike, and RankError for one that ended or failed
        alone; the group is then over."""
        return self._do(name, lambda: self.rank.run(*self.rank.commands.from_first((name, arguments))))

    def close(self) -> None:
        """End the ranks. Those of torchrun wait for another policy, and end with this process. Idempotent."""
        self.rank.learner = None
        if self is not RankGroup._of_torchrun or self._lock.locked():
            self._end("the policy is closed; open it again")

    def _compute(self) -> None:
        """The thread."""
        while (work := self._works.get()) is not None:
            compute, answer = work
            try:
                answer.set_result(compute())
            except AgentLightningError as error:
                answer.set_exception(error)
            except Exception as error:  # noqa: BLE001
                answer.set_exception(RankError(f"rank 0 failed: {type(error).__name__}: {error}"))
        if dist.is_initialized():
            with suppress(RuntimeError, AttributeError):  # Of a rank that is gone, or never came.
                self.rank.commands.from_first(None)
            dist.destroy_process_group()

    def _do(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` gives while the other ranks do the same. Raises as `call`."""
        with self._lock:
            answer: Future[Any] = Future()
            self._works.put((work, answer))
            until = float("inf")
            while time.monotonic() < until:
                if self._over is not None:  # Before, or by `close` meanwhile.
                    raise RankError(self._over)
                if ended := self._ended():
                    raise self._end(f"{ended} during {name!r}; {RESUME}")
                if not wait([answer], POLL_SECONDS).done:
                    continue
                if not isinstance(answer.exception(), RankError):
                    return answer.result()
                until = min(until, time.monotonic() + CLOSE_SECONDS)  # Whether another one turns out to have ended.
                time.sleep(POLL_SECONDS)
            raise self._end(f"{answer.exception()}; {RESUME}")

    def _ended(self) -> str:
        """Which rank that this process has started has ended, and how; empty while all run. Of several the one that
        was killed, or whose error came first: the others lost their connection to it."""
        ended: list[tuple[bool, float, str]] = []
        for number, process in enumerate(self._processes, 1):
            status = process.poll()
            if status is not None:
                how = f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
                file, when, said = Path(self._directory.name, str(number)), math.inf, ""
                if file.exists():
                    when, said = file.stat().st_mtime, f" ({json.loads(file.read_bytes())['message']['message']})"
                ended.append((status >= 0, when, f"{_name(number, len(self._processes) + 1, process.pid)} {how}{said}"))
        return min(ended)[2] if ended else ""

    def _end(self, reason: str) -> RankError:
        """Let no rank go on alone."""
        self._over = self._over or reason
        for process in self._processes:
            with process:  # Closes its input, and waits.
                process.kill()
        self._directory.cleanup()  # Whoever waits for a rank in there ends.
        self._works.put(None)
        self._thread.join(CLOSE_SECONDS)
        return RankError(reason)


def _start(directory: str, number: int, config: LocalPolicyConfig) -> subprocess.Popen[bytes]:
    """A rank on this machine (`__main__`). In a session of its own, so that Ctrl-C reaches the trainer alone."""
    variables = {
        "OMP_NUM_THREADS": str(config.threads),
        **os.environ,
        "RANK": str(number),
        "WORLD_SIZE": str(config.processes),
        "TORCHELASTIC_ERROR_FILE": f"{directory}/{number}",
    }
    command = [sys.executable, "-m", "agentlightning.policy.fsdp", directory]
    return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=STDERR, start_new_session=True)
