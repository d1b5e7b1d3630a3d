"""``bench_attention.py --simulate``: scaling on paper."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from attention_bench.arguments import Parser, check_json, positive
from attention_bench.problem import BenchmarkError
from attention_bench.published import MACHINE_NAMES, TOLERANCE_POINTS, Comparison, compare, preset
from attention_bench.rates import FITTED, Machine
from attention_bench.simulate import STRATEGIES, Work, ideal_seconds, predict
from attention_bench.tables import make_table

DESCRIPTION = """Predict time on paper: replay every rank's calls and messages with given rates. Starts no ranks.

    python tools/bench_attention.py --simulate                                  8 H800, 65536 tokens, 32:8 heads of 128
    python tools/bench_attention.py --simulate --machine h100 --nproc 2 8 16 --seq-len 16384 131072 --kv-heads 8
    python tools/bench_attention.py --simulate --link 50 --latency 20           the same ranks, a slower network
    python tools/bench_attention.py --simulate --published                      the model beside published figures

Strategies: ring and all_gather as dtcp does them; plain_ring: all rows go round, and key gradients with them, as in
ring-flash-attention; exposed_all_gather: gather first, then compute, as Llama 3 did; ulysses: all-to-all around one
call with a part of the heads, its layout does not matter.

  ideal      one device's time for all of it / ranks
  of ideal   ideal / predicted, of the slowest rank
  waiting    predicted forward+backward - what the busiest rank computes and merges: communication that nothing hides

The rate of the kernel is that of FlashAttention-2 (a published call on each machine; h100: as h800), links and memory
are those of the specification, and three numbers of the kernel are fitted on three published percentages; all others
of --published are predicted. One of them is what a merge costs (--merge-bytes): as ring-flash-attention merges. Not in
the model: kernels that slow down while messages take their multiprocessors, layers around the attention.

Exit code 0; 2 for bad arguments.
"""

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_LAYOUTS = ("contiguous", "head_tail", "striped")


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, got {text!r}")
    return number


def _rate(text: str) -> float:
    number = _amount(text)
    if not number:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def make_parser(prog: str | None = None) -> Parser:
    """The options that go with ``--simulate``."""
    parser = Parser(prog=prog, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--simulate", action="store_true", required=True, help="predict instead of measuring")
    add("--published", action="store_true", help="the model beside published figures, and nothing else")
    add("--machine", choices=MACHINE_NAMES, default="h800", help="whose rates (h800)")
    add("--nproc", type=positive, nargs="+", default=[8], metavar="N", help="ranks (8)")
    add("--seq-len", type=positive, nargs="+", default=[65536], metavar="S", help="tokens of the sequence (65536)")
    add("--heads", type=positive, default=32, metavar="HQ", help="query heads (32)")
    add("--kv-heads", type=positive, default=8, metavar="HKV", help="key and value heads, a divisor of the former (8)")
    add("--head-dim", type=positive, default=128, metavar="D", help="128")
    add("--batch", type=positive, default=1, metavar="B", help="rows (1)")
    add("--layout", nargs="+", choices=_LAYOUTS, default=["head_tail"], help="head_tail")
    add("--strategy", nargs="+", choices=STRATEGIES, help="all that can")
    add("--non-causal", dest="causal", action="store_false", help="every query sees all keys")
    add(
        "--dtype",
        choices=_ELEMENT_BYTES,
        default="bfloat16",
        help="of queries, keys and values on their way (bfloat16)",
    )
    add("--gradient-dtype", choices=_ELEMENT_BYTES, default="float32", help="of key gradients that travel (float32)")
    add("--flops", type=_rate, metavar="TFLOPS", help="of the kernel, forward, at full blocks; backward in proportion")
    add("--link", type=_rate, metavar="GB/s", help="that leave a rank, and as many enter it")
    add("--memory", type=_rate, metavar="GB/s", help="of a device's memory, for merges")
    merge = f"bytes through memory for each value of out that is merged, in each pass ({FITTED.merge_bytes:.4g})"
    add("--merge-bytes", type=_amount, default=FITTED.merge_bytes, metavar="BYTES", help=merge)
    add("--latency", type=_amount, metavar="US", help="microseconds of a message or a collective (10)")
    add("--tile-latency", type=_amount, default=0.0, metavar="US", help="of a call of the kernel (0: queued ahead)")
    add("--json", nargs="?", const="-", metavar="FILE", help="records to FILE; without FILE to stdout, and no table")
    return parser


def simulate(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    check_json(parser, arguments.json)
    if arguments.heads % arguments.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads, got {arguments.heads} and {arguments.kv_heads}")
    try:
        if arguments.published:
            comparisons = compare()
            records = [{**asdict(c), "difference_points": c.difference_points} for c in comparisons]
            table = _published_table(comparisons)
        else:
            machine = _machine(arguments)
            records = list(_records(arguments, machine))
            table = _prediction_table(arguments, machine, records)
    except BenchmarkError as error:
        parser.error(str(error))
    if arguments.json == "-":
        print(json.dumps(records, indent=1))
        return 0
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    (Console() if sys.stdout.isatty() else Console(width=150)).print(table)
    return 0


def _machine(arguments: argparse.Namespace) -> Machine:
    a, machine = arguments, preset(arguments.machine)
    if a.flops:
        scale = a.flops * 1e12 / machine.forward_flops
        flops = {"forward_flops": a.flops * 1e12, "backward_flops": machine.backward_flops * scale}
        machine = replace(machine, **flops)
    return replace(
        machine,
        link_bytes=a.link * 1e9 if a.link else machine.link_bytes,
        memory_bytes=a.memory * 1e9 if a.memory else machine.memory_bytes,
        latency_seconds=machine.latency_seconds if a.latency is None else a.latency * 1e-6,
        call_seconds=a.tile_latency * 1e-6,
        kernel=replace(machine.kernel, merge_bytes=a.merge_bytes),
    )


def _records(arguments: argparse.Namespace, machine: Machine) -> Iterator[dict[str, Any]]:
    a = arguments
    layouts, strategies = (list(dict.fromkeys(x)) for x in (a.layout, a.strategy or STRATEGIES))
    for seq_len, cp in itertools.product(dict.fromkeys(a.seq_len), dict.fromkeys(a.nproc)):
        dtypes = (_ELEMENT_BYTES[a.dtype], _ELEMENT_BYTES[a.gradient_dtype])
        work = Work(seq_len, cp, a.heads, a.kv_heads, a.head_dim, a.causal, a.batch, *dtypes)
        for layout, strategy in itertools.product(layouts, strategies):
            if strategy == "ulysses" and layout != layouts[0]:
                continue  # after the all-to-all, the sequence is whole
            try:
                yield _record(strategy, layout, work, machine)
            except BenchmarkError:
                if a.strategy:  # asked for, so not left out in silence
                    raise


def _record(strategy: str, layout: str, work: Work, machine: Machine) -> dict[str, Any]:
    p, (forward, total) = predict(strategy, layout, work, machine), ideal_seconds(work, machine)
    return {
        "simulated": True, "machine": asdict(machine), "num_ranks": work.cp, "seq_len_tokens": work.seq_len,
        "layout": None if strategy == "ulysses" else layout, "strategy": strategy, "is_causal": work.is_causal,
        "num_heads": work.num_heads, "num_kv_heads": work.num_kv_heads, "head_dim": work.head_dim,
        "batch_size": work.batch_size, "element_bytes": work.element_bytes, "gradient_bytes": work.gradient_bytes,
        "forward_seconds": p.forward_seconds, "forward_ideal_seconds": forward,
        "forward_percent_of_ideal": 100 * forward / p.forward_seconds,
        "forward_backward_seconds": p.total_seconds, "forward_backward_ideal_seconds": total,
        "forward_backward_percent_of_ideal": 100 * total / p.total_seconds,
        "waiting_seconds": p.total_seconds - max(p.busy_seconds),
        "forward_sent_bytes_by_rank": p.forward_sent_bytes, "forward_backward_sent_bytes_by_rank": p.total_sent_bytes,
    }  # fmt: skip


def _prediction_table(arguments: argparse.Namespace, machine: Machine, records: list[dict[str, Any]]) -> Table:
    a = arguments
    title = (
        f"On paper, {machine.name}: kernel {machine.forward_flops / 1e12:.0f} TFLOP/s forward and "
        f"{machine.backward_flops / 1e12:.0f} backward at full blocks, link {machine.link_bytes / 1e9:.4g} GB/s, "
        f"{machine.latency_seconds * 1e6:.3g} µs, memory {machine.memory_bytes / 1e9:.4g} GB/s\n"
        f"{a.dtype}, key gradients {a.gradient_dtype}, batch {a.batch}, heads {a.heads}:{a.kv_heads}, head dim "
        f"{a.head_dim}, {'causal' if a.causal else 'full'} · ms of the slowest rank, MiB in the mean over ranks"
    )
    numbers = ("forward", "of ideal", "forward+backward", "ideal", "of ideal", "waiting", "MiB sent")
    table = make_table(title, "tokens", "ranks", "layout", "strategy", *numbers)
    for r in records:
        sent = statistics.mean(r["forward_backward_sent_bytes_by_rank"]) / 2**20
        table.add_row(
            str(r["seq_len_tokens"]), str(r["num_ranks"]), r["layout"] or "any", r["strategy"],
            _ms(r["forward_seconds"]), f"{r['forward_percent_of_ideal']:.1f} %", _ms(r["forward_backward_seconds"]),
            _ms(r["forward_backward_ideal_seconds"]), f"{r['forward_backward_percent_of_ideal']:.1f} %",
            _ms(r["waiting_seconds"]), f"{sent:.4g}",
        )  # fmt: skip
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _published_table(comparisons: list[Comparison]) -> Table:
    table = make_table("Percent of the ideal", "source", "what", "passes", "published", "model", "points", "role")
    for c in comparisons:
        far = " beyond" if abs(c.difference_points) > TOLERANCE_POINTS else ""
        table.add_row(
            c.source, c.what, c.passes, f"{c.published_percent:.1f}", f"{c.model_percent:.1f}",
            f"{c.difference_points:+.1f}{far}", c.role,
        )  # fmt: skip
    table.caption, table.caption_justify = f"beyond: by more than {TOLERANCE_POINTS:.0f} points", "left"
    return table
