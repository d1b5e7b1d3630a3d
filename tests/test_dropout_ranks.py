"""Dropout on ranks: a part of the tokens drops what the whole would drop there, in tensors, DTensors and training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import dtcp
from dtcp.models import build_model
from parity import JOB, PEAKED, TINY, TOLERANCE, Ignored, Record, compare, record_run, scattered
from ranks import Ranks


def whole_keys(rows: int = 4, size: int = 13) -> Tensor:
    return dtcp.dropout_keys(3, 5, range(rows), torch.arange(size))


# ---- tensors and DTensors --------------------------------------------------------------------------------------------


def check_shards_of_ones(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """ones(2, 64), dropout 0.5, cut over cp: this rank's mask, and that of the same tokens on one rank."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    layout = dtcp.make_layout("head_tail", seq_len=64, cp=world)
    dropout = dtcp.Dropout(0.5, name="d")
    positions = layout.positions(rank)
    keys = dtcp.dropout_keys(0, 1, range(2), positions)
    out = dropout(torch.ones(2, layout.local_seq_len), keys)
    alone = dropout(torch.ones(2, 64), dtcp.dropout_keys(0, 1, range(2), torch.arange(64)))
    assert torch.equal(dtcp.unshard(out, mesh, layout), alone)
    return out


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_masks_differ_across_shards_and_agree_with_one_rank(ranks, world):
    masks = ranks.run(world, check_shards_of_ones)
    assert all(not torch.equal(masks[0], other) for other in masks[1:])


def check_dtensor(rank: int, world: int, axes: tuple[int, ...], placements: list[Placement], shape: list[int]) -> None:
    mesh = init_device_mesh("cpu", axes)
    generator = torch.Generator().manual_seed(0)
    whole, grad = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    keys, dropout = whole_keys(*shape[:2]), dtcp.Dropout(0.3, name="d")
    leaf = whole.clone().requires_grad_()
    expected = dropout(leaf, keys)
    expected.backward(grad)
    of_tokens = [p if isinstance(p, Shard) and p.dim < 2 else Replicate() for p in placements]
    for given_placements in (None, of_tokens, [Replicate()] * mesh.ndim):
        given = keys if given_placements is None else distribute_tensor(keys, mesh, given_placements)
        x = distribute_tensor(whole, mesh, placements).requires_grad_()
        out = dropout(x, given)
        assert out.placements == x.placements and out.shape == whole.shape and out.stride() == whole.stride()
        assert out.to_local().shape == x.to_local().shape
        out.backward(distribute_tensor(grad, mesh, placements))
        assert x.grad.placements == x.placements
        assert torch.equal(out.full_tensor(), expected) and torch.equal(x.grad.full_tensor(), leaf.grad)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_dtensors_drop_what_the_whole_drops(ranks, tp):
    for placement in (Shard(0), Shard(1), Shard(2), Shard(-1), Shard(3), Replicate()):
        for shape in ([4, 12, 16, 4], [4, 13, 7, 5], [4, 2, 5, 3]):  # the last two in uneven and in empty parts
            ranks.run(tp, check_dtensor, (tp,), [placement], shape)


def test_dtensors_on_two_axes_drop_what_the_whole_drops(ranks):
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Shard(2)]):
        ranks.run(4, check_dtensor, (2, 2), placements, [3, 13, 6])


def check_partial(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    x = DTensor.from_local(torch.ones(4, 13, 8), mesh, [Partial()], run_check=False)
    dtcp.Dropout(0.3, name="d")(x, whole_keys())


def test_partial_dtensors_are_refused(ranks):
    ranks.run_expecting(2, check_partial, NotImplementedError, "placed by Shard and Replicate, got .*Partial")


def check_local_keys_for_a_dtensor(rank: int, world: int) -> None:
    x = DTensor.from_local(torch.ones(4, 7, 8), init_device_mesh("cpu", (world,)), [Shard(1)], run_check=False)
    dtcp.Dropout(0.3, name="d")(x, whole_keys(size=7))


def test_a_dtensor_needs_the_keys_of_the_whole(ranks):
    ranks.run_expecting(2, check_local_keys_for_a_dtensor, ValueError, r"\(B, S\) = \(4, 14\).*got .*\(4, 7\)")


class Region(nn.Module):
    """What sequence parallelism cuts: its dropout's input is this rank's part of the positions, its keys are not."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = dtcp.Dropout(0.3, name="d")

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        return self.dropout(x, keys)


def check_region(rank: int, world: int, as_keyword: bool, backend: str | None) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    region = parallelize_module(Region(), mesh, {"dropout": dtcp.SequenceParallelDropout()})
    keys, whole = whole_keys(size=12), torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(0))
    if as_keyword:
        region.forward = lambda x, keys: region.dropout(x, keys=keys)
    if backend is not None:
        region.compile(fullgraph=True, backend=backend)
    x = whole.chunk(world, 1)[rank].clone().requires_grad_()
    out = region(x, keys)
    out.sum().backward()
    expected = Region()(whole, keys)
    assert torch.equal(out, expected.chunk(world, 1)[rank])
    assert torch.equal(x.grad != 0, out != 0)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_a_plan_cuts_the_keys_of_plain_tensors(ranks, tp):
    for as_keyword in (False, True):
        ranks.run(tp, check_region, as_keyword, None)


def test_a_plan_compiles(ranks):
    ranks.run(2, check_region, False, "aot_eager", timeout=120)


def check_cut_keys(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    region = parallelize_module(Region(), mesh, {"dropout": dtcp.SequenceParallelDropout()})
    region(torch.ones(4, 6, 8), whole_keys(size=6))


def test_a_plan_refuses_keys_that_are_cut_already(ranks):
    ranks.run_expecting(2, check_cut_keys, ValueError, r"keys of all positions, 2 times .*got keys \(4, 6\)")


def check_plain_region(rank: int, world: int) -> None:
    Region()(torch.ones(4, 6, 8), whole_keys(size=12))


def test_without_a_plan_a_part_of_the_positions_is_refused(ranks):
    ranks.run_expecting(2, check_plain_region, ValueError, r"keys must be .*\(4, 6\).*got .*\(4, 12\)")


def check_compiled_dtensors(rank: int, world: int) -> None:
    mesh, dropout = init_device_mesh("cpu", (world,)), dtcp.Dropout(0.3, name="d")
    whole = torch.randn(4, 4 * world, 8, generator=torch.Generator().manual_seed(0))
    keys = whole_keys(size=4 * world)
    compiled = torch.compile(dropout, fullgraph=True, backend="aot_eager")
    x = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
    out = compiled(x, keys)
    out.sum().backward()
    assert torch.equal(out.full_tensor(), dropout(whole, keys))
    assert torch.equal(x.grad.full_tensor() != 0, out.full_tensor() != 0)


def test_dtensors_compile(ranks):
    ranks.run(2, check_compiled_dtensors, timeout=120)


# ---- keys that nobody passes -----------------------------------------------------------------------------------------


def check_model_without_keys(rank: int, world: int, told: dict) -> None:
    model = build_model("gpt_tiny", num_layers=1, dim=32, dropout=0.1)
    if told:
        layout = dtcp.make_layout("contiguous", seq_len=8, cp=1)
        dtcp.set_sequence(model, layout, **told)
    model(torch.zeros(2, 8, dtype=torch.int64))


def test_several_ranks_need_step_and_rows(ranks):
    cure = r"dropout on 2 ranks needs .*dropout_keys=dtcp.dropout_keys.*set_sequence\(model, layout, step=..., rows"
    ranks.run_expecting(2, check_model_without_keys, ValueError, cure, {})
    ranks.run_expecting(2, check_model_without_keys, ValueError, "with cp=1 .*pass .*rows=range", {"step": 3})
    ranks.run(2, check_model_without_keys, {"step": 3, "rows": [0, 1]})


def check_unnamed_without_keys(rank: int, world: int) -> None:
    dtcp.Dropout(0.5)(torch.ones(2, 8, 4))


def test_a_dropout_without_keys_is_refused_on_several_ranks(ranks):
    ranks.run_expecting(2, check_unnamed_without_keys, ValueError, "dropout on 2 ranks needs")


def check_told_model(rank: int, world: int, door: str, layout_name: str) -> None:
    """Two microbatches in flight; each gets the masks of its own rows, whatever the model was told since."""
    cp, dp = 2, world // 2
    mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
    layout = dtcp.make_layout(layout_name, seq_len=13, cp=cp)
    options = {"num_layers": 2, "dim": 32, "dropout": 0.2, "attention_dropout": 0.2, "qk_init_scale": 8.0}
    model, whole = (build_model("gpt_tiny", **options) for _ in range(2))
    model.dropout_seed = 7
    if door == "plan":
        parallelize_module(model, mesh["cp"], {"layers.*.attention.sdpa": dtcp.ContextParallel()})
    tokens = torch.randint(0, 256, (4, 13), generator=torch.Generator().manual_seed(0))
    losses = []
    for step in (1, 2):
        rows = torch.arange(4).chunk(dp)[mesh.get_local_rank("dp")]
        dtcp.set_sequence(model, layout, step=step, rows=rows if dp > 1 else None)
        inputs = [tokens[rows], torch.arange(13).expand(len(rows), -1).contiguous()]
        if door == "plan":
            out = model(*(dtcp.shard(x, mesh["cp"], layout) for x in inputs))
        else:
            with dtcp.context_parallel(
                mesh["cp"], buffers=inputs, buffer_seq_dims=[1, 1], buffer_pad_values=0, layout=layout_name
            ):
                out = model(*inputs)
        out = dtcp.unshard(out, mesh["cp"], layout)
        expected = whole(tokens, dropout_keys=dtcp.dropout_keys(7, step, range(4), torch.arange(13)))
        torch.testing.assert_close(out, expected[rows], rtol=1e-4, atol=1e-5)
        losses.append((out.square().mean() / (cp * dp), expected.square().mean()))
    for loss, expected in reversed(losses):
        loss.backward()
        expected.backward()
    for (name, found), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
        dist.all_reduce(found.grad)
        if not name.endswith("key.bias"):
            assert (found.grad - wanted.grad).norm() < TOLERANCE * wanted.grad.norm(), name


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("door", "layout"), [("plan", "head_tail"), ("context", "striped")])
def test_a_model_told_step_and_rows_equals_one_rank(ranks, world, door, layout):
    ranks.run(world, check_told_model, door, layout)


# ---- training --------------------------------------------------------------------------------------------------------


def job(steps: int) -> list[str]:
    sizes = ["training.seq_len=97", f"training.steps={steps}"]
    return [*TINY["gpt"], *JOB, PEAKED, *sizes, "model.dropout=0.1"]


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Callable[..., Record]:
    @functools.cache
    def reference(steps: int, record: tuple[int, ...], *more: str) -> Record:
        return ranks.run(1, record_run, [*job(steps), *more], scattered, record)[0]

    return reference


MESHES = [
    ("mesh.cp=3 attention.layout=striped", 3),
    ("mesh.cp=4 attention.layout=contiguous", 4),
    ("mesh.dp_shard=2", 2),
    ("mesh.cp=2 mesh.dp_shard=2 attention.strategy=all_gather", 4),
    pytest.param("mesh.cp=2 training.local_batch_size=1", 2, marks=pytest.mark.slow),
]
MORE_MESHES = [("mesh.cp=2", 2), ("mesh.cp=2 mesh.dp_replicate=2", 4), ("mesh.cp=2 training.compile=true", 2)]


def check_training(ranks: Ranks, reference: Record, mesh: str, world: int, steps: int, record: tuple[int, ...]) -> None:
    overrides = [*job(steps), *mesh.split()]
    for rank, run in enumerate(ranks.run(world, record_run, overrides, scattered, record, timeout=300)):
        difference = compare(run, reference)
        assert difference.is_within, f"rank {rank}: {difference}"


@pytest.mark.parametrize(("mesh", "world"), MESHES)
def test_training_with_dropout_equals_one_rank(ranks, one_rank, mesh, world):
    check_training(ranks, one_rank(2, (1, 2)), mesh, world, 2, (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "world"), [*MESHES, *MORE_MESHES])
def test_long_training_with_dropout_equals_one_rank(ranks, one_rank, mesh, world):
    check_training(ranks, one_rank(20, (1, 20)), mesh, world, 20, (1, 20))


def test_dropout_does_something_to_training(one_rank):
    assert compare(one_rank(2, (1, 2), "model.dropout=0"), one_rank(2, (1, 2))).gradient > 1000 * TOLERANCE


@contextmanager
def keys_from(change: Callable[[list, Tensor], tuple[list, Tensor]]) -> Iterator[None]:
    from dtcp.train import trainer

    def wrong(seed, step, rows, positions):
        return right(seed, step, *change(list(rows), positions))

    right = trainer.dropout_keys
    with mock.patch.object(trainer, "dropout_keys", wrong):
        yield


FAULTS = {
    "local_positions": lambda rows, positions: (rows, torch.arange(positions.size(1)).expand_as(positions)),
    "local_rows": lambda rows, positions: ([row - rows[0] for row in rows], positions),
}


def record_with_fault(rank: int, world: int, fault: Callable, overrides: list[str], ignored: Ignored) -> Record:
    with keys_from(fault):
        return record_run(rank, world, overrides, ignored, (1, 2))


@pytest.mark.parametrize(
    ("fault", "mesh"), [("local_positions", "mesh.cp=2"), ("local_rows", "mesh.cp=2 training.local_batch_size=1")]
)
def test_the_comparison_sees_a_planted_fault(ranks, one_rank, fault, mesh):
    runs = ranks.run(2, record_with_fault, FAULTS[fault], [*job(2), *mesh.split()], scattered)
    difference = compare(runs[0], one_rank(2, (1, 2)))
    assert difference.gradient > 100 * TOLERANCE, difference
