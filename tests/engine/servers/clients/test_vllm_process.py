"""A server we start ends with us, however we end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentlightning.engine.servers.clients import guard_process
from agentlightning.engine.servers.clients.vllm import VllmProcess
from agentlightning.engine.servers.config import ServersConfig
from agentlightning.engine.servers.pool import open_servers
from agentlightning.errors import ConfigError, ServerError
from agentlightning.testing import ByteChatFormat
from agentlightning.transport import Transport

FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""
OWNER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-I", sys.argv[1], "5", sys.executable, "-c", sys.argv[2], sys.argv[3]],
                 stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
"""
SERVER = """
import http.server, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
print("told:", sys.argv[1:], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    end = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.01)


def read_pid(path: Path) -> int:
    end = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return int(path.read_text())


def test_started_servers_end_when_we_are_killed(tmp_path: Path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, guard_process.__file__, FAMILY, str(tmp_path / "pid")])
    pid = read_pid(tmp_path / "pid")
    assert alive(pid)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    wait_until_gone(pid)


def test_the_workers_of_a_server_that_crashed_end_too(tmp_path: Path):
    crashes = FAMILY.replace("time.sleep(600)\n", "sys.exit(3)\n")
    words = [sys.executable, "-I", guard_process.__file__, "5", sys.executable, "-c", crashes, str(tmp_path / "pid")]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as guarding:
        pid = read_pid(tmp_path / "pid")
        assert guarding.wait() == 3
        wait_until_gone(pid)


async def test_a_server_gets_its_options_and_restarts_with_other_weights(tmp_path: Path):
    transport = Transport()
    command = (sys.executable, "-c", SERVER)
    child = VllmProcess(transport, tmp_path / "m", "mine", tmp_path / "x.log", command, ("--more",), seconds=20)
    await child.restart(None)
    told = (tmp_path / "x.log").read_text()
    for words in ("'serve', '" + str(tmp_path / "m"), "'processed_logprobs'", "'mine'", "'127.0.0.1'", "'--more'"):
        assert words in told
    guard = child._process
    assert guard is not None
    await child.restart(tmp_path / "newer")
    assert str(tmp_path / "newer") in (tmp_path / "x.log").read_text()
    assert not child.ended
    assert not alive(guard.pid)
    await child.close()
    await child.close()
    assert child.ended
    await transport.close()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            f"{sys.executable} -c \"print('no such device'); raise SystemExit(4)\"",
            r"exit status 4[\s\S]*no such device",
        ),
        (f'{sys.executable} -c "import time; time.sleep(60)"', r"did not listen within 0.4 s"),
    ],
)
async def test_a_server_that_does_not_start_says_why(tmp_path: Path, command: str, words: str):
    config = ServersConfig(command=command, start_seconds=0.4 if "sleep" in command else 20)
    with pytest.raises(ServerError, match=words):
        await open_servers(config, ByteChatFormat(), model=tmp_path, logs=tmp_path)


@pytest.mark.parametrize("command", ["/no/such/vllm", "no-such-vllm --x", ""])
async def test_a_missing_program_is_named(tmp_path: Path, command: str):
    with pytest.raises(ConfigError, match="is no program here; install vLLM"):
        await open_servers(ServersConfig(command=command), ByteChatFormat(), model=tmp_path, logs=tmp_path)
