"""Replay on paper what every rank computes and sends in one call of attention, and when.

The ranks' rectangles are dtcp's own tiles, the rates those of a ``Machine``. Each rank has a clock. A message begins
when both ends have posted it and their links are free; who waits for it has its clock set to its end.

  ring                dtcp's: only rows that are still needed; key gradients return to their owner one step later, the
                      last of them behind half of the rank's own tiles
  plain_ring          ring-flash-attention's: all rows travel, and the key gradients go round with them
  all_gather          dtcp's: the gather hides behind the rank's own tiles
  exposed_all_gather  Llama 3's: gather, then one call for each run of neighbouring queries, nothing to merge
  ulysses             all-to-all, one call with a part of the heads, all-to-all
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import dtcp
from attention_bench.problem import BenchmarkError
from attention_bench.rates import Call, Machine
from dtcp.attention.schedule import ring_schedule
from dtcp.layout import SequenceLayout
from dtcp.mask import Mask
from dtcp.tiles import Tile


@dataclass(frozen=True, slots=True)
class Work:
    """One call of attention, whoever computes it.

    Attributes:
        gradient_bytes: Of a value of a key gradient on its way: 4 is float32, 2 bfloat16.
    """

    seq_len: int
    cp: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool = True
    batch_size: int = 1
    element_bytes: int = 2
    gradient_bytes: int = 4

    @property
    def mask(self) -> Mask:
        return Mask(is_causal=self.is_causal)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a strategy takes.

    Attributes:
        forward_seconds, total_seconds: Of the slowest rank; total is forward and backward.
        busy_seconds: By rank, in which it computes and merges, of the total.
        forward_sent_bytes, total_sent_bytes: By rank.
    """

    forward_seconds: float
    total_seconds: float
    busy_seconds: tuple[float, ...]
    forward_sent_bytes: tuple[int, ...]
    total_sent_bytes: tuple[int, ...]


def predict(strategy: str, layout_name: str, work: Work, machine: Machine) -> Prediction:
    """Replay one call.

    Raises:
        BenchmarkError: If the strategy is unknown or cannot compute the work.
    """
    if strategy not in STRATEGIES:
        raise BenchmarkError(f"--simulate knows the strategies {', '.join(STRATEGIES)}, got {strategy!r}")
    layout = dtcp.make_layout(layout_name, seq_len=work.seq_len, cp=work.cp)
    ranks = _Ranks(work, layout, machine)
    STRATEGIES[strategy](ranks, False)
    forward, sent = max(ranks.now), tuple(ranks.sent)
    ranks.begin_pass()
    STRATEGIES[strategy](ranks, True)
    return Prediction(forward, max(ranks.now), tuple(ranks.busy), sent, tuple(ranks.sent))


def ideal_seconds(work: Work, machine: Machine) -> tuple[float, float]:
    """(forward, total) of one device that computes all of it, over the number of ranks."""
    one = dtcp.make_layout("contiguous", seq_len=work.seq_len, cp=1)
    calls = [Call.of(tile) for tile in one.tiles(0, 0, work.mask)]
    heads = work.batch_size * work.num_heads
    forward, backward = (
        sum(machine.attend_seconds(call, heads, work.head_dim, is_backward) for call in calls)
        for is_backward in (False, True)
    )
    return forward / work.cp, (forward + backward) / work.cp


class _Ranks:
    """The clocks of all ranks and their links."""

    def __init__(self, work: Work, layout: SequenceLayout, machine: Machine) -> None:
        self.work, self.layout, self._machine = work, layout, machine
        self.all = range(work.cp)
        self.now, self.busy = [0.0] * work.cp, [0.0] * work.cp
        self.sent = [0] * work.cp
        self._out_free, self._in_free = [0.0] * work.cp, [0.0] * work.cp
        self._has_result = [False] * work.cp
        self._waits: list[tuple[int, float]] = []

    def begin_pass(self) -> None:
        """The first result of a pass is not merged with anything."""
        self._has_result = [False] * self.work.cp

    def row_bytes(self, element_bytes: int) -> int:
        """Key and value of one token."""
        return 2 * self.work.batch_size * self.work.num_kv_heads * self.work.head_dim * element_bytes

    def tiles(self, rank: int, source: int) -> tuple[Tile, ...]:
        return self.layout.tiles(rank, source, self.work.mask)

    def compute(self, rank: int, call: Call, backward: bool, num_heads: int | None = None) -> None:
        """A call of a kernel, for all heads if not told how many."""
        heads = self.work.batch_size * (self.work.num_heads if num_heads is None else num_heads)
        if heads:
            self._spend(rank, self._machine.attend_seconds(call, heads, self.work.head_dim, backward))

    def compute_tiles(self, rank: int, tiles: tuple[Tile, ...], backward: bool, num_heads: int | None = None) -> None:
        """A call for each tile; its result is merged with those before it, if any."""
        heads = self.work.batch_size * (self.work.num_heads if num_heads is None else num_heads)
        for call in map(Call.of, tiles):
            self.compute(rank, call, backward, num_heads)
            if self._has_result[rank]:
                self._spend(rank, self._machine.merge_seconds(call, heads, self.work.head_dim))
            self._has_result[rank] = True

    def _spend(self, rank: int, seconds: float) -> None:
        self.now[rank] += seconds
        self.busy[rank] += seconds

    def post(self, sender: int, receiver: int, num_bytes: int) -> None:
        """A message on its way from now on; both ends have it when ``wait`` returns."""
        if not num_bytes or sender == receiver:
            return
        self.sent[sender] += num_bytes
        free = max(self._out_free[sender], self._in_free[receiver])
        done = max(self.now[sender], self.now[receiver], free) + self._machine.message_seconds(num_bytes)
        self._out_free[sender] = self._in_free[receiver] = done
        self._waits += [(sender, done), (receiver, done)]

    def post_collective(self, num_bytes: int) -> None:
        """Every rank sends and receives ``num_bytes`` in all."""
        done = max(*self.now, *self._out_free, *self._in_free) + self._machine.message_seconds(num_bytes)
        for rank in self.all:
            self.sent[rank] += num_bytes
            self._out_free[rank] = self._in_free[rank] = done
            self._waits.append((rank, done))

    def take_waits(self) -> list[tuple[int, float]]:
        """What was posted since the last time."""
        waits, self._waits = self._waits, []
        return waits

    def wait(self, waits: list[tuple[int, float]] | None = None) -> None:
        for rank, done in self.take_waits() if waits is None else waits:
            self.now[rank] = max(self.now[rank], done)


def _halves(work: Work) -> tuple[int, int]:
    """Query heads that are computed before and after the exchange that the later hide."""
    early = -(-work.num_kv_heads // 2) * (work.num_heads // work.num_kv_heads)
    return early, work.num_heads - early


def _ring(ranks: _Ranks, backward: bool) -> None:
    work, last = ranks.work, ranks.work.cp - 1
    schedules = [ring_schedule(ranks.layout, ranks.layout, work.mask, True, rank) for rank in ranks.all]
    early, late = _halves(work)

    def post_returns(step: int) -> None:
        for rank in ranks.all:
            done = schedules[rank].steps[step]
            start, stop = done.keys.hull()
            num_rows = stop - start
            ranks.post(rank, done.source, num_rows * ranks.row_bytes(work.gradient_bytes))

    for step in ranks.all:
        for rank in ranks.all:
            start, stop = schedules[rank].hops[step].send
            ranks.post(rank, schedules[rank].next_rank, (stop - start) * ranks.row_bytes(work.element_bytes))
        if backward and step > 1:
            post_returns(step - 1)
        for rank in ranks.all:
            heads = early if backward and step == 0 else None
            ranks.compute_tiles(rank, schedules[rank].steps[step].tiles, backward, heads)
        ranks.wait()
    if not backward:
        return
    if last:
        post_returns(last)
    for rank in ranks.all:
        ranks.compute_tiles(rank, schedules[rank].steps[0].tiles, True, late)
    ranks.wait()


def _plain_ring(ranks: _Ranks, backward: bool) -> None:
    work, layout = ranks.work, ranks.layout
    kv_bytes = layout.local_seq_len * ranks.row_bytes(work.element_bytes)
    grad_bytes = layout.local_seq_len * ranks.row_bytes(work.gradient_bytes)
    returning: list[tuple[int, float]] = []
    for step in ranks.all:
        for rank in ranks.all if step < work.cp - 1 else ():
            ranks.post(rank, (rank + 1) % work.cp, kv_bytes)
        keys = ranks.take_waits()
        for rank in ranks.all:
            ranks.compute_tiles(rank, ranks.tiles(rank, (rank - step) % work.cp), backward)
        ranks.wait(returning)
        ranks.wait(keys)
        for rank in ranks.all if backward else ():
            ranks.post(rank, (rank + 1) % work.cp, grad_bytes)
        returning = ranks.take_waits()
    ranks.wait(returning)


def _gather_bytes(ranks: _Ranks, element_bytes: int) -> int:
    return (ranks.work.cp - 1) * ranks.layout.local_seq_len * ranks.row_bytes(element_bytes)


def _all_gather(ranks: _Ranks, backward: bool) -> None:
    early, late = _halves(ranks.work)
    ranks.post_collective(_gather_bytes(ranks, ranks.work.element_bytes))
    for rank in ranks.all:
        ranks.compute_tiles(rank, ranks.tiles(rank, rank), backward, early if backward else None)
    ranks.wait()
    for rank in ranks.all:
        for source in ranks.all:
            if source != rank:
                ranks.compute_tiles(rank, ranks.tiles(rank, source), backward)
    if not backward:
        return
    ranks.post_collective(_gather_bytes(ranks, ranks.work.gradient_bytes))
    for rank in ranks.all:
        ranks.compute_tiles(rank, ranks.tiles(rank, rank), True, late)
    ranks.wait()


def _exposed_all_gather(ranks: _Ranks, backward: bool) -> None:
    ranks.post_collective(_gather_bytes(ranks, ranks.work.element_bytes))
    ranks.wait()
    for rank in ranks.all:
        for call in _run_calls(ranks.layout, rank, ranks.work.is_causal):
            ranks.compute(rank, call, backward)
    if backward:
        ranks.post_collective(_gather_bytes(ranks, ranks.work.gradient_bytes))
        ranks.wait()


def _run_calls(layout: SequenceLayout, rank: int, is_causal: bool) -> list[Call]:
    """One call for each run of neighbouring queries, with all keys that it sees, in natural order."""
    positions = [p for p in layout.positions(rank).tolist() if p < layout.seq_len]
    cuts = [i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1]
    if len(cuts) > 1:
        raise BenchmarkError(
            f"exposed_all_gather computes a call for each run of neighbouring queries, and layout {layout.name} has "
            f"{len(cuts) + 1} on a rank; use contiguous or head_tail"
        )
    calls = []
    if not positions:
        return calls
    for start, stop in pairwise([0, *cuts, len(positions)]):
        num = stop - start
        seen = positions[stop - 1] + 1 if is_causal else layout.seq_len
        pairs = num * seen - (num * (num - 1) // 2 if is_causal else 0)
        calls.append(Call(num, seen, pairs, num if is_causal else 0))
    return calls


def _ulysses(ranks: _Ranks, backward: bool) -> None:
    work, cp = ranks.work, ranks.work.cp
    if work.num_heads % cp or max(work.num_kv_heads, cp) % min(work.num_kv_heads, cp):
        raise BenchmarkError(
            f"ulysses is replayed for heads that cp divides and kv heads of which one divides the other, got "
            f"{work.num_heads} and {work.num_kv_heads} heads at cp={cp}; use ring or all_gather"
        )
    # Key heads fewer than ranks travel to several of them.
    values = ranks.layout.local_seq_len * work.batch_size * work.head_dim
    query_bytes = values * work.num_heads * work.element_bytes * (cp - 1) // cp
    kv_bytes = 2 * values * max(work.num_kv_heads, cp) * work.element_bytes * (cp - 1) // cp
    # Forward: q, k, v go and out returns. Backward: the gradient of out goes and those of q, k, v return.
    ranks.post_collective(query_bytes if backward else query_bytes + kv_bytes)
    ranks.wait()
    one = dtcp.make_layout("contiguous", seq_len=work.seq_len, cp=1)
    for rank in ranks.all:
        ranks.compute_tiles(rank, one.tiles(0, 0, work.mask), backward, work.num_heads // cp)
    ranks.post_collective(query_bytes + kv_bytes if backward else query_bytes)
    ranks.wait()


STRATEGIES: dict[str, Callable[[_Ranks, bool], None]] = {
    "ring": _ring,
    "plain_ring": _plain_ring,
    "all_gather": _all_gather,
    "exposed_all_gather": _exposed_all_gather,
    "ulysses": _ulysses,
}
