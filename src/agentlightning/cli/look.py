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
from collections.abc import Iterator
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote

from rich.console import RenderableType
from rich.text import Text
from typer import Argument, Context, Option

from agentlightning.cli.options import (
    DATABASES,
    RUNS,
    SERVERS,
    GivenStore,
    Run,
    Token,
    database_name,
    get_json,
    open_named,
    run_or_newest,
)
from agentlightning.cli.output import Output, Result, agl, failure_lines, prompt_changes, writing
from agentlightning.errors import AgentLightningError, ConfigError, NotFoundError, ServerError
from agentlightning.util.event_loop import run_sync
from agentlightning.util.plugins import PACKAGE, Registry, announced, described, installed, load
from agentlightning.util.progress import duration, rewards_line

if TYPE_CHECKING:
    from agentlightning.dashboard.data.run_data import Catalog
    from agentlightning.training.report.result import Examination


LOOK = {"finished": ("report",), "unfinished": ("train", "--resume")}
"""The verb that leads on from a run, by its status."""


def status(
    target: str | None = Argument(None, metavar="RUN"), name: str | None = Option(None, "--run"), token: Token = None
) -> Result:
    """Say how far a training run is: its step, reward, validation, speed, failures and warnings.

    target: The directory of a run (running, finished or crashed; default: the newest below runs), or the address of a
        server that shows it: the link of its dashboard.
    name: Of a server: which of its runs. Default: the running one.

    \b
    Examples:
      agl status
      agl status runs/first --json
      agl status http://hub:4747 --run first
    """
    from agentlightning.dashboard.data.run_files import open_run, status_record

    if target is not None and target.startswith(SERVERS):
        record, rewards = run_sync(remote_status(target, token, name))
        return Result(record, _status_lines(record, rewards))
    run = run_or_newest(None if target is None else Path(target))
    if name is not None:
        raise ConfigError(f"--run {name} chooses among the runs of a server, and {run} is a directory; leave it out")
    record, rewards = status_record(open_run(run))
    after = [agl(*LOOK.get(record["status"], ("dashboard",)), run)]
    return Result(record, _status_lines(record, rewards), after)


def _status_lines(record: dict[str, Any], rewards: list[float | None]) -> Iterator[RenderableType]:
    of = "" if record["steps"] is None else f" of {record['steps']}"
    left = "" if record["seconds_left"] is None else f", about {duration(record['seconds_left'])} left"
    yield f"{record['run_dir']}: {record['status']}, step {record['step']}{of}, {duration(record['seconds'])}{left}"
    if line := rewards_line([math.nan if each is None else each for each in rewards]):
        yield f"reward      {line}"
    for mode, value in record["validation"].items():
        yield f"validation  {mode} {value:.3f}  (step {record['validated_at']})"
    for mode, value in record["start"].items():
        scored, tasks = record.get("start_tasks", {}).get(mode, (0, 0))  # A server elsewhere may be older.
        some = "" if scored == tasks else f"{scored} of {tasks} "
        yield f"start       {mode} {value:.3f}, on {some}held-out tasks"
    if record["tokens_per_second"]:
        yield f"speed       {record['tokens_per_second']:,.0f} tokens/s"
    rejected = sum(record["rejected_rollouts"].values())
    if record["sessions"] is None:
        yield f"rollouts    {record['rollouts']}, {record['failed_rollouts']} failed, {rejected} rejected"
    else:
        yield f"sessions    {record['sessions']}"
    for each in record["failures"]:
        yield f"failed      {each['count']}  {each['cause']}  {each['example']}"
    for text in record["warnings"].values():
        yield Text(f"warning     {text}", "yellow")
    if record["prompts"]:
        yield from prompt_changes(record["prompt_diff"])


# -- of a server elsewhere --------------------------------------------------------------------------------------------


async def remote_status(link: str, token: str | None, name: str | None) -> tuple[dict[str, Any], list[float | None]]:
    """The state of a run as `status_record` gives it, and its rewards by step. `link`: the address of a server, or
    the link of its dashboard, which may hold the token. `name`: which of its runs; None: a running one, else the
    newest.

    Raises ServerError, StoreAuthError or NotFoundError."""
    base, token = server_of(link, token)
    listed: list[dict[str, Any]] = (await get_json(base, "/dashboard/api/runs", token))["runs"]
    listed.sort(key=lambda each: each["state"] != "running")
    names = [each["name"] for each in listed if each["kind"] == "run" and not each.get("error")]
    if not names:
        raise NotFoundError(f"the server {base} shows no run; start it with --runs DIRECTORY")
    chosen = names[0] if name is None else name
    if chosen not in names:
        raise NotFoundError(f"the server {base} has no run {name!r}; it has: {', '.join(names)}")
    found = await get_json(base, f"/dashboard/api/runs/{quote(chosen, safe='')}/status", token)
    return {**found["status"], "run_dir": f"{base} {chosen}"}, found["rewards"]


def server_of(link: str, token: str | None) -> tuple[str, str | None]:
    """The address of a server, and its token: of what a link of its dashboard says, unless one is given."""
    address, _, fragment = link.partition("#")
    return "/".join(address.partition("?")[0].split("/")[:3]), token or parse_qs(fragment).get("token", [None])[0]


# -- agl report -------------------------------------------------------------------------------------------------------


async def report(
    run: Run = None,
    html: bool = False,
    out: Path | None = None,
    examples: int = Option(3, min=0),
    store: GivenStore = None,
) -> Result:
    """Report what a run changed: held-out reward with its interval, tasks won and lost, cost, examples.

    html: Write a page with curves, which needs no server.
    out: File to write (default: RUN/report.html; text is printed).
    examples: Changed tasks to show with their conversations.

    \b
    Examples:
      agl report
      agl report runs/first --html --out first.html
    """
    from agentlightning.dashboard.data.run_files import open_run
    from agentlightning.dashboard.report_page import report_page
    from agentlightning.training.report.result import markdown_report

    run = run_or_newest(run)
    open_run(run)
    make = report_page if html else markdown_report
    async with nullcontext() if store is None else open_named(store) as opened:
        text = await make(run, examples, opened)
    path = out or (run / "report.html" if html else None)
    if path is not None:
        with writing(path):
            path.write_text(text, encoding="utf-8")
    record = {"run": str(run), "file": None if path is None else str(path), **({} if path else {"text": text})}
    return Result(record, text if path is None else f"wrote {path}", [agl("dashboard", run)])


# -- agl doctor -------------------------------------------------------------------------------------------------------


def doctor(run: Run = None) -> Result:
    """Say what is wrong with a training run, since which step, and what to try.

    The run may be running, finished or crashed. Exit status: 0 healthy; 1 there are warnings; 2 this is no run.

    \b
    Examples:
      agl doctor
      agl doctor runs/first --json
    """
    from agentlightning.training.report.result import examine

    found = examine(run_or_newest(run))
    failed = agl("store", "list", run=found.run_dir, status="failed")
    other = agl("train", resume=found.run_dir) if "ended" in found.warnings else agl("dashboard", found.run_dir)
    after = [failed if found.failures else other]
    signs = [
        asdict(each.sign) | {"since": each.since, "until": each.until, "count": each.count} for each in found.signs
    ]
    record: dict[str, Any] = {"run_dir": str(found.run_dir), "healthy": found.is_healthy, "signs": signs}
    for source, names in (
        (found, ("status", "steps", "warnings", "failures", "damaged_lines", "notes")),
        (found.state, ("rollouts", "failed_rollouts", "rollbacks")),
    ):
        record |= {name: getattr(source, name) for name in names}
    return Result(record, _findings_lines(found), after, not found.is_healthy)


def _findings_lines(found: Examination) -> Iterator[RenderableType]:
    state = found.state
    rollbacks = f", {state.rollbacks} rollbacks" if state.rollbacks else ""
    failed = f", {state.failed_rollouts} failed" if state.failed_rollouts else ""
    yield f"{found.run_dir}: {found.status}, {found.steps} steps, {state.rollouts} rollouts{failed}{rollbacks}"
    for each in found.signs:
        when = f"since step {each.since}" + (f", {each.count} steps until {each.until}" if each.count > 1 else "")
        yield Text(f"{each.sign.name} ({when})", "yellow")
        yield f"  what  {each.sign.what}"
        yield f"  try   {each.sign.advice}"
    warnings = {**found.warnings}
    if found.damaged_lines:
        lines = ", ".join(map(str, found.damaged_lines[:10])) + (" ..." if len(found.damaged_lines) > 10 else "")
        warnings["damaged_metrics"] = f"these lines of metrics.jsonl cannot be read and were left out: {lines}"
    for kind, text in warnings.items():
        yield Text(kind, "yellow")
        yield f"  what  {text}"
    if found.failures:
        yield "failed rollouts by cause"
    yield from (f"  {line}" for line in failure_lines(found.failures))
    yield from (f"note: {note}" for note in found.notes)
    if found.is_healthy:
        yield "no sign of trouble"


# -- agl dashboard ----------------------------------------------------------------------------------------------------


async def dashboard(
    ctx: Context,
    target: str | None = Argument(None),
    demo: bool = False,
    host: str = "127.0.0.1",
    port: int = Option(4749, min=0, max=65535),
    token: Token = None,
    browser: bool = True,
) -> None:
    """Show runs, rollouts and tokens in the browser, until stopped (Ctrl-C). It only reads.

    The page asks for a token of its own, which is part of the link that is printed. A server (`agl serve`, a run) shows
    itself at /dashboard, with actions: of its URL, the link is printed and opened.

    target: The directory of a run or of several, a database, or the URL of a server (default: runs).
    demo: Show two recorded runs; nothing is trained.
    host: Address to listen on.
    port: Port to listen on; 0 takes a free one.
    browser: Open it in the browser.

    \b
    Examples:
      agl dashboard --demo
      agl dashboard runs/first --port 0
    """
    from agentlightning.cli.serve import StopSignals

    if demo and target is not None:
        raise ConfigError(f"--demo shows recorded runs, and {target!r} is none of them; leave one of them out")
    if target is not None and target.startswith(SERVERS):
        base, token = server_of(target, token)
        await get_json(base, "/dashboard/api/runs", token)
        _show_link(f"{base}/dashboard", token, browser, ctx.obj)
        return
    with StopSignals() as signals:  # so that one leaves no files of a demo behind
        await signals.while_running(_show_pages(target, demo, host, port, browser, ctx.obj))


def _show_link(url: str, token: str | None, browser: bool, output: Output) -> None:
    link = f"{url}#token={token}" if token else url
    output.show(Result({"url": url, "link": link}, f"dashboard  {link}"))
    sys.stdout.flush()
    if browser and not output.as_json and sys.stdout.isatty():
        import webbrowser

        webbrowser.open(link)


async def _show_pages(target: str | None, demo: bool, host: str, port: int, browser: bool, output: Output) -> None:
    from agentlightning.dashboard.app import PATH, dashboard_routes
    from agentlightning.dashboard.data.run_data import Catalog
    from agentlightning.dashboard.serve import dashboard_app, serve_dashboard, write_demo
    from agentlightning.server.app import listen, url_of

    token = secrets.token_urlsafe(24)
    async with AsyncExitStack() as stack:
        try:
            listener = stack.enter_context(listen(host, port))
        except ServerError as error:
            open_there = f"Another `agl dashboard` may be open there: {url_of(host, port)}{PATH}"
            raise ServerError(f"{error}. {open_there}; for one beside it: agl dashboard --port 0") from error
        if demo:
            target = stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-dashboard-"))
            output.console.print("unpacking two recorded runs ...")
            await write_demo(Path(target))
        catalog = _runs_at(target) or Catalog(await stack.enter_async_context(open_named(target)))
        stack.push_async_callback(catalog.close)
        _show_link(f"{url_of(host, listener.getsockname()[1])}{PATH}", token, browser, output)
        app = dashboard_app(dashboard_routes(catalog, token), host)
        await serve_dashboard(app, listener)


def _runs_at(target: str | None) -> Catalog | None:
    """The run in a directory, or those below it; None for a database. Raises ConfigError where there is neither."""
    from agentlightning.dashboard.data.run_data import Catalog

    path = Path(target or RUNS)
    runs = Catalog(roots=[path])
    if not runs.sources() and (target is None or not (target.startswith(DATABASES) or path.exists())):
        raise ConfigError(
            f"there is no run and no database at {str(path)!r}; give the directory of a run, a database or a URL, or"
            " look at recorded runs: agl dashboard --demo"
        )
    return runs if runs.sources() else None


# -- agl env ----------------------------------------------------------------------------------------------------------


def env() -> Result:
    """Print what a report of a fault needs: versions, extras, extensions, the machine and its devices, paths.

    Of environment variables it prints names, and no values. Exit status 1: an extension cannot be used.

    \b
    Examples:
      agl env
      agl env --json
    """
    extensions, (versions, extras) = installed_extensions(), _packages()
    record = {
        "versions": versions,
        "extras": extras,
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
    return Result(record, _environment_lines(record), status=broken)


VARIABLES = ("AGL_", "CUDA_", "HF_", "OMP_", "OPENAI_", "ANTHROPIC_", "PYTORCH_", "VLLM_")
"""How the names of environment variables begin that change what the program does."""


def _packages() -> tuple[dict[str, str], dict[str, str]]:
    """The versions of this package, of Python, and of what it can use, and what each of its extras lacks."""
    wanted = defaultdict[str, set[str]](set)
    for line in requires("agentlightning") or []:
        name, extra = re.split(r"[^\w.-]", line)[0], re.search(r"extra == ['\"]([\w-]+)", line)
        if name != "agentlightning":
            wanted[extra[1] if extra else ""].add(name)
    del wanted["dev"]
    found = {"agentlightning": version("agentlightning"), "python": platform.python_version()}
    for name in sorted({"vllm"}.union(*wanted.values())):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    lacking = {extra: ", ".join(sorted(names - found.keys())) for extra, names in wanted.items() if extra}
    return found, {extra: names and f"(lacks {names})" for extra, names in lacking.items()}


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
    from agentlightning.training.persistence.run_dir import SEAMS

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


def _environment_lines(record: dict[str, Any]) -> Iterator[RenderableType]:
    for name, value in record.items():
        if name != "extensions":
            shown = [f"{key} {each}".strip() for key, each in value.items()] if isinstance(value, dict) else value
            yield f"{name:<10} {', '.join(shown or ['none'])}"
    for each in record["extensions"]:
        yield f"extension  {each['kind']}  {each['name']}  {each.get('part', '')}"
        if "problem" in each:
            yield Text(f"  problem  {each['problem']}", "yellow")
