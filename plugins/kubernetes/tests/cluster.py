"""A stand-in for the API server of a cluster: real requests on loopback, Kubernetes' schema of a Job, and a Job
controller that runs the command of each pod as a process."""

import asyncio
import itertools
import os
import time

from aiohttp import web
from tests.deploy.kubernetes import errors

JOBS = "/apis/batch/v1/namespaces/{namespace}/jobs"
PODS = "/api/v1/namespaces/{namespace}/pods"


def failure(status, reason, message):
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": status,
    }
    return web.json_response(body, status=status)


def selected(things, selector):
    """Those with the labels of a selector `a=b,c!=d`."""
    for term in filter(None, (selector or "").split(",")):
        name, differs, value = term.partition("!=") if "!=" in term else term.partition("=")
        things = [each for each in things if (each["metadata"]["labels"].get(name) == value) != (differs == "!=")]
    return things


class Cluster:
    """Use as `async with`. What it does wrong is set by its attributes."""

    def __init__(self, token=None):
        self.jobs, self.pods, self.processes, self.logs = {}, {}, {}, {}
        self.created, self.deleted, self.requests = [], [], 0
        self.unavailable = 0
        """How many of the next requests get a 503."""
        self.quota = False
        """Jobs are rejected as beyond the quota."""
        self.waiting = None
        """Why containers do not start: a reason and a message."""
        self.unschedulable = False
        self.loses_reply = 0
        """How many of the next Jobs are created without an answer."""
        self._token, self._numbers = token, itertools.count(1)
        self._tasks = set()

    async def __aenter__(self):
        app = web.Application(middlewares=[self._admit])
        app.router.add_post(JOBS, self._create)
        app.router.add_get(JOBS, self._list_jobs)
        app.router.add_delete(JOBS + "/{name}", self._delete)
        app.router.add_get(PODS, self._list_pods)
        app.router.add_get(PODS + "/{name}/log", self._log)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        for name in list(self.processes):
            self._kill(name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.cleanup()

    # -- the API ---------------------------------------------------------------------------------------------------

    @web.middleware
    async def _admit(self, request, handler):
        self.requests += 1
        if self._token is not None and request.headers.get("authorization") != f"Bearer {self._token()}":
            return failure(401, "Unauthorized", "Unauthorized")
        if self.unavailable:
            self.unavailable -= 1
            return failure(503, "ServiceUnavailable", "the API server is being replaced")
        return await handler(request)

    async def _create(self, request):
        job = await request.json()
        found = errors(job)
        pod = job["spec"]["template"]["spec"]
        if pod.get("restartPolicy") not in ("Never", "OnFailure"):
            found.append("spec.template.spec.restartPolicy: Unsupported value")
        labels = {**job["metadata"]["labels"], **job["spec"]["template"]["metadata"]["labels"]}
        found += [f"label {value!r} is too long" for value in labels.values() if len(value) > 63]
        if found:
            return failure(422, "Invalid", f"Job is invalid: {'; '.join(found)}")
        name = job["metadata"]["name"]
        if name in self.jobs:
            return failure(409, "AlreadyExists", f'jobs.batch "{name}" already exists')
        if self.quota:
            return failure(403, "Forbidden", "exceeded quota: jobs, requested: count/jobs.batch=1")
        self.jobs[name] = job
        self.created.append(job)
        self._start(self._control(name, job, f"{name}-{next(self._numbers)}"))
        if self.loses_reply:
            self.loses_reply -= 1
            request.transport.abort()
        return web.json_response(job, status=201)

    async def _list_jobs(self, request):
        return web.json_response({"items": selected(list(self.jobs.values()), request.query.get("labelSelector"))})

    async def _list_pods(self, request):
        return web.json_response({"items": selected(list(self.pods.values()), request.query.get("labelSelector"))})

    async def _delete(self, request):
        name = request.match_info["name"]
        if name not in self.jobs:
            return failure(404, "NotFound", f'jobs.batch "{name}" not found')
        options = await request.json()
        if options.get("propagationPolicy") == "Background":  # otherwise its pods are orphans that run on
            self._remove_pods(name)
        del self.jobs[name]
        self.deleted.append(name)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _log(self, request):
        name = request.match_info["name"]
        if name not in self.pods:
            return failure(404, "NotFound", f'pods "{name}" not found')
        return web.Response(text=self.logs.get(name, ""))

    # -- what happens in the cluster ---------------------------------------------------------------------------------

    def _start(self, work):
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _control(self, name, job, pod_name):
        """The Job controller, the scheduler and the kubelet, for one Job."""
        template = job["spec"]["template"]
        labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": name}
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        pod = {
            "metadata": {"name": pod_name, "labels": labels, "creationTimestamp": now},
            "spec": {**template["spec"]},
            "status": {"phase": "Pending", "conditions": [], "containerStatuses": []},
        }
        self.pods[pod_name] = pod
        if self.unschedulable:
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
            pod["status"]["conditions"] = [condition]
        while self.unschedulable or self.waiting:
            if self.waiting:
                state = {"waiting": dict(zip(("reason", "message"), self.waiting, strict=True))}
                pod["status"]["containerStatuses"] = [
                    {"name": c["name"], "state": state} for c in pod["spec"]["containers"]
                ]
            await asyncio.sleep(0.05)
        pod["spec"]["nodeName"] = "node-1"
        limit = job["spec"].get("activeDeadlineSeconds")
        try:
            async with asyncio.timeout(limit):
                code = await self._run(pod_name, pod)
        except TimeoutError:
            self._remove_pods(name)
            return self._finish(job, "Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
        if "deletionTimestamp" not in pod["metadata"]:
            kind = ("Complete", "Completed", "") if code == 0 else ("Failed", "BackoffLimitExceeded", "backoff limit")
            self._finish(job, *kind)

    async def _run(self, name, pod):
        container = next((c for c in pod["spec"]["containers"] if c["name"] == "agent"), pod["spec"]["containers"][0])
        variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        self.processes[name] = process = await asyncio.create_subprocess_exec(
            *container["command"],
            env={"PATH": os.environ["PATH"], **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        pod["status"]["phase"] = "Running"
        self._set_state(pod, container, {"running": {}})
        output, _ = await process.communicate()
        self.logs[name] = output.decode()
        ended = {"exitCode": process.returncode, "reason": "Completed" if process.returncode == 0 else "Error"}
        self._set_state(pod, container, {"terminated": ended})
        return process.returncode

    def _set_state(self, pod, container, state):
        pod["status"]["containerStatuses"] = [{"name": container["name"], "state": state}]

    def _finish(self, job, kind, reason, message):
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        job["status"] = {"conditions": [condition]}

    def _kill(self, pod_name):
        process = self.processes.pop(pod_name, None)
        if process is not None and process.returncode is None:
            process.kill()

    def _remove_pods(self, job_name):
        for name in [n for n, pod in self.pods.items() if pod["metadata"]["labels"][JOB_LABEL] == job_name]:
            self._kill(name)
            del self.pods[name]

    def lose_nodes(self):
        """All nodes disappear: the pods that run are being deleted and never end."""
        for name in list(self.processes):
            pod = self.pods[name]
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            message = "Taint manager: deleting due to NoExecute taint"
            condition = {
                "type": "DisruptionTarget",
                "status": "True",
                "reason": "DeletionByTaintManager",
                "message": message,
            }
            pod["status"]["conditions"].append(condition)
            self._kill(name)

    def running(self):
        return [name for name, process in self.processes.items() if process.returncode is None]


JOB_LABEL = "batch.kubernetes.io/job-name"
