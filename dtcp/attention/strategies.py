"""How queries meet the keys of other ranks: ``ring`` and ``all_gather``.

Shapes: query (B, Hq, S_q, D), key (B, Hkv, S_kv, D), value (B, Hkv, S_kv, Dv), this rank's slots; lse (B, Hq, S_q).
Keys and values travel as one message, kv (S_kv, B, Hkv, D+Dv): a range of rows is one contiguous piece of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from dtcp.attention.call import Call, backward_tile, forward_tile
from dtcp.attention.comm import Exchange, Message, start_exchange
from dtcp.attention.kernels import lse_dtype
from dtcp.attention.merge import Partial, Sum
from dtcp.attention.schedule import RingSchedule, RingStep, ring_schedule
from dtcp.collectives import start_all_gather_rows, start_reduce_scatter_rows
from dtcp.tiles import Tile

STRATEGY_NAMES = ("ring", "all_gather")


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


def choose_strategy(name: str) -> Strategy:
    """Return the strategy ``name``; the caller has checked that it exists."""
    match name:
        case "ring":
            return Ring()
        case "all_gather":
            return AllGather()
        case _:
            raise AssertionError(name)


class Ring:
    """Ring attention (Liu et al., arXiv 2310.01889) over the ranks' tiles, two kv shards per rank whatever cp is.

    A step's exchange is in flight while its tiles are computed. In the backward, the keys go round once more,
    and each rank's part of a key gradient goes straight back to the owner in float32, one step later.
    """

    def forward(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        partial = _partial(query, value)
        for _, step, source_key, source_value in self._rotate(call, key, value):
            _attend(call, partial, query, step.source, source_key, source_value, step.tiles)
        return partial.result()

    def backward(
        self, call: Call, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = _Grads(call, grad_out, query, key, value, out, lse)
        schedule = _schedule(call)
        parts, arriving = grads.new_parts(2), grads.new_parts(1)[0]
        early, late = _halves_of_heads(key)
        for index, step, source_key, source_value in self._rotate(call, key, value):
            if index == 0:
                grads.add_own(step.tiles, early)
                continue
            returning = None
            if index > 1:
                returning = self._start_return(call, index - 1, parts[(index - 1) % 2], arriving)
            part = parts[index % 2]
            grads.add_part(step.source, step.tiles, source_key, source_value, part, step.grad_rows)
            if returning:
                returning.wait()
                grads.add_returned(arriving, schedule.steps[index - 1].reader_rows)
        last = call.layout.cp - 1
        # The last part has no step left to hide behind but the second half of the rank's own tiles.
        returning = self._start_return(call, last, parts[last % 2], arriving) if last else None
        grads.add_own(schedule.steps[0].tiles, late)
        if returning:
            returning.wait()
            grads.add_returned(arriving, schedule.steps[last].reader_rows)
        return grads.query.total, grads.key.total, grads.value.total

    @staticmethod
    def _rotate(call: Call, key: Tensor, value: Tensor) -> Iterator[tuple[int, RingStep, Tensor, Tensor]]:
        """Yield (number, step, key, value) of each source; the next source is on its way meanwhile."""
        schedule = _schedule(call)
        held = _pack(key, value) if call.layout.cp > 1 else key.new_empty(0)
        incoming = torch.empty_like(held)
        for index, step in enumerate(schedule.steps):
            exchange = start_exchange(
                [Message(schedule.next_rank, held[slice(*step.send)])],
                [Message(schedule.previous_rank, incoming[slice(*step.receive)])],
                call.group,
            )
            yield index, step, *((key, value) if index == 0 else _unpack(held, key.size(-1)))
            exchange.wait()
            held, incoming = incoming, held

    @staticmethod
    def _start_return(call: Call, step: int, part: Tensor, arriving: Tensor) -> Exchange:
        """Send the key gradients made in ``step`` to their owner; receive those that another rank made for this one."""
        done = _schedule(call).steps[step]
        return start_exchange(
            [Message(done.source, part[slice(*done.grad_rows)])],
            [Message(done.reader, arriving[slice(*done.reader_rows)])],
            call.group,
        )


class AllGather:
    """Every rank gathers all keys and values (Llama 3, arXiv 2407.21783 §3.3.2), behind its own tiles."""

    def forward(self, call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        partial = _partial(query, value)
        kv, gathering = start_all_gather_rows(_pack(key, value), call.group)
        _attend(call, partial, query, call.rank, key, value, call.tiles(call.rank))
        gathering.wait()
        for source, source_kv in self._others(call, kv):
            _attend(call, partial, query, source, *_unpack(source_kv, key.size(-1)), call.tiles(source))
        return partial.result()

    def backward(
        self, call: Call, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = _Grads(call, grad_out, query, key, value, out, lse)
        kv, gathering = start_all_gather_rows(_pack(key, value), call.group)
        early, late = _halves_of_heads(key)
        grads.add_own(call.tiles(call.rank), early)
        gathering.wait()
        grad_kv = torch.zeros_like(kv, dtype=grads.dtype)
        for (source, source_kv), (_, part) in zip(self._others(call, kv), self._others(call, grad_kv), strict=True):
            rows = call.key_range(source)
            grads.add_part(source, call.tiles(source), *_unpack(source_kv, key.size(-1)), part, rows)
        returned, scattering = start_reduce_scatter_rows(grad_kv, call.group)
        grads.add_own(call.tiles(call.rank), late)
        scattering.wait()
        grads.add_returned(returned, (0, returned.size(0)))
        return grads.query.total, grads.key.total, grads.value.total

    @staticmethod
    def _others(call: Call, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, its rows) of every rank but this one, from rows in rank-major order."""
        return ((s, r) for s, r in enumerate(rows.chunk(call.layout.cp)) if s != call.rank)


class _Grads:
    """The gradients that one rank adds up: of its own query, key and value, and its parts of others' keys."""

    def __init__(
        self, call: Call, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        self.dtype = lse_dtype(query.dtype)
        self._call, self._own = call, (key, value)
        self._rows = (grad_out, query, out, lse)
        self.query, self.key, self.value = (Sum(x.shape, self.dtype, x.device) for x in (query, key, value))

    def new_parts(self, count: int) -> list[Tensor]:
        """Buffers for the gradient of one rank's packed keys and values."""
        if self._call.layout.cp == 1:
            count = 0
        key, value = self._own
        shape = (key.size(2), *key.shape[:2], key.size(3) + value.size(3))
        return [key.new_empty(shape, dtype=self.dtype) for _ in range(count)] or [key.new_empty(0)]

    def add_own(self, tiles: tuple[Tile, ...], heads: slice) -> None:
        """Add the gradients of this rank's own tiles, for the key heads ``heads``."""
        if heads.start == heads.stop:
            return
        key, value = (x[:, heads] for x in self._own)
        for tile, grad_key, grad_value in self._backward(self._call.rank, tiles, key, value, heads):
            rows, keys = _rows_and_keys(tile)
            self.key.add(keys, grad_key, heads, rows)
            self.value.add(keys, grad_value, heads, rows)

    def add_part(
        self, source: int, tiles: tuple[Tile, ...], key: Tensor, value: Tensor, part: Tensor, rows: tuple[int, int]
    ) -> None:
        """Put the gradient of the packed keys of ``source`` into the ``rows`` of ``part`` that the tiles read."""
        part[slice(*rows)].zero_()
        part_key, part_value = _unpack(part, key.size(-1))
        for tile, grad_key, grad_value in self._backward(source, tiles, key, value, slice(0, key.size(1))):
            of_batch, keys = _rows_and_keys(tile)
            part_key[of_batch, :, keys].add_(grad_key)
            part_value[of_batch, :, keys].add_(grad_value)

    def add_returned(self, part: Tensor, rows: tuple[int, int]) -> None:
        """Add what another rank computed for this rank's keys."""
        keys = slice(*rows)
        returned_key, returned_value = _unpack(part[keys], self._own[0].size(-1))
        self.key.add(keys, returned_key)
        self.value.add(keys, returned_value)

    def _backward(
        self, source: int, tiles: tuple[Tile, ...], key: Tensor, value: Tensor, heads: slice
    ) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        """Add each tile's query gradient; yield it, its key gradient and its value gradient."""
        group_size = self.query.total.size(1) // self.key.total.size(1)
        query_heads = slice(heads.start * group_size, heads.stop * group_size)
        of_queries = tuple(x[:, query_heads] for x in self._rows)
        head_range = range(query_heads.start, query_heads.stop)
        for tile in tiles:
            grad_query, grad_key, grad_value = backward_tile(
                self._call, source, tile, head_range, of_queries, key, value
            )
            rows, _ = _rows_and_keys(tile)
            self.query.add(slice(tile.q_start, tile.q_stop), grad_query, query_heads, rows)
            yield tile, grad_key, grad_value


def _schedule(call: Call) -> RingSchedule:
    return ring_schedule(call.layout, call.kv_layout, call.mask, call.kernel.takes_masks, call.rank)


def _rows_and_keys(tile: Tile) -> tuple[slice, slice]:
    return slice(None) if tile.rows is None else slice(*tile.rows), slice(tile.kv_start, tile.kv_stop)


def _attend(
    call: Call, partial: Partial, query: Tensor, source: int, key: Tensor, value: Tensor, tiles: tuple[Tile, ...]
) -> None:
    """Merge what the queries see in the keys of ``source``."""
    for tile in tiles:
        out, lse = forward_tile(call, source, tile, query, key, value)
        partial.merge(slice(tile.q_start, tile.q_stop), out, lse, _rows_and_keys(tile)[0])


def _partial(query: Tensor, value: Tensor) -> Partial:
    return Partial((*query.shape[:3], value.size(3)), lse_dtype(query.dtype), query.device)


def _pack(key: Tensor, value: Tensor) -> Tensor:
    batch, heads, seq_len, head_dim = key.shape
    kv = key.new_empty(seq_len, batch, heads, head_dim + value.size(3))
    for part, x in zip(_unpack(kv, head_dim), (key, value), strict=True):
        part.copy_(x)
    return kv


def _unpack(kv: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    kv = kv.permute(1, 2, 0, 3)
    return kv[..., :head_dim], kv[..., head_dim:]


def _halves_of_heads(key: Tensor) -> tuple[slice, slice]:
    """Key heads to do before and after the exchange that the second half hides; one head stays whole."""
    middle = -(-key.size(1) // 2)
    return slice(0, middle), slice(middle, key.size(1))
