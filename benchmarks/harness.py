"""Arms that take turns, medians with their range, and ratios beside a limit: what the benchmarks here share.

Each arm is a process (arms/*.py) in its own environment: ours in this one, the peers where `benchmarks/peers.sh` put
them. A peer that is not there is left out, and says how to have it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PYTHONS = {
    "ours": Path(sys.executable),
    "raw": Path(sys.executable),
    "agl03": Path(os.environ.get("AGL_PEER_03") or HERE.parent / ".peers/agl03/bin/python"),
    "agl1": Path(os.environ.get("AGL_PEER_1") or HERE.parent / ".peers/agl1/bin/python"),
    "real_ours": Path(sys.executable),
    "real_transformers": Path(sys.executable),
    "real_trl": Path(os.environ.get("AGL_TRL_PYTHON") or HERE.parent / ".peers/trl/bin/python"),
    "real_llama_cpp": Path(os.environ.get("LLAMA_CPP_PYTHON") or HERE.parent / ".peers/llama_cpp/bin/python"),
    "real_vllm": Path(os.environ.get("AGL_VLLM") or HERE.parent / ".peers/vllm") / "bin/python",
}


class ArmError(Exception):
    """An arm could not do its job."""


class Arm:
    """One process that answers jobs; it starts with the first one."""

    def __init__(self, name: str, environment: dict[str, str] | None = None) -> None:
        self.name, self._environment = name, environment or {}
        self._process: subprocess.Popen[str] | None = None

    @property
    def there(self) -> bool:
        return PYTHONS[self.name].exists()

    def ask(self, job: str, **arguments: Any) -> dict[str, Any]:
        self.send(job, **arguments)
        return self.receive(job)

    def send(self, job: str, **arguments: Any) -> None:
        if self._process is None:
            command = [str(PYTHONS[self.name]), "-W", "ignore", str(HERE / "arms" / f"{self.name}.py")]
            environment = dict(os.environ) | self._environment
            if PYTHONS[self.name] != PYTHONS["ours"]:
                environment.pop("PYTHONPATH", None)  # it would lead a peer to our package
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)
        assert self._process.stdin is not None
        print(json.dumps({"job": job, **arguments}), file=self._process.stdin, flush=True)

    def receive(self, job: str) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or '{"error": "it ended"}')
        if "error" in answer:
            raise ArmError(f"{self.name}, {job}: {answer['error']}")
        return answer

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None


@dataclass
class Case:
    """One thing that is measured, again and again in turn with the others."""

    name: str
    arm: Arm
    job: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    value: str = "cycles_per_second"
    answers: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    @property
    def values(self) -> list[float]:
        return [answer[self.value] for answer in self.answers]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def measure(self) -> None:
        self.answers.append(self.arm.ask(self.job, **self.arguments))


@dataclass(frozen=True)
class Limit:
    """`ours` must be at least (`at_most`: no more than) `times` what `peer` does."""

    text: str
    ours: str
    peer: str
    times: float
    at_most: bool = False


def add_options(parser: argparse.ArgumentParser, *, rounds: int, seconds: float | None = None) -> None:
    """What every benchmark takes; with `seconds` also how long one measurement is, and a PostgreSQL."""
    parser.add_argument("--rounds", type=int, default=rounds, help="how often the arms take turns")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="of each measurement")
        help_text = "ours on PostgreSQL as well; without a URL on a throw-away server"
        parser.add_argument("--postgres", metavar="URL", nargs="?", const="new", help=help_text)
    parser.add_argument("--directory", type=Path, default=None, help="where the database files go")
    parser.add_argument("--ours", action="store_true", help="leave the peers out")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a limit is missed")
    parser.add_argument("--json", action="store_true")


@contextlib.contextmanager
def postgres(named: str | None) -> Iterator[str | None]:
    """The URL of the database that `--postgres` names; "new" makes a server of its own that is gone afterwards."""
    if named != "new":
        yield named
        return
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.support.postgres import PostgresCluster

    with PostgresCluster() as cluster:
        yield cluster.new_database()


def present(cases: Sequence[Case]) -> list[Case]:
    missing = sorted({case.arm.name for case in cases if not case.arm.there})
    for name in missing:
        print(f"{name} is left out: {PYTHONS[name]} is not there; run benchmarks/peers.sh", file=sys.stderr)
    return [case for case in cases if case.arm.there]


def take_turns(cases: Sequence[Case], rounds: int) -> list[Case]:
    """Measure every case once a round; what an arm cannot do is said and left out."""
    left = present(cases)
    for _ in range(rounds):
        for case in list(left):
            try:
                case.measure()
            except ArmError as error:
                print(f"{case.name} is left out: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
                left.remove(case)
    for arm in {id(case.arm): case.arm for case in cases}.values():
        arm.close()
    return left


def best(arm: Arm, job: str, option: str, choices: Sequence[Any], arguments: dict[str, Any]) -> Any:
    """The choice with which an arm is fastest, by one short try of each: a peer is measured at its best."""
    if not arm.there:
        return choices[0]
    tried = {choice: arm.ask(job, **arguments, **{option: choice}) for choice in choices}
    return max(choices, key=lambda choice: next(iter(tried[choice].values())))


def judge(cases: Sequence[Case], limits: Sequence[Limit]) -> list[dict[str, Any]]:
    """Each limit whose two cases were measured, with the ratio of the medians and of each round."""
    by_name = {case.name: case for case in cases}
    verdicts = []
    for limit in limits:
        if limit.ours in by_name and limit.peer in by_name:
            ours, peer = by_name[limit.ours], by_name[limit.peer]
            ratio = ours.median / peer.median
            each = [a / b for a, b in zip(ours.values, peer.values, strict=True)]
            met = ratio <= limit.times if limit.at_most else ratio >= limit.times
            verdicts.append(
                {"text": limit.text, "ratio": ratio, "low": min(each), "high": max(each), "limit": limit.times}
                | {"met": met, "at_most": limit.at_most}
            )
    return verdicts


def report(
    title: str,
    cases: Sequence[Case],
    limits: Sequence[Limit],
    options: argparse.Namespace,
    *,
    unit: str = "cycles/s",
    extra: Callable[[Case], str] = lambda _: "",
) -> int:
    """Print everything; the exit status is 1 with `--check` where a limit is missed."""
    verdicts = judge(cases, limits)
    if options.json:
        measured = {c.name: {"median": c.median, "values": c.values, "last": c.answers[-1]} for c in cases}
        print(json.dumps({"title": title, "measured": measured, "verdicts": verdicts}))
    else:
        print(f"{title}: {unit}, median (lowest to highest of {len(cases[0].values) if cases else 0} rounds)")
        for case in cases:
            low, high = min(case.values), max(case.values)
            print(f"  {case.name:58}{case.median:12,.0f}   ({low:,.0f} to {high:,.0f}){extra(case)}")
        for verdict in verdicts:
            print_verdict(verdict)
    return int(options.check and not all(verdict["met"] for verdict in verdicts))


def print_verdict(verdict: dict[str, Any]) -> None:
    word = "MET   " if verdict["met"] else "MISSED"
    bound = "at most" if verdict["at_most"] else "at least"
    print(
        f"  {word}  {verdict['text']}: {verdict['ratio']:.3g}x "
        f"({verdict['low']:.3g} to {verdict['high']:.3g}), limit {bound} {verdict['limit']:g}x"
    )
