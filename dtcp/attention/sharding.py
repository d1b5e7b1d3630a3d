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

_CONSTANTS = [None] * 5  # group_name, is_causal, scale, strategy, kernel
_NUMBER = Replicate()
_BATCH, _HEADS = Shard(0), Shard(2)


def _options(key: Any) -> list[tuple[Any, Any]]:
    """(placement of a (B, S, H, D) tensor, that of lse (B, H, S)) on one mesh axis."""
    options: list[tuple[Any, Any]] = [(Replicate(), Replicate()), (_BATCH, Shard(0))]
    # A key head and its query heads have to stay together.
    if all(key.shape[2] % size == 0 for size in key.mesh.shape):
        options.append((_HEADS, Shard(1)))
    return options


@register_sharding(torch.ops.dtcp.attention_forward.default)
def _(query: Any, key: Any, value: Any, q_state: Any, kv_state: Any, *constants: Any) -> list[tuple[list, list]]:
    states = [Replicate(), Replicate()]
    return [([x, lse, _NUMBER], [x, x, x, *states, *_CONSTANTS, None]) for x, lse in _options(key)]


@register_sharding(torch.ops.dtcp.attention_backward.default)
def _(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, number: Any, q_state: Any, kv_state: Any,
    *constants: Any,
) -> list[tuple[list, list]]:
    states = [Replicate(), Replicate()]
    return [([x, x, x], [x, x, x, x, x, lse, _NUMBER, *states, *_CONSTANTS]) for x, lse in _options(key)]
