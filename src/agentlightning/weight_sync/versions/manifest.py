"""What a version of weights consists of, as JSON beside it.

URL/000007/manifest.json      written last: a version without it does not exist
URL/000007/NAME               a file of a full version, or one that has no difference
URL/000007/NAME.xor           the differences of the tensors of a safetensors file, one behind the other
URL/wanted/HOST.json          a host that needs a full version
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

FORMAT: Final = 1
"""Of manifests; a host refuses a newer one."""
MANIFEST: Final = "manifest.json"
DIFFERENCE: Final = ".xor"


def _checked_name(name: str) -> str:
    """A file name is a path below the directory that a version is written to, whoever wrote the manifest."""
    parts = PurePosixPath(name).parts
    if name != "/".join(parts) or not parts or {"/", ".."} & set(parts) or any(each in name for each in "\\:\0"):
        raise ValueError(f"{name!r} is no path below the directory of a version")
    return name


class Part(BaseModel):
    """The bytes of a file from `begin` to `end`: one tensor, or the header."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    begin: int = Field(ge=0)
    end: int = Field(ge=0)
    digest: str
    """BLAKE2b of these bytes in the new version, 16 bytes."""
    stored: int = Field(default=0, ge=0)
    """Bytes of the compressed difference; 0: there is none."""


class FileEntry(BaseModel):
    """A file of the directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, AfterValidator(_checked_name)]
    size: int = Field(ge=0)
    kind: Literal["whole", "same", "xor"]
    """whole: stored as it is; same: that of the base; xor: its difference from that of the base."""
    digest: str = ""
    """Of the whole file."""
    parts: tuple[Part, ...] = ()

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        ends = (0, *(part.end for part in self.parts))
        if self.kind == "xor" and (
            ends[-1] != self.size or any(p.begin != e for p, e in zip(self.parts, ends, strict=False))
        ):
            raise ValueError(f"the parts of {self.name} do not follow one another from its first byte to its last")
        return self


class Manifest(BaseModel):
    """A version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    version: int = Field(ge=0)
    id: str
    """A random name: a version that was published again has another one."""
    base: tuple[int, str] | None = None
    """Version and id that the differences are from; None: a full version."""
    files: tuple[FileEntry, ...]
    stored: int
    """Bytes written for it, without this file."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.base is not None and not 0 <= self.base[0] < self.version:
            raise ValueError(f"version {self.version} is a difference from {self.base[0]}, which is no earlier version")
        names = {file.name for file in self.files}
        if len(names) != len(self.files) or any(str(each) in names for n in names for each in PurePosixPath(n).parents):
            raise ValueError("two of its files have one name, or one of them is a folder of another")
        return self
