"""A store goes through a file into another store and is the same; a file that is damaged says where."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.errors import ConfigError, ConflictError, DatasetError, MissingExtraError
from agentlightning.resources import LLM, PromptTemplate
from agentlightning.rollouts import Attempt, AttemptStatus, Rollout, RolloutConfig, RolloutMode, RolloutStatus
from agentlightning.server.app import Server
from agentlightning.span import KEPT_SETS, LOGPROBS, PROMPT_TOKEN_IDS, RESPONSE_TOKEN_IDS, SUPERSEDED, Span, SpanEvent
from agentlightning.store import InMemoryLightningStore, LightningStore, LightningStoreBase
from agentlightning.store.export import Exported, Imported, copy, export_store, import_store, jsonl
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.types import RolloutRecord
from agentlightning.util.kept_sets import KeptSets

pytestmark = pytest.mark.integration

FORMATS = ["all.jsonl", "all.jsonl.gz"]
"""What is imported again."""
TOKENS = {PROMPT_TOKEN_IDS: list(range(1000)), RESPONSE_TOKEN_IDS: [7, 8], LOGPROBS: [-0.5, -1.25]}
TOKENS[KEPT_SETS] = KeptSets.of([(7, 9), (8,)]).to_text()


@pytest.fixture
async def other() -> AsyncIterator[LightningStoreBase]:
    store = InMemoryLightningStore()
    yield store
    await store.close()


def record(number: int, **changes: Any) -> RolloutRecord:
    """A finished rollout that failed once."""
    ids = f"ro-{number:04}", f"at-{number:04}-1", f"at-{number:04}-2"
    rollout = Rollout(
        ids[0],
        {"question": "6 x 7?", "nothing": None},
        100.0 + number,
        status="succeeded",
        mode="train",
        end_time=200.5,
        config=RolloutConfig(max_attempts=2, timeout_seconds=30),
        metadata={"seed": number},
        queue="train",
        priority=3,
    )
    attempts = (
        Attempt(ids[0], ids[1], 1, 101.0, "failed", 102.0, "worker-1", 101.5, {"error": {"type": "ValueError"}}),
        Attempt(ids[0], ids[2], 2, 103.0, "succeeded", 104.0),
    )
    event = SpanEvent("first token", 103.25, {"index": 0})
    spans = (
        Span(ids[0], ids[1], "chat", 101.0, span_id="a", sequence_id=1, attributes={"text": "äöü\n", SUPERSEDED: True}),
        Span(ids[0], ids[2], "chat", 103.0, 103.5, 1, "t" * 32, "b", "p", "OK", "fine", TOKENS, (event,), {"host": 1}),
        Span(ids[0], ids[2], "tool", 103.6, span_id="c", sequence_id=5, attributes={PROMPT_TOKEN_IDS: ["no", None]}),
        Span(ids[0], ids[2], "done", 103.7, span_id="d", sequence_id=6, attributes={LOGPROBS: [], "n": None}),
    )
    return RolloutRecord(replace(rollout, **changes), attempts, spans)


async def fill(store: LightningStoreBase, count: int = 3) -> None:
    await store.add_resources({"main": LLM(endpoint="http://localhost", model="m")}, "rs-1")
    await store.add_resources({"prompt": PromptTemplate(template="Answer {question}")}, "rs-2")
    await store.add_records([record(number) for number in range(count)])


async def everything(store: LightningStoreBase) -> list[RolloutRecord]:
    return await store.read_records([rollout.rollout_id for rollout in await store.query_rollouts()])


# -- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
async def test_an_exported_store_is_imported_as_it_was(
    store: LightningStoreBase, other: LightningStoreBase, tmp_path: Path, name: str
) -> None:
    await fill(store)
    exported = await export_store(store, tmp_path / name)
    assert exported == Exported(resources=2, rollouts=3, spans=12, bytes=(tmp_path / name).stat().st_size)
    assert await import_store(other, tmp_path / name) == Imported(resources=2, rollouts=3, known=0)
    assert await everything(other) == [record(0), record(1), record(2)]
    assert await everything(other) == await everything(store)
    await export_store(other, tmp_path / f"again-{name}")
    assert (tmp_path / f"again-{name}").read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("name", FORMATS)
async def test_an_empty_store_is_an_empty_export(
    store: LightningStoreBase, other: LightningStoreBase, tmp_path: Path, name: str
) -> None:
    await export_store(store, tmp_path / name)
    assert await import_store(other, tmp_path / name) == Imported(0, 0, 0)


@pytest.mark.parametrize("name", FORMATS)
async def test_an_import_may_be_repeated(store: LightningStoreBase, tmp_path: Path, name: str) -> None:
    await fill(store)
    await export_store(store, tmp_path / name)
    assert await import_store(store, tmp_path / name) == Imported(resources=2, rollouts=0, known=3)
    assert await everything(store) == [record(0), record(1), record(2)]


async def test_remote_stores_are_copied_as_embedded_ones_are(
    store: LightningStoreBase, other: LightningStoreBase, tmp_path: Path
) -> None:
    await fill(store)
    async with Server(store, secret="s") as here, Server(other, secret="s") as there:
        source, target = LightningStoreClient(here.url), LightningStoreClient(there.url)
        await export_store(source, tmp_path / "all.jsonl")
        assert await import_store(target, tmp_path / "all.jsonl") == Imported(resources=2, rollouts=3, known=0)
        await source.close()
        await target.close()
    assert await everything(other) == await everything(store)


@pytest.fixture
async def postgresql(postgres_store_url: str) -> AsyncIterator[LightningStoreBase]:
    store = LightningStore(postgres_store_url)
    yield store
    await store.close()


async def test_a_store_moves_to_postgresql_through_a_file(
    store: LightningStoreBase, postgresql: LightningStoreBase, tmp_path: Path
) -> None:
    await fill(store)
    await export_store(store, tmp_path / "all.jsonl")
    assert await import_store(postgresql, tmp_path / "all.jsonl") == Imported(resources=2, rollouts=3, known=0)
    assert await everything(postgresql) == await everything(store)
    await export_store(postgresql, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "all.jsonl").read_bytes()


async def test_what_was_unfinished_waits_again_where_it_is_imported(
    store: LightningStoreBase, other: LightningStoreBase, tmp_path: Path
) -> None:
    await store.enqueue_rollout("waits", rollout_id="ro-1")
    await store.enqueue_rollout("runs", rollout_id="ro-2")
    first = await store.dequeue_rollout()
    assert first is not None
    await store.add_span(Span(first.rollout_id, first.attempt.attempt_id, "started", 1.0))
    await export_store(store, tmp_path / "all.jsonl")
    await import_store(other, tmp_path / "all.jsonl")
    claimed = await other.dequeue_many_rollouts(limit=5)
    assert {rollout.input for rollout in claimed} == {"waits", "runs"}
    assert {rollout.input: rollout.attempt.sequence_id for rollout in claimed} == {"waits": 2, "runs": 1}
    assert [span.name for span in await other.query_spans("ro-1")] == ["started"]


async def test_resources_that_were_updated_are_the_latest_after_the_import_too(
    store: LightningStoreBase, other: LightningStoreBase, tmp_path: Path
) -> None:
    await fill(store, 0)
    newest = {"prompt": PromptTemplate(template="new")}
    await store.update_resources("rs-1", newest)
    await export_store(store, tmp_path / "all.jsonl")
    await import_store(other, tmp_path / "all.jsonl")
    latest = await other.get_latest_resources()
    assert latest is not None
    assert (latest.resources_id, latest.resources) == ("rs-1", newest)


async def test_only_what_was_asked_for_is_exported(store: LightningStoreBase, tmp_path: Path) -> None:
    await store.add_records([record(0), record(1, mode="val"), record(2, queue="slow"), record(3, status="failed")])

    async def ids(name: str, **filters: Any) -> list[str]:
        await export_store(store, tmp_path / name, **filters)
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        return [line["rollout_id"] for line in lines if line["type"] == "rollout"]

    assert await ids("val.jsonl", mode_in=["val"]) == ["ro-0001"]
    assert await ids("slow.jsonl", queue_in=["slow"]) == ["ro-0002"]
    assert await ids("failed.jsonl", status_in=["failed"]) == ["ro-0003"]


async def test_a_store_larger_than_a_batch_is_copied_in_batches(
    store: LightningStoreBase, other: LightningStoreBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "BATCH_BYTES", 20_000)
    await fill(store, 50)
    seen: list[tuple[int, int | None]] = []
    await export_store(store, tmp_path / "all.jsonl", report=lambda *told: seen.append(told))
    assert len(seen) > 5
    assert seen[-1] == (50, 50)
    seen.clear()
    await import_store(other, tmp_path / "all.jsonl", report=lambda *told: seen.append(told))
    assert len(seen) > 5
    assert await everything(other) == await everything(store)


async def test_exports_after_one_another_are_one_export(
    store: LightningStoreBase, other: LightningStoreBase, tmp_path: Path
) -> None:
    await store.add_records([record(0)])
    await export_store(store, tmp_path / "first.jsonl")
    await store.add_records([record(1)])
    await export_store(store, tmp_path / "second.jsonl")
    both = (tmp_path / "first.jsonl").read_bytes() + b"\n" + (tmp_path / "second.jsonl").read_bytes()
    (tmp_path / "both.jsonl").write_bytes(both)
    assert await import_store(other, tmp_path / "both.jsonl") == Imported(0, rollouts=2, known=1)


async def test_a_parquet_export_is_a_table_for_other_programs(store: LightningStoreBase, tmp_path: Path) -> None:
    await fill(store, 1)
    await export_store(store, tmp_path / "all.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert [row["type"] for row in rows] == [*["resources"] * 2, "rollout", *["attempt"] * 2, *["span"] * 4]
    assert [(row["mode"], row["status"], row["priority"]) for row in rows if row["type"] == "rollout"] == [
        ("train", "succeeded", 3)
    ]
    call = next(row for row in rows if row["span_id"] == "b")
    assert call["prompt_token_ids"] == list(range(1000))
    assert call["logprobs"] == [-0.5, -1.25]
    assert json.loads(call["events"]) == [{"name": "first token", "timestamp": 103.25, "attributes": {"index": 0}}]


async def test_a_parquet_export_has_integers_of_any_size(store: LightningStoreBase, tmp_path: Path) -> None:
    claimed = await store.start_rollout({"seed": 2**70})
    await store.add_span(Span(claimed.rollout_id, claimed.attempt.attempt_id, "work", 1.0, attributes={"n": -(2**80)}))
    await export_store(store, tmp_path / "all.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert [json.loads(row["input"]) for row in rows if row["type"] == "rollout"] == [{"seed": 2**70}]
    assert [json.loads(row["attributes"]) for row in rows if row["type"] == "span"] == [{"n": -(2**80)}]


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | finite | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
anything = st.dictionaries(text, values, max_size=3)
ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)
spans = st.builds(
    Span,
    st.just("ro"),
    st.just("at"),
    text,
    finite,
    st.none() | finite,
    st.integers(1, 2**53),
    text,
    text,
    st.none() | text,
    st.sampled_from(["UNSET", "OK", "ERROR"]),
    st.none() | text,
    anything
    | st.fixed_dictionaries(
        {PROMPT_TOKEN_IDS: ids | values, RESPONSE_TOKEN_IDS: ids, LOGPROBS: st.lists(st.floats(-9, 0, width=32))}
    ),
    st.lists(st.builds(SpanEvent, text, finite, anything), max_size=2).map(tuple),
    anything,
)
attempts = st.builds(
    Attempt,
    st.just("ro"),
    text,
    st.integers(1, 9),
    finite,
    st.sampled_from(get_args(AttemptStatus)),
    st.none() | finite,
    st.none() | text,
    st.none() | finite,
    anything,
)
rollouts = st.builds(
    Rollout,
    st.just("ro"),
    values,
    finite,
    st.sampled_from(get_args(RolloutStatus)),
    st.none() | st.sampled_from(get_args(RolloutMode)),
    st.none() | text,
    st.none() | finite,
    st.builds(RolloutConfig, timeout_seconds=st.none() | st.floats(1, 9), max_attempts=st.integers(1, 9)),
    anything,
    text,
    st.integers(-(2**31), 2**31),
)
records = st.builds(
    RolloutRecord, rollouts, st.lists(attempts, max_size=2).map(tuple), st.lists(spans, max_size=2).map(tuple)
)


@settings(max_examples=15)
@given(st.lists(records, max_size=3))
def test_whatever_a_store_holds_goes_through_every_format(several: list[RolloutRecord]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in FORMATS:
            path = Path(folder) / name
            writer = copy._open_writer(path, path, copy._suffix(path), overwrite=False)
            writer.write(several)
            writer.finish()
            assert [item for item, _ in jsonl.read_items(path)] == several


# -- files that are damaged ------------------------------------------------------------------------------------------


@pytest.fixture
async def lines(store: LightningStoreBase, tmp_path: Path) -> list[bytes]:
    """A header, two resources, three rollouts, an end."""
    await fill(store)
    await export_store(store, tmp_path / "whole.jsonl")
    return (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)


async def test_what_comes_before_a_cut_is_imported_and_the_line_is_named(
    other: LightningStoreBase, tmp_path: Path, lines: list[bytes]
) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(b"".join(lines[:5]) + lines[5][:100])
    with pytest.raises(
        DatasetError, match=r"cut.jsonl is truncated at line 6.*What comes before is in the store \(2 rollouts\)"
    ):
        await import_store(other, path)
    assert await everything(other) == [record(0), record(1)]
    path.write_bytes(b"".join(lines))
    assert await import_store(other, path) == Imported(resources=2, rollouts=1, known=2)


async def test_a_file_that_ends_between_two_lines_is_known_to_be_cut_off(
    other: LightningStoreBase, tmp_path: Path, lines: list[bytes]
) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(DatasetError, match="truncated at line 7: its end is missing"):
        await import_store(other, path)
    assert len(await everything(other)) == 3


async def test_a_gzip_file_cut_off_is_named(other: LightningStoreBase, tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "cut.jsonl.gz"
    whole = gzip.compress(b"".join(lines))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match="truncated at line"):
        await import_store(other, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda line: line.replace(b'"start_time":101.0,', b"", 1), "missing required field `start_time`"),
        (lambda line: line.replace(b'"priority"', b'"colour"'), "unknown field `colour`"),
        (lambda line: line.replace(b'"timestamp"', b'"colour":1,"timestamp"'), r"unknown field `colour` - at .*events"),
        (lambda line: line.replace(b'"succeeded"', b'"happy"'), "Invalid enum value 'happy'"),
        (lambda line: line.replace(b"101.0", b"NaN"), "malformed"),
        (lambda line: line.replace(b'"max_attempts":2', b'"max_attempts":0'), "greater than or equal to 1"),
        (lambda line: line.replace(b"6 x 7?", b"\xff"), "(?i:utf-8)"),
        (lambda line: line[:100] + b"\n", "truncated"),
    ],
)
async def test_a_damaged_line_is_named_and_only_what_comes_before_it_is_imported(
    other: LightningStoreBase, tmp_path: Path, lines: list[bytes], damage: Any, message: str
) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"".join([*lines[:4], damage(lines[4]), *lines[5:]]))
    where, before = f"line 5 of {re.escape(str(path))}: ", r"What comes before is in the store \(1 rollouts\)"
    with pytest.raises(DatasetError, match=f"{where}.*{message}.*{before}"):
        await import_store(other, path)
    assert await everything(other) == [record(0)]
    assert len(await other.query_resources()) == 2
    path.write_bytes(b"".join(lines))
    assert await import_store(other, path) == Imported(resources=2, rollouts=2, known=1)
    assert await everything(other) == [record(number) for number in range(3)]


async def test_a_line_that_was_removed_is_known_from_the_last_one(
    other: LightningStoreBase, tmp_path: Path, lines: list[bytes]
) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"".join([*lines[:4], *lines[5:]]))
    with pytest.raises(DatasetError, match=f"line 6 of {path}: 3 rollouts were exported and 2 are here"):
        await import_store(other, path)
    assert await everything(other) == [record(0), record(2)]


async def test_a_header_is_known_in_whatever_order_and_form_a_tool_writes_it(
    other: LightningStoreBase, tmp_path: Path, lines: list[bytes]
) -> None:
    header = b'{ "format" : "agentlightning.export", "type": "header", "version": 1 }\n'
    (tmp_path / "sorted.jsonl").write_bytes(b"".join([header, *lines[1:]]))
    assert (await import_store(other, tmp_path / "sorted.jsonl")).rollouts == 3


async def test_a_file_of_another_kind_is_refused_by_name(store: LightningStoreBase, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"question": "6 x 7?"}\n' * 3)
    (tmp_path / "zeros.jsonl").write_bytes(b"\0" * 10_000)
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(bytes(65 << 20), 1))
    for name in ("tasks.jsonl", "zeros.jsonl", "empty.jsonl", "bomb.jsonl.gz"):
        with pytest.raises(DatasetError, match=f"{name} is not an export of a store.*Nothing was imported"):
            await import_store(store, tmp_path / name)
    await export_store(store, tmp_path / "all.parquet")
    with pytest.raises(ConfigError, match=r"Parquet is for other programs to read; import an export in \.jsonl"):
        await import_store(store, tmp_path / "all.parquet")
    with pytest.raises(DatasetError, match="there is no file"):
        await import_store(store, tmp_path / "absent.jsonl")


async def test_an_export_of_a_later_version_is_refused_with_advice(store: LightningStoreBase, tmp_path: Path) -> None:
    path = tmp_path / "later.jsonl"
    path.write_text('{"type": "header", "format": "agentlightning.export", "version": 2, "more": 1}\n')
    with pytest.raises(DatasetError, match=r"an export of version 2.*with the release that wrote it, or a later one"):
        await import_store(store, path)


async def test_a_small_file_that_becomes_a_large_record_is_refused(
    store: LightningStoreBase, other: LightningStoreBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "bomb.jsonl.gz"
    spans = tuple(Span("ro-0001", "at-0001-2", "x", 1.0, attributes={"a": "x" * 50_000}) for _ in range(100))
    await store.add_records([replace(record(1), spans=spans)])
    await export_store(store, tmp_path / name)
    monkeypatch.setattr(jsonl, "USUAL_BYTES", 100_000)
    with pytest.raises(DatasetError, match=r"line 2 .*more than .* bytes"):
        await import_store(other, tmp_path / name)
    monkeypatch.undo()
    assert (await import_store(other, tmp_path / name)).rollouts == 1


async def test_other_resources_under_the_same_id_stop_the_import_before_any_rollout(
    store: LightningStoreBase, other: LightningStoreBase, tmp_path: Path
) -> None:
    await fill(store)
    await export_store(store, tmp_path / "all.jsonl")
    await other.add_resources({"prompt": PromptTemplate(template="mine")}, "rs-1")
    with pytest.raises(ConflictError, match="rs-1"):
        await import_store(other, tmp_path / "all.jsonl")
    assert await everything(other) == []


# -- files that cannot be written ------------------------------------------------------------------------------------


async def test_a_file_is_overwritten_only_when_allowed(store: LightningStoreBase, tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"all.jsonl exists"):
        await export_store(store, path)
    assert path.read_text() == "precious"
    await export_store(store, path, overwrite=True)
    assert path.read_text() != "precious"


@pytest.mark.parametrize("name", ["all.csv", "all", "jsonl", "all.json"])
async def test_an_unknown_ending_is_refused(store: LightningStoreBase, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.jsonl, \.jsonl\.gz, \.parquet"):
        await export_store(store, tmp_path / name)
    with pytest.raises(ConfigError, match=r"ends in \.jsonl, \.jsonl\.gz, \.parquet"):
        await import_store(store, tmp_path / name)


@pytest.mark.parametrize("name", [*FORMATS, "all.parquet"])
async def test_an_export_that_is_interrupted_leaves_no_file(
    store: LightningStoreBase, tmp_path: Path, name: str
) -> None:
    await fill(store)

    def stop(done: int, total: int | None) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await export_store(store, tmp_path / "folder" / name, report=stop)
    assert os.listdir(tmp_path / "folder") == []


async def test_parquet_without_pyarrow_says_what_to_install(
    store: LightningStoreBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = __import__("sys").modules
    monkeypatch.delitem(modules, "agentlightning.store.export.parquet", raising=False)
    monkeypatch.setitem(modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"agentlightning\[parquet\]"):
        await export_store(store, tmp_path / "all.parquet")
    assert os.listdir(tmp_path) == []


# -- memory ----------------------------------------------------------------------------------------------------------

COPIES = """
import asyncio, resource, sys
from agentlightning.rollouts import Attempt, Rollout
from agentlightning.span import Span
from agentlightning.store import LightningStore
from agentlightning.store.types import RolloutRecord
from agentlightning.store.http.client import LightningStoreClient
from agentlightning.store.export import export_store, import_store

def record(number):
    ids = f"ro-{number}", f"at-{number}"
    spans = tuple(Span(*ids, "chat", 1.0, sequence_id=n, span_id=f"{number}-{n}", attributes={"text": str(n) * 5000})
                  for n in range(1, 9))
    rollout = Rollout(ids[0], "task", 1.0, status="succeeded", end_time=2.0)
    return RolloutRecord(rollout, (Attempt(*ids, 1, 1.0, "succeeded", 2.0),), spans)

async def copy(count, folder, name):
    store, other = LightningStore(f"{folder}/{count}.db"), LightningStore(f"{folder}/{count}-{name}.db")
    for start in range(0, count, 50):
        await store.add_records([record(number) for number in range(start, start + 50)])
    await export_store(store, f"{folder}/{count}-{name}")
    assert (await import_store(other, f"{folder}/{count}-{name}")).rollouts == count
    await store.close()
    await other.close()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = asyncio.run(copy(500, sys.argv[1], sys.argv[2]))
print(asyncio.run(copy(4000, sys.argv[1], sys.argv[2])) - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_memory_does_not_grow_with_the_store(start_process: Any, tmp_path: Path, name: str) -> None:
    """From 20 MB of spans to 160 MB."""
    process = start_process(COPIES, tmp_path, name)
    kilobytes = int(process.communicate(timeout=100)[0])
    assert kilobytes < 40_000


@pytest.mark.parametrize("name", FORMATS)
async def test_api_keys_do_not_leave_a_store_in_a_file(
    store: LightningStoreBase, other: LightningStoreBase, tmp_path: Path, name: str
) -> None:
    await store.add_resources(
        {"main": LLM(endpoint="http://a", model="m", api_key="sk-secret"), "other": LLM(endpoint="http://b", model="n")}
    )
    exported = await export_store(store, tmp_path / name)
    assert exported.keys_left_out == 1
    body = (tmp_path / name).read_bytes()
    assert b"sk-secret" not in (gzip.decompress(body) if name.endswith(".gz") else body)
    kept = await store.get_latest_resources()
    assert kept is not None
    assert getattr(kept.resources["main"], "api_key", None) == "sk-secret", "agents still have it"


@pytest.mark.parametrize("same_rollout", [True, False])
async def test_an_attempt_id_that_two_attempts_have_is_named(store: LightningStoreBase, same_rollout: bool) -> None:
    first, second = record(1), record(2)
    taken = first.attempts[0]
    if same_rollout:
        first = replace(first, attempts=(taken, replace(taken, sequence_id=2)), spans=())
    else:
        second = replace(second, attempts=(replace(taken, rollout_id="ro-0002"),), spans=())
    with pytest.raises(ConflictError, match="attempt 'at-0001-1' is one of rollout 'ro-0001' already"):
        await store.add_records([first, second])
    assert await everything(store) == []
    assert await store.add_records([record(1), record(1), record(2)]) == 2
