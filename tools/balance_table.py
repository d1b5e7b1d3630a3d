#!/usr/bin/env python3
"""How evenly each layout spreads attention to packed documents: the pairs of the busiest rank over the mean.

    tools/balance_table.py                      published mixes of lengths, and 1,000 packed rows of real files
    tools/balance_table.py --rows 50 --cp 4     fewer rows, one cp
    tools/balance_table.py --json               the same as records

The rows are packed from the sizes, in bytes, of the .py files of Python's own library, in a random order (the same each
time); a file longer than a row is cut to it, and the last document of a row to what fits. 1.000 is even, cp is one rank
doing everything. Of several rows: mean, and worst. Causal attention within documents. Counts only, nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dtcp.auto_layout import demand_of
from dtcp.documents import Documents
from dtcp.layout import LAYOUT_NAMES, make_layout

MIXES = {
    "3, 3, 8, 2": [3, 3, 8, 2],
    "16384, 16 × 1024": [16384, *[1024] * 16],
    "16 × 1024, 16384": [*[1024] * 16, 16384],
    "64 × 1024": [1024] * 64,
    "2 × 4096": [4096] * 2,
    "8192, 4096, … 128, 128": [8192, 4096, 2048, 1024, 512, 256, 128, 128],
    "128, 128, … 4096, 8192": [128, 128, 256, 512, 1024, 2048, 4096, 8192],
}


def file_lengths() -> list[int]:
    """Bytes of each .py file of the standard library that is not empty, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in library.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
    return [size for size in (path.stat().st_size for path in files) if size]


def packed_rows(lengths: list[int], num_rows: int, seq_len: int, seed: int = 0) -> list[list[int]]:
    """Lengths of the documents of each row: ``lengths`` in a random order, again and again, cut at the end of a row."""
    generator, rows, waiting = random.Random(seed), [], []
    for _ in range(num_rows):
        row: list[int] = []
        while (room := seq_len - sum(row)) > 0:
            if not waiting:
                waiting = generator.sample(lengths, len(lengths))
            row.append(min(waiting.pop(), room))
        rows.append(row)
    return rows


def imbalance(name: str, documents: Documents, cp: int) -> float:
    """Pairs of the busiest rank over the mean."""
    pairs = demand_of(name, documents.seq_len, cp, documents, 1, True, (-1, -1)).pairs.tolist()
    return max(pairs) * cp / sum(pairs)


def measure(of: str, rows: list[list[int]], cps: list[int]) -> list[dict[str, Any]]:
    """A record for each cp and layout, ``auto`` included: mean and worst imbalance of the rows."""
    packed = [Documents.from_lengths(row) for row in rows]
    records = []
    for cp in cps:
        for name in (*LAYOUT_NAMES, "auto"):
            values = []
            for documents in packed:
                asked = make_layout(name, seq_len=documents.seq_len, cp=cp, documents=documents).name
                values.append(imbalance(asked, documents, cp))
            records.append(
                {
                    "documents": of,
                    "rows": len(rows),
                    "cp": cp,
                    "layout": name,
                    "mean": round(statistics.fmean(values), 5),
                    "worst": round(max(values), 5),
                }
            )
    return records


def print_table(records: list[dict[str, Any]]) -> None:
    """A line for each kind of documents and cp, a column for each layout."""
    columns = list(dict.fromkeys(record["layout"] for record in records))
    table = Table("documents", "rows", "cp", *columns, title="pairs of the busiest rank / mean: mean (worst)")
    for of, cp in dict.fromkeys((record["documents"], record["cp"]) for record in records):
        line = [record for record in records if (record["documents"], record["cp"]) == (of, cp)]
        shown = (f"{r['mean']:.4f}" + (f" ({r['worst']:.4f})" if r["rows"] > 1 else "") for r in line)
        table.add_row(of, str(line[0]["rows"]), str(cp), *shown)
    Console(width=150).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8, 16], help="ranks (2 4 8 16)")
    parser.add_argument("--rows", type=int, default=1000, metavar="N", help="packed rows of each length (1000)")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[8192, 32768], help="tokens of a row (8192 32768)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the files (0)")
    parser.add_argument("--json", action="store_true", help="records to stdout, and no table")
    arguments = parser.parse_args(argv)
    if min(*arguments.cp, arguments.rows, *arguments.seq_len) < 1:
        parser.error("--cp, --rows and --seq-len must be at least 1")
    records = [record for of, lengths in MIXES.items() for record in measure(of, [lengths], arguments.cp)]
    lengths = file_lengths()
    for seq_len in arguments.seq_len:
        rows = packed_rows(lengths, arguments.rows, seq_len, arguments.seed)
        records += measure(f"real files, rows of {seq_len}", rows, arguments.cp)
    if arguments.json:
        print(json.dumps(records, indent=1))
    else:
        print_table(records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
