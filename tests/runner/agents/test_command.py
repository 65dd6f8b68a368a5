from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import AgentError, Failure
from agentlightning.runner.agents.command import OUTPUT_BYTES, Command, CommandError


def sh(script: str, call: Any) -> str:
    return asyncio.run(Command(("sh", "-c", script), grace=0.3).start(call))


def wait_for(path: Path) -> str:
    for _ in range(1000):
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text()
        time.sleep(0.01)
    raise AssertionError(f"{path} was never written")


def gone(pid: int) -> bool:
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def alive_in(group: int) -> list[str]:
    """What still runs in a process group; the dead that nobody has buried yet do not count."""
    states = [path.read_text().rsplit(")", 1)[1].split() for path in Path("/proc").glob("[0-9]*/stat")]
    return [state for state, _, pgrp, *_ in states if int(pgrp) == group and state != "Z"]


def emptied(group: int) -> bool:
    """Whether a process group has nothing alive in it, once what was killed has had the time to die."""
    for _ in range(1000):
        if not alive_in(group):
            return True
        time.sleep(0.01)
    return False


def test_the_task_is_in_the_environment_and_on_stdin(make_call: Any) -> None:
    output = sh('printf "%s|" "$AGL_TASK"; cat', make_call({"q": "é"}))
    assert output == '{"q":"é"}|{"q":"é"}'


def test_a_task_too_long_for_the_environment_is_on_stdin(make_call: Any) -> None:
    output = sh('printf "%s|" "$AGL_TASK"; wc -c', make_call("x" * 3_000_000))
    assert output.split("|")[0] == ""
    assert int(output.split("|")[1]) == 3_000_002


def test_a_program_need_not_read_its_stdin(make_call: Any) -> None:
    assert sh("exec 0<&-; echo done", make_call("x" * 3_000_000)) == "done\n"


def test_the_end_of_a_long_output_is_kept(make_call: Any) -> None:
    output = sh("yes filler | head -c 5000000; echo the end", make_call())
    assert len(output) == OUTPUT_BYTES
    assert output.endswith("the end\n")


def test_an_exit_code_is_a_failure_with_stderr_as_its_traceback(make_call: Any) -> None:
    with pytest.raises(CommandError, match="ended with exit code 3") as caught:
        sh("echo what went wrong >&2; exit 3", make_call())
    assert "stderr:\nwhat went wrong" in Failure.of(caught.value).traceback


def test_a_signal_is_named(make_call: Any) -> None:
    with pytest.raises(CommandError, match="was killed by SIGSEGV"):
        sh("kill -SEGV $$", make_call())


def test_a_program_that_cannot_be_started_is_named(make_call: Any, tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"no-such-program.*cannot be started"):
        asyncio.run(Command((str(tmp_path / "no-such-program"),)).start(make_call()))


def test_what_a_program_leaves_behind_ends_with_it(make_call: Any, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    output = sh(f"sleep 600 & echo $! > {pid}; echo done", make_call())
    assert output == "done\n"
    assert gone(int(wait_for(pid)))


def test_a_daemon_that_keeps_the_pipes_does_not_keep_the_attempt(make_call: Any, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"setsid sh -c 'echo $$ > {pid}; exec sleep 600' & while [ ! -s {pid} ]; do sleep 0.01; done; echo ok"
    assert sh(script, make_call()) == "ok\n"
    os.kill(int(wait_for(pid)), 9)


@pytest.mark.parametrize("script", ["sleep 600 & sleep 600", "trap '' TERM; sleep 600 & while :; do sleep 1; done"])
def test_a_stopped_program_is_gone_with_its_children_even_if_it_ignores_sigterm(
    make_call: Any, tmp_path: Path, script: str
) -> None:
    call, pid, groups = make_call(), tmp_path / "pid", list[int]()
    call.on_program = groups.append

    async def run() -> None:
        command = Command(("sh", "-c", f"echo $$ > {pid}; {script}"), grace=0.3)
        running = asyncio.create_task(command.start(call))
        group = int(await asyncio.to_thread(wait_for, pid))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert groups == [group, 0]

    asyncio.run(run())
    assert emptied(groups[0])
