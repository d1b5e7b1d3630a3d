"""Attention written out, for any device and any float dtype. Shapes as in ``kernels/__init__``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dtcp.attention.dropout import TileDropout
from dtcp.attention.kernels.heads import upcast

# Scores of one block of queries, in elements, at most: 64 MiB in float32.
_BLOCK_ELEMENTS = 1 << 24
# On CPU, what stays in a cache, and skips more of what a causal tile masks: 2048 tokens take 180 ms instead of 614
# (4 heads, D 64, forward and backward, one thread); but no fewer queries than a matmul wants.
_CACHED_ELEMENTS = 1 << 20
_MIN_QUERIES = 64


class MathKernel:
    """Explicit softmax in float32 (float64 for float64), a block of queries at a time, so memory stays bounded.

    Args:
        dropout: What to drop of the weights; of one tile, so such a kernel is made for each.
    """

    name = "math"

    def __init__(self, dropout: TileDropout | None = None) -> None:
        self._dropout = dropout
        # A mask and the words that it is made of are as large as the scores.
        self._block_elements = _BLOCK_ELEMENTS if dropout is None else _BLOCK_ELEMENTS // 2

    def refusal(self, query: Tensor, head_dim: int) -> str | None:
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        query, key, value = upcast(query, key, value)
        out = query.new_empty(*query.shape[:3], value.size(-1))
        lse = query.new_empty(query.shape[:3])
        for start, stop, keys in _blocks(query, key, is_causal, self._block_elements):
            scores = _scores(query, key, start, stop, keys, is_causal, scale)
            lse[:, :, start:stop] = scores.logsumexp(-1).flatten(1, 2)
            # Not exp(scores − lse): where scores are large, the rounding of lse alone would be an error of 1e-4.
            weights = self._drop(scores.softmax(-1), self._keep(start, stop, keys))
            out[:, :, start:stop] = _by_kv_head(weights, value[:, :, :keys]).flatten(1, 2)
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_out, query, key, value, out = upcast(grad_out, query, key, value, out)
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        groups = (key.size(1), -1)
        delta = (grad_out * out).sum(-1)
        for start, stop, keys in _blocks(query, key, is_causal, self._block_elements):
            rows = (slice(None), slice(None), slice(start, stop))
            scores = _scores(query, key, start, stop, keys, is_causal, scale)
            weights = (scores - lse[rows].unflatten(1, groups).unsqueeze(-1)).exp()
            block_grad = grad_out[rows].unflatten(1, groups)
            keep = self._keep(start, stop, keys)
            grad_value[:, :, :keys] += _over_queries(self._drop(weights, keep), block_grad)
            # The sum over keys of weights · grad_weights is delta, with and without dropout.
            grad_weights = self._drop(_by_kv_head(block_grad, value[:, :, :keys].mT), keep)
            grad_scores = weights * (grad_weights - delta[rows].unflatten(1, groups).unsqueeze(-1)) * scale
            grad_query[rows] = _by_kv_head(grad_scores, key[:, :, :keys]).flatten(1, 2)
            grad_key[:, :, :keys] += _over_queries(grad_scores, query[rows].unflatten(1, groups))
        return grad_query, grad_key, grad_value

    def _keep(self, start: int, stop: int, num_keys: int) -> Tensor | None:
        return None if self._dropout is None else self._dropout.keep(start, stop, num_keys)

    def _drop(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        return weights if self._dropout is None or keep is None else self._dropout.drop(weights, keep)


def _blocks(query: Tensor, key: Tensor, is_causal: bool, block_elements: int) -> Iterator[tuple[int, int, int]]:
    """(first query, last query + 1, keys that they see) of each block."""
    num_queries, num_keys = query.size(2), key.size(2)
    row = query.size(0) * query.size(1) * num_keys
    block = block_elements // row
    if query.device.type == "cpu":
        block = min(block, max(_MIN_QUERIES, _CACHED_ELEMENTS // row))
    block = max(1, block)
    for start in range(0, num_queries, block):
        stop = min(start + block, num_queries)
        yield start, stop, stop if is_causal else num_keys


def _scores(query: Tensor, key: Tensor, start: int, stop: int, keys: int, is_causal: bool, scale: float) -> Tensor:
    """(B, Hkv, Hq/Hkv, stop−start, keys), −inf where the mask is."""
    block = query[:, :, start:stop].unflatten(1, (key.size(1), -1))
    scores = _by_kv_head(block, key[:, :, :keys].mT).mul_(scale)
    if is_causal:
        later = torch.arange(keys, device=key.device) > torch.arange(start, stop, device=key.device).unsqueeze(-1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def _by_kv_head(x: Tensor, y: Tensor) -> Tensor:
    """(B, Hkv, G, n, m) @ (B, Hkv, m, k) → (B, Hkv, G, n, k), as one matmul for each key head."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _over_queries(x: Tensor, y: Tensor) -> Tensor:
    """(B, Hkv, G, n, k)ᵀ @ (B, Hkv, G, n, m), summed over the G heads of a group → (B, Hkv, k, m)."""
    return x.flatten(2, 3).mT @ y.flatten(2, 3)
