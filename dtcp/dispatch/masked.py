"""Attention with windows, sinks, soft caps and dropout by given keys: for models, which do not know how they are cut.

Shapes: query (B, Hq, S, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv); S is S_local inside ``context_parallel``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from dtcp.attention.dropout import CallDropout
from dtcp.attention.masks import checked_masks
from dtcp.attention.scores import CallMasks
from dtcp.attention.single import single_rank_attention
from dtcp.dispatch.attend import attend_with
from dtcp.dispatch.frames import current
from dtcp.mask import NO_WINDOW


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    p: float = 0.0,
    keys: Tensor | None = None,
    head_offset: int = 0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention over the whole sequence inside ``context_parallel``, elsewhere over what is here.

    Args:
        window_size, sinks, softcap: As in ``context_parallel_attention``; what a context says comes on top.
        p: Probability of dropping a weight, below 1: the same ones on any mesh.
        keys: int64 (B, S), of this call alone: `AttentionDropout.call_keys`. None drops nothing.
        head_offset: Global index of the first query head here.

    Raises:
        ValueError: If the inputs do not fit together, or a context says the same as an argument.
    """
    own = checked_masks(
        is_causal=is_causal, window_size=window_size, sinks=sinks, softcap=softcap, head_offset=head_offset
    )
    dropout = None if keys is None or p == 0 else CallDropout(p, keys, head_offset)
    frame = current.frame
    if frame is None:
        return single_rank_attention(
            query, key, value, dropout, own, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    settings = dataclasses.replace(frame, masks=together(own, frame.masks))
    out, _ = attend_with(settings, dropout, query, key, value, None, is_causal, scale, enable_gqa)
    return out


def together(own: CallMasks, around: CallMasks) -> CallMasks:
    """Return the masks of a call inside a context, or raise ValueError where both say something of one kind."""
    given = {}
    for name, mine in own._asdict().items():
        theirs = getattr(around, name)
        if name not in ("head_offset", "head_axis") and _is_given(mine) and _is_given(theirs):
            raise ValueError(f"{name} is given by the module that attends and by the context around it; leave one out")
        given[name] = mine if _is_given(mine) else theirs
    return CallMasks(**given)


def _is_given(x: Any) -> bool:
    return isinstance(x, Tensor) or x not in (None, 0.0, NO_WINDOW, "")
