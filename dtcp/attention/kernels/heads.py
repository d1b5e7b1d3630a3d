"""Dtypes, head dims and head groups, for kernels that want them otherwise. Shapes as in ``kernels/__init__``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def upcast(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in float32; float64 stays."""
    return [t if t.dtype == torch.float64 else t.float() for t in tensors]


def pad_head_dim(*tensors: Tensor, multiple: int = 1) -> list[Tensor]:
    """Return the tensors with the last dim zero-padded to the largest one, rounded up to ``multiple``.

    Exact: zero columns add nothing to a score, and the columns they make in out or in a gradient are cut off.
    """
    width = max(t.size(-1) for t in tensors)
    width = -(-width // multiple) * multiple
    return [t if t.size(-1) == width else F.pad(t, (0, width - t.size(-1))) for t in tensors]


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return ``x`` (B, Hkv, S, D) with each head repeated to ``num_heads``."""
    return x if x.size(1) == num_heads else x.repeat_interleave(num_heads // x.size(1), dim=1)


def sum_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return the gradient of ``repeat_heads``: (B, Hq, S, D) summed over each group to ``num_heads``."""
    return x if x.size(1) == num_heads else x.unflatten(1, (num_heads, -1)).sum(2)
