"""Keys and values of one rank that another has at hand, whole or only those that it needs.

Shapes: key (B, Hkv, S_kv, D), value (B, Hkv, S_kv, Dv). On the way they are one tensor of entries: (slot, row, Hkv,
D+Dv), the rows of a batch that need the same slots together; slots in increasing order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dtcp.needed import NeededKeys, Rows
from dtcp.tiles import Tile


@dataclass(frozen=True, slots=True)
class HeldKeys:
    """Keys and values, or their gradients, that the tiles of ``source`` read.

    Attributes:
        parts: By batch rows, those of a tile: (key, value, number of the tiles' first key in them). Of ``None`` are
            all rows that have no part of their own.
        only_needed: Whether keys are numbered without those that nobody here needs, as in ``layout.tiles``.
    """

    source: int
    parts: dict[Rows | None, tuple[Tensor, Tensor, int]]
    only_needed: bool = False

    def of(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The tile's (key, value), views."""
        own = self.parts.get(tile.rows)
        if own is None:
            key, value, first = self.parts[None]
            key, value = key[tile.batch_rows], value[tile.batch_rows]
        else:
            key, value, first = own
        keys = slice(tile.kv_start - first, tile.kv_stop - first)
        return key[:, :, keys], value[:, :, keys]


def whole_shard(source: int, key: Tensor, value: Tensor) -> HeldKeys:
    """All keys of ``source``."""
    return HeldKeys(source, {None: (key, value, 0)})


def held_entries(source: int, entries: Tensor, needed: NeededKeys, batch_size: int, head_dim: int) -> HeldKeys:
    """Entries of the keys ``needed``, for tiles of ``only_needed``."""
    parts, start = {}, 0
    for rows, runs in needed.groups:
        num_rows = batch_size if rows is None else rows[1] - rows[0]
        num_slots = sum(last - first for first, last in runs)
        stop = start + num_slots * num_rows
        part = entries[start:stop].view(num_slots, num_rows, *entries.shape[1:])
        parts[rows] = (*unpack(part, head_dim), 0)
        start = stop
    return HeldKeys(source, parts, only_needed=True)


def held_range(source: int, entries: Tensor, slots: Rows, batch_size: int, head_dim: int) -> HeldKeys:
    """Entries of the slots start..stop of all rows, for tiles that number all keys."""
    part = entries.view(slots[1] - slots[0], batch_size, *entries.shape[1:])
    return HeldKeys(source, {None: (*unpack(part, head_dim), slots[0])})


def pack(key: Tensor, value: Tensor, slots: Rows | None = None) -> Tensor:
    """Keys and values of the slots start..stop as (slots, B, Hkv, D+Dv)."""
    start, stop = slots or (0, key.size(2))
    batch, heads, _, head_dim = key.shape
    kv = key.new_empty(stop - start, batch, heads, head_dim + value.size(3))
    for part, x in zip(unpack(kv, head_dim), (key, value), strict=True):
        part.copy_(x[:, :, start:stop])
    return kv


def unpack(kv: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """(slots, B, Hkv, D+Dv) as key (B, Hkv, slots, D) and value (B, Hkv, slots, Dv), views."""
    kv = kv.permute(1, 2, 0, 3)
    return kv[..., :head_dim], kv[..., head_dim:]


def entries_of(kv: Tensor, needed: NeededKeys, first: int = 0) -> Tensor:
    """The entries that somebody needs, (entries, Hkv, D+Dv); a view where they lie together.

    Args:
        kv: (slots, B, Hkv, D+Dv), from the slot ``first`` on.
    """
    chosen = [
        kv[start - first : stop - first, slice(None) if rows is None else slice(*rows)].flatten(0, 1)
        for rows, runs in needed.groups
        for start, stop in runs
    ]
    if len(chosen) == 1:
        return chosen[0].contiguous()
    return torch.cat(chosen) if chosen else kv.new_empty(0, *kv.shape[2:])
