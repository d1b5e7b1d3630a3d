"""Context parallel attention as two custom ops, so that it is opaque to Dynamo, AOTAutograd and DTensor.

Shapes: query (B, S_q, Hq, D), key (B, S_kv, Hkv, D), value (B, S_kv, Hkv, Dv), any strides; out (B, S_q, Hq, Dv)
and the gradients contiguous; lse (B, Hq, S_q); number int64 (1,), on the host; dropout_keys int64 (B, S_q), None where
nothing is dropped. Only constants, a group name and tensors travel: layouts as the int64 tensors ``layout.state``, so
that the next step's layout costs no recompilation and the backward, also a recomputed or delayed one, uses the layouts
of its own forward. So do the keys of dropout, and the number of the call in its group, by which the ranks compare their
backwards.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dtcp.attention.arguments import length_error
from dtcp.attention.calls import count_call
from dtcp.attention.dropout import CallDropout, check_call_keys
from dtcp.attention.kernels import choose_kernel, lse_dtype
from dtcp.attention.strategies import STRATEGY_NAMES, Call, choose_strategy
from dtcp.collectives import DTYPES, agree, agree_on_backward, resolve_group
from dtcp.layout import LAYOUT_NAMES, SequenceLayout, layout_from_state
from dtcp.replicas import expect_equal_gradients

_NAME = "context_parallel_attention"
logger = logging.getLogger(__name__)


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_state: Tensor,
    kv_state: Tensor,
    group_name: str,
    is_causal: bool,
    scale: float,
    strategy: str,
    kernel: str,
    dropout: CallDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of this rank's queries over the whole sequence's keys. Collective."""
    # Inside the op nothing requires grad. A backward that only some ranks run would wait for the others.
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    p, keys, head_offset, head_axis = dropout or (0.0, None, 0, "")
    out, lse, _ = forward_op(
        query, key, value, q_state, kv_state, keys, group_name, is_causal, scale, strategy, kernel, p, head_offset,
        head_axis, needs_grad,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("dtcp::attention_forward", mutates_args=())
def forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_state: Tensor,
    kv_state: Tensor,
    dropout_keys: Tensor | None,
    group_name: str,
    is_causal: bool,
    scale: float,
    strategy: str,
    kernel: str,
    dropout_p: float,
    head_offset: int,
    head_axis: str,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, lse, number); ``needs_grad`` is compared between the ranks and not used otherwise."""
    dropout = _dropout(query, dropout_keys, dropout_p, head_offset, head_axis)
    call = _call(query, value, q_state, kv_state, group_name, is_causal, scale, kernel, dropout)
    fields = agreement_fields(query, key, value, call, strategy, needs_grad)
    number = agree(_NAME, fields, call.group, query.device, error=_refusal(query, key, call))
    count_call(q_state)
    out, lse = choose_strategy(strategy).forward(call, *_by_head(query, key, value))
    return out.to(query.dtype).transpose(1, 2).contiguous(), lse.contiguous(), torch.tensor([number])


@torch.library.custom_op("dtcp::attention_backward", mutates_args=())
def backward_op(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    number: Tensor,
    q_state: Tensor,
    kv_state: Tensor,
    dropout_keys: Tensor | None,
    group_name: str,
    is_causal: bool,
    scale: float,
    strategy: str,
    kernel: str,
    dropout_p: float,
    head_offset: int,
    head_axis: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (grad_query, grad_key, grad_value). Collective; all three are made, whichever are needed."""
    dropout = _dropout(query, dropout_keys, dropout_p, head_offset, head_axis)
    call = _call(query, value, q_state, kv_state, group_name, is_causal, scale, kernel, dropout)
    agree_on_backward(_NAME, number, call.group, query.device)
    if group_name:
        expect_equal_gradients(call.group)
    grad_out, query_, key_, value_, out = _by_head(grad_out, query, key, value, out)
    grads = choose_strategy(strategy).backward(call, grad_out, query_, key_, value_, out, lse)
    grad_query, grad_key, grad_value = (g.to(query.dtype).transpose(1, 2).contiguous() for g in grads)
    return grad_query, grad_key, grad_value


def agreement_fields(
    query: Tensor, key: Tensor, value: Tensor, call: Call, strategy: str, needs_grad: bool
) -> dict[str, int]:
    """What has to be equal on every rank before anything is exchanged."""
    return {
        "dtype": DTYPES.index(query.dtype),
        "batch size": query.size(0),
        "query heads": query.size(2),
        "key heads": key.size(2),
        "head dim": query.size(3),
        "value head dim": value.size(3),
        **_layout_fields("query", call.layout),
        **_layout_fields("key", call.kv_layout),
        "is_causal": int(call.is_causal),
        "scale (its float64 bits)": _bits(call.scale),
        "dropout_p (its float64 bits)": _bits(0.0 if call.dropout is None else call.dropout.p),
        f"strategy ({_choices(STRATEGY_NAMES)})": STRATEGY_NAMES.index(strategy),
        "requires_grad": int(needs_grad),
    }


def _bits(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float64).view(torch.int64))


def _refusal(query: Tensor, key: Tensor, call: Call) -> ValueError | None:
    """What only the op can check: in a compiled graph the layout is known when it runs."""
    if call.layout.cp != call.group.size():
        return ValueError(f"the layout is for cp={call.layout.cp} but the group has {call.group.size()} ranks")
    return length_error(query.size(1), key.size(1), call.layout, call.kv_layout)


def _layout_fields(of: str, layout: SequenceLayout) -> dict[str, int]:
    return {
        f"{of} layout ({_choices(LAYOUT_NAMES)})": LAYOUT_NAMES.index(layout.name),
        f"{of} seq_len": layout.seq_len,
        f"{of} multiple_of": layout.multiple_of,
    }


def _choices(names: tuple[str, ...]) -> str:
    return ", ".join(f"{index} {name}" for index, name in enumerate(names))


def _call(
    query: Tensor, value: Tensor, q_state: Tensor, kv_state: Tensor, group_name: str, is_causal: bool, scale: float,
    kernel: str, dropout: CallDropout | None,
) -> Call:  # fmt: skip
    return Call(
        group=resolve_group(group_name),
        layout=layout_from_state(q_state),
        kv_layout=layout_from_state(kv_state),
        is_causal=is_causal,
        scale=scale,
        kernel=choose_kernel(
            kernel, query, max(query.size(-1), value.size(-1)), scale, 0.0 if dropout is None else dropout.p
        ),
        dropout=dropout,
    )


def _dropout(query: Tensor, keys: Tensor | None, p: float, head_offset: int, head_axis: str) -> CallDropout | None:
    """What the call drops; the offset of its heads is found here, where the rank is known."""
    if keys is None:
        return None
    check_call_keys(keys, (query.size(0), query.size(1)))
    _log_math_kernel(p)
    rank_of_axis = resolve_group(head_axis).rank() if head_axis else 0
    return CallDropout(p, keys, head_offset + rank_of_axis * query.size(2))


def _by_head(*tensors: Tensor) -> list[Tensor]:
    """(B, S, H, D) → (B, H, S, D), the order of the kernels; a view wherever the last dim is contiguous.

    Torch's fused CPU kernels read other last dims wrongly without an error, for instance the expanded gradient
    that ``out.sum().backward()`` hands over.
    """
    return [(t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2) for t in tensors]


@functools.cache
def _log_math_kernel(p: float) -> None:
    logger.info("attention with dropout_p=%s takes the math kernel, the only one whose mask is the same on any mesh", p)


@forward_op.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, q_state: Tensor, kv_state: Tensor, dropout_keys: Tensor | None,
    group_name: str, is_causal: bool, scale: float, strategy: str, kernel: str, dropout_p: float, head_offset: int,
    head_axis: str, needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    batch, seq_len, heads, _ = query.shape
    out = query.new_empty(batch, seq_len, heads, value.size(-1))
    lse = query.new_empty(batch, heads, seq_len, dtype=lse_dtype(query.dtype))
    return out, lse, torch.empty(1, dtype=torch.int64, device="cpu")


@backward_op.register_fake
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, number: Tensor,
    q_state: Tensor, kv_state: Tensor, dropout_keys: Tensor | None, group_name: str, is_causal: bool, scale: float,
    strategy: str, kernel: str, dropout_p: float, head_offset: int, head_axis: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, q_state, kv_state, dropout_keys, *ctx.constants, _ = inputs
    ctx.save_for_backward(query, key, value, *output, q_state, kv_state, dropout_keys)
    # Zeros for an unused output would hide whether a gradient came into lse.
    ctx.set_materialize_grads(False)


def _autograd(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_number: None
) -> tuple[Tensor | None, ...]:
    if grad_lse is not None:
        raise NotImplementedError(
            "context_parallel_attention has no gradient with respect to lse; use lse.detach(), or "
            "reference_attention(…, return_lse=True) for a loss that reads it"
        )
    query, key, value, out, lse, number, *states = ctx.saved_tensors
    if grad_out is None:  # a gradient of zero, which other ranks may not have: the exchange takes place all the same
        grad_out = torch.zeros_like(out)
    grads = backward_op(grad_out, query, key, value, out, lse, number, *states, *ctx.constants)
    return *grads, *(None,) * 12


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise NotImplementedError(
        "context_parallel_attention has no second derivative (double backward); use reference_attention on one rank"
    )


forward_op.register_autograd(_autograd, setup_context=_save_for_backward)
backward_op.register_autograd(_no_double_backward)


def _pairs(query: Tensor, q_state: Tensor, kv_state: Tensor, group_name: str, is_causal: bool) -> float:
    """Allowed (query, key) pairs of this rank; under FakeTensor, where layouts have no data, the whole rectangle."""
    if isinstance(q_state, FakeTensor):
        local, cp = query.size(1), resolve_group(group_name).size()
        return local * local * cp
    layout, kv_layout = layout_from_state(q_state), layout_from_state(kv_state)
    rank = resolve_group(group_name).rank()
    tiles = (layout.tiles(rank, s, is_causal=is_causal, kv_layout=kv_layout) for s in range(layout.cp))
    return sum(tile.num_pairs for of_source in tiles for tile in of_source)


@register_flop_formula(torch.ops.dtcp.attention_forward, get_raw=True)
def _forward_flops(
    query: Tensor, key: Tensor, value: Tensor, q_state: Tensor, kv_state: Tensor, dropout_keys: Tensor | None,
    group_name: str, is_causal: bool, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """2 FLOPs × pairs × (D for scores + Dv for out), of this rank."""
    pairs = _pairs(query, q_state, kv_state, group_name, is_causal)
    return int(2 * query.size(0) * query.size(2) * pairs * (query.size(3) + value.size(3)))


@register_flop_formula(torch.ops.dtcp.attention_backward, get_raw=True)
def _backward_flops(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, number: Tensor,
    q_state: Tensor, kv_state: Tensor, dropout_keys: Tensor | None, group_name: str, is_causal: bool, *args: Any,
    **kwargs: Any,
) -> int:  # fmt: skip
    """2 FLOPs × pairs × (3·D + 2·Dv): scores again, their gradient, and those of query, key and value."""
    pairs = _pairs(query, q_state, kv_state, group_name, is_causal)
    return int(2 * query.size(0) * query.size(2) * pairs * (3 * query.size(3) + 2 * value.size(3)))
