"""Attention of DTensors: cut over cp, over tp, over both; in a layout; inside a context and a plan; or refused."""

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


def check_tagged(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for name in ("head_tail", "striped", "contiguous"):
        for strategy in ("ring", "all_gather"):
            problem, layout = Problem(13), dtcp.make_layout(name, seq_len=13, cp=world)
            leaves, parts, grad_out = tagged(problem, mesh, layout, strategy=strategy, kernel="math")
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
        ({"attn_mask": torch.ones(8, 8).bool()}, "with DTensors cut along the sequence: a mask over"),
        ({"dropout_p": 0.1}, "dropout_p=0.1; use 0.0"),
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
    swapped = parallelize_module(Attention(), mesh["cp"], dtcp.ContextParallel(qkv_format="bshd"))
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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
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
