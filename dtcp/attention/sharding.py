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

_CONSTANTS = [None] * 8  # group_name, is_causal, scale, strategy, kernel, dropout_p, head_offset, head_axis
_NUMBER = Replicate()
_BATCH, _HEADS = Shard(0), Shard(2)


def _options(key: Any, dropout_keys: Any) -> list[tuple[Any, Any]]:
    """(placement of a (B, S, H, D) tensor, that of lse (B, H, S)) on one mesh axis."""
    options: list[tuple[Any, Any]] = [(Replicate(), Replicate()), (_BATCH, Shard(0))]
    # A key head and its query heads have to stay together; and dropout has to know which heads it gets.
    if dropout_keys is None and all(key.shape[2] % size == 0 for size in key.mesh.shape):
        options.append((_HEADS, Shard(1)))
    return options


@register_sharding(torch.ops.dtcp.attention_forward.default)
def _(
    query: Any, key: Any, value: Any, q_state: Any, kv_state: Any, dropout_keys: Any, *constants: Any
) -> list[tuple[list, list]]:
    return [
        ([x, lse, _NUMBER], [x, x, x, *_states(x, dropout_keys), *_CONSTANTS, None])
        for x, lse in _options(key, dropout_keys)
    ]


@register_sharding(torch.ops.dtcp.attention_backward.default)
def _(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, number: Any, q_state: Any, kv_state: Any,
    dropout_keys: Any, *constants: Any,
) -> list[tuple[list, list]]:
    return [
        ([x, x, x], [x, x, x, x, x, lse, _NUMBER, *_states(x, dropout_keys), *_CONSTANTS])
        for x, lse in _options(key, dropout_keys)
    ]


def _states(x: Any, dropout_keys: Any) -> list[Any]:
    """Placements of both layouts and of the keys (B, S), which are cut as rows are."""
    return [Replicate(), Replicate(), None if dropout_keys is None else x]
