"""A Kubernetes Job for each attempt, against an API server on loopback that runs the pods' commands."""

import asyncio
import json
import re
import sys
from types import SimpleNamespace

import pytest
import yaml
from plugins.kubernetes.tests.cluster import Cluster
from tests.deploy.kubernetes import errors
from tests.support.waiting import until

from agentlightning.attempt_address import attempt_secret
from agentlightning.errors import ConfigError
from agentlightning.runner import JobTemplate
from agentlightning.server.app import Server
from agentlightning_kubernetes.api import KubernetesApi, KubernetesError
from agentlightning_kubernetes.job_agent import JobStates
from agentlightning_kubernetes.manifest import agent_container, attempt_job, read_template

pytestmark = pytest.mark.integration

SECRET = attempt_secret(None)
TEMPLATE = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"namespace": "agents", "labels": {"team": "search"}},
    "spec": {
        "template": {
            "spec": {
                "nodeSelector": {"pool": "cpu"},
                "containers": [
                    {
                        "name": "agent",
                        "image": "registry.example.org/agent:7",
                        "resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "1Gi"}},
                        "envFrom": [{"secretRef": {"name": "agent-keys"}}],
                        "env": [{"name": "MODE", "value": "job"}],
                    }
                ],
            }
        }
    },
}
POSTS = """
import json, os, urllib.request
task = json.loads(os.environ["AGL_TASK"])
body = json.dumps({"event_type": "reward", "data": {"value": task["reward"]}}).encode()
headers = {"authorization": "Bearer " + os.environ["AGL_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["AGL_EVENT_URL"], body, headers)).close()
print("mode", os.environ["MODE"])
"""


@pytest.fixture
async def cluster():
    async with Cluster() as cluster:
        yield cluster


@pytest.fixture
def template(tmp_path, cluster):
    """A template whose container runs a Python program."""

    def template(program="", start_seconds=20.0, **spec):
        job = {**TEMPLATE, "spec": {**TEMPLATE["spec"], **spec}}
        (tmp_path / "job.json").write_text(json.dumps(job))
        return read_template(tmp_path / "job.json", (sys.executable, "-c", program), cluster.url, start_seconds)

    return template


async def test_each_attempt_runs_in_a_job_of_its_own_and_leaves_nothing_behind(
    store, cluster, template, start, roll, attempt_of, rewards_of
):
    async with Server(store, secret=SECRET) as server:
        await start(template(POSTS), secret=SECRET, server_url=server.url)
        rollouts = await roll({"reward": 0.25}, {"reward": 0.75}, timeout_seconds=60)
    assert [rollout.status for rollout in rollouts] == ["succeeded", "succeeded"]
    assert [await rewards_of(rollout) for rollout in rollouts] == [[0.25], [0.75]]
    assert (await attempt_of(rollouts[0])).metadata["output"] == "mode job\n"
    assert len(cluster.created) == 2
    assert (cluster.jobs, cluster.pods) == ({}, {})


async def test_the_job_is_that_of_the_template_with_the_attempt_added(cluster, template, start, roll):
    await start(template("print(1)"))
    [rollout] = await roll("task", timeout_seconds=60)
    [job] = cluster.created
    assert errors({**job, "status": {}}) == []
    assert job["metadata"]["labels"]["team"] == "search"
    assert job["metadata"]["annotations"]["agentlightning/rollout"] == rollout.rollout_id
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["backoffLimit"], pod["restartPolicy"], spec["activeDeadlineSeconds"]) == (0, "Never", 60 + 20 + 60)
    assert pod["nodeSelector"] == {"pool": "cpu"}
    [container] = pod["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "agent-keys"}}]
    assert container["resources"] == TEMPLATE["spec"]["template"]["spec"]["containers"][0]["resources"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["AGL_ROLLOUT_ID"] == rollout.rollout_id
    assert variables["MODE"] == "job"
    assert "AGL_TOKEN" not in variables


async def test_a_field_without_a_value_is_one_that_is_left_out(tmp_path, cluster, start, roll):
    container = {"name": "agent", "image": "agent:7", "env": None, "resources": None}
    pod = {"metadata": {"labels": None}, "spec": {"restartPolicy": None, "containers": [container]}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": None, "spec": {"backoffLimit": None, "template": pod}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    await start(read_template(tmp_path / "job.yaml", (sys.executable, "-c", "print(1)"), cluster.url, 20.0))
    [rollout] = await roll("task", timeout_seconds=60)
    assert rollout.status == "succeeded"


def test_a_name_without_a_text_stays_one_with_an_empty_text(tmp_path):
    pod = {"spec": {"nodeSelector": {"gpu": None}, "containers": [{"name": "agent", "image": "agent:7"}]}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": pod}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    template = read_template(tmp_path / "job.yaml", ("true",), "http://server", 20.0)
    assert json.loads(template.manifest)["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": ""}


@pytest.mark.parametrize("fresh_process", [False, True])
async def test_fields_of_a_task_that_are_asked_for_are_variables_of_its_job(
    fresh_process, cluster, template, start, roll
):
    await start(template("print(1)"), env={"QUESTION": "question"}, fresh_process=fresh_process)
    await roll({"question": "Why?"})
    [container] = cluster.created[0]["spec"]["template"]["spec"]["containers"]
    assert {"name": "QUESTION", "value": "Why?"} in container["env"]


async def test_a_container_that_fails_is_a_failure_with_its_exit_code_and_log(template, start, roll, attempt_of):
    await start(template("raise SystemExit('no such file')"))
    [rollout] = await roll("task")
    error = (await attempt_of(rollout)).metadata["error"]
    assert rollout.status == "failed"
    assert error["type"] == "JobError"
    assert "exit code 1" in error["message"]
    assert "no such file" in error["traceback"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"waiting": ("ImagePullBackOff", "no such image")}, "ImagePullBackOff: no such image"),
        ({"unschedulable": True}, "Unschedulable: 0/3 nodes"),
        ({"quota": True}, "exceeded quota"),
    ],
)
async def test_a_job_that_never_starts_is_a_counted_failure_that_says_why(
    store, cluster, template, start, roll, attempt_of, wrong, message
):
    for name, value in wrong.items():
        setattr(cluster, name, value)
    await start(template(start_seconds=0.3))
    [rollout] = await roll("task", max_attempts=2)
    attempts = await store.query_attempts(rollout.rollout_id)
    assert [attempt.status for attempt in attempts] == ["failed", "failed"]
    assert {attempt.metadata["error"]["type"] for attempt in attempts} == {"JobNotStartedError"}
    assert message in attempts[0].metadata["error"]["message"]
    assert (cluster.jobs, cluster.pods) == ({}, {})


@pytest.mark.slow
async def test_a_node_that_disappears_costs_one_counted_attempt(store, cluster, template, start, roll, tmp_path):
    program = f"import os, time; time.sleep(0 if os.path.exists({str(tmp_path / 'again')!r}) else 60)"
    await start(template(program))
    rolling = asyncio.create_task(roll("task", max_attempts=2))
    await until(cluster.running)
    await asyncio.sleep(1.2)  # the runner has seen that it runs
    (tmp_path / "again").touch()
    cluster.lose_nodes()
    [rollout] = await rolling
    attempts = await store.query_attempts(rollout.rollout_id)
    assert [attempt.status for attempt in attempts] == ["failed", "succeeded"]
    error = attempts[0].metadata["error"]
    assert error["type"] == "JobLostError"
    assert "node-1" in error["message"]
    assert "NoExecute" in error["message"]


async def test_a_job_that_somebody_deletes_is_lost_and_repeated(store, cluster, template, start, roll, tmp_path):
    program = f"import os, time; time.sleep(0 if os.path.exists({str(tmp_path / 'again')!r}) else 60)"
    await start(template(program))
    rolling = asyncio.create_task(roll("task", max_attempts=2))
    await until(cluster.running)
    (tmp_path / "again").touch()
    cluster._remove_pods(name := next(iter(cluster.jobs)))
    del cluster.jobs[name]
    [rollout] = await rolling
    attempts = await store.query_attempts(rollout.rollout_id)
    assert [attempt.status for attempt in attempts] == ["failed", "succeeded"]
    assert attempts[0].metadata["error"]["type"] == "JobLostError"


async def test_an_attempt_that_reaches_its_timeout_takes_its_job_along(cluster, template, start, roll):
    await start(template("import time; time.sleep(60)"), grace=2.0)
    [rollout] = await roll("task", timeout_seconds=1.5)
    assert rollout.status == "failed"
    await until(lambda: not cluster.jobs and not cluster.running())


async def test_a_cancelled_rollout_takes_its_job_along(store, cluster, template, start, roll):
    await start(template("import time; time.sleep(60)"), grace=2.0, heartbeat_seconds=0.2)
    rolling = asyncio.create_task(roll("task"))
    await until(cluster.running)
    [rollout] = await store.query_rollouts()
    await store.cancel_rollout(rollout.rollout_id)
    await until(lambda: not cluster.jobs and not cluster.running())
    await rolling


async def test_a_runner_that_is_stopped_deletes_its_jobs_and_requeues(store, cluster, template, start, roll):
    runner = await start(template("import time; time.sleep(60)"), grace=2.0)
    rolling = asyncio.create_task(roll("a", "b", wait=1))
    await until(lambda: len(cluster.running()) == 2)
    await rolling
    await runner.stop(0)
    await until(lambda: not cluster.jobs and not cluster.running())
    assert {rollout.status for rollout in await store.query_rollouts()} == {"requeuing"}


async def test_an_api_server_that_is_away_for_a_moment_or_loses_an_answer_costs_nothing(
    cluster, template, start, roll, attempt_of
):
    cluster.unavailable, cluster.loses_reply = 2, 1
    await start(template("print('done')"))
    [rollout] = await roll("task")
    assert rollout.status == "succeeded"
    assert (await attempt_of(rollout)).metadata["output"] == "done\n"
    assert len(cluster.created) == 1


async def test_a_manifest_that_kubernetes_rejects_is_an_error_that_says_so(cluster, template, start, roll, attempt_of):
    await start(template(activeDeadlineSecond=5))
    [rollout] = await roll("task")
    error = (await attempt_of(rollout)).metadata["error"]["message"]
    assert "rejects" in error
    assert "activeDeadlineSecond" in error


async def test_a_ttl_of_the_template_keeps_finished_jobs(cluster, template, start, roll):
    await start(template("print(1)", ttlSecondsAfterFinished=3600))
    await roll("task")
    assert len(cluster.jobs) == 1


async def test_a_runner_that_starts_again_in_its_pod_deletes_the_jobs_of_before(
    cluster, template, start, roll, monkeypatch
):
    monkeypatch.setenv("AGL_POD_NAME", "runner-1")
    monkeypatch.setenv("AGL_POD_UID", "0a1b2c")
    labels = {"agentlightning/pod": "0a1b2c", "agentlightning/runner": "of-before"}
    cluster.jobs["left"] = {"metadata": {"name": "left", "labels": labels}}
    cluster.jobs["other"] = {"metadata": {"name": "other", "labels": {**labels, "agentlightning/pod": "else"}}}
    await start(template("print(1)"))
    await roll("task")
    assert set(cluster.jobs) == {"other"}
    [owner] = cluster.created[0]["metadata"]["ownerReferences"]
    assert (owner["name"], owner["uid"]) == ("runner-1", "0a1b2c")


async def test_a_task_too_long_for_a_variable_is_refused_by_name(template, start, roll, attempt_of):
    await start(template())
    [rollout] = await roll({"text": "x" * 200_000})
    assert "too long for a variable" in (await attempt_of(rollout)).metadata["error"]["message"]


@pytest.mark.slow
async def test_many_jobs_share_the_requests_that_ask_for_their_state(cluster, template, start, roll):
    await start(template("import time; time.sleep(3)"), concurrency=20)
    rollouts = await roll(*range(20))
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    assert cluster.requests < 3 * 20 + 40  # created, deleted and read; a list of Jobs and of pods once a second


def test_an_api_server_that_refuses_is_asked_no_more_often_than_one_that_answers(monkeypatch):
    asked = []

    class Refusing:
        def list(self, kind, selector):
            asked.append(selector)
            raise KubernetesError(429, "too many requests")

    states = JobStates(Refusing(), "me")
    monkeypatch.setattr("agentlightning_kubernetes.job_agent.time.monotonic", lambda: 100.0)
    assert [states.of(f"job-{number}", 0.0) for number in range(20)] == [None] * 20
    monkeypatch.setattr("agentlightning_kubernetes.job_agent.time.monotonic", lambda: 101.0)
    assert states.of("job-0", 0.0) is None
    assert asked == ["agentlightning/host=me"] * 2


async def test_in_a_pod_the_service_account_is_used_and_its_token_read_anew(tmp_path):
    for name, text in (("token", "first"), ("namespace", "agents\n")):
        (tmp_path / name).write_text(text)
    async with Cluster(token=lambda: (tmp_path / "token").read_text()) as cluster:
        api = KubernetesApi(cluster.url, None, account=tmp_path)
        assert api.namespace == "agents"
        assert await asyncio.to_thread(api.list, "jobs", "") == []
        (tmp_path / "token").write_text("second")
        assert await asyncio.to_thread(api.list, "jobs", "") == []
        nobody = KubernetesApi(cluster.url, "agents", account=tmp_path / "none")
        with pytest.raises(KubernetesError, match="Unauthorized"):
            await asyncio.to_thread(nobody.list, "jobs", "")
        api.close()
        nobody.close()


def test_outside_of_a_cluster_the_way_in_is_named(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="kubectl proxy"):
        KubernetesApi(None, "agents")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "CronJob"}, "has no Job"),
        ({"spec": ["template"]}, "is no Job of Kubernetes"),
        ({"spec": {"template": {"spec": {"containers": {"name": "agent"}}}}}, "is no Job of Kubernetes"),
        ({"spec": {"template": {"spec": {"containers": [None]}}}}, "is no Job of Kubernetes"),
        ({"spec": {**TEMPLATE["spec"], "backoffLimit": 3}}, "backoffLimit=3"),
        ({"spec": {"template": {"spec": {"containers": []}}}}, "0 containers"),
        ({"spec": {"template": {"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}}}, "2 containers"),
        ({"spec": {"template": {"spec": {"containers": [{"image": "agent"}]}}}}, "name the one of the agent"),
        ({"spec": {"template": {"spec": {"containers": [{}], "restartPolicy": "OnFailure"}}}}, "OnFailure"),
    ],
)
def test_a_template_whose_result_would_not_be_that_of_one_run_is_refused(tmp_path, change, message):
    (tmp_path / "job.yaml").write_text(json.dumps({**TEMPLATE, **change}))
    with pytest.raises(ConfigError, match=message):
        read_template(tmp_path / "job.yaml", (), None, 1.0)


def as_kubernetes_expands(value, variables):
    """What the kubelet makes of a value of `env`: $(NAME) is a variable, where there is one, and $$ is $."""
    return re.sub(
        r"\$(?:\$|\((\w+)\))", lambda found: "$" if found[1] is None else variables.get(found[1], found[0]), value
    )


@pytest.mark.parametrize(
    "text",
    [
        "What is $(OPENAI_API_KEY)?",
        "Solve $$x^2$$",
        "$$(OPENAI_API_KEY)",
        "costs $5 or $$",
        "$",
        "$$$(A)$(OPENAI_API_KEY)",
    ],
)
def test_nothing_in_a_variable_of_an_attempt_is_expanded_by_kubernetes(text):
    variables = {"AGL_TASK": json.dumps({"question": text}), "AGL_KEY": text}
    rollout = SimpleNamespace(
        rollout_id="ro-1", attempt=SimpleNamespace(attempt_id="at-1"), config=SimpleNamespace(timeout_seconds=None)
    )
    job = attempt_job(TEMPLATE, JobTemplate(b""), rollout, labels={}, variables=variables, owner=None)
    env = {each["name"]: each["value"] for each in agent_container(job)["env"]}
    seen = {name: as_kubernetes_expands(env[name], {"OPENAI_API_KEY": "sk-real"}) for name in variables}
    assert seen == variables
