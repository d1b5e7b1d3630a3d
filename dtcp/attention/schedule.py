"""What each rank computes, sends and receives in each step of the ring. Integers only.

The keys of rank s visit the ranks one after the other. A hop carries only the rows that its receiver, or a rank
after it, still reads. With head_tail layouts keys travel to the rank below: the ranks below s need all of them and
come first, the ranks above s need the first half and come last, so 25 % of the bytes are never sent (a ring in the
other direction saves half of that, since the half-readers come first). Contiguous layouts are the mirror image:
only ranks above s read its keys, so keys travel upward and stop at the last rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtcp.layout import SequenceLayout
from dtcp.mask import Mask
from dtcp.remembered import remembered
from dtcp.tiles import Tile

Rows = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RingStep:
    """One step of one rank.

    Attributes:
        source: Rank whose keys are here in this step.
        tiles: What to compute with them.
        send: Rows of ``source`` to pass on to the next rank during this step.
        receive: Rows of the next step's source that arrive during this step.
        grad_rows: Rows of ``source`` for which this rank computes a key gradient; they return to ``source``.
        reader: Rank that holds this rank's keys in this step.
        reader_rows: Rows of this rank for which ``reader`` computes a key gradient.
    """

    source: int
    tiles: tuple[Tile, ...]
    send: Rows
    receive: Rows
    grad_rows: Rows
    reader: int
    reader_rows: Rows


@dataclass(frozen=True, slots=True)
class RingSchedule:
    """All steps of one rank; ``next_rank`` gets its messages, ``previous_rank`` sends to it."""

    next_rank: int
    previous_rank: int
    steps: tuple[RingStep, ...]


@remembered(of=lambda layout, kv_layout, mask, *_: mask.documents or layout.placed_by or kv_layout.placed_by)
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
    steps = []
    for step in range(cp):
        own, reader = source(rank, step), (rank + direction * step) % cp
        steps.append(
            RingStep(
                source=own,
                tiles=layout.tiles(rank, own, mask, kv_layout=kv_layout, may_mask=may_mask),
                send=hop(rank, step),
                receive=hop(previous_rank, step),
                grad_rows=reads(rank, step),
                reader=reader,
                reader_rows=reads(reader, step),
            )
        )
    return RingSchedule((rank + direction) % cp, previous_rank, tuple(steps))
