"""Time and count the bytes of several ways of taking the same step."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from live_bytes import peak_allocated_bytes, peak_live_bytes

Step = Callable[[], Any]
"""Forward and backward; takes back what it leaves behind, gradients for instance."""

MIB = 2**20


def add_block_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of a few blocks of a Llama."""
    add = parser.add_argument
    add("--layers", type=int, default=4, metavar="L", help="blocks (4)")
    add("--dim", type=int, default=256, metavar="D", help="256, with 4 heads and 2 key heads")
    add("--tokens", type=int, default=2048, metavar="S", help="2048")


def kept_between_halves(forward: Callable[[], Tensor]) -> int:
    """Return the bytes that are alive between a forward and its backward, and were not before; gradients stay."""
    with peak_live_bytes() as live:
        loss = forward()
        kept = live.live
        loss.backward()
    return kept


def measure_steps(steps: dict[str, Step], repeats: int) -> dict[str, dict[str, Any]]:
    """Return ``peak_bytes``, ``seconds`` (the median) and both as ratios to the first of ``steps``, by its name."""
    records: dict[str, dict[str, Any]] = {}
    for name, step in steps.items():
        step()  # what is made once
        records[name] = {"peak_bytes": peak_allocated_bytes(step)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():  # in turn: what else the machine does weighs on all of them
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    first = next(iter(steps))
    for name, record in records.items():
        record["seconds"] = statistics.median(seconds[name])
        record["peak_ratio"] = record["peak_bytes"] / records[first]["peak_bytes"]
        record["seconds_ratio"] = record["seconds"] / records[first]["seconds"]
    return records
