"""An agent whose attempts are Kubernetes Jobs.

The attempt succeeds when its Job completes; its output is the end of the container's log. It fails with

- JobError if the container ends with another exit code than 0, or the API server rejects the Job;
- JobNotStartedError if the container does not run within `start_seconds`: no room, image, Secret or quota;
- JobLostError if the pod is gone: its node disappeared or was drained, or somebody deleted the Job.

The store repeats it like every failed attempt, up to the rollout's `max_attempts`. However an attempt ends, its Job is
deleted, unless the template has `ttlSecondsAfterFinished`. A Job also ends at its deadline, and with the pod of its
runner, whose name and uid are in AGL_POD_NAME and AGL_POD_UID; a runner that starts again in its pod deletes those of
before.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Final

import orjson

from agentlightning.errors import AgentError, ConfigError
from agentlightning.runner.agents.agent import JobTemplate
from agentlightning.runner.agents.arguments import Invocation
from agentlightning.runner.agents.command import OUTPUT_BYTES, task_variable
from agentlightning_kubernetes.api import KubernetesApi, KubernetesError
from agentlightning_kubernetes.manifest import PREFIX, agent_container, attempt_job, checked_template, read_template

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0
JOB_LABEL: Final = "batch.kubernetes.io/job-name"
HOST, POD, RUNNER = (f"{PREFIX}/{label}" for label in ("host", "pod", "runner"))
"""Labels: the process that made a Job, its pod, and its runner, which has several processes."""
Pod = Mapping[str, Any] | None
JobState = tuple[Mapping[str, Any] | None, Pod]
"""What the API server said of a Job and of its pod; None: it has none."""


class JobStates:
    """The state of the Jobs whose label HOST is `host`. They are listed, with their pods, once in POLL_SECONDS, however
    many threads ask."""

    def __init__(self, api: KubernetesApi, host: str) -> None:
        self.api, self.host = api, host
        self._lock = threading.Lock()
        self._asked = self._listed = -math.inf
        """When the last list was requested, and when the last one that came."""
        self._jobs: dict[str, Mapping[str, Any]] = {}
        self._pods: dict[str, Mapping[str, Any]] = {}
        self._failing = False

    def of(self, name: str, since: float) -> JobState | None:
        """The state of a Job that exists since this time of the monotonic clock; None: it was not listed since."""
        if time.monotonic() >= self._asked + POLL_SECONDS and self._lock.acquire(blocking=False):
            try:
                self._list()
                self._failing = False
            except KubernetesError as error:
                if not self._failing:
                    logger.warning("the state of Jobs is unknown, asking again: %s", error)
                self._failing = True
            finally:
                self._lock.release()
        return (self._jobs.get(name), self._pods.get(name)) if self._listed > since else None

    def _list(self) -> None:
        began = self._asked = time.monotonic()
        jobs, pods = (self.api.list(kind, f"{HOST}={self.host}") for kind in ("jobs", "pods"))
        pods = sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])
        self._jobs = {job["metadata"]["name"]: job for job in jobs}
        self._pods = {pod["metadata"]["labels"].get(JOB_LABEL): pod for pod in pods}
        self._listed = began


KILL_SECONDS: Final = 2.0
"""How long the deletion of a Job is tried when the process is about to end."""
LOST: Final = "DisruptionTarget"
"""The condition of a pod that Kubernetes ends: its node is gone or drained, or other pods go first."""


class JobError(AgentError):
    """The Job of an attempt failed."""


class JobNotStartedError(JobError):
    """The container of a Job did not start in time."""


class JobLostError(JobError):
    """The pod of a Job is gone before it ended."""


class JobAgent:
    """The agent. It is made in the fork server; what needs threads and connections is made in each host."""

    template = staticmethod(read_template)

    def __init__(self, template: JobTemplate) -> None:
        self._template = template
        try:
            self._manifest = checked_template(orjson.loads(template.manifest), "the manifest")
        except (ConfigError, ValueError) as error:
            raise AgentError(f"agent {template}: {error}") from error
        self._runner = secrets.token_hex(8)
        self._lock = threading.Lock()
        name, uid = os.environ.get("AGL_POD_NAME"), os.environ.get("AGL_POD_UID")
        self._owner = (name, uid) if name and uid else None

    def __call__(self, invocation: Invocation) -> Callable[[], str]:
        return partial(self.start, invocation)

    def start(self, invocation: Invocation) -> str:
        """Run the Job of an attempt and return its output. Raises JobError."""
        with self._lock:
            states = self._states
        task = task_variable(invocation.task)
        if not task:
            raise JobError("the task is too long for a variable of a container; give a reference to where it is stored")
        job = attempt_job(
            self._manifest,
            self._template,
            invocation.rollout,
            labels={RUNNER: self._runner, HOST: states.host, **({POD: self._owner[1]} if self._owner else {})},
            variables={**invocation.environment, **task},
            owner=self._owner,
        )
        running = invocation.program = RunningJob(states, job, self._template.start_seconds)
        if invocation.cancelled:  # cancelled before there was a Job
            running.terminate()
        return running.run()

    @cached_property
    def _states(self) -> JobStates:
        api = KubernetesApi(self._template.api, self._manifest.get("metadata", {}).get("namespace"))
        if self._owner is not None:
            self._delete_earlier(api, self._owner[1])
        return JobStates(api, secrets.token_hex(8))

    def _delete_earlier(self, api: KubernetesApi, pod: str) -> None:
        """Delete the Jobs of a runner that ran in this pod before and was killed."""
        try:
            left = api.list("jobs", f"{POD}={pod},{RUNNER}!={self._runner}")
            for job in left:
                api.delete_job(job["metadata"]["name"])
            if left:
                logger.warning("deleted %d Jobs of an earlier runner in this pod", len(left))
        except KubernetesError as error:
            logger.warning("Jobs of an earlier runner in this pod may still run: %s", error)


class RunningJob:
    """The Job of one attempt; `Stoppable`."""

    def __init__(self, states: JobStates, job: Mapping[str, Any], start_seconds: float) -> None:
        self._api, self._states, self._job = states.api, states, job
        self._name: str = job["metadata"]["name"]
        self._container: str = agent_container(job)["name"]
        self._start_seconds, self._since = start_seconds, time.monotonic()
        self._stopped = threading.Event()

    def terminate(self) -> None:
        """Make `run` delete the Job and end. Returns immediately."""
        self._stopped.set()

    def kill(self) -> None:
        """Delete the Job now."""
        try:
            self._api.delete_job(self._name, KILL_SECONDS)
        except KubernetesError as error:
            logger.warning("the Job %s may run until its deadline: %s", self._name, error)

    def run(self) -> str:
        """Create the Job, wait for its end, and delete it. Its output. Raises JobError."""
        try:
            self._create()
            return self._log(self._wait())[-OUTPUT_BYTES:]
        finally:
            if self._stopped.is_set() or "ttlSecondsAfterFinished" not in self._job["spec"]:
                self.kill()

    def _create(self) -> None:
        while not self._stopped.is_set():
            try:
                return self._api.create_job(self._job)
            except KubernetesError as error:
                if not error.may_pass:
                    raise JobError(f"the API server rejects the Job {self._name}: {error}") from None
                self._raise_if_late(str(error))
            self._stopped.wait(POLL_SECONDS)
        raise JobError(f"the Job {self._name} was stopped")

    def _wait(self) -> Pod:
        """The pod, once it has completed."""
        since, has_started = time.monotonic(), False
        while not self._stopped.wait(POLL_SECONDS):
            if (state := self._states.of(self._name, since)) is None:
                continue
            job, pod = state
            if job is None:
                raise JobLostError(f"the Job {self._name} is gone; somebody has deleted it")
            conditions = _conditions(job)
            if "Complete" in conditions:
                return pod
            self._raise_if_lost(pod, has_started)
            if "Failed" in conditions:
                raise self._failure(pod, conditions["Failed"])
            states = [each.get("state", {"waiting": {}}) for each in _statuses(pod)]
            has_started |= any("waiting" not in each for each in states)
            if not has_started:
                self._raise_if_late(_why_not_started(pod))
        raise JobError(f"the Job {self._name} was stopped")

    def _raise_if_late(self, why: str) -> None:
        if time.monotonic() - self._since > self._start_seconds:
            raise JobNotStartedError(f"the Job {self._name} did not start within {self._start_seconds:g} s: {why}")

    def _raise_if_lost(self, pod: Pod, has_started: bool) -> None:
        if pod is None:
            if has_started:
                raise JobLostError(f"the pod of the Job {self._name} is gone")
            return
        disrupted = _conditions(pod).get(LOST)
        if disrupted is not None or pod["metadata"].get("deletionTimestamp") is not None:
            why = (disrupted or {}).get("message") or "it is being deleted"
            raise JobLostError(
                f"the pod of the Job {self._name} on {pod['spec'].get('nodeName', 'no node')} is gone: {why}"
            )

    def _failure(self, pod: Pod, condition: Mapping[str, Any]) -> JobError:
        states = [each.get("state", {}) for each in _statuses(pod) if each["name"] == self._container]
        ended = states[0].get("terminated") if states else None
        if ended is None:
            return JobError(f"the Job {self._name} failed: {condition.get('reason')}: {condition.get('message')}")
        memory = " (out of memory)" if ended.get("reason") == "OOMKilled" else ""
        error = JobError(f"the container of the Job {self._name} ended with exit code {ended['exitCode']}{memory}")
        if log := self._log(pod)[-64_000:]:
            error.add_note(f"log:\n{log}")
        return error

    def _log(self, pod: Pod) -> str:
        if pod is None:
            logger.warning("the Job %s has no pod any more, whose log would be its output", self._name)
            return ""
        try:
            return self._api.log(pod["metadata"]["name"], self._container)
        except KubernetesError as error:
            logger.warning("the log of the Job %s, its output, cannot be read: %s", self._name, error)
            return ""


def _conditions(thing: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The conditions that are true, by type."""
    found = thing.get("status", {}).get("conditions") or []
    return {each["type"]: each for each in found if each["status"] == "True"}


def _statuses(pod: Pod) -> list[Mapping[str, Any]]:
    return (pod or {}).get("status", {}).get("containerStatuses") or []


def _why_not_started(pod: Pod) -> str:
    """What the cluster says of a pod that does not run."""
    if pod is None:
        return "no pod was made for it; `kubectl describe job` says why, as a quota that is used up"
    for status in _statuses(pod):
        waiting = status.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}"
    found = pod.get("status", {}).get("conditions") or []
    blocked = [each for each in found if each["type"] == "PodScheduled" and each["status"] == "False"]
    return f"{blocked[0].get('reason')}: {blocked[0].get('message')}" if blocked else "its container is being created"
