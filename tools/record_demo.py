"""Record what `agl dashboard --demo` shows: `python -m tools.record_demo FOLDER`.

The trainings of RUNS that are not in the folder yet are made first, on the job of `agl demo --model smollm2-135m`, with
the ratios and the likeliest alternatives of every token. What the pages show of them becomes the file that is shipped:
without weights, with times as seconds before the end, ids that compress, tokens of the rollouts that were learned from,
and the alternatives of one step.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agentlightning import span as names
from agentlightning.config import TrainConfig
from agentlightning.dashboard.serve import EXPORTS, RECORDED
from agentlightning.demo import job, messages
from agentlightning.engine.likeliest_tokens import likeliest_from_text
from agentlightning.models.resolve import resolve_model
from agentlightning.store import LightningStore
from agentlightning.store.export.copy import export_store
from agentlightning.trainer import Trainer
from agentlightning.util.settings import dump_toml, load_settings

MODEL, SEED = "smollm2-135m", 0
SETTINGS = ("run.token_ratios=true", "gateway.record_top_logprobs=3")
RUNS = {"messages-rloo": ("algorithm.credit=leave_one_out", "algorithm.steps=6"), "messages": ()}
"""Changes of the demo's settings by the name of the run. The last one is shown first."""
WITH_ALTERNATIVES = "-train-000009-"
TOKENS = (names.PROMPT_TOKEN_IDS, names.RESPONSE_TOKEN_IDS, names.LOGPROBS)
"""What is kept of the rollouts that were learned from."""
UNSHOWN = ("gen_ai.response.id", "agentlightning.agent.key", "agentlightning.request")


def train(directory: Path, changes: tuple[str, ...]) -> None:
    """Make a run, unless it is there."""
    if (directory / "report.json").exists():
        return
    settings = directory.with_suffix(".toml")
    settings.write_text(dump_toml(job.settings("messages.toml", policy__model=MODEL, run__seed=SEED)))
    config = load_settings(TrainConfig, toml=settings, overrides=[*SETTINGS, *changes])
    Trainer(config, run_dir=directory).fit(**messages.tasks(SEED))


# -- what is kept of a run ---------------------------------------------------------------------------------------------


class Ids(dict[str, str]):
    """Numbers in place of random ids."""

    def __missing__(self, old: str) -> str:
        self[old] = f"{len(self) + 1:016x}"
        return self[old]


def export(directory: Path) -> list[dict[str, Any]]:
    """The lines of the store's export."""

    async def write(target: Path) -> None:
        store = LightningStore(directory / "store.db")
        try:
            await export_store(store, target, overwrite=True)
        finally:
            await store.close()

    target = directory.with_suffix(".jsonl")
    asyncio.run(write(target))
    return read_lines(target)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def to_lines(records: Iterable[Any]) -> str:
    return "".join(json.dumps(each, separators=(",", ":"), ensure_ascii=False) + "\n" for each in records)


def two_digits(values: list[float]) -> list[float]:
    return [round(each, 2) + 0.0 for each in values]


def shorten(record: dict[str, Any], ids: Ids) -> None:
    """Change a line of the export to what is kept of it."""
    for attempt in record.get("attempts", ()):
        attempt |= {"attempt_id": f"at-{ids[attempt['attempt_id']]}", "worker_id": "worker-1"}
    for span in record.get("spans", ()):
        attributes = span["attributes"]
        for name in (*UNSHOWN, *(TOKENS if record["mode"] != "train" else ())):
            attributes.pop(name, None)
        if WITH_ALTERNATIVES not in record["rollout_id"]:
            attributes.pop(names.TOP_LOGPROBS, None)
        if names.LOGPROBS in attributes:
            attributes[names.LOGPROBS] = two_digits(attributes[names.LOGPROBS])
        span["attempt_id"] = f"at-{ids[span['attempt_id']]}"
        span["trace_id"] = ids[span["trace_id"]].zfill(32)
        span["span_id"] = ids[span["span_id"]]
        span["parent_id"] = span["parent_id"] and ids[span["parent_id"]]


def times(value: Any) -> Iterator[float]:
    """All times in a record."""
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, dict | list):
            yield from times(each)
        elif isinstance(each, float) and str(name).endswith("time"):
            yield each


def before(value: Any, end: float) -> Any:
    """A record whose times are relative to `end`, and negative."""
    if isinstance(value, list):
        return [before(each, end) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: round(each - end, 2) if isinstance(each, float) and name.endswith("time") else before(each, end)
        for name, each in value.items()
    }


def tokenizer(records: Iterable[dict[str, Any]]) -> str:
    """A `tokenizer.json` of the tokens that occur, which is enough for their texts."""
    used = set[int]()
    for span in (span for record in records for span in record.get("spans", ())):
        sampled = span["attributes"].get(names.RESPONSE_TOKEN_IDS, [])
        used.update(span["attributes"].get(names.PROMPT_TOKEN_IDS, []), sampled)
        if names.TOP_LOGPROBS in span["attributes"]:
            rows = likeliest_from_text(span["attributes"][names.TOP_LOGPROBS], len(sampled))
            used.update(token for row in rows for token, _ in row)
    whole = json.loads((Path(resolve_model(MODEL)) / "tokenizer.json").read_text())
    vocabulary = {piece: number for piece, number in whole["model"]["vocab"].items() if number in used}
    added = [each for each in whole["added_tokens"] if each["id"] in used]
    return json.dumps({"model": {"vocab": vocabulary}, "decoder": whole["decoder"], "added_tokens": added})


def by_resources(records: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """An export for each version of the resources, with its rollouts."""
    for version in (each for each in records if each["type"] == "resources"):
        own = [
            each for each in records if each["type"] == "rollout" and each["resources_id"] == version["resources_id"]
        ]
        yield [records[0], version, *own, {"type": "end", "resources": 1, "rollouts": len(own)}]


def files_of(directory: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each file that is kept of a run."""
    records, audit, ids = export(directory), read_lines(directory / "audit.jsonl"), Ids()
    end = max(times([*records, *audit])) + 1
    for each in records:
        shorten(each, ids)
    yield "start/tokenizer.json", tokenizer(records)
    for number, part in enumerate(by_resources(records), 1):
        yield f"{EXPORTS}/{number:03d}.jsonl", to_lines(before(each, end) for each in part)
    yield "audit.jsonl", to_lines(before(each, end) for each in audit)
    for path in sorted(directory.glob("ratios/*.jsonl")):
        yield (
            f"ratios/{path.name}",
            to_lines(
                each | {"call": ids[each["call"]], "log_ratios": two_digits(each["log_ratios"])}
                for each in read_lines(path)
            ),
        )
    for path in sorted(directory.glob("data/*.jsonl")):
        yield f"data/{path.name}", path.read_text()
    settings = (directory / "config.toml").read_text().splitlines()
    yield "config.toml", "".join(f"{line}\n" for line in settings if line and not line.startswith("#"))
    for name in ("metrics.jsonl", "report.json", "state.json"):
        yield name, (directory / name).read_text().replace(str(directory), f"runs/{directory.name}")


def pack(directories: Sequence[Path]) -> None:
    """Write what is kept of these runs."""
    with tarfile.open(RECORDED, "w:xz", preset=9) as recorded:
        for directory in directories:
            for name, text in files_of(directory):
                member, content = tarfile.TarInfo(f"{directory.name}/{name}"), text.encode()
                member.size = len(content)
                recorded.addfile(member, io.BytesIO(content))
    print(f"{RECORDED}: {RECORDED.stat().st_size:,} bytes")  # noqa: T201


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name, changes in RUNS.items():
        train(folder / name, changes)
    pack([folder / name for name in RUNS])


if __name__ == "__main__":
    main()
