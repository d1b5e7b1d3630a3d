"""The all-to-all between ranks that hold all heads of their tokens and ranks that hold some heads of all their tokens.

Shapes: a tensor of one rank's slots is (B, H, S_local, E), one of the merged ranks' slots (B, h, S_merged, E), in
increasing order of position, with h heads of H. As messages within the one group of the cp axis: a group of its own for
each set of ranks would cost buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dtcp.attention.call import Call
from dtcp.attention.comm import Exchange, Message, start_exchange
from dtcp.documents import Integers
from dtcp.layout import SequenceLayout, merged_slots
from dtcp.needed import Rows

_MAX_RUNS = 16  # of slots that lie together, above which an index is faster than slices


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor whose heads are exchanged for tokens, or back.

    Attributes:
        source: What this rank has.
        target: What it gets, filled by ``Pending.finish``; its own view of a larger tensor maybe.
        heads: The heads that each of the ranks has or gets; of ranks that share some, gradients are summed.
        layout: Of the rank's own slots.
    """

    source: Tensor
    target: Tensor
    heads: tuple[range, ...]
    layout: SequenceLayout


class Pending:
    """An exchange in flight."""

    def __init__(self, exchange: Exchange, received: list[tuple[int, list[Tensor]]], moved: list[Moved]) -> None:
        self._exchange, self._received = exchange, received
        self.moved = moved

    def wait(self) -> list[tuple[int, list[Tensor]]]:
        """(rank among the merged ones, its part of each tensor) of all of them."""
        self._exchange.wait()
        return self._received


class HeadExchange:
    """Exchanges among the ``degree`` adjacent ranks that this one belongs to."""

    def __init__(self, call: Call, degree: int) -> None:
        self._group, self._degree = call.group, degree
        self.member = call.group.rank() % degree
        self._block = call.group.rank() // degree

    def start_to_heads(self, moved: list[Moved]) -> Pending:
        """Send each rank its heads of this rank's tokens."""
        parts = {peer: [x.source[:, _slice(x.heads[peer])] for x in moved] for peer in range(self._degree)}
        shapes: dict[int, list[tuple[int, ...]]] = {
            peer: [(x.target.size(0), x.target.size(1), x.layout.local_seq_len, x.target.size(3)) for x in moved]
            for peer in range(self._degree)
        }
        return self._start(moved, parts, shapes)

    def finish_to_heads(self, pending: Pending) -> None:
        """Fill the targets, (B, h, S_merged, E)."""
        for peer, parts in pending.wait():
            for x, part in zip(pending.moved, parts, strict=True):
                for rows, slots in self._slots(x.layout, peer):
                    _put(x.target[_slice(rows)], slots, part[_slice(rows)])

    def start_to_tokens(self, moved: list[Moved]) -> Pending:
        """Send each rank its tokens of this rank's heads."""
        parts = {peer: [self._taken(x, peer) for x in moved] for peer in range(self._degree)}
        shapes: dict[int, list[tuple[int, ...]]] = {
            peer: [(x.source.size(0), len(x.heads[peer]), x.layout.local_seq_len, x.source.size(3)) for x in moved]
            for peer in range(self._degree)
        }
        return self._start(moved, parts, shapes)

    def finish_to_tokens(self, pending: Pending) -> None:
        """Add to the targets, (B, H, S_local, E): ranks that share heads have shares of their gradients."""
        for peer, parts in pending.wait():
            for x, part in zip(pending.moved, parts, strict=True):
                x.target[:, _slice(x.heads[peer])].add_(part)

    def _start(
        self, moved: list[Moved], parts: dict[int, list[Tensor]], shapes: dict[int, list[tuple[int, ...]]]
    ) -> Pending:
        """One message to each other rank, whose parts lie one after the other as bytes, the widest dtype first."""
        order = sorted(range(len(moved)), key=lambda i: -moved[i].source.element_size())
        sends, receives, received = [], [], []
        first = self._block * self._degree
        for peer in range(self._degree):
            if peer == self.member:
                received.append((peer, parts[peer]))
                continue
            sends.append(Message(first + peer, torch.cat([_bytes(parts[peer][i]) for i in order])))
            sizes = [torch.Size(shapes[peer][i]).numel() * moved[i].source.element_size() for i in order]
            buffer = moved[0].source.new_empty(sum(sizes), dtype=torch.uint8)
            views = {
                i: view.view(moved[i].source.dtype).view(shapes[peer][i])
                for i, view in zip(order, buffer.split(sizes), strict=True)
            }
            receives.append(Message(first + peer, buffer))
            received.append((peer, [views[i] for i in range(len(moved))]))
        return Pending(start_exchange(sends, receives, self._group), received, moved)

    def _taken(self, x: Moved, peer: int) -> Tensor:
        batch, heads, _, width = x.source.shape
        taken = x.source.new_empty(batch, heads, x.layout.local_seq_len, width)
        for rows, slots in self._slots(x.layout, peer):
            _take(x.source[_slice(rows)], slots, taken[_slice(rows)])
        return taken

    def _slots(self, layout: SequenceLayout, peer: int) -> list[tuple[Rows | None, Integers]]:
        """(batch rows, where the slots of ``peer`` lie among the merged ones)."""
        merged = layout.merge(self._degree)
        if layout.num_rows == 1:
            return [(None, merged_slots(merged, self._block)[peer])]
        return [((row, row + 1), merged_slots(merged, self._block, row)[peer]) for row in range(layout.num_rows)]


def _slice(part: range | Rows | None) -> slice:
    if part is None:
        return slice(None)
    return slice(part.start, part.stop) if isinstance(part, range) else slice(*part)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _runs(slots: Integers) -> list[tuple[slice, slice]] | None:
    """(own slots, their places) of runs that lie together; None if they are many."""
    breaks = (slots[1:] != slots[:-1] + 1).nonzero()[0] + 1
    if len(breaks) >= _MAX_RUNS:
        return None
    edges = [0, *breaks.tolist(), len(slots)]
    places = [int(slots[start]) for start in edges[:-1]]
    return [
        (slice(start, stop), slice(place, place + stop - start))
        for start, stop, place in zip(edges, edges[1:], places, strict=False)
    ]


def _put(merged: Tensor, slots: Integers, part: Tensor) -> None:
    """merged[:, :, slots] = part"""
    runs = _runs(slots)
    if runs is None:
        merged[:, :, torch.from_numpy(slots).to(part.device)] = part
        return
    for own, places in runs:
        merged[:, :, places] = part[:, :, own]


def _take(merged: Tensor, slots: Integers, part: Tensor) -> None:
    """part = merged[:, :, slots]"""
    runs = _runs(slots)
    if runs is None:
        part.copy_(merged[:, :, torch.from_numpy(slots).to(part.device)])
        return
    for own, places in runs:
        part[:, :, own] = merged[:, :, places]
