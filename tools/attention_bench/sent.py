"""Bytes that leave a rank: counted, and as a formula."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from attention_bench.masks import layout_of
from attention_bench.problem import Configuration, Problem
from dtcp import collectives

_LIKE_FULL = ("full", "prefix_lm")  # a mask_mod may look at every key
_LIKE_CAUSAL = ("causal", "sinks", "bias", "alibi", "softcap")


@dataclass(slots=True)
class SentBytes:
    """Bytes that left this rank for others: ``data``, and ``agreement`` that the ranks are in the same call."""

    data: int = 0
    agreement: int = 0


@contextlib.contextmanager
def count_bytes() -> Iterator[SentBytes]:
    """Count what dtcp sends inside the block, in every way it has: messages, all-gather, reduce-scatter.

    A collective counts as each rank's part sent once to each other rank, whatever the backend's algorithm.
    """
    sent, agreeing = SentBytes(), False
    real = (dist.batch_isend_irecv, collectives._all_gather, collectives._reduce_scatter, collectives.all_gather_ints)

    def add(num_bytes: int) -> None:
        if agreeing:
            sent.agreement += num_bytes
        else:
            sent.data += num_bytes

    def batch(operations: list[dist.P2POp]) -> list[dist.Work]:
        add(sum(op.tensor.nbytes for op in operations if op.op is dist.isend))
        return real[0](operations)

    def all_gather(output: Tensor, rows: Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
        add(rows.nbytes * (group.size() - 1))
        return real[1](output, rows, group=group, **options)

    def reduce_scatter(output: Tensor, rows: Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
        add(output.nbytes * (group.size() - 1))
        return real[2](output, rows, group=group, **options)

    def all_gather_ints(*arguments: Any) -> list[list[int]]:
        nonlocal agreeing
        agreeing = True
        try:
            return real[3](*arguments)
        finally:
            agreeing = False

    with (
        mock.patch.object(dist, "batch_isend_irecv", batch),
        mock.patch.multiple(
            collectives, _all_gather=all_gather, _reduce_scatter=reduce_scatter, all_gather_ints=all_gather_ints
        ),
    ):
        yield sent


def closed_form_bytes(problem: Problem, configuration: Configuration) -> tuple[list[int], list[int]] | None:
    """Return the bytes that each rank sends in the forward and in the backward.

    None if pads spoil the formulas, or a mask: what a ring sends by documents, windows and padding follows from them.

    With P ranks of m tokens a rank passes on (P−1)·m rows of keys and values in the forward, again in the backward,
    and returns the gradients, in float32 at least, of as many rows. Rows that no later rank reads stay: in a causal
    ring the ranks above s need half of s's rows with head_tail, a quarter of the bytes in the mean; the ranks below
    need none with contiguous and all but the last with striped.
    """
    layout = layout_of(problem, configuration)
    if layout.padded_seq_len != layout.seq_len:
        return None
    last, m = layout.cp - 1, layout.local_seq_len
    mask = configuration.case.mask.name
    reads = "full" if mask in _LIKE_FULL else layout.name if mask in _LIKE_CAUSAL else "some"
    match configuration.strategy, reads:
        case ("all_gather", _) | ("ring", "full"):
            passed, returned = [last * m] * layout.cp, [last * m] * layout.cp
        case "ring", "contiguous":
            passed = [(r + 1) * m if r < last else 0 for r in range(layout.cp)]
            returned = [r * m for r in range(layout.cp)]
        case "ring", "head_tail":
            passed = [last * m - (r - 1) * m // 2 if r else last * m // 2 for r in range(layout.cp)]
            returned = [last * m - r * m // 2 for r in range(layout.cp)]
        case "ring", "striped":
            passed = [last * m - min(r, 1) for r in range(layout.cp)]
            returned = [last * m - (last - r) for r in range(layout.cp)]
        case _:
            return None
    row = 2 * problem.batch_size * problem.num_kv_heads * problem.head_dim
    row_bytes = row * getattr(torch, problem.dtype).itemsize
    grad_bytes = row * (8 if problem.dtype == "float64" else 4)
    backward = [p * row_bytes + r * grad_bytes for p, r in zip(passed, returned, strict=True)]
    return [p * row_bytes for p in passed], backward if problem.with_backward else [0] * layout.cp
