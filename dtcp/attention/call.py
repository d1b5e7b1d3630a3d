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
from dtcp.attention.kernels import Kernel
from dtcp.attention.kernels.math import MathKernel
from dtcp.attention.scores import Modifiers, TileScores
from dtcp.documents import Integers
from dtcp.layout import SequenceLayout, row_groups, slot_positions
from dtcp.mask import Mask
from dtcp.tiles import Tile

NO_MODIFIERS = Modifiers()


@dataclass(frozen=True, slots=True)
class Call:
    """What one attention call is about, besides its tensors."""

    group: dist.ProcessGroup
    layout: SequenceLayout
    kv_layout: SequenceLayout
    mask: Mask
    scale: float
    kernel: Kernel
    dropout: CallDropout | None = None
    modifiers: Modifiers = NO_MODIFIERS

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def may_see_nothing(self) -> bool:
        """Whether a token may see no key at all."""
        return self.mask != Mask(is_causal=self.mask.is_causal) or not self.modifiers.are_none

    def tiles(self, source: int) -> tuple[Tile, ...]:
        """What this rank computes with the keys of ``source``."""
        return self.layout.tiles(
            self.rank, source, self.mask, kv_layout=self.kv_layout, may_mask=self.kernel.takes_masks
        )

    def key_range(self, source: int) -> tuple[int, int]:
        """Slots of ``source`` that those tiles read."""
        return self.layout.key_range(self.rank, source, self.mask, kv_layout=self.kv_layout)


def forward_tile(
    call: Call, source: int, tile: Tile, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a tile's queries over its keys, which are those of ``source``."""
    step = _TileStep(call, source, tile, range(query.size(1)), query)
    with own_tiles:
        out, lse = step.kernel.forward(
            step.queries(query), step.keys(key), step.keys(value), is_causal=step.is_causal, scale=call.scale,
            scores=step.scores,
        )  # fmt: skip
    return step.restored(out), step.restored(lse)


def backward_tile(
    call: Call, source: int, tile: Tile, heads: range, of_queries: tuple[Tensor, ...], key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tile's part of (grad_query, grad_key, grad_value).

    Args:
        heads: Query heads of the rank that all tensors are of.
        of_queries: grad_out, query, out and lse.
    """
    step = _TileStep(call, source, tile, heads, key)
    grad_out, query, out, lse = (step.queries(x) for x in of_queries)
    grads = step.kernel.backward(
        grad_out, query, step.keys(key), step.keys(value), out, lse, is_causal=step.is_causal, scale=call.scale,
        scores=step.scores,
    )  # fmt: skip
    grad_query, grad_key, grad_value = (step.restored(grad) for grad in grads)
    return grad_query, grad_key, grad_value


class _TileStep:
    """How one tile is given to a kernel."""

    def __init__(self, call: Call, source: int, tile: Tile, heads: range, like: Tensor) -> None:
        self._tile = tile
        self._rows = slice(None) if tile.rows is None else slice(*tile.rows)
        rows = range(like.size(0)) if tile.rows is None else range(*tile.rows)
        is_dropped = call.dropout is not None
        is_ragged = tile.kind == "masked" or not call.modifiers.are_none or (is_dropped and tile.kind == "anticausal")
        self.scores = _tile_scores(call, source, tile, rows, heads, like.device) if is_ragged else None
        self.is_causal = not is_ragged and tile.kind != "full"
        # Seen from its last query and key, an anticausal tile is a causal one.
        self._is_reversed = not is_ragged and tile.kind == "anticausal"
        self.kernel = _dropping_kernel(call, source, tile, rows, heads) if is_dropped else call.kernel

    def queries(self, x: Tensor) -> Tensor:
        part = x[self._rows, :, self._tile.q_start : self._tile.q_stop]
        return part.flip(2) if self._is_reversed else part

    def keys(self, x: Tensor) -> Tensor:
        part = x[self._rows, :, self._tile.kv_start : self._tile.kv_stop]
        return part.flip(2) if self._is_reversed else part

    def restored(self, x: Tensor) -> Tensor:
        return x.flip(2) if self._is_reversed else x


def _dropping_kernel(call: Call, source: int, tile: Tile, rows: range, heads: range) -> Kernel:
    assert call.dropout is not None
    p, keys, first = call.dropout.p, call.dropout.keys, call.dropout.head_offset
    own = keys[rows.start : rows.stop, tile.q_start : tile.q_stop]
    positions = _positions(call.kv_layout, source, rows, tile.kv_start, tile.kv_stop)
    return MathKernel(tile_dropout(p, own, range(first + heads.start, first + heads.stop), positions))


def _positions(layout: SequenceLayout, rank: int, rows: range, start: int, stop: int) -> Tensor:
    """Global positions of some slots, which are the same in all ``rows``."""
    return torch.from_numpy(slot_positions(layout, rank, rows.start)[start:stop])


def _tile_scores(call: Call, source: int, tile: Tile, rows: range, heads: range, device: torch.device) -> TileScores:
    return TileScores(
        *_bounds(call, source, tile, rows.start),
        modifiers=call.modifiers,
        rows=rows,
        heads=heads,
        q_start=tile.q_start,
        q_positions=_positions(call.layout, call.rank, rows, tile.q_start, tile.q_stop).to(device),
        kv_positions=_positions(call.kv_layout, source, rows, tile.kv_start, tile.kv_stop).to(device),
    )


def _bounds(call: Call, source: int, tile: Tile, row: int) -> tuple[Integers, Integers]:
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
            lower, upper = call.layout.visible(call.rank, source, call.mask, row, kv_layout=call.kv_layout)
            queries = slice(tile.q_start, tile.q_stop)
            return (lower[queries] - tile.kv_start).clip(0, tile.num_keys), (upper[queries] - tile.kv_start).clip(
                0, tile.num_keys
            )


def without_padding(
    call: Call, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return the tensors with 0 for tokens that are padding: whatever they hold, under a mask a NaN would stay one."""
    given = query, key, value, *(() if grad_out is None else (grad_out,))
    if not call.mask.leaves_some_unseen:
        return given
    unseeing = _at_slots(call, call.layout, 0, query.device)
    unseen = _at_slots(call, call.kv_layout, 1, key.device)
    return tuple(x.masked_fill(unseen if x is key or x is value else unseeing, 0) for x in given)


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
