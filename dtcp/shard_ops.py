"""The ops behind ``shard`` and ``unshard``, and their derivatives.

All four are linear and each is the transpose of another, which gives second derivatives for nothing. ``state`` is
``layout.state``: a tensor of constant shape costs torch.compile no recompilation when its contents change. Lengths
stand beside it for the fakes, which have no data. ``batch_dim`` is looked at only where the rows of a layout differ,
which nothing but its contents says: so it is the ops that compare it with the tensor.
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
def shard_op(
    x: Tensor, state: Tensor, local_seq_len: int, rank: int, dim: int, batch_dim: int, pad_value: Number
) -> Tensor:
    """Copy the tokens of ``rank``. An op because a layout's integers, traced, would be data-dependent sizes."""
    layout = layout_from_state(state)
    check_rows(x, layout, dim, batch_dim, "shard")
    num_valid = layout.num_valid(rank)
    local = take_slots(x, layout.positions(rank)[..., :num_valid], dim, batch_dim)
    if num_valid < local_seq_len:
        pads = x.new_full([*x.shape[:dim], local_seq_len - num_valid, *x.shape[dim + 1 :]], pad_value)
        local = torch.cat([local, pads], dim)
    return local.contiguous()


@torch.library.custom_op("dtcp::shard_backward", mutates_args=())
def shard_backward_op(grad: Tensor, state: Tensor, seq_len: int, rank: int, dim: int, batch_dim: int) -> Tensor:
    """Put the gradient of each slot at its token, zero elsewhere."""
    layout = layout_from_state(state)
    num_valid = layout.num_valid(rank)
    index = layout.positions(rank)[..., :num_valid]
    return put_slots(grad.narrow(dim, 0, num_valid), index, seq_len, dim, batch_dim).contiguous()


@torch.library.custom_op("dtcp::unshard", mutates_args=())
def unshard_op(
    local: Tensor,
    state: Tensor,
    seq_len: int,
    group_name: str,
    dim: int,
    batch_dim: int,
    name: str,
    num_tensors: int,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    """All-gather: (whole, number of the call). The last three arguments are only compared between the ranks."""
    layout, group = layout_from_state(state), resolve_group(group_name)
    fields = unshard_fields(local, layout, dim, batch_dim, num_tensors, needs_grad)
    refusal = rows_refusal(local, layout, dim, batch_dim, "unshard")
    number = torch.tensor([agree("unshard", fields, group, local.device, error=refusal, entry=name)])
    if local.numel() == 0:
        return local.new_empty([*local.shape[:dim], seq_len, *local.shape[dim + 1 :]]), number
    slots = all_gather_rows(local.movedim(dim, 0), group)
    whole = take_slots(slots, layout.inverse(), 0, _behind(dim, batch_dim, local.ndim))
    return whole.movedim(0, dim).contiguous(), number


@torch.library.custom_op("dtcp::unshard_backward", mutates_args=())
def unshard_backward_op(
    grad: Tensor, number: Tensor, state: Tensor, local_seq_len: int, group_name: str, dim: int, batch_dim: int
) -> Tensor:
    """Reduce-scatter of the gradient of the whole sequence; half precision is summed in float32."""
    layout, group = layout_from_state(state), resolve_group(group_name)
    agree_on_backward("unshard", number, group, grad.device)
    if grad.numel() == 0:
        return grad.new_empty([*grad.shape[:dim], local_seq_len, *grad.shape[dim + 1 :]])
    tokens = grad.movedim(dim, 0).to(sum_dtype(grad.dtype))
    batch_dim = _behind(dim, batch_dim, grad.ndim)
    slots = put_slots(tokens, layout.inverse(), layout.padded_seq_len, 0, batch_dim).contiguous()
    if slots.is_complex():
        local = torch.view_as_complex(reduce_scatter_rows(torch.view_as_real(slots), group))
    else:
        local = reduce_scatter_rows(slots, group)
    return local.to(grad.dtype).movedim(0, dim).contiguous()


# ---- slots -----------------------------------------------------------------------------------------------------------


def take_slots(x: Tensor, index: Tensor, dim: int, batch_dim: int) -> Tensor:
    """Copy the slots ``index`` of ``dim``: int64 (n,), the same in each row, or (B, n), by row of ``batch_dim``."""
    index = index.to(x.device)
    if index.ndim == 1:
        return x.index_select(dim, index)
    rows = x.movedim((batch_dim, dim), (0, 1))
    # Not by advanced indexing, which does not know the unsigned and the 8-bit float dtypes.
    taken = rows.flatten(0, 1).index_select(0, _flat(index, x.size(dim)))
    return taken.unflatten(0, index.shape).movedim((0, 1), (batch_dim, dim))


def put_slots(x: Tensor, index: Tensor, size: int, dim: int, batch_dim: int) -> Tensor:
    """The transpose of ``take_slots``: ``size`` slots, those of ``x`` at ``index``, which are distinct, else zero."""
    index = index.to(x.device)
    if index.ndim == 1:
        return x.new_zeros([*x.shape[:dim], size, *x.shape[dim + 1 :]]).index_copy_(dim, index, x)
    rows = x.movedim((batch_dim, dim), (0, 1))
    whole = x.new_zeros(rows.size(0) * size, *rows.shape[2:])
    whole.index_copy_(0, _flat(index, size), rows.flatten(0, 1))
    return whole.unflatten(0, (rows.size(0), size)).movedim((0, 1), (batch_dim, dim))


def _flat(index: Tensor, size: int) -> Tensor:
    return (index + size * torch.arange(index.size(0), device=index.device).unsqueeze(1)).flatten()


def _behind(dim: int, batch_dim: int, ndim: int) -> int:
    """Where ``batch_dim`` is once ``dim`` has been moved to the front."""
    batch_dim = batch_dim % ndim
    return batch_dim + 1 if batch_dim < dim else batch_dim


def rows_refusal(x: Tensor, layout: SequenceLayout, dim: int, batch_dim: int, caller: str) -> ValueError | None:
    """What is wrong with ``batch_dim`` of ``x``, where the rows of ``layout`` differ."""
    num_rows = layout.num_rows
    if num_rows == 1:
        return None
    if not -x.ndim <= batch_dim < x.ndim or batch_dim % x.ndim == dim % x.ndim:
        return ValueError(
            f"{caller}: the layout places the tokens of {num_rows} rows differently, and batch_dim={batch_dim} is no "
            f"dim of a tensor of shape {tuple(x.shape)} beside its sequence dim {dim}; give the dim of its rows"
        )
    if x.size(batch_dim) != num_rows:
        return ValueError(
            f"{caller}: batch_dim={batch_dim} of a tensor of shape {tuple(x.shape)} must have layout.num_rows="
            f"{num_rows} rows, got {x.size(batch_dim)}; give another batch_dim, or the layout of these rows: "
            "layout.select_rows(slice(start, stop))"
        )
    return None


def check_rows(x: Tensor, layout: SequenceLayout, dim: int, batch_dim: int, caller: str) -> None:
    if (refusal := rows_refusal(x, layout, dim, batch_dim, caller)) is not None:
        raise refusal


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype == torch.complex32:
        return torch.complex64
    return torch.float32 if dtype.itemsize < 4 else dtype


def unshard_fields(
    local: Tensor, layout: SequenceLayout, dim: int, batch_dim: int, num_tensors: int, needs_grad: bool
) -> dict[str, int]:
    """What has to be equal on every rank before anything is exchanged."""
    fields = {"number of tensors in the container": num_tensors}
    return fields | slot_fields(local, layout, dim, batch_dim, needs_grad)


def slot_fields(local: Tensor, layout: SequenceLayout, dim: int, batch_dim: int, needs_grad: bool) -> dict[str, int]:
    """What describes a rank's part of a sequence."""
    in_range = -local.ndim <= dim < local.ndim
    sizes = [*local.shape, *[-1] * 6]
    kinds = ", ".join(f"{i} {kind}" for i, kind in enumerate(LAYOUT_NAMES))
    return {
        "number of dims": local.ndim,
        "dtype": DTYPES.index(local.dtype),
        "dim": dim % local.ndim if in_range else dim,
        "batch_dim": 0 if layout.num_rows == 1 else batch_dim % max(local.ndim, 1),
        f"layout ({kinds})": LAYOUT_NAMES.index(layout.name),
        "documents of the layout (hash)": 0 if layout.placed_by is None else hash(layout.placed_by),
        "seq_len": layout.seq_len,
        "cp": layout.cp,
        "multiple_of": layout.multiple_of,
        "local length": local.size(dim) if in_range else -1,
        **{f"size of dim {d}": sizes[d] for d in range(6)},
        "number of elements": local.numel(),
        "requires_grad": needs_grad,
    }


@shard_op.register_fake
def _(x: Tensor, state: Tensor, local_seq_len: int, rank: int, dim: int, batch_dim: int, pad_value: Number) -> Tensor:
    return x.new_empty([*x.shape[:dim], local_seq_len, *x.shape[dim + 1 :]])


@shard_backward_op.register_fake
def _(grad: Tensor, state: Tensor, seq_len: int, rank: int, dim: int, batch_dim: int) -> Tensor:
    return grad.new_empty([*grad.shape[:dim], seq_len, *grad.shape[dim + 1 :]])


@unshard_op.register_fake
def _(
    local: Tensor,
    state: Tensor,
    seq_len: int,
    group_name: str,
    dim: int,
    batch_dim: int,
    name: str,
    num_tensors: int,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    whole = local.new_empty([*local.shape[:dim], seq_len, *local.shape[dim + 1 :]])
    return whole, torch.empty(1, dtype=torch.int64, device="cpu")


@unshard_backward_op.register_fake
def _(
    grad: Tensor, number: Tensor, state: Tensor, local_seq_len: int, group_name: str, dim: int, batch_dim: int
) -> Tensor:
    return grad.new_empty([*grad.shape[:dim], local_seq_len, *grad.shape[dim + 1 :]])


def _save_for_shard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, state, _, ctx.rank, ctx.dim, ctx.batch_dim, *_ = inputs
    ctx.other_length = x.size(ctx.dim)
    ctx.save_for_backward(state)


def _shard_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    whole = shard_backward_op(grad, *ctx.saved_tensors, ctx.other_length, ctx.rank, ctx.dim, ctx.batch_dim)
    return whole, *[None] * 6


def _shard_backward_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    local = shard_op(grad, *ctx.saved_tensors, ctx.other_length, ctx.rank, ctx.dim, ctx.batch_dim, 0)
    return local, *[None] * 5


def _save_for_unshard(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, state, _, ctx.group_name, ctx.dim, ctx.batch_dim, *_ = inputs
    ctx.other_length = x.size(ctx.dim)
    ctx.save_for_backward(output[1], state)


def _unshard_autograd(ctx: Any, grad: Tensor, grad_number: None) -> tuple[Tensor | None, ...]:
    local = unshard_backward_op(grad, *ctx.saved_tensors, ctx.other_length, ctx.group_name, ctx.dim, ctx.batch_dim)
    return local, *[None] * 8


def _save_for_unshard_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, _, state, _, ctx.group_name, ctx.dim, ctx.batch_dim = inputs
    ctx.other_length = grad.size(ctx.dim)
    ctx.save_for_backward(state)


def _unshard_backward_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_grad = torch.is_grad_enabled() and grad.requires_grad
    where = (ctx.group_name, ctx.dim, ctx.batch_dim)
    whole, _ = unshard_op(grad, *ctx.saved_tensors, ctx.other_length, *where, "", 1, needs_grad)
    return whole, *[None] * 6


shard_op.register_autograd(_shard_autograd, setup_context=_save_for_shard)
shard_backward_op.register_autograd(_shard_backward_autograd, setup_context=_save_for_shard)
unshard_op.register_autograd(_unshard_autograd, setup_context=_save_for_unshard)
unshard_backward_op.register_autograd(_unshard_backward_autograd, setup_context=_save_for_unshard_backward)
