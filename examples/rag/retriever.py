"""Retrieval as a server of its own: BM25 over documents, by the library bm25s, behind POST /search.

    python retriever.py --corpus documents.jsonl --save index/       # once, for a large corpus
    python retriever.py --index index/ --port 8893 --k 5

`/search` takes `{"query": "...", "k": 2}` and gives `{"results": [{"title", "text", "score"}]}`, best first.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import bm25s
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

PATIENCE_SECONDS = 600.0
"""How long a server may take to load its index."""


class Index:
    """BM25 over documents with a title and a text."""

    def __init__(self, bm25: bm25s.BM25, documents: Sequence[Mapping[str, Any]]) -> None:
        self._bm25, self.documents = bm25, documents

    @classmethod
    def of(cls, documents: Iterable[Mapping[str, str]]) -> Index:
        known = [dict(each) for each in documents]
        if not known:
            raise ValueError("there are no documents to search in")
        bm25 = bm25s.BM25(corpus=known)
        bm25.index(_tokens([f"{each['title']} {each['text']}" for each in known]), show_progress=False)
        return cls(bm25, known)

    @classmethod
    def load(cls, directory: Path | str) -> Index:
        """An index that `save` wrote. It stays on disk, memory-mapped. Raises FileNotFoundError."""
        if not (Path(directory) / "params.index.json").is_file():
            raise FileNotFoundError(
                f"{directory} is no index; make one: python retriever.py --corpus FILE --save {directory}"
            )
        bm25 = bm25s.BM25.load(str(directory), load_corpus=True, mmap=True)
        return cls(bm25, bm25.corpus)

    def save(self, directory: Path | str) -> None:
        self._bm25.save(str(directory), corpus=self.documents, show_progress=False)

    def search(self, query: str, k: int) -> list[dict[str, Any]]:
        """The `k` documents that match best, without those that share no word with the query."""
        tokens = _tokens([query])
        if not tokens.vocab:
            return []
        ids, scores = self._bm25.retrieve(
            tokens, corpus=range(len(self.documents)), k=min(k, len(self.documents)), show_progress=False, n_threads=0
        )
        found = [(self.documents[int(id)], float(score)) for id, score in zip(ids[0], scores[0], strict=True)]
        return [{"title": each["title"], "text": each["text"], "score": score} for each, score in found if score > 0]


def _tokens(texts: list[str]) -> Any:
    return bm25s.tokenize(texts, stopwords="en", show_progress=False)


def make_app(index: Index, k: int) -> Starlette:
    """`k`: how many documents a search without one of its own gives."""

    async def search(request: Request) -> JSONResponse:
        try:
            body = await request.json()
            query, wanted = body["query"], int(body.get("k", k))
            if not isinstance(query, str) or wanted < 1:
                raise ValueError("query must be a text, and k at least 1")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return JSONResponse({"error": f'send {{"query": "...", "k": {k}}}: {error!r}'}, 400)
        return JSONResponse({"results": await run_in_threadpool(index.search, query, wanted)})

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"documents": len(index.documents)})

    return Starlette(routes=[Route("/search", search, methods=["POST"]), Route("/health", health)])


@contextmanager
def serving(
    *, documents: Sequence[Mapping[str, str]] | None = None, index: Path | None = None, k: int
) -> Iterator[str]:
    """The address of a server in a process of its own, for as long as the block runs. Raises RuntimeError where the
    server does not start."""
    with tempfile.TemporaryDirectory() as folder:
        corpus, log = Path(folder) / "documents.jsonl", Path(folder) / "log"
        corpus.write_text("".join(json.dumps(each) + "\n" for each in documents or ()))
        source = ["--corpus", str(corpus)] if index is None else ["--index", str(index)]
        with socket.socket() as listener, log.open("w") as output:
            listener.bind(("127.0.0.1", 0))
            command = [sys.executable, __file__, *source, "--k", str(k), "--fd", str(listener.fileno())]
            process = subprocess.Popen(command, pass_fds=[listener.fileno()], stdout=output, stderr=output)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the retriever did not start: {log.read_text().strip()[-2000:]}")
        try:
            with urlopen(f"{url}/health", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.05)
    raise RuntimeError(f"the retriever at {url} did not answer within {PATIENCE_SECONDS:g} seconds")


def main() -> None:
    from musique import read_documents

    parser = argparse.ArgumentParser(description="Serve BM25 retrieval over HTTP.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", type=Path, help="JSONL, one document a line, with title and text, or contents")
    source.add_argument("--index", type=Path, help="a directory that --save wrote")
    parser.add_argument("--save", type=Path, help="write the index of --corpus to this directory, and exit")
    parser.add_argument("--port", type=int, default=8893)
    parser.add_argument("--k", type=int, default=5, help="documents that a search gives")
    parser.add_argument("--fd", type=int, help="listen on this inherited socket instead of the port")
    options = parser.parse_args()
    try:
        index = Index.load(options.index) if options.index else Index.of(read_documents(options.corpus))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    if options.save:
        index.save(options.save)
        print(f"{len(index.documents)} documents in {options.save}")
        return
    uvicorn.run(make_app(index, options.k), port=options.port, fd=options.fd, log_level="warning")


if __name__ == "__main__":
    main()
