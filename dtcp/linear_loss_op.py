"""Linear layer and cross-entropy in one custom op that holds the logits of a chunk of tokens at a time.

Shapes: hidden (…, D), weight (V, D) or this rank's rows of it, bias (V,), labels (…); C tokens of a chunk, K rows of
the weight here. Everything that is added up over tokens or over the vocabulary is float32 (float64 for float64).

# Note [Gradients in the forward]
The chunk's softmax is all that its gradients need, so they are made while it is there, for a loss of weight 1, and the
backward only scales them. Against recomputing the logits in the backward that is three matrix products instead of four,
and under vocabulary parallelism the backward needs no softmax over the ranks again. It costs the gradient of the
weight, in float32, between forward and backward. The sum is scaled in float32 and rounded to half precision after it:
a float16 gradient divided by the number of tokens before that would vanish.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.flop_counter import register_flop_formula

from dtcp.collectives import DTYPES, agree, all_gather_rows, resolve_group
from dtcp.loss import is_outside_vocabulary, outside_vocabulary

NAME = "linear_token_loss"
_SCALED_ROWS = 4096  # of a half precision weight's gradient that are in float32 twice at a time


@torch.library.custom_op("dtcp::linear_token_loss", mutates_args=())
def forward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    chunk_tokens: int,
    group_name: str,
    sums_hidden: bool,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Σ of the token losses and its gradients, empty where they are not needed. Collective with a group.

    Args:
        group_name: Of the ranks that share the vocabulary, in the order of their rows; "" for none.
        sums_hidden: Whether the gradient of ``hidden`` is added up over the group here, or is this rank's share.
    """
    group = resolve_group(group_name) if group_name else None
    needs = needs_hidden, needs_weight, needs_bias
    if group is not None:
        fields = _agreement_fields(hidden, bias, labels, ignore_index, chunk_tokens, needs[0], needs[1])
        agree(NAME, fields, group, hidden.device)
    flat_labels, vocab_size = _in_own_rows(labels, weight.size(0), ignore_index, group)
    is_padded = weight.size(0) == 0
    if is_padded:  # more ranks than rows: one row that no softmax sees, so that all that follows has something to do
        weight = weight.new_zeros(1, weight.size(1))
        bias = weight.new_full((1,), -torch.inf)
        flat_labels.fill_(-1)
    chunks = _Chunks(hidden.reshape(-1, hidden.size(-1)), weight, bias, group, needs)
    tokens = (labels.reshape(-1) != ignore_index).nonzero().squeeze(-1)  # those without a label cost nothing
    with torch.autocast(hidden.device.type, enabled=False):
        total = torch.zeros((), dtype=_sum_dtype(hidden.dtype), device=hidden.device)
        if vocab_size and tokens.numel():
            total = torch.cat([chunks.add(chunk, flat_labels[chunk]) for chunk in tokens.split(chunk_tokens)]).sum()
    grad_hidden = chunks.grad_hidden.view(hidden.shape) if needs_hidden else chunks.grad_hidden
    if group is not None and sums_hidden and needs_hidden:
        dist.all_reduce(grad_hidden, group=group)
    num_rows = 0 if is_padded else None
    return total, grad_hidden, _rows(chunks.grad_weight, num_rows), _rows(chunks.grad_bias, num_rows)


class _Chunks:
    """The gradients so far, to which each chunk of tokens adds its own."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup | None,
        needs: tuple[bool, bool, bool],
    ) -> None:
        self._hidden, self._weight, self._bias, self._group = hidden, weight, bias, group
        self._needs_hidden, self._needs_weight, self._needs_bias = needs
        dtype = _sum_dtype(hidden.dtype)
        self.grad_hidden = (
            torch.zeros_like(hidden, memory_format=torch.contiguous_format) if needs[0] else _none(hidden)
        )
        self.grad_weight = weight.new_zeros(weight.shape, dtype=dtype) if needs[1] else _none(hidden)
        self.grad_bias = weight.new_zeros(weight.size(0), dtype=dtype) if needs[2] else _none(hidden)

    def add(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the losses (C,) of the ``tokens`` (C,) with their ``labels``, counted in the rows of this rank."""
        hidden = self._hidden[tokens]
        logits = linear(hidden, self._weight, self._bias).to(_sum_dtype(hidden.dtype))
        losses = _softmax_minus_target_(logits, labels, self._group)
        grad_logits = logits.to(hidden.dtype)
        if self._needs_bias:
            self.grad_bias += logits.sum(0)
        del logits
        if self._needs_hidden:
            self.grad_hidden[tokens] = grad_logits @ self._weight
        if self._needs_weight:
            if self.grad_weight.dtype == hidden.dtype:
                self.grad_weight.addmm_(grad_logits.t(), hidden)
            else:
                self.grad_weight += grad_logits.t() @ hidden
        return losses


def _softmax_minus_target_(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Replace logits (C, K) by their gradients, softmax − one-hot over all ranks' rows; return the losses (C,)."""
    is_here = (labels >= 0) & (labels < logits.size(1))
    index = labels.where(is_here, 0)[:, None]
    largest = logits.amax(1)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits -= largest[:, None]
    target = logits.gather(1, index)[:, 0].where(is_here, 0)
    sums = torch.stack([logits.exp_().sum(1), target])
    if group is not None:
        dist.all_reduce(sums, group=group)
    logits /= sums[0, :, None]
    logits.scatter_add_(1, index, -is_here[:, None].to(logits.dtype))
    return sums[0].log() - sums[1]


def _in_own_rows(
    labels: Tensor, num_rows: int, ignore_index: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, int]:
    """Return the labels, flat, counted from the first row of this rank, and the size of the vocabulary.

    The number of rows may differ from rank to rank.

    Raises:
        ValueError: If a label is outside the vocabulary. Read on every device: on a rank of several, such a label looks
            like one of another rank.
    """
    first, vocab_size = 0, num_rows
    if group is not None:
        counts = all_gather_rows(torch.tensor([num_rows], device=labels.device), group).tolist()
        first, vocab_size = sum(counts[: group.rank()]), sum(counts)
    flat = labels.reshape(-1).to(torch.int64)
    if is_outside_vocabulary(flat, vocab_size, ignore_index).any():
        raise outside_vocabulary(NAME, labels, vocab_size, "rows of weight", ignore_index)
    return flat - first, vocab_size


def _agreement_fields(
    hidden: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
    chunk_tokens: int,
    needs_hidden: bool,
    needs_weight: bool,
) -> dict[str, int]:
    """What has to be equal on the ranks that share the vocabulary; labels by a checksum, where they can be read."""
    checksum = 0
    if labels.device.type == "cpu":
        checksum = zlib.crc32(labels.to(torch.int64).contiguous().numpy().tobytes())
    return {
        "dtype": DTYPES.index(hidden.dtype),
        "number of tokens": labels.numel(),
        "hidden dim": hidden.size(-1),
        "has a bias": int(bias is not None),
        "ignore_index": ignore_index,
        "chunk_tokens": chunk_tokens,
        "requires_grad of hidden": int(needs_hidden),
        "requires_grad of weight": int(needs_weight),
        "labels (their checksum)": checksum,
    }


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _none(like: Tensor) -> Tensor:
    """In place of a gradient that is not needed."""
    return like.new_empty(0, dtype=_sum_dtype(like.dtype))


def _rows(x: Tensor, count: int | None) -> Tensor:
    return x if count is None else x[:count].clone()


@forward_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int, chunk_tokens: int,
    group_name: str, sums_hidden: bool, needs_hidden: bool, needs_weight: bool, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = _sum_dtype(hidden.dtype)
    return (
        hidden.new_empty((), dtype=dtype),
        hidden.new_empty(hidden.shape) if needs_hidden else _none(hidden),
        weight.new_empty(weight.shape, dtype=dtype) if needs_weight else _none(hidden),
        weight.new_empty(weight.size(0), dtype=dtype) if needs_bias else _none(hidden),
    )


@torch.library.custom_op("dtcp::linear_token_loss_backward", mutates_args=())
def backward_op(grad_total: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``gradient`` times ``grad_total``, multiplied in the dtype of the latter and then rounded to ``dtype``."""
    if gradient.dtype == dtype == grad_total.dtype:
        return gradient * grad_total
    scaled = torch.empty_like(gradient, dtype=dtype)
    flat, own = gradient.view(-1, gradient.size(-1)), scaled.view(-1, gradient.size(-1))
    for to, part in zip(own.split(_SCALED_ROWS), flat.split(_SCALED_ROWS), strict=True):
        to.copy_(part.to(grad_total.dtype) * grad_total)
    return scaled


@backward_op.register_fake
def _(grad_total: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.needs, ctx.dtype = inputs[-3:], inputs[0].dtype
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad_total: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(grad is not None for grad in grads):
        raise _no_second_derivative()
    if grad_total is None:
        return (None,) * 11
    gradients = [
        backward_op(grad_total, gradient, ctx.dtype) if needs else None
        for needs, gradient in zip(ctx.needs, ctx.saved_tensors, strict=True)
    ]
    return *gradients, *(None,) * 8


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise _no_second_derivative()


def _no_second_derivative() -> NotImplementedError:
    return NotImplementedError(
        "linear_token_loss has no second derivative (double backward); use token_loss(linear(hidden, weight), labels)"
    )


forward_op.register_autograd(_autograd, setup_context=_save_for_backward)
backward_op.register_autograd(_no_double_backward)


@register_flop_formula(torch.ops.dtcp.linear_token_loss)
def _flops(
    hidden_shape: Any, weight_shape: Any, bias_shape: Any, labels_shape: Any, ignore_index: int, chunk_tokens: int,
    group_name: str, sums_hidden: bool, needs_hidden: bool, needs_weight: bool, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """2 FLOPs × tokens × D × K for the logits and for each gradient, which are made here too."""
    num_products = 1 + int(needs_hidden) + int(needs_weight)
    return int(2 * num_products * labels_shape.numel() * weight_shape.numel())
