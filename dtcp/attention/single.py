"""Attention of a rank that holds the whole sequence, by the same ops: where torch's own would draw a
dropout mask, or does not know a mask.

Shapes: query (B, Hq, S, D), key (B, Hkv, S_kv, D), value (B, Hkv, S_kv, Dv).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtcp.attention.api import check_kernel, prepare_inputs
from dtcp.attention.arguments import RING
from dtcp.attention.dropout import CallDropout, check_call_dropout
from dtcp.attention.masks import check_mask_shapes
from dtcp.attention.ops import attention_forward
from dtcp.attention.scores import NO_MASKS, CallMasks
from dtcp.layout import make_layout
from dtcp.own_group import ALONE


def single_rank_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: CallDropout | None = None,
    masks: CallMasks = NO_MASKS,
    *,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
    kernel: str = "auto",
) -> Tensor:
    """Return attention that masks and drops weights as it does where the sequence is cut. No process group is needed.

    Raises:
        ValueError: If the inputs do not fit together.
    """
    query, key, value, scale = prepare_inputs(query, key, value, scale=scale, enable_gqa=enable_gqa, qkv_format="bhsd")
    if is_causal and query.size(1) != key.size(1):
        raise ValueError(f"is_causal needs as many keys as queries, got {key.size(1)} and {query.size(1)}")
    if dropout is not None:
        check_call_dropout(dropout, (query.size(0), query.size(1)))
    check_mask_shapes(masks, query.size(0), query.size(2), query.size(1), key.size(1))
    check_kernel(kernel, query, value, scale, 0.0 if dropout is None else dropout.p, masks)
    q_state, kv_state = (contiguous_state(x.size(1), 1) for x in (query, key))
    out, _ = attention_forward(
        query,
        key,
        value,
        q_state,
        kv_state,
        ALONE.group_name,
        is_causal,
        scale,
        RING,
        kernel,
        dropout,
        masks,
    )
    return out.transpose(1, 2)


def contiguous_state(seq_len: int, cp: int, *, is_traced: bool = False) -> Tensor:
    """Return ``make_layout("contiguous", …).state``.

    Args:
        is_traced: Whether a graph is being made of fake tensors, beside which a real one has no place.
    """
    if is_traced or torch.compiler.is_compiling():
        return contiguous_state_op(seq_len, cp)
    return make_layout("contiguous", seq_len=seq_len, cp=cp).state


@torch.library.custom_op("dtcp::contiguous_state", mutates_args=())
def contiguous_state_op(seq_len: int, cp: int) -> Tensor:
    """The same, made when a compiled graph runs."""
    return make_layout("contiguous", seq_len=seq_len, cp=cp).state.clone()


@contiguous_state_op.register_fake
def _(seq_len: int, cp: int) -> Tensor:
    return torch.empty(5, dtype=torch.int64, device="cpu")
