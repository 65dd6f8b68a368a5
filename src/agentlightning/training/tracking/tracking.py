"""The trackers of a run: each is called in a thread of its own, and none can delay, fail or stop the run.

What a run reports is in its directory always: metrics.jsonl, report.json, curve.png, config.toml, and transcripts.jsonl
with sample rollouts of each validation. `tracking.json` names the trackers' own runs, so that a resumed run continues
them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

import orjson

from agentlightning.config import TRACKERS, TrackingConfig, TrainConfig
from agentlightning.errors import MissingExtraError
from agentlightning.evaluation.evaluation import Evaluation
from agentlightning.store.base import LightningStoreBase
from agentlightning.training.persistence.run_dir import write_atomically
from agentlightning.training.sources.group_rewards import transcript_of
from agentlightning.training.tracking.trackers import TrackedRun, Tracker, Transcript
from agentlightning.util.json_values import dumps
from agentlightning.util.settings import SECRETS

# -- samples ---------------------------------------------------------------------------------------------------------

# Sample rollouts of a validation as transcripts: those of its first tasks, the same each time.

MOST_TEXT = 2000
"""Characters of a task, a conversation or an output."""


async def validation_transcripts(
    store: LightningStoreBase, names: Mapping[str, str], results: Mapping[str, Evaluation], tasks: list[Any]
) -> list[Transcript]:
    """One for each of `tasks` in each mode. `names`: by mode, the beginning of the ids of its rollouts."""
    wanted = [(mode, index, f"{name}-{index:05d}") for mode, name in names.items() for index in range(len(tasks))]
    ids = [rollout_id for _, _, rollout_id in wanted]
    attempts = {each.rollout_id: each for each in await store.get_latest_attempts(ids)} if ids else {}
    spans = {rollout_id: found async for rollout_id, found in store.iter_spans(ids)} if ids else {}
    return [
        Transcript(
            mode,
            text_of(tasks[index]),
            "\n".join(f"{each.get('role', '?')}: {said(each)}" for each in transcript_of(spans.get(rollout_id, [])))[
                -MOST_TEXT:
            ],
            text_of(attempts[rollout_id].metadata.get("output")) if rollout_id in attempts else "",
            results[mode].rewards[index],
            rollout_id,
        )
        for mode, index, rollout_id in wanted
    ]


def text_of(value: Any) -> str:
    """A task or an output as text."""
    return (value if isinstance(value, str) else _json(value))[:MOST_TEXT]


def _json(value: Any) -> str:
    return dumps(value, default=repr).decode()


def said(message: Mapping[str, Any], between: str = " ") -> str:
    """What a message says: its texts, tool calls as `name(argument=value)` and their results, other parts as JSON."""
    return between.join(_part(part) for part in message.get("parts") or () if isinstance(part, Mapping))


def _part(part: Mapping[str, Any]) -> str:
    if part.get("type") == "tool_call":
        given = part.get("arguments")
        if isinstance(given, Mapping):
            given = ", ".join(f"{name}={_json(value)}" for name, value in cast("Mapping[str, Any]", given).items())
        return f"{part.get('name')}({'' if given is None else text_of(given)})"
    if part.get("type") == "tool_call_response":
        return text_of(part.get("response"))
    if "content" in part:
        return str(part["content"])
    return text_of({name: value for name, value in part.items() if name != "type"})


logger = logging.getLogger(__name__)

FILE: Final = "tracking.json"
TRANSCRIPTS: Final = "transcripts.jsonl"
MOST_WAITING: Final = 1000
"""Calls that may wait for one tracker; further ones are dropped and counted."""
CLOSE_SECONDS: Final = 60.0
"""How long the end of a run waits for a tracker."""

Call = Callable[[Tracker], object]


def check_installed(config: TrackingConfig) -> None:
    """Raises MissingExtraError for a tracker whose package is not installed."""
    for name in config.trackers:
        package = TRACKERS.find(name).package
        if package and find_spec(package) is None:
            raise MissingExtraError(package, name)


def load_tracker(name: str) -> Tracker:
    """A tracker by its name."""
    return TRACKERS.find(name)()


@dataclass(slots=True)
class _Channel:
    """One tracker and the thread that calls it."""

    name: str
    tracker: Tracker | None = None
    failures: int = 0
    warning: str | None = None
    """The first failure."""
    _thread: ThreadPoolExecutor = field(init=False)
    _waiting: set[Future[None]] = field(default_factory=set[Future[None]])

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, f"tracker-{self.name}")

    def start(self, run: TrackedRun) -> str | None:
        """The name of its own run; None where it did not start, or takes too long to."""
        started: list[str] = []

        def begin() -> None:
            tracker = load_tracker(self.name)
            started.append(tracker.start(run))
            self.tracker = tracker

        self._submit(begin, "start")
        self.flush()
        return started[0] if started else None

    def send(self, what: str, call: Call) -> None:
        """Call it when its turn comes."""
        if len(self._waiting) >= MOST_WAITING:
            self._fail(what, "it is too slow, and what it was sent is dropped")
        else:
            self._submit(lambda: self._call(call), what)

    def flush(self) -> None:
        """Wait for what it was sent."""
        late = wait(set(self._waiting), CLOSE_SECONDS).not_done
        if late:
            self._fail("answer", f"{len(late)} calls are not done after {CLOSE_SECONDS:.0f} s")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _call(self, call: Call) -> None:
        if self.tracker is None:
            self.failures += 1
        else:
            call(self.tracker)

    def _submit(self, work: Callable[[], None], what: str) -> None:
        future = self._thread.submit(self._guarded, work, what)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)

    def _guarded(self, work: Callable[[], None], what: str) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  The boundary of a tracker, which may raise anything, and exit.
            self._fail(what, f"{type(error).__name__}: {error}")

    def _fail(self, what: str, why: str) -> None:
        self.failures += 1
        if self.warning is None:
            self.warning = f"{self.name} failed to {what}: {why}. The run goes on; further failures are counted"
        logger.info("tracker %s failed to %s: %s", self.name, what, why)


class Tracking:
    """The trackers of one run.

    Making it starts them: a resumed run continues the runs of its trackers.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, step: int) -> None:
        """`step`: the steps that are done. Raises MissingExtraError."""
        check_installed(config.tracking)
        self.config, self.run_dir = config.tracking, run_dir
        self._ended = False
        self._channels = [_Channel(name) for name in dict.fromkeys(config.tracking.trackers)]
        known = _read(run_dir / FILE)
        for channel in self._channels:
            begun = channel.start(self._run(config, step, known.get(channel.name)))
            known |= {channel.name: begun} if begun else {}
        if self._channels:
            write_atomically(run_dir / FILE, orjson.dumps(known, option=orjson.OPT_INDENT_2))
        _forget_after(run_dir / TRANSCRIPTS, step)

    def _run(self, config: TrainConfig, step: int, tracker_run: str | None) -> TrackedRun:
        return TrackedRun(
            run_dir=self.run_dir,
            project=self.config.project,
            name=self.config.name or self.run_dir.absolute().name,
            settings=flat_settings(config.model_dump(mode="json")),
            step=step,
            tracker_run=tracker_run,
            options=self.config.model_dump(),
        )

    @property
    def failures(self) -> dict[str, int]:
        """The number of calls that failed, by tracker; only those that failed."""
        return {each.name: each.failures for each in self._channels if each.failures}

    def warnings(self) -> dict[str, str]:
        """What went wrong first with each tracker that failed, by the kind of the warning."""
        return {f"tracker_{each.name}": each.warning for each in self._channels if each.warning}

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        """The metrics of a step: the numbers of its line in metrics.jsonl."""
        metrics = numbers_of(line)
        self._send("log metrics", lambda tracker: tracker.log(step, metrics))

    def transcripts(self, step: int, rows: Sequence[Transcript]) -> None:
        """Sample rollouts of a validation."""
        if not rows:
            return
        with (self.run_dir / TRANSCRIPTS).open("ab") as file:
            file.writelines(orjson.dumps({"step": step, **asdict(row)}) + b"\n" for row in rows)
        self._send("log transcripts", lambda tracker: tracker.transcripts(step, rows))

    def result(self, step: int, result: Mapping[str, Any], curve: Path) -> dict[str, int]:
        """What came of the run. Waits for the trackers; returns `failures`."""
        drawn = curve if curve.exists() else None
        self._send("log the result", lambda tracker: tracker.result(step, result, drawn))
        self._send("finish", lambda tracker: tracker.close(finished=True))
        self._end()
        return self.failures

    def close(self) -> None:
        """End the trackers' runs, to be continued, unless `result` has ended them."""
        if not self._ended:
            self._send("close", lambda tracker: tracker.close(finished=False))
            self._end()

    def _end(self) -> None:
        self._ended = True
        for channel in self._channels:
            channel.flush()
            channel.close()

    def _send(self, what: str, call: Call) -> None:
        for channel in self._channels:
            channel.send(what, call)


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Its finite numbers, but for `step`."""
    return {
        name: float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def flat_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by full names (`algorithm.steps`); lists as JSON. Secrets are left out."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        if name in SECRETS:
            continue
        if isinstance(value, Mapping):
            found |= flat_settings(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            found[prefix + name] = orjson.dumps([_without_secrets(each) for each in value]).decode()
        else:
            found[prefix + name] = value
    return found


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_secrets(inner) for name, inner in value.items() if name not in SECRETS}
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value


def _read(path: Path) -> dict[str, str]:
    try:
        return dict(orjson.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}


def _forget_after(path: Path, step: int) -> None:
    """Drop the rows of validations that will be repeated, and a last line that was cut off."""
    if not path.exists():
        return
    whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
    kept = [line for line in whole if orjson.loads(line)["step"] <= step]
    if len(kept) < len(whole):
        write_atomically(path, b"".join(line + b"\n" for line in kept))
