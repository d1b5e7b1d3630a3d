"""One redirected call: torch's arguments, checked, to the attention op.

Shapes: query (B, Hq, S_local, D), key (B, Hkv, S_local, D), value (B, Hkv, S_local, Dv), in layout order; or without
the batch dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dtcp.attention.api import check_kernel, prepare_inputs, report_refusal
from dtcp.attention.arguments import ResolvedStrategy
from dtcp.attention.dropout import CallDropout, check_call_dropout
from dtcp.attention.masks import check_mask_shapes
from dtcp.attention.ops import attention_forward
from dtcp.attention.scores import CallMasks
from dtcp.dispatch.attn_mask import with_attn_mask
from dtcp.dispatch.frames import Frame
from dtcp.mask import check_window

DROPOUT_CURE = (
    "pass context_parallel(..., step=, rows=), of which the mask is made (or dtcp.dropout_keys to "
    "dtcp.context_parallel_attention), or use 0.0"
)


class Settings(Protocol):
    """What of a frame a call needs."""

    @property
    def group_name(self) -> str: ...
    @property
    def strategy(self) -> ResolvedStrategy: ...
    @property
    def kernel(self) -> str: ...
    @property
    def state(self) -> Tensor: ...
    @property
    def masks(self) -> CallMasks: ...
    @property
    def attn_mask_queries(self) -> str: ...


def attend(
    frame: Frame,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return context parallel attention with the arguments of ``scaled_dot_product_attention``."""
    dropout, undone_p = frame.take_dropout(dropout_p)
    out, _ = attend_with(frame, dropout, query, key, value, attn_mask, is_causal, scale, enable_gqa, undone_p)
    return out


def attend_with(
    frame: Settings,
    dropout: CallDropout | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    undone_p: float = 0.0,
    *,
    needs_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) with given dropout; ``undone_p`` is a probability that there are no keys for: refused.

    Args:
        needs_lse: Else lse may be empty.
    """
    try:
        check_options(query, key, undone_p, is_causal)
        unbatched = query.ndim == 3
        if unbatched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        query, key, value, scale = prepare_inputs(
            query, key, value, scale=scale, enable_gqa=enable_gqa, qkv_format="bhsd"
        )
        if dropout is not None:
            check_call_dropout(dropout, (query.size(0), query.size(1)))
        dropout_p = 0.0 if dropout is None else dropout.p
        masks = frame.masks
        check_window(masks.window_size, is_causal)
        if attn_mask is not None:
            masks = with_attn_mask(masks, attn_mask, frame, query)
        check_mask_shapes(masks, query.size(0), query.size(2), query.size(1))
        kernel = _allowed_kernel(frame.kernel, query, value, dropout_p, masks)
    except (ValueError, NotImplementedError) as error:
        report_refusal(error, frame.group_name, query)
        raise
    out, lse = attention_forward(
        query, key, value, frame.state, frame.state, frame.group_name, is_causal, scale, frame.strategy, kernel,
        dropout, masks, needs_lse=needs_lse,
    )  # fmt: skip
    out = out.transpose(1, 2)
    return (out.squeeze(0), lse.squeeze(0) if needs_lse else lse) if unbatched else (out, lse)


def check_options(
    query: Tensor,
    key: Tensor,
    dropout_p: float,
    is_causal: bool,
    where: str = "inside context_parallel",
    dropout_cure: str = DROPOUT_CURE,
) -> None:
    """Raise for arguments of ``scaled_dot_product_attention`` that a part of the sequence cannot be given.

    Args:
        dropout_p: Of a call that has no keys.
    """
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p={dropout_p} {where}: torch would draw a mask that depends on the mesh; {dropout_cure}"
        )
    if is_causal and query.size(-2) != key.size(-2):
        raise ValueError(f"is_causal {where} needs as many keys as queries, got {key.size(-2)} and {query.size(-2)}")


def _enabled_kernels() -> tuple[str, ...]:
    """What the user's ``sdpa_kernel([...])`` leaves."""
    enabled = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    return tuple(name for name, is_enabled in enabled.items() if is_enabled)


# Dynamo cannot trace these switches; like torch's own attention, a graph keeps those of the time it was made. This is
# what torch.compiler.assume_constant_result sets, which would load Dynamo for those who do not compile.
_enabled_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _allowed_kernel(kernel: str, query: Tensor, value: Tensor, dropout_p: float, masks: CallMasks) -> str:
    """The kernel to use: the one asked for, or what ``sdpa_kernel([...])`` leaves, ``auto`` if it leaves all."""
    allowed = _enabled_kernels()
    if kernel != "auto":
        if kernel not in allowed:
            raise ValueError(f"kernel={kernel!r} was asked of context_parallel, but sdpa_kernel([...]) excludes it")
        check_kernel(kernel, query, value, 1.0, dropout_p, masks)
        return kernel
    if len(allowed) == 4:
        return "auto"
    for name in allowed:
        try:
            check_kernel(name, query, value, 1.0, dropout_p, masks)
        except ValueError:
            continue
        return name
    asked = f" with dropout_p={dropout_p}" if dropout_p else f" with {masks.masked_by}" if masks.masked_by else ""
    raise ValueError(
        f"sdpa_kernel([...]) leaves {', '.join(allowed) or 'nothing'}, which cannot run this call on "
        f"{query.device.type} in {query.dtype}{asked}; allow another backend"
    )
