"""Attention of DTensors in compiled graphs and in autograd's: groups, strides, changes in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtcp
from cells import count_op_calls
from dtensors import HEADS, SEQUENCE, Problem, join, solve, tagged
from oracle import relative_error

MODIFIED = "modified by an inplace operation|in place, which has the memory"


def check_modified(rank: int, world: int, backend: str | None) -> None:
    """The op saves local parts, whose versions do not count what is done to the DTensor; autograd sees it still."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=16, cp=world)
    problem = Problem(16)
    whole = problem.inputs[0][:, :2]

    def tag(x: Tensor) -> Any:
        return dtcp.as_dtensor(dtcp.shard(x, mesh, layout, dim=2), mesh, layout)

    ways: dict[str, Any] = {
        str(placement): lambda x, placement=placement: distribute_tensor(x, mesh, [placement])
        for placement in (SEQUENCE, HEADS, Shard(0), Replicate())
    } | {"layout": tag}
    for name, distribute in ways.items():

        def modify_out(x: Any) -> Any:
            out = problem.attend(x, x, x)
            out.mul_(2)
            return out.to_local().sum()

        def modify_input(x: Any) -> Any:
            x = x * 1
            out = problem.attend(x, x, x)
            x.mul_(2)
            return out.to_local().sum()

        for modify in (modify_out, modify_input):
            run = torch.compile(modify, backend=backend) if backend else modify
            x = distribute(whole) if name == "layout" else distribute(whole).requires_grad_()
            leaf = dtcp.shard(whole, mesh, layout, dim=2).requires_grad_()
            x = dtcp.as_dtensor(leaf, mesh, layout) if name == "layout" else x
            with pytest.raises(Exception, match=MODIFIED):
                run(x).backward()
                raise AssertionError((name, modify.__name__))
    leaf = dtcp.shard(whole, mesh, layout, dim=2).requires_grad_()
    local = leaf * 1
    out = dtcp.as_dtensor(local, mesh, layout).sin().to_local()
    local.mul_(2)
    with pytest.raises(RuntimeError, match=MODIFIED):
        out.sum().backward()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_modifying_dtensors_in_place_is_an_error(ranks, backend):
    ranks.run(2, check_modified, backend, timeout=120)


def check_strides(rank: int, world: int) -> None:
    mesh, problem = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), Problem(12, value_dim=4)
    with torch.no_grad():  # torch's math kernel: another order of memory than that of our op
        out = problem.attend(*(distribute_tensor(x, mesh, [HEADS]) for x in problem.inputs[:3]))
    joined = out.transpose(1, 2).reshape(2, 12, -1).full_tensor()
    assert relative_error(joined, problem.answers[0].transpose(1, 2).reshape(2, 12, -1)) < 1e-12
    attend = torch.compile(problem.attend, backend="aot_eager", fullgraph=True)
    for placement in (SEQUENCE, HEADS, Shard(0)):  # one function, several placements
        solve(problem, mesh, [placement], attend)


def test_the_result_has_the_strides_of_its_parts(ranks):
    ranks.run(2, check_strides)


def check_compiled(rank: int, world: int, backend: str) -> None:
    import torch._dynamo.testing

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    causal = Problem(16)
    attend = torch.compile(causal.attend, backend=counter, fullgraph=True)
    for seq_len in (16, 24, 16):  # a graph for each length
        with count_op_calls() as count:
            solve(Problem(seq_len), mesh, [SEQUENCE], attend)
        assert count[0] == 1
    assert counter.frame_count == 2
    uneven = [distribute_tensor(x, mesh, [SEQUENCE]) for x in Problem(13).inputs[:3]]
    with pytest.raises(Exception, match="13 tokens cut unevenly over 2 ranks under torch.compile"):
        attend(*uneven)

    def inside(query: Tensor, key: Tensor, value: Tensor, layout: Any) -> Tensor:
        parts = (dtcp.as_dtensor(x, mesh, layout) for x in (query, key, value))
        return causal.attend(*parts).to_local()

    counter.clear()
    torch._dynamo.reset()
    ways = [
        torch.compile(lambda q, k, v: causal.attend(q, k, v), backend=counter, fullgraph=True),
        torch.compile(inside, backend=counter, fullgraph=True),
    ]
    lengths = [(name, seq_len) for seq_len in (13, 14, 15) for name in ("head_tail", "striped")] * 2
    for way, is_inside in zip(ways, (False, True), strict=True):
        before = counter.frame_count
        for name, seq_len in lengths:
            problem, layout = Problem(seq_len), dtcp.make_layout(name, seq_len=seq_len, cp=world)
            if layout.local_seq_len != 8:
                continue
            leaves, parts, grad_out = tagged(problem, mesh, layout)
            with count_op_calls() as count:
                out = way(*leaves, layout) if is_inside else way(*parts).to_local()
            assert count[0] == 1
            grads = torch.autograd.grad(out, leaves, grad_out)
            problem.check(*(join(x, mesh, layout) for x in (out, *grads)))
        assert counter.frame_count == before + 1, "another length or layout in as many slots compiles nothing"


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_attention_of_dtensors_is_exact(ranks, backend):
    ranks.run(2, check_compiled, backend, timeout=180)


def check_group_of_a_graph(rank: int, world: int) -> None:
    from dtcp.collectives import describe_axis, resolve_group

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    for axis in (0, 1):
        name = describe_axis(mesh, axis)
        assert name == ranks_of(name), "the same on every rank, whatever its groups are called"
        group = resolve_group(name)
        members = torch.distributed.get_process_group_ranks(group)
        assert members == torch.distributed.get_process_group_ranks(mesh.get_group(axis)) and rank in members
    attend = torch.compile(Problem(16).attend, backend="inductor", fullgraph=True)
    solve(Problem(16), mesh, [SEQUENCE, HEADS], attend)
    with pytest.raises(RuntimeError, match="does not exist"):
        resolve_group('["mesh axis", [[0, 1, 2], [3, 4, 5]], 1]')


def ranks_of(name: str) -> str:
    names: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(names, name)
    return names[0]


def test_a_cached_graph_finds_the_group_of_its_rank(ranks):
    for _ in range(2):  # the second time from torch's cache
        ranks.run(4, check_group_of_a_graph, timeout=120)
