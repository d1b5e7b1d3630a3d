"""What follows from a mask for the tokens that ranks hold: which keys of one are seen by queries of another.

Each function says of ranks of a layout what the method of the layout of that name says; results are remembered.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dtcp.documents import Documents, Integers
from dtcp.mask import Mask
from dtcp.needed import NeededKeys, compacted, runs_of
from dtcp.remembered import remembered
from dtcp.tiles import Tile, cut_tiles


class Held(Protocol):
    """What a layout is here: hashable, and equal to others that place tokens alike."""

    @property
    def seq_len(self) -> int: ...

    @property
    def placed_by(self) -> Documents | None: ...

    def token_positions(self, rank: int, row: int = 0) -> Integers:
        """Global token index of each slot that holds a token, increasing."""
        ...


def row_groups(layout: Held, kv_layout: Held, mask: Mask) -> tuple[tuple[int, int] | None, ...]:
    """Batch rows (start, stop) that have the same tiles; (None,) if all do."""
    placed_by = layout.placed_by if kv_layout == layout else None
    return mask.row_groups(placed_by)


def documents_of(layout: Held, kv_layout: Held, mask: Mask, *_: object) -> Documents | None:
    """Those with which what follows from these is to be forgotten, for ``remembered``."""
    return mask.documents or layout.placed_by or kv_layout.placed_by


@remembered(of=documents_of, maxsize=256)
def visible_of(
    layout: Held, kv_layout: Held, mask: Mask, q_rank: int, kv_rank: int, row: int
) -> tuple[Integers, Integers]:
    queries = layout.token_positions(q_rank, row)
    keys = kv_layout.token_positions(kv_rank, row)
    first, stop = mask.intervals(layout.seq_len, kv_layout.seq_len, row)
    return np.searchsorted(keys, first[queries]), np.searchsorted(keys, stop[queries])


@remembered(of=documents_of)
def tiles_of(
    layout: Held,
    kv_layout: Held,
    mask: Mask,
    q_rank: int,
    kv_rank: int,
    may_mask: bool,
    only_needed: bool,
) -> tuple[Tile, ...]:
    # A causal mask alone has no ragged edges.
    may_mask = may_mask and mask != Mask(is_causal=mask.is_causal)
    tiles: list[Tile] = []
    for rows in row_groups(layout, kv_layout, mask):
        bounds = visible_of(layout, kv_layout, mask, q_rank, kv_rank, 0 if rows is None else rows[0])
        if only_needed:
            bounds = compacted(*bounds)
        tiles += cut_tiles(*bounds, may_mask=may_mask, rows=rows)
    return tuple(tiles)


@remembered(of=documents_of)
def needed_of(layout: Held, kv_layout: Held, mask: Mask, q_rank: int, kv_rank: int) -> NeededKeys:
    groups = []
    for rows in row_groups(layout, kv_layout, mask):
        runs = runs_of(*visible_of(layout, kv_layout, mask, q_rank, kv_rank, 0 if rows is None else rows[0]))
        if runs:
            groups.append((rows, runs))
    return NeededKeys(tuple(groups))


@remembered(of=documents_of)
def key_range_of(layout: Held, kv_layout: Held, mask: Mask, q_rank: int, kv_rank: int) -> tuple[int, int]:
    found = []
    for rows in row_groups(layout, kv_layout, mask):
        lower, upper = visible_of(layout, kv_layout, mask, q_rank, kv_rank, 0 if rows is None else rows[0])
        seen = np.flatnonzero(upper > lower)
        if len(seen):
            found.append((int(lower[seen[0]]), int(upper[seen[-1]])))
    return (min(start for start, _ in found), max(stop for _, stop in found)) if found else (0, 0)


@remembered(of=lambda layout, mask, _: mask.documents or layout.placed_by)
def num_pairs_of(layout: Held, mask: Mask, rank: int) -> int:
    groups = row_groups(layout, layout, mask)
    total = 0
    for rows in groups:
        first, stop = mask.intervals(layout.seq_len, layout.seq_len, 0 if rows is None else rows[0])
        held = layout.token_positions(rank, 0 if rows is None else rows[0])
        total += int((stop - first)[held].sum()) * (1 if rows is None else rows[1] - rows[0])
    return total
