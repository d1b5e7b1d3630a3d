#!/usr/bin/env python3
"""Print the losses of two runs side by side and their largest difference.

    tools/compare_runs.py outputs/four_ranks outputs/one_rank --names "4 ranks" "1 rank"
    tools/compare_runs.py A B --json

Differences are relative: |a - b| / |b|. Exit code 0 if the largest is within the tolerance, 1 if not, 2 if the runs
cannot be compared. Needs nothing but Python.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, NoReturn


def read_losses(run: Path) -> dict[int, float]:
    """Loss by step of a run folder."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        refuse(f"{path} does not exist; give the folder of a run")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def compare(first: dict[int, float], second: dict[int, float]) -> list[dict[str, Any]]:
    """A row per step, with the relative difference; runs of other steps than each other cannot be compared."""
    if not first or first.keys() != second.keys():
        refuse(f"the runs have {len(first)} and {len(second)} steps; compare runs of equal steps")
    return [
        {"step": step, "first": first[step], "second": second[step], "difference": _relative(first[step], second[step])}
        for step in sorted(first)
    ]


def _relative(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(b), 1e-12)


def refuse(message: str) -> NoReturn:
    print(f"compare_runs: {message}", file=sys.stderr)
    raise SystemExit(2)


def print_table(rows: list[dict[str, Any]], names: list[str], largest: float, tolerance: float) -> None:
    width = max(12, *(len(name) + 2 for name in names))
    print(f"{'step':>6}{names[0]:>{width}}{names[1]:>{width}}{'difference':>14}")
    for row in rows:
        print(f"{row['step']:6d}{row['first']:{width}.7f}{row['second']:{width}.7f}{row['difference']:14.1e}")
    verdict = "equal" if largest <= tolerance else "DIFFERENT"
    print(f"largest relative difference of the loss: {largest:.1e} (tolerance {tolerance:.0e}): {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path, help="two run folders; the second is the reference")
    parser.add_argument("--names", nargs=2, metavar="NAME", help="column heads; default: the folders' names")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference (default 1e-5)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    rows = compare(*(read_losses(run) for run in arguments.runs))
    largest = max(row["difference"] for row in rows)
    if arguments.json:
        print(json.dumps({"rows": rows, "largest": largest, "tolerance": arguments.tolerance}))
    else:
        print_table(rows, arguments.names or [run.name for run in arguments.runs], largest, arguments.tolerance)
    return 0 if largest <= arguments.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
