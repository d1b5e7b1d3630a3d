"""The strategies ``ring`` and ``all_gather`` where L adjacent ranks share a node: between nodes once, then inside.

Shapes: query (B, Hq, S_q, D), key (B, Hkv, S_kv, D), value (B, Hkv, S_kv, Dv), this rank's slots; on the way keys and
values are kv (S_kv, B, Hkv, D+Dv). Rank (n, l) is n·L + l, of N nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dtcp.attention.call import Call
from dtcp.attention.comm import Exchange, Message, start_exchange
from dtcp.attention.gradients import Gradients, thirds_of_heads
from dtcp.attention.held import HeldKeys, held_range, pack, unpack, whole_shard
from dtcp.attention.strategies import CORES, Strategy, attend, attend_steps, new_partial
from dtcp.attention.two_level_schedule import NodeStep, TwoLevelSchedule, two_level_schedule
from dtcp.needed import Rows, range_of_keys
from dtcp.ranges import named_range


def core_of(name: str, ulysses_degree: int, ranks_per_node: int) -> Strategy:
    """What runs over the ranks that no all-to-all of heads brings together; arguments as in ``ResolvedStrategy``."""
    super_ranks = ranks_per_node // ulysses_degree
    if super_ranks <= 1:
        return CORES[name]
    return TwoLevelRing(super_ranks) if name == "ring" else TwoLevelAllGather(super_ranks)


class TwoLevelRing:
    """A ring of nodes around rings of a node's ranks, see ``two_level_schedule``: N−1 shards over each network card.

    Four kv shards per rank, whatever cp and L are: what has entered the node here and what enters next, what came from
    inside and what comes next. The backward has besides, in float32, at most six shards of key gradients, and copies
    of those that leave where they travel in another dtype.
    """

    def __init__(self, ranks_per_node: int) -> None:
        self._length = ranks_per_node

    def forward(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend_steps(call, query, value, self._walk(call, key, value))

    def backward(
        self, call: Call, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = Gradients(call, grad_out, query, key, value, out, lse)
        # The last parts have no step left to hide behind, nor has the last sum: some of the rank's own tiles.
        early, middle, late = thirds_of_heads(key)
        own = call.tiles(call.rank)
        returns = _NodeReturns(call, self._schedule(call), self._length, grads, key, value)
        for index, (step, held) in enumerate(self._walk(call, key, value)):
            returns.start(index)
            with named_range("hop", index):
                if index == 0:
                    grads.add_own(own, early)
                else:
                    grads.add_part(held, step.tiles, returns.new_part(index))
            returns.finish()
        for index, heads in ((call.layout.cp, middle), (call.layout.cp + 1, late)):
            returns.start(index)
            with named_range("hop", 0):
                grads.add_own(own, heads)
            returns.finish()
        return grads.totals

    def _schedule(self, call: Call) -> TwoLevelSchedule:
        return two_level_schedule(
            call.layout, call.kv_layout, call.mask, call.kernel.takes_masks, call.rank, self._length
        )

    def _walk(self, call: Call, key: Tensor, value: Tensor) -> Iterator[tuple[NodeStep, HeldKeys]]:
        """Yield each step and its source's keys; the next source's and a piece of the next node's are on their way."""
        schedule = self._schedule(call)
        inside = call.peer(schedule.previous_inner), call.peer(schedule.next_inner)
        outside = call.peer(schedule.previous_outer), call.peer(schedule.next_outer)
        entered = pack(key, value)
        entering = torch.empty_like(entered)
        inner = [torch.empty_like(entered) for _ in range(min(self._length - 1, 2))]
        held = whole_shard(call.rank, key, value)
        for index, step in enumerate(schedule.steps):
            place = index % self._length
            kv, incoming = inner[(place - 1) % len(inner)] if place else entered, inner[place % len(inner)]
            sends = (inside[1], kv, step.inner.send), (outside[1], entered, step.outer.send)
            receives = (inside[0], incoming, step.inner.receive), (outside[0], entering, step.outer.receive)
            exchange = start_exchange(_messages(*sends), _messages(*receives), call.group)
            if index:
                held = whole_shard(step.source, *unpack(kv, key.size(-1)))
            yield step, held
            exchange.wait()
            if place == self._length - 1:
                entered, entering = entering, entered


def _messages(*moved: tuple[int, Tensor, Rows]) -> list[Message]:
    """(peer, kv, its slots that move)."""
    return [Message(peer, kv[slice(*slots)]) for peer, kv, slots in moved]


class _NodeReturns:
    """The way of key gradients home: inside the node to the rank where the keys entered, in one sum to their owner.

    Buffers, (slots, B, Hkv, D+Dv): two for parts that leave and one for those that arrive, as in a ring; two for sums,
    of which one comes together while the other leaves, and one for those that arrive.
    """

    def __init__(
        self, call: Call, schedule: TwoLevelSchedule, length: int, grads: Gradients, key: Tensor, value: Tensor
    ) -> None:
        self._call, self._steps, self._returns = call, schedule.steps, schedule.returns
        self._length, self._grads, self._head_dim = length, grads, key.size(-1)
        entry = key.size(0), key.size(1), key.size(3) + value.size(3)

        def buffer(slots: list[Rows], dtype: torch.dtype = grads.dtype) -> Tensor:
            return key.new_empty(max(stop - start for start, stop in slots), *entry, dtype=dtype)

        parts, sums = [x.part_to.slots for x in self._returns], [x.keys_of_node for x in self._steps]
        self._parts = [buffer(parts) for _ in range(min(length - 1, 2))]
        self._sums = [buffer(sums[length:]) for _ in range(min(len(sums) // length - 1, 2))]
        self._arriving_part = buffer([x.part_from.slots for x in self._returns], grads.sent_in)
        self._arriving_sum = buffer([x.sum_from.slots for x in self._returns], grads.sent_in)
        self._in_flight: tuple[int, Exchange] | None = None

    def new_part(self, index: int) -> HeldKeys:
        """Zeros for the gradient made in a step; that of keys which entered here begins their sum."""
        step = self._steps[index]
        is_first = index % self._length == 0
        slots = step.keys_of_node if is_first else step.keys
        part = (self._sum(index) if is_first else self._part(index))[: slots[1] - slots[0]].zero_()
        return held_range(step.source, part.flatten(0, 1), slots, part.size(1), self._head_dim)

    def start(self, index: int) -> None:
        """Send on what the step before ``index`` made, and a piece of what the node made an outer step before."""
        moved = self._returns[index]
        sends = []
        if _size(moved.part_to.slots):
            sends.append(self._message(moved.part_to.peer, self._part(index - 1), (0, _size(moved.part_to.slots))))
        if _size(moved.sum_to.slots):
            summed_in = index - self._length
            first = self._steps[summed_in].keys_of_node[0]
            piece = moved.sum_to.slots[0] - first, moved.sum_to.slots[1] - first
            sends.append(self._message(moved.sum_to.peer, self._sum(summed_in), piece))
        receives = [
            self._message(moved.part_from.peer, self._arriving_part, (0, _size(moved.part_from.slots))),
            self._message(moved.sum_from.peer, self._arriving_sum, (0, _size(moved.sum_from.slots))),
        ]
        self._in_flight = index, start_exchange(sends, receives, self._call.group)

    def finish(self) -> None:
        """Add what has arrived."""
        assert self._in_flight is not None
        index, exchange = self._in_flight
        exchange.wait()
        part, of_sum = self._returns[index].part_from.slots, self._returns[index].sum_from.slots
        if _size(part):
            self._add_part(index - 1, self._arriving_part[: _size(part)], part)
        if _size(of_sum):
            self._grads.add_returned(self._arriving_sum[: _size(of_sum)].flatten(0, 1), range_of_keys(of_sum))

    def _add_part(self, made_in: int, arrived: Tensor, slots: Rows) -> None:
        if made_in < self._length:  # of this rank's own keys
            self._grads.add_returned(arrived.flatten(0, 1), range_of_keys(slots))
            return
        first = self._steps[made_in].keys_of_node[0]
        self._sum(made_in)[slots[0] - first : slots[1] - first].add_(arrived)

    def _message(self, peer: int, buffer: Tensor, rows: Rows) -> Message:
        """Rows of a buffer for what arrives, or a rounded copy of what leaves."""
        return Message(self._call.peer(peer), buffer[slice(*rows)].to(self._grads.sent_in))

    def _part(self, index: int) -> Tensor:
        return self._parts[(index % self._length - 1) % len(self._parts)]

    def _sum(self, index: int) -> Tensor:
        """Of the keys that entered here in the outer step of ``index``."""
        return self._sums[(index // self._length - 1) % len(self._sums)]


def _size(slots: Rows) -> int:
    return slots[1] - slots[0]


class TwoLevelAllGather:
    """Every rank gathers all keys and values: those of its local index from the other nodes, then from inside its own.

    Between nodes a rank sends and receives N−1 shards, inside its node (L−1)·N. The first half hides behind the rank's
    own tiles, the second behind those of the keys that are here then. Key gradients return the same way: added up
    inside the node, then between nodes, each time in float32. All keys lie by local index: (L, N, S_kv, B, Hkv, D+Dv).
    """

    def __init__(self, ranks_per_node: int) -> None:
        self._length = ranks_per_node

    def forward(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        partial = new_partial(query, value)
        kv, between = self._start_between_nodes(call, pack(key, value))
        attend(call, partial, query, whole_shard(call.rank, key, value), call.tiles(call.rank))
        between.wait()
        inside = self._start_inside_node(call, kv)
        alike, others = self._sources(call)
        for hop, source in enumerate(alike, start=1):
            attend(call, partial, query, self._held(kv, source, key.size(-1)), call.tiles(source), hop)
        inside.wait()
        for hop, source in enumerate(others, start=1 + len(alike)):
            attend(call, partial, query, self._held(kv, source, key.size(-1)), call.tiles(source), hop)
        return partial.result()

    def backward(
        self, call: Call, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = Gradients(call, grad_out, query, key, value, out, lse)
        early, middle, late = thirds_of_heads(key)
        own = call.tiles(call.rank)
        kv, between = self._start_between_nodes(call, pack(key, value))
        with named_range("hop", 0):
            grads.add_own(own, early)
        between.wait()
        inside = self._start_inside_node(call, kv)
        with named_range("hop", 0):
            grads.add_own(own, middle)
        inside.wait()
        grad_kv = torch.zeros_like(kv, dtype=grads.dtype)

        alike, others = self._sources(call)
        hop_of = {source: hop for hop, source in enumerate([*alike, *others], start=1)}

        def add(sources: list[int]) -> None:
            for source in sources:
                held, part = (self._held(x, source, key.size(-1)) for x in (kv, grad_kv))
                with named_range("hop", hop_of[source]):
                    grads.add_part(held, call.tiles(source), part)

        add(others)
        # One rank of the node after the other, so that one buffer does.
        mine = grad_kv[call.rank % self._length]
        arriving = torch.empty_like(mine, dtype=grads.sent_in)
        for distance in range(1, self._length):
            exchange = self._start_to_local(call, grad_kv, arriving, distance)
            add(alike[distance - 1 :: self._length - 1])
            exchange.wait()
            mine += arriving
        returned, scattering = self._start_to_owners(call, mine, grads.sent_in)
        with named_range("hop", 0):
            grads.add_own(own, late)
        scattering.wait()
        for shard in (*returned, mine[call.rank // self._length]):
            grads.add_returned(shard.flatten(0, 1), range_of_keys((0, shard.size(0))))
        return grads.totals

    def _sources(self, call: Call) -> tuple[list[int], list[int]]:
        """The other ranks with this one's local index, and all ranks without it."""
        others = [rank for rank in range(call.layout.cp) if rank % self._length != call.rank % self._length]
        return self._alike(call), others

    def _alike(self, call: Call) -> list[int]:
        own = range(call.rank % self._length, call.layout.cp, self._length)
        return [rank for rank in own if rank != call.rank]

    def _held(self, kv: Tensor, source: int, head_dim: int) -> HeldKeys:
        node, local = divmod(source, self._length)
        return whole_shard(source, *unpack(kv[local, node], head_dim))

    def _start_between_nodes(self, call: Call, own: Tensor) -> tuple[Tensor, Exchange]:
        """Return room for all keys, and the exchange that brings those of the other nodes' ranks of this index."""
        node, local = divmod(call.rank, self._length)
        kv = own.new_empty(self._length, call.layout.cp // self._length, *own.shape)
        kv[local, node] = own
        sends = [Message(call.peer(rank), kv[local, node]) for rank in self._alike(call)]
        receives = [Message(call.peer(rank), kv[local, rank // self._length]) for rank in self._alike(call)]
        return kv, start_exchange(sends, receives, call.group)

    def _start_inside_node(self, call: Call, kv: Tensor) -> Exchange:
        """Give the node's other ranks the keys of this rank's index, of all nodes; get theirs."""
        first, local = call.rank - call.rank % self._length, call.rank % self._length
        others = [index for index in range(self._length) if index != local]
        sends = [Message(call.peer(first + index), kv[local].flatten(0, 1)) for index in others]
        receives = [Message(call.peer(first + index), kv[index].flatten(0, 1)) for index in others]
        return start_exchange(sends, receives, call.group)

    def _start_to_local(self, call: Call, grad_kv: Tensor, arriving: Tensor, distance: int) -> Exchange:
        """Give the rank ``distance`` above in the node what this one made for keys of that one's index."""
        first, local = call.rank - call.rank % self._length, call.rank % self._length
        above, below = (local + distance) % self._length, (local - distance) % self._length
        sends = [Message(call.peer(first + above), grad_kv[above].flatten(0, 1).to(arriving.dtype))]
        receives = [Message(call.peer(first + below), arriving.flatten(0, 1))]
        return start_exchange(sends, receives, call.group)

    def _start_to_owners(self, call: Call, mine: Tensor, sent_in: torch.dtype) -> tuple[list[Tensor], Exchange]:
        """Give the other nodes' ranks of this index what this node made for their keys; (what returns, on its way)."""
        sends = [Message(call.peer(rank), mine[rank // self._length].to(sent_in)) for rank in self._alike(call)]
        returned = [torch.empty_like(message.rows) for message in sends]
        receives = [Message(message.peer, rows) for message, rows in zip(sends, returned, strict=True)]
        return returned, start_exchange(sends, receives, call.group)
