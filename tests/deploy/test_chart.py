"""The Helm chart: what it renders is what Kubernetes accepts, and what our programs understand.

`rendered/` has what `helm template` makes of the values beside it. Those files are always checked; that they are still
what the chart renders is checked where there is a helm program (tests/deploy/setup.sh).
"""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from starlette.routing import Match
from tests.deploy.commands import check_command
from tests.deploy.kubernetes import ROOT, errors, helm

from agentlightning.server.app import Server
from agentlightning.store import InMemoryLightningStore
from agentlightning_kubernetes.manifest import attempt_job, read_template

CHART = ROOT / "deploy" / "helm" / "agentlightning"
RENDERED = Path(__file__).parent / "rendered"
CASES = sorted(path.name.removesuffix(".values.yaml") for path in RENDERED.glob("*.values.yaml"))
needs_helm = pytest.mark.skipif(helm() is None, reason="no helm program: run tests/deploy/setup.sh, or set AGL_HELM")


def manifests(text):
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def rendered(case):
    return manifests((RENDERED / f"{case}.yaml").read_text())


def template(*arguments):
    words = [helm(), "template", "agl", str(CHART), "--namespace", "training", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def containers(manifest):
    return manifest["spec"]["template"]["spec"]["containers"] if "template" in manifest["spec"] else []


def pods(case):
    return [manifest for manifest in rendered(case) if "template" in manifest.get("spec", {})]


def test_there_are_cases():
    assert CASES == ["everything", "jobs", "smallest"]


@needs_helm
@pytest.mark.parametrize("case", CASES)
def test_what_is_checked_here_is_what_the_chart_renders(case):
    result = template("--values", str(RENDERED / f"{case}.values.yaml"))
    assert result.returncode == 0, result.stderr
    assert manifests(result.stdout) == rendered(case)


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_accepts_every_manifest(case):
    found = rendered(case)
    assert {manifest["kind"] for manifest in found} >= {"Deployment", "Service", "PodDisruptionBudget"}
    assert [error for manifest in found for error in errors(manifest)] == []


def test_the_check_finds_an_unknown_field_and_a_wrong_type():
    deployment = next(manifest for manifest in rendered("smallest") if manifest["kind"] == "Deployment")
    deployment["spec"]["replica"] = 2
    deployment["spec"]["template"]["spec"]["containers"][0]["ports"] = [{"containerPort": "http"}]
    assert len(errors(deployment)) == 2


@pytest.mark.parametrize("case", CASES)
def test_agl_understands_every_option(case):
    checked = 0
    for manifest in pods(case):
        for container in containers(manifest):
            if container["name"] in ("server", "runner"):
                check_command(container["args"])
                checked += 1
    assert checked == 2


def test_the_check_of_options_finds_a_wrong_one():
    with pytest.raises(Exception, match="No such option"):
        check_command(["serve", "--drain-second=1"])


@pytest.mark.parametrize("case", CASES)
async def test_the_server_has_the_paths_that_are_probed_and_the_service_its_port(case):
    found = rendered(case)
    [server] = [m for m in found if m["kind"] == "Deployment" and m["metadata"]["name"] == "agl-server"]
    [container] = containers(server)
    store = InMemoryLightningStore()
    routes = Server(store, secret="s").app.routes
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        scope = {"type": "http", "method": "GET", "path": container[probe]["httpGet"]["path"]}
        assert any(route.matches(scope)[0] is Match.FULL for route in routes), probe
    await store.close()
    [service] = [m for m in found if m["kind"] == "Service" and m["metadata"]["name"] == "agl-server"]
    [port] = service["spec"]["ports"]
    assert {"name": port["targetPort"], "containerPort": port["port"]} in container["ports"]
    assert f"--port={port['port']}" in container["args"]


@pytest.mark.parametrize("case", CASES)
def test_selectors_select_the_pods_they_are_for(case):
    labels = {m["metadata"]["name"]: m["spec"]["template"]["metadata"]["labels"] for m in pods(case)}
    for manifest in rendered(case):
        spec = manifest.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector")
        if selector is not None:
            assert selector.get("matchLabels", selector).items() <= labels[manifest["metadata"]["name"]].items()


@pytest.mark.parametrize("case", CASES)
def test_a_pod_has_the_time_to_end_that_its_program_was_promised(case):
    for manifest in pods(case):
        [container] = containers(manifest)
        options = dict(word.lstrip("-").split("=", 1) for word in container["args"] if "-seconds=" in word)
        seconds = manifest["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30)
        assert seconds > sum(map(int, options.values()))


@pytest.mark.parametrize("case", CASES)
def test_secrets_are_given_by_reference(case):
    for manifest in pods(case):
        for variable in [each for container in containers(manifest) for each in container["env"]]:
            if variable["name"] in ("AGL_TOKEN", "AGL_STORE"):
                assert set(variable) == {"name", "valueFrom"}


def test_the_job_of_the_chart_is_one_that_the_runner_takes_and_kubernetes_accepts(tmp_path):
    [config] = [manifest for manifest in rendered("jobs") if manifest["kind"] == "ConfigMap"]
    (tmp_path / "job.yaml").write_text(config["data"]["job.yaml"])
    template = read_template(tmp_path / "job.yaml", ("python", "agent.py"), None, 60.0)
    rollout = SimpleNamespace(
        rollout_id="ro-1", attempt=SimpleNamespace(attempt_id="at-1"), config=SimpleNamespace(timeout_seconds=60)
    )
    job = attempt_job(
        json.loads(template.manifest),
        template,
        rollout,
        labels={},
        variables={"AGL_KEY": "k"},
        owner=("runner-1", "0a1b2c"),
    )
    assert errors(job) == []


def test_runners_of_jobs_may_do_what_their_requests_need_and_nothing_else():
    [role] = [manifest for manifest in rendered("jobs") if manifest["kind"] == "Role"]
    allowed = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    needed = {("jobs", "create"), ("jobs", "list"), ("jobs", "delete"), ("pods", "list"), ("pods/log", "get")}
    assert allowed == needed


@needs_helm
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "runners.agent is required"),
        (["--set", "runners.agent=a.py:b,vllm.replicas=1"], "vllm.model is required"),
        (["--set", "runners.agent=a.py:b,server.replica=1"], "replica"),
        (["--set", "runners.agent=a.py:b,server.affinitySeconds=100000"], "affinitySeconds"),
    ],
)
def test_wrong_values_are_named(arguments, message):
    result = template(*arguments)
    assert result.returncode != 0
    assert message in result.stderr


@needs_helm
def test_an_agent_with_quotes_and_spaces_arrives_as_it_is():
    agent = 'bash -c "echo: #1"'
    result = template("--set-json", "runners=" + json.dumps({"agent": agent}))
    [runners] = [m for m in manifests(result.stdout) if m["metadata"]["name"] == "agl-runners"]
    assert f"--agent={agent}" in containers(runners)[0]["args"]
