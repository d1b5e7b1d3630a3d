"""Which keys of another rank some query sees, as runs of slots. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtcp.documents import Integers

Rows = tuple[int, int]
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class NeededKeys:
    """Some keys of one rank.

    Attributes:
        groups: (batch rows (start, stop), None for all; their slots as runs (start, stop), increasing), without those
            that need nothing.
    """

    groups: tuple[tuple[Rows | None, Runs], ...]

    def num_entries(self, batch_size: int) -> int:
        """How many (row, slot) these are."""
        return sum(
            sum(stop - start for start, stop in runs) * (batch_size if rows is None else rows[1] - rows[0])
            for rows, runs in self.groups
        )

    def hull(self) -> Rows:
        """First slot and last + 1 of any row; (0, 0) if there are none."""
        if not self.groups:
            return 0, 0
        return min(runs[0][0] for _, runs in self.groups), max(runs[-1][1] for _, runs in self.groups)


def range_of_keys(slots: Rows) -> NeededKeys:
    """The slots start..stop of all rows."""
    return NeededKeys(((None, (slots,)),) if slots[1] > slots[0] else ())


def runs_of(lower: Integers, upper: Integers) -> Runs:
    """The union of the intervals ``lower[i] <= j < upper[i]``, none of whose bounds falls where it is not empty."""
    sees = upper > lower
    lower, upper = lower[sees], upper[sees]
    if not len(lower):
        return ()
    breaks = np.flatnonzero(lower[1:] > upper[:-1])
    starts, stops = lower[np.concatenate([[0], breaks + 1])], upper[np.append(breaks, len(upper) - 1)]
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def compacted(lower: Integers, upper: Integers) -> tuple[Integers, Integers]:
    """The same intervals where only the keys that are in one of them are numbered."""
    runs = runs_of(lower, upper)
    if not runs:
        return np.zeros_like(lower), np.zeros_like(upper)
    starts, stops = np.array(runs, dtype=np.int64).T
    ends = (stops - starts).cumsum()
    places = ends - (stops - starts)  # of the first key of each run
    run = (np.searchsorted(starts, lower, side="right") - 1).clip(0)
    first = places[run] + lower - starts[run]
    width = np.maximum(upper - lower, 0)
    first = np.where(width > 0, first, 0)
    return first, first + width


def slots_of(runs: Runs) -> Integers:
    """Every slot of the runs."""
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in runs])
