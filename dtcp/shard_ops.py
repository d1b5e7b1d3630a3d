"""The ops behind ``shard`` and ``unshard``, and their derivatives.

All four are linear and each is the transpose of another, which gives second derivatives for nothing. ``state`` is
``layout.state``: a tensor of constant shape costs torch.compile no recompilation when its contents change. Lengths
stand beside it for the fakes, which have no data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from dtcp.collectives import (
    DTYPES,
    agree,
    agree_on_backward,
    all_gather_rows,
    reduce_scatter_rows,
    resolve_group,
)
from dtcp.layout import LAYOUT_NAMES, SequenceLayout, layout_from_state


@torch.library.custom_op("dtcp::shard", mutates_args=())
def shard_op(x: Tensor, state: Tensor, local_seq_len: int, rank: int, dim: int, pad_value: Number) -> Tensor:
    """Copy the tokens of ``rank``. An op because a layout's integers, traced, would be data-dependent sizes."""
    layout = layout_from_state(state)
    num_valid = layout.num_valid(rank)
    # index_select always copies, so the result never shares storage with x.
    local = x.index_select(dim, layout.positions(rank)[:num_valid].to(x.device))
    if num_valid < local_seq_len:
        pads = x.new_full([*x.shape[:dim], local_seq_len - num_valid, *x.shape[dim + 1 :]], pad_value)
        local = torch.cat([local, pads], dim)
    return local.contiguous()


@torch.library.custom_op("dtcp::shard_backward", mutates_args=())
def shard_backward_op(grad: Tensor, state: Tensor, seq_len: int, rank: int, dim: int) -> Tensor:
    """Put the gradient of each slot at its token, zero elsewhere."""
    layout = layout_from_state(state)
    num_valid = layout.num_valid(rank)
    whole = grad.new_zeros([*grad.shape[:dim], seq_len, *grad.shape[dim + 1 :]])
    index = layout.positions(rank)[:num_valid].to(grad.device)
    return whole.index_copy_(dim, index, grad.narrow(dim, 0, num_valid))


@torch.library.custom_op("dtcp::unshard", mutates_args=())
def unshard_op(
    local: Tensor,
    state: Tensor,
    seq_len: int,
    group_name: str,
    dim: int,
    name: str,
    num_tensors: int,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    """All-gather: (whole, number of the call). The last three arguments are only compared between the ranks."""
    layout, group = layout_from_state(state), resolve_group(group_name)
    fields = unshard_fields(local, layout, dim, num_tensors, needs_grad)
    number = torch.tensor([agree("unshard", fields, group, local.device, entry=name)])
    if local.numel() == 0:
        return local.new_empty([*local.shape[:dim], seq_len, *local.shape[dim + 1 :]]), number
    rows = all_gather_rows(local.movedim(dim, 0), group)
    return rows.index_select(0, layout.inverse().to(local.device)).movedim(0, dim).contiguous(), number


@torch.library.custom_op("dtcp::unshard_backward", mutates_args=())
def unshard_backward_op(
    grad: Tensor, number: Tensor, state: Tensor, local_seq_len: int, group_name: str, dim: int
) -> Tensor:
    """Reduce-scatter of the gradient of the whole sequence; half precision is summed in float32."""
    layout, group = layout_from_state(state), resolve_group(group_name)
    agree_on_backward("unshard", number, group, grad.device)
    if grad.numel() == 0:
        return grad.new_empty([*grad.shape[:dim], local_seq_len, *grad.shape[dim + 1 :]])
    rows = grad.movedim(dim, 0)
    slots = rows.new_zeros(layout.padded_seq_len, *rows.shape[1:], dtype=_sum_dtype(grad.dtype))
    slots.index_copy_(0, layout.inverse().to(grad.device), rows.to(slots.dtype))
    if slots.is_complex():
        local = torch.view_as_complex(reduce_scatter_rows(torch.view_as_real(slots), group))
    else:
        local = reduce_scatter_rows(slots, group)
    return local.to(grad.dtype).movedim(0, dim).contiguous()


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.itemsize < 4 else dtype


def unshard_fields(
    local: Tensor, layout: SequenceLayout, dim: int, num_tensors: int, needs_grad: bool
) -> dict[str, int]:
    """What has to be equal on every rank before anything is exchanged."""
    in_range = -local.ndim <= dim < local.ndim
    sizes = [*local.shape, *[-1] * 6]
    kinds = ", ".join(f"{i} {kind}" for i, kind in enumerate(LAYOUT_NAMES))
    return {
        "number of tensors in the container": num_tensors,
        "number of dims": local.ndim,
        "dtype": DTYPES.index(local.dtype),
        "dim": dim % local.ndim if in_range else dim,
        f"layout ({kinds})": LAYOUT_NAMES.index(layout.name),
        "seq_len": layout.seq_len,
        "cp": layout.cp,
        "multiple_of": layout.multiple_of,
        "local length": local.size(dim) if in_range else -1,
        **{f"size of dim {d}": sizes[d] for d in range(6)},
        "number of elements": local.numel(),
        "requires_grad": needs_grad,
    }


@shard_op.register_fake
def _(x: Tensor, state: Tensor, local_seq_len: int, rank: int, dim: int, pad_value: Number) -> Tensor:
    return x.new_empty([*x.shape[:dim], local_seq_len, *x.shape[dim + 1 :]])


@shard_backward_op.register_fake
def _(grad: Tensor, state: Tensor, seq_len: int, rank: int, dim: int) -> Tensor:
    return grad.new_empty([*grad.shape[:dim], seq_len, *grad.shape[dim + 1 :]])


@unshard_op.register_fake
def _(
    local: Tensor,
    state: Tensor,
    seq_len: int,
    group_name: str,
    dim: int,
    name: str,
    num_tensors: int,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    whole = local.new_empty([*local.shape[:dim], seq_len, *local.shape[dim + 1 :]])
    return whole, torch.empty(1, dtype=torch.int64, device="cpu")


@unshard_backward_op.register_fake
def _(grad: Tensor, number: Tensor, state: Tensor, local_seq_len: int, group_name: str, dim: int) -> Tensor:
    return grad.new_empty([*grad.shape[:dim], local_seq_len, *grad.shape[dim + 1 :]])


def _save_for_shard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, state, _, ctx.rank, ctx.dim, *_ = inputs
    ctx.other_length = x.size(ctx.dim)
    ctx.save_for_backward(state)


def _shard_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return shard_backward_op(grad, *ctx.saved_tensors, ctx.other_length, ctx.rank, ctx.dim), *[None] * 5


def _shard_backward_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return shard_op(grad, *ctx.saved_tensors, ctx.other_length, ctx.rank, ctx.dim, 0), *[None] * 4


def _save_for_unshard(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, state, _, ctx.group_name, ctx.dim, *_ = inputs
    ctx.other_length = x.size(ctx.dim)
    ctx.save_for_backward(output[1], state)


def _unshard_autograd(ctx: Any, grad: Tensor, grad_number: None) -> tuple[Tensor | None, ...]:
    return unshard_backward_op(grad, *ctx.saved_tensors, ctx.other_length, ctx.group_name, ctx.dim), *[None] * 7


def _save_for_unshard_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, _, state, _, ctx.group_name, ctx.dim = inputs
    ctx.other_length = grad.size(ctx.dim)
    ctx.save_for_backward(state)


def _unshard_backward_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_grad = torch.is_grad_enabled() and grad.requires_grad
    whole, _ = unshard_op(grad, *ctx.saved_tensors, ctx.other_length, ctx.group_name, ctx.dim, "", 1, needs_grad)
    return whole, *[None] * 5


shard_op.register_autograd(_shard_autograd, setup_context=_save_for_shard)
shard_backward_op.register_autograd(_shard_backward_autograd, setup_context=_save_for_shard)
unshard_op.register_autograd(_unshard_autograd, setup_context=_save_for_unshard)
unshard_backward_op.register_autograd(_unshard_backward_autograd, setup_context=_save_for_unshard_backward)
