"""Torch's fused CPU kernel. Shapes as in ``kernels/__init__``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dtcp.attention.blocks import Block
from dtcp.attention.kernels.heads import pad_head_dim, upcast
from dtcp.attention.scores import TileScores

_aten = torch.ops.aten


class CpuFlashKernel:
    """``aten._scaled_dot_product_flash_attention_for_cpu``: float32, float64, bfloat16, float16.

    It takes Hkv < Hq as it is, strided inputs, and a float mask. It kills the process (SIGFPE) on 0 queries or 0 keys:
    tiles have some. Head dims that differ are zero-padded.

    Half precision is computed in float32: the kernel would round each tile's result to half, and with two tiles
    in a row that alone is an error of 1.2 to 1.4 times that of one call (measured; the forward takes the same
    time, the backward 1.4 times as long).

    Args:
        upcasts: False for a call whose result is that of one tile, which is rounded once in any case.
    """

    name = "flash"
    takes_masks = True

    def __init__(self, *, upcasts: bool = True) -> None:
        self._upcasts = upcasts

    @property
    def for_one_tile(self) -> CpuFlashKernel:
        return CpuFlashKernel(upcasts=False)

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
        value_dim, (query, key, value) = value.size(-1), pad_head_dim(*self._cast(scores, query, key, value))
        if scores is None:
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, scale=scale
            )
            return out[..., :value_dim], lse
        out = query.new_zeros(*query.shape[:3], value.size(-1))
        lse = query.new_full(query.shape[:3], float("-inf"))
        for block, mask in _masked_blocks(query, scores):
            rows, keys = (slice(None), slice(None), block.queries), (slice(None), slice(None), block.keys)
            out[rows], block_lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                query[rows], key[keys], value[keys], 0.0, False, attn_mask=mask, scale=scale
            )
            lse[rows] = block_lse if mask is None else _unseen_to_nothing(block_lse, mask)
        return out[..., :value_dim], lse

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
        head_dim, value_dim = query.size(-1), value.size(-1)
        grad_out, query, key, value, out = pad_head_dim(*self._cast(scores, grad_out, query, key, value, out))
        if scores is None:
            grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, query, key, value, out, lse, 0.0, is_causal, scale=scale
            )
        else:
            grads = tuple(torch.zeros_like(x) for x in (query, key, value))
            for block, mask in _masked_blocks(query, scores):
                rows, keys = (slice(None), slice(None), block.queries), (slice(None), slice(None), block.keys)
                parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad_out[rows], query[rows], key[keys], value[keys], out[rows], lse[rows], 0.0, False,
                    attn_mask=mask, scale=scale,
                )  # fmt: skip
                for grad, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
                    grad[where] += part
        return grads[0][..., :head_dim], grads[1][..., :head_dim], grads[2][..., :value_dim]

    def _cast(self, scores: TileScores | None, *tensors: Tensor) -> list[Tensor]:
        # Blocks of one tile are added up too, and biases would be rounded.
        return upcast(*tensors) if self._upcasts or scores is not None else list(tensors)


def _masked_blocks(query: Tensor, scores: TileScores) -> Iterator[tuple[Block, Tensor | None]]:
    """(block, what is added to its scores) of those in which some query sees some key, from the first to the last."""
    for block in scores.blocks(holds_scores=False, on_cpu=True):
        mask = scores.additive(block, query.dtype, query.device)
        if mask is None:
            yield block, None
            continue
        # A mask_mod may leave out keys at the ends, like those after a query: they need no computing.
        seen = (mask > float("-inf")).flatten(0, 2).any(0).nonzero()
        if len(seen):
            first, last = int(seen[0]), int(seen[-1])
            start = block.kv_start
            yield Block(block.q_start, block.q_stop, start + first, start + last + 1), mask[..., first : last + 1]


def _unseen_to_nothing(lse: Tensor, mask: Tensor) -> Tensor:
    """The kernel gives out 0 and lse 0 to a query that sees none of the keys: nothing seen is −inf."""
    return torch.where((mask > float("-inf")).any(-1), lse, float("-inf"))
