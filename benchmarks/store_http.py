"""What a store over HTTP carries, ours beside Agent Lightning 0.3's and 1.0's: `python benchmarks/store_http.py`.

Server and client are a process each, on loopback. Ours is `agl serve` on a durable file with LightningStoreClient; 0.3
is `agl store` (in memory) with its own client; 1.0 its server (in memory) with its own client: it has no claim and no
spans, so a cycle there is enqueue, set running, eight events, finish, query. The peers are called by eight tasks at
once, which suits both best of 1, 4, 8, 16 and 64; the arms take turns, each time on a new server.

    python benchmarks/store_http.py [--rounds 3] [--seconds 2] [--callers 64] [--postgres] [--check] [--json]
"""

from __future__ import annotations

import argparse
import sys

from harness import Arm, Case, Limit, add_options, postgres, report, take_turns

BATCH, ONE = "cycles: ours, durable, add_many_spans of 8", "cycles: ours, durable, add_span one by one"
SPANS, SPANS_BATCHED = "spans: ours, durable, add_span one by one", "spans: ours, durable, add_many_spans of 100"
PEER, PEER_SPANS = "cycles: 0.3, in memory", "spans: 0.3, in memory"
OLD, OLD_SPANS = "cycles: 1.0, in memory", "events: 1.0, in memory"
LIMITS = [
    Limit("cycles: ours, batches / 0.3", BATCH, PEER, 20),
    Limit("cycles: ours, one by one / 0.3", ONE, PEER, 20),
    Limit("spans: ours, batches of 100 / 0.3", SPANS_BATCHED, PEER_SPANS, 50),
    Limit("spans: ours, one by one / 0.3", SPANS, PEER_SPANS, 50),
    Limit("cycles: ours, batches / 1.0", BATCH, OLD, 1),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=3, seconds=2.0)
    parser.add_argument("--callers", type=int, default=64, help="tasks that call our client at once")
    options = parser.parse_args()
    with postgres(options.postgres) as options.postgres:
        cases = take_turns(make_cases(options), options.rounds)
    return report("store over HTTP", cases, LIMITS, options, unit="a second", extra=latency)


def latency(case: Case) -> str:
    return f"  p50 {case.answers[-1]['p50_ms']:.1f} ms, p99 {case.answers[-1]['p99_ms']:.0f} ms"


def make_cases(options: argparse.Namespace) -> list[Case]:
    ours = Arm("ours")
    common = {"callers": options.callers, "seconds": options.seconds}
    if options.directory:
        common["directory"] = str(options.directory)
    cases = [
        Case(BATCH, ours, "http_cycles", {"batched": True, **common}),
        Case(ONE, ours, "http_cycles", {"batched": False, **common}),
        Case(SPANS_BATCHED, ours, "http_spans", {"batch": 100, **common}),
        Case(SPANS, ours, "http_spans", {"batch": 1, **common}),
    ]
    if options.postgres:
        there = {"database": options.postgres, "batched": True, **common}
        cases.append(Case("cycles: ours, PostgreSQL, add_many_spans of 8", ours, "http_cycles", there))
    return cases if options.ours else cases + peer_cases(options.seconds)


def peer_cases(seconds: float) -> list[Case]:
    cases = []
    peer, old = Arm("agl03"), Arm("agl1")
    # Its client sends a batch one by one as well, so there is one way to add spans.
    for name, arm, job, arguments in (
        (PEER, peer, "http_cycles", {"batched": False}),
        (PEER_SPANS, peer, "http_spans", {"batch": 1}),
        (OLD, old, "http_cycles", {}),
        (OLD_SPANS, old, "http_spans", {}),
    ):
        cases.append(Case(name, arm, job, {**arguments, "callers": 8, "seconds": seconds}))
    return cases


if __name__ == "__main__":
    sys.exit(main())
