#!/usr/bin/env python3
"""What planning attention to packed documents costs per step, when every step has other documents.

    tools/bench_planning.py                             all lengths, cp and layouts
    tools/bench_planning.py --seq-len 65536 --cp 8      one of them
    tools/bench_planning.py --window 1023 0 --json      with a window; the same as records

Milliseconds of CPU time of one thread (waiting does not count), median of steps: ``documents`` to make them from
lengths, ``choice`` for what layout=auto does in every step, ``places`` for who holds which tokens, ``rank`` for the
tiles of one rank (the last one, which sees most) and what it has to send to the others, and ``all`` for the tiles of
all pairs of ranks. Lengths are lognormal. A step of training pays documents, places and rank, once for all layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dtcp.auto_layout import choose_layout
from dtcp.documents import Documents
from dtcp.layout import LAYOUT_NAMES, make_layout, slot_positions
from dtcp.mask import Mask

PARTS = ("documents", "choice", "places", "rank", "all")


def drawn_lengths(generator: np.random.Generator, seq_len: int, mean: int) -> list[int]:
    """Lengths that add up to ``seq_len``: lognormal with sigma 1 and about this mean."""
    lengths = np.maximum(generator.lognormal(np.log(mean) - 0.5, 1, 4 * seq_len // mean + 8), 1).astype(int)
    ends = np.minimum(lengths.cumsum(), seq_len)
    return [int(x) for x in np.diff(ends, prepend=0) if x]


def one_step(name: str, lengths: list[int], cp: int, window: tuple[int, int]) -> tuple[list[float], int, int]:
    """Seconds of each of PARTS, the number of tiles of all pairs of ranks, and that of documents."""
    seconds, seq_len = [], sum(lengths)

    def lap() -> None:
        nonlocal start
        now = time.process_time()
        seconds.append(now - start)
        start = now

    start = time.process_time()
    documents = Documents.from_lengths(lengths)
    lap()
    choose_layout(seq_len, cp, documents, 1, True, window)
    lap()
    layout = make_layout(name, seq_len=seq_len, cp=cp, documents=documents)
    mask = Mask(True, window, documents)
    for rank in range(cp):
        slot_positions(layout, rank)
    lap()
    for other in range(cp):
        layout.tiles(cp - 1, other, mask)
        layout.key_range(other, cp - 1, mask)
    lap()
    num_tiles = sum(len(layout.tiles(q_rank, kv_rank, mask)) for q_rank in range(cp) for kv_rank in range(cp))
    seconds.append(seconds[-1] + time.process_time() - start)  # those of the one rank are found again
    return seconds, num_tiles, len(lengths)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each length, cp and layout."""
    generator, records = np.random.default_rng(arguments.seed), []
    for seq_len in arguments.seq_len:
        for cp in arguments.cp:
            for name in arguments.layout:
                steps = [
                    one_step(name, drawn_lengths(generator, seq_len, arguments.mean), cp, tuple(arguments.window))
                    for _ in range(arguments.steps)
                ]
                medians = [1e3 * statistics.median(part) for part in zip(*(s[0] for s in steps), strict=True)]
                named = {f"{part}_ms": round(value, 2) for part, value in zip(PARTS, medians, strict=True)}
                _, tiles, documents = steps[-1]
                of = {"seq_len": seq_len, "cp": cp, "layout": name, "num_documents": documents, "num_tiles": tiles}
                records.append(of | named)
    return records


def print_table(records: list[dict[str, Any]]) -> None:
    """One line for each record."""
    table = Table(*records[0], title="CPU milliseconds of planning a step")
    for record in records:
        table.add_row(*(str(value) for value in record.values()))
    Console(width=140).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[8192, 65536, 1 << 20], help="(8192 65536 1048576)")
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8], help="(2 4 8)")
    parser.add_argument("--layout", nargs="+", choices=LAYOUT_NAMES, default=list(LAYOUT_NAMES), help="(all)")
    parser.add_argument("--window", type=int, nargs=2, default=[-1, -1], help="left right, -1 for none (-1 -1)")
    parser.add_argument("--mean", type=int, default=600, help="tokens of a document (600)")
    parser.add_argument("--steps", type=int, default=5, help="of each (5)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (0)")
    parser.add_argument("--json", action="store_true", help="records to stdout, and no table")
    arguments = parser.parse_args(argv)
    if min(*arguments.seq_len, *arguments.cp, arguments.mean, arguments.steps) < 1:
        parser.error("--seq-len, --cp, --mean and --steps must be at least 1")
    if arguments.window[0] < -1 or arguments.window[1] not in (-1, 0):
        parser.error(f"--window must be -1 or more, and -1 or 0 to the right (causal), got {arguments.window}")
    records = measure(arguments)
    if arguments.json:
        print(json.dumps(records, indent=1))
    else:
        print_table(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
