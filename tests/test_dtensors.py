"""Attention of DTensors: cut over cp, over tp, over both; inside a context and a plan; or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import dtcp
from cells import count_op_calls
from dtensors import HEADS, SEQUENCE, Problem, join, solve
from oracle import relative_error


def check_cp(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    # 5 tokens on 4 ranks leave the last with none; the op pads, and what is uneven stays uneven.
    for seq_len, is_causal, value_dim in ((16, True, 8), (13, True, 8), (5, False, 8), (7, True, 4), (world, True, 8)):
        with count_op_calls() as count:
            solve(Problem(seq_len, is_causal, value_dim), mesh, [SEQUENCE])
        assert count[0] == (world > 1), "torch's own way for Shard(2) gathers everything"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_dtensors_cut_along_the_sequence_are_exact(ranks, world):
    ranks.run(world, check_cp)


def check_tp(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for placement in (HEADS, Shard(0), Replicate()):
        with count_op_calls() as count:
            solve(Problem(11), mesh, [placement])
        assert count[0] == 0, "nothing is cut along the sequence"


def test_dtensors_cut_over_heads_or_rows_attend_rank_by_rank(ranks):
    ranks.run(2, check_tp)


def check_both(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    for placements in ([SEQUENCE, HEADS], [SEQUENCE, Shard(0)], [SEQUENCE, Replicate()], [HEADS, SEQUENCE]):
        with count_op_calls() as count:
            solve(Problem(13), mesh, placements)
        assert count[0] == 1


def test_dtensors_on_two_axes_are_exact(ranks):
    ranks.run(4, check_both)


def check_inference(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    problem = Problem(13)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = problem.attend(*(distribute_tensor(x, mesh, [SEQUENCE]) for x in problem.inputs[:3]))
            assert relative_error(out.full_tensor(), problem.answers[0]) < 1e-12
    with torch.autocast("cpu", torch.bfloat16):
        parts = [distribute_tensor(x.float(), mesh, [SEQUENCE]) for x in problem.inputs[:3]]
        assert problem.attend(*parts).dtype == torch.bfloat16


def test_inference_and_autocast_reach_dtensors(ranks):
    ranks.run(2, check_inference)


def check_refusals(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    x, uneven = torch.randn(2, 4, 8, 4), torch.randn(2, 3, 8, 4)

    def place(*placements: Placement, of: Tensor = x) -> DTensor:
        if any(p.is_partial() for p in placements):
            return DTensor.from_local(of, mesh, placements)
        return distribute_tensor(of, mesh, placements)

    cut = place(SEQUENCE, HEADS)
    layout = dtcp.make_layout("head_tail", seq_len=8, cp=2)
    local = dtcp.shard(x, mesh["cp"], layout, dim=2)
    in_layout = dtcp.as_dtensor(local, mesh, layout, placements=[SEQUENCE, Replicate()])
    striped = dtcp.make_layout("striped", seq_len=8, cp=2)
    for inputs, error, message in [
        ((cut, x, x), ValueError, "key is a plain tensor beside DTensors"),
        ((cut, place(Replicate(), HEADS), cut), ValueError, r"on mesh axis 'cp' .* redistribute the others"),
        ((cut, cut, place(SEQUENCE, Replicate())), ValueError, r"on mesh axis 'tp' .* redistribute the others"),
        ((place(SEQUENCE, Partial()),) * 3, ValueError, r"'tp' attention got query Partial.* redistribute first"),
        ((place(SEQUENCE, Shard(3)),) * 3, ValueError, r"the head dim cannot be cut; redistribute to Shard\(1\)"),
        ((place(SEQUENCE, SEQUENCE),) * 3, ValueError, "cut over 2 mesh axes, 'cp' and 'tp'; flatten"),
        ((place(SEQUENCE, HEADS, of=uneven),) * 3, ValueError, "3 heads cannot be cut evenly over 2 ranks"),
        ((distribute_tensor(x, mesh["cp"], [SEQUENCE]), cut, cut), ValueError, "must be on one mesh"),
        ((in_layout, place(SEQUENCE, Replicate()), in_layout), ValueError, "key without a layout"),
    ]:
        with pytest.raises(error, match=message):
            F.scaled_dot_product_attention(*inputs)
    with pytest.raises(ValueError, match="two layouts"):
        other = dtcp.as_dtensor(local, mesh, striped, placements=[SEQUENCE, Replicate()])
        F.scaled_dot_product_attention(in_layout, in_layout, other)
    with pytest.raises(ValueError, match="queries and keys in one layout"):
        F.scaled_dot_product_attention(in_layout, other, other, is_causal=True)
    for options, message in [
        ({"attn_mask": torch.ones(8, 8).bool()}, "with DTensors cut along the sequence; give it to dtcp.context_par"),
        ({"dropout_p": 0.1}, "dropout_p=0.1 with DTensors cut.*context_parallel_attention"),
    ]:
        with pytest.raises(NotImplementedError, match=message):
            F.scaled_dot_product_attention(cut, cut, cut, **options)
    shorter = place(SEQUENCE, HEADS, of=x[:, :, :6])
    with pytest.raises(ValueError, match="as many keys as queries, got 6 and 8"):
        F.scaled_dot_product_attention(cut, shorter, shorter, is_causal=True)
    for arguments, message in [
        ({"mesh": mesh}, "needs placements, one for each axis"),
        ({"mesh": mesh, "placements": [SEQUENCE]}, "a placement for each of the 2 mesh axes"),
        ({"mesh": mesh["cp"], "dim": 5}, "dim=5 is out of range"),
        ({"mesh": mesh["cp"], "dim": 1}, "must have layout.local_seq_len=4 slots"),
        ({"mesh": mesh["cp"], "strategy": "zigzag"}, "strategy must be one of"),
        ({"mesh": mesh["cp"], "kernel": "zigzag"}, "kernel must be one of"),
    ]:
        with pytest.raises(ValueError, match=message):
            dtcp.as_dtensor(torch.randn(2, 3, 4, 4), layout=layout, **arguments)
    with pytest.raises(ValueError, match="layout is for cp=3 but the mesh axis has 2 ranks"):
        dtcp.as_dtensor(local, mesh["cp"], dtcp.make_layout("striped", seq_len=8, cp=3))


def test_wrong_and_mixed_placements_are_refused_by_name(ranks):
    ranks.run(4, check_refusals)


def check_submesh(rank: int, world: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    mesh, problem = DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",)), Problem(12)
    for placement in (SEQUENCE, HEADS):
        parts = [distribute_tensor(x, mesh, [placement]) for x in problem.inputs[:3]]
        out = problem.attend(*parts)
        assert out.shape == problem.answers[0].shape
        if rank < 2:
            assert relative_error(out.full_tensor(), problem.answers[0]) < 1e-12
        else:
            assert out.to_local().numel() == 0


def test_ranks_outside_the_mesh_have_an_empty_part(ranks):
    ranks.run(3, check_submesh)


def check_torchs_own(rank: int, world: int) -> None:
    """Torch's context_parallel has shards of its own: attention inside it is not ours (on CPU torch has none)."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    buffers = [x.clone() for x in Problem(16).inputs[:3]]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]), count_op_calls() as count:
        with pytest.raises(NotImplementedError, match="flash_attention_for_cpu"):
            F.scaled_dot_product_attention(*buffers, is_causal=True, enable_gqa=True)
        assert count[0] == 0
    with count_op_calls() as count:
        solve(Problem(16), mesh, [SEQUENCE])
    assert count[0] == 1


def test_torchs_own_context_parallel_keeps_its_attention(ranks):
    ranks.run(2, check_torchs_own)


class Attention(nn.Module):
    is_causal = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Swapped(Attention):
    """In (B, S, H, D)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().forward(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def check_other_doors(rank: int, world: int, backend: str | None) -> None:
    """Heads as DTensors over tp, where a context or a plan cuts the sequence over cp."""
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    problem, layout = Problem(13), dtcp.make_layout("head_tail", seq_len=13, cp=2)

    def over_heads(module: Any) -> Any:
        def run(*parts: Tensor) -> Tensor:
            return module(*(DTensor.from_local(x, mesh["tp"], [HEADS]) for x in parts)).to_local()

        return torch.compile(run, backend=backend, fullgraph=True) if backend else run

    whole = [distribute_tensor(x, mesh["tp"], [HEADS]).to_local() for x in problem.inputs]
    *inputs, grad_out = (dtcp.shard(x, mesh["cp"], layout, dim=2) for x in whole)
    leaves = [x.requires_grad_() for x in inputs]

    def check(out: Tensor) -> None:
        problem.check(*(join(x, mesh, layout) for x in (out, *torch.autograd.grad(out, leaves, grad_out))))

    in_context = over_heads(Attention())
    for _ in range(2):
        with dtcp.context_parallel(mesh["cp"], seq_len=13, expected_attention_calls=1):
            out = in_context(*leaves)
        check(out)
    planned = parallelize_module(Attention(), mesh["cp"], dtcp.ContextParallel())
    dtcp.set_sequence(planned, layout)
    check(over_heads(planned)(*leaves))
    swapped = parallelize_module(Swapped(), mesh["cp"], dtcp.ContextParallel(qkv_format="bshd"))
    dtcp.set_sequence(swapped, layout)
    parts = (DTensor.from_local(x.transpose(1, 2), mesh["tp"], [Shard(2)]) for x in leaves)
    check(swapped(*parts).to_local().transpose(1, 2))
    if backend is None:
        cut = distribute_tensor(problem.inputs[0], mesh, [SEQUENCE, HEADS])
        over_cp = DTensor.from_local(leaves[0].detach(), mesh["cp"], [Replicate()])
        for wrong, message in ((cut, "axis over which a context or plan"), (over_cp, "'cp'.*give DTensors over other")):
            with pytest.raises(ValueError, match=message), dtcp.context_parallel(mesh["cp"], seq_len=13):
                F.scaled_dot_product_attention(wrong, wrong, wrong)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_heads_as_dtensors_go_with_a_context_and_a_plan(ranks, backend):
    ranks.run(4, check_other_doors, backend, timeout=120)


def check_others_untouched(rank: int, world: int, has_uneven_heads: bool) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    x = torch.randn(2, 4, 8, 4)
    right = F.scaled_dot_product_attention(x, x, x)
    # Torch's own business: nothing along the sequence, and no way to do it rank by rank.
    whole = distribute_tensor(x, mesh, [Replicate()])
    assert torch.allclose(F.scaled_dot_product_attention(whole, whole, whole).full_tensor(), right)
    if has_uneven_heads:
        heads = distribute_tensor(x[:, :3], mesh, [HEADS])
        out = F.scaled_dot_product_attention(heads, heads, heads).full_tensor()
        assert torch.allclose(out, right[:, :3], atol=1e-6)


@pytest.mark.parametrize(
    "has_uneven_heads",
    [False, pytest.param(True, marks=pytest.mark.slow)],  # torch looks for a placement for 10 seconds
)
def test_what_is_not_cut_along_the_sequence_stays_right(ranks, has_uneven_heads):
    ranks.run(2, check_others_untouched, has_uneven_heads)
