"""The Slurm script runs, with stand-ins for srun, scontrol, vLLM and `agl` that record how they were called."""

import json
import os
import signal
import stat
import subprocess
import sys
import time

import pytest
from tests.deploy.kubernetes import ROOT

SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
FIRST, SECOND = "127.0.7.1", "127.0.7.2"
SRUN = """#!{python}
import os, sys
words = sys.argv[1:]
node = next(word.partition("=")[2] for word in words if word.startswith("--nodelist="))
while words[0].startswith("--"):
    words.pop(0)
os.environ["NODE"] = node
os.execvp(words[0], words)
"""
PROGRAM = """#!{python}
import http.server, json, os, signal, sys, time
name, node = os.path.basename(sys.argv[0]), os.environ["NODE"]

def note(what):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([node, name, *sys.argv[1:], what]) + "\\n")

def end(*_):
    if sys.argv[1] == "train":
        time.sleep(0.5)
    note("stopped")
    os._exit(0)

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass

signal.signal(signal.SIGTERM, end)
note("started")
if sys.argv[1] == "serve":
    http.server.ThreadingHTTPServer((node, 4747 if name == "agl" else 8000), Healthy).serve_forever()
if sys.argv[1] == "train" and os.environ["STATUS"] != "wait":
    sys.exit(int(os.environ["STATUS"]))
signal.pause()
"""


@pytest.fixture
def run(tmp_path):
    """Run the script as Slurm would on two nodes; its status, and the calls in order."""

    def run(status=0, nodes=(FIRST, SECOND)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        scontrol = "#!/bin/sh\nprintf '%s\\n' " + " ".join(nodes) + "\n"
        for name, text in (("srun", SRUN), ("agl", PROGRAM), ("vllm", PROGRAM), ("scontrol", scontrol)):
            path = tmp_path / "bin" / name
            path.write_text(text.replace("{python}", sys.executable))
            path.chmod(0o755)
        (tmp_path / "calls").write_text("")
        variables = {"SLURM_JOB_NAME": "job", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}
        own = {"AGENT": "agent.py:solve", "TASKS": "t.jsonl", "MODEL": "/m", "STATUS": str(status)}
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environment = {"PATH": path, "CALLS": str(tmp_path / "calls"), **variables, **own}
        process = subprocess.Popen(["bash", str(SCRIPT)], cwd=tmp_path, env=environment)
        until = time.monotonic() + 60
        while status == "wait" and '"train"' not in (tmp_path / "calls").read_text() and time.monotonic() < until:
            time.sleep(0.05)
        if status == "wait":
            process.send_signal(signal.SIGTERM)
        code = process.wait(100)
        return code, [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]

    return run


@pytest.mark.slow
def test_it_starts_every_part_on_its_node_trains_and_stops_them(run, tmp_path):
    status, calls = run()
    assert status == 0
    started = {(call[0], call[1], call[2]) for call in calls if call[-1] == "started"}
    assert started == {
        (FIRST, "agl", "serve"),
        (FIRST, "agl", "runner"),
        (SECOND, "vllm", "serve"),
        (FIRST, "agl", "train"),
    }
    [train] = [call for call in calls if call[2] == "train"]
    assert calls.index(train) > max(n for n, call in enumerate(calls) if call[2] == "serve" and call[-1] == "started")
    assert {"--run", "policy.processes=4", f'policy.servers.urls=["http://{SECOND}:8000"]'} <= set(train)
    assert {(call[1], call[2]) for call in calls if call[-1] == "stopped"} == {
        ("agl", "serve"), ("agl", "runner"), ("vllm", "serve")
    }  # fmt: skip
    assert stat.S_IMODE((tmp_path / "runs" / "job" / "token").stat().st_mode) == 0o600


@pytest.mark.slow
def test_submitted_again_it_resumes_and_its_status_is_that_of_the_training(run, tmp_path):
    (tmp_path / "runs" / "job" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "job" / "run" / "config.toml").touch()
    status, calls = run(status=3)
    assert status == 3
    [train] = [call for call in calls if call[2] == "train"]
    assert "--resume" in train
    assert "--data" not in train


@pytest.mark.slow
def test_before_its_time_is_up_the_trainer_may_write_its_checkpoint_while_the_servers_are_there(run):
    status, calls = run(status="wait")
    assert status == 0
    stopped = [call[2] for call in calls if call[-1] == "stopped"]
    assert stopped[0] == "train"
    assert sorted(stopped[1:]) == ["runner", "serve", "serve"]


def test_one_node_is_refused_in_words(run, capfd):
    status, calls = run(nodes=(FIRST,))
    assert (status, calls) == (2, [])
    assert "at least 2 nodes" in capfd.readouterr().err
