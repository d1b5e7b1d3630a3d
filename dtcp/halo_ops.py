"""The ops behind ``halo_exchange``, and their derivatives: linear, each the transpose of the other.

``num_slots`` is the length of the result and ``num_rows`` the number of rows that differ, for the fakes, which have no
data; ``documents`` is ``Documents.state``. See `dtcp.shard_ops` for the rest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.types import Number

from dtcp.collectives import agree, agree_on_backward, exchange_rows, resolve_group
from dtcp.documents import Documents
from dtcp.halo_plan import plan_halo
from dtcp.layout import SequenceLayout, layout_from_state
from dtcp.shard_ops import rows_refusal, slot_fields, sum_dtype


@torch.library.custom_op("dtcp::halo", mutates_args=())
def halo_op(
    x: Tensor,
    state: Tensor,
    documents: Tensor | None,
    num_slots: int,
    num_rows: int,
    group_name: str,
    left: int,
    right: int,
    dim: int,
    batch_dim: int,
    pad_value: Number,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(extended runs, slots of this rank's tokens in them, number of the call). The last argument is only compared."""
    layout, group = layout_from_state(state), resolve_group(group_name)
    mask = None if documents is None else Documents.from_state(documents)
    fields = halo_fields(x, layout, mask, left, right, dim, batch_dim, needs_grad)
    refusal = rows_refusal(x, layout, dim, batch_dim, "halo_exchange")
    number = torch.tensor([agree("halo_exchange", fields, group, x.device, error=refusal)])
    plan = plan_halo(layout, mask, left, right, num_rows, group.rank())
    slots = torch.from_numpy(plan.slots.copy() if num_rows > 1 else plan.slots[0].copy()).to(x.device)
    if x.numel() == 0:
        return x.new_empty([*x.shape[:dim], num_slots, *x.shape[dim + 1 :]]), slots, number
    table = _as_table(x, dim, batch_dim, num_rows)
    received = _exchange(table.index_select(0, _index(plan.send, x)), plan.num_sent, plan.num_received, group)
    filled = table.new_full((1, *table.shape[1:]), pad_value)
    extended = torch.cat([table, received, filled]).index_select(0, _index(plan.source, x))
    extended = _from_table(extended, dim, batch_dim, num_rows)
    if num_slots > plan.num_slots:
        more = [*x.shape[:dim], num_slots - plan.num_slots, *x.shape[dim + 1 :]]
        extended = torch.cat([extended, x.new_full(more, pad_value)], dim)
    return extended.contiguous(), slots, number


@torch.library.custom_op("dtcp::halo_backward", mutates_args=())
def halo_backward_op(
    grad: Tensor,
    number: Tensor,
    state: Tensor,
    documents: Tensor | None,
    local_seq_len: int,
    num_rows: int,
    group_name: str,
    left: int,
    right: int,
    dim: int,
    batch_dim: int,
) -> Tensor:
    """Send the gradients of the extended slots home, and add them up there; half precision in float32."""
    layout, group = layout_from_state(state), resolve_group(group_name)
    mask = None if documents is None else Documents.from_state(documents)
    agree_on_backward("halo_exchange", number, group, grad.device)
    if grad.numel() == 0:
        return grad.new_empty([*grad.shape[:dim], local_seq_len, *grad.shape[dim + 1 :]])
    plan = plan_halo(layout, mask, left, right, num_rows, group.rank())
    rows = _as_table(grad.narrow(dim, 0, plan.num_slots), dim, batch_dim, num_rows).to(sum_dtype(grad.dtype))
    num_own, num_received = num_rows * local_seq_len, sum(plan.num_received)
    summed = rows.new_zeros(num_own + num_received + 1, *rows.shape[1:])
    _add_rows(summed, _index(plan.source, grad), rows)
    own, received = summed[:num_own], summed[num_own : num_own + num_received]
    _add_rows(own, _index(plan.send, grad), _exchange(received, plan.num_received, plan.num_sent, group))
    return _from_table(own, dim, batch_dim, num_rows).to(grad.dtype).contiguous()


def halo_fields(
    x: Tensor,
    layout: SequenceLayout,
    documents: Documents | None,
    left: int,
    right: int,
    dim: int,
    batch_dim: int,
    needs_grad: bool,
) -> dict[str, int]:
    """What has to be equal on every rank before anything is exchanged."""
    return {
        **slot_fields(x, layout, dim, batch_dim, needs_grad),
        "documents (hash)": 0 if documents is None else hash(documents),
        "left": left,
        "right": right,
    }


def _exchange(rows: Tensor, num_sent: list[int], num_received: list[int], group: dist.ProcessGroup) -> Tensor:
    return rows if group.size() == 1 else exchange_rows(rows, num_sent, num_received, group)


def _index(numbers: Any, x: Tensor) -> Tensor:
    return torch.from_numpy(numbers).to(x.device)


def _as_table(x: Tensor, dim: int, batch_dim: int, num_rows: int) -> Tensor:
    """(…, S, …) → (S, …), or (rows·S, …) where rows differ."""
    if num_rows == 1:
        return x.movedim(dim, 0)
    return x.movedim((batch_dim, dim), (0, 1)).flatten(0, 1)


def _from_table(table: Tensor, dim: int, batch_dim: int, num_rows: int) -> Tensor:
    if num_rows == 1:
        return table.movedim(0, dim)
    return table.unflatten(0, (num_rows, -1)).movedim((0, 1), (batch_dim, dim))


def _add_rows(summed: Tensor, index: Tensor, rows: Tensor) -> None:
    """``summed[index] += rows`` in a fixed order: on CUDA index_add_ uses atomics and index_put_ sorts."""
    if summed.device.type == "cpu":
        summed.index_add_(0, index, rows)
    else:
        summed.index_put_((index,), rows, accumulate=True)


@halo_op.register_fake
def _(
    x: Tensor,
    state: Tensor,
    documents: Tensor | None,
    num_slots: int,
    num_rows: int,
    group_name: str,
    left: int,
    right: int,
    dim: int,
    batch_dim: int,
    pad_value: Number,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    extended = x.new_empty([*x.shape[:dim], num_slots, *x.shape[dim + 1 :]])
    shape = [x.size(dim)] if num_rows == 1 else [num_rows, x.size(dim)]
    return extended, x.new_empty(shape, dtype=torch.int64), torch.empty(1, dtype=torch.int64, device="cpu")


@halo_backward_op.register_fake
def _(
    grad: Tensor,
    number: Tensor,
    state: Tensor,
    documents: Tensor | None,
    local_seq_len: int,
    num_rows: int,
    group_name: str,
    left: int,
    right: int,
    dim: int,
    batch_dim: int,
) -> Tensor:
    return grad.new_empty([*grad.shape[:dim], local_seq_len, *grad.shape[dim + 1 :]])


def _save_for_halo(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, state, documents, _, *constants = inputs
    ctx.constants = constants[:-2]
    ctx.local_seq_len = x.size(constants[4])
    ctx.save_for_backward(output[2], state, documents)


def _halo_autograd(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return halo_backward_op(grad, *ctx.saved_tensors, ctx.local_seq_len, *ctx.constants), *[None] * 11


def _save_for_halo_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, _, state, documents, _, *constants = inputs
    ctx.constants = constants
    ctx.num_slots = grad.size(constants[4])
    ctx.save_for_backward(state, documents)


def _halo_backward_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_grad = torch.is_grad_enabled() and grad.requires_grad
    extended, _, _ = halo_op(grad, *ctx.saved_tensors, ctx.num_slots, *ctx.constants, 0, needs_grad)
    return extended, *[None] * 10


halo_op.register_autograd(_halo_autograd, setup_context=_save_for_halo)
halo_backward_op.register_autograd(_halo_backward_autograd, setup_context=_save_for_halo_backward)
