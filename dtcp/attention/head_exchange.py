"""The all-to-all between ranks that hold all heads of their tokens and ranks that hold some heads of all their tokens.

Shapes: a tensor of one rank's slots is (B, H, S_local, E), one of the merged ranks' slots (B, h, S_merged, E), in
increasing order of position, with h heads of H. As messages within the one group of the cp axis: a group of its own for
each set of ranks would cost buffers.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtcp.attention.call import Call
from dtcp.attention.comm import Exchange, Message, start_exchange
from dtcp.documents import Integers
from dtcp.layout import SequenceLayout, merged_slots
from dtcp.remembered import remembered

_MAX_RUNS = 16  # of slots that lie together, above which an index is faster than slices

# (own slots, None for all; where they lie among the merged ones), of slots that do so evenly.
Run = tuple[slice | None, slice]


class Places(NamedTuple):
    """Where the slots of each merged rank lie among all of theirs.

    Attributes:
        num_slots: Of one rank.
        by_rank: For each of them: by batch rows, None for all, its runs; or all places where those are many.
    """

    num_slots: int
    by_rank: tuple[tuple[tuple[slice | None, tuple[Run, ...] | Integers], ...], ...]


@remembered(of=lambda layout, *_: layout.placed_by, maxsize=256)
def places_of(layout: SequenceLayout, degree: int, block: int) -> Places:
    """The places of the ``block``-th ``degree`` adjacent ranks."""
    merged = layout.merge(degree)
    slots = [merged_slots(merged, block, row) for row in range(layout.num_rows)]
    which = [None] if layout.num_rows == 1 else [slice(row, row + 1) for row in range(layout.num_rows)]
    return Places(
        layout.local_seq_len,
        tuple(
            tuple((rows, _runs(by_rank[rank])) for rows, by_rank in zip(which, slots, strict=True))
            for rank in range(degree)
        ),
    )


class Moved(NamedTuple):
    """A tensor whose heads are exchanged for tokens, or back.

    Attributes:
        source: What this rank has; not written to until the exchange has finished.
        target: What it gets, filled when it finishes; its own view of a larger tensor maybe.
        heads: The heads that each of the ranks has or gets.
        places: Of the slots.
        is_sum: On the way back, whether ranks share heads: they have shares of their gradients, which are added to what
            is in the target.
        sent_in: Dtype of what goes to other ranks; None for that of the source.
    """

    source: Tensor
    target: Tensor
    heads: tuple[range, ...]
    places: Places
    is_sum: bool = False
    sent_in: torch.dtype | None = None


class Pending(NamedTuple):
    """An exchange in flight.

    Attributes:
        received: From each of the merged ranks, its part of each tensor; nothing from this one itself.
    """

    exchange: Exchange
    received: list[list[Tensor] | None]
    moved: list[Moved]


class HeadExchange:
    """Exchanges among the ``degree`` adjacent ranks that this one belongs to.

    Attributes:
        member: Which of them it is.
        of_queries, of_keys: Places of the slots of the call's layouts.
    """

    def __init__(self, call: Call, degree: int) -> None:
        self._group, self._degree = call.group, degree
        block, self.member = divmod(call.group.rank(), degree)
        self._first = block * degree
        self._others = [peer for peer in range(degree) if peer != self.member]
        self.of_queries = self.of_keys = places_of(call.layout, degree, block)
        if call.kv_layout is not call.layout:
            self.of_keys = places_of(call.kv_layout, degree, block)

    def start_to_heads(self, moved: list[Moved]) -> Pending:
        """Send each rank its heads of this rank's tokens."""
        sends, receives, received = [], [], self._nothing()
        for peer in self._others:
            buffer, parts = _buffer(moved, peer)
            for x, part in zip(moved, parts, strict=True):
                part.copy_(_of_heads(x.source, x.heads[peer]))
            sends.append(Message(self._first + peer, buffer))
            buffer, received[peer] = _buffer(moved, self.member)
            receives.append(Message(self._first + peer, buffer))
        return Pending(start_exchange(sends, receives, self._group), received, moved)

    def finish_to_heads(self, pending: Pending) -> None:
        """Fill the targets, (B, h, S_merged, E)."""
        pending.exchange.wait()
        for peer, parts in enumerate(pending.received):
            for index, x in enumerate(pending.moved):
                part = _of_heads(x.source, x.heads[peer]) if parts is None else parts[index]
                _put(x, peer, part)

    def start_to_tokens(self, moved: list[Moved]) -> Pending:
        """Send each rank its tokens of this rank's heads."""
        sends, receives, received = [], [], self._nothing()
        for peer in self._others:
            buffer, parts = _buffer(moved, self.member)
            for x, part in zip(moved, parts, strict=True):
                _take(x, peer, part)
            sends.append(Message(self._first + peer, buffer))
            buffer, received[peer] = _buffer(moved, peer)
            receives.append(Message(self._first + peer, buffer))
        return Pending(start_exchange(sends, receives, self._group), received, moved)

    def finish_to_tokens(self, pending: Pending) -> None:
        """Fill the targets, (B, H, S_local, E), or add to them."""
        pending.exchange.wait()
        for peer, parts in enumerate(pending.received):
            for index, x in enumerate(pending.moved):
                target = _of_heads(x.target, x.heads[peer])
                if parts is None:
                    _take(x, peer, target, adds=x.is_sum)
                elif x.is_sum:
                    target.add_(parts[index])
                else:
                    target.copy_(parts[index])

    def _nothing(self) -> list[list[Tensor] | None]:
        return [None] * self._degree


def _of_heads(x: Tensor, heads: range) -> Tensor:
    return x.narrow(1, heads.start, len(heads))


class _Piece(NamedTuple):
    """A tensor in a message: contiguous, from the ``start``-th element (or byte) to the ``stop``-th."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    stop: int


def _buffer(moved: list[Moved], rank: int) -> tuple[Tensor, list[Tensor]]:
    """One message with the heads of ``rank`` of all tensors, one after the other; and each of them in it."""
    like = moved[0].source
    dtypes = tuple([x.sent_in or x.source.dtype for x in moved])
    shapes = tuple([(x.source.size(0), len(x.heads[rank]), x.places.num_slots, x.source.size(3)) for x in moved])
    is_one, length, pieces = _pieces(dtypes, shapes)
    if is_one:
        buffer = like.new_empty(length, dtype=dtypes[0])
        return buffer, [buffer.as_strided(piece.shape, piece.strides, piece.start) for piece in pieces]
    buffer = like.new_empty(length, dtype=torch.uint8)
    views = [buffer[piece.start : piece.stop].view(dtype) for dtype, piece in zip(dtypes, pieces, strict=True)]
    return buffer, [view.view(piece.shape) for view, piece in zip(views, pieces, strict=True)]


@functools.lru_cache(maxsize=256)
def _pieces(
    dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...]
) -> tuple[bool, int, tuple[_Piece, ...]]:
    """(whether all have one dtype, length, where each lies): in elements of that dtype, or in bytes."""
    is_one, start, pieces = len({*dtypes}) == 1, 0, {}
    # The widest dtype first: each piece begins at a multiple of its elements' size.
    for index in sorted(range(len(dtypes)), key=lambda i: -dtypes[i].itemsize):
        batch, heads, slots, width = shapes[index]
        strides = (heads * slots * width, slots * width, width, 1)
        stop = start + batch * strides[0] * (1 if is_one else dtypes[index].itemsize)
        pieces[index] = _Piece(shapes[index], strides, start, stop)
        start = stop
    return is_one, start, tuple(pieces[index] for index in range(len(dtypes)))


def _runs(slots: Integers) -> tuple[Run, ...] | Integers:
    """Runs of slots that lie together, or all at one distance from each other; the slots themselves if they are many.

    Args:
        slots: Of one rank, increasing: their places.
    """
    steps = np.diff(slots)
    if len(steps) and (steps == steps[0]).all():
        return ((None, slice(int(slots[0]), int(slots[-1]) + 1, int(steps[0]))),)
    breaks = (steps != 1).nonzero()[0] + 1
    if len(breaks) >= _MAX_RUNS:
        return slots
    if not len(breaks):  # one slot, or none
        return tuple((None, slice(int(place), int(place) + 1)) for place in slots)
    edges = [0, *breaks.tolist(), len(slots)]
    places = [int(slots[start]) for start in edges[:-1]]
    return tuple(
        (slice(start, stop), slice(place, place + stop - start))
        for start, stop, place in zip(edges, edges[1:], places, strict=False)
    )


def _put(x: Moved, rank: int, part: Tensor) -> None:
    """Write ``part``, the slots of ``rank``, to their places in the target."""
    for rows, runs in x.places.by_rank[rank]:
        own, merged = (part, x.target) if rows is None else (part[rows], x.target[rows])
        if isinstance(runs, np.ndarray):
            merged[:, :, torch.from_numpy(runs).to(part.device)] = own
            continue
        for slots, place in runs:
            merged[:, :, place] = own if slots is None else own[:, :, slots]


def _take(x: Moved, rank: int, part: Tensor, *, adds: bool = False) -> None:
    """Write the slots of ``rank`` to ``part`` from their places in the source, or add them."""
    for rows, runs in x.places.by_rank[rank]:
        own, merged = (part, x.source) if rows is None else (part[rows], x.source[rows])
        pairs: list[tuple[slice | None, slice | Tensor]]
        pairs = [(None, torch.from_numpy(runs).to(part.device))] if isinstance(runs, np.ndarray) else [*runs]
        for slots, place in pairs:
            target, source = own if slots is None else own[:, :, slots], merged[:, :, place]
            if adds:
                target.add_(source)
            else:
                target.copy_(source)
