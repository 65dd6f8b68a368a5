"""Versions of weights on a URL: the same bytes on every host, whatever fails between."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

pytest.importorskip("zstandard", reason="pip install ./plugins/weights")

import zstandard
from safetensors.numpy import save_file

from agentlightning.errors import ConfigError, PolicyError
from agentlightning_weights.bucket import Bucket, WeightStoreError, digest
from agentlightning_weights.publish import WeightPublisher
from agentlightning_weights.pull import WeightPuller

from .conftest import S3

pytestmark = pytest.mark.integration


class Model:
    """Random weights that change a little with each step."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.random = folder, np.random.default_rng(seed)
        shapes = {"a": (40, 16), "b": (7,), "c": (3, 5, 2), "frozen": (64,), "empty": (0,)}
        self.tensors = {
            name: self.random.normal(size=shape).astype(np.float32 if name != "b" else np.float16)
            for name, shape in shapes.items()
        }

    def step(self, version: int) -> Path:
        for name in ("a", "b", "c"):
            own = self.tensors[name]
            chosen = self.random.random(own.shape) < 0.05
            self.tensors[name] = np.where(chosen, own * np.float16(1.01), own).astype(own.dtype)
        directory = self.folder / f"v{version}"
        directory.mkdir(parents=True)
        save_file(self.tensors, directory / "model-00001-of-00001.safetensors", {"format": "pt"})
        (directory / "config.json").write_text('{"model_type": "x"}')
        if version % 7 == 0:
            (directory / "notes.txt").write_text(f"of version {version}")
        return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: Any, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"s3://{request.getfixturevalue('s3').bucket()}/run"
    return f"file://{tmp_path}/bucket" if request.param == "file" else f"memory://{uuid4().hex}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_version_arrives_byte_for_byte(url: str, tmp_path: Path, seed: int) -> None:
    count, full_every = (20, 6) if seed and url.startswith("s3:") else (100, 30)
    model, publisher = Model(tmp_path / "trainer", seed), WeightPublisher(url, full_every=full_every)
    every, some = (WeightPuller(url, tmp_path / name) for name in ("every", "some"))
    chances = np.random.default_rng(seed)
    full = deltas = 0
    for version in range(count):
        directory = model.step(version)
        published = publisher.publish(directory, version)
        full, deltas = full + published["weights_full"], deltas + (not published["weights_full"])
        pulled = every.pull()
        assert pulled is not None
        assert (pulled.version, pulled.steps) == (version, 1)
        assert contents(pulled.directory) == contents(directory)
        if not published["weights_full"]:
            assert published["weights_bytes"] < published["weights_size"] / 2
        if chances.random() < 0.2:
            late = some.pull()
            assert late is not None
            assert contents(late.directory) == contents(directory)
        if version > 1:
            shutil.rmtree(tmp_path / "trainer" / f"v{version - 2}")
    assert (full, deltas) == (4, count - 4)
    again = every.pull()
    assert again is not None
    assert (again.steps, again.bytes) == (0, 0)


def test_a_late_host_starts_from_the_last_full_version(url: str, tmp_path: Path) -> None:
    model, publisher = Model(tmp_path / "trainer"), WeightPublisher(url, full_every=4, keep_full=1)
    for version in range(11):
        directory = model.step(version)
        publisher.publish(directory, version)
    assert Bucket(url).versions() == [8, 9, 10], "what nobody needs any more is removed"
    pulled = WeightPuller(url, tmp_path / "late").pull()
    assert pulled is not None
    assert pulled.steps == 3
    assert contents(pulled.directory) == contents(directory)


def test_a_publication_that_was_killed_is_not_seen_and_the_next_is_full(url: str, tmp_path: Path) -> None:
    model, publisher = Model(tmp_path / "trainer"), WeightPublisher(url)
    puller = WeightPuller(url, tmp_path / "host")
    first = model.step(0)
    publisher.publish(first, 0)
    publisher.publish(model.step(1), 1)
    Bucket(url).remove("000001/manifest.json")  # Killed before the last write.
    pulled = puller.pull()
    assert pulled is not None
    assert (pulled.version, contents(pulled.directory)) == (0, contents(first))
    started_again, directory = WeightPublisher(url), model.step(2)
    assert started_again.publish(directory, 1)["weights_full"]
    pulled = puller.pull()
    assert pulled is not None
    assert (pulled.version, contents(pulled.directory)) == (1, contents(directory))


def test_a_pull_that_was_killed_starts_again(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, publisher = Model(tmp_path / "trainer"), WeightPublisher(url)
    puller = WeightPuller(url, tmp_path / "host")
    publisher.publish(model.step(0), 0)
    puller.pull()
    directory = model.step(1)
    publisher.publish(directory, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "read", _killed_at("config", Bucket.read))
        patched.setattr(Bucket, "read", _killed_at(".xor", Bucket.read))
        with pytest.raises(KeyboardInterrupt):
            puller.pull()
    pulled = WeightPuller(url, tmp_path / "host").pull()
    assert pulled is not None
    assert (pulled.steps, contents(pulled.directory)) == (1, contents(directory))


def _killed_at(name: str, read: Any) -> Any:
    def fails(self: Bucket, path: str, *args: Any) -> bytes:
        if name in path:
            raise KeyboardInterrupt
        return read(self, path, *args)

    return fails


@pytest.mark.parametrize("damage", ["flip", "cut", "garbage"])
def test_a_damaged_difference_is_refused_and_replaced_by_a_full_version(url: str, tmp_path: Path, damage: str) -> None:
    model, publisher = Model(tmp_path / "trainer"), WeightPublisher(url)
    puller, store = WeightPuller(url, tmp_path / "host", host="h1"), Bucket(url)
    publisher.publish(model.step(0), 0)
    good = puller.pull()
    assert good is not None
    before = contents(good.directory)
    publisher.publish(model.step(1), 1)
    name = "000001/model-00001-of-00001.safetensors.xor"
    data = store.read(name)
    middle = len(data) // 2
    damaged = {
        "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "cut": data[:middle],
        "garbage": bytes(len(data)),
    }[damage]
    store.write(name, damaged)
    with pytest.raises(WeightStoreError, match="refused"):
        puller.pull()
    assert puller.current is not None
    assert puller.current[0] == 0, "it stays on what it has"
    assert contents(good.directory) == before
    directory = model.step(2)
    assert publisher.publish(directory, 2)["weights_full"], "h1 asked for it"
    assert store.names("wanted") == []
    pulled = puller.pull()
    assert pulled is not None
    assert (pulled.version, pulled.steps, contents(pulled.directory)) == (2, 1, contents(directory))


def test_a_damaged_full_version_is_refused_and_the_next_is_full(url: str, tmp_path: Path) -> None:
    model, publisher = Model(tmp_path / "trainer"), WeightPublisher(url)
    puller, store = WeightPuller(url, tmp_path / "host", host="h1"), Bucket(url)
    publisher.publish(model.step(0), 0)
    name = "000000/model-00001-of-00001.safetensors"
    store.write(name, bytes(len(store.read(name))))
    with pytest.raises(WeightStoreError, match=r"refused.*is not the file that was published"):
        puller.pull()
    directory = model.step(1)
    assert publisher.publish(directory, 1)["weights_full"], "h1 asked for it"
    pulled = puller.pull()
    assert pulled is not None
    assert contents(pulled.directory) == contents(directory)


def test_a_host_that_may_only_read_is_told_what_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/bucket"
    WeightPublisher(url).publish(Model(tmp_path / "trainer").step(0), 0)
    Bucket(url).write("000000/config.json", bytes(len(Bucket(url).read("000000/config.json"))))
    puller = WeightPuller(url, tmp_path / "host")

    def refuse(path: str, data: bytes) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(puller.bucket._files, "pipe_file", refuse)
    with pytest.raises(WeightStoreError, match=r"config.json is not the file that was published.*PermissionError"):
        puller.pull()


def test_a_base_that_changed_on_the_host_is_noticed(url: str, tmp_path: Path) -> None:
    model, publisher = Model(tmp_path / "trainer"), WeightPublisher(url)
    puller = WeightPuller(url, tmp_path / "host")
    publisher.publish(model.step(0), 0)
    pulled = puller.pull()
    assert pulled is not None
    file = pulled.directory / "model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    directory = model.step(1)
    publisher.publish(directory, 1)
    with pytest.raises(WeightStoreError, match="refused"):
        puller.pull()
    directory = model.step(2)
    publisher.publish(directory, 2)
    pulled = puller.pull()
    assert pulled is not None
    assert contents(pulled.directory) == contents(directory)


def test_tensors_of_another_shape_are_a_full_version(url: str, tmp_path: Path) -> None:
    model, publisher = Model(tmp_path / "trainer"), WeightPublisher(url)
    publisher.publish(model.step(0), 0)
    model.tensors["a"] = model.tensors["a"][:20]
    directory = model.step(1)
    publisher.publish(directory, 1)
    pulled = WeightPuller(url, tmp_path / "host").pull()
    assert pulled is not None
    assert contents(pulled.directory) == contents(directory)


def test_a_bucket_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("a file where the folder should be")
    model = Model(tmp_path / "trainer")
    with pytest.raises(WeightStoreError, match=r"cannot .* at file://.*bucket.*permissions"):
        WeightPublisher(f"file://{tmp_path}/bucket").publish(model.step(0), 0)
    assert issubclass(WeightStoreError, PolicyError)
    with pytest.raises(ConfigError, match="cannot be opened"):
        Bucket("nothing://x")


@pytest.mark.slow
def test_a_bucket_that_may_be_read_alone_serves_hosts_and_refuses_the_trainer(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, url = Model(tmp_path / "trainer"), f"s3://{s3.bucket()}/run"
    first = model.step(0)
    WeightPublisher(url).publish(first, 0)
    for name, value in s3.reader().items():
        monkeypatch.setenv(name, value)
    type(Bucket(url)._files).clear_instance_cache()
    with pytest.raises(
        WeightStoreError, match=rf"cannot write 000001/config.json at {url}: PermissionError.*permissions"
    ):
        WeightPublisher(url).publish(model.step(1), 1)
    pulled = WeightPuller(url, tmp_path / "host").pull()
    assert pulled is not None
    assert (pulled.version, contents(pulled.directory)) == (0, contents(first))


@pytest.mark.slow
def test_a_bucket_that_does_not_exist_is_named_and_not_made(s3: S3, tmp_path: Path) -> None:
    with pytest.raises(WeightStoreError, match=r"cannot write .* at s3://mistyped/run: FileNotFoundError"):
        WeightPublisher("s3://mistyped/run").publish(Model(tmp_path / "trainer").step(0), 0)
    assert "mistyped" not in s3.buckets()


def test_versions_of_a_newer_format_and_damaged_manifests_are_refused(url: str, tmp_path: Path) -> None:
    WeightPublisher(url).publish(Model(tmp_path / "trainer").step(0), 0)
    store = Bucket(url)
    text = store.read("000000/manifest.json")
    store.write("000000/manifest.json", text.replace(b'"format":2', b'"format":3'))
    with pytest.raises(WeightStoreError, match="format 3"):
        WeightPuller(url, tmp_path / "host").pull()
    store.write("000000/manifest.json", text[:-9])
    with pytest.raises(WeightStoreError, match="damaged"):
        WeightPuller(url, tmp_path / "host").pull()


# -- a bucket that somebody else can write to --------------------------------------------------------------------------


def entry(name: str, data: bytes, **fields: Any) -> dict[str, Any]:
    return {"name": name, "size": len(data), "kind": "whole", "digest": digest(data), **fields}


def publish(bucket: Path, version: int, *files: dict[str, Any], **fields: Any) -> Path:
    folder = bucket / f"{version:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    record = {"format": 2, "version": version, "id": f"v{version}", "base": None, "files": files, "stored": 0, **fields}
    (folder / "manifest.json").write_text(json.dumps(record))
    return folder


def test_versions_of_format_1_name_a_file_that_stays_and_are_still_read(tmp_path: Path) -> None:
    url, host = f"file://{tmp_path}/bucket", tmp_path / "host"
    publish(tmp_path / "bucket", 1, entry("config.json", b"{}"), format=1).joinpath("config.json").write_bytes(b"{}")
    publish(tmp_path / "bucket", 2, entry("config.json", b"{}", kind="same"), base=(1, "v1"), format=1)
    pulled = WeightPuller(url, host).pull()
    assert pulled is not None
    assert (pulled.version, contents(pulled.directory)) == (2, {"config.json": b"{}"})


NAMES = [
    "../../victim.txt",
    "a/../../../victim.txt",
    "..",
    ".",
    "",
    "a//b",
    "./a",
    "a\\..\\b",
    "C:/a",
    "a\0b",
    "/etc/victim",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_names_files_below_the_directory_alone(tmp_path: Path, name: str) -> None:
    publish(tmp_path / "bucket", 1, entry("model", b"good"), entry(name, b"evil"))
    (tmp_path / "victim.txt").write_bytes(b"evil")
    with pytest.raises(WeightStoreError, match="nothing of it was used"):
        WeightPuller(f"file://{tmp_path}/bucket", tmp_path / "deep" / "host").pull()
    assert not (tmp_path / "deep").exists()


def test_an_absolute_name_writes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "home" / "authorized_keys"
    publish(tmp_path / "bucket", 1, entry(str(target), b"evil"))
    with pytest.raises(WeightStoreError, match="is no path below the directory"):
        WeightPuller(f"file://{tmp_path}/bucket", tmp_path / "host").pull()
    assert not target.exists()


BASE = b"\x02\0\0\0\0\0\0\0{}" + b"a" * 8


def part(begin: int, end: int, **fields: Any) -> dict[str, Any]:
    return {"name": "header", "begin": begin, "end": end, "digest": digest(BASE[begin:end]), "stored": 0, **fields}


def xor(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return entry("m.safetensors", BASE, kind="xor", parts=parts, **fields)


DAMAGED: dict[str, dict[str, Any]] = {
    "a base in a circle": {"files": (), "base": (2, "v2")},
    "a later base": {"files": (), "base": (3, "v3")},
    "a base below zero": {"files": (), "base": (-1, "x")},
    "parts beyond the file": {"files": [xor(part(0, 2 << 30))], "base": (1, "v1")},
    "parts that leave a gap": {"files": [xor(part(0, 4), part(8, 18))], "base": (1, "v1")},
    "a part that begins before the file": {"files": [xor(part(-5, 18))], "base": (1, "v1")},
    "a part that ends before it begins": {"files": [xor(part(0, 18), part(18, 9), part(9, 17))], "base": (1, "v1")},
    "two files of one name": {"files": [entry("a", b"1"), entry("a", b"2")]},
    "a file that is a folder of another": {"files": [entry("a", b"1"), entry("a/b", b"2")]},
}


@pytest.mark.parametrize("fields", DAMAGED.values(), ids=DAMAGED)
def test_a_manifest_that_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    url, host = f"file://{tmp_path}/bucket", tmp_path / "host"
    publish(tmp_path / "bucket", 1, entry("m.safetensors", BASE)).joinpath("m.safetensors").write_bytes(BASE)
    WeightPuller(url, host).pull()
    publish(tmp_path / "bucket", 2, **fields)
    with pytest.raises(WeightStoreError, match="is damaged"):
        WeightPuller(url, host).pull()
    assert contents(host / "version-000001") == {"m.safetensors": BASE}
    assert not (host / "version-000002").exists()


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path / "bucket", 7)
    folder.rename(folder.with_name("000002"))
    with pytest.raises(WeightStoreError, match="it is that of a version 7"):
        WeightPuller(f"file://{tmp_path}/bucket", tmp_path / "host").pull()


def test_a_difference_that_unpacks_to_gigabytes_costs_what_the_tensor_costs(tmp_path: Path) -> None:
    url, host = f"file://{tmp_path}/bucket", tmp_path / "host"
    publish(tmp_path / "bucket", 1, entry("m.safetensors", BASE)).joinpath("m.safetensors").write_bytes(BASE)
    WeightPuller(url, host).pull()
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 << 20))
    folder = publish(tmp_path / "bucket", 2, xor(part(0, len(BASE), stored=len(bomb))), base=(1, "v1"))
    (folder / "m.safetensors.xor").write_bytes(bomb)
    tracemalloc.start()
    with pytest.raises(WeightStoreError, match="is not what was published"):
        WeightPuller(url, host).pull()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20, "a quarter of what it unpacks to"


def test_a_file_that_is_longer_than_its_manifest_says_is_not_read_whole(tmp_path: Path) -> None:
    folder = publish(tmp_path / "bucket", 1, entry("model", b"good"))
    (folder / "model").write_bytes(b"good" + bytes(1 << 20))
    with pytest.raises(WeightStoreError, match="has more than the 4 bytes that it should have"):
        WeightPuller(f"file://{tmp_path}/bucket", tmp_path / "host").pull()


def test_a_state_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    url, host = f"file://{tmp_path}/bucket", tmp_path / "host"
    publish(tmp_path / "bucket", 1, entry("config.json", b"{}")).joinpath("config.json").write_bytes(b"{}")
    for damaged in ("[]", "null", "{", '{"version": []}'):
        host.mkdir(exist_ok=True)
        (host / "state.json").write_text(damaged)
        pulled = WeightPuller(url, host).pull()
        assert pulled is not None
        assert (pulled.steps, contents(pulled.directory)) == (1, {"config.json": b"{}"})
