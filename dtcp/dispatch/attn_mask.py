"""The ``attn_mask`` of ``scaled_dot_product_attention`` where the sequence is cut.

Shapes: (…, Q, S), broadcastable to (B, Hq, Q, S): S are all keys in natural order, Q the queries of this rank in layout
order, or those of the whole sequence in natural order.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from dtcp.attention.scores import CallMasks
from dtcp.collectives import resolve_group
from dtcp.layout import SequenceLayout, layout_from_state
from dtcp.shard_ops import shard_op

QUERIES = ("local", "global")


class Where(Protocol):
    """What says how the sequence is cut, and which queries masks are of."""

    @property
    def group_name(self) -> str: ...
    @property
    def state(self) -> Tensor: ...
    @property
    def attn_mask_queries(self) -> str: ...


def with_attn_mask(masks: CallMasks, attn_mask: Tensor, where: Where, query: Tensor) -> CallMasks:
    """Return ``masks`` with this rank's part of ``attn_mask`` as a bias; query is (B, S_local, Hq, D).

    Raises:
        NotImplementedError: If nobody said which queries the mask is of.
        ValueError: If its shape or dtype does not fit, or masks have a bias already.
    """
    if not where.attn_mask_queries:
        raise NotImplementedError(
            f"attn_mask of shape {tuple(attn_mask.shape)} where the sequence is cut: is it of this rank's queries or "
            "of all? Give all keys of the sequence in natural order, and say context_parallel(..., "
            "attn_mask_queries='local') for this rank's queries in layout order, or 'global' for those of the whole "
            "sequence; a mask over this rank's keys alone cannot say what is seen of other ranks"
        )
    if masks.attn_bias is not None:
        raise ValueError("attn_mask beside an attn_bias; add them into one")
    if attn_mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, zero, -math.inf)
    if not 2 <= attn_mask.ndim <= 4:
        raise ValueError(f"attn_mask must have 2 to 4 dims, (…, queries, keys), got shape {tuple(attn_mask.shape)}")
    bias = attn_mask[(None,) * (4 - attn_mask.ndim)]
    group, local = resolve_group(where.group_name), query.size(1)
    if bias.size(2) == 1:
        bias = bias.expand(-1, -1, local, -1)
    elif where.attn_mask_queries == "global" and group.size() > 1:
        if not torch.compiler.is_compiling():  # while a graph is made, layouts have no data
            _check_global(attn_mask, layout_from_state(where.state))
        bias = shard_op(bias, where.state, local, group.rank(), 2, 0)
    return masks._replace(attn_bias=bias)


def _check_global(attn_mask: Tensor, layout: SequenceLayout) -> None:
    if attn_mask.size(-2) != layout.seq_len:
        raise ValueError(
            f"attn_mask of shape {tuple(attn_mask.shape)} was declared to be of all queries by all keys, but the "
            f"sequence has {layout.seq_len} tokens; give (…, {layout.seq_len}, {layout.seq_len}), or say "
            "attn_mask_queries='local'"
        )
    if layout.num_rows > 1:
        raise NotImplementedError(
            "attn_mask of all queries where each row has an order of its own (per_document with documents that differ "
            "by row); give mask_mod= to context_parallel, or this rank's queries with attn_mask_queries='local'"
        )
