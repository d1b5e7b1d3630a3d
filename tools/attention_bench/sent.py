"""Bytes that leave a rank: counted, and as a formula."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import dtcp
from attention_bench.masks import layout_of, positional
from attention_bench.problem import Case, Configuration, Problem
from dtcp import collectives
from dtcp.mask import checked_mask

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

    None if pads spoil the formulas, or a mask: what a ring sends by documents, windows and padding follows from them,
    and what a ring over merged ranks sends.

    With P ranks of m tokens a rank passes on (P−1)·m rows of keys and values in the forward, again in the backward,
    and returns the gradients, in float32 at least, of as many rows. Rows that no later rank reads stay: in a causal
    ring the ranks above s need half of s's rows with head_tail, a quarter of the bytes in the mean; the ranks below
    need none with contiguous and all but the last with striped. An exchange sends what the mask lets other ranks see,
    counted here for any mask that is intervals. Ulysses sends heads: see ``_ulysses``.
    """
    layout = layout_of(problem, configuration)
    row = 2 * problem.batch_size * problem.num_kv_heads * problem.head_dim
    row_bytes = row * getattr(torch, problem.dtype).itemsize
    grad_bytes = row * (8 if problem.dtype == "float64" else 4)
    if configuration.strategy == "ulysses":
        forward, backward = _ulysses(problem, layout)
    else:
        rows = _passed_and_returned(problem, configuration, layout)
        if rows is None:
            return None
        forward = [int(p * row_bytes) for p in rows[0]]
        backward = [int(p * row_bytes + r * grad_bytes) for p, r in zip(*rows, strict=True)]
    return forward, backward if problem.with_backward else [0] * layout.cp


def _passed_and_returned(
    problem: Problem, configuration: Configuration, layout: dtcp.SequenceLayout
) -> tuple[list[float], list[float]] | None:
    """Rows of keys that each rank passes on, and rows whose gradient it returns; means over the batch."""
    mask = configuration.case.mask.name
    if configuration.strategy == "exchange":
        return _needed(problem, configuration.case, layout)
    if layout.padded_seq_len != layout.seq_len:
        return None
    last, m = layout.cp - 1, layout.local_seq_len
    ranks = range(layout.cp)
    reads = "full" if mask in _LIKE_FULL else layout.name if mask in _LIKE_CAUSAL else "some"
    match configuration.strategy, reads:
        case ("all_gather", _) | ("ring", "full"):
            return [last * m] * layout.cp, [last * m] * layout.cp
        case "ring", "contiguous":
            return [(r + 1) * m if r < last else 0 for r in ranks], [r * m for r in ranks]
        case "ring", "head_tail":
            passed = [last * m - (r - 1) * m // 2 if r else last * m // 2 for r in ranks]
            return passed, [last * m - r * m // 2 for r in ranks]
        case "ring", "striped":
            return [last * m - min(r, 1) for r in ranks], [last * m - (last - r) for r in ranks]
        case _:
            return None


def _needed(problem: Problem, case: Case, layout: dtcp.SequenceLayout) -> tuple[list[float], list[float]]:
    """Of every pair of ranks, the keys of one that some query of the other sees, looked at one by one."""
    cp, rows = layout.cp, range(problem.batch_size)
    counts = np.zeros((cp, cp))
    mask = checked_mask(**positional(problem, case))
    for row in rows:
        first, stop = mask.intervals(layout.seq_len, layout.seq_len, row)
        positions = [layout.positions(rank).numpy() for rank in range(cp)]
        held = [(p[row % len(p)] if p.ndim == 2 else p) for p in positions]
        held = [p[p < layout.seq_len] for p in held]
        for reader in range(cp):
            is_seen = np.zeros(layout.seq_len, dtype=bool)
            for start, end in zip(first[held[reader]], stop[held[reader]], strict=True):
                is_seen[start:end] = True
            counts[reader] += [0 if owner == reader else is_seen[held[owner]].sum() for owner in range(cp)]
    counts /= len(rows)
    return counts.sum(axis=0).tolist(), counts.sum(axis=1).tolist()


def _ulysses(problem: Problem, layout: dtcp.SequenceLayout) -> tuple[list[int], list[int]]:
    """Heads of queries, keys and values there, and of the output back; gradients the other way.

    A rank gets Hq/P query heads, as evenly as it goes, and the key heads that they read, in the dtype of the inputs;
    gradients of key heads that several ranks read are shares, in float32 at least.
    """
    cp, num_heads, num_kv_heads = layout.cp, problem.num_heads, problem.num_kv_heads
    size = getattr(torch, problem.dtype).itemsize
    head = problem.batch_size * layout.local_seq_len * problem.head_dim * size
    own = [range(r * num_heads // cp, (r + 1) * num_heads // cp) for r in range(cp)]
    keys = [len({h * num_kv_heads // num_heads for h in heads}) for heads in own]
    share = max(1, (8 if problem.dtype == "float64" else 4) // size) if sum(keys) > num_kv_heads else 1
    forward, backward = [], []
    for r in range(cp):
        others = [o for o in range(cp) if o != r]
        forward.append(head * (sum(len(own[o]) + 2 * keys[o] for o in others) + len(others) * len(own[r])))
        mine = len(own[r]) + 2 * keys[r] * share
        backward.append(head * (sum(len(own[o]) for o in others) + len(others) * mine))
    return forward, backward
