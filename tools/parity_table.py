#!/usr/bin/env python3
"""Train on eleven meshes and on one rank, and print how far the losses, gradients and gradient norms are apart.

    tools/parity_table.py                            gpt and llama, ten steps; 22 rows on up to 8 ranks, some minutes
    tools/parity_table.py --only tp2 "cp2 tp2+SP" --models gpt --steps 2
    tools/parity_table.py --json rows.json

Differences are relative: of the loss and the gradient norm the largest of all steps, of gradients the largest of all
parameters in the first and the last step, |difference| / (|reference| + 1e-3 · global norm), as
``tests/parity.py`` compares them. Exit code 0 if all are within 1e-5, 1 if one is not. Needs this checkout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from parity import STEPS, TOLERANCE
from parity_meshes import ROWS, Row, reference_of, run_row
from ranks import Ranks, RanksError


def run(rows: list[Row], num_steps: int, console: Console) -> list[dict[str, Any]]:
    """A record for each row: its options, differences, seconds, and the error of one that failed."""
    ranks, records = Ranks(), []
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("rows", total=len(rows))
            references = {
                model: reference_of(ranks, model, num_steps) for model in dict.fromkeys(row.model for row in rows)
            }
            for row in rows:
                start = time.perf_counter()
                record = {**dataclasses.asdict(row), "num_ranks": row.num_ranks, "steps": num_steps, "error": ""}
                try:
                    difference = run_row(ranks, row, references[row.model], num_steps)
                    record |= {**dataclasses.asdict(difference), "is_equal": difference.is_within}
                except RanksError as raised:
                    record |= {"is_equal": False, "error": str(raised).splitlines()[0]}
                    progress.console.print(f"{row}: {record['error']}")
                records.append({**record, "seconds": round(time.perf_counter() - start, 1)})
                progress.advance(task)
    finally:
        ranks.close()
    return records


def make_table(records: list[dict[str, Any]]) -> str:
    """Markdown: a line for each row."""
    lines = [
        "| mesh | ranks | model | layout, strategy | checkpointing | compile, schedule | loss | gradients | norm |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        attention = f"{r['layout']}, {r['strategy']}" if "cp" in r["mesh"] else ""
        compiled = ["compiled"] if r["compile"] else []
        staged = [r["schedule"]] if "pp" in r["mesh"] else []
        values = ["failed"] * 3 if r["error"] else [f"{r[name]:.1e}" for name in ("loss", "gradient", "grad_norm")]
        cells = [
            r["mesh"].replace(" ", "·"), str(r["num_ranks"]), r["model"], attention,
            r["checkpointing"].replace("none", ""), ", ".join(compiled + staged), *values,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    meshes, models = list(dict.fromkeys(row.mesh for row in ROWS)), ["gpt", "llama"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=meshes, default=meshes, metavar="MESH", help=", ".join(meshes))
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="both")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of training, at least 2 ({STEPS})")
    parser.add_argument("--json", metavar="FILE", help="a record for each row to FILE")
    arguments = parser.parse_args(argv)
    if arguments.steps < 2:
        parser.error(f"--steps must be at least 2, got {arguments.steps}")
    rows = [row for row in ROWS if row.mesh in arguments.only and row.model in arguments.models]
    records = run(rows, arguments.steps, Console(stderr=True))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print(make_table(records))
    num_equal = sum(record["is_equal"] for record in records)
    print(f"\n{num_equal} of {len(records)} rows equal one rank within {TOLERANCE}")
    return 0 if num_equal == len(records) else 1


if __name__ == "__main__":
    sys.exit(main())
