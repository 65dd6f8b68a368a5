"""What a version of weights consists of, as JSON beside it.

URL/000007/manifest.json      written last: a version without it does not exist
URL/000007/NAME               a file of a full version, or one that has no difference
URL/000007/NAME.xor           the differences of the tensors of a safetensors file, one behind the other
URL/wanted/HOST.json          a host that needs a full version
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

FORMAT: Final = 1
"""Of manifests; a host refuses a newer one."""
MANIFEST: Final = "manifest.json"
DIFFERENCE: Final = ".xor"


class Part(BaseModel):
    """The bytes of a file from `begin` to `end`: one tensor, or the header."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    begin: int
    end: int
    digest: str
    """BLAKE2b of these bytes in the new version, 16 bytes."""
    stored: int = 0
    """Bytes of the compressed difference; 0: there is none."""


class FileEntry(BaseModel):
    """A file of the directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    size: int
    kind: Literal["whole", "same", "xor"]
    """whole: stored as it is; same: that of the base; xor: its difference from that of the base."""
    digest: str = ""
    """Of the whole file."""
    parts: tuple[Part, ...] = ()


class Manifest(BaseModel):
    """A version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    version: int
    id: str
    """A random name: a version that was published again has another one."""
    base: tuple[int, str] | None = None
    """Version and id that the differences are from; None: a full version."""
    files: tuple[FileEntry, ...]
    stored: int
    """Bytes written for it, without this file."""
