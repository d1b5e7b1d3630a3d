"""Linear layers of one input that ranks hold in parts: exact, one all-gather each way, and only the part is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import dtcp
from recorder import count_collectives

ROWS, POSITIONS, DIM = 2, 6, 8


class Branches(nn.Module):
    """Three layers of one input, of unlike widths, one of them without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(DIM, 12)
        self.middle = nn.Linear(DIM, 4, bias=False)
        self.right = nn.Linear(DIM, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        return self.left(x), self.middle(x).sin(), scale * self.right(x)


def make(world: int) -> tuple[Branches, Branches, Tensor, Tensor]:
    """A module, the same cut over all ranks, a whole input, and this rank's part of it, a leaf."""
    torch.manual_seed(0)
    dims = dtcp.ParallelDims(tp=world)
    mesh = dims.build_mesh("cpu")["tp"]
    whole = Branches()
    cut = parallelize_module(copy.deepcopy(whole), mesh, dtcp.SharedInputColumns("left", "middle", "right"))
    x = torch.randn(ROWS, POSITIONS * world, DIM)
    return whole, cut, x, x.chunk(world, 1)[mesh.get_local_rank()].clone().requires_grad_()


def loss_of(outputs: Any, rank: int = 0, world: int = 1) -> Tensor:
    """Of this rank's features; every feature has a weight of its own."""
    weights = [torch.linspace(-1, 1, out.size(-1) * world).chunk(world)[rank] for out in outputs]
    return sum((out * weight).square().sum() for out, weight in zip(outputs, weights, strict=True))


def equals_one_rank(rank: int, world: int, compiled: bool) -> None:
    whole, cut, x, part = make(world)
    x.requires_grad_()
    loss_of(whole(x, scale=2.0)).backward()
    cut = copy.deepcopy(cut)  # a copy multiplies by its own weights
    if compiled:
        cut.compile(fullgraph=True, backend="inductor")
    outputs = cut(part, scale=2.0)
    assert [tuple(out.shape) for out in outputs] == [(ROWS, POSITIONS * world, n // world) for n in (12, 4, 8)]
    loss_of(outputs, rank, world).backward()
    torch.testing.assert_close(part.grad, x.grad.chunk(world, 1)[rank], rtol=1e-5, atol=1e-5)
    for name, parameter in cut.named_parameters():
        assert isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.get_parameter(name).grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("world", "compiled"), [(2, False), (4, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_outputs_and_gradients_equal_one_rank(ranks, world, compiled):
    ranks.run(world, equals_one_rank, compiled, timeout=200)


# ---- what is sent and kept -------------------------------------------------------------------------------------------


def kinds_sent(rank: int, world: int) -> list[list[str]]:
    """Of a forward; a backward; the gradient of the input alone; of weights alone; with frozen weights."""
    _, cut, _, part = make(world)
    parameters = list(cut.parameters())

    def sent_in(run: Any) -> list[str]:
        with count_collectives(world) as sent:
            run()
        size = part.numel() * part.element_size() * (world - 1)
        assert all(exchange.num_bytes == size for exchange in sent)
        return sorted(exchange.kind for exchange in sent)

    def forward() -> Any:
        return cut(part * 1)  # no leaf: then autograd tells what it is asked for

    found = [sent_in(forward), sent_in(lambda: loss_of(forward()).backward())]
    loss = loss_of(forward())
    found.append(sent_in(lambda: torch.autograd.grad(loss, part, retain_graph=True)))
    found.append(sent_in(lambda: torch.autograd.grad(loss, parameters)))
    cut.requires_grad_(False)
    loss = loss_of(forward())
    found.append(sent_in(lambda: loss.backward()))
    return found


def test_each_way_gathers_once_and_what_is_not_needed_is_not_sent(ranks):
    forward, both, of_input, of_weights, frozen = ranks.run(2, kinds_sent)[0]
    assert forward == ["all_gather"]
    assert both == ["all_gather", "all_gather", "reduce_scatter"]  # the forward's, then those of the backward
    assert of_input == ["reduce_scatter"] and frozen == ["reduce_scatter"]
    assert of_weights == ["all_gather"]


def gathers_of_a_step(rank: int, world: int, options: dict[str, Any]) -> int:
    _, cut, _, part = make(world)
    model = nn.Module()
    model.layers = nn.ModuleList([cut])
    dtcp.apply_activation_checkpointing(model, **options)
    with count_collectives(world) as sent:
        loss_of(model.layers[0](part * 1)).backward()
    return sum(exchange.kind == "all_gather" for exchange in sent)


@pytest.mark.parametrize(
    ("options", "gathers"),
    [({"mode": "none"}, 2), ({"mode": "full"}, 3), ({"mode": "selective", "save_matmuls": True}, 2)],
    ids=["none", "full", "save_matmuls"],
)
def test_recomputation_gathers_once_more_unless_products_are_saved(ranks, options, gathers):
    assert ranks.run(2, gathers_of_a_step, options) == [gathers] * 2


def kept_shapes(rank: int, world: int, compiled: bool) -> set[tuple[int, ...]]:
    _, cut, _, part = make(world)
    if compiled:
        cut.compile(fullgraph=True, backend="aot_eager")
    kept: set[tuple[int, ...]] = set()

    def keep(x: Tensor) -> Tensor:
        kept.add(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        cut(part)
    return kept


@pytest.mark.parametrize("compiled", [False, True])
def test_the_whole_input_is_not_kept(ranks, compiled):
    kept = ranks.run(2, kept_shapes, compiled, timeout=120)[0]
    assert (ROWS, POSITIONS, DIM) in kept
    assert not [shape for shape in kept if shape[-1] == DIM and 2 * POSITIONS in shape], kept


# ---- the ops, autocast, refusals -------------------------------------------------------------------------------------


def check_ops(rank: int, world: int) -> None:
    from dtcp.parallelize.columns_op import backward_op, forward_op

    _, cut, _, part = make(world)
    mesh = cut.left.weight.device_mesh
    name, size = mesh.get_group().group_name, mesh.size()
    weights = [layer.weight.to_local().detach().requires_grad_() for layer in cut.children()]
    biases = [layer.bias.to_local().detach().requires_grad_() for layer in (cut.left, cut.right)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(forward_op, (part, weights, biases, [True, False, True], name, size), test_utils=tests)
    grads = [torch.randn(ROWS, POSITIONS * world, weight.size(0)) for weight in weights]
    inputs = [x.detach() for x in (part, *weights)]
    needs = [True, True, False, True, True, False, False]
    torch.library.opcheck(backward_op, (grads, inputs[0], inputs[1:], needs, name, size), test_utils=tests)


def test_the_ops_keep_what_they_promise(ranks):
    ranks.run(2, check_ops)


def under_autocast(rank: int, world: int) -> None:
    whole, cut, x, part = make(world)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, expected = cut(part), whole(x)
    for out, right in zip(outputs, expected, strict=True):
        assert out.dtype == right.dtype
        torch.testing.assert_close(out, right.chunk(world, -1)[rank], rtol=2e-2, atol=2e-2)
    sum(out.float().sum() for out in outputs).backward()
    assert all(p.grad.dtype == torch.float32 for p in (part, *cut.parameters()))


def test_autocast_is_obeyed(ranks):
    ranks.run(2, under_autocast)


class Other(Branches):
    """Calls one of the layers on something else."""

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.left(x)[..., :DIM])


def refuse(rank: int, world: int) -> None:
    mesh = dtcp.ParallelDims(tp=world).build_mesh("cpu")["tp"]
    with pytest.raises(ValueError, match=r"needs the names of the linear layers; SharedInputColumns\('up'\)"):
        dtcp.SharedInputColumns()
    module = Branches()
    module.middle = nn.Bilinear(DIM, DIM, 4)
    plan = {"0": dtcp.SharedInputColumns("left", "middle")}
    with pytest.raises(ValueError, match=r"for nn.Linear, got Bilinear as middle of Branches; gather the input with"):
        parallelize_module(nn.Sequential(module), mesh, plan)
    model = parallelize_module(nn.Sequential(Other()), mesh, plan)
    with pytest.raises(ValueError, match=r"first input of the module around it as it is, got Tensor; use ColwiseP"):
        model(torch.zeros(ROWS, POSITIONS, DIM))


def test_what_the_style_does_not_take_is_refused(ranks):
    ranks.run(2, refuse)
