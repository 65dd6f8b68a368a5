"""`agl status`, `agl report`, `agl doctor`, `agl dashboard` and `agl env`: looks at runs, and at this machine."""

from __future__ import annotations

import math
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import parse_qs, quote, urlsplit

import typer
from rich.console import Console

from agentlightning.cli.options import (
    POSTGRES,
    RUNS,
    GivenStore,
    Run,
    Token,
    database_name,
    is_url,
    open_named,
    run_or_newest,
)
from agentlightning.cli.output import Output, Result, agl, failure_lines, print_prompt_diff
from agentlightning.errors import AgentLightningError, ConfigError, NotFoundError, ServerError, StoreAuthError
from agentlightning.util.plugins import PACKAGE, Registry, announced, described, installed, load
from agentlightning.util.printable import printable
from agentlightning.util.progress import duration, rewards_line

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from agentlightning.dashboard.data.run_data import Catalog
    from agentlightning.training.health.examination import Examination


LOOK: Final = {"finished": ("report",), "unfinished": ("train", "--resume")}
"""The verb that leads on from a run, by its status."""


def status(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The directory of a run (running, finished or crashed; default: the newest below runs), or the address"
            " of a server that shows it: the link of its dashboard.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--run", help="Of a server: which of its runs. Default: the running one.", show_default=False),
    ] = None,
    token: Token = None,
) -> Result:
    """Say how far a training run is: its step, reward, validation, speed, failures and warnings.

    \b
    Examples:
      agl status
      agl status runs/first --json
      agl status http://hub:4747 --run first
    """
    if target is not None and is_url(target):
        record, rewards = remote_status(target, token, name)
        after = []
    else:
        run = run_or_newest(None if target is None else Path(target))
        record, rewards = _local_status(run, name)
        after = [agl(*LOOK.get(record["status"], ("dashboard",)), run)]
    return Result(record, lambda console: _print_status(record, rewards, console), after)


def _local_status(run: Path, name: str | None) -> tuple[dict[str, Any], list[float | None]]:
    from agentlightning.dashboard.data.run_files import open_run, status_record

    if name is not None:
        raise ConfigError(f"--run {name} chooses among the runs of a server, and {run} is a directory; leave it out")
    return status_record(open_run(run))


def _print_status(record: dict[str, Any], rewards: list[float | None], console: Console) -> None:
    of = "" if record["steps"] is None else f" of {record['steps']}"
    left = "" if record["seconds_left"] is None else f", about {duration(record['seconds_left'])} left"
    head = f"{record['run_dir']}: {record['status']}, step {record['step']}{of}, {duration(record['seconds'])}{left}"
    console.print(head)
    if line := rewards_line([math.nan if each is None else each for each in rewards]):
        console.print(f"reward      {line}")
    for mode, value in record["validation"].items():
        console.print(f"validation  {mode} {value:.3f}  (step {record['validated_at']})")
    for mode, value in record["start"].items():
        scored, tasks = record.get("start_tasks", {}).get(mode, (0, 0))  # A server elsewhere may be older.
        some = "" if scored == tasks else f"{scored} of {tasks} "
        console.print(f"start       {mode} {value:.3f}, on {some}held-out tasks")
    if record["tokens_per_second"]:
        console.print(f"speed       {record['tokens_per_second']:,.0f} tokens/s")
    rejected = sum(record["rejected_rollouts"].values())
    if record["sessions"] is None:
        console.print(f"rollouts    {record['rollouts']}, {record['failed_rollouts']} failed, {rejected} rejected")
    else:
        console.print(f"sessions    {record['sessions']}")
    for each in record["failures"]:
        console.print(f"failed      {each['count']}  {printable(each['cause'])}  {printable(each['example'])}")
    for text in record["warnings"].values():
        console.print(f"warning     {printable(text)}", style="yellow")
    if record["prompts"]:
        print_prompt_diff(record["prompt_diff"], console)


# -- of a server elsewhere --------------------------------------------------------------------------------------------


TIMEOUT: Final = 30.0


def remote_status(link: str, token: str | None, name: str | None) -> tuple[dict[str, Any], list[float | None]]:
    """The state of a run as `status_record` gives it, and its rewards by step. `link`: the address of a server, or
    the link of its dashboard, which may hold the token. `name`: which of its runs; None: the newest one.

    Raises ServerError, StoreAuthError or NotFoundError."""
    base, token = server_of(link, token)
    summary = _chosen(get_page(base, token, "/runs")["runs"], name, base)
    found = get_page(base, token, f"/runs/{quote(summary['name'], safe='')}/status")
    return {**found["status"], "run_dir": f"{base} {summary['name']}"}, found["rewards"]


def server_of(link: str, token: str | None) -> tuple[str, str | None]:
    """The address of a server, and its token: of what a link of its dashboard says, unless one is given."""
    parts = urlsplit(link)
    return f"{parts.scheme}://{parts.netloc}", token or next(iter(parse_qs(parts.fragment).get("token", [])), None)


def get_page(server: str, token: str | None, path: str) -> dict[str, Any]:
    """The JSON of a page of a server's dashboard. Raises ServerError or StoreAuthError."""
    import httpx

    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        response = httpx.get(f"{server}/dashboard/api{path}", headers=headers, timeout=TIMEOUT)
    except httpx.HTTPError as error:
        raise ServerError(f"the server {server} cannot be reached: {error or type(error).__name__}") from error
    if response.status_code == 401:
        problem = "does not accept this access token" if token else "requires its access token"
        raise StoreAuthError(f"the server {server} {problem}; set AGL_TOKEN, or give --token")
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


# -- agl report -------------------------------------------------------------------------------------------------------


async def report(
    run: Run = None,
    html: Annotated[bool, typer.Option("--html", help="Write a page with curves, which needs no server.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="File to write (default: RUN/report.html; text is printed).", show_default=False)
    ] = None,
    examples: Annotated[int, typer.Option(min=0, help="Changed tasks to show with their conversations.")] = 3,
    store: GivenStore = None,
) -> Result:
    """Report what a run changed: held-out reward with its interval, tasks won and lost, cost, examples.

    \b
    Examples:
      agl report
      agl report runs/first --html --out first.html
    """
    run = run_or_newest(run)
    text = await _report(run, html, examples, store)
    path = out or (run / "report.html" if html else None)
    if path is not None:
        path.write_text(text, encoding="utf-8")
    record = {"run": str(run), "file": None if path is None else str(path), **({} if path else {"text": text})}
    shown = text if path is None else f"wrote {path}"
    return Result(record, lambda console: console.print(shown), [agl("dashboard", run)])


async def _report(run: Path, html: bool, examples: int, store: str | None) -> str:
    from agentlightning.dashboard.data.run_files import open_run
    from agentlightning.dashboard.report_page import report_page
    from agentlightning.training.report.result import markdown_report

    open_run(run)
    make = report_page if html else markdown_report
    if store is None:
        return await make(run, examples)
    async with open_named(store) as opened:
        return await make(run, examples, opened)


# -- agl doctor -------------------------------------------------------------------------------------------------------


def doctor(run: Run = None) -> Result:
    """Say what is wrong with a training run, since which step, and what to try.

    The run may be running, finished or crashed. Exit status: 0 healthy; 1 there are warnings; 2 this is no run.

    \b
    Examples:
      agl doctor
      agl doctor runs/first --json
    """
    from agentlightning.training.health.examination import examine

    found = examine(run_or_newest(run))
    failed = agl("store", "list", run=found.run_dir, status="failed")
    other = agl("train", resume=found.run_dir) if "ended" in found.warnings else agl("dashboard", found.run_dir)
    after = [failed if found.failures else other]
    return Result(_findings(found), lambda console: _print_findings(found, console), after, not found.is_healthy)


def _findings(found: Examination) -> dict[str, Any]:
    """The findings as JSON values."""
    state = found.state
    return {
        "run_dir": str(found.run_dir),
        "status": found.status,
        "healthy": found.is_healthy,
        "steps": found.steps,
        "rollouts": state.rollouts,
        "failed_rollouts": state.failed_rollouts,
        "rollbacks": state.rollbacks,
        "signs": [
            asdict(each.sign) | {"since": each.since, "until": each.until, "count": each.count} for each in found.signs
        ],
        "warnings": dict(found.warnings),
        "failures": [asdict(each) for each in found.failures],
        "damaged_lines": list(found.damaged_lines),
        "notes": list(found.notes),
    }


def _print_findings(found: Examination, console: Console) -> None:
    """Print the findings."""
    state = found.state
    rollbacks = f", {state.rollbacks} rollbacks" if state.rollbacks else ""
    failed = f", {state.failed_rollouts} failed" if state.failed_rollouts else ""
    console.print(
        f"{found.run_dir}: {found.status}, {found.steps} steps, {state.rollouts} rollouts{failed}{rollbacks}",
    )
    for each in found.signs:
        when = f"since step {each.since}" + (f", {each.count} steps until {each.until}" if each.count > 1 else "")
        console.print(f"{each.sign.name} ({when})", style="yellow")
        console.print(f"  what  {printable(each.sign.what)}\n  try   {printable(each.sign.advice)}")
    for kind, text in found.warnings.items():
        console.print(f"{kind}", style="yellow")
        console.print(f"  what  {printable(text)}")
    if found.damaged_lines:
        lines = ", ".join(map(str, found.damaged_lines[:10])) + (" ..." if len(found.damaged_lines) > 10 else "")
        console.print("damaged_metrics", style="yellow")
        console.print(f"  what  these lines of metrics.jsonl cannot be read and were left out: {lines}")
    if found.failures:
        console.print("failed rollouts by cause")
    for line in failure_lines(found.failures):
        console.print(f"  {line}")
    for note in found.notes:
        console.print(f"note: {note}")
    if found.is_healthy:
        console.print("no sign of trouble")


# -- agl dashboard ----------------------------------------------------------------------------------------------------


Shown = Annotated[
    str | None,
    typer.Argument(
        help="The directory of a run or of several, a database, or the URL of a server (default: runs).",
        show_default=False,
    ),
]


async def dashboard(
    ctx: typer.Context,
    target: Shown = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show two recorded runs; nothing is trained.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 4749,
    token: Token = None,
    browser: Annotated[bool, typer.Option(help="Open it in the browser.")] = True,
) -> None:
    """Show runs, rollouts and tokens in the browser, until stopped (Ctrl-C). It only reads.

    The page asks for a token of its own, which is part of the link that is printed. A server (`agl serve`, a run) shows
    itself at /dashboard, with actions: of its URL, the link is printed and opened.

    \b
    Examples:
      agl dashboard --demo
      agl dashboard runs/first --port 0
    """
    from agentlightning.cli.serve import StopSignals

    if demo and target is not None:
        raise ConfigError(f"--demo shows recorded runs, and {target!r} is none of them; leave one of them out")
    if target is not None and is_url(target):
        base, token = server_of(target, token)
        get_page(base, token, "/runs")
        _show_link(f"{base}/dashboard", token, browser, ctx.obj)
        return
    with StopSignals() as signals:  # so that one leaves no files of a demo behind
        await signals.while_running(_show_pages(target, demo, host, port, browser, ctx.obj))


def _show_link(url: str, token: str | None, browser: bool, output: Output) -> None:
    link = f"{url}#token={token}" if token else url
    output.show(Result({"url": url, "link": link}, lambda console: console.print(f"dashboard  {link}")))
    sys.stdout.flush()
    if browser and not output.as_json and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(link)


async def _show_pages(target: str | None, demo: bool, host: str, port: int, browser: bool, output: Output) -> None:
    from agentlightning.dashboard.app import PATH
    from agentlightning.dashboard.serve import dashboard_app, serve_dashboard
    from agentlightning.server.app import listen, url_of

    try:
        listener = listen(host, port)
    except ServerError as error:
        open_there = f"Another `agl dashboard` may be open there: {url_of(host, port)}{PATH}"
        raise ServerError(f"{error}. {open_there}; for one beside it: agl dashboard --port 0") from error
    token = secrets.token_urlsafe(24)
    with listener:
        async with _routes(target, demo, token, output) as routes:
            _show_link(f"{url_of(host, listener.getsockname()[1])}{PATH}", token, browser, output)
            await serve_dashboard(dashboard_app(routes, host), listener)


@asynccontextmanager
async def _routes(target: str | None, demo: bool, token: str, output: Output) -> AsyncGenerator[list[BaseRoute]]:
    from agentlightning.dashboard.app import dashboard_routes

    with tempfile.TemporaryDirectory(prefix="agl-dashboard-") as folder:
        if demo:
            from agentlightning.dashboard.serve import write_demo

            output.console.print("unpacking two recorded runs ...")
            await write_demo(Path(folder))
        async with _catalog(folder if demo else target) as catalog:
            try:
                yield dashboard_routes(catalog, token)
            finally:
                await catalog.close()


@asynccontextmanager
async def _catalog(target: str | None) -> AsyncGenerator[Catalog]:
    from agentlightning.dashboard.data.run_data import Catalog

    runs = _runs_at(target)
    if runs is not None:
        yield runs
        return
    async with open_named(target) as store:
        yield Catalog(store)


def _runs_at(target: str | None) -> Catalog | None:
    """The run in a directory, or those below it; None for a database. Raises ConfigError where there is neither."""
    from agentlightning.dashboard.data.run_data import Catalog

    path = Path(target or "runs")
    runs = Catalog(roots=[path])
    if runs.sources():
        return runs
    if target is None or not (target.startswith(POSTGRES) or path.exists()):
        raise ConfigError(
            f"there is no run and no database at {str(path)!r}; give the directory of a run, a database or a URL, or"
            " look at recorded runs: agl dashboard --demo"
        )
    return None


# -- agl env ----------------------------------------------------------------------------------------------------------


def env() -> Result:
    """Print what a report of a fault needs: versions, extras, extensions, the machine and its devices, paths.

    Of environment variables it prints names, and no values. Exit status 1: an extension cannot be used.

    \b
    Examples:
      agl env
      agl env --json
    """
    extensions = installed_extensions()
    record = {
        "versions": _versions(),
        "extras": _extras(),
        "machine": _machine(),
        "torch": _torch(),
        "paths": {
            "package": PACKAGE,
            "store": database_name(None),
            "runs": str(RUNS.absolute()),
            "directory": str(Path.cwd()),
        },
        "variables": sorted(name for name in os.environ if name.startswith(VARIABLES)),
        "extensions": extensions,
    }
    broken = any("problem" in each for each in extensions)
    return Result(record, lambda console: _print_environment(record, console), status=broken)


VARIABLES = ("AGL_", "CUDA_", "HF_", "OMP_", "OPENAI_", "ANTHROPIC_", "PYTORCH_", "VLLM_")
"""How the names of environment variables begin that change what the program does."""


def _requirements() -> dict[str, set[str]]:
    """The packages that each extra installs; "" are those that are always there."""
    found = defaultdict[str, set[str]](set)
    for line in requires("agentlightning") or []:
        name, extra = re.split(r"[^\w.-]", line)[0], re.search(r"extra == ['\"]([\w-]+)", line)
        if name != "agentlightning":
            found[extra[1] if extra else ""].add(name)
    del found["dev"]
    return found


def _versions() -> dict[str, str]:
    """Of this package, of Python, and of what is installed of that which it can use."""
    packages = sorted({"vllm"}.union(*_requirements().values()))
    known = {name: found for name in packages if (found := _version(name)) is not None}
    return {"agentlightning": version("agentlightning"), "python": platform.python_version(), **known}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _extras() -> dict[str, str]:
    """What each extra lacks."""
    lacking = {
        extra: [name for name in sorted(packages) if _version(name) is None]
        for extra, packages in _requirements().items()
    }
    return {extra: f"(lacks {', '.join(each)})" if each else "" for extra, each in lacking.items() if extra}


def _machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "free_disk_gb": round(shutil.disk_usage(".").free / 1e9, 1),
        "python": sys.executable,
    }


def _torch() -> dict[str, Any] | None:
    """Torch and its devices; None where it is not installed."""
    if find_spec("torch") is None:
        return None
    try:
        from agentlightning.policy.devices import torch_devices

        return torch_devices()
    except Exception as error:  # noqa: BLE001  a broken installation is what may be reported
        return {"problem": repr(error)}


def installed_extensions() -> list[dict[str, str]]:
    """What distributions announce, each with what it is or the problem with it."""
    from agentlightning.task import DATASETS
    from agentlightning.training.persistence.run_changes import SEAMS

    registries = {each.kind: each for each in (*SEAMS.values(), DATASETS)}
    found = list[dict[str, str]]()
    for kind, names in installed().items():
        registry = registries.get(kind, Registry(kind, kind))
        for name in names:
            record = {"kind": kind, "name": name}
            try:
                record["part"] = described(load(announced(kind, name)))
                if registry.get(name) is not None:
                    raise ConfigError(f"{name} is a name of this package, which stays; name it as module:Class")
                registry.find(name)
            except AgentLightningError as error:
                record["problem"] = str(error)
            found.append(record)
    return found


def _print_environment(record: dict[str, Any], console: Console) -> None:
    for name, value in record.items():
        if name != "extensions":
            shown = [f"{key} {each}".strip() for key, each in value.items()] if isinstance(value, dict) else value
            console.print(f"{name:<10} {printable(', '.join(shown or ['none']))}")
    for each in record["extensions"]:
        console.print(f"extension  {each['kind']}  {each['name']}  {printable(each.get('part', ''))}")
        if "problem" in each:
            console.print(f"  problem  {printable(each['problem'])}", style="yellow")
