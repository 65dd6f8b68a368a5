"""The state of all Jobs of this process: one thread lists them and their pods, however many there are."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.runner.jobs.api import KubernetesApi, KubernetesError

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0
JOB_LABEL: Final = "batch.kubernetes.io/job-name"


@dataclass(frozen=True, slots=True)
class JobState:
    """What the API server said about a Job; `job` is None if it has no such Job."""

    job: Mapping[str, Any] | None
    pod: Mapping[str, Any] | None


class JobWatcher:
    """Lists the Jobs with the labels `selector` once in POLL_SECONDS while some are watched."""

    def __init__(self, api: KubernetesApi, selector: str) -> None:
        self._api, self._selector = api, selector
        self._changed = threading.Condition()
        self._watched: dict[str, JobState | None] = {}
        self._listing = False

    def watch(self, name: str) -> None:
        """Begin to watch a Job that exists."""
        with self._changed:
            self._watched[name] = None
            if not self._listing:
                self._listing = True
                threading.Thread(target=self._list_on_and_on, name="agl-jobs", daemon=True).start()

    def forget(self, name: str) -> None:
        with self._changed:
            self._watched.pop(name, None)

    def wait(self, name: str, last: JobState | None, seconds: float) -> JobState | None:
        """Wait until there is another state than `last`, for at most `seconds`; the state, if there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._watched.get(name) is not last, seconds)
            return self._watched.get(name)

    def wake(self) -> None:
        """End all `wait`s."""
        with self._changed:
            self._changed.notify_all()

    def _list_on_and_on(self) -> None:
        failing = False
        while True:
            with self._changed:
                names = list(self._watched)  # before the list is requested: these exist
                if not names:
                    self._listing = False
                    return
            try:
                states = self._states(names)
                failing = False
            except KubernetesError as error:
                if not failing:
                    logger.warning("the state of %d Jobs is unknown, asking again: %s", len(names), error)
                failing = True
            else:
                with self._changed:
                    self._watched.update({name: state for name, state in states.items() if name in self._watched})
                    self._changed.notify_all()
            time.sleep(POLL_SECONDS)

    def _states(self, names: list[str]) -> dict[str, JobState]:
        jobs = {job["metadata"]["name"]: job for job in self._api.list_jobs(self._selector)}
        pods = sorted(self._api.list_pods(self._selector), key=lambda pod: pod["metadata"]["creationTimestamp"])
        latest = {pod["metadata"]["labels"].get(JOB_LABEL): pod for pod in pods}
        return {name: JobState(jobs.get(name), latest.get(name)) for name in names}
