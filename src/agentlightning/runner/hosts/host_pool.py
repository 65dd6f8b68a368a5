"""The runner's agent hosts: how many there are, which attempt goes where, and what becomes of them.

`spawn()` starts the zygote and returns at once, so that an agent is imported while its caller does other work; it
needs no event loop. `run` executes one attempt on the least busy host. A host whose attempt does not end when it is
stopped gets no new work and is killed once its other attempts have ended, or at once where its event loop is blocked;
one that dies fails its attempts. Either is replaced at once.
"""

from __future__ import annotations

import asyncio
import itertools
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
from agentlightning.runner.hosts.agent_log import LOOK_SECONDS, AgentLog
from agentlightning.runner.hosts.fork_server_process import ZygoteProcess
from agentlightning.runner.hosts.host_connection import HostLink, NotStartedError, OnSpans
from agentlightning.runner.hosts.messages import Done, Exited, Job, Load, Loaded, LoadFailed

LOAD_SECONDS = 600.0
"""An agent whose import takes longer is taken to hang."""
STILLBORN = 3
"""After so many hosts in a row that died before they were ready, a new one does not mend what is wrong."""


async def _keep_short(log: AgentLog) -> None:
    while True:
        await asyncio.to_thread(log.trim)
        await asyncio.sleep(LOOK_SECONDS)


class HostPool:
    """Processes that run one agent.

    `concurrency` attempts run at once, spread over `hosts` processes; with `fresh`, each in a process of its own
    that ends with it. `env` maps environment variables to the fields of a dict task they hold; the fields in `hide`
    are kept from the agent, and only the reward function is given them. `cwd` is where the agent runs, `log` the
    file its stdout and stderr are appended to (default: this process's stderr). `grace` is the seconds a stopped
    attempt has to end by itself. `on_change` is told whenever there may be more room, `on_broken` when there will
    never be any again.
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
            hosts = concurrency
        if not 1 <= hosts <= concurrency:
            raise ConfigError(f"hosts={hosts}, concurrency={concurrency}: use 1 <= hosts <= concurrency")
        self.agent = agent_spec(agent)
        self.size = hosts
        self.slots = math.ceil(concurrency / hosts)
        self.grace = grace
        self.fresh = fresh
        self.crashes = 0
        """Hosts that ended by themselves."""
        self._on_change, self._on_broken = on_change, on_broken
        judge = None if reward is None else function_spec(reward)
        fields = check_variables(env or {}, hide)
        self._zygote = ZygoteProcess(Load(self.agent, judge, (), self.slots, fields, tuple(hide), grace), cwd, log)
        self._loaded: asyncio.Future[None] | None = None
        self._hosts: dict[int, HostLink] = {}
        self._forking: set[asyncio.Task[None]] = set()
        self._host_ids, self._job_ids = itertools.count(1), itertools.count(1)
        self._changed = asyncio.Event()
        self._stillborn = 0
        self._trimming: asyncio.Task[None] | None = None
        self._closing = False
        self._broken: AgentError | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def spawn(self, variables: Mapping[str, str] | None = None) -> None:
        """Begin to import the agent, in another process, with `variables` over this one's own. Safe to call twice."""
        if not self._zygote.spawned:
            self._zygote.spawn(variables)

    async def start(self) -> None:
        """Wait until the agent is imported and a host is ready. Raises AgentError."""
        self.spawn()
        self._loaded = asyncio.get_running_loop().create_future()
        self._zygote.attach(self._hear, self._lost)
        if self._zygote.log is not None:
            self._trimming = asyncio.create_task(_keep_short(self._zygote.log))
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await self._loaded
                for _ in range(self.size):
                    await self._fork()
                while not self.capacity:
                    await self._changed.wait()
                    if self._broken is not None:
                        raise self._broken
        except TimeoutError:
            raise AgentError(f"agent {self.agent} was not imported within {LOAD_SECONDS:g} s") from None

    async def close(self) -> None:
        """End every process. Safe to call twice."""
        self._closing = True
        for task in (*self._forking, *([self._trimming] if self._trimming else [])):
            task.cancel()
        for host in self._hosts.values():
            host.close()
        await self._zygote.close()

    # -- work --------------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """How many attempts may run at once, now."""
        return sum(max(0, self.slots - len(host.stopping)) for host in self._hosts.values() if host.takes_work)

    async def run(
        self,
        rollout: AttemptedRollout,
        resources: NamedResources,
        server_url: str,
        environment: Mapping[str, str],
        on_spans: OnSpans,
        timeout: float | None = None,
    ) -> Done:
        """Run one attempt to its end. Raises TimeoutError after `timeout` seconds, AgentCrashedError when its process
        ends. Cancelling stops the attempt."""
        given = named_resources.dump_python(resources, mode="json")
        while True:
            job = Job(next(self._job_ids), rollout, given, server_url, dict(environment))
            try:
                return await self._run_on(await self._least_busy(), job, on_spans, timeout)
            except NotStartedError:
                continue

    async def _run_on(self, host: HostLink, job: Job, on_spans: OnSpans, timeout: float | None) -> Done:
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
            self._retire_if_used(host)

    def _retire_if_used(self, host: HostLink) -> None:
        """Where every attempt has a fresh process, the one of an attempt that has ended goes too."""
        if not self.fresh or not host.used or host.load or host.retired or host.exited is not None or self._closing:
            return
        host.retired = True
        self._replace()
        host.close()

    async def _least_busy(self) -> HostLink:
        while True:
            hosts = [host for host in self._hosts.values() if host.takes_work and host.load < self.slots]
            if hosts:
                return min(hosts, key=lambda host: host.load)
            await self._changed.wait()

    def _stop(self, host: HostLink, job_id: int) -> None:
        if host.exited is None and not self._closing:
            host.stop(job_id)
            asyncio.get_running_loop().call_later(self.grace + 0.5, self._insist, host, job_id)

    def _insist(self, host: HostLink, job_id: int) -> None:
        """A job that is still there hangs: its host is of no use any more. One whose event loop hangs will not end
        its other attempts either."""
        if job_id not in host.stopping or host.exited is not None or host.retired or self._closing:
            return
        host.retired = True
        if host.unheard:
            host.killed = "was killed: another attempt blocked its event loop and did not end at its timeout"
        self._replace()
        self._kill_if_idle(host)

    def _kill_if_idle(self, host: HostLink) -> None:
        idle = not host.running or host.killed is not None
        if host.retired and idle and host.exited is None and not self._closing:
            self._zygote.kill(host.host_id)

    # -- hosts -------------------------------------------------------------------------------------------------------

    def _replace(self) -> None:
        task = asyncio.get_running_loop().create_task(self._fork())
        self._forking.add(task)
        task.add_done_callback(self._forked)

    def _forked(self, task: asyncio.Task[None]) -> None:
        self._forking.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(f"no process can be started for agent {self.agent}: {error}")

    async def _fork(self) -> None:
        host = HostLink(next(self._host_ids), self._change)
        self._hosts[host.host_id] = host
        sock = self._zygote.fork(host.host_id)
        await asyncio.get_running_loop().create_unix_connection(lambda: host, sock=sock)

    def _change(self) -> None:
        for host in [host for host in self._hosts.values() if host.broken and host.exited is None]:
            self._zygote.kill(host.host_id)
        for host in [host for host in self._hosts.values() if self.fresh and host.used]:
            self._retire_if_used(host)
        self._changed.set()
        self._changed.clear()
        if self._on_change is not None:
            self._on_change()

    def _hear(self, message: Loaded | LoadFailed | Exited) -> None:
        if isinstance(message, Exited):
            self._buried(message)
        elif self._loaded is not None and not self._loaded.done():
            if isinstance(message, Loaded):
                self._loaded.set_result(None)
            else:
                self._loaded.set_exception(AgentError(message.message))

    def _buried(self, exited: Exited) -> None:
        host = self._hosts.pop(exited.host_id)
        host.has_exited(exited)
        if self._closing or host.retired:
            return
        self.crashes += 1
        self._stillborn = 0 if host.ready else self._stillborn + 1
        if self._stillborn < STILLBORN:
            self._replace()
        else:
            how = describe_exit(exited.status)
            self._break(
                f"the processes that run agent {self.agent} end as soon as they start; the last one {how}"
                f"\n{exited.traceback}"
            )

    def _lost(self) -> None:
        if self._closing:
            return
        code = self._zygote.returncode()
        exited = Exited(0, -9 if code is None else code, "")
        if self._loaded is not None and not self._loaded.done():
            how = describe_exit(exited.status)
            text = (
                f"the process that imports agent {self.agent} {how} before it was done; "
                f"what it printed is {self._zygote.output}"
            )
            self._loaded.set_exception(AgentError(text))
            return
        for host in self._hosts.values():
            host.has_exited(exited)
        how = describe_exit(exited.status)
        self._break(f"the process that starts the processes of agent {self.agent} {how}")

    def _break(self, why: str) -> None:
        self._broken = AgentError(why)
        self._change()
        if self._on_broken is not None:
            self._on_broken(self._broken)
