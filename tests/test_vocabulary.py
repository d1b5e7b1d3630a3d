"""The loss of vocabulary-parallel logits is that of whole ones, for any vocabulary; other placements are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dtcp
from oracle import relative_error
from ranks import Ranks

# (ranks, V): even, uneven, with a rank that holds one row or none.
SIZES = [(2, 257), (4, 5)]
SLOW_SIZES = [(1, 7), (2, 264), (3, 257), (4, 257), (4, 3)]


def make_mesh(world: int) -> tuple[dtcp.ParallelDims, object]:
    dims = dtcp.ParallelDims(tp=world)
    dims.build_mesh("cpu")
    return dims, dims.view("tp")


def make_problem(vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(2, 9, vocab_size, generator=generator, dtype=torch.float64) * 5 + 300  # exp would overflow
    labels = torch.randint(vocab_size, (2, 9), generator=generator)
    labels[0, :2], labels[0, 2], labels[0, 3] = -100, 0, vocab_size - 1
    return logits.to(dtype), labels


def check_loss(rank: int, world: int, vocab_size: int) -> None:
    dims, mesh = make_mesh(world)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        whole, labels = make_problem(vocab_size, dtype)
        reference = whole.double().requires_grad_()
        wanted = dtcp.token_loss(reference, labels)
        (wanted * 3).backward()
        logits = distribute_tensor(whole, mesh, [Shard(-1)]).requires_grad_()
        loss = dtcp.token_loss(logits, labels, mesh=dims.view("loss"))
        assert type(loss) is Tensor
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        (loss * 3).backward()
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-5}[dtype]
        assert loss.item() == pytest.approx(wanted.item(), rel=tolerance)
        assert logits.grad.placements == (Shard(2),) and logits.grad.dtype == dtype
        rounding = 4e-3 if dtype == torch.bfloat16 else tolerance  # the gradient is rounded to it
        assert relative_error(logits.grad.full_tensor(), reference.grad) <= rounding
        assert logits.grad.full_tensor()[0, :2].abs().max() == 0
        counted = dtcp.token_loss(logits.detach(), labels, num_valid_tokens=160)
        assert counted.item() == pytest.approx(wanted.item() / 10, rel=tolerance)


@pytest.mark.parametrize(
    ("world", "vocab_size"), [*SIZES, *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in SLOW_SIZES)]
)
def test_the_loss_of_a_cut_vocabulary_is_that_of_the_whole_one(ranks: Ranks, world: int, vocab_size: int) -> None:
    ranks.run(world, check_loss, vocab_size)


def ignored_rows(rank: int, world: int) -> None:
    _, mesh = make_mesh(world)
    whole, labels = make_problem(257, torch.float32)
    logits = distribute_tensor(whole, mesh, [Shard(-1)]).requires_grad_()
    loss = dtcp.token_loss(logits, labels.fill_(-100))
    loss.backward()
    assert loss.item() == 0 and logits.grad.full_tensor().abs().max() == 0
    whole, labels = make_problem(257, torch.float32)
    whole[0, 0] = torch.nan  # a row without a label
    logits = distribute_tensor(whole, mesh, [Shard(-1)]).requires_grad_()
    loss = dtcp.token_loss(logits, labels)
    loss.backward()
    assert loss.isfinite() and logits.grad.full_tensor().isfinite().all()
    uniform = distribute_tensor(torch.zeros(1, 4, 100), mesh, [Shard(-1)])
    assert dtcp.token_loss(uniform, torch.arange(4)[None]).item() == pytest.approx(4.60517, abs=1e-5)


def test_rows_without_a_label_count_for_nothing(ranks: Ranks) -> None:
    ranks.run(2, ignored_rows)


def refused(rank: int, world: int) -> None:
    _, mesh = make_mesh(world)
    whole, labels = make_problem(8, torch.float32)
    cut = distribute_tensor(whole, mesh, [Shard(-1)])
    for placement in (Replicate(), Shard(0), Shard(1)):
        with pytest.raises(
            ValueError, match=r"Shard\(-1\) over the 1-D tp mesh, got .*axes \('tp',\); use logits.redis"
        ):
            dtcp.token_loss(cut.redistribute(placements=[placement]), labels)
    with pytest.raises(
        ValueError, match=r"plain labels, equal on every tp rank, got a DTensor; use labels.full_tensor"
    ):
        dtcp.token_loss(cut, DTensor.from_local(labels, mesh, [Replicate()]))
    labels[1, 4] = 8
    with pytest.raises(ValueError, match=r"label 8 at \(1, 4\) is outside the vocabulary of 8"):
        dtcp.token_loss(cut, labels)
    with pytest.raises(ValueError, match=r"needs logits \(…, V\) and labels \(…\), got \(2, 9, 8\) and \(2, 8\)"):
        dtcp.token_loss(cut, labels[:, :8])


def test_other_placements_and_labels_outside_the_vocabulary_are_refused(ranks: Ranks) -> None:
    ranks.run(2, refused)
