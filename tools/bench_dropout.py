#!/usr/bin/env python3
"""What dropout that does not depend on the mesh costs: `dtcp.Dropout` beside ``nn.Dropout``, eager and compiled.

    tools/bench_dropout.py               a table
    tools/bench_dropout.py --json        the same as records

Forward and backward of one (B, S, D) tensor, in turn with ``nn.Dropout``, so that what else the machine does weighs on
both; the cost of the keys, once for all dropouts of a forward, is a line of its own. Medians of milliseconds of this
machine, with the number of threads given; ratios are medians of the ratios of neighbouring measurements.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dtcp

Way = Callable[[Tensor], Tensor]


def timed(way: Way, x: Tensor, grad: Tensor) -> tuple[float, float]:
    """Milliseconds of a forward, and of it with its backward."""
    x.grad = None
    start = now(x)
    out = way(x)
    middle = now(x)
    out.backward(grad)
    end = now(x)
    return 1e3 * (middle - start), 1e3 * (end - start)


def now(x: Tensor) -> float:
    """Seconds, when all that was queued on the device of ``x`` is done."""
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def measure_pair(mode: str, ours: Way, theirs: Way, x: Tensor, repeats: int) -> list[dict[str, Any]]:
    """Records of both, forward and with backward."""
    grad = torch.randn_like(x)
    for way in (ours, theirs):
        timed(way, x, grad)  # compiles, and touches the memory
    pairs = [(timed(theirs, x, grad), timed(ours, x, grad)) for _ in range(repeats)]
    records = []
    for part, what in enumerate(("forward", "forward + backward")):
        records.append(
            {
                "mode": mode,
                "what": what,
                "nn_dropout_ms": round(statistics.median(a[part] for a, _ in pairs), 3),
                "dtcp_dropout_ms": round(statistics.median(b[part] for _, b in pairs), 3),
                "ratio": round(statistics.median(b[part] / a[part] for a, b in pairs), 3),
            }
        )
    return records


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Records of every mode, then of the keys."""
    batch, seq_len, dim = arguments.shape
    device = torch.device(arguments.device)
    x = torch.randn(batch, seq_len, dim, device=device).to(getattr(torch, arguments.dtype)).requires_grad_()
    positions = torch.arange(seq_len, device=device)
    keys = dtcp.dropout_keys(0, 0, range(batch), positions)
    own, torchs = dtcp.Dropout(arguments.p, name="d").to(device), nn.Dropout(arguments.p)
    records = measure_pair("eager", lambda y: own(y, keys), torchs, x, arguments.repeats)
    if not arguments.eager:
        ours, theirs = torch.compile(own), torch.compile(torchs)
        records += measure_pair("compiled", lambda y: ours(y, keys), theirs, x, arguments.repeats)
        # The same yardstick for both: what a compiled model spends here where an eager one had nn.Dropout.
        records += measure_pair("compiled, beside eager", lambda y: ours(y, keys), torchs, x, arguments.repeats)
    seconds = []
    for step in range(arguments.repeats):
        start = now(x)
        dtcp.dropout_keys(0, step, range(batch), positions)
        seconds.append(now(x) - start)
    return [*records, {"mode": "eager", "what": "keys", "dtcp_dropout_ms": round(1e3 * statistics.median(seconds), 3)}]


def print_table(records: list[dict[str, Any]], title: str) -> None:
    """One line for each record."""
    table = Table("", "", "nn.Dropout, ms", "dtcp.Dropout, ms", "ratio", title=title)
    for record in records:
        values = (record.get(key, "") for key in ("nn_dropout_ms", "dtcp_dropout_ms", "ratio"))
        table.add_row(record["mode"], record["what"], *(f"{v:.2f}" if v != "" else "" for v in values))
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=[2, 2048, 1024], help="B S D (2 2048 1024)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], default="float32")
    parser.add_argument("--p", type=float, default=0.1, help="probability of dropping (0.1)")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU (1)")
    parser.add_argument("--repeats", type=int, default=21, help="measurements of each (21)")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--eager", action="store_true", help="leave the compiled ones out")
    parser.add_argument("--json", action="store_true", help="records to stdout, and no table")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or min(arguments.shape) < 1 or arguments.threads < 1 or not 0 < arguments.p < 1:
        parser.error("--repeats, --threads and sizes must be at least 1, and --p in (0, 1)")
    torch.set_num_threads(arguments.threads)
    records = measure(arguments)
    if arguments.json:
        print(json.dumps(records, indent=1))
    else:
        sizes = " × ".join(map(str, arguments.shape))
        print_table(records, f"({sizes}) {arguments.dtype}, p={arguments.p}, {arguments.threads} thread(s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
