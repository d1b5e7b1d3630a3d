"""Who holds which tokens of a sequence, and which (query, key) rectangles follow from it.

A layout is integers only: no process group, no device. Every rank's slots are in increasing global
order, and pads sort last, so the valid slots of a rank are always a prefix of them.

    head_tail, seq_len 16, cp 4:   rank 0 [0 1 14 15]   rank 1 [2 3 12 13]   rank 2 [4 5 10 11]   rank 3 [6 7 8 9]
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

Integers = npt.NDArray[np.int64]

LAYOUT_NAMES = ("contiguous", "head_tail", "striped")
_PLANNED_LAYOUTS = ("per_document", "auto")


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of (query slot, key slot) pairs that one rank computes with the keys of another.

    Slots are local: ``q_start:q_stop`` of the rank that asks, ``kv_start:kv_stop`` of the rank that owns
    the keys. ``kind`` is ``"full"`` (every pair allowed) or ``"causal"`` (square; the i-th query of the
    tile sees the first i+1 keys of it).
    """

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int
    kind: str

    @property
    def num_queries(self) -> int:
        return self.q_stop - self.q_start

    @property
    def num_keys(self) -> int:
        return self.kv_stop - self.kv_start

    @property
    def num_pairs(self) -> int:
        """Allowed (query, key) pairs."""
        if self.kind == "causal":
            return self.num_queries * (self.num_queries + 1) // 2
        return self.num_queries * self.num_keys


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Which tokens of one sequence each cp rank holds; made by ``make_layout``.

    Attributes:
        name: ``contiguous``, ``head_tail`` or ``striped``.
        seq_len: Tokens of the whole sequence, without pads.
        cp: Ranks that share it.
        multiple_of: Divides ``local_seq_len``.
        documents: Where documents lie (not used by the layouts of this version).
    """

    name: str
    seq_len: int
    cp: int
    multiple_of: int = 1
    documents: Any = None
    # The four integers above as a tensor: what travels through the attention ops. A tensor of constant
    # shape costs torch.compile no recompilation when the next step has another length. The fifth number is
    # that of a call counter (attention/calls.py), 0 for none.
    state: Tensor = field(init=False, compare=False, repr=False)
    padded_seq_len: int = field(init=False, compare=False)
    local_seq_len: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        padded = -(-self.seq_len // self._multiple()) * self._multiple()
        object.__setattr__(self, "padded_seq_len", padded)
        object.__setattr__(self, "local_seq_len", padded // self.cp)
        kind = LAYOUT_NAMES.index(self.name)
        object.__setattr__(self, "state", _state([kind, self.seq_len, self.cp, self.multiple_of, 0]))

    def _multiple(self) -> int:
        """What ``padded_seq_len`` is a multiple of. At cp=1 nothing is cut, so head_tail needs no even length."""
        if self.cp == 1:
            return self.multiple_of
        return self.cp * (math.lcm(2, self.multiple_of) if self.name == "head_tail" else self.multiple_of)

    def positions(self, rank: int) -> Tensor:
        """Global token index of each slot of ``rank``: int64 (S_local,), increasing; pads are distinct, >= seq_len."""
        self._check_rank(rank)
        return torch.from_numpy(_positions(self.name, self.cp, self.local_seq_len, rank).copy())

    def num_valid(self, rank: int) -> int:
        """Slots of ``rank`` that hold a token; they are the first ones."""
        self._check_rank(rank)
        return _num_valid(self, rank)

    def inverse(self) -> Tensor:
        """int64 (seq_len,): where token t stands among all slots in rank-major order (rank·S_local + slot)."""
        return torch.from_numpy(_inverse(self).copy())

    def tiles(
        self, q_rank: int, kv_rank: int, *, is_causal: bool = False, kv_layout: SequenceLayout | None = None
    ) -> tuple[Tile, ...]:
        """Rectangles that ``q_rank`` has to compute with the keys of ``kv_rank``; pads are in none of them.

        Args:
            kv_layout: Layout of the keys where it is another one (cross attention; not causal).

        Raises:
            ValueError: If a rank is out of range, or ``is_causal`` is asked with another key layout.
        """
        kv_layout = kv_layout or self
        self._check_rank(q_rank)
        kv_layout._check_rank(kv_rank)
        if is_causal and kv_layout != self:
            raise ValueError(
                "is_causal needs queries and keys in one layout, got a kv_layout of "
                f"{kv_layout.name}, seq_len={kv_layout.seq_len}; use is_causal=False or drop kv_layout"
            )
        return _tiles(self, kv_layout, q_rank, kv_rank, is_causal)

    def key_range(
        self, q_rank: int, kv_rank: int, *, is_causal: bool = False, kv_layout: SequenceLayout | None = None
    ) -> tuple[int, int]:
        """Slots start..stop of ``kv_rank`` that ``tiles`` of the same arguments read; (0, 0) if none."""
        kv_layout = kv_layout or self
        num_q, num_kv = _num_valid(self, q_rank), _num_valid(kv_layout, kv_rank)
        if num_q == 0:
            return 0, 0
        if not is_causal:
            return 0, num_kv
        last = _positions(self.name, self.cp, self.local_seq_len, q_rank)[num_q - 1]
        keys = _positions(kv_layout.name, kv_layout.cp, kv_layout.local_seq_len, kv_rank)[:num_kv]
        return 0, int(np.searchsorted(keys, last, side="right"))

    def attended_pairs(
        self, is_causal: bool = True, window_size: tuple[int, int] = (-1, -1), documents: Any = None
    ) -> list[int]:
        """Allowed (query, key) pairs of each rank: the work of its attention, per head and row."""
        if tuple(window_size) != (-1, -1):
            raise NotImplementedError(f"attended_pairs does not know windows yet, got window_size={window_size}")
        if documents is not None:
            raise NotImplementedError("attended_pairs does not know documents yet; use documents=None")
        ranks = range(self.cp)
        return [sum(t.num_pairs for s in ranks for t in self.tiles(r, s, is_causal=is_causal)) for r in ranks]

    def imbalance(
        self, is_causal: bool = True, window_size: tuple[int, int] = (-1, -1), documents: Any = None
    ) -> float:
        """Pairs of the busiest rank over the mean: 1.0 is balanced, cp is one rank doing everything."""
        pairs = self.attended_pairs(is_causal, window_size, documents)
        return max(pairs) * self.cp / sum(pairs)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.cp:
            raise ValueError(f"rank must be in 0..{self.cp - 1} for a layout of cp={self.cp}, got {rank}")


def make_layout(name: str, *, seq_len: int, cp: int, documents: Any = None, multiple_of: int = 1) -> SequenceLayout:
    """Return the layout ``name`` of ``seq_len`` tokens over ``cp`` ranks, padded to the least multiple.

    Args:
        name: ``contiguous`` (rank r holds the r-th part), ``head_tail`` (chunks r and 2·cp−1−r of 2·cp: causal
            work is equal on every rank) or ``striped`` (token i on rank i mod cp).
        seq_len: Tokens of the whole sequence, at least 1.
        documents: Reserved for ``per_document``; a layout of this version places tokens without it.
        multiple_of: ``local_seq_len`` is a multiple of it (the tp degree under sequence parallelism).

    Raises:
        ValueError: If the name is unknown or a number is not a positive int.
        NotImplementedError: For ``per_document``, ``auto`` and ``documents``, which need document masks.
    """
    if name in _PLANNED_LAYOUTS:
        raise NotImplementedError(f"layout={name!r} is not available yet; use one of {', '.join(LAYOUT_NAMES)}")
    if name not in LAYOUT_NAMES:
        raise ValueError(f"layout must be one of {', '.join(LAYOUT_NAMES)}, got {name!r}")
    if documents is not None:
        raise NotImplementedError("make_layout does not place documents yet; use documents=None")
    for label, number in (("seq_len", seq_len), ("cp", cp), ("multiple_of", multiple_of)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{label} must be an int of at least 1, got {number!r}")
    return _make_layout(name, seq_len, cp, multiple_of)


def layout_from_state(state: Tensor) -> SequenceLayout:
    """Return the layout whose ``.state`` is ``state`` (int64 (5,)); cached by value."""
    kind, seq_len, cp, multiple_of, _ = state.tolist()
    return _make_layout(LAYOUT_NAMES[kind], seq_len, cp, multiple_of)


def _state(numbers: list[int]) -> Tensor:
    if torch.compiler.is_compiling():  # made inside a compiled function: part of its graph, and cached by nobody
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
    # Layouts are cached: one first made in inference mode, or while tracing with fake tensors, serves training too.
    with torch.inference_mode(False), unset_fake_temporarily():
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")


@functools.lru_cache(maxsize=4096)
def _make_layout(name: str, seq_len: int, cp: int, multiple_of: int) -> SequenceLayout:
    return SequenceLayout(name, seq_len, cp, multiple_of)


@functools.lru_cache(maxsize=256)
def _positions(name: str, cp: int, local_seq_len: int, rank: int) -> Integers:
    slots = np.arange(local_seq_len, dtype=np.int64)
    if cp == 1:
        return slots
    match name:
        case "contiguous":
            return slots + rank * local_seq_len
        case "head_tail":
            chunk = local_seq_len // 2
            return np.concatenate([slots[:chunk] + rank * chunk, slots[:chunk] + (2 * cp - 1 - rank) * chunk])
        case "striped":
            return slots * cp + rank
        case _:
            raise AssertionError(name)


def _num_valid(layout: SequenceLayout, rank: int) -> int:
    positions = _positions(layout.name, layout.cp, layout.local_seq_len, rank)
    return int(np.searchsorted(positions, layout.seq_len))


@functools.lru_cache(maxsize=64)
def _inverse(layout: SequenceLayout) -> Integers:
    order = np.concatenate([_positions(layout.name, layout.cp, layout.local_seq_len, r) for r in range(layout.cp)])
    return np.argsort(order)[: layout.seq_len]


@functools.lru_cache(maxsize=4096)
def _tiles(
    q_layout: SequenceLayout, kv_layout: SequenceLayout, q_rank: int, kv_rank: int, is_causal: bool
) -> tuple[Tile, ...]:
    num_q, num_kv = _num_valid(q_layout, q_rank), _num_valid(kv_layout, kv_rank)
    if num_q == 0 or num_kv == 0:
        return ()
    if not is_causal:
        return (Tile(0, num_q, 0, num_kv, "full"),)
    q_positions = _positions(q_layout.name, q_layout.cp, q_layout.local_seq_len, q_rank)[:num_q]
    kv_positions = _positions(kv_layout.name, kv_layout.cp, kv_layout.local_seq_len, kv_rank)[:num_kv]
    return _staircase_tiles(np.searchsorted(kv_positions, q_positions, side="right"))


def _staircase_tiles(visible: Integers) -> tuple[Tile, ...]:
    """Cut a staircase, where query i sees the first ``visible[i]`` keys, into full rectangles and causal squares.

    ``visible`` never falls, because slots are in increasing order. A run of equal values is a rectangle; a run
    that grows by one is a triangle with a rectangle to its left; a larger step ends a run.
    """
    steps = np.diff(visible)
    run_ends = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]
    counts = visible.tolist()
    tiles: list[Tile] = []
    start, run = 0, 0
    while start < len(counts):
        while run_ends[run] <= start and run < len(run_ends) - 1:
            run += 1
        is_run = start < len(steps) and counts[start + 1] - counts[start] in (0, 1)
        last = run_ends[run] if is_run else start
        tiles += _run_tiles(start, last + 1, counts[start], counts[last])
        start = last + 1
    return tuple(tiles)


def _run_tiles(q_start: int, q_stop: int, first: int, last: int) -> list[Tile]:
    if last == first:
        return [Tile(q_start, q_stop, 0, first, "full")] if first else []
    skipped = 1 if first == 0 else 0  # a first query that sees nothing
    q_start, first = q_start + skipped, first + skipped
    left = [Tile(q_start, q_stop, 0, first - 1, "full")] if first > 1 else []
    return [*left, Tile(q_start, q_stop, first - 1, last, "causal")]
