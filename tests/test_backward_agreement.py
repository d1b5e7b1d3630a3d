"""Ranks that run other backwards, or in another order, raise on every rank; those who wait in vain say for what."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dtcp
from dtcp.models.attention import ScaledDotProductAttention

OTHER_CALLS = r"run the backwards of different calls, by rank \{0: \d+, 1: \d+\} .*in the same order, with requires"


def make_mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))


def attend(mesh: DeviceMesh, x: Tensor, layout: Any = None, **options: Any) -> Tensor:
    layout = layout or dtcp.make_layout("head_tail", seq_len=8 * mesh.size(), cp=mesh.size())
    return dtcp.context_parallel_attention(x, x, x, mesh=mesh, layout=layout, is_causal=True, **options)


def leaf(seed: int = 0) -> Tensor:
    return torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def join(mesh: DeviceMesh, x: Tensor) -> Tensor:
    return dtcp.unshard(x, mesh, dtcp.make_layout("head_tail", seq_len=8 * mesh.size(), cp=mesh.size()), dim=2)


OPERATIONS: dict[str, Callable[[DeviceMesh, Tensor], Tensor]] = {
    "ring": attend,
    "all_gather": functools.partial(attend, strategy="all_gather"),
    "unshard": join,
}


def check_order(rank: int, world: int, name: str, backend: str | None) -> None:
    mesh = make_mesh(world)
    operation = OPERATIONS[name]
    if backend:
        operation = torch.compile(operation, fullgraph=True, backend=backend)
    first, second = leaf(1), leaf(2)
    one, two = operation(mesh, first), operation(mesh, second)
    out, x = (two, second) if rank == 0 else (one, first)
    with pytest.raises(RuntimeError, match=OTHER_CALLS):
        torch.autograd.grad(out.sum(), x, retain_graph=True)
    # Nothing was exchanged, so the group is in step: the same graphs, now in one order.
    for out, x in ((two, second), (one, first)):
        alone = torch.autograd.grad(operation(mesh, x).sum(), x)[0]
        again = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in range(2)]
        assert torch.equal(again[0], alone)
        assert torch.equal(again[1], alone)
    # The backward of one call twice on one rank, of two calls on the other.
    torch.autograd.grad(two.sum(), second, retain_graph=True)
    with pytest.raises(RuntimeError, match=OTHER_CALLS):
        torch.autograd.grad(two.sum() if rank == 0 else one.sum(), second if rank == 0 else first)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_backwards_of_one_shape_in_another_order_are_refused_on_every_rank(ranks, name, backend):
    ranks.run(2, check_order, name, backend)


def check_other_operation(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    x = leaf()
    out, whole = attend(mesh, x), join(mesh, x)
    message = r"different operations: \{0: 'backward of context_parallel_attention', 1: '%s', 2: .*same backwards"
    for theirs, name in (
        (lambda: whole.sum().backward(), "backward of unshard"),
        (lambda: attend(mesh, x), "context_parallel_attention"),
    ):
        with pytest.raises(RuntimeError, match=message % name):
            if rank == 0:
                torch.autograd.grad(out.sum(), x, retain_graph=True)
            else:
                theirs()
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


def test_a_backward_beside_another_operation_is_refused_on_every_rank(ranks):
    ranks.run(3, check_other_operation)


def check_requires_grad(rank: int, world: int) -> None:
    mesh = make_mesh(world)
    message = r"requires_grad differs between the ranks of the group: \{0: 1, 1: 0, 2: 1\}.*same batch.*requires_grad"
    for backend in (None, "aot_eager"):
        run = torch.compile(attend, fullgraph=True, backend=backend) if backend else attend
        with pytest.raises(ValueError, match=message):
            run(mesh, leaf().detach() if rank == 1 else leaf())
        with pytest.raises(ValueError, match=message), torch.set_grad_enabled(rank != 1):
            run(mesh, leaf())
        # Which of the three wants a gradient is a rank's own affair: one backward makes all of them.
        query, key, value = (leaf(i).detach().requires_grad_(i == rank) for i in range(3))
        layout = dtcp.make_layout("head_tail", seq_len=8 * world, cp=world)
        out = dtcp.context_parallel_attention(query, key, value, mesh=mesh, layout=layout)
        out.sum().backward()
        assert [x.grad is not None for x in (query, key, value)] == [i == rank for i in range(3)]
    assert not run(mesh, leaf().detach()).requires_grad


def test_a_rank_without_gradients_beside_ranks_with_them_is_refused_in_the_forward(ranks):
    ranks.run(3, check_requires_grad)


def check_waiting(rank: int, world: int, name: str) -> None:
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=2)), "cpu", mesh_dim_names=("cp",))
    x = leaf()
    out = OPERATIONS[name](mesh, x)
    operation = "unshard" if name == "unshard" else "context_parallel_attention"
    if rank == 0:
        message = rf"backward of {operation}: rank 0 waited for .*not all of them came \(.*imed? out.*same backwards in"
        with pytest.raises(RuntimeError, match=message):
            out.sum().backward()
    dist.barrier()


@pytest.mark.parametrize("name", ["ring", "unshard"])
def test_a_backward_that_one_rank_leaves_out_ends_in_an_error_that_says_so(ranks, name):
    ranks.run(2, check_waiting, name)


def _selective(policy: CheckpointPolicy) -> Any:
    def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_attention = op == torch.ops.dtcp.attention_forward.default
        return policy if is_attention else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "non_reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "saved": {"use_reentrant": False, "context_fn": functools.partial(_selective, CheckpointPolicy.MUST_SAVE)},
    "recomputed": {
        "use_reentrant": False,
        "context_fn": functools.partial(_selective, CheckpointPolicy.MUST_RECOMPUTE),
    },
}


def check_checkpointed(rank: int, world: int, kind: str) -> None:
    mesh = make_mesh(world)
    xs = [leaf(seed) for seed in range(3)]

    def block(x: Tensor) -> Tensor:
        return attend(mesh, x.sin()).cos()

    right = [torch.autograd.grad(block(x).sum(), x)[0] for x in xs]
    outs = [checkpoint(block, x, **CHECKPOINTS[kind]) for x in xs]
    for index in (1, 2, 0):
        outs[index].sum().backward()
        assert torch.equal(xs[index].grad, right[index])
    if kind == "saved":  # the number of the first run is saved with it, so another order is seen
        one, two = (checkpoint(block, x, **CHECKPOINTS[kind]) for x in xs[:2])
        with pytest.raises(RuntimeError, match="run the backwards of different calls"):
            (two if rank == 0 else one).sum().backward()


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_backwards_of_checkpointed_calls_agree(ranks, kind):
    ranks.run(2, check_checkpointed, kind)


def check_recomputed_order(rank: int, world: int, use_reentrant: bool) -> None:
    """Two blocks, each with a checkpoint of its own inside, that only differ in their numbers."""
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = make_mesh(world)
    model = nn.Sequential(ScaledDotProductAttention())
    parallelize_module(model, mesh, {"0": dtcp.ContextParallel()})
    dtcp.set_sequence(model, dtcp.make_layout("head_tail", seq_len=8 * world, cp=world))

    def inner(x: Tensor) -> Tensor:
        return model[0](x, x, x).cos()

    def block(x: Tensor) -> Tensor:
        return checkpoint(inner, inner(x.sin()), use_reentrant=use_reentrant)

    def run() -> tuple[list[Tensor], list[Tensor]]:
        xs = [leaf(seed) for seed in range(2)]
        return xs, [checkpoint(block, x, use_reentrant=use_reentrant) for x in xs]

    xs, outs = run()
    right = [torch.autograd.grad(block(x).sum(), x)[0] for x in xs] if not use_reentrant else None
    for index in (1, 0):
        outs[index].sum().backward()
        assert right is None or torch.equal(xs[index].grad, right[index])
    xs, outs = run()
    with pytest.raises(RuntimeError, match=r"the ranks of the group recompute different checkpointed blocks, by rank"):
        outs[rank].sum().backward()
    # Out of a recomputation that failed nothing stays behind.
    xs, outs = run()
    outs[0].sum().backward()
    assert xs[0].grad.isfinite().all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_blocks_recomputed_in_another_order_are_refused_on_every_rank(ranks, use_reentrant):
    ranks.run(2, check_recomputed_order, use_reentrant)


def check_groups(rank: int, world: int) -> None:
    """Each group counts for itself: other ranks may have made other calls in theirs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    x = leaf(1)
    if rank % 2:  # the ranks of one outer group
        attend(mesh["outer"], x)
    outs = [attend(mesh[axis], x, scale=scale) for axis, scale in (("inner", 0.3), ("outer", 0.5))]
    alone = [torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for out in outs]
    together = torch.autograd.grad(outs[1].sum() + outs[0].sum(), x)[0]
    torch.testing.assert_close(together, alone[0] + alone[1])


def test_groups_count_their_calls_apart(ranks):
    ranks.run(4, check_groups)
