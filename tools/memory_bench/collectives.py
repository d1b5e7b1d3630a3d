"""What one layer sends, forward and backward, under tensor parallelism with and without sequence parallelism.

In units of (t-1)/t·s·b·h·e, the bytes of the layer's input that a rank does not hold: an all-reduce sends 2, an
all-gather or a reduce-scatter 1. Two all-reduces forward and two backward, 4 and 4; with sequence parallelism an
all-gather and a reduce-scatter take the place of each, 4 forward, and 6 backward, where the inputs of attention and
feed-forward are gathered again instead of being kept whole. Gradients of norms and of biases, which are summed over the
ranks too, are left out. Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from memory_bench.layer import Layer, sent_bytes
from ranks import Ranks

HELP = "collectives of one layer: all-reduces of TP, reduce-scatters and all-gathers of TP+SP"
IS_TIMED = False
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
UNITS = {("TP", "forward"): 4, ("TP", "backward"): 4, ("TP+SP", "forward"): 4, ("TP+SP", "backward"): 6}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dim", type=int, default=256, metavar="H", help="width (256), with 8 heads and 4 key heads")
    add("--tokens", type=int, default=1024, metavar="S", help="1024")
    add("--degrees", type=int, nargs="+", default=[2, 4], metavar="T", help="tp (2 4)")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each model, degree, way and direction; of each kind of collective how many, and their bytes."""
    records, ranks = [], Ranks()
    try:
        for model, ratio in (("gpt", 4.0), ("llama", 3.5)):
            num_kv_heads, ffn_dim = 8 if model == "gpt" else 4, int(ratio * arguments.dim)
            one = Layer(model, arguments.dim, 8, num_kv_heads, ffn_dim, arguments.tokens)
            for tp in arguments.degrees:
                unit = (tp - 1) * one.rows * one.seq_len * one.dim * 4 // tp
                for sequence_parallel in (False, True):
                    layer = dataclasses.replace(one, tp=tp, sequence_parallel=sequence_parallel)
                    sent = ranks.run(tp, sent_bytes, layer, timeout=300)[0]
                    for direction, by_kind in zip(("forward", "backward"), sent, strict=True):
                        records.append({
                            **dataclasses.asdict(layer), "way": layer.way, "direction": direction,
                            **{kind: by_kind.get(kind, (0, 0)) for kind in KINDS},
                            "sent_bytes": sum(by_kind.get(kind, (0, 0))[1] for kind in KINDS),
                            "formula_bytes": UNITS[layer.way, direction] * unit,
                        })  # fmt: skip
    finally:
        ranks.close()
    return records


def print_tables(console: Console, records: list[dict[str, Any]]) -> None:
    first = records[0]
    table = Table(title=f"a rank sends of one layer, width {first['dim']}, {first['seq_len']:,} tokens, float32; KiB")
    columns = ("model", "tp", "", "all-reduce", "reduce-scatter", "all-gather", "together", "formula")
    for name in columns:
        table.add_column(name, justify="right" if name[:3] in ("tp", "all", "red", "tog", "for") else "left")
    for r in records:
        table.add_row(
            r["model"], str(r["tp"]), f"{r['way']} {r['direction']}", *(_cell(r[kind]) for kind in KINDS),
            f"{r['sent_bytes'] / 1024:,.0f}", f"{r['formula_bytes'] / 1024:,.0f}",
        )  # fmt: skip
    console.print(table)


def _cell(counted: tuple[int, int]) -> str:
    count, num_bytes = counted
    return f"{count} × {num_bytes / count / 1024:,.0f}" if count else ""
