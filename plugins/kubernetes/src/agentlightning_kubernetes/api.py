"""The calls of the Kubernetes API that Jobs need: create, list, delete, read a log.

These few calls are plain HTTP; the official client would be forty times the code of this package. In a pod it uses the
pod's service account, whose token is read anew for each request, because Kubernetes replaces it. Elsewhere give the URL
of `kubectl proxy`, which has the credentials of the user.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

import httpx

from agentlightning.errors import ConfigError

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_SECONDS: Final = 15.0
PATIENCE_SECONDS: Final = 60.0
"""How long a request is repeated while the API server is unreachable or overloaded."""
MAX_LOG_LINES: Final = 10_000


class KubernetesError(Exception):
    """A response of the API server that is an error. `status` is 0 if it did not respond."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later: overload, an outage, or a quota that is used up."""
        return self.status in (0, 429) or self.status >= 500 or "exceeded quota" in str(self)


class KubernetesApi:
    """The Jobs and pods of one namespace. Safe to use from several threads."""

    def __init__(self, url: str | None, namespace: str | None, account: Path = ACCOUNT) -> None:
        self._account = account if (account / "token").exists() else None
        own, authority = account / "namespace", account / "ca.crt"
        self.namespace = namespace or (own.exists() and own.read_text().strip()) or "default"
        self.url = url or _cluster_url()
        verify = ssl.create_default_context(cafile=str(authority)) if authority.exists() else True
        self._http = httpx.Client(base_url=self.url, verify=verify, timeout=REQUEST_SECONDS, trust_env=url is not None)

    def close(self) -> None:
        """Close the connections to the API server."""
        self._http.close()

    def create_job(self, job: Mapping[str, Any]) -> None:
        """Raises KubernetesError. A Job that exists already is one whose creation was not acknowledged."""
        self._request("POST", self._path("jobs"), 409, json=job, params={"fieldValidation": "Strict"})

    def list(self, kind: Literal["jobs", "pods"], selector: str) -> list[dict[str, Any]]:
        return self._request("GET", self._path(kind), params={"labelSelector": selector}).json()["items"]

    def delete_job(self, name: str, patience: float = PATIENCE_SECONDS) -> None:
        """Delete a Job and its pods. Harmless if it is gone."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        self._request("DELETE", f"{self._path('jobs')}/{name}", 404, patience, json=body)

    def log(self, pod: str, container: str) -> str:
        """The end of a container's log, stdout and stderr together."""
        params = {"container": container, "tailLines": str(MAX_LOG_LINES)}
        return self._request("GET", f"{self._path('pods')}/{pod}/log", params=params).text

    def _path(self, kind: str) -> str:
        group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        return f"{group}/namespaces/{self.namespace}/{kind}"

    def _request(
        self, method: str, path: str, harmless: int = 200, patience: float = PATIENCE_SECONDS, **options: Any
    ) -> httpx.Response:
        """The answer, of success or with the status `harmless`."""
        until, pause = time.monotonic() + patience, 0.1
        while True:
            token = self._account and {"authorization": f"Bearer {(self._account / 'token').read_text()}"}
            try:
                response = self._http.request(method, path, headers=token, **options)
                if response.is_success or response.status_code == harmless:
                    return response
                failure = KubernetesError(response.status_code, _message(response))
            except httpx.TransportError as error:
                failure = KubernetesError(0, f"the API server at {self.url} does not respond: {error}")
            if not failure.may_pass or failure.status == 403 or time.monotonic() + pause > until:
                raise failure
            time.sleep(pause)
            pause = min(2 * pause, 5.0)


def _message(response: httpx.Response) -> str:
    with suppress(ValueError, AttributeError):
        if message := response.json().get("message"):
            return message
    return f"{response.status_code} {response.reason_phrase}"


def _cluster_url() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError("this is no pod of a cluster; start `kubectl proxy` and give --job-api http://127.0.0.1:8001")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
