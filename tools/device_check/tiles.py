"""What cutting costs: the time of all ranks' tiles, one after the other, beside one call of the whole sequence.

1.00 means that a rank of cp does exactly 1/cp of the work in 1/cp of the time. Tiles alone; and all that a rank does in
a strategy, merges, packing and messages (as copies) included. Host time counts where the device waits for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from device_check.prepared import PreparedRank
from device_check.sections import Section
from dtcp.attention.call import backward_tile, forward_tile
from dtcp.attention.held import whole_shard
from dtcp.attention.kernels import choose_kernel
from dtcp.attention.merge import Partial
from dtcp.layout import SequenceLayout, make_layout

STRATEGIES = ("ring", "exchange", "all_gather", "ulysses")
COLUMNS = (
    "seq_len", "cp", "layout", "full forward ms", "full backward ms", "tiles", "tiles forward", "tiles backward",
    *STRATEGIES, "slowest rank",
)  # fmt: skip
_ENOUGH_SECONDS = 0.1  # of measuring one thing
_MOST_TIMES = 5


def time_tiles(device: torch.device, section: Section, *, is_small: bool) -> None:
    """A row for each length and cp; the shorter sequences first."""
    section.columns = COLUMNS
    heads = (4, 2, 16, 16) if is_small else (16, 4, 128, 128)
    lengths = (128, 256) if is_small else (8192, 32768, 131072)
    sizes = (2, 4) if is_small else (2, 4, 8, 16)
    dtype = torch.float32 if is_small else torch.bfloat16
    section.notes.append(
        f"{str(dtype).removeprefix('torch.')}, batch 1, heads {heads[0]}:{heads[1]}, D {heads[2]}, causal; sums over "
        "ranks (forward and backward, but where a column says which) / one call of the whole sequence; slowest rank: "
        "of exchange, times cp"
    )
    cases = [(s, cp, name) for s in lengths for cp in sizes for name in ("head_tail", "striped", "contiguous")]
    # head_tail of every length before other layouts of any.
    cases.sort(key=lambda case: case[2] != "head_tail")
    full: dict[int, tuple[float, float]] = {}
    for done, (seq_len, cp, layout_name) in enumerate(cases):
        known = full.get(seq_len) or [(seq_len / s) ** 2 * sum(t) for s, t in full.items()][-1:]  # pairs grow so
        # The tiles and four strategies, each to warm up and two or three times to be timed.
        if done and not section.fits(18 * sum(known)):
            section.notes.append(
                f"CUT SHORT: {done} of {len(cases)} cases fitted into {section.budget_seconds:.0f} s; from "
                f"{seq_len} tokens, cp {cp}, {layout_name} on there was no time"
            )
            return
        with section.catching(f"{seq_len} tokens, cp {cp}, {layout_name}"):
            if seq_len not in full:
                full[seq_len] = _time_full(seq_len, heads, dtype, device)
            layout = make_layout(layout_name, seq_len=seq_len, cp=cp)
            section.rows.append(_row(layout, full[seq_len], heads, dtype, device))
            section.num_checks += 1


def _row(
    layout: SequenceLayout, full: tuple[float, float], heads: tuple[int, int, int, int], dtype: torch.dtype,
    device: torch.device,
) -> dict:  # fmt: skip
    tiles = [_Tiles(PreparedRank("ring", layout, rank, heads, dtype, device)) for rank in range(layout.cp)]
    forward = sum(seconds(rank.forward, device) for rank in tiles)
    backward = sum(seconds(rank.backward, device) for rank in tiles)
    row = {
        "seq_len": layout.seq_len, "cp": layout.cp, "layout": layout.name,
        "full forward ms": 1e3 * full[0], "full backward ms": 1e3 * full[1], "tiles": sum(rank.num for rank in tiles),
        "tiles forward": forward / full[0], "tiles backward": backward / full[1],
    }  # fmt: skip
    del tiles
    for strategy in STRATEGIES:
        if strategy == "ulysses" and heads[0] < layout.cp:
            continue
        by_rank = []
        for rank in range(layout.cp):
            prepared = PreparedRank(strategy, layout, rank, heads, dtype, device)
            by_rank.append(seconds(prepared.forward, device) + seconds(prepared.backward, device))
        row[strategy] = sum(by_rank) / sum(full)
        if strategy == "exchange":
            row["slowest rank"] = layout.cp * max(by_rank) / sum(full)
    return row


class _Tiles:
    """The tiles of one rank, and nothing else that is timed."""

    def __init__(self, rank: PreparedRank) -> None:
        self._call, self._rank = rank.call, rank
        self._steps = [
            (whole_shard(source, rank.key, rank.value), tile)
            for source in range(rank.call.layout.cp)
            for tile in rank.call.tiles(source)
        ]
        self.num = len(self._steps)
        partial = Partial((*rank.query.shape[:3], rank.value.size(-1)), torch.float32, rank.query.device)
        for held, tile in self._steps:
            out, lse = forward_tile(self._call, held, tile, rank.query)
            partial.merge(slice(tile.q_start, tile.q_stop), out, lse)
        out, lse = partial.result()
        self._of_queries = (rank.grad_out, rank.query, out.to(rank.query.dtype), lse.contiguous())

    def forward(self) -> None:
        for held, tile in self._steps:
            forward_tile(self._call, held, tile, self._rank.query)

    def backward(self) -> None:
        heads = range(self._rank.query.size(1))
        for held, tile in self._steps:
            backward_tile(self._call, held, tile, heads, self._of_queries)


def _time_full(
    seq_len: int, heads: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Seconds of forward and backward of one causal call."""
    hq, hkv, head_dim, value_dim = heads
    query, key, value, grad_out = (
        torch.randn(1, seq_len, h, d, dtype=dtype, device=device).transpose(1, 2)
        for h, d in ((hq, head_dim), (hkv, head_dim), (hkv, value_dim), (hq, value_dim))
    )
    kernel, scale = choose_kernel("auto", query, max(head_dim, value_dim)), head_dim**-0.5
    out, lse = kernel.forward(query, key, value, is_causal=True, scale=scale)
    out, lse = out.to(dtype), lse.contiguous()
    return (
        seconds(lambda: kernel.forward(query, key, value, is_causal=True, scale=scale), device),
        seconds(lambda: kernel.backward(grad_out, query, key, value, out, lse, is_causal=True, scale=scale), device),
    )


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median time, by events on a GPU, after one run that is not timed."""
    run()
    times: list[float] = []
    while len(times) < _MOST_TIMES and sum(times) < _ENOUGH_SECONDS:
        times.append(_once(run, device))
    return statistics.median(times)


def _once(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3
