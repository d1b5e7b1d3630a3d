"""Attention dropout is a function of seed, step, row, name, head, query and key; the same on any mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dtcp
from oracle import relative_error

P = 0.3
NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")


def make_inputs(
    batch: int, heads: int, kv_heads: int, seq_len: int, dim: int = 16, value_dim: int = 8
) -> list[Tensor]:
    """query, key, value and the gradient of out of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim))
    return [torch.randn(batch, n, seq_len, d, generator=generator) for n, d in sizes]


def whole_keys(batch: int, seq_len: int, step: int = 5) -> Tensor:
    return dtcp.dropout_keys(3, step, range(7, 7 + batch), torch.arange(seq_len))


def right_answer(inputs: list[Tensor], **options: Any) -> dict[str, Tensor]:
    *qkv, grad_out = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in qkv]
    out, lse = dtcp.reference_attention(*leaves, enable_gqa=True, return_lse=True, **options)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out)), strict=True))


def check_parity(rank: int, world: int, cases: list[dict[str, Any]]) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for case in cases:
        seq_len, is_causal = case["seq_len"], case.get("is_causal", True)
        layout = dtcp.make_layout(case.get("layout", "head_tail"), seq_len=seq_len, cp=world)
        inputs = make_inputs(2, 4, 2, seq_len)
        dropped = {"is_causal": is_causal, "dropout_p": case.get("p", P), "dropout_name": "layers.1"}
        right = right_answer(inputs, dropout_keys=whole_keys(2, seq_len), **dropped)

        leaves = [dtcp.shard(x, mesh, layout, dim=2).requires_grad_() for x in inputs[:3]]
        # Of the pads too, whatever is there.
        keys = dtcp.dropout_keys(3, 5, [7, 8], layout.positions(rank))
        out, lse = dtcp.context_parallel_attention(
            *leaves, mesh=mesh, layout=layout, enable_gqa=True, return_lse=True, dropout_keys=keys,
            strategy=case.get("strategy", "ring"), kernel=case.get("kernel", "auto"), **dropped,
        )  # fmt: skip
        grads = torch.autograd.grad(out, leaves, dtcp.shard(inputs[3], mesh, layout, dim=2))
        num_valid = layout.num_valid(rank)
        for name, found in zip(NAMES, (out, lse, *grads), strict=True):
            expected = dtcp.shard(right[name], mesh, layout, dim=2)
            error = relative_error(found.detach()[:, :, :num_valid], expected[:, :, :num_valid])
            assert error <= 1e-5, (case, name, error)


QUICK = [
    {"seq_len": 21, "layout": "head_tail", "strategy": "ring"},
    {"seq_len": 22, "layout": "striped", "strategy": "all_gather", "kernel": "math"},
    {"seq_len": 19, "layout": "contiguous", "strategy": "ring", "is_causal": False},
]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_output_and_gradients_equal_the_dense_oracle(ranks, world):
    ranks.run(world, check_parity, QUICK)
