"""`agl run`: any command as one recorded rollout."""

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentlightning.attempt_address import attempt_secret
from agentlightning.cli.run import record_reward
from agentlightning.runner.agents.arguments import RewardFunction
from agentlightning.span import AGENT_NAME, ATTRIBUTION, INPUT_MESSAGES, OUTPUT_MESSAGES
from agentlightning.store import InMemoryLightningStore, LightningStore
from agentlightning.tracing.rewards import find_final_reward
from agentlightning.training.environment_providers import inherited_config

pytestmark = pytest.mark.integration

AGL = str(Path(sys.executable).parent / "agl")
KEY = "sk-only-the-provider-may-see-this"


class Provider(ThreadingHTTPServer):
    """Answers chat completions and messages, and remembers who asked with which key."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append({"path": self.path, "headers": dict(self.headers.items()), "body": body})
        if self.path.endswith("/messages"):
            usage = {"input_tokens": 5, "output_tokens": 2}
            content = [{"type": "text", "text": "42"}]
            answer = {"type": "message", "role": "assistant", "content": content, "stop_reason": "end_turn"}
        else:
            usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
            message = {"role": "assistant", "content": "42"}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            answer = {"object": "chat.completion", "created": 1, "choices": choices}
        data = json.dumps({"id": "x-1", "model": body["model"], "usage": usage, **answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        known = self.headers["Authorization"] or self.headers["x-api-key"]
        name = f"claude-{known[-4:]}" if "anthropic-version" in self.headers else f"gpt-{known[-4:]}"
        data = json.dumps({"data": [{"id": name}], "has_more": False}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def provider():
    server = Provider()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """Nothing of a provider in the environment, and a directory of its own."""
    for name in list(os.environ):
        if name.startswith(("OPENAI_", "ANTHROPIC_", "AGL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(invoke, clean):
    """run(..., "--", command...) -> (exit code, summary)."""

    def run(*arguments):
        result = invoke("run", "--json", *map(str, arguments))
        lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
        return result.exit_code, json.loads(lines[-1]) if lines else result.stderr

    return run


def recorded(summary, db=".agentlightning/store.db"):
    """(rollout, attempt, spans)."""

    async def read():
        store = LightningStore(db)
        try:
            rollout = await store.get_rollout_by_id(summary["rollout_id"])
            attempt = await store.get_latest_attempt(summary["rollout_id"])
            return rollout, attempt, await store.query_spans(summary["rollout_id"])
        finally:
            await store.close()

    return asyncio.run(read())


def chat(model, base="$OPENAI_BASE_URL", key="Authorization: Bearer $OPENAI_API_KEY", path="chat/completions"):
    """A call, in bash."""
    body = json.dumps({"model": model, "max_tokens": 9, "messages": [{"role": "user", "content": "6*7?"}]})
    return f"""curl -sS -f -H "{key}" -H "Content-Type: application/json" -d '{body}' {base}/{path}"""


def running():
    """Processes that have not ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[0] != "Z":
                yield stat.parent.name


@pytest.mark.slow
def test_what_a_python_program_emits_is_recorded_and_the_token_is_out_of_reach(clean):
    look = "pathlib.Path(f'/proc/{os.getppid()}/environ').read_bytes()"
    program = f"import os, pathlib, agentlightning as agl\nagl.emit_reward(0.5)\nprint(b'secret-token' in {look})"
    own = {**os.environ, "AGL_TOKEN": "secret-token"}
    command = [AGL, "run", "--json", "--", sys.executable, "-c", program]
    ended = subprocess.run(command, env=own, text=True, capture_output=True, timeout=100)
    said, summary = ended.stdout.splitlines()
    assert (json.loads(summary)["reward"], said) == (0.5, "False"), ended.stderr


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_calls_to_the_provider_of_the_environment_are_recorded_as_they_are(run, provider, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", f"{provider.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    code, summary = run(
        "--task", '{"question": "6*7"}', "--reward", "1", "--mode", "val", "--", "bash", "-c", chat("gpt-4o")
    )
    assert (code, summary["status"], summary["calls"], summary["reward"]) == (0, "succeeded", 1, 1.0)
    assert (summary["input_tokens"], summary["output_tokens"]) == (5, 2)
    [asked] = provider.seen
    assert asked["path"] == "/v1/chat/completions"
    assert asked["headers"]["authorization"] == f"Bearer {KEY}"
    rollout, attempt, spans = recorded(summary)
    assert (rollout.input, rollout.mode, rollout.status) == ({"question": "6*7"}, "val", "succeeded")
    assert attempt.metadata["exit_code"] == 0
    [call] = [span for span in spans if ATTRIBUTION in span.attributes]
    assert "6*7?" in call.attributes[INPUT_MESSAGES]
    assert "42" in call.attributes[OUTPUT_MESSAGES]
    assert KEY not in repr((rollout, attempt, spans, summary))
    assert KEY.encode() not in b"".join(path.read_bytes() for path in Path(".agentlightning").iterdir())


def test_each_provider_of_the_environment_gets_its_own_models(run, provider, monkeypatch):
    for name in ("OPENAI", "ANTHROPIC"):
        monkeypatch.setenv(f"{name}_BASE_URL", f"{provider.url}/{name}")
        monkeypatch.setenv(f"{name}_API_KEY", f"{KEY}-{name}")
    claude = chat("claude-x", "$ANTHROPIC_BASE_URL", "x-api-key: $ANTHROPIC_API_KEY", "v1/messages")
    listed = 'curl -sS -f -H "Authorization: Bearer $OPENAI_API_KEY" $OPENAI_BASE_URL/models > models.json'
    code, summary = run("--", "bash", "-c", f"{chat('gpt-4o')} && {claude} && {listed}")
    assert (code, summary["calls"], summary["failed_calls"]) == (0, 2, 0)
    assert [asked["path"] for asked in provider.seen] == ["/OPENAI/chat/completions", "/ANTHROPIC/v1/messages"]
    assert provider.seen[0]["headers"]["authorization"] == f"Bearer {KEY}-OPENAI"
    assert provider.seen[1]["headers"]["x-api-key"] == f"{KEY}-ANTHROPIC"
    models = json.loads(Path("models.json").read_text())["data"]
    assert [model["id"] for model in models] == ["claude-OPIC", "gpt-ENAI"]


ENVIRONMENTS = {
    "both keys": {"OPENAI_API_KEY": f"{KEY}-o", "ANTHROPIC_API_KEY": f"{KEY}-a"},
    "a token": {"ANTHROPIC_AUTH_TOKEN": f"{KEY}-t", "OPENAI_API_KEY": f"{KEY}-o"},
    "no key": {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"},
    "a key of ours": {"OPENAI_API_KEY": "agl-ro-1.at-1.0123", "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"},
}


@pytest.mark.parametrize("given", ENVIRONMENTS)
def test_an_address_in_the_code_gets_the_keys_it_always_got_and_never_ours(given, run, provider, monkeypatch):
    keys = ENVIRONMENTS[given]
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    elsewhere = chat("m", f"{provider.url}/v1")
    claude = chat("c", provider.url, "x-api-key: $ANTHROPIC_API_KEY$ANTHROPIC_AUTH_TOKEN", "v1/messages")
    _, summary = run("--", "bash", "-c", f"{elsewhere} && {claude}")
    assert summary["calls"] == 0
    openai, anthropic = (asked["headers"] for asked in provider.seen)
    placeholder = "sk-agentlightning"
    own = keys.get("OPENAI_API_KEY", placeholder)
    assert openai["Authorization"] == f"Bearer {placeholder if own.startswith('agl-') else own}"
    tokens = keys.get("ANTHROPIC_API_KEY"), keys.get("ANTHROPIC_AUTH_TOKEN")
    assert anthropic["x-api-key"] == next(filter(None, tokens), placeholder)
    assert not any("agl-" in value for asked in provider.seen for value in asked["headers"].values())


@pytest.mark.parametrize(
    ("base", "key"),
    [
        ("$OPENAI_BASE_URL", "Authorization: Bearer $OPENAI_API_KEY"),
        ("$OPENAI_BASE_URL", "Authorization: Bearer agl-another.attempts.key"),
        ("$OPENAI_BASE_URL", "X-Nothing: 1"),
        ("$AGL_OPENAI_BASE_URL", "Authorization: Bearer $AGL_KEY"),
        ("$AGL_WORKER_BASE_URL", "Authorization: Bearer $AGL_WORKER_KEY"),
    ],
)
def test_a_call_to_the_given_address_is_recorded_whatever_its_key(base, key, run, provider, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", f"{provider.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    code, summary = run("--", "bash", "-c", chat("gpt-4o", base, key))
    assert (code, summary["calls"]) == (0, 1)
    assert provider.seen[0]["headers"]["authorization"] == f"Bearer {KEY}"


def test_what_was_recorded_can_be_read(run, invoke, provider, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", f"{provider.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    _, summary = run("--task", "six times seven", "--reward", "1", "--", "bash", "-c", f"{chat('gpt-4o')}; exit 2")
    for given in ([], [summary["rollout_id"][:10]]):
        text = invoke("store", "show", *given).stdout
        for expected in (
            summary["rollout_id"],
            "six times seven",
            "6*7?",
            "42",
            "5 tokens in",
            "exit code 2",
            "reward 1.0",
        ):
            assert expected in text
    record = json.loads(invoke("store", "show", "--json").stdout)
    assert record["rollout"]["rollout_id"] == summary["rollout_id"]
    assert len(record["spans"]) == 2
    assert "no rollout 'ro-zz'" in invoke("store", "show", "ro-zz").stderr


def test_what_a_program_says_of_itself_is_kept_with_it(run):
    program = """
import json, os, urllib.request
event = json.dumps({"event_type": "reward", "data": {"value": {"right": 1, "short": 0.5}}}).encode()
headers = {"Authorization": "Bearer " + os.environ["AGL_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["AGL_EVENT_URL"], event, headers)).close()
assert json.loads(os.environ["AGL_TASK"]) == "a question"
assert "AGL_TOKEN" not in os.environ and "OPENAI_BASE_URL" not in os.environ
"""
    code, summary = run("--task", "a question", "--", sys.executable, "-c", program)
    assert (code, summary["reward"], summary["redirected"]) == (0, {"right": 1.0, "short": 0.5}, False)
    rollout, _, _ = recorded(summary)
    assert rollout.input == "a question"
    assert rollout.metadata["source"] == "agl run"


def test_a_task_that_no_variable_can_hold_is_recorded_and_left_out_of_the_environment(run, clean):
    (clean / "task.txt").write_text("long " * 50_000)
    code, summary = run("--input", "task.txt", "--", "bash", "-c", 'test -z "$AGL_TASK"')
    assert (code, summary["status"]) == (0, "succeeded")
    rollout, _, _ = recorded(summary)
    assert rollout.input == "long " * 50_000


def test_a_reward_function_sees_the_task_and_what_was_printed(run, clean, capfd):
    (clean / "judge.py").write_text("def right(task, output):\n    return float(str(task['answer']) in output)\n")
    code, summary = run("--task", '{"answer": 42}', "--reward", "judge.py:right", "--", "echo", "it is 42")
    assert (code, summary["reward"]) == (0, 1.0)


async def test_a_reward_function_that_takes_its_time_holds_up_neither_heartbeat_nor_server():
    release, store = threading.Event(), InMemoryLightningStore()

    def patient(task, output):
        return float(release.wait(2))

    started = await store.start_rollout({})
    asyncio.get_running_loop().call_soon(release.set)
    await record_reward(RewardFunction.of(patient), store, started, b"")
    assert find_final_reward(await store.query_spans(started.rollout_id)) == 1.0
    await store.close()


def test_keys_in_a_command_line_are_not_kept(run, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", KEY)
    code, summary = run("--", "bash", "-c", f'test {KEY} = "$SOME_API_KEY"')
    assert code == 0
    rollout, _, _ = recorded(summary)
    assert rollout.input == {"command": ["bash", "-c", 'test $SOME_API_KEY = "$SOME_API_KEY"']}


@pytest.mark.slow
def test_an_agent_names_itself_in_a_program_of_its_own(run, provider, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{provider.url}/v1")
    program = """
import os, httpx
import agentlightning as agl
with agl.track_agent("solver"):
    asked = {"model": "gpt-4o", "messages": [{"role": "user", "content": "6*7?"}]}
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=asked, headers=key).raise_for_status()
"""
    code, summary = run("--", sys.executable, "-c", program)
    assert (code, summary["agents"]) == (0, ["solver"])
    _, _, spans = recorded(summary)
    assert [span.attributes[AGENT_NAME] for span in spans] == ["solver"]
    assert "baggage" not in {name.lower() for name in provider.seen[0]["headers"]}


# -- how it ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("script", "code", "says"), [("exit 3", 3, "exit code 3"), ("kill -KILL $$", 137, "SIGKILL")])
def test_it_ends_as_the_command_ends(run, script, code, says):
    ended, summary = run("--", "bash", "-c", script)
    assert (ended, summary["exit_code"], summary["status"]) == (code, code, "failed")
    _, attempt, _ = recorded(summary)
    assert says in attempt.metadata["error"]["message"]
    assert attempt.metadata["exit_code"] == code


def test_an_address_in_the_code_is_named_before_the_error_that_it_causes(run, provider, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", f"{provider.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    code, summary = run("--", "bash", "-c", chat("gpt-4o", base="http://127.0.0.1:9/v1"))
    assert (summary["calls"], summary["exit_code"]) == (0, code)
    address, itself = summary["advice"]
    assert "base_url=" in address
    assert f"exit code {code}; run the command by itself" in itself


def test_a_command_that_takes_too_long_is_ended_with_all_it_has_started(run, clean):
    script = f"sleep 600 & echo $! > {clean}/pid; wait"
    code, summary = run("--timeout", "0.3", "--", "bash", "-c", script)
    assert (code, summary["status"]) == (143, "timeout")
    assert "0.3 s" in summary["error"]
    started = int((clean / "pid").read_text())
    assert not any(int(pid) == started for pid in running())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "no-such-program-here"], "no program 'no-such-program-here'"),
        (["--task", "a", "--input", "b", "--", "true"], "--task and --input"),
        (["--input", "missing.txt", "--", "true"], "missing.txt"),
        (["--reward", "nan", "--", "true"], "not finite|learned from"),
        (["--server", "http://127.0.0.1:9", "--model", "x", "--", "true"], "leave out --model"),
        pytest.param(["--model", "./no-such-directory", "--", "true"], "no directory", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(invoke, clean, arguments, message):
    result = invoke("run", *arguments)
    assert result.exit_code in (1, 2)
    assert re.search(message, result.stderr), result.stderr
    assert not Path(".agentlightning").exists()


@pytest.mark.slow
def test_streams_signals_and_exit_code_are_the_commands_own(clean):
    script = """
import signal, sys
def stop(*_):
    print("asked to stop", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
print("got", input(), flush=True)
print("on stderr", file=sys.stderr, flush=True)
signal.pause()
"""
    pipe = subprocess.PIPE
    command = [AGL, "run", "--", sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("a line\n")
        process.stdin.flush()
        assert process.stdout.readline() == "got a line\n"
        assert process.stderr.readline() == "on stderr\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "asked to stop\n"
        assert "failed in" in process.stderr.readline()
        assert process.wait(30) == 7


@pytest.mark.slow
def test_the_terminal_is_the_commands_own_and_ctrl_c_comes_once(clean):
    script = """
import os, signal, sys, time
heard = []
signal.signal(signal.SIGINT, lambda *_: heard.append(1))
print(os.isatty(0), os.isatty(1), flush=True)
while not heard:
    time.sleep(0.05)
time.sleep(0.5)
print("heard", len(heard), flush=True)
sys.exit(5)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(AGL, [AGL, "run", "--", sys.executable, "-c", script])
    shown = b""
    while b"True True" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    while b"reward" not in shown:
        shown += os.read(terminal, 4096)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert b"heard 1" in shown
    assert os.waitstatus_to_exitcode(status) == 5


@pytest.mark.slow
def test_a_server_records_it_too(start, run, clean):
    server = start("serve", "--port", "0", "--store", "s.db", "--json", AGL_TOKEN="t0p")
    url = server.line()["url"]
    code, summary = run("--server", url, "--token", "t0p", "--reward", "0.5", "--", "true")
    assert (code, summary["reward"], summary["store"]) == (0, 0.5, url)
    refused, message = run("--server", url, "--token", "wrong", "--", "true")
    assert refused == 1
    assert attempt_secret("t0p") not in str(message)


# -- the providers of an environment -----------------------------------------------------------------------------------


def test_nothing_in_the_environment_means_no_provider():
    assert inherited_config({"PATH": "/bin", "OPENAI_API_KEY": ""}) is None


def test_one_provider_serves_every_model():
    config = inherited_config({"ANTHROPIC_AUTH_TOKEN": "a-token"})
    [provider] = config.providers
    assert provider.base_urls == ("https://api.anthropic.com",)
    assert provider.headers == {"authorization": "Bearer a-token"}
    assert [(rule.model, rule.provider) for rule in config.routes] == [("*", "anthropic")]


def test_names_nobody_knows_go_where_the_url_is_not_the_usual_one():
    config = inherited_config({"OPENAI_API_KEY": "k", "ANTHROPIC_API_KEY": "k", "ANTHROPIC_BASE_URL": "http://a/b"})
    assert [(rule.model, rule.provider) for rule in config.routes][-1] == ("*", "anthropic")
    assert ("gpt-*", "openai") in [(rule.model, rule.provider) for rule in config.routes]
    config = inherited_config({"OPENAI_API_KEY": "k", "OPENAI_API_BASE": "http://vllm/v1", "ANTHROPIC_API_KEY": "k"})
    assert [(rule.model, rule.provider) for rule in config.routes] == [("claude*", "anthropic"), ("*", "openai")]
