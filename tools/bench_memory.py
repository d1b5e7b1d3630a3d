#!/usr/bin/env python3
"""What training keeps in memory, what that costs in seconds, and what it sends.

    tools/bench_memory.py loss                       full logits against chunks, at a Llama 3 vocabulary; about 6 GiB
    tools/bench_memory.py blocks                     what blocks keep for their backward, by mode of checkpointing
    tools/bench_memory.py activations --plot a.png   what one layer keeps on a rank under TP, TP+SP, CP, beside formulas
    tools/bench_memory.py collectives                what one layer sends under TP and TP+SP, beside formulas
    tools/bench_memory.py recomputation              seconds of a step: recomputation against context parallelism
    tools/bench_memory.py loss --json                the same as records

Bytes are counted tensor by tensor, so they are the same on every machine; seconds are medians of this machine, the ways
in turn, and ratios those of this run. Needs this checkout. Each measurement is a module of ``memory_bench`` with
``HELP``, ``IS_TIMED``, ``add_arguments``, ``measure`` and ``print_tables``.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from memory_bench import activations, blocks, collectives, loss, recomputation

MEASUREMENTS: dict[str, ModuleType] = {
    "loss": loss,
    "blocks": blocks,
    "activations": activations,
    "collectives": collectives,
    "recomputation": recomputation,
}


def make_parser() -> argparse.ArgumentParser:
    """A subcommand for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="measurement", required=True, metavar="MEASUREMENT")
    for name, module in MEASUREMENTS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        if module.IS_TIMED:
            command.add_argument("--repeats", type=_positive, default=3, metavar="R", help="timed steps of each (3)")
            command.add_argument("--threads", type=_positive, metavar="N", help="of torch (its own choice)")
        command.add_argument("--json", action="store_true", help="records to stdout, and no tables")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    if getattr(arguments, "threads", None):
        torch.set_num_threads(arguments.threads)
    module = MEASUREMENTS[arguments.measurement]
    with Console(stderr=True).status(arguments.measurement):
        records = module.measure(arguments)
    environment = {
        "torch_version": torch.__version__, "machine": platform.machine(), "num_threads": torch.get_num_threads()
    }  # fmt: skip
    records = [{"measurement": arguments.measurement, **record, "environment": environment} for record in records]
    if arguments.json:
        print(json.dumps(records, indent=1))
    else:
        module.print_tables(Console() if sys.stdout.isatty() else Console(width=110), records)
    return 0


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
