"""What is measured, and what comes out: values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
    is_causal: bool
    with_backward: bool
    device: str  # "cpu" or "cuda"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One row of the table."""

    seq_len: int
    layout: str
    strategy: str


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
    """One row of the table; the single process has no configuration."""

    seq_len: int
    configuration: Configuration | None
    samples: list[Seconds]  # one for each repeat, of the slowest rank
    checks: list[Check]  # one for each rank
