"""Attention written out, for any device and any float dtype. Shapes as in ``kernels/__init__``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dtcp.attention.blocks import Block, cut_blocks
from dtcp.attention.dropout import TileDropout
from dtcp.attention.kernels.heads import upcast
from dtcp.attention.scores import TileScores


class MathKernel:
    """Explicit softmax in float32 (float64 for float64), a block of queries at a time, so memory stays bounded.

    The only kernel that knows soft caps, gradients of biases, and dropout whose mask is the same on any mesh.

    Args:
        dropout: What to drop of the weights; of one tile, so such a kernel is made for each.
    """

    name = "math"
    takes_masks = True

    def __init__(self, dropout: TileDropout | None = None) -> None:
        self._dropout = dropout

    @property
    def for_one_tile(self) -> MathKernel:
        return self

    def refusal(self, query: Tensor, head_dim: int) -> str | None:
        return None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float,
        scores: TileScores | None = None,
    ) -> tuple[Tensor, Tensor]:
        query, key, value = upcast(query, key, value)
        out = query.new_zeros(*query.shape[:3], value.size(-1))
        lse = query.new_full(query.shape[:3], float("-inf"))
        for block in self._blocks(query, key, is_causal, scores):
            logits, _ = _scores(query, key, block, is_causal, scale, scores)
            block_lse = logits.logsumexp(-1)
            lse[:, :, block.queries] = block_lse.flatten(1, 2)
            # Not exp(scores − lse): where scores are large, the rounding of lse alone would be an error of 1e-4.
            weights = logits.softmax(-1)
            if scores is not None:  # the softmax of a query that sees none of these keys is NaN
                weights.masked_fill_((block_lse == float("-inf")).unsqueeze(-1), 0)
            weights = self._drop(weights, self._keep(block))
            out[:, :, block.queries] = _by_kv_head(weights, value[:, :, block.keys]).flatten(1, 2)
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
        scores: TileScores | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_out, query, key, value, out = upcast(grad_out, query, key, value, out)
        grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        groups = (key.size(1), -1)
        delta = (grad_out * out).sum(-1)
        for block in self._blocks(query, key, is_causal, scores):
            rows = (slice(None), slice(None), block.queries)
            logits, slope = _scores(query, key, block, is_causal, scale, scores)
            weights = (logits - lse[rows].unflatten(1, groups).unsqueeze(-1)).exp()
            block_grad = grad_out[rows].unflatten(1, groups)
            keep = self._keep(block)
            grad_value[:, :, block.keys] += _over_queries(self._drop(weights, keep), block_grad)
            # The sum over keys of weights · grad_weights is delta, with and without dropout.
            grad_weights = self._drop(_by_kv_head(block_grad, value[:, :, block.keys].mT), keep)
            grad_scores = weights * (grad_weights - delta[rows].unflatten(1, groups).unsqueeze(-1))
            if scores is not None:
                scores.add_gradient(block, grad_scores.flatten(1, 2))
            grad_scores = grad_scores * scale if slope is None else grad_scores * slope * scale
            grad_query[rows] = _by_kv_head(grad_scores, key[:, :, block.keys]).flatten(1, 2)
            grad_key[:, :, block.keys] += _over_queries(grad_scores, query[rows].unflatten(1, groups))
        return grad_query, grad_key, grad_value

    def _blocks(self, query: Tensor, key: Tensor, is_causal: bool, scores: TileScores | None) -> Iterator[Block]:
        on_cpu = query.device.type == "cpu"
        if scores is not None:
            return scores.blocks(holds_scores=True, on_cpu=on_cpu)
        num_keys = key.size(2)
        # A dropout mask and the words that it is made of are as large as the scores.
        copies = query.size(0) * query.size(1) * (1 if self._dropout is None else 2)
        return cut_blocks(
            query.size(2), num_keys, copies, lambda _, stop: (0, stop if is_causal else num_keys), on_cpu=on_cpu
        )

    def _keep(self, block: Block) -> Tensor | None:
        return None if self._dropout is None else self._dropout.keep(block.queries, block.keys)

    def _drop(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        return weights if self._dropout is None or keep is None else self._dropout.drop(weights, keep)


def _scores(
    query: Tensor, key: Tensor, block: Block, is_causal: bool, scale: float, scores: TileScores | None
) -> tuple[Tensor, Tensor | None]:
    """(B, Hkv, Hq/Hkv, queries, keys), −inf where the mask is; and the slope of the soft cap, if there is one."""
    own = query[:, :, block.queries].unflatten(1, (key.size(1), -1))
    logits = _by_kv_head(own, key[:, :, block.keys].mT).mul_(scale)
    if is_causal:
        keys = torch.arange(block.kv_start, block.kv_stop, device=key.device)
        later = keys > torch.arange(block.q_start, block.q_stop, device=key.device).unsqueeze(-1)
        logits.masked_fill_(later, float("-inf"))
    if scores is None:
        return logits, None
    slope = None
    if scores.softcap:
        bent = (logits / scores.softcap).tanh()
        slope = 1 - bent.square()
        logits = bent.mul_(scores.softcap)
    additive = scores.additive(block, logits.dtype, logits.device)
    if additive is not None:
        whole = additive.expand(additive.size(0), query.size(1) if additive.size(1) > 1 else 1, -1, -1)
        logits = logits + (whole.unflatten(1, (key.size(1), -1)) if whole.size(1) > 1 else whole.unsqueeze(1))
    return logits, slope


def _by_kv_head(x: Tensor, y: Tensor) -> Tensor:
    """(B, Hkv, G, n, m) @ (B, Hkv, m, k) → (B, Hkv, G, n, k), as one matmul for each key head."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _over_queries(x: Tensor, y: Tensor) -> Tensor:
    """(B, Hkv, G, n, k)ᵀ @ (B, Hkv, G, n, m), summed over the G heads of a group → (B, Hkv, k, m)."""
    return x.flatten(2, 3).mT @ y.flatten(2, 3)
