"""Attention of the reference, written out with dense masks of its own: nothing here is of the library's attention.

Every call ends in ``F.scaled_dot_product_attention``, where the doctor counts and changes calls.

Shapes: B rows, H query heads, S = seq_len, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dtcp.attention.dropout import tile_dropout
from dtcp.models.attention import ScaledDotProductAttention


def attend_densely(model: nn.Module, *, has_documents: bool) -> None:
    """Have the modules of ``model`` that attend do so by `dense_attention`."""
    for module in model.modules():
        if isinstance(module, ScaledDotProductAttention) and type(module).forward is ScaledDotProductAttention.forward:
            attend = functools.partial(dense_attention, module, has_documents=has_documents)
            module.forward = attend  # type: ignore[method-assign]


def dense_attention(
    module: ScaledDotProductAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_keys: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    has_documents: bool = False,
) -> Tensor:
    """What ``module`` computes: (B, H, S, D), from (B, H, S, D) and keys and values of as many heads or fewer."""
    num_queries, num_keys = query.size(2), key.size(2)
    keys = module.call_keys(dropout_keys, query.transpose(1, 2))
    if sinks is None and module.window_size == (-1, -1) and not (has_documents and keys is not None):
        return ScaledDotProductAttention.forward(module, query, key, value, dropout_keys)
    mask = _allowed(module, num_queries, query.device)
    if sinks is not None:
        # A key of zeros has score 0: the sink is what is added to it. Its value is zero.
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
        column = sinks.to(query.dtype)[:, None, None].expand(-1, num_queries, 1)
        mask = torch.cat([bias.expand(len(sinks), -1, -1), column], dim=-1)[None]
    enable_gqa = query.size(1) != key.size(1)
    if keys is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=enable_gqa)
    # With the unit matrix for values attention gives its weights.
    unit = torch.eye(key.size(2), num_keys, dtype=query.dtype, device=query.device)
    weights = F.scaled_dot_product_attention(
        query, key, unit.expand(*key.shape[:2], -1, -1), attn_mask=mask, enable_gqa=enable_gqa
    )
    places = torch.arange(num_keys, device=query.device)
    kept = tile_dropout(module.p, keys, range(query.size(1)), places).keep(slice(num_queries), slice(num_keys))
    value = value[:, :, :num_keys].repeat_interleave(query.size(1) // value.size(1), dim=1)
    return torch.where(kept, weights, 0.0) / (1 - module.p) @ value


def _allowed(module: ScaledDotProductAttention, seq_len: int, device: torch.device) -> Tensor:
    """Which keys each query sees, bool (S, S)."""
    left, right = module.window_size
    ahead = torch.arange(seq_len, device=device)[None] - torch.arange(seq_len, device=device)[:, None]
    allowed = ahead <= 0 if module.is_causal else torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        allowed = allowed & (ahead >= -left)
    return allowed & (ahead <= right) if right >= 0 else allowed


class Within(TorchFunctionMode):
    """Confines ``F.scaled_dot_product_attention`` to tokens of one part.

    Args:
        parts: Which part each token is in, (B, S) or (1, S).
    """

    def __init__(self, parts: Tensor) -> None:
        super().__init__()
        self.parts = parts

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs = confined(self.parts, args[1].size(-2), kwargs)
        return func(*args, **kwargs)


def confined(parts: Tensor, num_keys: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the ``options`` of a call of ``F.scaled_dot_product_attention`` in which parts do not see each other.

    Args:
        parts: (B, S) or (1, S), bool or integer.
        num_keys: Of the call: S, or one more for a sink, which all see.
    """
    allowed = (parts[:, :, None] == parts[:, None])[:, None]
    if options.pop("is_causal", False):
        allowed = allowed.tril()
    allowed = F.pad(allowed, (0, num_keys - allowed.size(-1)), value=True)
    given = options.get("attn_mask")
    if given is None:
        return {**options, "attn_mask": allowed}
    is_bool = given.dtype == torch.bool
    return {**options, "attn_mask": given & allowed if is_bool else given.masked_fill(~allowed, float("-inf"))}
