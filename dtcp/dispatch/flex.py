"""``flex_attention`` inside a context: its ``block_mask`` is one over global positions, whichever rank holds them.

Shapes: query (B, Hq, S_local, E), key (B, Hkv, S_local, E), value (B, Hkv, S_local, Ev), in layout order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dtcp.attention.masks import checked_masks
from dtcp.attention.scores import MaskMod
from dtcp.dispatch.attend import attend_with
from dtcp.dispatch.frames import Frame, current
from dtcp.dispatch.masked import together

_MODULE = "torch.nn.attention.flex_attention"


def attend_flex(of_torch: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Torch's own ``flex_attention`` outside a context; inside, attention over the whole sequence."""
    frame = current.frame
    if frame is None or frame.is_plain:
        return of_torch(query, key, value, *args, **kwargs)
    return _attend(frame, query, key, value, *args, **kwargs)


@torch.compiler.disable(  # a block mask is looked into; the graph breaks here, and fullgraph=True ends in an error
    reason="dtcp: flex_attention inside context_parallel breaks the graph; compile without fullgraph=True"
)
def _attend(
    frame: Frame,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    if score_mod is not None:
        raise NotImplementedError(
            "flex_attention with a score_mod inside context_parallel: what it does to a score cannot be known; use "
            "block_mask= alone, and dtcp.context_parallel_attention(..., attn_bias=, alibi_slopes=, softcap=) for what "
            "is added"
        )
    if return_aux is not None and getattr(return_aux, "max_scores", False):
        raise NotImplementedError("flex_attention inside context_parallel has no max_scores; ask for lse alone")
    own = checked_masks(
        is_causal=False, mask_mod=None if block_mask is None else _global_mask(block_mask, frame.layout.seq_len),
        head_offset=frame.head_offset,
    )  # fmt: skip
    settings = dataclasses.replace(frame, masks=together(own, frame.masks))
    needs_lse = return_lse or (return_aux is not None and return_aux.lse)
    out, lse = attend_with(settings, None, query, key, value, None, False, scale, enable_gqa, needs_lse=needs_lse)
    if return_aux is not None:
        module: Any = sys.modules[_MODULE]
        return out, module.AuxOutput(lse=lse.detach() if return_aux.lse else None, max_scores=None)
    return (out, lse.detach()) if return_lse else out


def _global_mask(block_mask: Any, seq_len: int) -> MaskMod:
    """Return what ``block_mask`` allows, as a function of global positions; the same one for the same mask.

    Raises:
        ValueError: If the mask is not of the whole sequence.
    """
    made = getattr(block_mask, "_dtcp_mask_mod", None)
    if made is not None:
        return made
    if tuple(block_mask.shape[-2:]) != (seq_len, seq_len):
        raise ValueError(
            f"block_mask is of {block_mask.shape[-2]} queries and {block_mask.shape[-1]} keys, but the sequence has "
            f"{seq_len} tokens; inside context_parallel a mask is of the whole sequence: "
            f"create_block_mask(mask_mod, B, H, {seq_len}, {seq_len})"
        )
    inside, (q_size, kv_size) = block_mask.mask_mod, block_mask.BLOCK_SIZE
    partial = _dense(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = None
    if block_mask.full_kv_num_blocks is not None:
        full = _dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    num_rows, num_heads = partial.shape[:2]

    def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        where = b % num_rows, h % num_heads, q // q_size, kv // kv_size
        is_seen = partial[where] & inside(b, h, q, kv)
        return is_seen if full is None else is_seen | full[where]

    block_mask._dtcp_mask_mod = allowed
    return allowed


def _dense(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """Which blocks are listed, bool (B or 1, H or 1, query blocks, key blocks)."""
    is_listed = torch.arange(indices.size(-1), device=indices.device) < num_blocks.unsqueeze(-1)
    dense = torch.zeros_like(indices, dtype=torch.int32)
    return dense.scatter_add_(-1, indices.long(), is_listed.int()) > 0


def _call_redirected(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
    enable_gqa: Any = False, return_lse: Any = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    from dtcp.dispatch.flex import redirected  # this code runs with the globals of torch's module

    return redirected(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux=return_aux
    )


_of_torch: Any = None


def redirected(*args: Any, **kwargs: Any) -> Any:
    """What the code of torch's function is exchanged for."""
    return attend_flex(_of_torch, *args, **kwargs)


@contextlib.contextmanager
def redirected_flex() -> Iterator[None]:
    """Exchange the code of torch's function, not the function, which others have imported by name."""
    global _of_torch
    function: Any = getattr(sys.modules.get(_MODULE), "flex_attention", None)
    mine = _call_redirected.__code__
    arguments = function and (function.__code__.co_argcount, function.__code__.co_kwonlyargcount)
    if function is None or arguments != (mine.co_argcount, mine.co_kwonlyargcount):
        yield  # not loaded, or another signature: its operator refuses
        return
    code = function.__code__
    _of_torch = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    _of_torch.__kwdefaults__ = function.__kwdefaults__
    function.__code__ = mine
    try:
        yield
    finally:
        function.__code__ = code
