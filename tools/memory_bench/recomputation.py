"""What it costs to keep less: recomputation of whole blocks, of all but attention, and context parallelism.

A forward of a layer is a third of its forward and backward, so recomputing all of it adds about a third, and of every
second block about a sixth. Context parallelism on two ranks halves what a rank keeps, and recomputes nothing. One
process with two threads (``--threads``) beside two ranks with one thread each: the same cores, the same sequence. CPU
seconds are those of all ranks and threads together: what is computed, also where something else delays it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor.parallel import parallelize_module

import dtcp
from dtcp.models import build_model
from memory_bench.steps import MIB, add_block_arguments, kept_between_halves
from ranks import Ranks

HELP = "seconds and kept bytes of a step: no, selective and full recomputation, and two cp ranks"
IS_TIMED = True
add_arguments = add_block_arguments
# ranks, options of apply_activation_checkpointing
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "none": (1, {"mode": "none"}),
    "selective": (1, {"mode": "selective"}),
    "full, every 2nd": (1, {"mode": "full", "every": 2}),
    "full": (1, {"mode": "full"}),
    "none, cp=2": (2, {"mode": "none"}),
    "full, cp=2": (2, {"mode": "full"}),
}


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each way. Rounds in which every way has its turn: what else the machine does weighs on all."""
    sizes = {name: getattr(arguments, name) for name in ("layers", "dim", "tokens")}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    kept: dict[str, int] = {}
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of the ranks: threads that wait take no CPU seconds
    num_threads, ranks = arguments.threads or 2, Ranks()
    try:
        for _ in range(arguments.repeats):
            for name, (num_ranks, options) in WAYS.items():
                found = ranks.run(num_ranks, take_steps, num_threads, sizes, options, timeout=600)
                seconds[name].append(max(duration for duration, _, _ in found))
                cpu_seconds[name].append(sum(busy for _, busy, _ in found))
                kept[name] = max(num_bytes for _, _, num_bytes in found)
    finally:
        ranks.close()
    first = next(iter(WAYS))
    ratios = {name: [a / b for a, b in zip(seconds[name], seconds[first], strict=True)] for name in WAYS}
    busy = {name: [a / b for a, b in zip(cpu_seconds[name], cpu_seconds[first], strict=True)] for name in WAYS}
    return [
        {
            "way": name,
            **sizes,
            "ranks": num_ranks,
            "threads_per_rank": num_threads // num_ranks,
            "kept_bytes": kept[name],
            "kept_ratio": kept[name] / kept[first],
            "seconds": statistics.median(seconds[name]),
            "seconds_ratio": statistics.median(ratios[name]),
            "seconds_ratio_least": min(ratios[name]),
            "seconds_ratio_most": max(ratios[name]),
            "cpu_seconds": statistics.median(cpu_seconds[name]),
            "cpu_seconds_ratio": statistics.median(busy[name]),
        }
        for name, (num_ranks, _) in WAYS.items()
    ]


def take_steps(
    rank: int, world: int, num_threads: int, sizes: dict[str, int], options: dict[str, Any]
) -> tuple[float, float, int]:
    """Seconds and CPU seconds, the fewer of two steps after a first one, and bytes kept between a step's halves."""
    torch.set_num_threads(num_threads // world)
    forward = _make_forward(world, sizes, options)
    kept = kept_between_halves(forward)
    taken = []
    for _ in range(2):
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        forward().backward()
        busy = time.process_time() - busy
        dist.barrier()
        taken.append((time.perf_counter() - start, busy))
    seconds, cpu_seconds = (min(of_steps) for of_steps in zip(*taken, strict=True))
    return seconds, cpu_seconds, kept


def _make_forward(world: int, sizes: dict[str, int], options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    dims = dtcp.ParallelDims(cp=world)
    cp = dims.build_mesh("cpu")["cp"]
    dim = sizes["dim"]
    model = build_model("llama_tiny", num_layers=sizes["layers"], dim=dim, ffn_dim=7 * dim // 2, vocab_size=64, seed=0)
    layout = dtcp.make_layout("head_tail", seq_len=sizes["tokens"], cp=world)
    if world > 1:
        for block in model.layers.values():
            parallelize_module(block, cp, {"attention.sdpa": dtcp.ContextParallel()})
        dtcp.set_sequence(model, layout)
    dtcp.apply_activation_checkpointing(model, **options)
    tokens = torch.randint(64, (1, sizes["tokens"]), generator=torch.Generator().manual_seed(0))
    labels = dtcp.shift_labels(tokens)
    positions = layout.positions(cp.get_local_rank())
    tokens, labels = (dtcp.shard(x, cp, layout, pad_value=pad) for x, pad in ((tokens, 0), (labels, -100)))
    positions = positions.where(positions < layout.seq_len, 0)
    return lambda: dtcp.token_loss(model(tokens, positions), labels, mesh=dims.view("loss"))


def print_tables(console: Console, records: list[dict[str, Any]]) -> None:
    sizes = records[0]
    table = Table(title=f"{sizes['layers']} blocks of llama, D {sizes['dim']}, {sizes['tokens']:,} tokens, float32")
    columns = ("recomputed", "ranks × threads", "MiB on a rank", "ratio", "seconds", "ratio", "least … most")
    for name in (*columns, "CPU ratio"):
        table.add_column(name, justify="left" if name == "recomputed" else "right")
    for r in records:
        table.add_row(
            r["way"], f"{r['ranks']} × {r['threads_per_rank']}", f"{r['kept_bytes'] / MIB:,.1f}",
            f"{r['kept_ratio']:.2f}", f"{r['seconds']:.2f}", f"{r['seconds_ratio']:.2f}",
            f"{r['seconds_ratio_least']:.2f} … {r['seconds_ratio_most']:.2f}",
            f"{r['cpu_seconds_ratio']:.2f}",
        )  # fmt: skip
    console.print(table)
