#!/usr/bin/env python3
"""Run all combinations of compiling, checkpointing and calling attention by the three doors, each beside one rank.

    tools/compose_matrix.py                      540 cells with aot_eager at cp=2, some at 3 and 4, 24 with inductor
    tools/compose_matrix.py --cells all --only door=dtensor compile=block
    tools/compose_matrix.py --cells inductor --json cells.json

In every cell two steps with different lengths and layouts are in flight, with their backwards in reverse order, and
each block reads a RoPE cache that is cut. Output and every gradient are within 1e-5 of the whole model on one rank,
and the attention op runs as often as it should. Exit code 0 if all cells are, 1 if one is not. Needs this checkout.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from cells import AXES, INDUCTOR_CELLS, Cell, check_cell
from oracle import all_pairs
from ranks import Ranks, RanksError

SETS = ("all", "worlds", "inductor")


def choose_cells(names: Iterable[str], only: dict[str, str]) -> list[Cell]:
    """The cells of the named sets that have the values of ``only``."""
    cells: list[Cell] = []
    for name in names:
        match name:
            case "all":
                axes = {axis: values for axis, values in AXES.items() if axis != "world"}
                cells += [Cell(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
            case "worlds":
                cells += [Cell(**options) for options in all_pairs(AXES | {"world": [3, 4]})]
            case "inductor":
                cells += INDUCTOR_CELLS
            case _:
                raise AssertionError(name)
    return [cell for cell in cells if all(str(getattr(cell, axis)) == value for axis, value in only.items())]


def run(cells: list[Cell], console: Console) -> list[dict[str, Any]]:
    """A record for each cell: its options, the op's calls in a block's forward and backward, seconds, and the error."""
    ranks, records = Ranks(), []
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("cells", total=len(cells))
            for cell in cells:
                start, error = time.perf_counter(), ""
                try:
                    ranks.run(cell.world, check_cell, cell, timeout=300)
                except RanksError as raised:
                    error = str(raised).splitlines()[0]
                    progress.console.print(f"{cell}: {error}")
                seconds = round(time.perf_counter() - start, 2)
                records.append(
                    {**dataclasses.asdict(cell), "calls": cell.calls_per_block, "seconds": seconds, "error": error}
                )
                progress.advance(task)
    finally:
        ranks.close()
    return records


def make_table(records: list[dict[str, Any]]) -> str:
    """Markdown: a row for each way of compiling and checkpointing, a column for each door."""
    doors = [door for door in AXES["door"] if any(record["door"] == door for record in records)]
    lines = [
        f"| compile | checkpointing | op calls | {' | '.join(doors)} |",
        f"|---|---|---|{'---|' * len(doors)}",
    ]
    for compiled, checkpointing in itertools.product(AXES["compile"], AXES["checkpointing"]):
        row = [r for r in records if (r["compile"], r["checkpointing"]) == (compiled, checkpointing)]
        if not row:
            continue
        counts = [_count([r for r in row if r["door"] == door]) for door in doors]
        lines.append(f"| {compiled} | {checkpointing.replace('_', ' ')} | {row[0]['calls']} | {' | '.join(counts)} |")
    return "\n".join(lines)


def _count(records: list[dict[str, Any]]) -> str:
    num_equal = sum(not record["error"] for record in records)
    return f"{num_equal} of {len(records)}" if records else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=SETS, default=list(SETS), help="sets to run (all three)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="AXIS=VALUE", help=f"cells with these values, of {', '.join(AXES)}"
    )
    parser.add_argument("--json", metavar="FILE", help="a record for each cell to FILE")
    arguments = parser.parse_args()
    only = dict(text.partition("=")[::2] for text in arguments.only)
    for axis, value in only.items():
        if axis not in AXES or value not in map(str, AXES[axis]):
            parser.error(f"--only takes {', '.join(AXES)} with one of their values, got {axis}={value}")
    cells = choose_cells(arguments.cells, only)
    if not cells:
        parser.error("no cell has all of these values")
    records = run(cells, Console(stderr=True))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    for (backend, world), of_set in itertools.groupby(records, key=lambda r: (r["backend"], r["world"] == 2)):
        print(f"\n{backend}, {'2 ranks' if world else '3 and 4 ranks'}: cells equal to one rank\n")
        print(make_table(list(of_set)))
    num_equal = sum(not record["error"] for record in records)
    print(f"\n{num_equal} of {len(records)} cells equal one rank")
    return 0 if num_equal == len(records) else 1


if __name__ == "__main__":
    sys.exit(main())
