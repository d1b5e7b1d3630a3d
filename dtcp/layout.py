"""Who holds which tokens of a sequence, and which (query, key) rectangles follow from it.

A layout is integers only: no process group, no device. Every rank's slots are in increasing global
order, and pads sort last, so the valid slots of a rank are always a prefix of them.

    head_tail, seq_len 16, cp 4:   rank 0 [0 1 14 15]   rank 1 [2 3 12 13]   rank 2 [4 5 10 11]   rank 3 [6 7 8 9]
    per_document, lengths [4, 12], cp 2:   rank 0 [0 3 4 5 6 13 14 15]   rank 1 [1 2 7 8 9 10 11 12]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dtcp.auto_layout import choose_layout
from dtcp.documents import Documents, Integers, check_documents
from dtcp.mask import NO_WINDOW, Mask, check_window, checked_mask
from dtcp.needed import NeededKeys
from dtcp.placement import padded_len, per_document_positions, regular_positions
from dtcp.remembered import remembered
from dtcp.seen import key_range_of, needed_of, num_pairs_of, tiles_of, visible_of
from dtcp.tiles import Tile

LAYOUT_NAMES = ("contiguous", "head_tail", "striped", "per_document")
STATE_SIZE = 5  # numbers of a layout's state, before the documents that it places tokens by
COUNTER = 4  # which of them is that of a call counter (attention/calls.py), 0 for none


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Which tokens of one sequence each cp rank holds; made by ``make_layout``.

    Attributes:
        name: ``contiguous``, ``head_tail``, ``striped`` or ``per_document``.
        seq_len: Tokens of the whole sequence, without pads.
        cp: Ranks that share it.
        multiple_of: Divides ``local_seq_len``.
        placed_by: Documents that say which rank holds which tokens; None but for ``per_document``.
        merged: Adjacent ranks of the layout that it is made of whose tokens each of its ranks holds; see ``merge``.
        documents: What ``make_layout`` was given. A mask only where they are given to a call too.
        state: int64 (5,), or (5 + all of ``documents.state``) for ``per_document``: what travels through the
            attention ops. A tensor of constant shape costs torch.compile no recompilation when the next step has
            another length, or other documents.
    """

    name: str
    seq_len: int
    cp: int
    multiple_of: int = 1
    placed_by: Documents | None = None
    merged: int = 1
    documents: Documents | None = field(default=None, compare=False, repr=False)
    state: Tensor = field(init=False, compare=False, repr=False)
    padded_seq_len: int = field(init=False, compare=False)
    local_seq_len: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        padded = padded_len(self.name, self.seq_len, self.cp * self.merged, self.multiple_of)
        object.__setattr__(self, "padded_seq_len", padded)
        object.__setattr__(self, "local_seq_len", padded // self.cp)
        kind = LAYOUT_NAMES.index(self.name)
        object.__setattr__(self, "state", _state([kind, self.seq_len, self.cp, self.multiple_of, 0], self.placed_by))

    @property
    def num_rows(self) -> int:
        """Rows of a batch that have places of their own; 1 where all rows are alike."""
        return 1 if self.placed_by is None or self.placed_by.is_shared else self.placed_by.num_rows

    def positions(self, rank: int) -> Tensor:
        """Global token index of each slot of ``rank``, increasing; pads are distinct, >= seq_len.

        Returns:
            int64 (S_local,), or (num_rows, S_local) where the documents of rows differ and place their tokens.
        """
        self._check_rank(rank)
        if self.num_rows == 1:
            return torch.from_numpy(slot_positions(self, rank).copy())
        return torch.from_numpy(np.stack([slot_positions(self, rank, row) for row in range(self.num_rows)]))

    def num_valid(self, rank: int) -> int:
        """Slots of ``rank`` that hold a token; they are the first ones, equally many in each row."""
        self._check_rank(rank)
        return _num_valid(self, rank)

    def token_positions(self, rank: int, row: int = 0) -> Integers:
        """Global token index of each slot of ``rank`` that holds a token, in ``row``; not to be written to."""
        return slot_positions(self, rank, row)[: _num_valid(self, rank)]

    def inverse(self) -> Tensor:
        """int64 (seq_len,), or (num_rows, seq_len): where token t stands among all slots in rank-major order.

        That is rank·S_local + slot.
        """
        rows = [_inverse(self, row) for row in range(self.num_rows)]
        return torch.from_numpy(rows[0].copy() if self.num_rows == 1 else np.stack(rows))

    def select_rows(self, rows: slice | Sequence[int]) -> SequenceLayout:
        """The layout of some rows of a batch, of a microbatch say."""
        placed_by, documents = (d and d.select_rows(rows) for d in (self.placed_by, self.documents))
        return _make_layout(self.name, self.seq_len, self.cp, self.multiple_of, placed_by, self.merged)._with(documents)

    def merge(self, degree: int) -> SequenceLayout:
        """The layout of cp / ``degree`` ranks whose r-th holds what ``degree`` adjacent ranks from r·degree on hold.

        In increasing order, pads last: with ``degree`` = cp that is natural order. Its ``state`` does not travel.

        Raises:
            ValueError: If ``degree`` does not divide cp.
        """
        if degree < 1 or self.cp % degree:
            raise ValueError(f"a degree of merging must divide cp={self.cp}, got {degree}")
        if degree == 1:
            return self
        merged = self.merged * degree
        return _make_layout(self.name, self.seq_len, self.cp // degree, self.multiple_of, self.placed_by, merged)

    def tiles(
        self,
        q_rank: int,
        kv_rank: int,
        mask: Mask | None = None,
        *,
        is_causal: bool = False,
        kv_layout: SequenceLayout | None = None,
        may_mask: bool = True,
        only_needed: bool = False,
    ) -> tuple[Tile, ...]:
        """Rectangles that ``q_rank`` has to compute with the keys of ``kv_rank``; pads are in none of them.

        Args:
            mask: What a query may see; ``is_causal`` is short for ``Mask(is_causal=True)``.
            kv_layout: Layout of the keys where it is another one (cross attention; no causal mask and the like).
            may_mask: Whether ragged edges may become rectangles with a mask.
            only_needed: Number the keys without those that no query sees: their places among ``needed``.

        Raises:
            ValueError: If a rank is out of range, or the mask compares positions of two different sequences.
        """
        kv_layout, mask = kv_layout or self, mask or Mask(is_causal=is_causal)
        self._check_rank(q_rank)
        kv_layout._check_rank(kv_rank)
        self._check_comparable(kv_layout, mask)
        return tiles_of(self, kv_layout, mask, q_rank, kv_rank, may_mask, only_needed)

    def needed(self, q_rank: int, kv_rank: int, mask: Mask, *, kv_layout: SequenceLayout | None = None) -> NeededKeys:
        """Exactly the keys of ``kv_rank`` that some query of ``q_rank`` sees."""
        return needed_of(self, kv_layout or self, mask, q_rank, kv_rank)

    def key_range(
        self,
        q_rank: int,
        kv_rank: int,
        mask: Mask | None = None,
        *,
        is_causal: bool = False,
        kv_layout: SequenceLayout | None = None,
    ) -> tuple[int, int]:
        """Slots start..stop of ``kv_rank`` that ``tiles`` of the same arguments read; (0, 0) if none."""
        return key_range_of(self, kv_layout or self, mask or Mask(is_causal=is_causal), q_rank, kv_rank)

    def visible(
        self, q_rank: int, kv_rank: int, mask: Mask, row: int = 0, *, kv_layout: SequenceLayout | None = None
    ) -> tuple[Integers, Integers]:
        """Of each query slot of ``q_rank`` that holds a token, the key slots of ``kv_rank`` that it sees.

        Returns:
            (first, last + 1), int64 (num_valid(q_rank),) each, equal where it sees none.
        """
        return visible_of(self, kv_layout or self, mask, q_rank, kv_rank, row)

    def attended_pairs(
        self,
        is_causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        documents: Documents | None = None,
        key_lengths: Sequence[int] | None = None,
    ) -> list[int]:
        """Allowed (query, key) pairs of each rank, summed over the rows that differ: the work of its attention."""
        mask = checked_mask(is_causal=is_causal, window_size=window_size, documents=documents, key_lengths=key_lengths)
        if documents is not None:
            documents.check_fits(self.seq_len)
        return [num_pairs_of(self, mask, rank) for rank in range(self.cp)]

    def imbalance(
        self,
        is_causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        documents: Documents | None = None,
        key_lengths: Sequence[int] | None = None,
    ) -> float:
        """Pairs of the busiest rank over the mean: 1.0 is balanced, cp is one rank doing everything."""
        pairs = self.attended_pairs(is_causal, window_size, documents, key_lengths)
        return max(pairs) * self.cp / sum(pairs) if any(pairs) else 1.0

    def _with(self, documents: Documents | None) -> SequenceLayout:
        if documents is self.documents:
            return self
        return SequenceLayout(
            self.name, self.seq_len, self.cp, self.multiple_of, self.placed_by, self.merged, documents
        )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.cp:
            raise ValueError(f"rank must be in 0..{self.cp - 1} for a layout of cp={self.cp}, got {rank}")

    def _check_comparable(self, kv_layout: SequenceLayout, mask: Mask) -> None:
        if mask.documents is not None:
            mask.documents.check_fits(self.seq_len)
        if mask.is_positional and kv_layout != self:
            asked = "is_causal" if mask.is_causal else "window_size" if mask.documents is None else "documents"
            raise ValueError(
                f"{asked} needs queries and keys in one layout, got a kv_layout of "
                f"{kv_layout.name}, seq_len={kv_layout.seq_len}; leave it out or drop kv_layout"
            )


def make_layout(
    name: str,
    *,
    seq_len: int,
    cp: int,
    documents: Documents | None = None,
    multiple_of: int = 1,
    is_causal: bool = True,
    window_size: tuple[int, int] = NO_WINDOW,
) -> SequenceLayout:
    """Return the layout ``name`` of ``seq_len`` tokens over ``cp`` ranks, padded to the least multiple.

    Args:
        name: ``contiguous`` (rank r holds the r-th part), ``head_tail`` (chunks r and 2·cp−1−r of 2·cp: causal
            work is equal on every rank), ``striped`` (token i on rank i mod cp), ``per_document`` (every document
            is dealt head-tail: work is equal whatever the lengths are), or ``auto``: the one of them whose busiest
            rank has least to do, counted exactly, and the simplest of several. Its name is that of the one it took,
            and it logs why. Costs O(documents · cp) and is cached.
        seq_len: Tokens of the whole sequence, at least 1.
        documents: Where documents lie, for ``per_document`` and ``auto``. They place tokens; attention is told of them
            by its own argument: ``documents=layout.documents``.
        multiple_of: ``local_seq_len`` is a multiple of it (the tp degree under sequence parallelism).
        is_causal, window_size: The mask that attention will have, by which ``auto`` chooses; no other looks at them.

    Raises:
        ValueError: If the name is unknown, a number is not a positive int, or documents are missing or have another
            length.
    """
    if name not in (*LAYOUT_NAMES, "auto"):
        raise ValueError(f"layout must be one of {', '.join(LAYOUT_NAMES)}, auto, got {name!r}")
    for label, number in (("seq_len", seq_len), ("cp", cp), ("multiple_of", multiple_of)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{label} must be an int of at least 1, got {number!r}")
    if check_documents(documents) is not None:
        documents.check_fits(seq_len)  # type: ignore[union-attr]
    elif name == "per_document":
        raise ValueError(
            "layout='per_document' needs to know where documents lie; pass documents=dtcp.Documents.from_lengths(...)"
        )
    window = check_window(window_size, is_causal)
    if name == "auto":
        name = choose_layout(seq_len, cp, documents, multiple_of, is_causal, window)
    placed_by = documents if name == "per_document" else None
    return _make_layout(name, seq_len, cp, multiple_of, placed_by, 1)._with(documents)


def layout_from_state(state: Tensor) -> SequenceLayout:
    """Return the layout whose ``.state`` is ``state``; cached by value."""
    kind, seq_len, cp, multiple_of, _ = state[:STATE_SIZE].tolist()
    documents = Documents.from_state(state[STATE_SIZE:]) if LAYOUT_NAMES[kind] == "per_document" else None
    return _make_layout(LAYOUT_NAMES[kind], seq_len, cp, multiple_of, documents, 1)


def is_same_layout(state: Tensor, other: Tensor) -> bool:
    """Whether both are states of one layout, whoever counts its calls."""
    same = (state == other) if state.shape == other.shape else torch.zeros(1, dtype=torch.bool)
    return bool(same[:COUNTER].all()) and bool(same[STATE_SIZE:].all())


def _state(numbers: list[int], documents: Documents | None) -> Tensor:
    if torch.compiler.is_compiling():  # made inside a compiled function: part of its graph, and cached by nobody
        alone = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return alone if documents is None else torch.cat([alone, documents.state])
    # Layouts are cached: one first made in inference mode, or while tracing with fake tensors, serves training too.
    with torch.inference_mode(False), unset_fake_temporarily():
        alone = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return alone if documents is None else torch.cat([alone, documents.state])


@remembered(of=lambda *numbers: numbers[4])
def _make_layout(
    name: str, seq_len: int, cp: int, multiple_of: int, placed_by: Documents | None, merged: int
) -> SequenceLayout:
    return SequenceLayout(name, seq_len, cp, multiple_of, placed_by, merged)


@remembered(of=lambda layout, *_: layout.placed_by, maxsize=256)
def slot_positions(layout: SequenceLayout, rank: int, row: int = 0) -> Integers:
    """Global token index of each slot of ``rank`` in ``row``: what ``layout.positions`` is made of."""
    if layout.merged > 1:
        return np.sort(np.concatenate(_parts_of_merged(layout, rank, row)))
    if layout.placed_by is None:
        return regular_positions(layout.name, layout.cp, layout.local_seq_len, rank)
    return _placed_by_documents(layout.placed_by, row % layout.num_rows, layout.cp, layout.local_seq_len)[rank]


def _parts_of_merged(layout: SequenceLayout, rank: int, row: int) -> list[Integers]:
    """The positions that each of the merged ranks holds."""
    parts = _make_layout(
        layout.name, layout.seq_len, layout.cp * layout.merged, layout.multiple_of, layout.placed_by, 1
    )
    first = rank * layout.merged
    return [slot_positions(parts, first + i, row) for i in range(layout.merged)]


@remembered(of=lambda layout, *_: layout.placed_by, maxsize=256)
def merged_slots(layout: SequenceLayout, rank: int, row: int = 0) -> tuple[Integers, ...]:
    """For each rank that ``rank`` of a merged layout is made of, the slot where each of its slots lies."""
    order = np.argsort(np.concatenate(_parts_of_merged(layout, rank, row)))
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return tuple(np.split(places, layout.merged))


@remembered(of=lambda documents, *_: documents)
def _placed_by_documents(documents: Documents, row: int, cp: int, local_seq_len: int) -> list[Integers]:
    return per_document_positions(documents, row, cp, local_seq_len)


@remembered(of=lambda layout, _: layout.placed_by)
def _num_valid(layout: SequenceLayout, rank: int) -> int:
    return int(np.searchsorted(slot_positions(layout, rank), layout.seq_len))


@remembered(of=lambda layout, _: layout.placed_by, maxsize=64)
def _inverse(layout: SequenceLayout, row: int) -> Integers:
    order = np.concatenate([slot_positions(layout, r, row) for r in range(layout.cp)])
    return np.argsort(order)[: layout.seq_len]
