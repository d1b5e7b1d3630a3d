"""Torch's fused CUDA kernels behind one contract. Shapes as in ``kernels/__init__``.

Each differs in what it returns and wants back: lse is (B, H, S) for flash, (B, H, S rounded up to 32) for
memory-efficient, (B, H, S, 1) for cuDNN; only flash shares a key head among query heads by itself. All that is
evened out here and nowhere else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dtcp.attention.kernels.heads import pad_head_dim, repeat_heads, sum_heads

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_HEAD_DIM_MULTIPLE = 8  # 16-byte loads of half precision
_EFFICIENT_LSE_MULTIPLE = 32


def _half_refusal(query: Tensor, head_dim: int, max_head_dim: int, min_capability: tuple[int, int]) -> str | None:
    if query.dtype not in _HALF:
        return f"it takes float16 and bfloat16, got {query.dtype}"
    if head_dim > max_head_dim:
        return f"it takes head dims up to {max_head_dim}, got {head_dim}"
    capability = torch.cuda.get_device_capability(query.device)
    if capability < min_capability:
        return f"it needs compute capability {min_capability}, this device has {capability}"
    return None


class FlashKernel:
    """FlashAttention-2: half precision, head dim up to 256, Hkv < Hq as it is."""

    name = "flash"
    takes_masks = False

    @property
    def for_one_tile(self) -> FlashKernel:
        return self

    def refusal(self, query: Tensor, head_dim: int) -> str | None:
        return _half_refusal(query, head_dim, 256, (8, 0))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, scores: None = None
    ) -> tuple[Tensor, Tensor]:
        query, key, padded_value = pad_head_dim(query, key, value, multiple=_HEAD_DIM_MULTIPLE)
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, padded_value, 0.0, is_causal, False, scale=scale
        )
        return out[..., : value.size(-1)], lse

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
        scores: None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim, value_dim = query.size(-1), value.size(-1)
        grad_out, query, key, value, out = pad_head_dim(grad_out, query, key, value, out, multiple=_HEAD_DIM_MULTIPLE)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, query, key, value, out, lse.contiguous(), None, None, query.size(2), key.size(2),
            0.0, is_causal, no_dropout, no_dropout, scale=scale,
        )  # fmt: skip
        return grads[0][..., :head_dim], grads[1][..., :head_dim], grads[2][..., :value_dim]


class EfficientKernel:
    """Memory-efficient attention: float32 and half precision."""

    name = "efficient"
    takes_masks = False

    @property
    def for_one_tile(self) -> EfficientKernel:
        return self

    def refusal(self, query: Tensor, head_dim: int) -> str | None:
        if query.dtype not in (*_HALF, torch.float32):
            return f"it takes float32, float16 and bfloat16, got {query.dtype}"
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, scores: None = None
    ) -> tuple[Tensor, Tensor]:
        value_dim, (query, key, value) = value.size(-1), _even(query, key, value)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, is_causal, scale=scale
        )
        return out[..., :value_dim], lse[..., : query.size(2)]

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
        scores: None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = query.size(-1), value.size(-1), key.size(1)
        query, key, value = _even(query, key, value)
        grad_out, out, _ = pad_head_dim(grad_out, out, value)
        padded_lse = F.pad(lse, (0, -lse.size(-1) % _EFFICIENT_LSE_MULTIPLE)).contiguous()
        no_dropout = torch.zeros((), dtype=torch.int64, device=query.device)
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            grad_out, query, key, value, None, out, padded_lse, no_dropout, no_dropout,
            0.0, [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
        return _uneven(grads, *dims)


class CudnnKernel:
    """cuDNN attention: half precision, head dim up to 128."""

    name = "cudnn"
    takes_masks = False

    @property
    def for_one_tile(self) -> CudnnKernel:
        return self

    def refusal(self, query: Tensor, head_dim: int) -> str | None:
        return _half_refusal(query, head_dim, 128, (8, 0))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float, scores: None = None
    ) -> tuple[Tensor, Tensor]:
        value_dim, (query, key, value) = value.size(-1), _even(query, key, value)
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )
        return out[..., :value_dim], lse.squeeze(-1)

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
        scores: None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = query.size(-1), value.size(-1), key.size(1)
        query, key, value = _even(query, key, value)
        grad_out, out, _ = pad_head_dim(grad_out, out, value)
        no_dropout = torch.zeros((), dtype=torch.int64, device=query.device)
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            grad_out.contiguous(), query, key, value, out.contiguous(), lse.unsqueeze(-1).contiguous(),
            no_dropout, no_dropout, None, None, None, query.size(2), key.size(2), 0.0, is_causal, scale=scale,
        )  # fmt: skip
        return _uneven(grads, *dims)


def _even(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """One head dim, aligned, and as many key heads as query heads."""
    query, key, value = pad_head_dim(query, key, value, multiple=_HEAD_DIM_MULTIPLE)
    return [query, repeat_heads(key, query.size(1)), repeat_heads(value, query.size(1))]


def _uneven(
    grads: tuple[Tensor, ...], head_dim: int, value_dim: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Undo ``_even`` on the gradients."""
    grad_key, grad_value = sum_heads(grads[1], num_kv_heads), sum_heads(grads[2], num_kv_heads)
    return grads[0][..., :head_dim], grad_key[..., :head_dim], grad_value[..., :value_dim]
