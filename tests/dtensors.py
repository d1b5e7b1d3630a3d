"""A problem of attention for DTensors, and its solution against the oracle."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor

import dtcp
from oracle import relative_error

SEQUENCE, HEADS = Shard(2), Shard(1)


class Problem:
    """Whole query, key, value and upstream gradient, float64, grouped heads; and the right answers."""

    def __init__(self, seq_len: int, is_causal: bool = True, value_dim: int = 8) -> None:
        generator = torch.Generator().manual_seed(seq_len)
        shapes = (4, 8), (2, 8), (2, value_dim), (4, value_dim)
        self.inputs = [
            torch.randn(2, heads, seq_len, dim, generator=generator, dtype=torch.float64) for heads, dim in shapes
        ]
        self.is_causal = is_causal
        leaves = [x.clone().requires_grad_() for x in self.inputs[:3]]
        out = dtcp.reference_attention(*leaves, is_causal=is_causal, enable_gqa=True)
        self.answers = [out.detach(), *torch.autograd.grad(out, leaves, self.inputs[3])]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal, enable_gqa=True)

    def check(self, *found: Tensor) -> None:
        for name, x, right in zip(("out", "query", "key", "value"), found, self.answers, strict=True):
            assert relative_error(x, right) < 1e-12, name


def solve(problem: Problem, mesh: Any, placements: list[Placement], attend: Any = None) -> None:
    """Plain DTensors, forward and backward, against the oracle."""
    *inputs, grad_out = (distribute_tensor(x, mesh, placements) for x in problem.inputs)
    leaves = [x.requires_grad_() for x in inputs]
    out = (attend or problem.attend)(*leaves)
    assert out.placements == tuple(placements) and out.shape == problem.answers[0].shape
    assert out.to_local().shape == distribute_tensor(problem.answers[0], mesh, placements).to_local().shape
    grads = torch.autograd.grad(out, leaves, grad_out)
    problem.check(out.full_tensor().detach(), *(g.full_tensor() for g in grads))


def tagged(problem: Problem, mesh: Any, layout: Any, **options: Any) -> tuple[list[Tensor], list[Any], Tensor]:
    """This rank's slots as leaves, the distributed tensors of them, and its part of the upstream gradient."""
    cp = mesh["cp"] if mesh.ndim > 1 else mesh
    whole = problem.inputs
    if mesh.ndim > 1:
        whole = [distribute_tensor(x, mesh["tp"], [HEADS]).to_local() for x in whole]
    *inputs, grad_out = (dtcp.shard(x, cp, layout, dim=2) for x in whole)
    leaves = [x.requires_grad_() for x in inputs]
    return leaves, [dtcp.as_dtensor(x, mesh, layout, **options) for x in leaves], grad_out


def join(x: Tensor, mesh: Any, layout: Any) -> Tensor:
    whole = dtcp.unshard(x.detach(), mesh["cp"] if mesh.ndim > 1 else mesh, layout, dim=2)
    return DTensor.from_local(whole, mesh["tp"], [HEADS]).full_tensor() if mesh.ndim > 1 else whole
