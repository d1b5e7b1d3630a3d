"""Where the documents of a packed sequence lie. Integers only: no process group, no device.

Several documents stand one after the other in a row of S tokens, and a token sees its own document only. Rows of a
batch may hold different documents. What is in no document is padding: it attends to nothing and nothing to it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dtcp.remembered import Recent, remembered

Integers = npt.NDArray[np.int64]

PADDING = -1  # the id of a token that is in no document
_HEADER = 2  # numbers of ``state`` before the ids: the hash of the contents, and the rows


@dataclass(frozen=True, slots=True)
class Row:
    """The parts of one row, in order: documents and runs of padding. None is empty.

    Attributes:
        starts: int64 (n + 1,), first token of each part, and the length of the row.
        is_padding: bool (n,).
    """

    starts: Integers
    is_padding: npt.NDArray[np.bool_]

    @property
    def lengths(self) -> Integers:
        return np.diff(self.starts)

    def per_token(self, of_parts: Integers) -> Integers:
        """Repeat a number of each part for each of its tokens."""
        return np.repeat(of_parts, self.lengths)


class Documents:
    """Where documents lie in one row, the same for all rows of a batch, or in each of several rows.

    Made by ``from_lengths``, ``from_cu_seqlens``, ``from_ids`` or ``from_position_ids``. Two are equal if they place
    the same documents; documents without a token do not count.

    Attributes:
        seq_len: Tokens of a row.
        num_rows: Rows that are described: 1 holds for any batch.
        state: int64 (2 + num_rows·seq_len,), all of it: what travels through the attention ops. Its shape does not
            depend on where documents end, so other documents cost torch.compile no recompilation.
    """

    def __init__(self, ids: Integers) -> None:
        """Args: ids: int64 (rows, S), increasing along each row, ``PADDING`` for what is in no document."""
        self.num_rows, self.seq_len = ids.shape
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8, key=str(ids.shape).encode()).digest()
        self._hash = int.from_bytes(digest, "little", signed=True)
        self._ids = ids
        self.state = _tensor(np.concatenate([[self._hash, self.num_rows], ids.reshape(-1)]))

    # ---- made from ----

    @classmethod
    def from_lengths(cls, lengths: Any, *, seq_len: int | None = None) -> Documents:
        """Documents one after the other.

        Args:
            lengths: Tokens of each, 0 and more: a list, an integer tensor, or a list of those for each row.
            seq_len: What they have to add up to; None takes their sum.

        Raises:
            ValueError: If a length is negative, or they add up to something else, or rows to different lengths.
        """
        rows = [_integers(row, "document lengths") for row in _rows(lengths, "document lengths")]
        for index, row in enumerate(rows):
            if (row < 0).any():
                raise ValueError(f"document lengths must be 0 or more, got {int(row.min())} in row {index}")
        return cls._from_bounds([np.concatenate([[0], row.cumsum()]) for row in rows], seq_len, "document lengths")

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Any, *, cu_seqlens_padded: Any = None, seq_len: int | None = None
    ) -> Documents:
        """Documents by the running sums of their lengths, as variable-length attention takes them.

        Args:
            cu_seqlens: 0, end of the first, …, S: a list or integer tensor on any device (which is then waited for),
                or a list of those for each row. Repeated ends are documents without a token.
            cu_seqlens_padded: Where each document's place begins and ends, if padding follows documents.
            seq_len: What the last one has to be; None takes it.

        Raises:
            ValueError: If it does not begin with 0, falls, or ends at something else than ``seq_len``.
        """
        ends = [_integers(row, "cu_seqlens") for row in _rows(cu_seqlens, "cu_seqlens")]
        places = ends
        if cu_seqlens_padded is not None:
            places = [_integers(row, "cu_seqlens_padded") for row in _rows(cu_seqlens_padded, "cu_seqlens_padded")]
        for row in (*ends, *places):
            if row.size == 0 or row[0] != 0 or (np.diff(row) < 0).any():
                raise ValueError(
                    f"cu_seqlens must begin with 0 and never fall, got {_shown(row)}; they are running sums of lengths "
                    "(from_lengths takes the lengths themselves)"
                )
        if [r.size for r in ends] != [r.size for r in places]:
            raise ValueError(
                f"cu_seqlens and cu_seqlens_padded must have as many entries, got {[r.size for r in ends]} and "
                f"{[r.size for r in places]}"
            )
        documents = cls._from_bounds(places, seq_len, "cu_seqlens")
        if cu_seqlens_padded is None:
            return documents
        ids = documents._ids.copy()
        for row_ids, end, place in zip(ids, ends, places, strict=True):
            lengths, room = np.diff(end), np.diff(place)
            if (lengths > room).any():
                bad = int(np.argmax(lengths > room))
                raise ValueError(f"document {bad} has {lengths[bad]} tokens and cu_seqlens_padded room for {room[bad]}")
            inside = np.arange(len(row_ids)) - np.repeat(place[:-1], room)
            row_ids[inside >= np.repeat(lengths, room)] = PADDING
        return cls(_numbered(ids))

    @classmethod
    def from_ids(cls, ids: Any) -> Documents:
        """Documents by a number for each token; negative is padding, which may stand anywhere.

        Args:
            ids: (S,) or (B, S), any integers; the tokens of a document stand together.

        Raises:
            ValueError: If an id comes back after another one: are they one document or two?
        """
        rows = _matrix(ids, "ids")
        for index, row in enumerate(rows):
            firsts = row[np.flatnonzero(np.diff(row, prepend=row[0] - 1))]
            firsts = firsts[firsts >= 0]
            if len(np.unique(firsts)) < len(firsts):
                values, counts = np.unique(firsts, return_counts=True)
                raise ValueError(
                    f"the tokens of a document must stand together, but id {values[counts > 1][0]} comes back in row "
                    f"{index} after another id; give each document an id of its own"
                )
        return cls(_numbered(np.where(rows < 0, PADDING, rows)))

    @classmethod
    def from_position_ids(cls, position_ids: Any) -> Documents:
        """Documents by the position of each token within its own: where it does not grow by one, another starts.

        Args:
            position_ids: (S,) or (B, S); 3-row ids of multimodal models have to be given as their temporal row.

        Raises:
            ValueError: If a document does not begin with position 0 (a document cut in the middle, or positions of
                another kind): nothing says then where it begins.
        """
        rows = _matrix(position_ids, "position_ids")
        is_start = np.diff(rows, axis=1, prepend=rows[:, :1] - 2) != 1
        odd = is_start & (rows != 0)
        if odd.any():
            row, token = (int(x) for x in np.argwhere(odd)[0])
            raise ValueError(
                f"position ids must restart at 0 and grow by one within a document, got {rows[row, token]} for token "
                f"{token} of row {row}; say where documents lie with from_ids or from_lengths"
            )
        return cls(_numbered(is_start.cumsum(axis=1)))

    @classmethod
    def from_state(cls, state: Tensor) -> Documents:
        """The documents that ``state`` is of; cached by value."""
        key, num_rows = state[:_HEADER].tolist()
        found = _decoded.get(key)
        if found is None or found.state.numel() != state.numel():
            found = cls(state[_HEADER:].cpu().numpy().reshape(num_rows, -1).copy())
            _decoded.put(key, found, found._ids.size)
        return found

    @classmethod
    def _from_bounds(cls, bounds: list[Integers], seq_len: int | None, what: str) -> Documents:
        totals = [int(row[-1]) for row in bounds]
        if not (seq_len is None or (isinstance(seq_len, int) and not isinstance(seq_len, bool))):
            raise ValueError(f"seq_len must be an int, got {seq_len!r}")
        expected = totals[0] if seq_len is None else seq_len
        for index, total in enumerate(totals):
            if total != expected:
                raise ValueError(
                    f"{what} of row {index} add up to {total}, but the sequence has {expected} tokens; give padding "
                    "tokens a document of their own, or say with from_ids where padding is"
                )
        if expected < 1:
            raise ValueError(f"{what} must add up to at least 1 token, got {expected}")
        numbers = [np.repeat(np.arange(row.size - 1), np.diff(row)) for row in bounds]
        return cls(_numbered(np.stack(numbers)))

    # ---- what they say ----

    @functools.cached_property
    def is_shared(self) -> bool:
        """Whether all rows hold the same documents."""
        return self.num_rows == 1 or bool((self._ids == self._ids[0]).all())

    @functools.cached_property
    def has_padding(self) -> bool:
        """Whether some token is in no document."""
        return bool((self._ids == PADDING).any())

    @property
    def ids(self) -> Tensor:
        """int64 (S,), or (num_rows, S): 0, 1, … by order in the row, −1 for padding."""
        return _tensor(self._squeezed(self._ids).copy())

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 (n + 1,): ends of all parts of all rows, one row after the other; a run of padding is a part."""
        ends = [row.starts[1:] + index * self.seq_len for index, row in enumerate(self.rows())]
        return _tensor(np.concatenate([[0], *ends])).to(torch.int32)

    @property
    def num_documents(self) -> int:
        """Documents of all rows."""
        return sum(int((~row.is_padding).sum()) for row in self.rows())

    @property
    def max_len(self) -> int:
        """Tokens of the longest one, 0 if all is padding."""
        return max(int(row.lengths[~row.is_padding].max(initial=0)) for row in self.rows())

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows that are in a document."""
        return int((self._ids != PADDING).sum())

    def positions(self, *, restart: bool = True) -> Tensor:
        """int64 (S,), or (num_rows, S): position of each token in its own document, or in its row."""
        rows = [np.arange(self.seq_len) - (row.per_token(row.starts[:-1]) if restart else 0) for row in self.rows()]
        return _tensor(self._squeezed(np.stack(rows)))

    def select_rows(self, rows: slice | Sequence[int]) -> Documents:
        """The documents of some rows, of a microbatch say; those that hold for any batch stay as they are."""
        if self.num_rows == 1:
            return self
        selected = self._ids[rows if isinstance(rows, slice) else list(rows)]
        if not len(selected):
            raise ValueError(f"select_rows found none of {self.num_rows} rows in {rows}")
        return Documents(selected.copy())

    def rows(self) -> tuple[Row, ...]:
        """The parts of each row."""
        return _parts(self)

    def check_fits(self, seq_len: int, batch_size: int | None = None) -> None:
        """Raise ValueError unless these are documents of ``seq_len`` tokens in a batch of so many rows."""
        if self.seq_len != seq_len:
            raise ValueError(
                f"documents add up to {self.seq_len} tokens, but the sequence has {seq_len}; give all documents of it"
            )
        if batch_size is not None and self.num_rows not in (1, batch_size):
            raise ValueError(
                f"documents describe {self.num_rows} rows, but the batch has {batch_size}; give one row for all, or "
                "select those of this batch: documents.select_rows(slice(start, stop)), and layout.select_rows alike"
            )

    def _squeezed(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return rows[0] if self.num_rows == 1 else rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Documents) and self._hash == other._hash and np.array_equal(self._ids, other._ids)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        rows = [np.where(row.is_padding, -row.lengths, row.lengths).tolist() for row in self.rows()[:3]]
        shown = ", ".join(map(_shown, rows)) + (", …" if self.num_rows > 3 else "")
        padding = "; negative is padding" if self.has_padding else ""
        return f"Documents(seq_len={self.seq_len}, num_rows={self.num_rows}, lengths={shown}{padding})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Documents, (self._ids,)


def check_documents(documents: Any) -> Documents | None:
    """Return ``documents`` if they are ``Documents`` or None, else raise ValueError with the cure."""
    if documents is None or isinstance(documents, Documents):
        return documents
    raise ValueError(
        f"documents must be dtcp.Documents, got {type(documents).__name__}; make them with "
        "dtcp.Documents.from_lengths([4, 12]), from_cu_seqlens, from_ids or from_position_ids"
    )


_decoded: Recent[int, Documents] = Recent()  # by the hash of their contents


@remembered(of=lambda documents: documents)
def _parts(documents: Documents) -> tuple[Row, ...]:
    found = []
    for ids in documents._ids:
        starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
        found.append(Row(np.append(starts, len(ids)), ids[starts] == PADDING))
    return tuple(found)


def _numbered(ids: Integers) -> Integers:
    """Number the documents of each row 0, 1, … in order; padding stays."""
    is_padding = ids == PADDING
    is_start = (np.diff(ids, axis=1, prepend=ids[:, :1] - 1) != 0) & ~is_padding
    return np.where(is_padding, PADDING, is_start.cumsum(axis=1) - 1).astype(np.int64)


def _rows(x: Any, what: str) -> Iterable[Any]:
    """The rows of something given for one row or for several."""
    if isinstance(x, Tensor):
        return list(x) if x.ndim == 2 else [x]
    try:
        items = list(x)
    except TypeError:
        raise ValueError(f"{what} must be a list or an integer tensor, got {x!r}; for one document: [{x!r}]") from None
    return items if items and not _is_number(items[0]) else [items]


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, np.number)) or (isinstance(x, Tensor) and x.ndim == 0)


def _integers(x: Any, what: str) -> Integers:
    numbers = _host_array(x if isinstance(x, Tensor) or len(x) else np.zeros(0, np.int64), what)
    if numbers.ndim != 1:
        raise ValueError(f"{what} of a row must be a list of numbers, got shape {numbers.shape}")
    return numbers.astype(np.int64)


def _matrix(x: Any, what: str) -> Integers:
    numbers = _host_array(x, what) if isinstance(x, Tensor) or len(x) else np.zeros(0, np.int64)
    if numbers.ndim not in (1, 2) or not numbers.size:
        raise ValueError(f"{what} must be of shape (S,) or (B, S) and not empty, got shape {numbers.shape}")
    return np.atleast_2d(numbers).astype(np.int64)


def _host_array(x: Any, what: str) -> npt.NDArray[Any]:
    if isinstance(x, Tensor) and x.device.type == "meta":
        raise ValueError(f"{what} is a tensor on the meta device, which holds no numbers; make it on a real one")
    try:
        numbers = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    except (ValueError, OverflowError) as error:  # rows of different lengths, or what no array can hold
        raise ValueError(f"{what} must be integers: {error}") from None
    if not np.issubdtype(numbers.dtype, np.integer):
        raise ValueError(f"{what} must be integers, got {numbers.dtype}")
    if numbers.size and int(numbers.max()) >= 2**62:
        raise ValueError(f"{what} must be below 2^62, got {numbers.max()}")
    return numbers


def _shown(numbers: Any) -> str:
    listed = [int(x) for x in numbers[:8]]
    return f"[{', '.join(map(str, listed))}{', …' if len(numbers) > 8 else ''}]"


def _tensor(numbers: npt.NDArray[Any]) -> Tensor:
    # Real and good for training, wherever it is made: documents are cached.
    with torch.inference_mode(False), unset_fake_temporarily():
        return torch.from_numpy(np.ascontiguousarray(numbers))
