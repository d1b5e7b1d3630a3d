"""What one layer keeps for its backward on each rank, by way of cutting it, beside the closed form.

# Note [Activation bytes of a layer]
Per token of the whole sequence, after Korthikanti et al. 2022 (arXiv:2205.05198, section 4), without the 5·a·s·b of
attention's weights, which fused attention never keeps; it keeps 4·a for the log-sum-exp. h is the width, f that of the
feed-forward, k that of keys, a the heads, D the head dim, e the bytes of an element.

    gpt      inputs of 2 norms and of the linear layers behind them 4·h·e, statistics 4·e, 2 dropout masks 2·h;
             query, key, value, attention's output 4·h·e, 4·a, both sides of GELU 2·f·e
    llama    2 norms, each its input and that divided by its size, float32, 16·h, statistics 8, their outputs 2·h·e;
             query and attention's output 2·h·e, key and value 2·k·e, 4·a, the four of SwiGLU 4·f·e; cos and sin 4·D

In half precision with f = 4·h the first is 34·h and what is small: the 34·s·b·h of the paper. (A fused RMSNorm would
keep its input only, 2·h·e for 16·h, a fused SwiGLU f·e less.) Tensor parallelism divides the second line by t, and the
first only with sequence parallelism; cos and sin stay whole. Context parallelism divides everything. With grouped
queries on a CPU torch's own attention gives its output in an order that the next layer copies: h·e more than context
parallel attention keeps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from typing import Any

from rich.console import Console
from rich.table import Table

from memory_bench.layer import Layer, kept_bytes
from memory_bench.plot import draw_activations
from ranks import Ranks

HELP = "bytes that one layer keeps on a rank: TP, TP+SP, CP beside the formula"
IS_TIMED = False
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
FFN_DIM = {"gpt": 4.0, "llama": 3.5}  # of the width, Llama 3's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dim", type=int, default=256, metavar="H", help="width (256)")
    add("--heads", type=int, default=32, metavar="A", help="32, with 8 key heads of a llama, as Llama 3 8B has them")
    add("--kv-heads", type=int, default=8, metavar="K", help="8")
    add("--tokens", type=int, default=1024, metavar="S", help="of the whole sequence (1024)")
    add("--degrees", type=int, nargs="+", default=[2, 4], metavar="N", help="tp or cp beside 1 (2 4)")
    add("--dtype", choices=list(ELEMENT_BYTES), default="float32", help="float32")
    add("--plot", metavar="FILE", help="draw it as well, a PNG; needs matplotlib")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A record for each model, way and degree."""
    records, ranks = [], Ranks()
    try:
        for layer in make_layers(arguments):
            kept = max(ranks.run(layer.num_ranks, kept_bytes, layer, timeout=300))
            expected = kept_by_formula(layer)
            one_rank = next((r["kept_bytes"] for r in records if r["model"] == layer.model), kept)
            records.append({
                **dataclasses.asdict(layer), "way": layer.way if layer.num_ranks > 1 else "one rank",
                "degree": layer.num_ranks, "kept_bytes": kept, "formula_bytes": expected,
                "bytes_per_token": kept / layer.seq_len, "ratio": kept / one_rank,
            })  # fmt: skip
    finally:
        ranks.close()
    if arguments.plot:
        draw_activations(records, arguments.plot)
    return records


def make_layers(arguments: argparse.Namespace) -> list[Layer]:
    """Of each model one rank, then each way at each degree."""
    layers = []
    for model, ratio in FFN_DIM.items():
        one = Layer(
            model, arguments.dim, arguments.heads, arguments.heads if model == "gpt" else arguments.kv_heads,
            int(ratio * arguments.dim), arguments.tokens, dtype=arguments.dtype,
        )  # fmt: skip
        layers.append(one)
        for degree, way in itertools.product(arguments.degrees, ("TP", "TP+SP", "CP")):
            degrees = {"cp": degree} if way == "CP" else {"tp": degree}
            layers.append(dataclasses.replace(one, **degrees, sequence_parallel=way != "TP"))
    return layers


def kept_by_formula(layer: Layer) -> int:
    """Bytes that a rank keeps; see Note [Activation bytes of a layer]."""
    element, wide, heads = ELEMENT_BYTES[layer.dtype], layer.dim, layer.num_heads
    keys = wide // heads * layer.num_kv_heads
    attention = (2 * wide + 2 * keys) * element + 4 * heads
    if layer.model == "gpt":
        between = (4 * wide + 4) * element + 2 * wide
        within, uncut = attention + 2 * layer.ffn_dim * element, 0
    else:
        between = 16 * wide + 8 + 2 * wide * element
        copied = wide * element if layer.cp == 1 and heads != layer.num_kv_heads else 0
        within, uncut = attention + copied + 4 * layer.ffn_dim * element, 4 * wide // heads
    per_token = between / (layer.tp if layer.sequence_parallel else 1) + within / layer.tp + uncut
    return round(layer.rows * layer.seq_len * per_token / layer.cp)


def print_tables(console: Console, records: list[dict[str, Any]]) -> None:
    first = records[0]
    for model in FFN_DIM:
        of_model = [r for r in records if r["model"] == model]
        sizes = f"width {first['dim']}, {first['num_heads']} heads, {first['seq_len']:,} tokens, {first['dtype']}"
        table = Table(title=f"one layer of {model}: {sizes}")
        for name in ("", "ranks", "KiB on a rank", "bytes per token", "÷ one rank", "formula", "difference"):
            table.add_column(name, justify="right" if name else "left")
        for r in of_model:
            table.add_row(
                r["way"], str(r["degree"]), f"{r['kept_bytes'] / 1024:,.1f}", f"{r['bytes_per_token']:,.0f}",
                f"{r['ratio']:.4f}", f"{r['formula_bytes'] / 1024:,.1f}",
                f"{r['kept_bytes'] / r['formula_bytes'] - 1:+.2%}",
            )  # fmt: skip
        console.print(table)
