"""A tokenizer as bytes: what another machine needs to render and tokenize conversations exactly as this one does."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from agentlightning.chat.base import ChatFormat
from agentlightning.chat.hf import HFChatFormat
from agentlightning.errors import ConfigError

MAX_BYTES: Final = 256 * 1024 * 1024
"""The most that an archive unpacks to."""
PROBE: Final = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3? Grüße, 你好."},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And twice that?"},
)
"""A conversation that both machines must tokenize alike."""


def probe_tokens(chat: ChatFormat) -> list[int]:
    """The tokens of `PROBE`, without its system message where the template has no place for one."""
    try:
        return chat.encode(chat.render(list(PROBE)))
    except ConfigError:
        return chat.encode(chat.render(list(PROBE[1:])))


def pack_tokenizer(chat: ChatFormat) -> bytes:
    """The files of a tokenizer, as a ZIP archive. Raises ConfigError for a chat format of another kind."""
    if not isinstance(chat, HFChatFormat):
        raise ConfigError(f"{type(chat).__name__} is no tokenizer of transformers, and cannot be sent to a server")
    with TemporaryDirectory(prefix="agl-tokenizer-") as directory:
        files = Path(directory) / "tokenizer"
        chat.save_tokenizer(files)
        return Path(shutil.make_archive(str(files), "zip", files)).read_bytes()


def unpack_tokenizer(packed: bytes, directory: Path) -> None:
    """Write the files of `pack_tokenizer` below `directory`. Raises ConfigError for anything else."""
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            if (size := sum(entry.file_size for entry in archive.infolist())) > MAX_BYTES:
                raise ConfigError(f"the tokenizer unpacks to {size} bytes, and this server takes {MAX_BYTES}")
            archive.extractall(directory)  # It keeps every path below the directory.
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise ConfigError(f"the archive of the tokenizer cannot be read: {error}") from error
