"""How queries meet the keys of other ranks: ``ring``, ``exchange`` and ``all_gather``.

Shapes: query (B, Hq, S_q, D), key (B, Hkv, S_kv, D), value (B, Hkv, S_kv, Dv), this rank's slots; lse (B, Hq, S_q).
Keys and values travel as one message, kv (S_kv, B, Hkv, D+Dv): a range of slots is one contiguous piece of memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from dtcp.attention.call import Call, forward_tile
from dtcp.attention.comm import Exchange, Message, start_exchange, wait_for
from dtcp.attention.gradients import Gradients, halves_of_heads
from dtcp.attention.held import HeldKeys, entries_of, held_entries, held_range, pack, unpack, whole_shard
from dtcp.attention.kernels import lse_dtype
from dtcp.attention.merge import Partial
from dtcp.attention.schedule import RingSchedule, Step, exchange_steps, ring_schedule
from dtcp.attention.two_level_schedule import NodeStep
from dtcp.collectives import start_all_gather_rows, start_reduce_scatter_rows
from dtcp.needed import NeededKeys, range_of_keys
from dtcp.ranges import named_range
from dtcp.tiles import Tile


class Strategy(Protocol):
    """Forward and backward of one call on one rank; both are collective."""

    def forward(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return (out, lse) in the accumulation dtype."""
        ...

    def backward(
        self, call: Call, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (grad_query, grad_key, grad_value) in the accumulation dtype, summed over all ranks' queries."""
        ...


class _StepByStep:
    """The keys of one rank at a time, while those of the next are on their way; each rank has another one's.

    In the backward the keys come once more, and each rank's part of a key gradient goes straight back to the owner, one
    step later.
    """

    def forward(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        call = _fitted(call, query)
        return attend_steps(call, query, value, self._walk(call, key, value))

    def backward(
        self, call: Call, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        call = _fitted(call, query)
        grads = Gradients(call, grad_out, query, key, value, out, lse)
        steps = self._steps(call)
        early, late = halves_of_heads(key, is_one=len(steps) == 1)
        returns = _Returns(call, steps, grads, key, value)
        own: tuple[Tile, ...] = ()
        for index, (step, held) in enumerate(self._walk(call, key, value)):
            if index == 0:
                own = step.tiles
                with named_range("hop", 0):
                    grads.add_own(own, early)
                continue
            returns.start(index - 1)
            entries = returns.new_part(index)
            with named_range("hop", index):
                grads.add_part(held, step.tiles, self._part(step, entries, key))
            returns.finish()
        # The last part has no step left to hide behind but the second half of the rank's own tiles.
        returns.start(len(steps) - 1)
        with named_range("hop", 0):
            grads.add_own(own, late)
        returns.finish()
        return grads.totals

    def _steps(self, call: Call) -> tuple[Step, ...]:
        raise NotImplementedError

    def _walk(self, call: Call, key: Tensor, value: Tensor) -> Iterator[tuple[Step, HeldKeys]]:
        """Yield each step and its source's keys; the next source's are on their way meanwhile."""
        raise NotImplementedError

    @staticmethod
    def _part(step: Step, entries: Tensor, key: Tensor) -> HeldKeys:
        """``entries`` of ``step.keys`` as the step's tiles number them."""
        raise NotImplementedError


class Ring(_StepByStep):
    """Ring attention (Liu et al., arXiv 2310.01889) over the ranks' tiles, two kv shards per rank whatever cp is."""

    def _steps(self, call: Call) -> tuple[Step, ...]:
        return self._schedule(call).steps

    def _walk(self, call: Call, key: Tensor, value: Tensor) -> Iterator[tuple[Step, HeldKeys]]:
        schedule, held = self._schedule(call), whole_shard(call.rank, key, value)
        if call.layout.cp == 1:
            yield schedule.steps[0], held
            return
        before, after = call.peer(schedule.previous_rank), call.peer(schedule.next_rank)
        kv = pack(key, value)
        incoming = torch.empty_like(kv)
        for index, (step, hop) in enumerate(zip(schedule.steps, schedule.hops, strict=True)):
            exchange = start_exchange(
                [Message(after, kv[slice(*hop.send)])], [Message(before, incoming[slice(*hop.receive)])], call.group
            )
            if index:
                held = whole_shard(step.source, *unpack(kv, key.size(-1)))
            yield step, held
            exchange.wait()
            kv, incoming = incoming, kv

    @staticmethod
    def _schedule(call: Call) -> RingSchedule:
        return ring_schedule(call.layout, call.kv_layout, call.mask, call.kernel.takes_masks, call.rank)

    @staticmethod
    def _part(step: Step, entries: Tensor, key: Tensor) -> HeldKeys:
        return held_range(step.source, entries, step.keys.hull(), key.size(0), key.size(-1))


class ExactExchange(_StepByStep):
    """Each key goes from its owner to exactly the ranks whose queries see it, once: the lower bound of bytes."""

    def _steps(self, call: Call) -> tuple[Step, ...]:
        return exchange_steps(call.layout, call.kv_layout, call.mask, call.kernel.takes_masks, call.rank)

    def _walk(self, call: Call, key: Tensor, value: Tensor) -> Iterator[tuple[Step, HeldKeys]]:
        steps = self._steps(call)
        batch_size, head_dim = key.size(0), key.size(-1)
        hulls = [step.reader_keys.hull() for step in steps[1:] if step.reader_keys.groups]
        hull = (min(h[0] for h in hulls), max(h[1] for h in hulls)) if hulls else (0, 0)
        kv = pack(key, value, hull)
        num_entries = [step.keys.num_entries(batch_size) for step in steps]
        buffers = [kv.new_empty(max(num_entries[1:], default=0), *kv.shape[2:]) for _ in steps[1:3]]
        for index, step in enumerate(steps):
            exchange = None
            if index + 1 < len(steps):
                following = steps[index + 1]
                arriving = buffers[index % 2][: num_entries[index + 1]]
                exchange = start_exchange(
                    [Message(call.peer(following.reader), entries_of(kv, following.reader_keys, hull[0]))],
                    [Message(call.peer(following.source), arriving)],
                    call.group,
                )
            if index == 0:
                yield step, whole_shard(call.rank, key, value)
            else:
                arrived = buffers[(index - 1) % 2][: num_entries[index]]
                yield step, held_entries(step.source, arrived, step.keys, batch_size, head_dim)
            if exchange:
                exchange.wait()

    @staticmethod
    def _part(step: Step, entries: Tensor, key: Tensor) -> HeldKeys:
        return held_entries(step.source, entries, step.keys, key.size(0), key.size(-1))


class _Returns:
    """The way of key gradients back to the keys' owners, in two buffers for what leaves and one for what arrives.

    Where they travel in another dtype than that of their sums, a rounded copy leaves and one part is made at a time.
    """

    def __init__(self, call: Call, steps: tuple[Step, ...], grads: Gradients, key: Tensor, value: Tensor) -> None:
        self._call, self._steps, self._grads = call, steps, grads
        shape = key.size(1), key.size(3) + value.size(3)
        batch_size = key.size(0)
        self._num_entries = [0, *(step.keys.num_entries(batch_size) for step in steps[1:])]
        self._num_returned = [0, *(step.reader_keys.num_entries(batch_size) for step in steps[1:])]
        most, is_rounded = max(self._num_entries), grads.sent_in != grads.dtype
        self._parts = [key.new_empty(most, *shape, dtype=grads.dtype) for _ in steps[1 : 2 if is_rounded else 3]]
        self._leaving = key.new_empty(most, *shape, dtype=grads.sent_in) if is_rounded else None
        self._arriving = key.new_empty(max(self._num_returned), *shape, dtype=grads.sent_in)
        self._in_flight: tuple[Exchange, Tensor, NeededKeys] | None = None

    def new_part(self, step: int) -> Tensor:
        """Zeros for the gradient made in ``step``: (entries, Hkv, D+Dv)."""
        return self._part(step).zero_()

    def start(self, step: int) -> None:
        """Send what was made in ``step`` to its owner; receive what another rank made for this one."""
        if step == 0:
            return
        done = self._steps[step]
        arriving = self._arriving[: self._num_returned[step]]
        exchange = start_exchange(
            [Message(self._call.peer(done.source), self._rounded(self._part(step)))],
            [Message(self._call.peer(done.reader), arriving)],
            self._call.group,
        )
        self._in_flight = exchange, arriving, done.reader_keys

    def finish(self) -> None:
        """Add what has arrived."""
        if self._in_flight:
            exchange, arrived, keys = self._in_flight
            exchange.wait()
            self._grads.add_returned(arrived, keys)
            self._in_flight = None

    def _part(self, step: int) -> Tensor:
        return self._parts[(step - 1) % len(self._parts)][: self._num_entries[step]]

    def _rounded(self, part: Tensor) -> Tensor:
        """What leaves."""
        return part if self._leaving is None else self._leaving[: part.size(0)].copy_(part)


class AllGather:
    """Every rank gathers all keys and values (Llama 3, arXiv 2407.21783 §3.3.2), behind its own tiles."""

    def forward(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        partial = new_partial(query, value)
        with _gathered(call, key, value) as kv:
            attend(call, partial, query, whole_shard(call.rank, key, value), call.tiles(call.rank))
        for hop, held in enumerate(self._others(call, kv, key.size(-1)), start=1):
            attend(call, partial, query, held, call.tiles(held.source), hop)
        return partial.result()

    def backward(
        self, call: Call, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = Gradients(call, grad_out, query, key, value, out, lse)
        early, late = halves_of_heads(key)
        with _gathered(call, key, value) as kv, named_range("hop", 0):
            grads.add_own(call.tiles(call.rank), early)
        grad_kv = self._grads_of_others(call, grads, kv, key.size(-1))
        del kv  # before the sums of all ranks come
        # What the collective adds up it adds up in the dtype that it sends.
        grad_kv = grad_kv.to(grads.sent_in)
        with named_range("exchange"):
            returned, scattering = start_reduce_scatter_rows(grad_kv, call.group)
        with named_range("hop", 0):
            grads.add_own(call.tiles(call.rank), late)
        wait_for(scattering)
        grads.add_returned(returned.flatten(0, 1), range_of_keys((0, returned.size(0))))
        return grads.totals

    def _grads_of_others(self, call: Call, grads: Gradients, kv: Tensor, head_dim: int) -> Tensor:
        """This rank's part of the gradient of all keys, in the order of ``kv``."""
        grad_kv = torch.zeros_like(kv, dtype=grads.dtype)
        others = self._others(call, kv, head_dim), self._others(call, grad_kv, head_dim)
        for hop, (held, part) in enumerate(zip(*others, strict=True), start=1):
            with named_range("hop", hop):
                grads.add_part(held, call.tiles(held.source), part)
        return grad_kv

    @staticmethod
    def _others(call: Call, kv: Tensor, head_dim: int) -> Iterator[HeldKeys]:
        """The keys of every rank but this one, from (slots of all ranks, B, Hkv, D+Dv) in rank-major order."""
        for source, entries in enumerate(kv.chunk(call.layout.cp)):
            if source != call.rank:
                yield whole_shard(source, *unpack(entries, head_dim))


@contextlib.contextmanager
def _gathered(call: Call, key: Tensor, value: Tensor) -> Iterator[Tensor]:
    """Gather keys and values of all ranks while the block runs; what was sent is freed at its end."""
    with named_range("exchange"):
        kv, gathering = start_all_gather_rows(pack(key, value), call.group)
    yield kv
    wait_for(gathering)


CORES: dict[str, Strategy] = {"ring": Ring(), "exchange": ExactExchange(), "all_gather": AllGather()}


def _fitted(call: Call, query: Tensor) -> Call:
    """The call with a kernel that need not be more exact than its one result: what is exact already stays."""
    is_one_tile = lse_dtype(query.dtype) != query.dtype and call.layout.cp == 1 and len(call.tiles(0)) == 1
    return dataclasses.replace(call, kernel=call.kernel.for_one_tile) if is_one_tile else call


def attend(
    call: Call, partial: Partial, query: Tensor, held: HeldKeys, tiles: tuple[Tile, ...], hop: int = 0
) -> None:
    """Merge what the queries see in the keys, the ``hop``-th that are here."""
    with named_range("hop", hop):
        for tile in tiles:
            out, lse = forward_tile(call, held, tile, query)
            partial.merge(slice(tile.q_start, tile.q_stop), out, lse, tile.batch_rows)


def attend_steps(
    call: Call, query: Tensor, value: Tensor, walk: Iterable[tuple[Step | NodeStep, HeldKeys]]
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) over the keys of every step."""
    partial = new_partial(query, value)
    for hop, (step, held) in enumerate(walk):
        attend(call, partial, query, held, step.tiles, hop)
    return partial.result()


def new_partial(query: Tensor, value: Tensor) -> Partial:
    """What the queries have seen of no keys yet."""
    return Partial((*query.shape[:3], value.size(3)), lse_dtype(query.dtype), query.device)
