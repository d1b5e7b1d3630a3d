"""Which layout suits the documents of a batch: exact work and traffic of each, counted without placing a token.

What a rank holds is a few runs in each document: tokens a, a + d, …, n of them. Work and traffic are sums over these,
so a choice costs O(documents · cp), whatever the documents' lengths are, and is the same on every rank: integers only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtcp.documents import Documents, Integers
from dtcp.placement import padded_len
from dtcp.remembered import remembered
from dtcp.tiles import CALL_PAIRS, MASKED_FACTOR

logger = logging.getLogger(__name__)

# What receiving a key and value costs a rank, in pairs. Most of it hides behind work, so it is set low: on CPU, gloo
# moves 4 KB of 8 heads of 64 at 1 GB/s in the time of 160 pairs; 16 is a tenth of that.
_SLOT_PAIRS = 16
_EDGE_PAIRS = 64  # what a kernel computes in vain for each query at the edge of a triangle, in blocks of 128
# Ragged tiles of few pairs are joined under masks until a call is worth its cost: n of side m cost C + F·(n·m)², least
# for each at 2·m·√(C·F).
_JOINED_PAIRS = int(2 * (CALL_PAIRS * MASKED_FACTOR) ** 0.5)


@dataclass(frozen=True, slots=True)
class Demand:
    """What each rank of a layout has to do, summed over rows; int64 (cp,) each.

    Attributes:
        pairs: Allowed (query, key) pairs of its queries.
        received: Slots of other ranks that one of its queries sees.
        fragments: Cost of cutting its work into calls, in pairs; an estimate.
    """

    pairs: Integers
    received: Integers
    fragments: Integers

    @property
    def cost(self) -> int:
        """Of the busiest rank, in pairs."""
        return int((self.pairs + _SLOT_PAIRS * self.received + self.fragments).max())


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of tokens, of all ranks, that lie in one document each; arrays that broadcast, documents last.

    A run is ``first``, ``first + step``, …: ``num`` tokens of the document ``start`` … ``stop``.
    """

    first: Integers
    num: Integers
    step: int
    start: Integers
    stop: Integers


@remembered(of=lambda _seq_len, _cp, documents, *_: documents)
def choose_layout(
    seq_len: int,
    cp: int,
    documents: Documents | None,
    multiple_of: int,
    is_causal: bool,
    window_size: tuple[int, int],
) -> str:
    """Return the name of the cheapest layout, the simplest of several; cached by value and logged once."""
    # The simplest first: it is taken where costs are equal.
    names = ("contiguous", "head_tail", "striped", *(() if documents is None else ("per_document",)))
    if cp == 1:
        return names[0]
    rows = list(_documents_of_rows(seq_len, cp, documents))
    demands = {name: _demand_of_rows(name, seq_len, cp, rows, multiple_of, is_causal, window_size) for name in names}
    chosen = min(names, key=lambda name: demands[name].cost)
    if not logger.isEnabledFor(logging.INFO):
        return chosen
    shown = "; ".join(
        f"{name} {int(d.pairs.max())} pairs, {int(d.received.max())} slots received, {int(d.fragments.max())} for "
        f"fragments: {d.cost}"
        for name, d in demands.items()
    )
    logger.info("layout auto took %s for seq_len=%d cp=%d, by its busiest rank: %s", chosen, seq_len, cp, shown)
    return chosen


def demand_of(
    name: str,
    seq_len: int,
    cp: int,
    documents: Documents | None,
    multiple_of: int,
    is_causal: bool,
    window_size: tuple[int, int],
) -> Demand:
    """What each rank has to do in layout ``name``, summed over the rows of ``documents``."""
    rows = list(_documents_of_rows(seq_len, cp, documents))
    return _demand_of_rows(name, seq_len, cp, rows, multiple_of, is_causal, window_size)


def _demand_of_rows(
    name: str,
    seq_len: int,
    cp: int,
    rows: list[tuple[Integers, Integers, Integers]],
    multiple_of: int,
    is_causal: bool,
    window_size: tuple[int, int],
) -> Demand:
    local_seq_len = padded_len(name, seq_len, cp, multiple_of) // cp
    left, right = window_size[0], 0 if is_causal else window_size[1]
    total = np.zeros((3, cp), np.int64)
    for starts, stops, left_over_before in rows:
        if name in ("contiguous", "head_tail"):
            total += _cut_at_chunks(name, starts, stops, cp, local_seq_len, left, right)
        else:
            runs = list(_dealt(name, starts, stops, cp, left_over_before))
            demand = _demand(runs, left, right, cp, share=1)
            total += np.stack([x.sum(axis=1) for x in demand])
    return Demand(*total)


def _documents_of_rows(
    seq_len: int, cp: int, documents: Documents | None
) -> Iterator[tuple[Integers, Integers, Integers]]:
    """Start, stop, and first rank of the left-over tokens of each document, for each row that counts."""
    if documents is None:
        yield np.array([0]), np.array([seq_len]), np.array([0])
        return
    for row in documents.rows()[: 1 if documents.is_shared else None]:
        lengths = row.lengths
        left_over = np.where(row.is_padding, lengths, lengths % (2 * cp))
        first_rank = (left_over.cumsum() - left_over) % cp
        real = ~row.is_padding
        yield row.starts[:-1][real], row.starts[1:][real], first_rank[real]


def _dealt(name: str, starts: Integers, stops: Integers, cp: int, first_rank: Integers) -> Iterator[_Runs]:
    """The runs of each rank (cp, documents) where every rank holds some of every document, in increasing order."""
    ranks = np.arange(cp)[:, None]

    def first_of(phase: Integers, num: Integers) -> tuple[Integers, Integers]:
        """Of ``num`` tokens dealt from rank ``phase`` on, each rank's first one and how many it has.

        Without a division for each rank and document, which would take most of the time.
        """
        first = ranks - phase
        first += cp * (first < 0)
        return first, num // cp + (first < num % cp)

    if name == "striped":
        first, num = first_of(starts % cp, stops - starts)
        yield _Runs(starts + first, num, cp, starts, stops)
        return
    left_over = (stops - starts) % (2 * cp)
    chunk = (stops - starts) // (2 * cp)
    first, num = first_of(first_rank, left_over)
    yield _Runs(starts + first, num, cp, starts, stops)
    for number in (ranks, 2 * cp - 1 - ranks):
        first = starts + left_over + number * chunk
        yield _Runs(first, np.broadcast_to(chunk, first.shape), 1, starts, stops)


def _cut_at_chunks(
    name: str, starts: Integers, stops: Integers, cp: int, local_seq_len: int, left: int, right: int
) -> Integers:
    """Pairs, received slots and fragments of each rank that holds one or two whole chunks of the row."""
    num_chunks = 2 * cp if name == "head_tail" and cp > 1 else cp
    bounds = np.arange(num_chunks + 1) * (cp * local_seq_len // num_chunks)
    if not len(starts):
        return np.zeros((3, cp), np.int64)
    # Cut documents at the bounds of chunks: O(documents + cp) pieces.
    cuts = np.sort(np.concatenate([starts, bounds[:-1]]), kind="stable")
    index = np.searchsorted(starts, cuts, side="right") - 1
    is_piece = (index >= 0) & (cuts < stops[index]) & (np.diff(cuts, append=-1) != 0)
    cuts, index = cuts[is_piece], index[is_piece]
    chunk = np.searchsorted(bounds, cuts, side="right") - 1
    ends = np.minimum(stops[index], bounds[chunk + 1])
    rank = chunk if num_chunks == cp else np.minimum(chunk, num_chunks - 1 - chunk)
    # By rank; where one document reaches over both chunks of a rank, the pieces stand side by side: what both of them
    # see is received once.
    order = np.argsort(rank, kind="stable")
    cuts, ends, index, rank = cuts[order], ends[order], index[order], rank[order]
    is_second = np.zeros(len(cuts), bool)
    is_second[1:] = (rank[1:] == rank[:-1]) & (index[1:] == index[:-1])
    firsts = np.flatnonzero(~is_second)
    seconds = np.minimum(firsts + 1, len(cuts) - 1)
    has_second = is_second[seconds] & (seconds > firsts)
    start, stop = starts[index[firsts]], stops[index[firsts]]
    one = _Runs(cuts[firsts], ends[firsts] - cuts[firsts], 1, start, stop)
    two = _Runs(cuts[seconds], np.where(has_second, ends[seconds] - cuts[seconds], 0), 1, start, stop)
    demand = np.stack([np.broadcast_to(x, firsts.shape) for x in _demand([one, two], left, right, cp, int(bounds[1]))])
    until = np.concatenate([np.zeros((3, 1), np.int64), demand.cumsum(axis=1)], axis=1)
    return np.diff(until[:, np.searchsorted(rank[firsts], np.arange(cp + 1))], axis=1)


def _demand(runs: list[_Runs], left: int, right: int, cp: int, share: int) -> tuple[Integers, Integers, Integers]:
    """Pairs, received slots, and cost of fragments, of one rank in one document.

    Args:
        runs: All that it holds of the document, in increasing order.
        share: Tokens that stand together on a rank, as far as a document is long enough.
    """
    held: Any = sum(run.num for run in runs)
    pairs: Any = 0
    seen: Any = 0
    until: Any = runs[0].start
    for run in runs:
        own, is_any = _pairs(run, left, right), run.num > 0
        last = run.first + run.step * (run.num - 1)
        # Without a window to the right of itself no token of a document sees beyond it.
        high = run.stop if right < 0 else last + 1 if right == 0 else np.minimum(run.stop, last + right + 1)
        if left < 0:  # from the start of the document on, so the farthest run says it all
            pairs, until = pairs + own, np.where(is_any, np.maximum(until, high), until)
            continue
        low = np.maximum(run.start, run.first - left)
        if right >= 0 and left + right + 1 < run.step:
            assert run is runs[0]
            new = own  # what one of its tokens sees, no other does
        else:
            new = np.where(is_any, np.maximum(high - np.maximum(low, until), 0), 0)
        pairs, seen = pairs + own, seen + new
        until = np.where(is_any, np.maximum(until, high), until)
    if left < 0:
        seen = until - runs[0].start
    return pairs, seen - held, _fragments(runs, held, pairs, seen - held, left >= 0 or right >= 0, cp, share)


def _fragments(
    runs: list[_Runs], held: Integers, pairs: Integers, received: Integers, has_edges: bool, cp: int, share: int
) -> Integers:
    """What it costs beside its pairs to compute them in calls: one for each rank whose keys are seen, or joined."""
    calls = 1 + np.minimum(cp - 1, received if share == 1 else -(-received // share))
    if runs[0].step > 1 and len(runs) > 1:
        calls = calls + (runs[0].num > 0)  # left-over tokens fit no rectangle of the others
    side = np.sqrt(pairs / calls).astype(np.int64)
    # Where ranks take every cp-th token, what they see of each other ends in an edge for each of them.
    num_edges = (calls if runs[-1].step > 1 else 1) if has_edges else 0
    cost = calls * np.minimum(CALL_PAIRS, _JOINED_PAIRS * side) + _EDGE_PAIRS * num_edges * held
    return np.where(held > 0, cost, 0)


def _pairs(run: _Runs, left: int, right: int) -> Integers:
    """Pairs of the queries of each run: the sum of min(stop, i + right + 1) − max(start, i − left) over them."""
    highest = run.num * run.stop if right < 0 else _sum_of_min(run, right + 1, run.stop)
    # max(start, x) = −min(−start, −x) = start + x − min(start, x)
    lowest = run.num * run.start
    if left >= 0:
        lowest = lowest + _sum(run, -left, run.num) - _sum_of_min(run, -left, run.start)
    return highest - lowest


def _sum_of_min(run: _Runs, shift: int, bound: Integers) -> Integers:
    """Of min(bound, i + shift) over the tokens i."""
    if shift == 1 and bound is run.stop:
        return _sum(run, 1, run.num)  # no token of a document lies beyond it
    below = np.clip((bound - run.first - shift) // run.step + 1, 0, run.num)
    return _sum(run, shift, below) + (run.num - below) * bound


def _sum(run: _Runs, shift: int, num: Integers) -> Integers:
    """Of i + shift over the first ``num`` tokens i."""
    return num * (run.first + shift) + run.step * (num * (num - 1) >> 1)
