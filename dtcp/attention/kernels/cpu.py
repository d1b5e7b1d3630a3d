"""Torch's fused CPU kernel. Shapes as in ``kernels/__init__``."""

from __future__ import annotations

import torch
from torch import Tensor

from dtcp.attention.kernels.heads import pad_head_dim, upcast

_aten = torch.ops.aten


class CpuFlashKernel:
    """``aten._scaled_dot_product_flash_attention_for_cpu``: float32, float64, bfloat16, float16.

    It takes Hkv < Hq as it is, and strided inputs. It kills the process (SIGFPE) on 0 queries or 0 keys and
    gives lse 0 to rows that see no key: tiles have neither. Head dims that differ are zero-padded.

    Half precision is computed in float32: the kernel would round each tile's result to half, and with two tiles
    in a row that alone is an error of 1.2 to 1.4 times that of one call (measured; the forward takes the same
    time, the backward 1.4 times as long).
    """

    name = "flash"

    def refusal(self, query: Tensor, head_dim: int) -> str | None:
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        query, key, padded_value = pad_head_dim(*upcast(query, key, value))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, padded_value, 0.0, is_causal, scale=scale
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim, value_dim = query.size(-1), value.size(-1)
        grad_out, query, key, value, out = pad_head_dim(*upcast(grad_out, query, key, value, out))
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, is_causal, scale=scale
        )
        return grads[0][..., :head_dim], grads[1][..., :head_dim], grads[2][..., :value_dim]
