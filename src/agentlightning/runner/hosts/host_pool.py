"""The pool of agent hosts of a runner: starts hosts, assigns attempts to them and replaces hosts that fail.

`spawn()` starts the fork server and returns immediately, so that the agent is imported while the caller does other
work; it needs no event loop. `run` executes one attempt on the least busy host. A host with an attempt that does not
end when stopped gets no new work; it is killed after its other attempts have ended, or immediately if its event loop
is blocked. When a host dies, the attempt that it ran fails; of several, nobody knows whose fault it was, and each is
repeated in a process of its own. Once an attempt touches what its process shares with others, such as the working
directory, every attempt gets a process to itself while it runs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.errors import AgentError, ConfigError
from agentlightning.resources import NamedResources, named_resources
from agentlightning.rollouts import AttemptedRollout
from agentlightning.runner.agents.command import describe_exit
from agentlightning.runner.agents.spec import AgentLike, agent_spec, function_spec
from agentlightning.runner.attempt_environ import check_variables
from agentlightning.runner.hosts.agent_log import CHECK_SECONDS, AgentLog
from agentlightning.runner.hosts.fork_server_process import ForkServerProcess
from agentlightning.runner.hosts.host_connection import HostConnection, LostAttemptError, NotStartedError, OnSpans
from agentlightning.runner.hosts.messages import Done, Exited, Job, Load, Loaded, LoadFailed

logger = logging.getLogger(__name__)

LOAD_SECONDS = 600.0
"""Time limit for importing the agent."""
MAX_FAILED_STARTS = 3
"""The pool gives up after this many consecutive hosts that died before they were ready."""


async def _trim_periodically(log: AgentLog) -> None:
    while True:
        await asyncio.to_thread(log.trim)
        await asyncio.sleep(CHECK_SECONDS)


class HostPool:
    """Processes that run one agent.

    `concurrency` attempts run at once, spread over `hosts` processes; with `fresh`, each attempt has its own process,
    whose main thread runs it and which exits with it. `env` maps environment variables to the fields of a dict task
    that they hold; the fields in `hide` are given to the reward function only, not to the agent. `cwd` is the working
    directory of the agent, `log` the file that its stdout and stderr are appended to (default: this process's stderr).
    A stopped attempt has `grace` seconds to end. `on_change` is called when capacity may have changed, `on_broken` when
    no host can be started.
    """

    def __init__(
        self,
        agent: AgentLike,
        *,
        reward: Callable[..., Any] | str | None = None,
        concurrency: int = 32,
        hosts: int = 1,
        fresh: bool = False,
        env: Mapping[str, str] | None = None,
        hide: Sequence[str] = (),
        cwd: str | Path | None = None,
        log: str | Path | None = None,
        grace: float = 2.0,
        on_change: Callable[[], None] | None = None,
        on_broken: Callable[[AgentError], None] | None = None,
    ) -> None:
        if fresh:
            hosts = 1
        if not 1 <= hosts <= concurrency:
            raise ConfigError(f"hosts={hosts}, concurrency={concurrency}: use 1 <= hosts <= concurrency")
        self.agent = agent_spec(agent)
        self.size = 0 if fresh else hosts
        self.concurrency = concurrency
        self.slots = math.ceil(concurrency / hosts)
        self.grace = grace
        self.fresh = fresh
        self.separate = False
        """Each attempt has a process to itself, because one of them has needed it."""
        self.crashes = 0
        """Number of hosts that exited unexpectedly."""
        self._on_change, self._on_broken = on_change, on_broken
        reward_spec = None if reward is None else function_spec(reward)
        fields = check_variables(env or {}, hide)
        self._fork_server = ForkServerProcess(
            Load(self.agent, reward_spec, (), self.slots, fields, tuple(hide), grace), cwd, log
        )
        self._loaded: asyncio.Future[None] | None = None
        self._hosts: dict[int, HostConnection] = {}
        self._forking: set[asyncio.Task[HostConnection]] = set()
        self._host_ids, self._job_ids = itertools.count(1), itertools.count(1)
        self._changed = asyncio.Event()
        self._failed_starts = 0
        self._trimming: asyncio.Task[None] | None = None
        self._closing = False
        self._broken: AgentError | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def spawn(self, variables: Mapping[str, str] | None = None) -> None:
        """Start importing the agent in another process; `variables` override this process's environment. Idempotent."""
        if not self._fork_server.spawned:
            self._fork_server.spawn(variables)

    async def start(self) -> None:
        """Wait until the agent is imported and a host is ready. Raises AgentError."""
        self.spawn()
        self._loaded = asyncio.get_running_loop().create_future()
        self._fork_server.attach(self._on_message, self._on_fork_server_lost)
        if self._fork_server.log is not None:
            self._trimming = asyncio.create_task(_trim_periodically(self._fork_server.log))
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await self._loaded
                for _ in range(self.size):
                    await self._fork()
                while self.capacity <= 0:
                    await self._changed.wait()
                    if self._broken is not None:
                        raise self._broken
        except TimeoutError:
            raise AgentError(f"agent {self.agent} was not imported within {LOAD_SECONDS:g} s") from None

    async def close(self) -> None:
        """End all processes. Idempotent."""
        self._closing = True
        for task in (*self._forking, *([self._trimming] if self._trimming else [])):
            task.cancel()
        for host in self._hosts.values():
            host.close()
        await self._fork_server.close()

    # -- work --------------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of attempts that can run at once at the moment."""
        hosts = self._hosts.values()
        if self.fresh or self.separate:
            return self.concurrency - sum(len(host.stopping) for host in hosts)
        return sum(max(0, self.slots - len(host.stopping)) for host in hosts if host.takes_work)

    async def run(
        self,
        rollout: AttemptedRollout,
        resources: NamedResources,
        server_url: str,
        environment: Mapping[str, str],
        on_spans: OnSpans,
        timeout: float | None = None,
        alone: bool = False,
    ) -> Done:
        """Run one attempt until it ends, in a process of its own if `alone`. Raises TimeoutError after `timeout`
        seconds, AgentCrashedError when its process exits, and LostAttemptError where that may be another's fault, or it
        needs a process of its own. Cancelling stops the attempt."""
        dumped = named_resources.dump_python(resources, mode="json")
        while True:
            job = Job(next(self._job_ids), rollout, dumped, server_url, dict(environment))
            once = alone or self.fresh
            host = await (self._single(once) if once or self.separate else self._least_busy())
            try:
                done = await self._run_on(host, job, on_spans, timeout)
            except NotStartedError:
                if self._broken is not None:
                    raise self._broken from None
                continue
            if not done.needs_process:
                return done
            self._separate(done.needs_process)
            raise LostAttemptError(f"the agent needs a process of its own ({done.needs_process})", alone=True)

    def _separate(self, what: str) -> None:
        """From now on, each attempt has a process of its own, though another one may use it afterwards."""
        if self.fresh or self.separate:
            return
        logger.warning(
            "agent %s changes what all attempts in its process share (%s): from now on, each attempt runs in a process"
            " of its own, and those that this interrupts are repeated; fresh_process=True (--fresh-process) starts so",
            *(self.agent, what),
        )
        self.separate = True
        for host in list(self._hosts.values()):
            host.retired = host.retired or not host.single
            self._kill_if_idle(host)

    async def _run_on(self, host: HostConnection, job: Job, on_spans: OnSpans, timeout: float | None) -> Done:
        done = host.start(job, on_spans)
        try:
            async with asyncio.timeout(timeout):
                return await done
        except (TimeoutError, asyncio.CancelledError):
            self._stop(host, job.job_id)
            raise
        finally:
            del host.running[job.job_id]
            self._kill_if_idle(host)
            self._close_if_used(host)

    def _close_if_used(self, host: HostConnection) -> None:
        """Close the process of a single attempt that has ended."""
        if host.once and host.used and not (host.load or host.retired or host.exited or self._closing):
            host.retired = True
            host.close()

    async def _least_busy(self) -> HostConnection:
        while True:
            hosts = [host for host in self._hosts.values() if host.takes_work and host.load < self.slots]
            if hosts:
                return min(hosts, key=lambda host: host.load)
            await self._changed.wait()

    def _stop(self, host: HostConnection, job_id: int) -> None:
        if host.exited is None and not self._closing:
            host.stop(job_id)
            asyncio.get_running_loop().call_later(self.grace + 0.5, self._kill_if_still_running, host, job_id)

    def _kill_if_still_running(self, host: HostConnection, job_id: int) -> None:
        """Retire a host whose stopped job still runs after the grace. If its event loop is blocked, its other attempts
        cannot end either: kill it immediately."""
        if job_id not in host.stopping or host.exited is not None or host.retired or self._closing:
            return
        host.retired = True
        if host.unacknowledged:
            host.blocked = True
            host.killed = "was killed: another attempt blocked its event loop and did not end at its timeout"
        self._replace(host)
        self._kill_if_idle(host)

    def _kill_if_idle(self, host: HostConnection) -> None:
        idle = not host.running or host.killed is not None
        if host.retired and idle and host.exited is None and not self._closing:
            self._fork_server.kill(host.host_id)

    # -- hosts -------------------------------------------------------------------------------------------------------

    def _replace(self, host: HostConnection) -> None:
        """Fork another shared host; single ones are forked when they are needed."""
        if host.single or self.separate:
            return
        task = asyncio.get_running_loop().create_task(self._fork())
        self._forking.add(task)
        task.add_done_callback(self._forked)

    def _forked(self, task: asyncio.Task[HostConnection]) -> None:
        self._forking.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mark_broken(f"no process can be started for agent {self.agent}: {error}")

    async def _single(self, once: bool) -> HostConnection:
        """A host for one attempt: an idle one, if it is not to be for this one only."""
        for host in self._hosts.values() if not once else ():
            gone = host.once or host.retired or host.broken or host.exited is not None
            if host.single and host.used and not host.load and not gone:
                return host
        host = await self._fork(single=True)
        host.once = once
        return host

    async def _fork(self, single: bool = False) -> HostConnection:
        host = HostConnection(next(self._host_ids), self._notify_change, single)
        self._hosts[host.host_id] = host
        sock = self._fork_server.fork(host.host_id, single)
        await asyncio.get_running_loop().create_unix_connection(lambda: host, sock=sock)
        return host

    def _notify_change(self) -> None:
        for host in [host for host in self._hosts.values() if host.broken and host.exited is None]:
            self._fork_server.kill(host.host_id)
        for host in list(self._hosts.values()):
            self._close_if_used(host)
        self._changed.set()
        self._changed.clear()
        if self._on_change is not None:
            self._on_change()

    def _on_message(self, message: Loaded | LoadFailed | Exited) -> None:
        if isinstance(message, Exited):
            self._on_exit(message)
        elif self._loaded is not None and not self._loaded.done():
            if isinstance(message, Loaded):
                self._loaded.set_result(None)
            else:
                self._loaded.set_exception(AgentError(message.message))

    def _on_exit(self, exited: Exited) -> None:
        host = self._hosts.pop(exited.host_id)
        host.on_exit(exited)
        self._notify_change()
        if self._closing or host.retired:
            return
        self.crashes += 1
        self._failed_starts = 0 if host.ready else self._failed_starts + 1
        if self._failed_starts < MAX_FAILED_STARTS:
            self._replace(host)
        else:
            how = describe_exit(exited.status)
            self._mark_broken(
                f"the processes that run agent {self.agent} end as soon as they start; the last one {how}"
                f"\n{exited.traceback}"
            )

    def _on_fork_server_lost(self) -> None:
        if self._closing:
            return
        code = self._fork_server.returncode()
        exited = Exited(0, -9 if code is None else code, "")
        if self._loaded is not None and not self._loaded.done():
            how = describe_exit(exited.status)
            text = (
                f"the process that imports agent {self.agent} {how} before it was done; "
                f"what it printed is {self._fork_server.output}"
            )
            self._loaded.set_exception(AgentError(text))
            return
        for host in self._hosts.values():
            host.on_exit(exited)
        how = describe_exit(exited.status)
        self._mark_broken(f"the process that starts the processes of agent {self.agent} {how}")

    def _mark_broken(self, why: str) -> None:
        self._broken = AgentError(why)
        self._notify_change()
        if self._on_broken is not None:
            self._on_broken(self._broken)
