"""Cut what the queries of one rank see in the keys of another into rectangles. Integers only.

Query slot i of the one sees key slots ``lower[i] <= j < upper[i]`` of the other, and where it sees any, neither bound
falls from one slot to the next. So full rectangles and triangles cover most of it; what is too ragged for them becomes
one rectangle with a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from dtcp.documents import Integers

# What a call of a kernel and the merge of its result cost, in pairs: 64 × 64. On CPU 30 to 60 µs, in which one thread
# computes some 2,000 pairs of 8 heads of 64.
CALL_PAIRS = 4096
MASKED_FACTOR = 1.25  # a pair under a mask beside one without
_BAND_QUERIES = 64  # a window narrower than this is cut into masked rectangles of so many queries
_UNEVEN = -1  # a step between two queries that is none of 0: bounds stay, 1: upper moves, 2: lower, 3: both


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
    def batch_rows(self) -> slice:
        """``rows`` as an index."""
        return slice(None) if self.rows is None else slice(*self.rows)

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


# A tile that is not one yet: q_start, q_stop, kv_start, kv_stop, kind. Planning makes many more of them than are left
# in the end, and tuples of ints cost a tenth of what tiles do.
_Part = tuple[int, int, int, int, str]
# The rectangle around some of them, what it costs to compute them, and they; None: they became one with a mask.
_Group = tuple[int, int, int, int, float, list[_Part] | None]


def cut_tiles(
    lower: Integers, upper: Integers, *, may_mask: bool, rows: tuple[int, int] | None = None
) -> tuple[Tile, ...]:
    """Return tiles that hold every pair ``lower[i] <= j < upper[i]`` once, and others only under a mask.

    Costs O(queries) in numpy and some microseconds for each run of queries whose bounds go on evenly.

    Args:
        lower, upper: int64 (queries,).
        may_mask: Whether to use masks where they are cheaper; without, tiles are full or triangles, however many.
        rows: Of the tiles.
    """
    if not (upper > lower).any():
        return ()
    if not may_mask:
        return tuple(Tile(*part, rows=rows) for group in _runs(lower, upper, may_mask=False) for part in group[5] or ())
    total = np.concatenate([[0], (upper - lower).cumsum()])
    found: list[Tile] = []
    for q_start, q_stop, kv_start, kv_stop, _, parts in _joined(_runs(lower, upper, may_mask=True)):
        # What is one rectangle with a mask holds all that its queries see, in one part or in several.
        for part in parts or [(q_start, q_stop, kv_start, kv_stop, "masked")]:
            allowed = int(total[part[1]] - total[part[0]]) if part[4] == "masked" else 0
            found.append(Tile(*part, rows=rows, num_allowed=allowed))
    return tuple(found)


def _joined(groups: Iterable[_Group]) -> list[_Group]:
    """Join neighbours where one rectangle with a mask is cheaper than they are."""
    done: list[_Group] = []
    for q_start, q_stop, kv_start, kv_stop, cost, parts in groups:
        while done:
            before = done[-1]
            start, stop = min(before[2], kv_start), max(before[3], kv_stop)
            joined_cost = CALL_PAIRS + MASKED_FACTOR * (q_stop - before[0]) * (stop - start)
            if joined_cost > before[4] + cost:
                break
            q_start, kv_start, kv_stop, cost, parts = before[0], start, stop, joined_cost, None
            done.pop()
        done.append((q_start, q_stop, kv_start, kv_stop, cost, parts))
    return done


def _runs(lower: Integers, upper: Integers, *, may_mask: bool) -> Iterator[_Group]:
    """Yield the parts of each run of queries whose bounds stay, or move by one key for each query."""
    step_lower, step_upper = np.diff(lower), np.diff(upper)
    sees = upper > lower
    is_even = (step_lower >= 0) & (step_lower <= 1) & (step_upper >= 0) & (step_upper <= 1) & sees[1:] & sees[:-1]
    steps = np.where(is_even, 2 * step_lower + step_upper, _UNEVEN)
    # Where even steps begin, or change, and every uneven step of a query that sees something.
    starts = np.flatnonzero((np.diff(steps, prepend=_UNEVEN - 1) != 0) | (steps == _UNEVEN))
    stops = np.append(starts[1:], len(steps))
    is_needed = (steps[starts] != _UNEVEN) | sees[starts]
    starts, stops = starts[is_needed], stops[is_needed]
    columns = (starts, stops, steps[starts], lower[starts], upper[starts])
    last, following = len(lower) - 1, 0  # the first query that is in no run yet
    for start, stop, step, low, high in zip(*(column.tolist() for column in columns), strict=True):
        if step == _UNEVEN:
            if following <= start:
                yield _full(start, 1, low, high)
                following = start + 1
            continue
        skipped = max(following - start, 0)  # the first query of a run may be the last one of the run before
        first, num = start + skipped, stop + 1 - start - skipped
        if num > 1:
            yield from _even(step, first, num, low + skipped * (step >> 1), high + skipped * (step & 1), may_mask)
            following = stop + 1
    if following <= last and sees[last]:
        yield _full(last, 1, int(lower[last]), int(upper[last]))


def _even(step: int, start: int, num: int, lower: int, upper: int, may_mask: bool) -> Iterator[_Group]:
    """The parts of ``num`` queries from ``start``: lower moves on by ``step // 2``, upper by ``step % 2``."""
    match step:
        case 0:
            yield _full(start, num, lower, upper)
        case 1:
            yield _growing(start, num, lower, upper)
        case 2:
            yield _shrinking(start, num, lower, upper)
        case _:
            yield from _band(start, num, lower, upper, may_mask)


def _full(start: int, num: int, lower: int, upper: int) -> _Group:
    cost = CALL_PAIRS + num * (upper - lower)
    return start, start + num, lower, upper, cost, [(start, start + num, lower, upper, "full")]


def _growing(start: int, num: int, lower: int, upper: int) -> _Group:
    """Each query sees one key more at the end."""
    stop, edge = start + num, upper - 1
    parts = [(start, stop, lower, edge, "full")] if edge > lower else []
    cost = CALL_PAIRS * (len(parts) + 1) + num * (edge - lower) + num * (num + 1) // 2
    return start, stop, lower, edge + num, cost, [*parts, (start, stop, edge, edge + num, "causal")]


def _shrinking(start: int, num: int, lower: int, upper: int) -> _Group:
    """Each query sees one key less at the beginning."""
    stop, edge = start + num, lower + num
    parts = [(start, stop, edge, upper, "full")] if upper > edge else []
    cost = CALL_PAIRS * (len(parts) + 1) + num * (upper - edge) + num * (num + 1) // 2
    return start, stop, lower, upper, cost, [(start, stop, lower, edge, "anticausal"), *parts]


def _band(start: int, num: int, lower: int, upper: int, may_mask: bool) -> Iterator[_Group]:
    """A window that moves on with the queries, of ``width`` keys."""
    width = upper - lower
    if width == 1 and not may_mask:
        for i in range(num):
            yield _full(start + i, 1, lower + i, upper + i)
        return
    is_masked = may_mask and width < _BAND_QUERIES
    size = _BAND_QUERIES if is_masked else width - 1
    for first in range(0, num, size):
        q, keys, count = start + first, lower + first, min(size, num - first)
        stop, edge = q + count, keys + width - 1
        if is_masked:
            cost = CALL_PAIRS + MASKED_FACTOR * count * (edge + count - keys)
            yield q, stop, keys, edge + count, cost, [(q, stop, keys, edge + count, "masked")]
            continue
        parts = [(q, stop, keys, keys + count, "anticausal")]
        if edge > keys + count:
            parts.append((q, stop, keys + count, edge, "full"))
        parts.append((q, stop, edge, edge + count, "causal"))
        yield q, stop, keys, edge + count, CALL_PAIRS * len(parts) + count * width, parts
