"""What callers say about masks, checked, as it travels through the attention ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtcp.attention.scores import NO_MASKS, CallMasks, MaskMod, register_mask_mod
from dtcp.documents import Documents, check_documents
from dtcp.dtensor import is_dtensor
from dtcp.mask import check_window


def checked_masks(
    *,
    is_causal: bool,
    window_size: Any = NO_MASKS.window_size,
    documents: Documents | None = None,
    key_lengths: Tensor | Sequence[int] | None = None,
    mask_mod: MaskMod | None = None,
    sinks: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    head_offset: int = 0,
) -> CallMasks:
    """Return the masks of a call; their shapes are checked against its tensors by ``check_mask_shapes``.

    Raises:
        ValueError: If one of them is of another kind than it has to be.
    """
    if mask_mod is not None and not callable(mask_mod):
        raise ValueError(
            f"mask_mod must be a function (b, h, q_idx, kv_idx) of bool, got {type(mask_mod).__name__}; for a tensor "
            "index it: lambda b, h, q, kv: mask[q, kv]"
        )
    if softcap is not None and not (isinstance(softcap, (int, float)) and 0 < softcap < math.inf):
        raise ValueError(f"softcap must be a positive number, got {softcap!r}; use softcap=None for none")
    for name, x in (("sinks", sinks), ("attn_bias", attn_bias), ("alibi_slopes", alibi_slopes)):
        if x is not None and not (isinstance(x, Tensor) and x.dtype.is_floating_point and not is_dtensor(x)):
            got = f"{type(x).__name__} {getattr(x, 'dtype', '')}".strip()
            raise ValueError(f"{name} must be a plain float tensor, got {got}; of a DTensor pass x.to_local()")
    return CallMasks(
        check_window(window_size, is_causal),
        None if check_documents(documents) is None or documents is None else documents.state,
        _lengths(key_lengths),
        None if mask_mod is None else register_mask_mod(mask_mod),
        sinks,
        attn_bias,
        alibi_slopes,
        float(softcap or 0.0),
        head_offset,
    )


def _lengths(key_lengths: Any) -> Tensor | None:
    if key_lengths is None:
        return None
    lengths = key_lengths if isinstance(key_lengths, Tensor) else torch.tensor(list(key_lengths))
    if lengths.ndim != 1 or lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
        raise ValueError(
            f"key_lengths must be integers (B,), the tokens of each row that are no padding, got {lengths.dtype} of "
            f"shape {tuple(lengths.shape)}; of a mask (B, S) that is True for tokens: mask.sum(1)"
        )
    return lengths.to(device="cpu", dtype=torch.int64)


def check_mask_shapes(
    masks: CallMasks, batch_size: int, num_heads: int, num_queries: int, num_keys: int | None = None
) -> None:
    """Raise ValueError unless the tensors of ``masks`` fit a call.

    Args:
        num_queries: Query slots of this rank, or of the whole sequence where it is not cut.
        num_keys: Keys of the whole sequence; None where only the op knows it, and checks it.
    """
    if masks.key_lengths is not None:
        lengths = masks.key_lengths
        if tuple(lengths.shape) != (batch_size,):
            raise ValueError(f"key_lengths must be ({batch_size},), one per row, got shape {tuple(lengths.shape)}")
        is_compiling = torch.compiler.is_compiling()
        if num_keys is not None and not is_compiling and bool(((lengths < 0) | (lengths > num_keys)).any()):
            raise ValueError(f"key_lengths must be in 0..{num_keys}, the keys of the sequence, got {lengths.tolist()}")
    if masks.sinks is not None and tuple(masks.sinks.shape) != (num_heads,):
        raise ValueError(
            f"sinks must be ({num_heads},), one logit for each query head here, got {tuple(masks.sinks.shape)}"
        )
    if masks.alibi_slopes is not None and tuple(masks.alibi_slopes.shape) not in (
        (num_heads,), (batch_size, num_heads),
    ):  # fmt: skip
        raise ValueError(
            f"alibi_slopes must be ({num_heads},) or ({batch_size}, {num_heads}), one for each query head here, got "
            f"{tuple(masks.alibi_slopes.shape)}"
        )
    if masks.attn_bias is not None:
        check_bias(masks.attn_bias, batch_size, num_heads, num_queries, num_keys)


def check_bias(bias: Tensor, batch_size: int, num_heads: int, num_queries: int, num_keys: int | None) -> None:
    """Raise ValueError unless ``bias`` is local queries × global keys."""
    fits = bias.ndim == 4 and bias.size(0) in (1, batch_size) and bias.size(1) in (1, num_heads)
    if not fits or bias.size(2) != num_queries or num_keys not in (None, bias.size(3)):
        keys = "all keys" if num_keys is None else num_keys
        raise ValueError(
            f"attn_bias must be ({batch_size} or 1, {num_heads} or 1, {num_queries}, {keys}): the queries of this "
            f"rank in layout order by all keys in natural order, got {tuple(bias.shape)}; cut its queries with "
            "shard(bias, mesh, layout, dim=2)"
        )
