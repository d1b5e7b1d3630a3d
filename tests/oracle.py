"""The one oracle: dense attention in float64 on the whole sequence, and how far a rank's part is from it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dtcp

GRADIENT_NAMES = ("grad_query", "grad_key", "grad_value")


@dataclass(frozen=True)
class Case:
    """One attention problem and how it is to be solved."""

    layout: str = "head_tail"
    strategy: str = "ring"
    is_causal: bool = True
    heads: tuple[int, int, int, int] = (4, 4, 16, 16)  # Hq, Hkv, D, Dv
    seq_len: int = 97
    dtype: str = "float32"
    kernel: str = "auto"
    qkv_format: str = "bhsd"
    batch: int = 2
    query_scale: float = 1.0
    scale: float | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass
class Problem:
    """Whole inputs of a case, (B, H, S, D), as the values that the case's dtype can hold; and the right answer."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    answer: dict[str, Tensor]  # out, lse, grad_query, grad_key, grad_value in float64


def make_problem(case: Case, seed: int = 0) -> Problem:
    """Every rank makes the same whole problem; K and V of different ranks are different parts of it."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, head_dim, value_dim = case.heads

    def draw(heads: int, dim: int, factor: float = 1.0) -> Tensor:
        x = torch.randn(case.batch, heads, case.seq_len, dim, generator=generator, dtype=torch.float64) * factor
        return x.to(case.torch_dtype)

    query, key = draw(num_heads, head_dim, case.query_scale), draw(num_kv_heads, head_dim)
    value, grad_out = draw(num_kv_heads, value_dim), draw(num_heads, value_dim)
    inputs = [x.double().clone().requires_grad_() for x in (query, key, value)]
    out, lse = dtcp.reference_attention(
        *inputs, is_causal=case.is_causal, scale=case.scale, enable_gqa=True, return_lse=True
    )
    grads = torch.autograd.grad(out, inputs, grad_out.double())
    answer = {"out": out.detach(), "lse": lse.detach(), **dict(zip(GRADIENT_NAMES, grads, strict=True))}
    return Problem(query, key, value, grad_out, answer)


def solve(case: Case, problem: Problem, mesh: Any, layout: dtcp.SequenceLayout, **overrides: Any) -> dict[str, Tensor]:
    """This rank's out, lse and gradients of the case, as (B, H, S_local, …)."""
    swap = case.qkv_format == "bshd"

    def local(x: Tensor) -> Tensor:
        part = dtcp.shard(x, mesh, layout, dim=2)
        return part.transpose(1, 2).contiguous() if swap else part

    inputs = [local(x).requires_grad_() for x in (problem.query, problem.key, problem.value)]
    options = {
        "mesh": mesh, "layout": layout, "is_causal": case.is_causal, "kernel": case.kernel,
        **options_of(case.strategy, layout.cp),
        "qkv_format": case.qkv_format, "scale": case.scale, "enable_gqa": True, "return_lse": True,
    }  # fmt: skip
    out, lse = dtcp.context_parallel_attention(*inputs, **(options | overrides))
    grads = torch.autograd.grad(out, inputs, local(problem.grad_out))
    by_head = [x.transpose(1, 2) if swap else x for x in (out.detach(), *grads)]
    return {"out": by_head[0], "lse": lse.detach(), **dict(zip(GRADIENT_NAMES, by_head[1:], strict=True))}


STRATEGIES = ("ring", "all_gather", "exchange", "ulysses", "hybrid")


def options_of(strategy: str, cp: int) -> dict[str, Any]:
    """How a call asks for ``strategy``; ``hybrid`` so that both its halves have something to do wherever they can."""
    if strategy != "hybrid":
        return {"strategy": strategy}
    degree = next((d for d in (2, 3, 5, 7) if cp % d == 0), 1)
    return {"strategy": "hybrid", "ulysses_degree": degree}


def relative_error(actual: Tensor, right: Tensor) -> float:
    """The larger of max|Δ| / max|right| and ‖Δ‖ / ‖right‖; infinite if ``actual`` has a NaN that ``right`` has not."""
    difference = actual.double() - right.double()
    if difference.numel() == 0:
        return 0.0
    if difference.isnan().any():
        return float("inf")
    largest, norm = right.abs().max().double().item(), right.double().norm().item()
    return max(difference.abs().max().item() / (largest or 1.0), difference.norm().item() / (norm or 1.0))


def single_device(case: Case, problem: Problem) -> dict[str, Tensor]:
    """The same by torch's own fused attention on one device, in the dtype of the case; V padded to D if need be."""
    num_heads, num_kv_heads, head_dim, value_dim = case.heads
    width = max(head_dim, value_dim)
    inputs = [x.clone().requires_grad_() for x in (problem.query, problem.key, problem.value)]
    padded = [torch.nn.functional.pad(x, (0, width - x.size(-1))) for x in inputs]
    scale = head_dim**-0.5 if case.scale is None else case.scale
    out = torch.nn.functional.scaled_dot_product_attention(
        *padded, is_causal=case.is_causal, scale=scale, enable_gqa=num_heads != num_kv_heads
    )[..., :value_dim]
    grads = torch.autograd.grad(out, inputs, problem.grad_out)
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(x.detach() for x in padded), 0.0, case.is_causal, scale=scale
    )
    return {"out": out.detach(), "lse": lse, **dict(zip(GRADIENT_NAMES, grads, strict=True))}


def all_pairs(axes: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """A small set of combinations in which every pair of values of two axes occurs together. Deterministic, greedy."""
    names, values = list(axes), [list(v) for v in axes.values()]
    pairs = list(itertools.combinations(range(len(names)), 2))
    missing = {(a, i, b, j) for a, b in pairs for i in range(len(values[a])) for j in range(len(values[b]))}
    chosen: list[list[int]] = []
    while missing:
        a, i, b, j = min(missing)
        row: dict[int, int] = {a: i, b: j}
        for axis in range(len(names)):
            if axis in row:
                continue
            gain = [
                sum(
                    (min(axis, o), k if axis < o else row[o], max(axis, o), row[o] if axis < o else k) in missing
                    for o in row
                )
                for k in range(len(values[axis]))
            ]
            # The least used of the best: later pairs then meet fresh values.
            used = [sum(c[axis] == k for c in chosen) for k in range(len(values[axis]))]
            row[axis] = max(range(len(gain)), key=lambda k: (gain[k], -used[k], -k))
        chosen.append([row[axis] for axis in range(len(names))])
        missing -= {(x, row[x], y, row[y]) for x, y in pairs}
    return [{name: values[axis][row[axis]] for axis, name in enumerate(names)} for row in chosen]
