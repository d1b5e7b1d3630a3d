#!/usr/bin/env python3
"""Is attention right on this GPU, and what does cutting it cost? One device stands in for all ranks.

    tools/gpu_check.py                   tables, under four minutes; "no GPU: nothing checked" where there is none
    tools/gpu_check.py --json FILE       the same as a record in FILE too
    tools/gpu_check.py --device cpu      the same checks on small sizes, without a GPU

Sections: every kernel's (out, lse, gradients) against float64 · every strategy on every layout, its ranks as threads
of this process · time of all ranks' tiles beside one call of the whole sequence, at cp 2 to 16 and up to 128K tokens ·
peak memory by strategy · torch.library.opcheck. Each has its share of the time, and says so if it had to leave
something out. Exit code 1 if anything is beyond its tolerance. Needs torch (2.11 or later) and numpy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout is enough

from device_check.sections import Section

DEFAULT_SECONDS = 215.0
SHARES = {"kernels": 0.17, "strategies": 0.28, "tiles": 0.33, "memory": 0.08, "operators": 0.14}


def _run_of(name: str) -> Callable[..., None]:
    """Loaded when it runs: a broken part is a failure of its own section."""
    match name:
        case "kernels":
            from device_check.kernels import check_kernels as run
        case "strategies":
            from device_check.strategies import check_strategies as run
        case "tiles":
            from device_check.tiles import time_tiles as run
        case "memory":
            from device_check.memory import measure_memory as run
        case "operators":
            from device_check.operators import check_operators as run
        case _:
            raise ValueError(name)
    return run


def check(device: torch.device, seconds: float, names: list[str]) -> list[Section]:
    """Run the sections, each printed when it is done."""
    sections = []
    total = sum(SHARES[name] for name in names)
    for name in names:
        # What a section before has left over is given on.
        spare = sum(s.budget_seconds - s.seconds for s in sections)
        section = Section(name, max(seconds * SHARES[name] / total + spare, 0.2))
        sections.append(section)
        torch.manual_seed(0)
        with section.catching(f"section {name}"):
            _run_of(name)(device, section, is_small=device.type == "cpu")
        section.finish()
        section.print()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return sections


def describe(device: torch.device) -> dict[str, Any]:
    """Which device and versions the figures are of."""
    found: dict[str, Any] = {"torch": torch.__version__, "device": device.type, "python": sys.version.split()[0]}
    if device.type == "cuda":
        found |= {
            "card": torch.cuda.get_device_name(device), "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }  # fmt: skip
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: small sizes (cuda)")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help=f"for all sections ({DEFAULT_SECONDS})")
    parser.add_argument("--only", nargs="+", choices=list(SHARES), default=list(SHARES), help="sections (all)")
    parser.add_argument("--json", metavar="FILE", help="write a record there")
    arguments = parser.parse_args(argv)
    if not arguments.seconds > 0:
        parser.error(f"--seconds must be more than 0, got {arguments.seconds}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing checked")
        return 0
    start = time.monotonic()
    torch.set_float32_matmul_precision("highest")  # TF32 would be the error of the right answers
    device = torch.device(arguments.device)
    about = describe(device)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    sections = check(device, arguments.seconds, arguments.only)
    failures = [failure for section in sections for failure in section.failures]
    took = time.monotonic() - start
    cut = [s.name for s in sections if any(note.startswith("CUT SHORT") for note in s.notes)]
    print(f"\n{sum(s.num_checks for s in sections)} checks, {len(failures)} beyond tolerance, {took:.0f} s", end="")
    print(f"; cut short: {', '.join(cut)}" if cut else "")
    if arguments.json:
        record = {"environment": about, "seconds": round(took, 2), "sections": [s.record() for s in sections]}
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
