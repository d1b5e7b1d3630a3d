"""Attention of one tile on one device, with its log-sum-exp, and the backward from the whole row's (out, lse).

Shapes: query (B, Hq, Sq, D), key (B, Hkv, Skv, D), value (B, Hkv, Skv, Dv), out (B, Hq, Sq, Dv), of any strides
but a contiguous last dim; lse (B, Hq, Sq), natural log, float32 (float64 for float64). Query head h reads key head
h·Hkv // Hq. A causal tile is square: query i sees keys 0..i. A tile has queries and keys; without ``scores`` every
query of it sees a key.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from dtcp.attention.kernels.cpu import CpuFlashKernel
from dtcp.attention.kernels.cuda import CudnnKernel, EfficientKernel, FlashKernel
from dtcp.attention.kernels.math import MathKernel

KERNEL_NAMES = ("auto", "flash", "efficient", "cudnn", "math")


class Kernel(Protocol):
    """What a strategy calls for each tile."""

    name: str
    takes_masks: bool  # whether it can be given ``scores``

    @property
    def for_one_tile(self) -> Kernel:
        """The kernel for calls whose whole result is that of one tile, and that nothing is merged with."""
        ...

    def refusal(self, query: Tensor, head_dim: int) -> str | None:
        """Why this kernel cannot run inputs like ``query`` with head dims up to ``head_dim``; None if it can."""
        ...

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float,
        scores: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (out, lse) over the keys of this tile; out in the dtype of the inputs or of lse.

        Args:
            scores: ``TileScores``, where more happens to them than a causal mask; (0, −inf) for what sees no key.
        """
        ...

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
        scores: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this tile's part of (grad_query, grad_key, grad_value).

        ``out`` and ``lse`` are those of the whole row, over all tiles: then the parts of all tiles add up to
        the exact gradients. A query that sees nothing at all comes with lse +inf, which makes its weights 0.
        """
        ...


_FUSED = ("flash", "efficient", "cudnn")
_MATH = MathKernel()
_BY_DEVICE: dict[str, tuple[Kernel, ...]] = {
    "cpu": (CpuFlashKernel(), _MATH),
    "cuda": (FlashKernel(), EfficientKernel(), CudnnKernel(), _MATH),
}


def choose_kernel(
    name: str,
    query: Tensor,
    head_dim: int,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    *,
    masked_by: str = "",
    only_math: str = "",
) -> Kernel:
    """Return the kernel ``name`` for inputs like ``query``; ``auto`` takes the first that can run them.

    Args:
        query: Anything with the dtype and device of the call.
        head_dim: The larger of D and Dv.
        scale: Of the scores. Torch's fused kernels give NaN under a causal mask unless it is positive.
        dropout_p: Fused kernels draw their masks, which would depend on the mesh: above 0 only ``math`` can run.
        masked_by: What asks for more than intervals of keys (``mask_mod``, say), which not every kernel takes.
        only_math: What no fused kernel can do (``softcap``, say).

    Raises:
        ValueError: If the name is unknown, or the kernel asked for cannot run these inputs. An explicit
            choice never falls back.
    """
    available = _BY_DEVICE.get(query.device.type, (_MATH,))
    if dropout_p:
        if name in _FUSED:
            raise ValueError(
                f"kernel={name!r} draws its dropout masks, which would depend on the mesh, got dropout_p={dropout_p}; "
                "use kernel='math' (or 'auto', which takes it), or dropout_p=0.0"
            )
        if name == "auto":
            return _MATH
    if only_math:
        if name in _FUSED:
            raise ValueError(f"kernel={name!r} does not know {only_math}; use kernel='math', or 'auto', which takes it")
        if name == "auto":
            return _MATH
    if masked_by:
        if name in _FUSED and any(kernel.name == name and not kernel.takes_masks for kernel in available):
            raise ValueError(
                f"kernel={name!r} on {query.device.type} takes no {masked_by}; use kernel='math' (or 'auto', which "
                "takes it)"
            )
        available = tuple(kernel for kernel in available if kernel.takes_masks)
    if not scale > 0:
        if name in _FUSED:
            raise ValueError(f"kernel={name!r} needs a positive scale, got {scale}; use kernel='auto' or 'math'")
        if name == "auto":
            return _MATH
    if name == "auto":
        return next(kernel for kernel in available if kernel.refusal(query, head_dim) is None)
    for kernel in available:
        if kernel.name == name:
            reason = kernel.refusal(query, head_dim)
            if reason is None:
                return kernel
            raise ValueError(f"kernel={name!r} cannot run this call: {reason}; use kernel='auto' or 'math'")
    if name not in KERNEL_NAMES:
        raise ValueError(f"kernel must be one of {', '.join(KERNEL_NAMES)}, got {name!r}")
    names = ", ".join(kernel.name for kernel in available)
    raise ValueError(f"kernel={name!r} does not exist on {query.device.type}; use auto, or one of {names}")


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Partial softmax is kept in float32, in float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
