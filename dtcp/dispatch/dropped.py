"""Attention that drops weights by given keys: for models, which then do not know how they are cut.

Shapes: query (B, Hq, S, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv); S is S_local inside ``context_parallel``.
"""

from __future__ import annotations

from torch import Tensor

from dtcp.attention.dropout import CallDropout
from dtcp.attention.single import single_rank_attention
from dtcp.dispatch.attend import attend_with
from dtcp.dispatch.frames import current


def dropped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    p: float,
    keys: Tensor,
    head_offset: int = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention in which weights are dropped with probability ``p``: the same ones on any mesh.

    Inside ``context_parallel``, over the whole sequence, elsewhere over what is here.

    Args:
        p: Above 0 and below 1.
        keys: int64 (B, S), of this call alone: `AttentionDropout.call_keys`.
        head_offset: Global index of the first query head here.

    Raises:
        ValueError: If the inputs do not fit together.
    """
    dropout, frame = CallDropout(p, keys, head_offset), current.frame
    if frame is not None:
        return attend_with(frame, dropout, query, key, value, None, is_causal, scale, enable_gqa)
    return single_rank_attention(query, key, value, dropout, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
