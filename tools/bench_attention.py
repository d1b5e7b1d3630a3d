#!/usr/bin/env python3
"""Time and bytes of context parallel attention on N ranks, beside one process with N threads on the same problem.

    python tools/bench_attention.py                              2 ranks, 2048 and 4096 tokens, every strategy x layout
    python tools/bench_attention.py --nproc 4 --seq-len 8192 --heads 8 --kv-heads 2 --dtype bfloat16 --strategy ring
    python tools/bench_attention.py --mask documents window sinks --seq-len 4096          each with every layout
    python tools/bench_attention.py --mask window --window 128 256 512 1024 2048 4096     work follows the window
    python tools/bench_attention.py --simulate                   predict on paper; --simulate --help
    python tools/bench_attention.py --json results.json          the tables, and the records in a file

The ranks are started here, one thread each. The single process computes the same mask in two ways: by the fastest
exact way that torch offers (scaled_dot_product_attention, where it knows the mask; else a call for each document,
blocks of queries with the keys that they see, one dense mask: tried beforehand, the fastest is named), and by dtcp's
own attention of one rank. Everything is measured in turn in every repeat, so that a drift of the machine meets all
alike; who is not measured sleeps. A rank's clock starts at a barrier, the slowest rank counts, and medians are
compared. Before that, output and gradients of every configuration and every way are compared with
dtcp.reference_attention (beyond 8192 tokens with scaled_dot_product_attention), and the bytes that leave each rank are
counted.

  ratio      median / median of the faster of the single process's two
  limit      time of the faster x imbalance of the layout under this mask (most pairs on a rank / mean): what a rank
             needs for its attention alone, at the speed of the single process, whatever the strategy
  pairs      allowed: what the mask lets queries see; computed: the tiles of all ranks, under a mask the whole rectangle
  bytes      keys, values and their gradients sent by a rank, copies to itself excluded, beside the closed form of
             the strategy (none for a ring where the sequence is padded or what it sends follows from a mask, nor for
             hybrid; of exchange the keys that other ranks see, looked at one by one)

Masks, causal but for full and prefix_lm:
  causal, full        documents (--lengths)          documents_stdlib: a packed row of the .py files of Python's library
  window (--window)   documents_window (both)        sinks: learned, one for each head    key_padding: half the last row
  prefix_lm: a mask_mod, the first quarter is seen by all                    bias, alibi, softcap: without gradients

On CUDA, rank r uses device r, the single process uses device 0, and the limit is divided by N, since then the ranks
have N devices and the single process has one. Times come from CUDA events, the ranks talk NCCL. This is UNTESTED.

Exit code 0; 1 if a result is wrong or a rank fails; 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch
from attention_bench.arguments import Parser, check_json, positive
from attention_bench.masks import DEFAULT_WINDOW, MASK_NAMES, WITH_DOCUMENTS, WITH_LENGTHS, WITH_WINDOW
from attention_bench.measure import benchmark
from attention_bench.paper import simulate
from attention_bench.problem import (
    TOLERANCES,
    BenchmarkError,
    Case,
    Configuration,
    MaskChoice,
    Problem,
    strategy_arguments,
)
from attention_bench.report import describe_environment, make_records
from attention_bench.tables import print_tables
from rich.console import Console

import dtcp
from dtcp.attention.arguments import STRATEGY_NAMES, resolved_strategy
from dtcp.layout import LAYOUT_NAMES


def _length(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of 0 or more, got {text!r}")
    return int(text)


def make_parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--nproc", type=positive, default=2, metavar="N", help="ranks, and threads of the single process (2)")
    add("--seq-len", type=positive, nargs="+", default=[2048, 4096], metavar="S", help="tokens (2048 4096)")
    add("--heads", type=positive, default=4, metavar="HQ", help="query heads (4)")
    add("--kv-heads", type=positive, metavar="HKV", help="key and value heads, a divisor of the former (as many)")
    add("--head-dim", type=positive, default=64, metavar="D", help="64")
    add("--batch", type=positive, default=1, metavar="B", help="rows (1)")
    add("--dtype", choices=TOLERANCES, default="float32", help="float32")
    layouts = f"of {', '.join(LAYOUT_NAMES)}, auto (all but auto; per_document where there are documents)"
    add("--layout", nargs="+", help=layouts)
    strategies = f"of {', '.join(STRATEGY_NAMES)}; hybrid:U cuts heads over U ranks (all but hybrid and auto)"
    add("--strategy", nargs="+", default=[n for n in STRATEGY_NAMES if n not in ("hybrid", "auto")], help=strategies)
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument("--mask", nargs="+", metavar="NAME", help=f"of {', '.join(MASK_NAMES)}; each by itself (causal)")
    mask.add_argument("--non-causal", dest="mask", action="store_const", const=["full"], help="--mask full")
    add("--lengths", type=_length, nargs="+", metavar="L", help="of the documents of a row (S/2, S/4, S/4)")
    window = f"tokens that a query sees, itself included; each by itself ({DEFAULT_WINDOW})"
    add("--window", type=positive, nargs="+", metavar="W", help=window)
    passes = parser.add_mutually_exclusive_group()
    passes.add_argument("--backward", action="store_true", default=True, help="forward and backward (default)")
    passes.add_argument("--forward-only", dest="backward", action="store_false", help="forward without a graph")
    add("--repeats", type=positive, default=7, metavar="R", help="measurements of each configuration (7)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda (UNTESTED) if it has N devices")
    add("--timeout", type=positive, default=600, metavar="SECONDS", help="longest wait for the ranks (600)")
    add("--simulate", action="store_true", help="predict instead, from rates; see --simulate --help for its options")
    add("--json", nargs="?", const="-", metavar="FILE", help="records to FILE; without FILE to stdout, and no tables")
    return parser


def _checked(parser: Parser, arguments: argparse.Namespace) -> tuple[Problem, list[Configuration]]:
    a = arguments
    a.kv_heads = a.kv_heads or a.heads
    if a.heads % a.kv_heads:
        parser.error(f"--heads must be a multiple of --kv-heads, got {a.heads} and {a.kv_heads}")
    num_cuda = torch.cuda.device_count()
    if a.device == "cuda" and num_cuda < a.nproc:
        parser.error(f"--device cuda needs a device for each rank, got --nproc {a.nproc} and {num_cuda} device(s)")
    device = a.device if a.device != "auto" else "cuda" if num_cuda >= a.nproc else "cpu"
    cases = _cases(parser, a)
    try:
        for layout in a.layout or ():
            dtcp.make_layout(layout, seq_len=1, cp=1, documents=dtcp.Documents.from_lengths([1]))
        for strategy in a.strategy:
            resolved_strategy(**strategy_arguments(strategy), cp=a.nproc, num_heads=a.heads)
    except (ValueError, NotImplementedError) as error:
        parser.error(str(error))
    without = next((str(case.mask) for case in cases if case.mask.name not in WITH_DOCUMENTS), None)
    if a.layout and "per_document" in a.layout and without:
        parser.error(f"--layout per_document needs documents, which --mask {without} has none of; measure it by itself")
    check_json(parser, a.json)
    problem = Problem(a.nproc, a.batch, a.heads, a.kv_heads, a.head_dim, a.dtype, a.backward, device)
    configurations = []
    for case in cases:
        possible = [n for n in LAYOUT_NAMES if n != "per_document" or case.mask.name in WITH_DOCUMENTS]
        choices = (dict.fromkeys(chosen) for chosen in (a.layout or possible, a.strategy))  # each once
        configurations += [Configuration(case, *chosen) for chosen in itertools.product(*choices)]
    return problem, configurations


def _cases(parser: Parser, arguments: argparse.Namespace) -> list[Case]:
    """Every length with every mask, and every window of those that have one."""
    a = arguments
    names = list(dict.fromkeys(a.mask or ["causal"]))
    for name in names:
        if name not in MASK_NAMES:
            parser.error(f"--mask must be of {', '.join(MASK_NAMES)}, got {name!r}")
    if a.lengths and not set(names) & set(WITH_LENGTHS):
        parser.error(f"--lengths needs --mask {' or '.join(WITH_LENGTHS)}, got {' '.join(names)}")
    if a.window and not set(names) & set(WITH_WINDOW):
        parser.error(f"--window needs --mask {' or '.join(WITH_WINDOW)}, got {' '.join(names)}")
    for seq_len in a.seq_len if a.lengths else ():
        if sum(a.lengths) != seq_len:
            parser.error(f"--lengths must add up to --seq-len, got {sum(a.lengths)} and {seq_len}")
    cases = []
    for seq_len, name in itertools.product(a.seq_len, names):
        lengths = tuple(a.lengths) if a.lengths and name in WITH_LENGTHS else None
        windows = (a.window or [DEFAULT_WINDOW]) if name in WITH_WINDOW else [None]
        cases += [Case(seq_len, MaskChoice(name, window, lengths)) for window in windows]
    return list(dict.fromkeys(cases))


def main(argv: list[str] | None = None) -> int:
    if "--simulate" in (sys.argv[1:] if argv is None else argv):
        return simulate(argv)
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.simulate:
        parser.error("--simulate is not to be abbreviated: it has options of its own")
    problem, configurations = _checked(parser, arguments)
    environment = describe_environment(problem)
    try:
        with Console(stderr=True).status(f"{len(configurations)} configurations on {problem.num_ranks} rank(s)"):
            rows = benchmark(problem, configurations, repeats=arguments.repeats, timeout=arguments.timeout)
    except BenchmarkError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    records = make_records(problem, rows, environment)
    if arguments.json == "-":
        print(json.dumps(records, indent=1))
        return 0
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print_tables(Console() if sys.stdout.isatty() else Console(width=170), records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
