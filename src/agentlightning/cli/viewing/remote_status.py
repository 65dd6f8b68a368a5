"""The state of a run on a server elsewhere, read from the JSON of its dashboard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs, quote, urlsplit

import httpx

from agentlightning.errors import NotFoundError, ServerError, StoreAuthError

TIMEOUT: Final = 30.0
MOST_FAILURES: Final = 200
"""Failed rollouts that are counted by cause, the newest ones."""


def is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def remote_status(link: str, token: str | None, name: str | None) -> tuple[dict[str, Any], list[float | None]]:
    """The state of a run as `status.record_of` gives it, and its rewards by step. `link`: the address of a server, or
    the link of its dashboard, which may hold the token. `name`: which of its runs; None: the newest one.

    Raises ServerError, StoreAuthError or NotFoundError."""
    parts = urlsplit(link)
    token = token or next(iter(parse_qs(parts.fragment).get("token", [])), None)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    base = f"{parts.scheme}://{parts.netloc}"
    with httpx.Client(base_url=f"{base}/dashboard/api", headers=headers, timeout=TIMEOUT) as client:
        summary = _chosen(_get(client, "/runs", base)["runs"], name, base)
        path = f"/runs/{quote(summary['name'], safe='')}"
        found = _get(client, path, base)
        query = f"{path}/rollouts?state=failed&limit={MOST_FAILURES}"
        failed = _get(client, query, base)["rows"] if summary["failed_rollouts"] else []
    series = _series(found["curves"])
    return _record(base, found, series, failed), series.get("reward", [])


def _get(client: httpx.Client, path: str, server: str) -> dict[str, Any]:
    try:
        response = client.get(path)
    except httpx.HTTPError as error:
        raise ServerError(f"the server {server} cannot be reached: {error or type(error).__name__}") from error
    if response.status_code == 401:
        raise StoreAuthError(f"the server {server} requires its access token; set AGL_TOKEN, or give --token")
    try:
        body = response.raise_for_status().json()
    except (httpx.HTTPStatusError, ValueError) as error:
        raise ServerError(f"{server} has no dashboard that can be read: {error}") from error
    return body


def _chosen(runs: Sequence[dict[str, Any]], name: str | None, server: str) -> dict[str, Any]:
    """The run of a name; None: a running one, else the newest."""
    known = [each for each in runs if each["kind"] == "run" and not each.get("error")]
    if not known:
        raise NotFoundError(f"the server {server} shows no run; start it with --runs DIRECTORY")
    if name is None:
        return next((each for each in known if each["state"] == "running"), known[0])
    for each in known:
        if each["name"] == name:
            return each
    raise NotFoundError(f"the server {server} has no run {name!r}; it has: {', '.join(each['name'] for each in known)}")


def _series(curves: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """The values of each metric by step; `step` are the steps."""
    every = [*(each for chart in curves["charts"] for each in chart["series"]), *curves["others"]]
    return {"step": curves["steps"], **{each["metric"]: each["values"] for each in every}}


def _record(
    server: str, found: Mapping[str, Any], series: Mapping[str, list[float | None]], failed: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    summary: Mapping[str, Any] = found["summary"]
    validation, at = _last_validation(series)
    before = {mode: each["before"]["mean"] for mode, each in found["held_out"].items() if each["before"]}
    report: Mapping[str, Any] = found["report"] or {}
    return {
        "run_dir": f"{server} {summary['name']}",
        "status": summary["state"],
        "step": summary["step"],
        "steps": summary["steps"],
        "seconds": round(summary["seconds"], 1),
        "seconds_left": None if summary["time_left"] is None else round(summary["time_left"], 1),
        **reward_figures(series.get("reward", [])),
        "start": before,
        "validation": validation,
        "validated_at": at,
        "tokens_per_second": summary["tokens_per_second"],
        "rollouts": summary["rollouts"],
        "failed_rollouts": summary["failed_rollouts"],
        "rejected_rollouts": report.get("rejected_rollouts") or _rejected(series),
        "failures": _failures(failed),
        "warnings": {each["name"]: each["what"] for each in found["warnings"]},
        "prompts": found["prompts"],
        "prompt_diff": found["prompt_diff"],
    }


def reward_figures(rewards: Sequence[float | None]) -> dict[str, float | None]:
    """The last, the first and the best reward of the steps that have one."""
    known = [each for each in rewards if each is not None] or [None]
    return {"reward": known[-1], "first_reward": known[0], "best_reward": max(known, key=lambda each: each or 0.0)}


def _last_validation(series: Mapping[str, list[float | None]]) -> tuple[dict[str, float], int | None]:
    modes = {name.removeprefix("validation_"): own for name, own in series.items() if name.startswith("validation_")}
    for place in range(len(series["step"]) - 1, -1, -1):
        known = {mode: value for mode, own in modes.items() if (value := own[place]) is not None}
        if known:
            return known, int(series["step"][place] or 0)
    return {}, None


def _rejected(series: Mapping[str, list[float | None]]) -> dict[str, int]:
    sums = {name: sum(int(each or 0) for each in own) for name, own in series.items() if name.startswith("rejected_")}
    return {name.removeprefix("rejected_"): count for name, count in sums.items() if count}


def _failures(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    counts = Counter(str(row["failure_kind"]) for row in rows)
    examples = {str(row["failure_kind"]): f"{row['rollout_id']}: {row['failure'] or ''}" for row in rows}
    return [{"cause": cause, "count": n, "example": examples[cause]} for cause, n in counts.most_common()]
