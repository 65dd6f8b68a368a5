"""The Job of an attempt, made from a template: the user's Job with its image, resources, node selector and secrets.

The attempt's variables and the command are added to the container `agent`, or to the only one. Retries are the store's:
a Job has one pod, which runs once.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import orjson
import yaml

from agentlightning.errors import ConfigError
from agentlightning.rollouts import AttemptedRollout
from agentlightning.runner.agents.agent import JobTemplate

DEFAULT_DEADLINE_SECONDS: Final = 86_400
"""When Kubernetes stops a Job without any other limit: one whose runner is gone must end."""
FIXED: Final = {"backoffLimit": 0, "completions": 1, "parallelism": 1}
FIXED_POD: Final = {"restartPolicy": "Never"}
"""Fields of a Job, and of its pod, that retries and results depend on."""
AGENT: Final = "agent"
PREFIX: Final = "agentlightning"


def read_template(path: Path, words: Sequence[str], api: str | None, start_seconds: float) -> JobTemplate:
    """The template in a YAML or JSON file. `words` are the command; empty, the image's own. Raises ConfigError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"the Job in {path} cannot be read: {error.strerror}") from error
    kind, parse = ("JSON", orjson.loads) if path.suffix == ".json" else ("YAML", yaml.safe_load)
    try:
        manifest = parse(text)
    except (orjson.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not valid {kind}: {error}") from error
    return JobTemplate(orjson.dumps(checked_template(manifest, str(path))), tuple(words), api, start_seconds)


def checked_template(given: Any, source: str) -> dict[str, Any]:
    """The Job without its nulls, which stand for what is left out. Raises ConfigError for what is no Job, or a Job
    whose result would not be that of one run."""
    manifest = _without_nulls(given)
    try:
        if not isinstance(manifest, dict) or (manifest.get("apiVersion"), manifest.get("kind")) != ("batch/v1", "Job"):
            raise ConfigError(f"{source} has no Job; write apiVersion: batch/v1, kind: Job")
        spec = manifest.get("spec", {})
        pod = spec.get("template", {}).get("spec", {})
        for fields, fixed in ((spec, FIXED), (pod, FIXED_POD)):
            for name, value in fixed.items():
                if fields.get(name, value) != value:
                    raise ConfigError(
                        f"{source}: {name}={fields[name]}; it is {value}, retries are those of the rollout"
                    )
        names = [each.get("name") for each in pod.get("containers", [])]
        if not names or not all(names) or (len(names) > 1 and AGENT not in names):
            raise ConfigError(f"{source} has {len(names)} containers; name the one of the agent {AGENT!r}")
    except (AttributeError, TypeError) as error:
        raise ConfigError(
            f"{source} is no Job of Kubernetes: {error}; `kubectl explain job` says what it has"
        ) from error
    return manifest


TEXTS: Final = ("annotations", "labels", "matchLabels", "nodeSelector")
"""Fields of texts by names of the user's own, where null is an empty text."""


def _without_nulls(value: Any, null: str | None = None) -> Any:
    if isinstance(value, dict):
        given = cast(dict[str, Any], value)
        filled = {name: null if each is None else each for name, each in given.items()}
        return {
            name: _without_nulls(each, "" if name in TEXTS else None)
            for name, each in filled.items()
            if each is not None
        }
    return [_without_nulls(each) for each in cast(list[Any], value)] if isinstance(value, list) else value


def agent_container(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The container that runs the agent."""
    containers = cast(list[dict[str, Any]], manifest["spec"]["template"]["spec"]["containers"])
    return next((each for each in containers if each.get("name") == AGENT), containers[0])


def job_name(attempt_id: str) -> str:
    """A name of at most 63 characters that Kubernetes accepts; the same for the same attempt."""
    return "agl-" + re.sub(r"[^a-z0-9-]+", "-", attempt_id.lower())[-59:].strip("-")


def attempt_job(
    manifest: Mapping[str, Any],
    template: JobTemplate,
    rollout: AttemptedRollout,
    *,
    labels: Mapping[str, str],
    variables: Mapping[str, str],
    owner: tuple[str, str] | None,
) -> dict[str, Any]:
    """The Job of one attempt. `owner` are name and uid of the pod of the runner, with which the Job is deleted."""
    job = cast(dict[str, Any], copy.deepcopy(manifest))
    spec, pod = job["spec"], job["spec"]["template"]
    attempt_id = rollout.attempt.attempt_id
    ids = {f"{PREFIX}/rollout": rollout.rollout_id, f"{PREFIX}/attempt": attempt_id}
    metadata = job.setdefault("metadata", {})
    metadata["name"] = job_name(attempt_id)
    metadata.pop("generateName", None)
    for each in (metadata, pod.setdefault("metadata", {})):
        each["labels"] = {**each.get("labels", {}), "app.kubernetes.io/managed-by": PREFIX, **labels}
        each["annotations"] = {**each.get("annotations", {}), **ids}
    if owner is not None:
        reference = {"apiVersion": "v1", "kind": "Pod", "name": owner[0], "uid": owner[1]}
        metadata["ownerReferences"] = [reference]
    spec.update(FIXED)
    spec["activeDeadlineSeconds"] = _deadline(spec, rollout.config.timeout_seconds, template.start_seconds)
    pod["spec"].update(FIXED_POD)
    container = agent_container(job)
    given = [each for each in container.get("env", []) if each["name"] not in variables]
    # Kubernetes expands $(NAME) in values, secrets included, and makes $$ a $.
    own = ({"name": name, "value": value.replace("$", "$$")} for name, value in variables.items())
    container["env"] = [*given, *own]
    if template.words:
        container["command"] = list(template.words)
        container.pop("args", None)
    return job


def _deadline(spec: Mapping[str, Any], timeout_seconds: float | None, start_seconds: float) -> int:
    own = None if timeout_seconds is None else math.ceil(timeout_seconds + start_seconds) + 60
    limits = spec.get("activeDeadlineSeconds"), own
    return min((limit for limit in limits if limit is not None), default=DEFAULT_DEADLINE_SECONDS)
