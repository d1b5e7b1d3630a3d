"""How DTensor may place the arguments of the attention ops: cut over batch rows or over heads, or not at all.

The sequence is cut over the op's own group, which is none of a DTensor's business: a placement that cuts dim 1
is gathered first. Importing this module registers the rules; it loads ``torch.distributed.tensor``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import dtcp.attention.ops  # noqa: F401  # defines the ops

_NUM_MASKS = 6  # documents, key_lengths, mask_mod, sinks, attn_bias, alibi_slopes
_CONSTANTS = [None] * 14  # group_name … head_axis
_DEGREE = 7  # place of ulysses_degree among them
_NUMBER = Replicate()
_BATCH, _HEADS = Shard(0), Shard(2)


def _options(key: Any, masks: tuple[Any, ...], dropout_keys: Any, degree: int) -> list[tuple[Any, Any]]:
    """(placement of a (B, S, H, D) tensor, that of lse (B, H, S)) on one mesh axis."""
    options: list[tuple[Any, Any]] = [(Replicate(), Replicate())]
    if any(x is not None for x in masks):  # which rows and heads they are of, nothing says here
        return options
    options.append((_BATCH, Shard(0)))
    # A key head and its query heads have to stay together; and dropout has to know which heads it gets.
    # And what is kept of heads that a strategy cuts once more has the size of the rank with most of them.
    if dropout_keys is None and degree == 1 and all(key.shape[2] % size == 0 for size in key.mesh.shape):
        options.append((_HEADS, Shard(1)))
    return options


@register_sharding(torch.ops.dtcp.attention_forward.default)
def _(query: Any, key: Any, value: Any, q_state: Any, kv_state: Any, *more: Any) -> list[tuple[list, list]]:
    masks, dropout_keys = more[:_NUM_MASKS], more[_NUM_MASKS]
    degree = more[_NUM_MASKS + 1 + _DEGREE]
    # What is kept for the backward is empty, or cut over rows at most.
    kept = [Replicate() if degree == 1 else None] * 5
    return [
        (
            [x, lse if degree == 1 or more[-2] else Replicate(), _NUMBER, *(placement or x for placement in kept)],
            [x, x, x, *_states(x, masks, dropout_keys), *_CONSTANTS, None, None],
        )
        for x, lse in _options(key, masks, dropout_keys, degree)
    ]


@register_sharding(torch.ops.dtcp.attention_backward.default)
def _(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, number: Any, q_state: Any, kv_state: Any,
    *more: Any,
) -> list[tuple[list, list]]:  # fmt: skip
    masks, dropout_keys = more[:_NUM_MASKS], more[_NUM_MASKS]
    degree = more[_NUM_MASKS + 1 + _DEGREE]
    return [
        (
            [x, x, x, *[Replicate()] * 3],
            [x, x, x, x, x, lse, _NUMBER, *_states(x, masks, dropout_keys), *_CONSTANTS, *[None] * 3],
        )
        for x, lse in _options(key, masks, dropout_keys, degree)
    ]


def _states(x: Any, masks: tuple[Any, ...], dropout_keys: Any) -> list[Any]:
    """Placements of both layouts, of the masks, and of the keys (B, S), which are cut as rows are."""
    of_masks = [None if mask is None else Replicate() for mask in masks]
    return [Replicate(), Replicate(), *of_masks, None if dropout_keys is None else x]
