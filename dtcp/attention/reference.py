"""Dense attention over the whole sequence on one device: the oracle that everything else is compared with.

Shapes: query (B, Hq, S, D), key (B, Hkv, S_kv, D), value (B, Hkv, S_kv, Dv); natural token order, no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtcp.attention.arguments import check_inputs, checked_scale, positional_argument
from dtcp.attention.dropout import CallDropout, checked_dropout, tile_dropout
from dtcp.attention.masks import check_mask_shapes, checked_masks
from dtcp.attention.scores import MaskMod, evaluate_mask_mod
from dtcp.documents import Documents


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    documents: Documents | None = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    mask_mod: MaskMod | None = None,
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
    """
    masks = checked_masks(
        is_causal=is_causal, window_size=window_size, documents=documents, key_lengths=key_lengths, mask_mod=mask_mod,
        sinks=sinks, attn_bias=attn_bias, alibi_slopes=alibi_slopes, softcap=softcap, head_offset=head_offset,
    )  # fmt: skip
    check_inputs(query, key, value, enable_gqa=enable_gqa, qkv_format=qkv_format)
    if qkv_format == "bshd":
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    positional = positional_argument(is_causal, masks)
    if positional and query.size(2) != key.size(2):
        raise ValueError(f"{positional} needs as many keys as queries, got {key.size(2)} and {query.size(2)}")
    check_mask_shapes(masks, query.size(0), query.size(1), query.size(2), key.size(2))
    if documents is not None:
        documents.check_fits(query.size(2), query.size(0))
    dropout = checked_dropout(dropout_p, dropout_keys, dropout_name, head_offset, (query.size(0), query.size(2)))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group_size = query.size(1) // key.size(1)
    key, value = (x.to(dtype).repeat_interleave(group_size, dim=1) for x in (key, value))
    scores = query.to(dtype) @ key.mT * checked_scale(scale, query.size(-1))
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    i, j = torch.arange(query.size(2), device=scores.device)[:, None], torch.arange(key.size(2), device=scores.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(dtype)[..., None, None] * (i - j).abs()
    if attn_bias is not None:
        scores = scores + attn_bias.to(dtype)
    allowed = _allowed(i, j, is_causal, window_size, documents, masks.key_lengths)
    if mask_mod is not None:
        rows, heads = (torch.arange(size, device=scores.device) for size in scores.shape[:2])
        allowed = allowed & evaluate_mask_mod(mask_mod, rows, heads + head_offset, i[:, 0], j)
    scores = scores.masked_fill(~allowed, float("-inf"))
    columns = scores if sinks is None else _with_sinks(scores, sinks)
    lse = columns.logsumexp(-1)
    # A query that sees nothing has NaN weights, and NaN gradients behind them.
    is_seeing = allowed.any(-1, keepdim=True) if sinks is None else torch.ones_like(allowed[..., :1])
    columns = columns.masked_fill(~is_seeing, 0.0)
    weights = (columns.softmax(-1) * is_seeing)[..., : scores.size(-1)]
    if dropout is not None:
        weights = torch.where(_kept(weights, dropout), weights, 0.0) / (1 - dropout.p)
    out = (weights @ value).to(query.dtype)
    if qkv_format == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _allowed(
    i: Tensor, j: Tensor, is_causal: bool, window_size: tuple[int, int], documents: Documents | None,
    key_lengths: Tensor | None,
) -> Tensor:  # fmt: skip
    """Which pairs (query i, key j) may be seen, bool (B or 1, 1, S, S_kv)."""
    left, right = window_size
    allowed = torch.ones(1, 1, i.size(0), j.size(0), dtype=torch.bool, device=i.device)
    if is_causal:
        allowed = allowed & (j <= i)
    if left >= 0:
        allowed = allowed & (j >= i - left)
    if right >= 0:
        allowed = allowed & (j <= i + right)
    if documents is not None:
        ids = documents.ids.to(i.device).reshape(documents.num_rows, 1, -1)
        allowed = allowed & (ids[..., :, None] == ids[..., None, :]) & (ids >= 0)[..., None]
    if key_lengths is not None:
        allowed = allowed & (j < key_lengths.to(i.device)[:, None, None, None])
    return allowed


def _with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], dim=-1)


def _kept(weights: Tensor, dropout: CallDropout) -> Tensor:
    """Which of the weights (B, Hq, S, S_kv) stay."""
    _, heads, num_queries, num_keys = weights.shape
    global_heads = range(dropout.head_offset, dropout.head_offset + heads)
    mask = tile_dropout(dropout.p, dropout.keys, global_heads, torch.arange(num_keys, device=weights.device))
    return mask.keep(slice(0, num_queries), slice(0, num_keys))
