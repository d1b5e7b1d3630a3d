"""Documents from files, tokenized into one array."""

import glob
import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dtcp.train.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

STDLIB_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Not the library's own source, or shipped by some distributions only."""


@dataclass(frozen=True, slots=True)
class TextFile:
    """A document in a file.

    Attributes:
        name: For messages.
        path: Where it is.
        required: An unreadable file, or one in another encoding than the tokenizer reads, is an error; else left out.
        may_be_empty: An empty file is left out; else it is an error.
    """

    name: str
    path: Path
    required: bool
    may_be_empty: bool


@dataclass(frozen=True)
class Corpus:
    """Tokenized documents, one after the other, each followed by the end-of-document id.

    Attributes:
        description: Where the text is from, for messages.
        tokens: (N,) uint16, or int32 for vocabularies above 65536.
        document_starts: (number of documents,) int64, index of each document's first token, ascending.
        known_digest: What ``digest`` is, where it was computed before.
    """

    description: str
    tokens: NDArray[np.integer]
    document_starts: NDArray[np.int64]
    known_digest: str | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all tokens."""
        return hashlib.sha256(self.tokens.data).hexdigest() if self.known_digest is None else self.known_digest


def token_dtype(tokenizer: Tokenizer) -> type[np.integer]:
    """What ids are kept in."""
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32


def read_corpus(files: list[TextFile], tokenizer: Tokenizer, *, description: str, max_bytes: int | None) -> Corpus:
    """Read and tokenize files in their order.

    Args:
        files: One document each.
        tokenizer: Turns bytes into ids.
        description: Where the text is from, for messages.
        max_bytes: Stop after the document that reaches it; None reads all.

    Raises:
        ValueError: If a required file cannot be read, is empty, or is not UTF-8 where the tokenizer needs that; or if
            no text is left.
    """
    dtype = token_dtype(tokenizer)
    end: NDArray[np.integer] = np.array([tokenizer.end_of_document]).astype(dtype)
    pieces: list[NDArray[np.integer]] = []
    starts: list[int] = []
    num_tokens = num_bytes = 0
    for file, text in _read(files):
        try:
            ids = tokenizer.encode(text)
        except UnicodeDecodeError as error:
            if file.required:
                raise ValueError(
                    f"{file.name} is not UTF-8: byte {text[error.start]:#04x} at offset {error.start}; "
                    "convert the file (iconv -t utf-8), or use tokenizer=bytes"
                ) from error
            logger.info("left out %s: not UTF-8", file.name)
            continue
        starts.append(num_tokens)
        pieces += [ids.astype(dtype, copy=False), end]
        num_tokens += len(ids) + 1
        num_bytes += len(text)
        if max_bytes is not None and num_bytes >= max_bytes:
            break
    if not pieces:
        raise ValueError(f"{description} has no text: every file is empty or unreadable; name files with text in them")
    return Corpus(description, np.concatenate(pieces), np.array(starts, dtype=np.int64))


def stdlib_files(root: str | Path | None = None) -> list[TextFile]:
    """Return the Python sources under ``root``, by default the running Python's standard library, sorted by path.

    Raises:
        ValueError: If there are none, as in a Python that keeps its library in a zip file.
    """
    base = Path(sysconfig.get_path("stdlib") if root is None else root)
    paths: list[str] = []
    for folder, folders, names in os.walk(base):
        folders[:] = [name for name in folders if name not in STDLIB_SKIPPED_FOLDERS]
        paths += [Path(folder, name).relative_to(base).as_posix() for name in names if name.endswith(".py")]
    if not paths:
        raise ValueError(f"data source stdlib found no .py files in {base}; use source=text with paths=[...]")
    return [TextFile(path, base / path, required=False, may_be_empty=True) for path in sorted(paths)]


def text_files(paths: Sequence[str], *, source: str = "text") -> list[TextFile]:
    """Return the files that ``paths`` name, sorted by path, each once.

    Args:
        paths: Files, or globs (``**`` descends into folders; empty matches are left out). Relative ones start at the
            working folder.
        source: Of the data, for messages.

    Raises:
        ValueError: If there are no paths, a path is no file, or a glob matches none.
    """
    if isinstance(paths, str) or not paths:
        raise ValueError(
            f"data source {source} needs a list of files or globs, got paths={paths!r}; set data.paths=[a.txt]"
        )
    found: dict[str, TextFile] = {}
    for given in paths:
        expanded = os.path.expanduser(given)
        if os.path.isdir(expanded):
            raise ValueError(f"{given} is a folder; name its files, e.g. {os.path.join(given, '**', '*.txt')}")
        if os.path.isfile(expanded):
            matches, may_be_empty = [expanded], False
        elif glob.has_magic(expanded):
            matches = [match for match in glob.glob(expanded, recursive=True) if os.path.isfile(match)]
            may_be_empty = True
            if not matches:
                raise ValueError(f"{given} matches no file in {os.getcwd()}; correct data.paths")
        else:
            raise ValueError(f"there is no file {given} (working folder {os.getcwd()}); correct data.paths")
        for match in matches:
            key = Path(match).absolute().as_posix()
            if key not in found or not may_be_empty:
                found[key] = TextFile(match, Path(match), required=True, may_be_empty=may_be_empty)
    return [found[key] for key in sorted(found)]


def _read(files: list[TextFile]) -> Iterator[tuple[TextFile, bytes]]:
    for file in files:
        try:
            text = file.path.read_bytes()
        except OSError as error:
            if file.required:
                raise ValueError(f"{file.name} cannot be read: {error.strerror}; correct it or data.paths") from error
            logger.info("left out %s: %s", file.name, error.strerror)
            continue
        if text:
            yield file, text
        elif not file.may_be_empty:
            raise ValueError(f"{file.name} is empty; put text in it, or take it out of data.paths")
