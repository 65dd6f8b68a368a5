"""Promises about what a long job says while it runs."""

from __future__ import annotations

import io
import math
import threading
import time

import pytest
import rich.progress
from rich.console import Console

from agentlightning.util.progress import Progress, duration


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Progress, Clock, io.StringIO]:
    out, clock = io.StringIO(), Clock()
    return Progress(Console(file=out, force_terminal=False, width=40), clock=clock), clock, out


def test_without_a_terminal_there_are_plain_lines() -> None:
    progress, clock, out = plain()
    with progress:
        progress.phase("warm start", 480)
        for step in range(1, 481):
            clock.now += 0.05
            progress.update(step, loss=2.0)
        progress.phase("training", 40)
        clock.now += 6
        progress.update(3, reward=0.3123, tokens_per_second=3570.4, rollouts_per_second=6.26)
        progress.note("validation [best] 0.41")
        clock.now += 74
        progress.update(40, reward=0.5)
    lines = out.getvalue().splitlines()
    assert lines[0] == "warm start: 480 to do"
    assert lines[1] == "warm start: 101/480  loss 2.000  5 s elapsed  19 s left"
    assert len([line for line in lines if line.startswith("warm start:")]) == 6
    assert lines[-5:] == [
        "warm start: 480/480  loss 2.000  24 s elapsed",
        "training: 40 to do",
        "training: 3/40  reward 0.312  3,570 tokens/s  6.3 rollouts/s  6 s elapsed  1:14 left",
        "validation [best] 0.41",
        "training: 40/40  reward 0.500  3,570 tokens/s  6.3 rollouts/s  1:20 elapsed",
    ]


def test_the_first_of_many_items_which_is_slow_estimates_nothing() -> None:
    progress, clock, out = plain()
    with progress:
        progress.phase("warm start", 400)
        clock.now += 12
        progress.update(1)
        for done in range(2, 5):
            clock.now += 2
            progress.update(done)
        progress.phase("training", 40)
        clock.now += 12
        progress.update(1)
    lines = [line for line in out.getvalue().splitlines() if "elapsed" in line]
    assert lines[0] == "warm start: 1/400  12 s elapsed"
    assert lines[-2] == "warm start: 4/400  18 s elapsed  29:42 left"
    assert lines[-1] == "training: 1/40  12 s elapsed  7:48 left"


def test_a_slow_phase_speaks_every_five_seconds_and_a_fast_one_does_not_flood() -> None:
    progress, clock, out = plain()
    with progress:
        progress.phase("rollouts", 1000)
        for done in range(1, 101):
            clock.now += 0.5
            progress.update(done)
        progress.phase("fast", 1000)
        for done in range(1, 1001):
            clock.now += 0.0001
            progress.update(done)
    lines = out.getvalue().splitlines()
    assert len([line for line in lines if line.startswith("rollouts: ") and "elapsed" in line]) == 10
    assert [line for line in lines if line.startswith("fast")] == ["fast: 1000 to do", "fast: 1000/1000  0 s elapsed"]


def test_a_phase_without_progress_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, clock, out = plain()
    with progress:
        progress.phase("training", 40)
        clock.now += 14
        progress.tick()
        clock.now += 2
        progress.tick()
        progress.tick()
    assert out.getvalue().splitlines() == ["training: 40 to do", "training: 0/40  16 s elapsed"]
    monkeypatch.setattr("agentlightning.util.progress.SILENT_SECONDS", 0.03)
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=False, width=40)) as progress:
        progress.phase("loading")
        wait_for = time.monotonic() + 10
        while "loading: 0 s" not in out.getvalue() and time.monotonic() < wait_for:
            time.sleep(0.01)
    assert "loading: 0 s elapsed" in out.getvalue(), "said by itself"


def test_the_time_left_of_a_resumed_run_counts_what_it_did_itself() -> None:
    progress, clock, out = plain()
    with progress:
        progress.phase("training", 40, done=30)
        clock.now += 10
        progress.update(35)
    assert out.getvalue().splitlines()[1] == "training: 35/40  10 s elapsed  10 s left"


def test_a_phase_of_unknown_length_and_a_missing_figure_can_be_shown() -> None:
    progress, clock, out = plain()
    with progress:
        progress.phase("loading")
        clock.now += 9
        progress.update(7, reward=math.nan, tokens_per_second=math.nan, mode="greedy", tasks=1200)
    assert out.getvalue().splitlines() == [
        "loading ...",
        "loading: 7  reward -  tokens -  mode greedy  tasks 1,200  9 s elapsed",
    ]


def test_on_a_terminal_the_display_is_live_and_ends_with_the_last_figures() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, force_interactive=True, width=120, color_system=None)
    with Progress(console) as progress:
        progress.phase("warm [start]", 10)
        progress.update(10, loss=0.5)
        progress.phase("training", 40)
        progress.note("half way")
        progress.update(39, reward=0.1)
        progress.update(40, reward=0.875)
    text = out.getvalue()
    last = text[text.rindex("warm [start]") :]
    assert "10/10" in last
    assert "loss 0.500" in last
    assert "40/40" in last
    assert "reward 0.875" in last
    assert "half way" in text
    assert "\x1b[?25h" in text  # the cursor is back


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_off_on_a_narrow_terminal(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, force_interactive=True, width=width, color_system=None)
    with Progress(console) as progress:
        progress.phase("measuring the starting policy", 256)
        progress.update(256)
        progress.phase("training", 45)
        progress.update(45, reward=0.875, tokens_per_second=13570.0)
    last = out.getvalue()[-6 * width :]
    assert "measuring the starting policy" in last
    assert "reward 0.875  13,570 tokens/s" in last
    assert "\N{HORIZONTAL ELLIPSIS}" not in last


def test_the_cursor_comes_back_when_the_job_fails() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, force_interactive=True, width=120)

    def fail() -> None:
        with Progress(console) as progress:
            progress.phase("training", 3)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert "\x1b[?25h" in out.getvalue()


def test_nothing_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.phase("training", 2)
        progress.update(2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "training: 2/2" in captured.err


def test_disabled_it_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(enabled=False) as progress:
        progress.phase("training", 2)
        progress.update(1)
        progress.note("hello")
    assert capsys.readouterr() == ("", "")


def test_it_may_be_entered_within_itself_and_again() -> None:
    progress, _, out = plain()
    for _ in range(2):
        with progress:
            with progress:
                progress.phase("inner", 1)
                progress.update(1)
            progress.phase("outer", 1)
            progress.update(1)
    assert out.getvalue().count("inner: 1/1") == out.getvalue().count("outer: 1/1") == 2


def test_updates_outside_of_any_phase_are_harmless() -> None:
    Progress(enabled=True).update(3, reward=1.0)


def test_it_can_be_used_from_many_threads() -> None:
    progress, _, out = plain()

    def work() -> None:
        for done in range(200):
            progress.update(done, reward=0.5)

    with progress:
        progress.phase("training", 200)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(line.startswith("training: ") for line in out.getvalue().splitlines())


def test_an_update_costs_next_to_nothing() -> None:
    out = io.StringIO()
    live = Progress(Console(file=out, force_terminal=True, force_interactive=True, width=120))
    with live:
        live.phase("training", 20_000)
        began = time.thread_time()
        for done in range(20_000):
            live.update(done, reward=0.5)
        spent = time.thread_time() - began
    # Compared with the same number of the smallest possible rich updates, so that no absolute time is asserted.
    with rich.progress.Progress(console=Console(file=io.StringIO(), force_terminal=True)) as bare:
        bar = bare.add_task("training", total=2_000)
        began = time.thread_time()
        for done in range(2_000):
            bare.update(bar, completed=done)
        unthrottled = 10 * (time.thread_time() - began)
    assert spent < unthrottled


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (125, "2:05"), (3725, "1:02:05")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
