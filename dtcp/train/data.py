"""Rows of tokens as a pure function of (seed, step, row): the same on any mesh, resumable from the step alone.

Shapes: B rows, S = seq_len. A row is a window of S + 1 tokens; windows start every S tokens, so each token is a label
once an epoch. Row i of step n, with G rows a step, is window number n G + i of an endless sequence of shuffled epochs.

Packed, the same windows say where their documents lie: a token sees its own document only, and the last token of a
document has no label. A document that a window's edge cuts goes on in the next window as one of its own.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtcp.documents import Documents
from dtcp.shard import shift_labels
from dtcp.train.corpus import Corpus, read_corpus, stdlib_files, text_files
from dtcp.train.records import read_records
from dtcp.train.tokenizer import Tokenizer, make_tokenizer

DEFAULT_VALIDATION_FRACTION = 0.01
SPLITS = ("train", "validation")
SOURCES = ("stdlib", "text", "hf")


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from.

    Attributes:
        source: "stdlib", the running Python's own standard library; "text", files of a document each; or "hf", files of
            records that `datasets` reads.
        paths: Files or globs, sorted by path.
        tokenizer: "bytes", or the path of a Hugging Face ``tokenizer.json``, or of a tokenizer's folder.
        end_of_document: Token that ends documents; None: the tokenizer's usual one.
        max_bytes: Stop reading after the document that reaches it; None reads all.
        validation_fraction: Share of the tokens, at the end, that training never sees.
        pack_documents: Tokens see those of their own document only, and no label is another document's token; else a
            row is one text.
        reset_positions: Positions begin at 0 with each document of a row; None: if documents are packed.
        format: Of the records of "hf": "json" (lines), "parquet" or "text" (a document each line); None: as files end.
        column: Of the records, with the text or messages of a document; None: text, or messages.
        cache: Folder for the tokens of "hf", which a job that starts again finds there.
    """

    source: str = "stdlib"
    paths: list[str] = field(default_factory=list)
    tokenizer: str = "bytes"
    end_of_document: str | None = None
    max_bytes: int | None = None
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION
    pack_documents: bool = False
    reset_positions: bool | None = None
    format: str | None = None
    column: str | None = None
    cache: str = "outputs/tokens"

    def __post_init__(self) -> None:
        check_packing(self.pack_documents, self.reset_positions)
        if self.source not in SOURCES:
            raise ValueError(f"data.source must be one of {', '.join(SOURCES)}, got {self.source!r}")
        if self.source == "stdlib" and self.paths:
            raise ValueError(f"data.source=stdlib takes no paths, got {self.paths!r}; use data.source=text")
        for name in ("format", "column"):
            if self.source != "hf" and (value := getattr(self, name)) is not None:
                raise ValueError(f"data.{name} is for data=hf, got {value!r} with data.source={self.source}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"data.max_bytes must be at least 1, got {self.max_bytes}; null reads everything")


class TextDataset:
    """Shuffled windows of a corpus, without state: everything follows from the arguments and a step.

    One array holds the tokens, whatever the number of splits; a row costs a copy of S + 1 tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        seed: int = 0,
        split: str = "train",
        validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
        pack_documents: bool = False,
        reset_positions: bool | None = None,
    ) -> None:
        """Choose the windows of a split.

        Args:
            corpus: The tokens.
            tokenizer: What made them.
            seq_len: S, in tokens.
            seed: Of the order of the windows.
            split: "train", or "validation": the last ``validation_fraction`` of the tokens, which training never sees.
            validation_fraction: In [0, 1).
            pack_documents, reset_positions: As in `DataConfig`.

        Raises:
            ValueError: If the split is shorter than one row.
        """
        check_packing(pack_documents, reset_positions)
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, got {seq_len}")
        if split not in SPLITS:
            raise ValueError(f"split must be train or validation, got {split!r}")
        if not 0 <= validation_fraction < 1:
            raise ValueError(f"validation_fraction must be in [0, 1), got {validation_fraction}")
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.seed = seed
        self.split = split
        self.validation_fraction = validation_fraction
        self.pack_documents = pack_documents
        self.reset_positions = pack_documents if reset_positions is None else reset_positions
        num_training_tokens = len(corpus.tokens) - int(len(corpus.tokens) * validation_fraction)
        self._begin, end = (0, num_training_tokens) if split == "train" else (num_training_tokens, len(corpus.tokens))
        self.num_tokens = end - self._begin
        self.num_windows = max(0, (self.num_tokens - 1) // seq_len)
        if self.num_windows == 0:
            raise ValueError(self._too_short())
        self._orders: dict[int, NDArray[np.int64]] = {}  # of the last two epochs used

    @property
    def end_of_document(self) -> int:
        """Id that follows every document."""
        return self.tokenizer.end_of_document

    @property
    def vocab_size(self) -> int:
        """All ids are below it; the model's has to be at least this."""
        return self.tokenizer.vocab_size

    def with_split(self, split: str) -> "TextDataset":
        """Return the other part of the same tokens; nothing is read or copied."""
        return TextDataset(
            self.corpus,
            self.tokenizer,
            seq_len=self.seq_len,
            seed=self.seed,
            split=split,
            validation_fraction=self.validation_fraction,
            pack_documents=self.pack_documents,
            reset_positions=self.reset_positions,
        )

    def row(self, step: int, index: int, global_batch_size: int) -> Tensor:
        """Return the tokens of one row: int64 (S + 1,); ``row[:-1]`` are the inputs and ``row[1:]`` the labels.

        Args:
            step: Optimizer steps done before this one, from 0.
            index: Row of the global batch, in [0, global_batch_size).
            global_batch_size: G, rows of an optimizer step over all ranks.
        """
        start = self._start(step, index, global_batch_size)
        return torch.from_numpy(self.corpus.tokens[start : start + self.seq_len + 1].astype(np.int64))

    def batch(self, step: int, rows: Sequence[int], global_batch_size: int) -> dict[str, Any]:
        """Return some rows of a step.

        Args:
            step: As in `row`.
            rows: Rows of the global batch, B of them.
            global_batch_size: As in `row`.

        Returns:
            "tokens" and "labels", the token after each: int64 (B, S), contiguous. Of packed documents also
            "documents", `Documents` of B rows, and "positions", int64 (B, S); the label of a document's last token
            is -100. A document that goes on in the next window has all of its labels.
        """
        if len(rows) == 0:
            raise ValueError("rows must name at least one row of the global batch, got none")
        full = torch.stack([self.row(step, index, global_batch_size) for index in rows])
        tokens = full[:, :-1].contiguous()
        if not self.pack_documents:
            return {"tokens": tokens, "labels": full[:, 1:].contiguous()}
        ids = torch.stack([self._document_ids(step, index, global_batch_size) for index in rows])
        documents = Documents.from_ids(ids[:, :-1])
        return {
            "tokens": tokens,
            "labels": shift_labels(full, documents=Documents.from_ids(ids))[:, :-1].contiguous(),
            "documents": documents,
            "positions": documents.positions(restart=self.reset_positions).expand_as(tokens).contiguous(),
        }

    def document_ids(self, step: int, index: int, global_batch_size: int) -> Tensor:
        """Return which document each input token of a row belongs to: int64 (S,), 0 for the row's first, ascending.

        Known from where the documents were read, not from token values. The end-of-document token belongs to the
        document it ends.
        """
        return self._document_ids(step, index, global_batch_size)[:-1]

    def _document_ids(self, step: int, index: int, global_batch_size: int) -> Tensor:
        """The same of all S + 1 tokens: whether the last label is of the last token's document."""
        start = self._start(step, index, global_batch_size)
        starts = self.corpus.document_starts
        ids = np.searchsorted(starts, np.arange(start, start + self.seq_len + 1), side="right")
        return torch.from_numpy((ids - ids[0]).astype(np.int64))

    def microbatches(
        self, step: int, global_batch_size: int, local_batch_size: int, dp_rank: int, dp_size: int
    ) -> Iterator[dict[str, Any]]:
        """Yield a data parallel rank's microbatches of one optimizer step, see `deal_rows` and `batch`."""
        for rows in deal_rows(global_batch_size, local_batch_size, dp_rank, dp_size):
            yield self.batch(step, rows, global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return what identifies the data and its order. Where training stands is the step, which is not in here."""
        state = {
            "data": self.corpus.digest,
            "num_tokens": self.num_tokens,
            "tokenizer": self.tokenizer.fingerprint,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "split": self.split,
            "validation_fraction": self.validation_fraction,
        }
        # Not there otherwise: checkpoints of jobs that packed nothing go on as they are.
        packing = {"pack_documents": True, "reset_positions": self.reset_positions}
        return state | (packing if self.pack_documents else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that this is the dataset ``state`` came from; nothing changes.

        Raises:
            ValueError: Naming everything that differs.
        """
        mine = self.state_dict()
        differences = [
            f"{key} was {state.get(key)!r} and is {mine.get(key)!r}"
            for key in [*mine, *sorted(set(state) - set(mine))]
            if state.get(key) != mine.get(key)
        ]
        if differences:
            raise ValueError(
                f"the checkpoint was made with another dataset: {'; '.join(differences)}. "
                "Restore these settings and files, or start a new run: going on would repeat and skip text"
            )

    def _start(self, step: int, index: int, global_batch_size: int) -> int:
        if step < 0 or not 0 <= index < global_batch_size:
            raise ValueError(
                "a row needs step >= 0 and 0 <= index < global_batch_size, "
                f"got step={step}, index={index}, global_batch_size={global_batch_size}"
            )
        epoch, place = divmod(step * global_batch_size + index, self.num_windows)
        return self._begin + int(self._order(epoch)[place]) * self.seq_len

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            self._orders[epoch] = shuffled(self.num_windows, self.seed, epoch)
            if len(self._orders) > 2:  # a step touches two epochs where they meet
                del self._orders[next(iter(self._orders))]
        return self._orders[epoch]

    def _too_short(self) -> str:
        total = len(self.corpus.tokens)
        longest = self.num_tokens - 1
        cures = [f"seq_len <= {longest}"] if longest >= 1 else []
        if total > self.seq_len:
            cures.append("another validation_fraction")
        return (
            f"{self.corpus.description} has {total} tokens, {self.num_tokens} of them for {self.split}; a row of "
            f"seq_len={self.seq_len} needs {self.seq_len + 1}. Use {', '.join([*cures, 'more text'])}"
        )


def make_dataset(
    config: DataConfig, tokenizer: Tokenizer | None = None, *, seq_len: int, seed: int = 0, split: str = "train"
) -> TextDataset:
    """Read the text that ``config`` names. Costs reading and tokenizing all of it: 0.2 s for the stdlib's bytes.

    Of "hf" tokens that were made before are mapped.

    Args:
        config: Where the text is.
        tokenizer: None makes the one that ``config`` names.
        seq_len: Tokens of a row.
        seed: Of the order of the rows.
        split: "train" or "validation"; `TextDataset.with_split` gives the other without reading again.

    Raises:
        ValueError: If files are missing, empty, unreadable or shorter than one row; names them and the cure.
    """
    tokenizer = make_tokenizer(config.tokenizer, config.end_of_document) if tokenizer is None else tokenizer
    match config.source:
        case "stdlib":
            corpus = read_corpus(
                stdlib_files(), tokenizer, description="the standard library", max_bytes=config.max_bytes
            )
        case "text":
            description = f"paths={list(config.paths)}"
            corpus = read_corpus(
                text_files(config.paths), tokenizer, description=description, max_bytes=config.max_bytes
            )
        case "hf":
            corpus = read_records(
                config.paths, tokenizer, format=config.format, column=config.column, cache=config.cache,
                max_bytes=config.max_bytes,
            )  # fmt: skip
        case _:
            raise AssertionError(config.source)
    return TextDataset(
        corpus,
        tokenizer,
        seq_len=seq_len,
        seed=seed,
        split=split,
        validation_fraction=config.validation_fraction,
        pack_documents=config.pack_documents,
        reset_positions=config.reset_positions,
    )


def check_packing(pack_documents: bool, reset_positions: bool | None) -> None:
    """Raise ``ValueError`` if positions are to restart where documents begin, and documents are not looked at."""
    if reset_positions and not pack_documents:
        raise ValueError(
            "data.reset_positions=true restarts positions where documents begin, got data.pack_documents=false: tokens "
            "of two documents would see each other at equal positions; set data.pack_documents=true, or leave "
            "reset_positions null"
        )


def deal_rows(global_batch_size: int, local_batch_size: int, dp_rank: int, dp_size: int) -> list[range]:
    """Return the rows of the global batch that one data parallel rank reads, a range per microbatch.

    Microbatch m of rank r has the ``local_batch_size`` rows from ``(m dp_size + r) local_batch_size`` on: over all
    ranks and microbatches each row comes once.

    Raises:
        ValueError: If ``global_batch_size`` is no multiple of ``local_batch_size * dp_size``; names the nearest.
    """
    if min(global_batch_size, local_batch_size, dp_size) < 1 or not 0 <= dp_rank < dp_size:
        raise ValueError(
            "dealing rows needs sizes of at least 1 and 0 <= dp_rank < dp_size, got "
            f"{global_batch_size=}, {local_batch_size=}, {dp_rank=}, {dp_size=}"
        )
    unit = local_batch_size * dp_size
    if global_batch_size % unit:
        below = global_batch_size // unit * unit
        nearest = " or ".join(str(size) for size in (below, below + unit) if size)
        raise ValueError(
            f"global_batch_size must be a multiple of local_batch_size * dp = {local_batch_size} * {dp_size} = {unit}, "
            f"got {global_batch_size}; nearest that work: {nearest}"
        )
    first = range(dp_rank * local_batch_size, global_batch_size, unit)
    return [range(start, start + local_batch_size) for start in first]


def shuffled(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of ``range(length)`` that is the same for ever: numpy's generators may change, this not.

    Sorts the numbers of SplitMix64 (Steele et al. 2014, doi:10.1145/2660193.2660195), which are distinct, from a start
    that is a hash of seed and epoch.
    """
    start = int.from_bytes(hashlib.sha256(f"{seed}:{epoch}".encode()).digest()[:8], "little")
    z = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)))
