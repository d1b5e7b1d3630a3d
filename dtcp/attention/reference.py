"""Dense attention over the whole sequence on one device: the oracle that everything else is compared with.

Shapes: query (B, Hq, S, D), key (B, Hkv, S_kv, D), value (B, Hkv, S_kv, Dv); natural token order, no layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtcp.attention.arguments import check_inputs, check_later_features, checked_scale
from dtcp.attention.dropout import CallDropout, checked_dropout, tile_dropout


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    documents: Any = None,
    key_lengths: Tensor | None = None,
    mask_mod: Any = None,
    sinks: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    head_offset: int = 0,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    dropout_keys: Tensor | None = None,
    dropout_name: str | Tensor | None = None,
    qkv_format: str = "bhsd",
    return_lse: bool = False,
) -> Any:
    """Return softmax(query·keyᵀ·scale)·value, written out: S×S scores, differentiable any number of times.

    Computed in float32, or in float64 if the inputs are; so the oracle of a float32 call is this with
    ``query.double()`` and so on. Arguments are those of ``context_parallel_attention``; ``dropout_keys`` are those of
    all queries, int64 (B, S).

    Returns:
        out (B, Hq, S, Dv) in the dtype of ``query``, or (out, lse) with lse (B, Hq, S), natural log.

    Raises:
        ValueError: If the inputs do not fit together.
        NotImplementedError: For masks that are not available yet.
    """
    check_later_features(
        window_size=window_size, documents=documents, key_lengths=key_lengths, mask_mod=mask_mod, sinks=sinks,
        attn_bias=attn_bias, alibi_slopes=alibi_slopes, softcap=softcap,
    )  # fmt: skip
    check_inputs(query, key, value, enable_gqa=enable_gqa, qkv_format=qkv_format)
    if qkv_format == "bshd":
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if is_causal and query.size(2) != key.size(2):
        raise ValueError(f"is_causal needs as many keys as queries, got {key.size(2)} and {query.size(2)}")
    dropout = checked_dropout(dropout_p, dropout_keys, dropout_name, head_offset, (query.size(0), query.size(2)))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group_size = query.size(1) // key.size(1)
    key, value = (x.to(dtype).repeat_interleave(group_size, dim=1) for x in (key, value))
    scores = query.to(dtype) @ key.mT * checked_scale(scale, query.size(-1))
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1)
    if dropout is not None:
        weights = torch.where(_kept(weights, dropout), weights, 0.0) / (1 - dropout.p)
    out = (weights @ value).to(query.dtype)
    if qkv_format == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _kept(weights: Tensor, dropout: CallDropout) -> Tensor:
    """Which of the weights (B, Hq, S, S_kv) stay."""
    _, heads, num_queries, num_keys = weights.shape
    global_heads = range(dropout.head_offset, dropout.head_offset + heads)
    mask = tile_dropout(dropout.p, dropout.keys, global_heads, torch.arange(num_keys, device=weights.device))
    return mask.keep(0, num_queries, num_keys)
