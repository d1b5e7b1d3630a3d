"""The chunked loss with the vocabulary over tp ranks: the dense loss on each of them, and what they send."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import dtcp
from dtcp import linear_loss_op
from oracle import relative_error

DIM, TOKENS = 16, (2, 9)  # 9 is cut unevenly over 2 and 4
CHUNK = 5


def make_problem(vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, bias, labels, the same on every rank."""
    generator = torch.Generator().manual_seed(vocab)
    sizes = [(*TOKENS, DIM), (vocab, DIM), (vocab,)]
    hidden, weight, bias = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    labels = torch.randint(vocab, TOKENS, generator=generator)
    labels[0, 2:6] = -100
    return hidden, weight, bias, labels


def dense(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    inputs = [x.detach().clone().double().requires_grad_() for x in (hidden, weight, bias)]
    loss = F.cross_entropy(F.linear(*inputs).flatten(0, 1), labels.flatten())
    return loss.detach(), *torch.autograd.grad(loss, inputs)


def make_tp_mesh(world: int) -> Any:
    return dtcp.ParallelDims(tp=world).build_mesh("cpu")["tp"]


@contextlib.contextmanager
def count_sent() -> Iterator[list[tuple[str, int]]]:
    """(collective, bytes of its tensor) of all that the op starts beside the comparison of arguments."""
    sent: list[tuple[str, int]] = []

    def all_reduce(x: Tensor, *args: Any, _real: Any = dist.all_reduce, **options: Any) -> Any:
        sent.append(("all_reduce", x.nbytes))
        return _real(x, *args, **options)

    def gather(x: Tensor, *args: Any, _real: Any = linear_loss_op.all_gather_rows) -> Tensor:
        sent.append(("all_gather", x.nbytes))
        return _real(x, *args)

    with (
        mock.patch.object(linear_loss_op.dist, "all_reduce", all_reduce),
        mock.patch.object(linear_loss_op, "all_gather_rows", gather),
    ):
        yield sent


def check(rank: int, world: int, vocab: int, kind: str, dtype: torch.dtype) -> float:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = make_tp_mesh(world)
    hidden, weight, bias, labels = make_problem(vocab, dtype)
    loss_right, *right = dense(hidden, weight, bias, labels)
    options: dict[str, Any] = {"chunk_tokens": CHUNK}
    if kind == "rows":  # the first rank has none of them
        sizes = [0, *[vocab // (world - 1)] * (world - 2), vocab - vocab // (world - 1) * (world - 2)]
        begin, end = sum(sizes[:rank]), sum(sizes[: rank + 1])
        local = [hidden.clone(), weight[begin:end].clone(), bias[begin:end].clone()]
        options["tp_mesh"] = mesh
    else:
        placement = {"plain": None, "replicate": Replicate(), "shard": Shard(1)}[kind]
        local = [hidden.clone() if placement is None else distribute_tensor(hidden, mesh, [placement])]
        local += [distribute_tensor(x, mesh, [Shard(0)]) for x in (weight, bias)]
    for x in local:
        x.requires_grad_()
    with count_sent() as sent:
        loss = dtcp.linear_token_loss(local[0], local[1], labels, bias=local[2], **options)
        grads = torch.autograd.grad(loss, local)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    assert relative_error(loss.detach(), loss_right) < tolerance
    if kind == "rows":
        assert relative_error(grads[0], right[0]) < tolerance
        for own, whole in zip(grads[1:], right[1:], strict=True):
            assert own.shape == whole[begin:end].shape
            assert relative_error(own, whole[begin:end]) < tolerance or begin == end
    else:
        for x, own, whole in zip(local, grads, right, strict=True):
            if kind != "plain" or x is not local[0]:
                assert own.placements == x.placements and own.shape == x.shape
                own = own.full_tensor()
            assert relative_error(own, whole) < tolerance
    numbers = 8 if dtype == torch.float64 else 4
    num_valid = int((labels != -100).sum())
    chunks = [min(CHUNK, num_valid - start) for start in range(0, num_valid, CHUNK)]
    wanted = [("all_gather", 8)]
    wanted += [("all_reduce", times * size * numbers) for size in chunks for times in (1, 2)]
    wanted += [("all_reduce", hidden.nbytes)] * (kind != "shard")  # of the gradient, once; cut, it is reduce-scattered
    assert sent == wanted
    return loss.item()


@pytest.mark.parametrize(
    ("world", "kind"),
    [
        (2, "plain"),
        (3, "replicate"),
        (4, "shard"),
        (2, "rows"),
        *(
            pytest.param(world, kind, marks=pytest.mark.slow)
            for world, kind in [(3, "plain"), (4, "plain"), (2, "replicate"), (4, "replicate"), (2, "shard")]
        ),
        *(
            pytest.param(world, kind, marks=pytest.mark.slow)
            for world, kind in [(3, "shard"), (3, "rows"), (4, "rows")]
        ),
    ],
)
def test_every_rank_has_the_dense_loss_and_gradients(ranks, world, kind):
    for vocab, dtype in ((37, torch.float64), (37, torch.float32), (3, torch.float64)):
        losses = ranks.run(world, check, vocab, kind, dtype)
        assert len(set(losses)) == 1, "bitwise"


def check_with_cp(rank: int, world: int) -> None:
    """cp 2 × tp 2: other tokens on each cp rank, some without any label; shares add up to the dense loss."""
    from torch.distributed.tensor import Shard, distribute_tensor

    dims = dtcp.ParallelDims(cp=2, tp=2)
    mesh = dims.build_mesh("cpu")
    hidden, weight, bias, labels = make_problem(37)
    labels[:, 4:] = torch.where(torch.arange(5) < 4, -100, labels[:, 4:])  # the second cp rank has two
    loss_right, *right = dense(hidden, weight, bias, labels)
    layout = dtcp.make_layout("contiguous", seq_len=9, cp=2)
    part = dtcp.shard(hidden, mesh["cp"], layout).requires_grad_()
    targets = dtcp.shard(labels, mesh["cp"], layout, pad_value=-100)
    own = [distribute_tensor(x, mesh["tp"], [Shard(0)]).requires_grad_() for x in (weight, bias)]
    share = dtcp.linear_token_loss(part, own[0], targets, bias=own[1], mesh=dims.view("loss"), chunk_tokens=3)
    share.backward()
    total = share.detach().clone()
    dist.all_reduce(total, group=mesh["cp"].get_group())
    assert relative_error(total, loss_right) < 1e-13
    assert relative_error(part.grad, dtcp.shard(right[0], mesh["cp"], layout)) < 1e-13
    for x, whole in zip(own, right[1:], strict=True):
        grad = x.grad.full_tensor()
        dist.all_reduce(grad, group=mesh["cp"].get_group())
        assert relative_error(grad, whole) < 1e-13


def test_shares_of_cp_ranks_add_up(ranks):
    ranks.run(4, check_with_cp)


def check_replicated(rank: int, world: int) -> None:
    """A weight that every tp rank has whole: no vocabulary is cut, and nothing is added up twice."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = make_tp_mesh(world)
    hidden, weight, bias, labels = make_problem(37)
    loss_right, *right = dense(hidden, weight, bias, labels)
    local = [distribute_tensor(hidden, mesh, [Shard(1)])]
    local += [distribute_tensor(x, mesh, [Replicate()]) for x in (weight, bias)]
    for x in local:
        x.requires_grad_()
    loss = dtcp.linear_token_loss(local[0], local[1], labels, bias=local[2])
    assert relative_error(loss.detach(), loss_right) < 1e-13
    for own, whole in zip(torch.autograd.grad(loss, local), right, strict=True):
        assert relative_error(own.full_tensor(), whole) < 1e-13


def test_a_replicated_weight_gives_the_same(ranks):
    ranks.run(2, check_replicated)


def check_compiled(rank: int, world: int, backend: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = make_tp_mesh(world)
    hidden, weight, bias, labels = make_problem(37)
    loss_right, *right = dense(hidden, weight, bias, labels)
    count = (labels != -100).sum()

    def loss_of_rows(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        return dtcp.linear_token_loss(hidden, weight, labels, bias=bias, num_valid_tokens=count, tp_mesh=mesh)

    def loss_of_dtensors(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        return dtcp.linear_token_loss(hidden, weight, labels, bias=bias, num_valid_tokens=count)

    own = [distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in (weight, bias)]
    hidden.requires_grad_()
    rows = [x.detach().to_local().requires_grad_() for x in own]
    for fn, inputs in ((loss_of_rows, [hidden, *rows]), (loss_of_dtensors, [hidden, *own])):
        loss = torch.compile(fn, fullgraph=True, backend=backend)(*inputs, labels, count)
        grads = torch.autograd.grad(loss, inputs)
        assert relative_error(loss.detach(), loss_right) < 1e-13
        assert relative_error(grads[0], right[0]) < 1e-13
        if fn is loss_of_dtensors:
            assert all(relative_error(a.full_tensor(), b) < 1e-13 for a, b in zip(grads[1:], right[1:], strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_it_compiles_into_one_graph(ranks, backend):
    ranks.run(2, check_compiled, backend)


# ---- refusals: every rank raises, none waits -------------------------------------------------------------------------


def call_unlike(rank: int, world: int, unlike: str) -> None:
    mesh = make_tp_mesh(world)
    hidden, weight, bias, labels = make_problem(12)
    options: dict[str, Any] = {"chunk_tokens": CHUNK, "bias": None, "tp_mesh": mesh, "ignore_index": -100}
    weight = weight.chunk(world)[rank]
    if rank == 1:
        match unlike:
            case "tokens":
                hidden, labels = hidden[:, 1:], labels[:, 1:]
            case "labels":
                labels = labels.flip(0)
            case "dtype":
                hidden, weight = hidden.float(), weight.float()
            case "chunk_tokens" | "ignore_index":
                options[unlike] = 4
            case "bias":
                options["bias"] = bias.chunk(world)[rank]
            case "refused":
                hidden = hidden.float()
            case "count":
                options["num_valid_tokens"] = -1
            case "gradient":
                hidden.requires_grad_()
    dtcp.linear_token_loss(hidden, weight, labels, **options)


@pytest.mark.parametrize(
    ("unlike", "error", "message"),
    [
        ("tokens", ValueError, r"number of tokens differs .*\{0: 18, 1: 16\}"),
        ("labels", ValueError, r"labels \(their checksum\) differs"),
        ("dtype", ValueError, r"dtype differs .*float64.*float32"),
        ("chunk_tokens", ValueError, r"chunk_tokens differs .*\{0: 5, 1: 4\}"),
        ("ignore_index", ValueError, r"ignore_index differs"),
        ("bias", ValueError, "has a bias differs"),
        ("gradient", ValueError, "requires_grad of hidden differs"),
        ("refused", Exception, r"refused their arguments|weight in the dtype of hidden"),
        ("count", Exception, r"refused their arguments|num_valid_tokens must be at least 0, got -1"),
    ],
)
def test_ranks_that_pass_other_things_are_refused_on_every_rank(ranks, unlike, error, message):
    ranks.run_expecting(2, call_unlike, error, message, unlike)


def call_outside(rank: int, world: int) -> None:
    mesh = make_tp_mesh(world)
    hidden, weight, _, labels = make_problem(12)
    labels[1, 3] = 12
    dtcp.linear_token_loss(hidden, weight.chunk(world)[rank], labels, tp_mesh=mesh)


def test_a_label_outside_the_whole_vocabulary_is_refused_on_every_rank(ranks):
    ranks.run_expecting(3, call_outside, ValueError, r"label 12 at \(1, 3\) is outside the vocabulary of 12")


def check_refusals(rank: int, world: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dims = dtcp.ParallelDims(cp=1, dp_shard=world // 2, tp=2)
    mesh = dims.build_mesh("cpu")
    hidden, weight, bias, labels = make_problem(12)
    loss = dtcp.linear_token_loss
    rows = distribute_tensor(weight, mesh["tp"], [Shard(0)])
    cases = [
        (loss, (hidden, distribute_tensor(weight, dims.view("fsdp"), [Shard(0)]), labels), {}, "call the loss inside"),
        (loss, (hidden, distribute_tensor(weight, mesh, [Replicate()] * mesh.ndim), labels), {}, "the loss inside"),
        (loss, (hidden, distribute_tensor(weight, mesh["tp"], [Shard(1)]), labels), {}, "is Shard.0. or Replicate"),
        (loss, (distribute_tensor(hidden, mesh["tp"], [Replicate()]), weight, labels), {}, "plain weight beside a DTe"),
        (loss, (hidden, rows, labels), {"bias": bias}, "bias placed like weight"),
        (loss, (hidden, rows, distribute_tensor(labels, mesh["tp"], [Shard(1)])), {}, "labels of all tokens on each"),
        (loss, (hidden, weight, labels), {"tp_mesh": mesh}, "the 1-D mesh of the tp axis"),
        (loss, (hidden, rows, labels), {"tp_mesh": dims.view("fsdp")}, "leave tp_mesh out"),
        (loss, (distribute_tensor(hidden, dims.view("fsdp"), [Shard(1)]), rows, labels), {}, "on another mesh"),
    ]
    for call, arguments, options, message in cases:
        with pytest.raises(ValueError, match=message):
            call(*arguments, **options)
    # And after all that the ranks are still in step.
    assert loss(hidden, rows, labels).isfinite()


def test_meshes_and_placements_that_do_not_fit_are_refused_by_name(ranks):
    ranks.run(4, check_refusals)
