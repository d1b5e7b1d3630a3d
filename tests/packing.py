"""Drawn documents and masks for property tests, and the mask of a row pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from dtcp.documents import Documents
from dtcp.mask import Mask

LENGTHS = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 8, 20, 70]), min_size=1, max_size=7).filter(any)


def fitted(lengths: list[int], seq_len: int) -> list[int]:
    """As many of ``lengths`` as ``seq_len`` tokens hold, and one more for the rest."""
    fits = np.cumsum(lengths) <= seq_len
    kept = [length for length, fit in zip(lengths, fits, strict=True) if fit]
    return [*kept, seq_len - sum(kept)]


@st.composite
def documents(draw: Any, num_rows: int = 1, padding: bool = True) -> Documents:
    """Documents of one row or several, with padding anywhere."""
    lengths = draw(LENGTHS)
    seq_len = sum(lengths)
    rows = [lengths, *(fitted(draw(LENGTHS), seq_len) for _ in range(num_rows - 1))]
    made = Documents.from_lengths(rows if num_rows > 1 else lengths)
    if padding and draw(st.booleans()):
        ids = np.atleast_2d(made.ids.numpy()).copy()
        for row in ids:
            row[row == row[draw(st.integers(0, seq_len - 1))]] = -1
        made = Documents.from_ids(ids)
    return made


@st.composite
def masks(draw: Any, seq_len: int, packed: Documents | None, num_rows: int, key_lengths: bool = True) -> Mask:
    is_causal = draw(st.booleans())
    bound = st.sampled_from([-1, 0, 1, 3, seq_len // 2, 70])
    window = draw(bound), draw(st.sampled_from([-1, 0]) if is_causal else bound)
    lengths = st.lists(st.integers(0, seq_len), min_size=num_rows, max_size=num_rows).map(tuple)
    given = draw(st.one_of(st.none(), lengths)) if key_lengths else None
    return Mask(is_causal, window, packed, given)


def dense(mask: Mask, seq_len: int, row: int) -> np.ndarray:
    """Whether query i sees key j in ``row``, bool (S, S), by the words of the documentation."""
    i, j = np.arange(seq_len)[:, None], np.arange(seq_len)[None]
    left, right = mask.window_size
    sees = np.ones((seq_len, seq_len), bool)
    if mask.is_causal:
        sees &= j <= i
    if left >= 0:
        sees &= j >= i - left
    if right >= 0:
        sees &= j <= i + right
    if mask.documents is not None:
        ids = np.atleast_2d(mask.documents.ids.numpy())
        own = ids[row % len(ids)]
        sees &= (own[:, None] == own[None]) & (own[:, None] >= 0)
    if mask.key_lengths is not None:
        sees &= j < mask.key_lengths[row]
    return sees
