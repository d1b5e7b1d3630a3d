"""One attention call on one rank: what it is about, and how a tile of it is computed.

Shapes: query (B, Hq, S_q, D), key (B, Hkv, S_kv, D), value (B, Hkv, S_kv, Dv); lse (B, Hq, S_q).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtcp.attention.calls import own_tiles
from dtcp.attention.dropout import CallDropout, tile_dropout
from dtcp.attention.held import HeldKeys
from dtcp.attention.kernels import Kernel
from dtcp.attention.kernels.math import MathKernel
from dtcp.attention.scores import Modifiers, TileScores
from dtcp.documents import Integers
from dtcp.layout import SequenceLayout, slot_positions
from dtcp.mask import Mask
from dtcp.needed import NeededKeys, compacted, slots_of
from dtcp.ranges import named_range
from dtcp.seen import row_groups
from dtcp.tiles import Tile

NO_MODIFIERS = Modifiers()


@dataclass(frozen=True, slots=True)
class Call:
    """What one attention call is about, besides its tensors.

    Attributes:
        kv_grad_dtype: In which gradients of keys and values travel; None for that of their sums.
        merged: Ranks of the group for each rank of the layouts, whose tokens an all-to-all has brought together.
    """

    group: dist.ProcessGroup
    layout: SequenceLayout
    kv_layout: SequenceLayout
    mask: Mask
    scale: float
    kernel: Kernel
    dropout: CallDropout | None = None
    modifiers: Modifiers = NO_MODIFIERS
    kv_grad_dtype: torch.dtype | None = None
    merged: int = 1

    @property
    def rank(self) -> int:
        """Of the layouts."""
        return self.group.rank() // self.merged

    def peer(self, rank: int) -> int:
        """The rank of the group that has the same heads of ``rank``'s tokens as this one has of its own."""
        return rank * self.merged + self.group.rank() % self.merged

    @property
    def may_see_nothing(self) -> bool:
        """Whether a token may see no key at all."""
        return self.mask != Mask(is_causal=self.mask.is_causal) or not self.modifiers.are_none

    def tiles(self, source: int, *, only_needed: bool = False) -> tuple[Tile, ...]:
        """What this rank computes with the keys of ``source``."""
        return self.layout.tiles(
            self.rank, source, self.mask, kv_layout=self.kv_layout, may_mask=self.kernel.takes_masks,
            only_needed=only_needed,
        )  # fmt: skip

    def needed(self, q_rank: int, kv_rank: int) -> NeededKeys:
        """The keys of ``kv_rank`` that some query of ``q_rank`` sees."""
        return self.layout.needed(q_rank, kv_rank, self.mask, kv_layout=self.kv_layout)


def forward_tile(call: Call, held: HeldKeys, tile: Tile, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a tile's queries over its keys."""
    step = _TileStep(call, held, tile, range(query.size(1)), query)
    key, value = held.of(tile)
    with own_tiles, named_range("attend"):
        out, lse = step.kernel.forward(
            step.queries(query), step.turned(key), step.turned(value), is_causal=step.is_causal, scale=call.scale,
            scores=step.scores,
        )  # fmt: skip
    return step.turned(out), step.turned(lse)


def backward_tile(
    call: Call, held: HeldKeys, tile: Tile, heads: range, of_queries: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tile's part of (grad_query, grad_key, grad_value).

    Args:
        heads: Query heads of the rank that all tensors are of.
        of_queries: grad_out, query, out and lse.
    """
    step = _TileStep(call, held, tile, heads, of_queries[1])
    grad_out, query, out, lse = (step.queries(x) for x in of_queries)
    key, value = held.of(tile)
    with named_range("attend"):
        grads = step.kernel.backward(
            grad_out, query, step.turned(key), step.turned(value), out, lse, is_causal=step.is_causal,
            scale=call.scale, scores=step.scores,
        )  # fmt: skip
    grad_query, grad_key, grad_value = (step.turned(grad) for grad in grads)
    return grad_query, grad_key, grad_value


class _TileStep:
    """How one tile is given to a kernel."""

    def __init__(self, call: Call, held: HeldKeys, tile: Tile, heads: range, like: Tensor) -> None:
        self._tile = tile
        rows = range(like.size(0)) if tile.rows is None else range(*tile.rows)
        is_dropped = call.dropout is not None
        is_ragged = tile.kind == "masked" or not call.modifiers.are_none or (is_dropped and tile.kind == "anticausal")
        self.scores = _tile_scores(call, held, tile, rows, heads, like.device) if is_ragged else None
        self.is_causal = not is_ragged and tile.kind != "full"
        # Seen from its last query and key, an anticausal tile is a causal one.
        self._is_reversed = not is_ragged and tile.kind == "anticausal"
        self.kernel = _dropping_kernel(call, held, tile, rows, heads) if is_dropped else call.kernel

    def queries(self, x: Tensor) -> Tensor:
        return self.turned(x[self._tile.batch_rows, :, self._tile.q_start : self._tile.q_stop])

    def turned(self, x: Tensor) -> Tensor:
        """Queries or keys of the tile, or what is made of them, the way that the kernel wants them and back."""
        return x.flip(2) if self._is_reversed else x


def _dropping_kernel(call: Call, held: HeldKeys, tile: Tile, rows: range, heads: range) -> Kernel:
    assert call.dropout is not None
    p, keys, first = call.dropout.p, call.dropout.keys, call.dropout.head_offset
    own = keys[rows.start : rows.stop, tile.q_start : tile.q_stop]
    positions = _key_positions(call, held, tile, rows)
    return MathKernel(tile_dropout(p, own, range(first + heads.start, first + heads.stop), positions))


def _key_positions(call: Call, held: HeldKeys, tile: Tile, rows: range) -> Tensor:
    """Global positions of the tile's keys, which are the same in all ``rows``."""
    positions = slot_positions(call.kv_layout, held.source, rows.start)
    if held.only_needed:
        runs = dict(call.needed(call.rank, held.source).groups)[tile.rows]
        positions = positions[slots_of(runs)]
    return torch.from_numpy(positions[tile.kv_start : tile.kv_stop])


def _tile_scores(call: Call, held: HeldKeys, tile: Tile, rows: range, heads: range, device: torch.device) -> TileScores:
    queries = slot_positions(call.layout, call.rank, rows.start)[tile.q_start : tile.q_stop]
    return TileScores(
        *_bounds(call, held, tile, rows.start),
        modifiers=call.modifiers,
        rows=rows,
        heads=heads,
        q_start=tile.q_start,
        q_positions=torch.from_numpy(queries).to(device),
        kv_positions=_key_positions(call, held, tile, rows).to(device),
    )


def _bounds(call: Call, held: HeldKeys, tile: Tile, row: int) -> tuple[Integers, Integers]:
    """The keys of the tile that each of its queries sees."""
    index = np.arange(tile.num_queries)
    match tile.kind:
        case "full":
            return np.zeros_like(index), np.full_like(index, tile.num_keys)
        case "causal":
            return np.zeros_like(index), index + 1
        case "anticausal":
            return index, np.full_like(index, tile.num_keys)
        case _:
            bounds = call.layout.visible(call.rank, held.source, call.mask, row, kv_layout=call.kv_layout)
            if held.only_needed:
                bounds = compacted(*bounds)
            queries = slice(tile.q_start, tile.q_stop)
            lower, upper = ((x[queries] - tile.kv_start).clip(0, tile.num_keys) for x in bounds)
            return lower, upper


def without_padding(call: Call, side: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with 0 for tokens that are padding: whatever they hold, under a mask a NaN would stay one.

    Args:
        side: 0 for tensors of queries, 1 for tensors of keys.
    """
    if not call.mask.leaves_some_unseen:
        return tensors
    slots = _at_slots(call, (call.layout, call.kv_layout)[side], side, tensors[0].device)
    return tuple(x.masked_fill(slots, 0) for x in tensors)


def _at_slots(call: Call, layout: SequenceLayout, side: int, device: torch.device) -> Tensor:
    """Which of this rank's slots are padding, bool (B or 1, 1, S_local, 1)."""
    groups = row_groups(call.layout, call.kv_layout, call.mask)
    num_valid, slots = layout.num_valid(call.rank), []
    for rows in groups:
        start, stop = rows or (0, 1)
        unused = call.mask.unused(call.layout.seq_len, call.kv_layout.seq_len, start)[side]
        held = unused[slot_positions(layout, call.rank, start)[:num_valid]]
        slots += [np.pad(held, (0, layout.local_seq_len - num_valid))] * (stop - start)
    return torch.from_numpy(np.stack(slots)).to(device)[:, None, :, None]
