"""A part of the check: what it found, how long it may take, and what it had to leave out."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_NUM_SHOWN = 20  # failures; what is wrong with one kernel is often wrong in every problem


@dataclass
class Section:
    """One part of the check.

    Attributes:
        name: Of the section.
        budget_seconds: After which no further check begins.
        columns: Of the table, names of entries of ``rows``.
        rows: What the table shows.
        failures: What is beyond its tolerance, or raised.
        notes: What a reader has to know: checks that were left out above all.
        num_checks: How many checks were made.
    """

    name: str
    budget_seconds: float
    columns: tuple[str, ...] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_checks: int = 0
    seconds: float = 0.0
    _start: float = field(default_factory=time.monotonic)

    def fits(self, seconds: float = 0.0) -> bool:
        """Whether something that takes so long still fits."""
        return time.monotonic() - self._start + seconds < self.budget_seconds

    def within_budget(self, checks: list[Any], what: str) -> Iterator[Any]:
        """Yield the checks that fit, the first one whatever it costs; note how many did not."""
        seconds: list[float] = []
        for done, check in enumerate(checks):
            # Of the first, much is what a device and its libraries take to begin.
            each = statistics.median(seconds[1:]) if done > 1 else 0.0
            if done and not self.fits(each):
                self.notes.append(f"CUT SHORT: {done} of {len(checks)} {what} fitted into {self.budget_seconds:.1f} s")
                return
            start = time.monotonic()
            yield check
            seconds.append(time.monotonic() - start)

    def expect(self, what: str, error: float, tolerance: float) -> bool:
        """Count a check; note a failure unless ``error`` is within ``tolerance``. NaN is not."""
        self.num_checks += 1
        is_right = error <= tolerance
        if not is_right:
            self.failures.append(f"{what}: {error:.3g} is beyond its tolerance {tolerance:.3g}")
        return is_right

    @contextlib.contextmanager
    def catching(self, what: str) -> Iterator[None]:
        """Turn what is raised into a failure, so that one broken kernel hides no other."""
        try:
            yield
        except Exception as error:
            self.num_checks += 1
            message = str(error).strip().splitlines()
            self.failures.append(f"{what} raised {type(error).__name__}: {message[0] if message else ''}")

    def finish(self) -> None:
        self.seconds = time.monotonic() - self._start

    def record(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "section": self.name, "seconds": round(self.seconds, 2), "budget_seconds": self.budget_seconds,
            "num_checks": self.num_checks, "failures": self.failures, "notes": self.notes, "rows": self.rows,
        }  # fmt: skip

    def print(self) -> None:
        """A plain table; nothing but the standard library."""
        verdict = f"{len(self.failures)} FAILED" if self.failures else "all within tolerance"
        print(f"\n== {self.name}: {self.num_checks} checks, {verdict}; {self.seconds:.1f} s")
        cells = [[_shown(row.get(column, "")) for column in self.columns] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.columns, *cells, strict=True)]
        for line in ([*self.columns], *cells) if cells else ():
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        for note in self.notes:
            print(f"  note: {note}")
        for failure in self.failures[:_NUM_SHOWN]:
            print(f"  FAILED: {failure}")
        if len(self.failures) > _NUM_SHOWN:
            print(f"  … and {len(self.failures) - _NUM_SHOWN} more; all are in --json")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 1e-2 else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return str(value)
