"""One timed pass of attention, and how two results are compared.

Shapes: query (B, Hq, S, D), key and value (B, Hkv, S, D).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import dtcp
from attention_bench.problem import Case, Problem, Seconds

_REFERENCE_TOKENS = 8192  # a head's scores and what follows from them take some 3 GB in float64


class Clock:
    """Marks in time: of the host, or of the CUDA stream."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"

    def mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float:
        if not self._is_cuda:
            return last - first
        last.synchronize()
        return first.elapsed_time(last) / 1000

    def settle(self) -> None:
        """Wait until nothing of this process is running."""
        if self._is_cuda:
            torch.cuda.synchronize()


def run_pass(
    attention: Callable[..., Tensor], inputs: list[Tensor], grad_out: Tensor, clock: Clock
) -> tuple[Seconds, list[Tensor]]:
    """Return the time, and [out, the inputs' gradients where they want any]."""
    start = clock.mark()
    out = attention(*inputs)
    middle = clock.mark()
    grads = torch.autograd.grad(out, inputs, grad_out) if out.requires_grad else ()
    stop = clock.mark()
    return Seconds(clock.seconds(start, middle), clock.seconds(start, stop)), [out.detach(), *grads]


def as_inputs(tensors: list[Tensor], problem: Problem, device: str) -> list[Tensor]:
    """(B, S, H, D) in memory, as projections leave it, seen as (B, H, S, D); leaves of the graph."""
    return [t.to(device).transpose(1, 2).detach().requires_grad_(problem.with_backward) for t in tensors]


def has_reference(case: Case) -> bool:
    """Whether the oracle's S×S scores are affordable."""
    return case.seq_len <= _REFERENCE_TOKENS


def reference_results(
    inputs: list[Tensor], grad_out: Tensor, told: dict[str, Any], *, with_backward: bool
) -> list[Tensor]:
    """Return [out, gradients of query, key, value (and sinks)] of ``dtcp.reference_attention``, one key head at a time.

    In float64 for float32 and float64, else in float32.
    """
    query, key, _, *_ = inputs
    wide = torch.float64 if query.dtype in (torch.float32, torch.float64) else torch.float32
    size, parts = query.size(1) // key.size(1), []
    for head in range(key.size(1)):
        queries = slice(head * size, (head + 1) * size)
        cuts = (queries, slice(head, head + 1), slice(head, head + 1))
        leaves = [x[:, cut].detach().to(wide) for x, cut in zip(inputs[:3], cuts, strict=True)]
        leaves += [sinks[queries].detach().to(wide) for sinks in inputs[3:]]
        leaves = [leaf.requires_grad_(with_backward) for leaf in leaves]
        own = told | {"head_offset": queries.start}
        if "alibi_slopes" in told:
            own["alibi_slopes"] = told["alibi_slopes"][queries].to(wide)
        if len(leaves) > 3:
            own["sinks"] = leaves[3]
        out = dtcp.reference_attention(*leaves[:3], **own, enable_gqa=size > 1)
        grads = torch.autograd.grad(out, leaves, grad_out[:, queries].to(wide)) if with_backward else ()
        parts.append([out.detach(), *grads])
    return [torch.cat(of_heads, 1 if of_heads[0].ndim == 4 else 0) for of_heads in zip(*parts, strict=True)]


def max_relative_error(actual: list[Tensor], expected: list[Tensor], whole: list[Tensor]) -> float:
    """Return the larger of max|Δ|/max|ref| and ‖Δ‖/‖ref‖ over out and gradients of this rank; NaN stays NaN.

    A result that is all but zero, such as the query gradient of a token that sees one key, is measured by 1 % of the
    largest of its kind: relative to itself it is rounding and nothing else.
    """
    errors = [torch.zeros((), dtype=torch.float64)]
    for kind in (slice(0, 1), slice(1, 4), slice(4, None)):  # out, gradients of tokens, of what is learned
        for norm in (math.inf, 2):
            norms = [torch.linalg.vector_norm(w.double(), norm) for w in whole[kind]]
            for a, e in zip(actual[kind], expected[kind], strict=True):
                scale = torch.linalg.vector_norm(e.double(), norm).clamp_min(0.01 * max(norms))
                errors.append(torch.linalg.vector_norm(a.double() - e.double(), norm) / scale)
    return float(torch.stack(errors).max())
