"""What the doctor found, as text for people and as JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dtcp.doctor.compare import CLEAR, Deviation
from dtcp.train.traffic import Traffic, kib_of, traffic_lines

NUM_WORST = 8
MOST_UNEXAMINED = 1 / 8  # of the parameters, in a right verdict: the biases of keys have none in any model


@dataclass(slots=True)
class Comparison:
    """One run of the job beside one rank's: a loss, a gradient norm and all gradients."""

    dtype: str  # in which the job computed
    reference_dtype: str
    loss: float
    reference_loss: float
    grad_norm: float
    reference_grad_norm: float
    number_limit: float  # relative, of loss and norm
    deviations: list[Deviation]  # the worst first
    missing: list[str]  # parameters that got no gradient

    @property
    def wrong(self) -> list[Deviation]:
        """Deviations over their limits."""
        return [deviation for deviation in self.deviations if deviation.is_wrong]

    @property
    def is_right(self) -> bool:
        """Whether everything is within its limit."""
        numbers = ((self.loss, self.reference_loss), (self.grad_norm, self.reference_grad_norm))
        is_near = all(abs(a - b) <= self.number_limit * abs(b) for a, b in numbers)  # False for NaN
        return is_near and not self.wrong and not self.missing


@dataclass(slots=True)
class Report:
    """Everything that the doctor says. Equal on every rank but for what only rank 0 has looked at."""

    job: str
    problems: list[str] = field(default_factory=list)  # beside numbers
    comparisons: list[Comparison] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)  # of the rank that sends most over an axis
    kept_bytes: dict[str, int] = field(default_factory=dict)  # by block, of the rank that keeps most
    whole_kept_bytes: dict[str, int] = field(default_factory=dict)  # of the uncut model, of as many rows
    attention_calls: dict[str, int] = field(default_factory=dict)  # by block, of dtcp's op
    pairs: list[int] = field(default_factory=list)  # by cp rank
    unexamined: list[str] = field(default_factory=list)  # trainable, but with no gradient, or one of rounding alone
    num_trainable: int = 0
    changed_buffers: list[str] = field(default_factory=list)  # by the forward, which does not read them

    @property
    def is_right(self) -> bool:
        """The verdict."""
        return self.is_examined and not self.is_wrong

    @property
    def is_wrong(self) -> bool:
        """Whether a difference or another problem was found."""
        return bool(self.problems) or not all(comparison.is_right for comparison in self.comparisons)

    @property
    def is_examined(self) -> bool:
        """Whether enough gradients are there to say that nothing is wrong."""
        return len(self.unexamined) <= MOST_UNEXAMINED * self.num_trainable

    @property
    def exit_code(self) -> int:
        """0 right, 1 wrong."""
        return 0 if self.is_right else 1

    def as_json(self) -> dict[str, Any]:
        """Plain types."""
        return {"is_right": self.is_right} | asdict(self)

    def __str__(self) -> str:
        parts = [self.job, ""]
        for comparison in self.comparisons:
            parts += [*_comparison_lines(comparison), ""]
        parts += [*self._pairs_lines(), *self._kept_lines()]
        if lines := traffic_lines(self.traffic):
            parts += [*lines, ""]
        parts += [f"problem: {problem}" for problem in self.problems]
        parts += [f"it looks like this: {hint}" for hint in self.hints]
        return "\n".join([*parts, *self._unexamined_lines(), self._verdict()])

    def _verdict(self) -> str:
        if self.is_wrong:
            return "WRONG: not what one rank computes"
        if not self.is_examined:
            return "UNDECIDED: nothing wrong was seen, but too many gradients are zero to see it"
        return "RIGHT: this mesh trains as one rank does"

    def _unexamined_lines(self) -> list[str]:
        lines = []
        if self.changed_buffers:
            lines.append(
                f"not compared: buffers that the forward changes by its own tokens, {_some(self.changed_buffers)}; add "
                "them up over the ranks before they are used"
            )
        if not self.unexamined:
            return lines
        names = _some(self.unexamined)
        line = (
            f"not examined: {len(self.unexamined)} of {self.num_trainable} parameters have no gradient on one rank, or "
            f"one of rounding alone: {names}"
        )
        if not self.is_examined:
            line += (
                "; have the forward reach them, give more tokens (doctor.seq_len, doctor.rows), or freeze what is not "
                "trained (requires_grad_(False))"
            )
        return [*lines, line]

    def _pairs_lines(self) -> list[str]:
        if len(self.pairs) < 2:
            return []
        most, mean = max(self.pairs), sum(self.pairs) / len(self.pairs)
        return [f"(query, key) pairs of a row by cp rank: {self.pairs}, most / mean {most / mean:.3f}", ""]

    def _kept_lines(self) -> list[str]:
        if not self.kept_bytes:
            return []
        sizes = list(self.kept_bytes.values())
        whole = self.whole_kept_bytes.get(next(iter(self.kept_bytes)), 0)
        kept = f"{kib_of(min(sizes))} … {kib_of(max(sizes))} KiB on a rank"
        line = f"kept for the backward by a block and microbatch: {kept}"
        return [line + (f"; {kib_of(whole)} KiB of as many rows by the whole model on one rank" if whole else ""), ""]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NUM_WORST]) + (", …" if len(names) > NUM_WORST else "")


def _comparison_lines(comparison: Comparison) -> list[str]:
    c = comparison
    limits = [d.limit for d in c.deviations]
    worst = max((d.error for d in c.deviations), default=0.0)
    lines = [
        f"computed in {c.dtype}, compared with one rank in {c.reference_dtype}",
        f"{'':<12}{'all ranks':>16}{'one rank':>16}{'difference':>14}",
        _number_line("loss", c.loss, c.reference_loss),
        _number_line("grad norm", c.grad_norm, c.reference_grad_norm),
        f"{len(c.wrong)} of {len(c.deviations)} gradients are wrong; the largest relative error is {worst:.1e} "
        f"(limit {_range(limits)})",
    ]
    lines += [f"no gradient arrived: {name}" for name in c.missing[:NUM_WORST]]
    shown = (c.wrong or c.deviations)[: NUM_WORST if c.wrong else 3]
    width = max((len(d.name) for d in shown), default=0)
    lines += [f"  {d.name:<{width}}  error {d.error:.1e}{_looks_like(d)}" for d in shown]
    return lines


def _range(limits: list[float]) -> str:
    low, high = min(limits, default=0.0), max(limits, default=0.0)
    return f"{low:.0e}" if low == high else f"{low:.0e} … {high:.0e}"


def _number_line(name: str, value: float, reference: float) -> str:
    difference = abs(value - reference) / abs(reference) if reference else math.inf
    return f"{name:<12}{value:>16.8g}{reference:>16.8g}{difference:>14.1e}"


def _looks_like(deviation: Deviation) -> str:
    if not deviation.is_wrong:
        return ""
    said = []
    if deviation.complete_over:
        said.append(f"right when added up over {' and '.join(deviation.complete_over)}")
    elif deviation.differs_over:
        said.append(f"differs over {' and '.join(deviation.differs_over)}")
    if deviation.residual <= CLEAR and not deviation.complete_over:
        said.append(f"{deviation.factor:.4g} times the right one")
    return f"  {'; '.join(said)}" if said else ""


def largest(of_ranks: Sequence[dict[str, int]]) -> dict[str, int]:
    """The largest value of each key over the ranks, in the order of first sight."""
    merged: dict[str, int] = {}
    for one in of_ranks:
        for name, value in one.items():
            merged[name] = max(merged.get(name, value), value)
    return merged
