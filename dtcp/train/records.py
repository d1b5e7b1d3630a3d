"""Documents from the records of JSON lines, text or parquet files, tokenized once into a file that is mapped.

The files may be larger than memory: records are streamed by `datasets`, and tokens stay on disk. What was tokenized is
kept in a folder named by a hash of files, column and tokenizer, so that a job that starts again reads nothing anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtcp.train.corpus import Corpus, TextFile, text_files, token_dtype
from dtcp.train.tokenizer import ChatTokenizer, Tokenizer

logger = logging.getLogger(__name__)

FORMATS = {"json": (".json", ".jsonl", ".ndjson"), "parquet": (".parquet",), "text": (".txt", ".text")}
"""Names in `datasets`, and how files of them end; ``.gz``, ``.zst`` and the like may follow."""
COLUMNS = ("text", "messages")
"""Which are taken where none is named, the first that is there."""

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
_VERSION = 1  # of the files kept


def read_records(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    *,
    format: str | None,
    column: str | None,
    cache: str | Path,
    max_bytes: int | None,
) -> Corpus:
    """Return the records of files, a document each, as mapped tokens. Tokenizes on one process of a machine.

    Args:
        paths: Files or globs, as `text_files` takes them.
        tokenizer: Turns text into ids; messages only if it is a `ChatTokenizer`.
        format: A key of `FORMATS`; None: by how the files end.
        column: With text or messages; None: the first of `COLUMNS` that is there.
        cache: Folder of what was tokenized; made if missing.
        max_bytes: Stop after the record that reaches it, in bytes of text; None reads all.

    Raises:
        ValueError: If files are missing, unreadable or without records, or have no such column; names them and the
            columns there are.
    """
    files = text_files(paths, source="hf")
    format = _format_of(files) if format is None else format
    if format not in FORMATS:
        raise ValueError(f"data.format must be one of {', '.join(FORMATS)} or null, got {format!r}")
    key = _key(files, tokenizer, format, column, max_bytes)
    folder = Path(cache).expanduser() / key
    _make_once(folder, lambda: _tokenized(files, tokenizer, format, column, max_bytes), token_dtype(tokenizer))
    said = json.loads((folder / "tokens.json").read_text())
    return Corpus(
        f"paths={list(paths)}",
        np.memmap(folder / "tokens.bin", dtype=token_dtype(tokenizer), mode="r"),
        np.load(folder / "starts.npy"),
        known_digest=said["digest"],
    )


def _format_of(files: Sequence[TextFile]) -> str:
    found: dict[str, str] = {}
    for file in files:
        suffixes = [suffix for suffix in file.path.suffixes if suffix not in _COMPRESSED]
        last = suffixes[-1].lower() if suffixes else ""
        kind = next((kind for kind, endings in FORMATS.items() if last in endings), None)
        if kind is None:
            endings = ", ".join(ending for of_kind in FORMATS.values() for ending in of_kind)
            raise ValueError(
                f"{file.name} ends like none of {endings}; say what it holds by data.format={'|'.join(FORMATS)}"
            )
        found.setdefault(kind, file.name)
    if len(found) > 1:
        raise ValueError(
            f"data.paths has files of several formats: {', '.join(f'{n} ({k})' for k, n in found.items())}; name those "
            "of one"
        )
    return next(iter(found))


def _key(
    files: Sequence[TextFile], tokenizer: Tokenizer, format: str, column: str | None, max_bytes: int | None
) -> str:
    """Of the same files, unchanged since, and the same way to read them."""
    stats = [(file.path.absolute().as_posix(), file.path.stat()) for file in files]
    seen = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    what = [_VERSION, seen, tokenizer.fingerprint, format, column, max_bytes]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _make_once(folder: Path, documents: Any, dtype: type[np.integer]) -> None:
    """Write the tokens into ``folder``, unless they are there; other processes of the machine wait meanwhile."""
    if (folder / "tokens.json").is_file():
        return
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # let go by the system when its holder dies
        if (folder / "tokens.json").is_file():
            return
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        starts: list[int] = []
        num_tokens, digest = 0, hashlib.sha256()
        with (partial / "tokens.bin").open("wb") as file:
            for ids in documents():
                data = ids.astype(dtype).tobytes()
                file.write(data)
                digest.update(data)
                starts.append(num_tokens)
                num_tokens += len(ids)
        np.save(partial / "starts.npy", np.array(starts, dtype=np.int64))
        (partial / "tokens.json").write_text(json.dumps({"digest": digest.hexdigest(), "num_tokens": num_tokens}))
        logger.info("tokenized %d documents, %d tokens, into %s", len(starts), num_tokens, folder)
        partial.rename(folder)


def _tokenized(
    files: Sequence[TextFile], tokenizer: Tokenizer, format: str, column: str | None, max_bytes: int | None
) -> Iterator[NDArray[np.integer]]:
    """Yield the ids of each document, its end with it."""
    end = np.array([tokenizer.end_of_document])
    num_bytes = 0
    is_any = False
    for file in files:
        name = column
        is_empty = True
        for number, record in enumerate(_stream(file, format), start=1):
            is_empty = False
            name = _column_of(file, record, name)
            value = record.get(name)
            if not value:  # nothing, or no text
                continue
            ids, size = _encode(file, number, value, tokenizer)
            is_any = True
            yield np.concatenate([ids, end])
            num_bytes += size
            if max_bytes is not None and num_bytes >= max_bytes:
                return
        if is_empty:
            raise ValueError(f"{file.name} has no records; put some in it, or take it out of data.paths")
    if not is_any:
        raise ValueError(f"no record of {', '.join(file.name for file in files)} has text in it; name other files")


def _stream(file: TextFile, format: str) -> Iterator[Mapping[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError("data=hf needs datasets; pip install datasets") from error
    if file.path.stat().st_size == 0:
        return
    try:
        yield from load_dataset(format, data_files=[str(file.path)], split="train", streaming=True)
    except Exception as error:  # of pyarrow, json, and datasets itself
        why = " ".join(str(error.__cause__ or error).split())[:200]
        raise ValueError(f"{file.name} cannot be read as {format}: {why}; correct it, or data.format") from error


def _column_of(file: TextFile, record: Mapping[str, Any], column: str | None) -> str:
    if column is None:
        column = next((name for name in COLUMNS if name in record), None)
    if column is None or column not in record:
        missing = f"none of {', '.join(COLUMNS)}" if column is None else f"no {column!r}"
        raise ValueError(
            f"{file.name} has {missing} among its columns, which are {', '.join(record)}; set data.column to the one "
            "with the text"
        )
    return column


def _encode(file: TextFile, number: int, value: Any, tokenizer: Tokenizer) -> tuple[NDArray[np.integer], int]:
    """The ids of a record's text or messages, and how much text that is."""
    if isinstance(value, str):
        text = value.encode()
        return tokenizer.encode(text), len(text)
    is_messages = isinstance(value, list) and all(isinstance(x, Mapping) and {"role", "content"} <= {*x} for x in value)
    if not is_messages:
        raise ValueError(
            f"record {number} of {file.name} has a {type(value).__name__} where text is to be, or messages (a list of "
            "role and content); set data.column to another one"
        )
    if not isinstance(tokenizer, ChatTokenizer):
        raise ValueError(
            f"record {number} of {file.name} has messages, which only a tokenizer with a chat template can join; set "
            "data.tokenizer to the folder of one"
        )
    return tokenizer.encode_messages(value), sum(len(str(x["content"]).encode()) for x in value)
