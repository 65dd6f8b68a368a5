"""The text of single tokens, from the `tokenizer.json` that a run keeps beside its weights. Needs no other library.

Token ids alone say little. The vocabulary maps pieces to ids; a piece is bytes written as letters (byte-level BPE), or
text with U+2581 for a space (SentencePiece), with `<0x0A>` for single bytes. Where several tokens make one letter, each
of them shows as U+FFFD.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import orjson

PLACES: Final = ("start", "checkpoint", ".")
"""Where a run directory may have the file, beside its checkpoints."""


class TokenTexts:
    """The text of each token."""

    def __init__(self, pieces: dict[int, str], special: frozenset[int], byte_level: bool) -> None:
        self._pieces = pieces
        self.special = special
        self._byte_level = byte_level

    @classmethod
    def read(cls, path: Path) -> TokenTexts:
        """Raises OSError or ValueError for a file that is no tokenizer."""
        document: Any = orjson.loads(path.read_bytes())
        vocabulary = document["model"]["vocab"]
        entries: Iterable[tuple[str, int]] = (
            vocabulary.items()
            if isinstance(vocabulary, dict)
            else ((piece, index) for index, (piece, _) in enumerate(vocabulary))
        )
        pieces = {int(number): str(piece) for piece, number in entries}
        added = {int(each["id"]): str(each["content"]) for each in document.get("added_tokens") or ()}
        return cls({**pieces, **added}, frozenset(added), b'"ByteLevel"' in orjson.dumps(document.get("decoder")))

    def of(self, token_ids: Iterable[int]) -> list[str]:
        return [self._text(each) for each in token_ids]

    def _text(self, token_id: int) -> str:
        piece = self._pieces.get(token_id)
        if piece is None:
            return f"<{token_id}>"
        if token_id in self.special:
            return piece
        if self._byte_level:
            table = _byte_letters()
            if all(letter in table for letter in piece):
                return bytes(table[letter] for letter in piece).decode(errors="replace")
            return piece
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)]).decode(errors="replace")
        return piece.replace("\u2581", " ")


def find_texts(run: Path, model: str | None) -> TokenTexts | None:
    """Those of a run, by the files of its weights, else of the model it started from. None: none can be read."""
    for folder in _folders(run, model):
        try:
            return TokenTexts.read(folder / "tokenizer.json")
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return None


def _folders(run: Path, model: str | None) -> Iterator[Path]:
    yield from (run / place for place in PLACES)
    yield from sorted((run / "checkpoints").glob("step-*"), reverse=True)
    if model is not None and (run / model).is_dir():
        yield run / model


@cache
def _byte_letters() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte: itself where it can be seen, else the next from U+0100."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in shown]
    return table | {chr(256 + place): byte for place, byte in enumerate(hidden)}
