"""Dense attention over the whole sequence on one device: the oracle that everything else is compared with.

Shapes: query (B, Hq, S, D), key (B, Hkv, S_kv, D), value (B, Hkv, S_kv, Dv); natural token order, no layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtcp.attention.arguments import check_inputs, check_later_features, checked_scale


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
    qkv_format: str = "bhsd",
    return_lse: bool = False,
) -> Any:
    """Return softmax(query·keyᵀ·scale)·value, written out: S×S scores, differentiable any number of times.

    Computed in float32, or in float64 if the inputs are; so the oracle of a float32 call is this with
    ``query.double()`` and so on. Arguments are those of ``context_parallel_attention``.

    Returns:
        out (B, Hq, S, Dv) in the dtype of ``query``, or (out, lse) with lse (B, Hq, S), natural log.

    Raises:
        ValueError: If the inputs do not fit together.
        NotImplementedError: For masks that are not available yet.
    """
    check_later_features(
        window_size=window_size, documents=documents, key_lengths=key_lengths, mask_mod=mask_mod, sinks=sinks,
        attn_bias=attn_bias, alibi_slopes=alibi_slopes, softcap=softcap, dropout_p=dropout_p,
    )  # fmt: skip
    check_inputs(query, key, value, enable_gqa=enable_gqa, qkv_format=qkv_format)
    if qkv_format == "bshd":
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if is_causal and query.size(2) != key.size(2):
        raise ValueError(f"is_causal needs as many keys as queries, got {key.size(2)} and {query.size(2)}")
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    group_size = query.size(1) // key.size(1)
    key, value = (x.to(dtype).repeat_interleave(group_size, dim=1) for x in (key, value))
    scores = query.to(dtype) @ key.mT * checked_scale(scale, query.size(-1))
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    lse = scores.logsumexp(-1)
    out = (scores.softmax(-1) @ value).to(query.dtype)
    if qkv_format == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out
