"""What each rank computes, sends and receives in each step of a ring or an exchange. Integers only.

The keys of rank s visit the ranks one after the other. A hop carries only the rows that its receiver, or a rank
after it, still reads. With head_tail layouts keys travel to the rank below: the ranks below s need all of them and
come first, the ranks above s need the first half and come last, so 25 % of the bytes are never sent (a ring in the
other direction saves half of that, since the half-readers come first). Contiguous layouts are the mirror image:
only ranks above s read its keys, so keys travel upward and stop at the last rank.

In an exchange the keys that a rank needs of another come straight from their owner, that of one distance in each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtcp.layout import SequenceLayout, slot_positions
from dtcp.mask import Mask
from dtcp.needed import NeededKeys, Rows, range_of_keys
from dtcp.remembered import remembered
from dtcp.seen import documents_of, row_groups
from dtcp.tiles import Tile


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank.

    Attributes:
        source: Rank whose keys are here in this step.
        tiles: What to compute with them.
        keys: Those of ``source`` for which this rank computes a gradient; it returns to ``source``.
        reader: Rank that has this rank's keys in this step.
        reader_keys: Those for which ``reader`` computes a gradient.
    """

    source: int
    tiles: tuple[Tile, ...]
    keys: NeededKeys
    reader: int
    reader_keys: NeededKeys


@dataclass(frozen=True, slots=True)
class Hop:
    """What moves on during a step of a ring.

    Attributes:
        send: Slots of the step's source to pass on to the next rank.
        receive: Slots of the next step's source that arrive.
    """

    send: Rows
    receive: Rows


@dataclass(frozen=True, slots=True)
class RingSchedule:
    """All steps of one rank; ``next_rank`` gets its messages, ``previous_rank`` sends to it."""

    next_rank: int
    previous_rank: int
    steps: tuple[Step, ...]
    hops: tuple[Hop, ...]


@remembered(of=documents_of)
def exchange_steps(
    layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, may_mask: bool, rank: int
) -> tuple[Step, ...]:
    """Return the steps of ``rank``, as many on every rank; step 0 is its own keys.

    Tiles number the keys that are needed (``layout.tiles(only_needed=True)``), but those of step 0.
    """
    # Note [Why a rank takes part in steps that bring it nothing]
    # Two ranks that read each other's keys send each other keys in one step and gradients after another, and what
    # tells these messages from each other is their order alone. A rank that left out steps of its own would send the
    # keys of a later step before the gradients of an earlier one, where the other expects them after.
    steps = []
    for distance in _distances(layout, kv_layout, mask):
        # Under a causal mask the ranks below need all of a rank's keys and come first, as in the ring.
        source, reader = (rank + distance) % layout.cp, (rank - distance) % layout.cp
        keys = layout.needed(rank, source, mask, kv_layout=kv_layout)
        reader_keys = layout.needed(reader, rank, mask, kv_layout=kv_layout)
        tiles = layout.tiles(rank, source, mask, kv_layout=kv_layout, may_mask=may_mask, only_needed=distance > 0)
        steps.append(Step(source, tiles, keys, reader, reader_keys))
    return tuple(steps)


@remembered(of=documents_of)
def _distances(layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask) -> tuple[int, ...]:
    """The distances at which some rank needs keys; 0 always. Costs O(cp·S): what every pair needs would cost cp²."""
    cp, num_keys, found = layout.cp, kv_layout.seq_len, {0}
    for rows in row_groups(layout, kv_layout, mask):
        row = 0 if rows is None else rows[0]
        first, stop = mask.intervals(layout.seq_len, num_keys, row)
        owners = np.empty(kv_layout.padded_seq_len, dtype=np.int64)
        for owner in range(cp):
            owners[slot_positions(kv_layout, owner, row)] = owner
        for rank in range(cp):
            queries = layout.token_positions(rank, row)
            starts, stops = (np.bincount(of[queries], minlength=num_keys + 1) for of in (first, stop))
            is_seen = (starts - stops).cumsum()[:num_keys] > 0
            holders = np.bincount(owners[:num_keys][is_seen], minlength=cp).nonzero()[0]
            found.update(((holders - rank) % cp).tolist())
        if len(found) == cp:
            break
    return tuple(sorted(found))


@remembered(of=documents_of)
def ring_schedule(
    layout: SequenceLayout, kv_layout: SequenceLayout, mask: Mask, may_mask: bool, rank: int
) -> RingSchedule:
    """Return the schedule of ``rank``; step 0 is its own keys. ``may_mask``: see ``SequenceLayout.tiles``."""
    cp = layout.cp
    direction = 1 if layout.name == "contiguous" else -1

    def source(of_rank: int, step: int) -> int:
        return (of_rank - direction * step) % cp

    def reads(of_rank: int, step: int) -> Rows:
        return layout.key_range(of_rank, source(of_rank, step), mask, kv_layout=kv_layout)

    def hop(sender: int, step: int) -> Rows:
        """Rows that leave ``sender`` during ``step``: the hull of what all later holders read."""
        later = [reads((sender + direction * i) % cp, step + i) for i in range(1, cp - step)]
        later = [rows for rows in later if rows[1] > rows[0]]
        return (min(r[0] for r in later), max(r[1] for r in later)) if later else (0, 0)

    previous_rank = (rank - direction) % cp
    steps, hops = [], []
    for step in range(cp):
        own, reader = source(rank, step), (rank + direction * step) % cp
        tiles = layout.tiles(rank, own, mask, kv_layout=kv_layout, may_mask=may_mask)
        keys, reader_keys = range_of_keys(reads(rank, step)), range_of_keys(reads(reader, step))
        steps.append(Step(own, tiles, keys, reader, reader_keys))
        hops.append(Hop(hop(rank, step), hop(previous_rank, step)))
    return RingSchedule((rank + direction) % cp, previous_rank, tuple(steps), tuple(hops))
