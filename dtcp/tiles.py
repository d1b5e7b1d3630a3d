"""Cut what the queries of one rank see in the keys of another into rectangles. Integers only.

Query slot i of the one sees key slots ``lower[i] <= j < upper[i]`` of the other, and where it sees any, neither bound
falls from one slot to the next. So full rectangles and triangles cover most of it; what is too ragged for them becomes
one rectangle with a mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dtcp.documents import Integers

# What a call of a kernel and the merge of its result cost, in pairs: 64 × 64. On CPU 30 to 60 µs, in which one thread
# computes some 2,000 pairs of 8 heads of 64.
_CALL_PAIRS = 4096
_MASKED_FACTOR = 1.25  # a pair under a mask beside one without
_BAND_QUERIES = 64  # a window narrower than this is cut into masked rectangles of so many queries


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of (query slot, key slot) pairs that one rank computes with the keys of another.

    Slots are local: ``q_start:q_stop`` of the rank that asks, ``kv_start:kv_stop`` of the rank that owns the keys.

    Attributes:
        kind: ``"full"``: every pair is allowed. ``"causal"``: square, the i-th query of the tile sees the first i+1
            keys of it. ``"anticausal"``: square, the i-th query sees all keys of it but the first i. ``"masked"``:
            some pairs, see ``visible``.
        rows: Batch rows (start, stop) that it is for; None is all.
        num_allowed: Allowed pairs of a masked tile.
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    kind: str
    rows: tuple[int, int] | None = None
    num_allowed: int = 0

    @property
    def num_queries(self) -> int:
        return self.q_stop - self.q_start

    @property
    def num_keys(self) -> int:
        return self.kv_stop - self.kv_start

    @property
    def num_pairs(self) -> int:
        """Allowed (query, key) pairs."""
        match self.kind:
            case "masked":
                return self.num_allowed
            case "causal" | "anticausal":
                return self.num_queries * (self.num_queries + 1) // 2
            case _:
                return self.num_queries * self.num_keys

    @property
    def num_computed(self) -> int:
        """Pairs that a kernel computes: those of the whole rectangle under a mask."""
        return self.num_queries * self.num_keys if self.kind == "masked" else self.num_pairs


def cut_tiles(
    lower: Integers, upper: Integers, *, may_mask: bool, rows: tuple[int, int] | None = None
) -> tuple[Tile, ...]:
    """Return tiles that hold every pair ``lower[i] <= j < upper[i]`` once, and others only under a mask.

    Args:
        lower, upper: int64 (queries,).
        may_mask: Whether to use masks where they are cheaper; without, tiles are full or triangles, however many.
        rows: Of the tiles.
    """
    if not may_mask:
        exact = (tile for run in _runs(lower, upper, may_mask=False) for tile in run)
        return tuple(exact if rows is None else (replace(tile, rows=rows) for tile in exact))
    total = np.concatenate([[0], (upper - lower).cumsum()])
    groups: list[tuple[_Hull, list[Tile]]] = []
    for tiles in _runs(lower, upper, may_mask=True):
        group = _hull(tiles), tiles
        # Whatever is cheaper as one rectangle with a mask than as many without.
        while groups and _masked_cost(joined := groups[-1][0].joined(group[0])) <= sum(
            _cost(g) for g in (groups[-1], group)
        ):
            group = joined, []
            groups.pop()
        groups.append(group)
    found: list[Tile] = []
    for hull, tiles in groups:
        if tiles:
            found += tiles
        else:
            allowed = int(total[hull.q_stop] - total[hull.q_start])
            found.append(Tile(hull.q_start, hull.q_stop, hull.kv_start, hull.kv_stop, "masked", num_allowed=allowed))
    return tuple(tile if rows is None else replace(tile, rows=rows) for tile in found)


@dataclass(frozen=True, slots=True)
class _Hull:
    """The rectangle around some tiles."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    def joined(self, other: _Hull) -> _Hull:
        return _Hull(
            min(self.q_start, other.q_start),
            max(self.q_stop, other.q_stop),
            min(self.kv_start, other.kv_start),
            max(self.kv_stop, other.kv_stop),
        )


def _hull(tiles: list[Tile]) -> _Hull:
    return _Hull(
        min(t.q_start for t in tiles),
        max(t.q_stop for t in tiles),
        min(t.kv_start for t in tiles),
        max(t.kv_stop for t in tiles),
    )


def _cost(group: tuple[_Hull, list[Tile]]) -> float:
    hull, tiles = group
    return sum(_CALL_PAIRS + tile.num_computed for tile in tiles) if tiles else _masked_cost(hull)


def _masked_cost(hull: _Hull) -> float:
    return _CALL_PAIRS + _MASKED_FACTOR * (hull.q_stop - hull.q_start) * (hull.kv_stop - hull.kv_start)


def _runs(lower: Integers, upper: Integers, *, may_mask: bool) -> Iterator[list[Tile]]:
    """Yield the tiles of each run of queries whose bounds stay, or move by one key for each query."""
    step_lower, step_upper = np.diff(lower), np.diff(upper)
    is_even = (step_lower >= 0) & (step_lower <= 1) & (step_upper >= 0) & (step_upper <= 1)
    steps = np.where(is_even & (upper[1:] > lower[1:]) & (upper[:-1] > lower[:-1]), 2 * step_lower + step_upper, -1)
    ends = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    kinds, lowers, uppers = steps.tolist(), lower.tolist(), upper.tolist()
    empty_until = _next_seen(lower, upper)
    start, end = 0, 0
    while (start := empty_until[start]) < len(lowers):
        while ends[end] <= start and end < len(ends) - 1:
            end += 1
        kind = kinds[start] if start < len(kinds) else -1
        last = ends[end] if kind >= 0 else start
        num_queries = last + 1 - start
        match kind:
            case 1:
                yield _growing(start, num_queries, lowers[start], uppers[start])
            case 2:
                yield _shrinking(start, num_queries, lowers[start], uppers[start])
            case 3:
                yield from _band(start, num_queries, lowers[start], uppers[start], may_mask)
            case _:
                yield [Tile(start, start + num_queries, lowers[start], uppers[start], "full")]
        start = last + 1


def _next_seen(lower: Integers, upper: Integers) -> list[int]:
    """For each query, and one beyond, the first one from there on that sees a key."""
    seen = np.where(upper > lower, np.arange(len(lower)), len(lower))
    return [*np.minimum.accumulate(seen[::-1])[::-1].tolist(), len(lower)]


def _growing(start: int, num: int, lower: int, upper: int) -> list[Tile]:
    """Each query sees one key more at the end."""
    left = [Tile(start, start + num, lower, upper - 1, "full")] if upper - 1 > lower else []
    return [*left, Tile(start, start + num, upper - 1, upper - 1 + num, "causal")]


def _shrinking(start: int, num: int, lower: int, upper: int) -> list[Tile]:
    """Each query sees one key less at the beginning."""
    right = [Tile(start, start + num, lower + num, upper, "full")] if upper > lower + num else []
    return [Tile(start, start + num, lower, lower + num, "anticausal"), *right]


def _band(start: int, num: int, lower: int, upper: int, may_mask: bool) -> Iterator[list[Tile]]:
    """A window that moves on with the queries, of ``width`` keys."""
    width = upper - lower
    if width == 1 and not may_mask:
        yield [Tile(start + i, start + i + 1, lower + i, lower + i + 1, "full") for i in range(num)]
        return
    if may_mask and width < _BAND_QUERIES:
        for first in range(0, num, _BAND_QUERIES):
            count = min(_BAND_QUERIES, num - first)
            q, keys = start + first, lower + first
            yield [Tile(q, q + count, keys, keys + count + width - 1, "masked", num_allowed=count * width)]
        return
    for first in range(0, num, width - 1):
        q, count, keys = start + first, min(width - 1, num - first), lower + first
        tiles = [Tile(q, q + count, keys, keys + count, "anticausal")]
        if width - 1 > count:
            tiles.append(Tile(q, q + count, keys + count, keys + width - 1, "full"))
        yield [*tiles, Tile(q, q + count, keys + width - 1, keys + width - 1 + count, "causal")]
