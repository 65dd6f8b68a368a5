"""`agl train` and `agl eval`, as their user runs them."""

import json
import signal
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


def last_line(output: str) -> dict:
    return json.loads(output.strip().splitlines()[-1])


PRYING = """
import os
from urllib.request import urlopen
from urllib.error import HTTPError


def refused(path: str) -> bool:
    try:
        urlopen(os.environ["AGL_EVENT_URL"].partition("/rollout/")[0] + path).close()
    except HTTPError as error:
        return error.code == 401
    return False


def pry() -> None:
    assert refused("/v1/agl/rollouts") and refused("/v1/agl/spans"), "an agent can read what is not its own"
"""


class Collector(ThreadingHTTPServer):
    """An OpenTelemetry endpoint that counts what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.paths: list[str] = []


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def collector():
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
def test_a_run_trains_reports_and_leaves_a_model_that_transformers_loads(job, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    agent = (job.directory / "agent.py").read_text()
    (job.directory / "agent.py").write_text(PRYING + agent.replace("    answer =", "    pry()\n    answer ="))
    done = job.run(job.command("--run", "run", "--json", "algorithm.steps=2"))
    assert done.returncode == 0, done.stderr
    report = last_line(done.stdout)
    assert set(collector.paths) == {"/v1/traces"}, "its spans go where the environment says, too"
    assert report["steps"] == 2
    assert report["rollouts"] == 2 * 4 * 4
    assert report["failed_rollouts"] == 0
    assert set(report["held_out"]) == {"greedy", "sampled"}
    for gain in report["held_out"].values():
        assert gain["gain"] == pytest.approx(gain["after"] - gain["before"])
        assert gain["interval"][0] <= gain["gain"] <= gain["interval"][1]
        assert gain["tasks"] == 2
    assert "small model with random weights" in report["warnings"][0]
    assert report["warnings"][0] in done.stderr, "shown while it runs, and again in the result"
    assert (job.directory / report["curve"]).read_bytes().startswith(b"\x89PNG")

    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = job.directory / report["checkpoint"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config.vocab_size >= len(tokenizer)


@pytest.mark.slow
def test_a_run_is_measured_again_with_the_same_result_and_never_written_over(job):
    done = job.run(job.command("--run", "run", "--json", "algorithm.steps=1"))
    assert done.returncode == 0, done.stderr
    report = last_line(done.stdout)
    measured = job.run([job.command()[0], "eval", "--run", "run", "--json"])
    assert measured.returncode == 0, measured.stderr
    assert last_line(measured.stdout)["reward"] == pytest.approx(report["held_out"]["greedy"]["after"])
    again = job.run(job.command("--run", "run"))
    assert again.returncode == 2
    assert "--resume" in again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on_and_goes_on(job, ending):
    process = subprocess.Popen(
        job.command("--run", "run", "algorithm.steps=6"),
        cwd=job.directory, env=job.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=accept_interrupts,
    )  # fmt: skip
    wait_for_step(job.directory / "run", 1)
    process.send_signal(ending)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "agl train --resume run" in errors
    done = job.run([job.command()[0], "train", "--resume", "run", "--json"])
    assert done.returncode == 0, done.stderr
    assert last_line(done.stdout)["steps"] == 6
    assert last_line(done.stdout)["rollouts"] == 6 * 4 * 4


def accept_interrupts() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and children inherit this."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_step(run_dir, step: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        state = run_dir / "state.json"
        if state.exists() and json.loads(state.read_bytes())["step"] >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never reached")


@pytest.mark.slow
def test_an_agent_that_sets_a_seed_and_top_p_is_learned_from_all_the_same(job):
    limit = "max_tokens=6"
    source = (job.directory / "agent.py").read_text()
    (job.directory / "agent.py").write_text(source.replace(limit, f"{limit}, seed=7, top_p=0.9, temperature=0.0"))
    done = job.run(job.command("--run", "run", "--json", "algorithm.steps=2"))
    assert done.returncode == 0, done.stderr
    assert "top_p" in done.stderr
    figures = [json.loads(line) for line in (job.directory / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in figures if "calls_overridden" in each]
    assert [each["calls_overridden"] for each in steps] == [16, 16]
    assert all(each["groups_trained"] > 0 for each in steps)


@pytest.mark.slow
@pytest.mark.timeout(400)  # seven commands
def test_a_finished_run_is_extended_with_other_settings_and_says_so(job):
    short = ["algorithm.steps=1", "evaluation.modes=['greedy']"]
    done = job.run(job.command("--run", "run", "--json", *short))
    assert done.returncode == 0, done.stderr
    first = last_line(done.stdout)
    other = (
        (job.directory / "reward.py")
        .read_text()
        .replace("def letters", "def vowels")
        .replace("return ", "return 1 + ")
        .replace(".isalpha()", " in 'aeiou'")
    )
    (job.directory / "reward.py").write_text((job.directory / "reward.py").read_text() + other)
    resume = [job.command()[0], "train", "--resume", "run", "--json"]
    refused = job.run([*resume, "run.seed=7"])
    assert refused.returncode == 2
    assert "run.seed: a resumed run keeps this" in refused.stderr
    assert "Nothing is lost" not in refused.stderr
    extended = job.run(
        [*resume, "algorithm.steps=3", "algorithm.optimizer.lr=2e-3", "runner.hosts=2", "--reward", "reward.py:vowels"]
    )
    assert extended.returncode == 0, extended.stderr
    report = last_line(extended.stdout)
    assert (first["steps"], report["steps"], report["rollouts"]) == (1, 3, 3 * 16)
    letters = first["held_out"]["greedy"]["before"]
    assert report["held_out"]["greedy"]["before"] >= 1 > letters, "measured again, with the new reward"
    again = job.run([*resume, "--reward", "reward.py:letters"])
    assert last_line(again.stdout)["held_out"]["greedy"]["before"] == letters, "and with the weights the run began with"
    assert "cannot be compared with those so far" in again.stderr
    [record, _] = [json.loads(line) for line in (job.directory / "run" / "changes.jsonl").read_text().splitlines()]
    assert record["step"] == 1
    assert set(record["changes"]) == {"algorithm.steps", "algorithm.optimizer.lr", "runner.hosts", "reward"}
    assert "changed: reward" in extended.stderr
    metrics = [json.loads(line) for line in (job.directory / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [round(line["lr"], 6) for line in metrics] == [1e-3, 2e-3, 2e-3]
    measured = job.run([job.command()[0], "eval", "--run", "run", "--json"])
    report = last_line(again.stdout)
    assert last_line(measured.stdout)["reward"] == pytest.approx(report["held_out"]["greedy"]["after"])
    again = job.run(resume)
    assert last_line(again.stdout)["held_out"] == report["held_out"]


@pytest.mark.slow
def test_a_run_whose_agent_is_gone_goes_on_with_another_and_a_broken_one_promises_nothing(job):
    done = job.run(job.command("--run", "run", "algorithm.steps=1", "evaluation.modes=['greedy']"))
    assert done.returncode == 0, done.stderr
    (job.directory / "agent.py").rename(job.directory / "other.py")
    resume = [job.command()[0], "train", "--resume", "run", "algorithm.steps=2"]
    refused = job.run(resume)
    assert refused.returncode == 1
    assert "agl train --resume run (with --agent or --reward for another one)" in refused.stderr
    assert not (job.directory / "run" / "changes.jsonl").exists()
    mended = job.run([*resume, "--agent", "other.py:say"])
    assert mended.returncode == 0, mended.stderr
    (job.directory / "run" / "state.json").write_text("{")
    broken = job.run(resume)
    assert broken.returncode == 2
    assert "state.json cannot be read" in broken.stderr
    assert "Nothing is lost" not in broken.stderr


@pytest.mark.slow
def test_with_one_rollout_at_a_time_two_runs_of_a_seed_are_equal(job):
    learned = []
    for name in ("one", "two"):
        done = job.run(job.command("--run", name, "algorithm.steps=3", "runner.concurrency=1", "run.seed=7"))
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (job.directory / name / "metrics.jsonl").read_text().splitlines()]
        learned.append([(line["reward"], line["loss"], line["grad_norm"]) for line in lines])
    assert learned[0] == learned[1]
