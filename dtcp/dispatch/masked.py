"""Stands in until attention on one rank takes masks: attention under a window and with sinks, S×S scores.

Shapes: query (B, H, S, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv), sinks (H,).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtcp.attention.dropout import tile_dropout
from dtcp.dispatch.dropped import dropped_attention
from dtcp.dispatch.frames import current


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    sinks: Tensor | None = None,
    p: float = 0.0,
    keys: Tensor | None = None,
    head_offset: int = 0,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention over the keys that the mask allows and a sink, (B, H, S, Dv)."""
    if keys is not None and window_size == (-1, -1) and sinks is None:
        return dropped_attention(
            query, key, value, p=p, keys=keys, head_offset=head_offset, is_causal=is_causal, enable_gqa=enable_gqa
        )
    if current.frame is not None:
        raise NotImplementedError(
            f"attention with window_size={window_size}{'' if sinks is None else ' and sinks'} is not available inside "
            "context_parallel yet; use the plan, dtcp.ContextParallel"
        )
    dtype = torch.promote_types(query.dtype, torch.float32)
    group_size = query.size(1) // key.size(1) if enable_gqa else 1
    key, value = (x.to(dtype).repeat_interleave(group_size, dim=1) for x in (key, value))
    scores = query.to(dtype) @ key.mT / query.size(-1) ** 0.5
    queries, key_places = (torch.arange(x.size(2), device=query.device) for x in (query, key))
    ahead = key_places[None] - queries[:, None]
    left, right = window_size
    if is_causal:
        scores = scores.masked_fill(ahead > 0, float("-inf"))
    if left >= 0:
        scores = scores.masked_fill(ahead < -left, float("-inf"))
    if right >= 0:
        scores = scores.masked_fill(ahead > right, float("-inf"))
    if sinks is not None:
        column = sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : key.size(2)]
    if keys is not None and p > 0:
        heads = range(head_offset, head_offset + query.size(1))
        mask = tile_dropout(p, keys, heads, torch.arange(key.size(2), device=query.device))
        weights = torch.where(mask.keep(0, query.size(2), key.size(2)), weights, 0.0) / (1 - p)
    return (weights @ value).to(query.dtype)
