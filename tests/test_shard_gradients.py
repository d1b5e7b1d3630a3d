"""Cut and join: gradients, graphs, compilation."""

from unittest import mock

import pytest
import torch

from cuts import cp_mesh, inputs, layouts, same
from dtcp.collectives import agree
from dtcp.layout import make_layout
from dtcp.shard import shard, unshard

# ---- gradients -------------------------------------------------------------------------------------------------------


def cut_backward(rank, world):
    mesh = cp_mesh(world)
    for layout in layouts(world):
        for data, dim in inputs(layout.seq_len):
            x = data.double().requires_grad_()
            local = shard(x, mesh, layout, dim=dim, pad_value=float("nan"))
            weight = torch.randn_like(local)
            (grad,) = torch.autograd.grad(local, x, weight)
            expected = torch.zeros_like(x)
            for slot, position in enumerate(layout.positions(rank).tolist()):
                if position < layout.seq_len:
                    expected.select(dim, position).copy_(weight.select(dim, slot))
            assert torch.equal(grad, expected), (layout, dim)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_gradient_of_a_cut_is_each_slot_at_its_token_and_zero_elsewhere(ranks, world):
    ranks.run(world, cut_backward)


def cut_embeddings(rank, world):
    mesh, layout = cp_mesh(world), make_layout("head_tail", seq_len=7, cp=world)
    torch.manual_seed(0)
    table = torch.nn.Embedding(10, 4, dtype=torch.float64)
    tokens = torch.randint(10, (2, 7))
    embedded = table(tokens)
    embedded.retain_grad()
    local = shard(embedded, mesh, layout)
    again = shard(embedded, mesh, layout)  # cut twice: the gradients add up
    (local.square().sum() + 3 * again.sum()).backward()
    position = layout.positions(rank)[: layout.num_valid(rank)]
    expected = torch.zeros_like(embedded)
    expected[:, position] = 2 * embedded.detach()[:, position] + 3
    assert torch.allclose(embedded.grad, expected, rtol=0, atol=1e-15)
    assert embedded.shape == (2, 7, 4)  # not resized in place
    torch.distributed.all_reduce(table.weight.grad)
    reference = torch.nn.functional.embedding(tokens, weight := table.weight.detach().clone().requires_grad_())
    (reference.square().sum() + 3 * reference.sum()).backward()
    assert torch.allclose(table.weight.grad, weight.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_embeddings_with_a_graph_are_cut_twice_and_their_shares_add_up(ranks, world):
    ranks.run(world, cut_embeddings)


def join_backward(rank, world):
    mesh = cp_mesh(world)
    for layout in layouts(world):
        for data, dim in inputs(layout.seq_len)[::3]:
            local = shard(data.double(), mesh, layout, dim=dim, pad_value=5).requires_grad_()
            valid = layout.num_valid(rank)
            weight = torch.rand_like(data.double()) + 1
            # Alike on all ranks (seeds are): the gradient is cp times that of one process.
            (grad,) = torch.autograd.grad((unshard(local, mesh, layout, dim=dim) * weight).sum(), local)
            expected = shard(weight * world, mesh, layout, dim=dim)
            assert torch.allclose(grad, expected, rtol=1e-15, atol=0), (layout, dim)
            assert not grad.narrow(dim, valid, layout.local_seq_len - valid).any()
            # A loss of its own on each rank: the sum of all.
            (grad,) = torch.autograd.grad((unshard(local, mesh, layout, dim=dim) * weight * 2**rank).sum(), local)
            expected = shard(weight * (2**world - 1), mesh, layout, dim=dim)
            assert torch.allclose(grad, expected, rtol=1e-15, atol=0), (layout, dim)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_gradient_of_a_join_is_the_sum_over_ranks_and_zero_in_pads(ranks, world):
    ranks.run(world, join_backward)


def join_backward_in_dtypes(rank, world):
    mesh, layout = cp_mesh(world), make_layout("head_tail", seq_len=7, cp=world)
    # 256 + 1 rounds to 256 in bf16: summed there in rank order, three ones beside a 256 are lost.
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        local = torch.zeros(1, layout.local_seq_len, dtype=dtype, requires_grad=True)
        unshard(local, mesh, layout).backward(torch.full((1, 7), large if rank == 0 else 1.0, dtype=dtype))
        assert local.grad.dtype == dtype
        expected = torch.tensor(large + world - 1).to(dtype)
        assert expected > large
        assert (local.grad[:, : layout.num_valid(rank)] == expected).all()
    for dtype in (torch.complex64, torch.complex128):
        local = torch.zeros(1, layout.local_seq_len, dtype=dtype, requires_grad=True)
        unshard(local, mesh, layout).backward(torch.full((1, 7), 1 + 1j * rank, dtype=dtype))
        expected = world + 1j * sum(range(world))
        assert (local.grad[:, : layout.num_valid(rank)] == expected).all()


def test_half_precision_gradients_are_summed_in_float32_and_complex_ones_as_they_are(ranks):
    ranks.run(4, join_backward_in_dtypes)


def differentiate_twice(rank, world):
    mesh = cp_mesh(world)
    for layout in layouts(world, (5, 6)):
        x = torch.randn(2, layout.seq_len, dtype=torch.float64, requires_grad=True)
        local = shard(x, mesh, layout)
        whole = unshard(local, mesh, layout)
        (grad,) = torch.autograd.grad((whole**3).sum(), x, create_graph=True)
        position = layout.positions(rank)[: layout.num_valid(rank)]
        mine = torch.zeros_like(x)
        mine[:, position] = 1
        assert torch.allclose(grad, 3 * x**2 * world * mine)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert torch.allclose(second, 6 * x * world * mine)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_second_derivatives_pass_through_cut_and_join(ranks, world):
    ranks.run(world, differentiate_twice)


# ---- compiled --------------------------------------------------------------------------------------------------------


def compile_both(rank, world):
    import torch._dynamo.testing

    mesh = cp_mesh(world)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(x, layout):
        local = shard({"b": x * 2, "a": [x, None]}, mesh, layout, pad_value=1)
        whole = unshard(local, mesh, layout)
        return local["b"], whole["b"] * whole["a"][0]

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for name, seq_len in (("head_tail", 7), ("head_tail", 9), ("striped", 12), ("contiguous", 10), ("head_tail", 5)):
        layout = make_layout(name, seq_len=seq_len, cp=world)
        results = []
        for fn in (step, compiled):
            x = torch.linspace(-1, 1, 2 * seq_len, dtype=torch.float64).view(2, seq_len).requires_grad_()
            local, whole = fn(x, layout)
            (grad,) = torch.autograd.grad(whole.sum() + local.sum() / 8, x)
            results.append((local, whole, grad))
        for eager, traced in zip(*results, strict=True):
            assert same(eager, traced)
        assert torch.equal(results[1][1], 2 * x * x)
    return counter.frame_count


@pytest.mark.parametrize("world", [1, 2])
def test_cut_and_join_compile_into_one_graph_and_equal_eager(ranks, world):
    frames = ranks.run(world, compile_both)
    assert len(set(frames)) == 1
    # One compilation for the first length, one for any length, and at most one for lengths without pads.
    assert frames[0] <= 4


def check_ops(rank, world):
    from dtcp import shard_ops  # an op does not travel with a test function

    mesh, layout = cp_mesh(world), make_layout("head_tail", seq_len=6, cp=world)
    group = mesh.get_group().group_name
    for x, dim in ((torch.randn(2, layout.local_seq_len, 3), 1), (torch.randn(layout.local_seq_len), 0)):
        for needs_grad in (False, True):
            arguments = (layout.state, 6, group, dim, 0, "", 1, needs_grad)
            # opcheck compares the outputs of two runs, and each call has another number.
            with mock.patch.object(shard_ops, "agree", lambda *args, **kwargs: 7 * bool(agree(*args, **kwargs))):
                torch.library.opcheck(shard_ops.unshard_op, (x.clone().requires_grad_(needs_grad), *arguments))
    for needs_grad in (False, True):
        x = torch.randn(2, 6, 3).requires_grad_(needs_grad)
        torch.library.opcheck(shard_ops.shard_op, (x, layout.state, layout.local_seq_len, rank, 1, 0, 0))


def test_opcheck_passes_with_and_without_gradients(ranks):
    ranks.run(2, check_ops)
