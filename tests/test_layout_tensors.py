"""What ``as_dtensor`` gives: exact attention in any layout, and no operation that would read natural order."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import dtcp
from cells import count_op_calls
from dtensors import HEADS, SEQUENCE, Problem, join, tagged
from oracle import STRATEGIES, options_of


def check_tagged(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for name in ("head_tail", "striped", "contiguous"):
        for strategy in STRATEGIES:
            problem, layout = Problem(13), dtcp.make_layout(name, seq_len=13, cp=world)
            leaves, parts, grad_out = tagged(problem, mesh, layout, **options_of(strategy, world), kernel="math")
            with count_op_calls() as count:
                out = problem.attend(*parts)
            assert count[0] == 1 and out.shape == (2, 4, layout.padded_seq_len, 8)
            # What does not look along the sequence keeps the layout: numbers, another of the same, a transpose.
            out = ((out * 2 + out).transpose(1, 2) / 3).transpose(2, 1)
            grads = torch.autograd.grad(out.to_local(), leaves, grad_out)
            problem.check(*(join(x, mesh, layout) for x in (out.to_local(), *grads)))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_distributed_tensors_in_a_layout_are_exact(ranks, world):
    ranks.run(world, check_tagged)


def check_tagged_on_two_axes(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    problem, layout = Problem(13), dtcp.make_layout("head_tail", seq_len=13, cp=2)
    leaves, parts, grad_out = tagged(problem, mesh, layout, placements=[SEQUENCE, HEADS])
    out = problem.attend(*parts).to_local()
    problem.check(*(join(x, mesh, layout) for x in (out, *torch.autograd.grad(out, leaves, grad_out))))


def test_a_layout_goes_with_heads_cut_over_tp(ranks):
    ranks.run(4, check_tagged_on_two_axes)


def check_natural_order_refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=8, cp=world)
    local = dtcp.shard(torch.randn(1, 2, 8, 4), mesh, layout, dim=2)
    x = dtcp.as_dtensor(local, mesh, layout)
    operations = {
        "full_tensor": lambda: x.full_tensor(),
        "redistribute": lambda: x.redistribute(mesh, [Replicate()]),
        "slice": lambda: x[:, :, :2],
        "select": lambda: x[0],
        "cumsum": lambda: x.cumsum(2),
        "sum": lambda: x.sum(),
        "matmul": lambda: x @ x.transpose(2, 3),
        "cat": lambda: torch.cat([x, x], 2),
        "softmax": lambda: x.softmax(2),
        "flip": lambda: x.flip(2),
        "view": lambda: x.reshape(-1),
        "dropout": lambda: torch.bernoulli(x),
    }
    for name, operation in operations.items():
        with pytest.raises(NotImplementedError, match=r"natural order.*head_tail|to_local"):
            operation()
            raise AssertionError(name)
    natural = distribute_tensor(torch.randn(1, 2, 8, 4), mesh, [SEQUENCE])
    for other in (natural, torch.randn(1, 2, 8, 4), torch.randn(4)):
        with pytest.raises(NotImplementedError, match="cut both by shard and as_dtensor"):
            x * other
    striped = dtcp.as_dtensor(local, mesh, dtcp.make_layout("striped", seq_len=8, cp=world))
    with pytest.raises(ValueError, match=r"two layouts, .*head_tail.*striped"):
        x + striped
    assert torch.equal((x * torch.tensor(2.0)).to_local(), local * 2) and "LayoutTensor" in repr(x)
    for change in (lambda: x.add_(1), lambda: x.zero_(), lambda: x.copy_(x * 2)):
        with pytest.raises(NotImplementedError, match="in place, which has the memory of another; use a copy"):
            change()
    with pytest.raises(NotImplementedError, match="natural order"):
        torch.equal(x, x)
    with pytest.raises(NotImplementedError, match="no leaf that needs a gradient"):
        dtcp.as_dtensor(local.clone(), mesh, layout).requires_grad_().to_local().sum().backward()


def test_operations_in_natural_order_are_refused_on_a_layout(ranks):
    ranks.run(2, check_natural_order_refused)
