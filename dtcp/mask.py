"""Which keys a query may see, as far as it follows from positions: an interval of global positions for each query.

Causal masks, windows, documents and key padding all say where a query's keys begin and where they end, and neither
bound falls from one query to the next. Tiles, messages and work follow from these intervals, whatever the layout.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dtcp.documents import Documents, Integers, check_documents

NO_WINDOW = (-1, -1)
Rows = tuple[int, int]
Booleans = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Mask:
    """Query i sees key j if all of these allow it; i and j are global token positions.

    Attributes:
        is_causal: j ≤ i.
        window_size: (left, right): i − left ≤ j ≤ i + right; −1 is no bound.
        documents: Both are tokens of one document.
        key_lengths: j < key_lengths[b] in row b.
    """

    is_causal: bool = False
    window_size: tuple[int, int] = NO_WINDOW
    documents: Documents | None = None
    key_lengths: tuple[int, ...] | None = None

    @property
    def is_positional(self) -> bool:
        """Whether it compares positions of queries and keys, which then have to be those of one sequence."""
        return self.is_causal or self.window_size != NO_WINDOW or self.documents is not None

    @property
    def leaves_some_unseen(self) -> bool:
        """Whether tokens may see nothing, or be seen by nobody: padding, whose contents mean nothing."""
        return self.key_lengths is not None or (self.documents is not None and self.documents.has_padding)

    def unused(self, seq_len: int, kv_seq_len: int, row: int) -> tuple[Booleans, Booleans]:
        """Which queries of ``row`` see nothing, and which keys are padding: bool (S,) and (S_kv,)."""
        first, stop = self.intervals(seq_len, kv_seq_len, row)
        is_padding = np.zeros(kv_seq_len, dtype=np.bool_)
        if self.documents is not None:
            parts = self.documents.rows()[row % self.documents.num_rows]
            is_padding = np.repeat(parts.is_padding, parts.lengths)
        if self.key_lengths is not None:
            is_padding = is_padding | (np.arange(kv_seq_len) >= self.key_lengths[row])
        return stop <= first, is_padding

    def row_groups(self, more: Documents | None = None) -> tuple[Rows | None, ...]:
        """Batch rows (start, stop) that share their intervals; (None,) if all do.

        Args:
            more: Documents that place tokens, by which rows differ too.
        """
        return _row_groups(self, more)

    def intervals(self, seq_len: int, kv_seq_len: int, row: int) -> tuple[Integers, Integers]:
        """(first key, last key + 1) of each query of ``row``, int64 (S,) each; equal where it sees nothing."""
        return _intervals(self, seq_len, kv_seq_len, row)


@functools.lru_cache(maxsize=256)
def _row_groups(mask: Mask, more: Documents | None) -> tuple[Rows | None, ...]:
    differing = [d for d in (mask.documents, more) if d is not None and not d.is_shared]
    num_rows = {d.num_rows for d in differing} | ({len(mask.key_lengths)} if mask.key_lengths else set())
    if not num_rows:
        return (None,)
    (count,) = num_rows  # the call has compared them with its batch
    contents = [
        (*(d.select_rows([row]) for d in differing), mask.key_lengths[row] if mask.key_lengths else None)
        for row in range(count)
    ]
    starts = [row for row in range(count) if row == 0 or contents[row] != contents[row - 1]]
    if len(starts) == 1:
        return (None,)
    return tuple(zip(starts, [*starts[1:], count], strict=True))


@functools.lru_cache(maxsize=32)
def _intervals(mask: Mask, seq_len: int, kv_seq_len: int, row: int) -> tuple[Integers, Integers]:
    token = np.arange(seq_len, dtype=np.int64)
    first, stop = np.zeros_like(token), np.full_like(token, kv_seq_len)
    if mask.documents is not None:
        parts = mask.documents.rows()[row % mask.documents.num_rows]
        first = parts.per_token(parts.starts[:-1])
        stop = parts.per_token(np.where(parts.is_padding, parts.starts[:-1], parts.starts[1:]))
    left, right = mask.window_size
    if left >= 0:
        first = np.maximum(first, token - left)
    if mask.is_causal or right >= 0:
        stop = np.minimum(stop, token + (0 if mask.is_causal else right) + 1)
    if mask.key_lengths is not None:
        stop = np.minimum(stop, mask.key_lengths[row])
    return np.minimum(first, stop), stop


def checked_mask(
    *, is_causal: bool, window_size: Any = NO_WINDOW, documents: Any = None, key_lengths: Any = None
) -> Mask:
    """Return the mask, or raise ValueError naming what is wrong with it."""
    window = check_window(window_size, is_causal)
    lengths = None if key_lengths is None else tuple(int(length) for length in key_lengths)
    return Mask(is_causal, window, check_documents(documents), lengths)


def check_window(window_size: Any, is_causal: bool) -> tuple[int, int]:
    """Return ``window_size`` as a pair of ints."""
    is_pair = isinstance(window_size, (tuple, list)) and len(window_size) == 2
    if not is_pair or any(isinstance(w, bool) or not isinstance(w, int) or w < -1 for w in window_size):
        raise ValueError(
            f"window_size must be a pair (left, right) of ints, -1 for no bound, got {window_size!r}; use (-1, -1) for "
            "no window, (W - 1, 0) for the last W tokens"
        )
    left, right = window_size
    if is_causal and right > 0:
        raise ValueError(
            f"window_size={tuple(window_size)} looks {right} tokens ahead, which is_causal=True forbids; use "
            f"({left}, 0) or is_causal=False"
        )
    return left, right
