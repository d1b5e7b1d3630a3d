"""Which tokens a rank needs from before and after its own, and who sends them. Integers only.

A *run* is a stretch of tokens of one document that a rank holds in a row. Extended by the tokens around it, each run
stands on its own: `left` slots, the run, `right` slots. What lies in another document, or before or behind the
sequence, is no token: such a slot is filled. Slots that are in no document, pads and padding, come last as one run more
of filled slots, so that nothing is read from them nor through them.

    striped, seq_len 8, cp 2, left 2: rank 0 holds 0 2 4 6, its extended slots are  · · 0  0 1 2  2 3 4  4 5 6
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtcp.documents import Documents, Integers
from dtcp.layout import SequenceLayout, slot_positions
from dtcp.mask import Mask
from dtcp.remembered import remembered

FILLED = -1  # in the place of a position: a slot of no token


@dataclass(frozen=True, slots=True)
class HaloPlan:
    """What one rank does. Table rows are its slots, row after row of the batch: row·S_local + slot.

    Attributes:
        slots: int64 (rows, S_local), where each local slot stands among the extended ones.
        source: int64 (rows·E,), of each extended slot, the row among those of the table, then those received, then
            one filled.
        send: int64 (n,), rows of the table to send, by receiver.
        num_sent, num_received: Rows for, and from, each rank.
        num_slots: E, extended slots of each row.
    """

    slots: Integers
    source: Integers
    send: Integers
    num_sent: list[int]
    num_received: list[int]
    num_slots: int


def num_slots_at_most(layout: SequenceLayout, has_documents: bool, left: int, right: int) -> int:
    """Extended slots of a rank that are enough whatever the documents are: no content is looked at."""
    if has_documents or layout.name in ("striped", "per_document"):
        num_runs = layout.local_seq_len
    else:
        num_runs = 2 if layout.name == "head_tail" else 1
    return layout.local_seq_len + (num_runs + 1) * (left + right)


@remembered(of=lambda layout, documents, *_: documents or layout.placed_by, maxsize=64)
def plan_halo(
    layout: SequenceLayout, documents: Documents | None, left: int, right: int, num_rows: int, rank: int
) -> HaloPlan:
    """The plan of ``rank`` for ``num_rows`` rows; 1 where all rows of a batch are alike."""
    extended = [_extend_rows(layout, documents, left, right, num_rows, r) for r in range(layout.cp)]
    num_slots = max(len(positions) for positions, _ in extended[rank])
    size = layout.seq_len
    needed = [_needed(layout, rows, r) for r, rows in enumerate(extended)]
    # A token of a row is row·S + position; its place is row·(cp·S_local) + rank·S_local + slot.
    first_places = np.arange(num_rows)[:, np.newaxis] * layout.padded_seq_len
    place = (np.atleast_2d(layout.inverse().numpy()) + first_places).reshape(-1)
    local = layout.local_seq_len

    def owner(tokens: Integers) -> Integers:
        return place[tokens] % layout.padded_seq_len // local

    def table_row(tokens: Integers) -> Integers:
        return place[tokens] // layout.padded_seq_len * local + place[tokens] % local

    sends = [table_row(tokens[owner(tokens) == rank]) if r != rank else tokens[:0] for r, tokens in enumerate(needed)]
    received = needed[rank][np.argsort(owner(needed[rank]), kind="stable")]
    source_of = np.full(num_rows * size + 1, num_rows * local + len(received), dtype=np.int64)  # the last is filled
    own = np.flatnonzero(owner(np.arange(num_rows * size)) == rank)
    source_of[own] = table_row(own)
    source_of[received] = num_rows * local + np.arange(len(received))
    tokens = np.full((num_rows, num_slots), FILLED, dtype=np.int64)
    for row, (positions, _) in enumerate(extended[rank]):
        tokens[row, : len(positions)] = np.where(positions == FILLED, FILLED, positions + row * size)
    return HaloPlan(
        slots=np.stack([slots for _, slots in extended[rank]]),
        source=source_of[tokens.reshape(-1)],
        send=np.concatenate(sends),
        num_sent=[len(rows) for rows in sends],
        num_received=np.bincount(owner(received), minlength=layout.cp).tolist(),
        num_slots=num_slots,
    )


def _needed(layout: SequenceLayout, rows: list[tuple[Integers, Integers]], rank: int) -> Integers:
    """Tokens (row·S + position) that ``rank`` has to receive, increasing."""
    found = []
    for row, (positions, _) in enumerate(rows):
        wanted = np.zeros(layout.seq_len, dtype=bool)
        wanted[positions[positions != FILLED]] = True
        held = slot_positions(layout, rank, row)
        wanted[held[held < layout.seq_len]] = False
        found.append(np.flatnonzero(wanted) + row * layout.seq_len)
    return np.concatenate(found)


def _extend_rows(
    layout: SequenceLayout, documents: Documents | None, left: int, right: int, num_rows: int, rank: int
) -> list[tuple[Integers, Integers]]:
    size, document = layout.seq_len, Mask(documents=documents)  # (first, last + 1) token of that of each token
    return [
        extend(slot_positions(layout, rank, row), *document.intervals(size, size, row), left, right)
        for row in range(num_rows)
    ]


def extend(held: Integers, first: Integers, stop: Integers, left: int, right: int) -> tuple[Integers, Integers]:
    """Return (position of each extended slot or ``FILLED``, extended slot of each of ``held``)."""
    is_token = held < len(first)
    is_token[is_token] = stop[held[is_token]] > first[held[is_token]]
    tokens, num_filled = held[is_token], int((~is_token).sum())
    is_start = (np.diff(tokens, prepend=-2) != 1) | (first[tokens] == tokens)
    run = is_start.cumsum() - 1  # of each token
    slots = np.empty(len(held), dtype=np.int64)
    slots[is_token] = np.arange(len(tokens)) + run * (left + right) + left
    num_runs = int(is_start.sum())
    behind = len(tokens) + num_runs * (left + right)
    slots[~is_token] = behind + left + np.arange(num_filled)

    run_start = tokens[is_start]
    run_slots = np.bincount(run, minlength=num_runs) + left + right
    begins = np.concatenate([[0], run_slots.cumsum()])[:-1]
    positions = np.arange(behind) + np.repeat(run_start - left - begins, run_slots)
    first, stop = (np.repeat(bound[run_start], run_slots) for bound in (first, stop))
    positions[(positions < first) | (positions >= stop)] = FILLED
    if num_filled:
        positions = np.concatenate([positions, np.full(num_filled + left + right, FILLED)])
    return positions, slots
