"""`agl runner --job`: a real runner of a real server, whose attempts are Jobs of a cluster on loopback."""

import json
import shlex
import sys

import pytest
from plugins.kubernetes.tests.cluster import Cluster
from tests.cli.conftest import invoke, start

import agentlightning as agl
from agentlightning.errors import MissingExtraError
from agentlightning.rollouts import EnqueueRolloutRequest
from agentlightning.runner import JobTemplate, Runner
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.util import plugins

__all__ = ["invoke", "start"]
JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "spec": {"template": {"spec": {"containers": [{"name": "main", "image": "agent"}]}}},
}
PROGRAM = "import os; print('did', os.environ['AGL_TASK'])"


@pytest.mark.slow
async def test_attempts_run_in_jobs_of_the_cluster(start, tmp_path):
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    async with Cluster() as cluster:
        url = start("serve", "--port", "0", "--store", "s.db", "--json").line()["url"]
        client = LightningStoreClient(url)
        queued = await client.enqueue_many_rollouts([EnqueueRolloutRequest(number) for number in range(3)])
        agent = shlex.join([sys.executable, "-c", PROGRAM])
        runner = start("runner", "--server", url, "--job", "job.yaml", "--job-api", cluster.url, "--agent", agent,
                       "--job-start-seconds", "77", "--max-rollouts", "3", "--json")  # fmt: skip
        ids = [rollout.rollout_id for rollout in queued]
        ended = await client.wait_for_rollouts(rollout_ids=ids, timeout=60)
        assert [rollout.status for rollout in ended] == ["succeeded"] * 3, runner.errors
        outputs = [(await client.get_latest_attempt(rollout_id)).metadata["output"] for rollout_id in ids]
        assert sorted(outputs) == ["did 0\n", "did 1\n", "did 2\n"]
        assert len(cluster.created) == 3
        assert cluster.jobs == {}
        await client.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--job", "nowhere.yaml"), "nowhere.yaml"),
        (("--job", "job.yaml", "--agent", "agent.py:solve"), "is Python"),
        (("--job", "other.yaml"), "has no Job"),
    ],
)
def test_a_job_that_cannot_be_one_is_refused_in_one_line(invoke, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    (tmp_path / "other.yaml").write_text("kind: CronJob")
    result = invoke("runner", "--server", "http://127.0.0.1:9", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_without_the_plugin_the_error_says_what_to_install(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    entry_points = plugins.entry_points
    monkeypatch.setattr(plugins, "entry_points", lambda **given: entry_points(**{**given, "group": "nothing"}))
    result = invoke("runner", "--server", "http://127.0.0.1:9", "--job", "job.yaml")
    assert (result.exit_code, "pip install ./plugins/kubernetes" in result.stderr) == (2, True), result.output
    with pytest.raises(MissingExtraError, match=r"pip install \./plugins/kubernetes"):
        Runner(agl.InMemoryLightningStore(), JobTemplate(json.dumps(JOB).encode()), secret="s")
