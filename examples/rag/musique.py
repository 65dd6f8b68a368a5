"""Reads questions in the format of MuSiQue (Trivedi et al. 2022, arXiv 2108.00573), and documents, both from JSONL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

import agentlightning as agl

Record = TypeVar("Record", bound=BaseModel)


class Paragraph(BaseModel):
    title: str
    paragraph_text: str


class Hop(BaseModel):
    question: str
    answer: str


class Question(BaseModel):
    """One line of `musique_ans_v1.0_train.jsonl` or `musique_full_v1.0_train.jsonl`."""

    id: str
    question: str
    paragraphs: list[Paragraph]
    question_decomposition: list[Hop]
    answer: str = Field(min_length=1)
    answer_aliases: list[str] = Field(default_factory=list[str])
    answerable: bool = True


class Document(BaseModel):
    """A document of a corpus: `title` and `text`, or `contents` with the title as its first line, as in wiki-18."""

    title: str = ""
    text: str = ""
    contents: str = ""

    @property
    def parts(self) -> dict[str, str]:
        if self.contents and not self.text:
            title, _, text = self.contents.partition("\n")
            return {"title": title.strip().strip('"'), "text": text.strip()}
        return {"title": self.title, "text": self.text}


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions of a file, and every paragraph that comes with them, once."""

    tasks: list[dict[str, Any]]
    """`id`, `question`, `answer`, `aliases`, and the number of `hops`."""
    documents: list[dict[str, str]]
    """`title` and `text`."""
    unanswerable: int
    """Questions that were left out, because no paragraph answers them."""


def read_questions(path: Path | str) -> Questions:
    """Raises DatasetError with the line and the field of what is not in the format."""
    tasks: list[dict[str, Any]] = []
    documents: dict[tuple[str, str], None] = {}
    unanswerable = 0
    for each in _records(Path(path), Question, "MuSiQue is at https://github.com/StonyBrookNLP/musique"):
        documents |= dict.fromkeys((paragraph.title, paragraph.paragraph_text) for paragraph in each.paragraphs)
        if not each.answerable:
            unanswerable += 1
            continue
        task = {"id": each.id, "question": each.question, "answer": each.answer, "aliases": each.answer_aliases}
        tasks.append({**task, "hops": len(each.question_decomposition)})
    if not tasks:
        raise agl.errors.DatasetError(f"{path}: no question that can be answered ({unanswerable} cannot)")
    return Questions(tasks, [{"title": title, "text": text} for title, text in documents], unanswerable)


def read_documents(path: Path | str) -> Iterator[dict[str, str]]:
    """The documents of a JSONL file. Raises as `read_questions` does."""
    for number, each in enumerate(_records(Path(path), Document, "one document a line, with title and text"), 1):
        if not each.parts["text"]:
            raise agl.errors.DatasetError(f"{path}:{number}: text: empty or missing; give title and text, or contents")
        yield each.parts


def _records(path: Path, kind: type[Record], hint: str) -> Iterator[Record]:
    if not path.is_file():
        raise agl.errors.DatasetError(f"there is no file {path}; {hint}")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield kind.model_validate_json(line)
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(map(str, first["loc"])) or "the line"
                raise agl.errors.DatasetError(f"{path}:{number}: {field}: {first['msg']}") from error
