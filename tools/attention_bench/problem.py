"""What is measured, and what comes out: values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

# Largest relative difference between two right results. Measured: 1e-6 in float32, and up to 1e-2 in bfloat16 and
# 1.5e-3 in float16, a few units of the last place of results that are themselves rounded.
TOLERANCES = {"float32": 1e-5, "float64": 1e-11, "bfloat16": 3e-2, "float16": 4e-3}


@dataclass(frozen=True, slots=True)
class Problem:
    """What is the same in every measurement of one run."""

    num_ranks: int
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    with_backward: bool
    device: str  # "cpu" or "cuda"


@dataclass(frozen=True, slots=True)
class MaskChoice:
    """Which pairs are seen; see ``masks.py`` for what follows from it."""

    name: str
    window: int | None = None  # tokens that a query sees, itself included
    lengths: tuple[int, ...] | None = None  # of the documents

    def __str__(self) -> str:
        return self.name if self.window is None else f"{self.name}={self.window}"


@dataclass(frozen=True, slots=True)
class Case:
    """What is computed, whoever computes it."""

    seq_len: int
    mask: MaskChoice


@dataclass(frozen=True, slots=True)
class Configuration:
    """How the ranks compute a case."""

    case: Case
    layout: str
    strategy: str

    def __str__(self) -> str:
        return f"{self.case.seq_len} tokens, mask {self.case.mask}, layout {self.layout}, strategy {self.strategy}"


def strategy_arguments(name: str) -> dict[str, Any]:
    """How a call asks for ``ring``, ``hybrid:2`` and the like; wrong names are refused by the call."""
    strategy, _, degree = name.partition(":")
    return {"strategy": strategy, "ulysses_degree": int(degree) if degree.isdecimal() else degree or None}


class Seconds(NamedTuple):
    """Time of one pass."""

    forward: float
    total: float  # forward and backward


class Check(NamedTuple):
    """What one rank found before anything was timed."""

    error: float  # relative, the largest of out and gradients
    forward_bytes: int
    backward_bytes: int
    agreement_bytes: int  # to agree that the ranks are in the same call


class BenchmarkError(Exception):
    """The run cannot go on; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of the table.

    Attributes:
        computed_by: ``"torch"`` or ``"dtcp"`` in the single process, or how the ranks do it.
        samples: One for each repeat, of the slowest rank.
        checks: One for each rank; of the single process one.
        way: Of several ways in which the single process can compute the case, the one that was fastest.
    """

    case: Case
    computed_by: str | Configuration
    samples: list[Seconds]
    checks: list[Check]
    way: list[str]
