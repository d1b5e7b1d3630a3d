"""What each rank computes, sends and receives in each step of a two-level ring. Integers only.

A node is L adjacent ranks, and cp = N·L; rank (n, l) is n·L + l. In step (o, i) rank (n, l) has the keys of rank
(n ± o, l ± i), the sign as in ``ring_schedule``: at (o, 0) they have entered the node here, from the rank of the same
local index of the node before; then they visit the node's other ranks one after the other. So every rank of a node
receives from outside, by a network card of its own, what a flat ring would bring through one (LoongTrain, Gu et al.,
arXiv 2406.18485; BurstAttention, Sun et al., arXiv 2403.09347).

# Note [Why outer hops go in pieces]
An outer hop may take L steps, but messages of one group are carried out one after the other on an accelerator: as one
message it would hold up the inner hops of all those steps. So a piece of it goes with each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from dtcp.attention.schedule import Hop
from dtcp.layout import SequenceLayout
from dtcp.mask import Mask
from dtcp.needed import Rows
from dtcp.remembered import remembered
from dtcp.seen import documents_of
from dtcp.tiles import Tile

NO_ROWS: Rows = (0, 0)


@dataclass(frozen=True, slots=True)
class NodeStep:
    """One step of one rank.

    Attributes:
        source: Rank whose keys are here in this step.
        tiles: What to compute with them.
        keys: Slots of ``source`` that this rank reads, and makes a gradient for.
        keys_of_node: Those that some rank of this node reads.
        inner: What moves on inside the node during the step; nothing in the last one of a node's keys.
        outer: The piece of what has entered here that moves on to the next node.
    """

    source: int
    tiles: tuple[Tile, ...]
    keys: Rows
    keys_of_node: Rows
    inner: Hop
    outer: Hop


@dataclass(frozen=True, slots=True)
class Transfer:
    """Slots of some keys, to or from ``peer``."""

    peer: int
    slots: Rows


@dataclass(frozen=True, slots=True)
class NodeReturn:
    """The way of key gradients home during one step of the backward, or in one of the two after the last.

    Attributes:
        part_to: What the step before made, to the rank of this node that the keys entered at.
        part_from: What another rank of this node made for the keys that entered here.
        sum_to: A piece of all that this node made for keys that entered here, to their owner.
        sum_from: A piece of what another node made for this rank's keys.
    """

    part_to: Transfer
    part_from: Transfer
    sum_to: Transfer
    sum_from: Transfer


@dataclass(frozen=True, slots=True)
class TwoLevelSchedule:
    """All steps of one rank, (0, 0), (0, 1), …, (N−1, L−1); hops go to ``next_…`` and come from ``previous_…``."""

    next_inner: int
    previous_inner: int
    next_outer: int
    previous_outer: int
    steps: tuple[NodeStep, ...]
    returns: tuple[NodeReturn, ...]


@remembered(of=documents_of)
def two_level_schedule(
    layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, may_mask: bool, rank: int, ranks_per_node: int
) -> TwoLevelSchedule:
    """Return the schedule of ``rank``; step 0 is its own keys. ``may_mask``: see ``SequenceLayout.tiles``."""
    nodes = _Nodes(layout, kv_layout, mask, ranks_per_node)
    node, local = divmod(rank, ranks_per_node)
    direction, length = nodes.direction, ranks_per_node
    previous_inner, previous_outer = nodes.rank(node, local - direction), nodes.rank(node - direction, local)
    steps = []
    for outer in range(nodes.num_nodes):
        entered = nodes.source(rank, outer, 0)
        leaving = pieces(nodes.outer_hop(rank, outer), length)
        entering = pieces(nodes.outer_hop(previous_outer, outer), length)
        for inner in range(length):
            source = nodes.source(rank, outer, inner)
            tiles = layout.tiles(rank, source, mask, kv_layout=kv_layout, may_mask=may_mask)
            inside = Hop(nodes.inner_hop(rank, outer, inner), nodes.inner_hop(previous_inner, outer, inner))
            outside = Hop(leaving[inner], entering[inner])
            keys = nodes.reads(rank, source)
            steps.append(NodeStep(source, tiles, keys, nodes.node_reads(node, entered), inside, outside))
    return TwoLevelSchedule(
        nodes.rank(node, local + direction), previous_inner, nodes.rank(node + direction, local), previous_outer,
        tuple(steps), tuple(nodes.way_home(rank, step) for step in range(layout.cp + 2)),
    )  # fmt: skip


def pieces(slots: Rows, number: int) -> list[Rows]:
    """Cut ``slots`` into as many ranges, of lengths that differ by one at most."""
    start, length = slots[0], slots[1] - slots[0]
    edges = [start + length * index // number for index in range(number + 1)]
    return list(itertools.pairwise(edges))


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Who holds whose keys when, and which of them."""

    layout: SequenceLayout
    kv_layout: SequenceLayout
    mask: Mask
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        return self.layout.cp // self.ranks_per_node

    @property
    def direction(self) -> int:
        """Where keys travel to, on both levels: to those first that need more of them; see ``ring_schedule``."""
        return 1 if self.layout.name == "contiguous" else -1

    def rank(self, node: int, local: int) -> int:
        return node % self.num_nodes * self.ranks_per_node + local % self.ranks_per_node

    def source(self, rank: int, outer: int, inner: int) -> int:
        node, local = divmod(rank, self.ranks_per_node)
        return self.rank(node - self.direction * outer, local - self.direction * inner)

    def reads(self, rank: int, source: int) -> Rows:
        return self.layout.key_range(rank, source, self.mask, kv_layout=self.kv_layout)

    def node_reads(self, node: int, source: int) -> Rows:
        return _hull(self.reads(self.rank(node, local), source) for local in range(self.ranks_per_node))

    def inner_hop(self, sender: int, outer: int, inner: int) -> Rows:
        """Slots that leave ``sender`` inside its node: the hull of what its ranks still read of them."""
        node, local = divmod(sender, self.ranks_per_node)
        source = self.source(sender, outer, inner)
        left = range(1, self.ranks_per_node - inner)
        return _hull(self.reads(self.rank(node, local + self.direction * index), source) for index in left)

    def outer_hop(self, sender: int, outer: int) -> Rows:
        """Slots that leave ``sender`` for the next node: the hull of what all later nodes read of them."""
        node, source = sender // self.ranks_per_node, self.source(sender, outer, 0)
        left = range(1, self.num_nodes - outer)
        return _hull(self.node_reads(node + self.direction * index, source) for index in left)

    def way_home(self, rank: int, step: int) -> NodeReturn:
        nothing = Transfer(rank, NO_ROWS)
        part_to, part_from = self._parts(rank, step - 1) or (nothing, nothing)
        sum_to, sum_from = self._sums(rank, step) or (nothing, nothing)
        return NodeReturn(part_to, part_from, sum_to, sum_from)

    def _parts(self, rank: int, made_in: int) -> tuple[Transfer, Transfer] | None:
        """What was made in a step, but for that of the keys that entered here."""
        outer, inner = divmod(made_in, self.ranks_per_node)
        if not 0 <= made_in < self.layout.cp or inner == 0:
            return None
        node, local = divmod(rank, self.ranks_per_node)
        proxy, reader = (self.rank(node, local + sign * self.direction * inner) for sign in (-1, 1))
        own, entered = self.source(rank, outer, inner), self.source(rank, outer, 0)
        return Transfer(proxy, self.reads(rank, own)), Transfer(reader, self.reads(reader, entered))

    def _sums(self, rank: int, step: int) -> tuple[Transfer, Transfer] | None:
        """A piece of what came together an outer step before: the last parts for it arrive in this one's first step."""
        outer, inner = divmod(step, self.ranks_per_node)
        outer, piece, num_pieces = outer - 1, inner - 1, self.ranks_per_node - 1
        if step >= self.layout.cp:  # after the last step: the parts, and then all of the sum
            outer, piece, num_pieces = self.num_nodes - 1, step - self.layout.cp - 1, 1
        if outer < 1 or piece < 0:
            return None
        node, local = divmod(rank, self.ranks_per_node)
        owner, other = self.source(rank, outer, 0), node + self.direction * outer
        sent, received = self.node_reads(node, owner), self.node_reads(other, rank)
        return (
            Transfer(owner, pieces(sent, num_pieces)[piece]),
            Transfer(self.rank(other, local), pieces(received, num_pieces)[piece]),
        )


def _hull(ranges: Iterable[Rows]) -> Rows:
    """The least range that holds all of them; nothing if all are empty."""
    full = [rows for rows in ranges if rows[1] > rows[0]]
    return (min(rows[0] for rows in full), max(rows[1] for rows in full)) if full else NO_ROWS
