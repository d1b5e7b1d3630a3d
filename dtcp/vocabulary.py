"""Cross-entropy of logits whose vocabulary is cut over the ranks of tensor parallelism: no rank ever holds a whole row.

Shapes: logits (…, V) as a DTensor, Shard(-1) over a 1-D mesh of P ranks; V_local is this rank's part, ⌈V/P⌉ or less.
N = number of labels. A row's maximum, its sum of exponentials and its label's logit travel, never its logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtcp.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def vocabulary_parallel_cross_entropy(logits: DTensor, labels: Tensor, *, ignore_index: int) -> Tensor:
    """Return Σ of the cross-entropies of the labels that are not ``ignore_index``, equal on every rank: 0-d.

    Args:
        logits: (…, V), any float dtype; softmax and sum are in float32 (float64 for float64). V need not divide by P.
        labels: int64 (…), a plain tensor, equal on every rank of the mesh.

    Returns:
        0-d plain tensor. Cost: all-reduces of N and 2·N numbers forward, nothing backward.

    Raises:
        ValueError: If the logits are spread in another way, or labels are a DTensor.
    """
    vocab_size = logits.size(-1)
    _check(logits, labels)
    mesh = logits.device_mesh
    local = logits.to_local(grad_placements=logits.placements)
    # Shard deals the vocabulary as torch.chunk does: the first ranks hold ⌈V/P⌉, later ones may hold less or nothing.
    chunk = -(-vocab_size // mesh.size())
    start = min(mesh.get_local_rank() * chunk, vocab_size)
    assert local.size(-1) == min(chunk, vocab_size - start), (local.shape, vocab_size, start)
    flat = local.reshape(labels.numel(), local.size(-1))
    return _CrossEntropy.apply(flat, labels.reshape(-1).to(torch.int64), start, ignore_index, mesh.get_group())


def _check(logits: DTensor, labels: Tensor) -> None:
    placements = logits.placements
    is_cut = len(placements) == 1 and placements[0].is_shard() and placements[0].dim in (-1, logits.ndim - 1)  # type: ignore[attr-defined]
    if not is_cut:
        raise ValueError(
            "token_loss takes plain logits, or a DTensor that is Shard(-1) over the 1-D tp mesh, got "
            f"{tuple(placements)} over mesh axes {logits.device_mesh.mesh_dim_names}; use "
            "logits.redistribute(placements=[Shard(-1)]), or logits.to_local() where a rank has them all"
        )
    if is_dtensor(labels):
        raise ValueError(
            "token_loss with vocabulary-parallel logits needs plain labels, equal on every tp rank, got a DTensor; use "
            "labels.full_tensor()"
        )


class _CrossEntropy(torch.autograd.Function):
    """(N, V_local) logits and (N,) labels to the sum of losses, in at least float32."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, start: int, ignore_index: int, group: dist.ProcessGroup
    ) -> Tensor:
        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        num_local = x.size(-1)
        largest = x.amax(-1) if num_local else x.new_full(x.shape[:1], -torch.inf)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shifted = x - largest[:, None]
        is_here = (labels >= start) & (labels < start + num_local)
        column = (labels - start).clamp(0, max(num_local - 1, 0))
        picked = shifted.gather(1, column[:, None])[:, 0].masked_fill(~is_here, 0) if num_local else x.new_zeros(len(x))
        sums = torch.stack([shifted.exp().sum(-1), picked])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        is_valid = labels != ignore_index
        # Apart: their sum would be rounded to what a large logit leaves of float32.
        ctx.save_for_backward(logits, largest, log_sum, column, is_here, is_valid)
        return torch.where(is_valid, log_sum - sums[1], 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        logits, largest, log_sum, column, is_here, is_valid = ctx.saved_tensors
        # Softmax minus one at the label, in place: one buffer of the logits' size.
        grad = logits.to(largest.dtype, copy=True).sub_(largest[:, None]).sub_(log_sum[:, None]).exp_()
        if grad.size(-1):
            grad.scatter_add_(1, column[:, None], -is_here.to(grad.dtype)[:, None])
        # where, not a product: what an ignored row holds must not get through, not even NaN.
        grad = torch.where(is_valid[:, None], grad.mul_(grad_total), 0)
        return grad.to(logits.dtype), None, None, None, None
