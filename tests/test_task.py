"""Promises about tasks: where they come from, how they are split and drawn."""

from __future__ import annotations

import datetime
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agentlightning.errors import ConfigError, DatasetError, MissingExtraError
from agentlightning.task import Dataset, load_dataset, overlaps, split, task_key, tasks_of_step

# -- loading ---------------------------------------------------------------------------------------------------------


def test_a_jsonl_file_is_one_task_a_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes('\ufeff{"q": "wie groß?"}\r\n\n   \n[1, 2]\n"text"\n3'.encode())
    assert load_dataset(path) == [{"q": "wie groß?"}, [1, 2], "text", 3]
    assert load_dataset(str(path)) == load_dataset(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n\n{"a": 1\n', r"tasks.jsonl, line 3 is not JSON \(.*\): '\{\"a\": 1'; each line is one JSON"),
        (b'{"a": 1}\nquestion,answer\n', r"line 2 is not JSON .*: 'question,answer'"),
        (b"x" * 500, r"line 1 is not JSON .*: 'x{60}\.\.\.'"),
        (b'{"a": 1}\n{"a": NaN}\n', r"line 2 is not JSON"),
        (b'{"a": 1}\n{"name": "M\xfcller"}\n', r"line 2 is not UTF-8: byte 0xfc in .*; save it as UTF-8"),
        (b"", r"tasks.jsonl has no tasks"),
        (b"\n \n\n", r"tasks.jsonl has no tasks"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        load_dataset(path)


def test_a_json_file_is_an_array_of_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text('[{"a": 1}, {"a": 2}]')
    assert load_dataset(path) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}', r"holds a JSON dict, not an array of tasks"),
        ('{"a": 1}\n{"a": 2}', r"is not JSON .* use the suffix \.jsonl"),
        ("[]", "has no tasks"),
        ("", "has no tasks"),
    ],
)
def test_a_json_file_of_another_shape_says_what_to_do(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(content)
    with pytest.raises(DatasetError, match=message):
        load_dataset(path)


def test_a_parquet_file_is_one_task_a_row(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    rows = [{"q": "a", "n": 1, "tags": ["x"], "day": datetime.date(2026, 1, 2)}, {"q": "b", "n": None, "tags": []}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert load_dataset(path) == [
        {"q": "a", "n": 1, "tags": ["x"], "day": "2026-01-02"},
        {"q": "b", "n": None, "tags": [], "day": None},
    ]


def test_a_parquet_file_that_is_none_or_holds_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.parquet"
    path.write_text("not parquet")
    with pytest.raises(DatasetError, match="is not a Parquet file"):
        load_dataset(path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"image": b"\x00"}]), path)
    with pytest.raises(DatasetError, match=r"tasks\.parquet, task 1 cannot be written as JSON: .*bytes"):
        load_dataset(path)


def test_a_missing_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tasks.parquet"
    path.touch()
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentlightning\[parquet\]'"):
        load_dataset(path)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentlightning\[datasets\]'"):
        load_dataset(f"datasets:{tmp_path}")


def test_a_saved_huggingface_dataset_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"q": "a", "n": 1}, {"q": "b", "n": 2}]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "two"))
    assert load_dataset(saved) == rows
    assert load_dataset(tmp_path / "one") == rows
    assert load_dataset(f"datasets:{tmp_path / 'two' / 'train'}") == rows
    assert load_dataset(tmp_path / "two") == rows
    with pytest.raises(DatasetError, match="not one written by"):
        load_dataset(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere.jsonl", "dataset not found: '.*nowhere.jsonl'"), ("t.xlsx", r"not from '\.xlsx'")]
)
def test_a_path_that_cannot_be_read_says_why(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "t.xlsx").write_text("a,b")
    with pytest.raises(DatasetError, match=message):
        load_dataset(tmp_path / name)


class Numbered:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        return {"n": index, "pair": (1, 2)}


def test_anything_with_a_length_and_numbered_items_is_a_dataset() -> None:
    assert isinstance(Numbered(), Dataset)
    assert load_dataset(Numbered()) == [{"n": n, "pair": [1, 2]} for n in range(3)]
    assert load_dataset([{"a": 1}, "b"]) == [{"a": 1}, "b"]


def test_tasks_given_are_copied() -> None:
    task = {"a": [1]}
    loaded = load_dataset([task])
    loaded[0]["a"].append(2)
    assert task == {"a": [1]}


class DataFrame:
    def __iter__(self) -> Any:
        return iter(["column"])


DataFrame.__module__ = "pandas.core.frame"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "the given list has no tasks"),
        ({"q": "a"}, "a dict is one task; put it into a list"),
        ([{"q": object()}], "the given list, task 1 cannot be written as JSON: .*object"),
        ([1, {2: 3}], "task 2 cannot be written as JSON"),
        (DataFrame(), r'frame\.to_dict\("records"\)'),
        (7, "int is not a dataset"),
    ],
)
def test_what_holds_no_tasks_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        load_dataset(spec)


# -- identity and splits ---------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(values)
def test_a_key_is_the_same_after_a_trip_through_json(task: Any) -> None:
    turned = json.loads(json.dumps(task))
    if isinstance(turned, dict):
        turned = dict(reversed(turned.items()))
    assert task_key(turned) == task_key(task)


def test_different_tasks_have_different_keys() -> None:
    assert len({task_key(task) for task in (1, "1", [1], {"1": 1}, None, True, {"a": 1}, {"a": 2})}) == 8
    assert task_key({"a": 1, "b": "ü"}) == task_key({"b": "ü", "a": 1}) == "1a59e522e02ce50ad2c27c11a6d30f86"


@given(st.lists(values, max_size=60), st.integers(0, 5))
def test_a_split_loses_nothing_and_never_tears_equal_tasks_apart(tasks: list[Any], seed: int) -> None:
    parts = split(tasks, [0.6, 0.2, 0.2], seed)
    keys = [[task_key(task) for task in part] for part in parts]
    assert Counter(key for part in keys for key in part) == Counter(map(task_key, tasks))
    assert sum(len(set(part)) for part in keys) == len({key for part in keys for key in part})


@given(st.permutations(range(30)), st.integers(0, 3))
def test_a_split_depends_on_content_and_seed_alone(order: list[int], seed: int) -> None:
    straight = split(range(30), [0.5, 0.5], seed)
    shuffled = split(order, [0.5, 0.5], seed)
    assert [sorted(part) for part in shuffled] == straight


def test_parts_have_the_size_asked_for_and_keep_the_order() -> None:
    tasks = list(range(1000))
    parts = split(tasks, [0.7, 0.0, 0.3], seed=1)
    assert [len(part) for part in parts] == [700, 0, 300]
    assert all(part == sorted(part) for part in parts)
    assert split(tasks, [0.7, 0.0, 0.3], seed=2) != parts


@pytest.mark.parametrize("fractions", [[0.5, 0.4], [1.2, -0.2], []])
def test_shares_that_do_not_add_up_are_refused(fractions: list[float]) -> None:
    with pytest.raises(ConfigError, match="do not sum to 1"):
        split([1, 2], fractions)


# -- sampling --------------------------------------------------------------------------------------------------------
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 3))
def test_every_task_is_drawn_once_an_epoch(count: int, batch: int, seed: int) -> None:
    drawn = [task for step in range(count) for task in tasks_of_step(count, batch, step, seed)]
    assert len(drawn) == count * batch
    for epoch in range(batch):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_a_step_draws_the_same_tasks_each_time() -> None:
    draws = [tasks_of_step(50, 16, step, seed=3) for step in range(12)]
    for step in (7, 11, 2):
        assert tasks_of_step(50, 16, step, seed=3) == draws[step]


def test_an_epoch_is_shuffled_once() -> None:
    times = list[float]()
    for step in range(2):
        began = time.perf_counter()
        tasks_of_step(300_000, 8, step, seed=9)
        times.append(time.perf_counter() - began)
    assert times[1] < times[0] / 10


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    assert tasks_of_step(100, 100, 0) != tasks_of_step(100, 100, 1)
    assert tasks_of_step(100, 100, 0) != tasks_of_step(100, 100, 0, seed=1)
    assert tasks_of_step(10, 5, 0) == [5, 0, 3, 2, 7]  # in every version: runs are resumed


def test_datasets_that_share_tasks_are_named_with_their_rows():
    datasets = {"train": [{"a": 1, "b": 2}, {"a": 2}], "validation": [{"a": 3}, {"b": 2, "a": 1}], "test": [{"a": 2}]}
    found = overlaps(datasets)
    assert [(each.first, each.second, each.rows) for each in found] == [
        ("train", "validation", ((1, 2),)),
        ("train", "test", ((2, 1),)),
    ]
    assert str(found[0]) == "1 validation tasks are train tasks, too: rows 2 (= 1)"
    many = overlaps({"train": list(range(20)), "test": list(range(20))})[0]
    assert str(many).endswith("8 (= 8) and 12 more")
    assert overlaps({"train": [1], "test": [2]}) == []


# -- what users bring ------------------------------------------------------------------------------------------------

LARGE = 2**70


class Model(BaseModel):
    q: str
    n: int = LARGE


@dataclass
class Record:
    q: str
    n: int = LARGE
    inner: Model | None = None


class DatasetDict(dict[str, Any]):
    """As `datasets.DatasetDict`, which is known by its package."""


DatasetDict.__module__ = "datasets.dataset_dict"


@pytest.mark.parametrize("value", [LARGE, -LARGE, 2**64, -(2**63) - 1, 10**300])
@pytest.mark.parametrize("name", ["t.jsonl", "t.json"])
def test_an_integer_of_any_size_is_read_as_it_is(tmp_path: Path, name: str, value: int) -> None:
    task = {"answer": value, "nested": [{"deep": value}]}
    text = json.dumps(task if name.endswith("l") else [task])
    (tmp_path / name).write_text(text)
    assert load_dataset(tmp_path / name) == load_dataset([task]) == [task]
    assert task_key(task) != task_key({"answer": value + 1, "nested": [{"deep": value}]})


def test_models_and_dataclasses_are_tasks() -> None:
    assert load_dataset([Model(q="a")]) == [{"q": "a", "n": LARGE}]
    assert load_dataset((Record("a", inner=Model(q="b", n=1)),)) == [
        {"q": "a", "n": LARGE, "inner": {"q": "b", "n": 1}}
    ]
    with pytest.raises(DatasetError, match="task 1 cannot be written as JSON"):
        load_dataset([{"f": print}])


def test_a_csv_file_has_a_task_in_each_row(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('\ufeffq,answer\n"a, ""b""\nc",1\nd,\n', encoding="utf-8")
    assert load_dataset(path) == [{"q": 'a, "b"\nc', "answer": "1"}, {"q": "d", "answer": ""}]
    for content, words in (
        ("q,answer\na\n", "line 2"),
        ("q\na,b\n", "line 2"),
        ('q\n"a\n', "CSV"),
        ("q\n", "no tasks"),
        ("q;answer\na;1\n", "the one column 'q;answer': separate columns with commas, not ';'"),
    ):
        path.write_text(content)
        with pytest.raises(DatasetError, match=words):
            load_dataset(path)


def test_of_several_splits_train_is_taken_and_said(caplog: pytest.LogCaptureFixture) -> None:
    assert load_dataset(DatasetDict(test=[{"a": 2}])) == [{"a": 2}]
    assert load_dataset(DatasetDict(train=[{"a": 1}], test=[{"a": 2}])) == [{"a": 1}]
    assert "holds the splits train, test; train is taken" in caplog.text
    with pytest.raises(DatasetError, match=r"several splits \(a, b\)"):
        load_dataset(DatasetDict(a=[{"a": 1}], b=[{"a": 2}]))


def test_columns_give_a_row_no_fields_of_other_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = [{"expression": "6 * 7"}, {"city": "Rome", "days": [{"from": 1}, {"to": 2}]}, {}]
    rows = [{"q": str(n), "note": None, "tools": [{"name": "t", "arguments": c}]} for n, c in enumerate(calls)]
    rows[0]["note"] = "of a column"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert load_dataset(tmp_path / "t.parquet") == rows
    assert load_dataset(DatasetDict(train=pyarrow.Table.from_pylist(rows).to_pylist())) == rows
    assert "nulls within its values are left out (city, days, expression, from, to)" in caplog.text
