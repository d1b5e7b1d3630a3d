"""Torch's fused CPU kernel. Shapes as in ``kernels/__init__``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dtcp.attention.blocks import Block
from dtcp.attention.kernels.heads import pad_head_dim, upcast
from dtcp.attention.merge import merge_into
from dtcp.attention.scores import TileScores

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Of a causal tile, in queries: the fewest and the most that are computed in blocks, those of a block, and those of a
# triangle that is cut into blocks. With 4 heads of 64 and one thread, 512 queries take 0.72 of one causal call, 1,024
# take 0.87, 4,096 take 0.95; several threads share large calls out better than small ones.
_LEAST_TRIANGLE = 384
_MOST_QUERIES = 4096
_TRIANGLE_BLOCK = 128
_TRIANGLE = 1024


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
        calls = _calls(query, is_causal, scores)
        if calls is None:
            out, lse = _forward(query, key, value, 0.0, is_causal, scale=scale)
            return out[..., :value_dim], lse
        batch, heads, num_queries, _ = query.shape
        # A query that is in no call sees nothing. Memory is (B, S, H, Dv), as the kernel has it.
        out = query.new_zeros(batch, num_queries, heads, value.size(-1)).transpose(1, 2)
        lse = query.new_full((batch, heads, num_queries), float("-inf"))
        for call in calls:
            part = _forward(
                query[call.rows], key[call.keys], value[call.keys], 0.0, False, attn_mask=call.mask, scale=scale
            )
            call_lse = _unseen_to_nothing(part[1], call.mask) if call.may_see_nothing else part[1]
            if call.is_first:
                out[call.rows] = part[0]
                lse[call.rows] = call_lse
            else:
                merge_into(out[call.rows], lse[call.rows], part[0], call_lse)
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
        calls = _calls(query, is_causal, scores)
        if calls is None:
            grads = _backward(grad_out, query, key, value, out, lse, 0.0, is_causal, scale=scale)
        else:
            grads = tuple(torch.zeros_like(x) for x in (query, key, value))
            for call in calls:
                rows, keys = call.rows, call.keys
                parts = _backward(
                    grad_out[rows], query[rows], key[keys], value[keys], out[rows], lse[rows], 0.0, False,
                    attn_mask=call.mask, scale=scale,
                )  # fmt: skip
                for grad, where, part in zip(grads, (rows, keys, keys), parts, strict=True):
                    grad[where] += part
        return grads[0][..., :head_dim], grads[1][..., :head_dim], grads[2][..., :value_dim]

    def _cast(self, scores: TileScores | None, *tensors: Tensor) -> list[Tensor]:
        # Blocks of one tile are added up too, and biases would be rounded.
        return upcast(*tensors) if self._upcasts or scores is not None else list(tensors)


class _Call(NamedTuple):
    """One call of the kernel, of some queries and keys of a tile.

    Attributes:
        mask: What is added to the scores, (B or 1, Hq or 1, n, k).
        is_first: Whether its queries are in no call before.
        may_see_nothing: Whether a query of it may see no key.
    """

    block: Block
    mask: Tensor | None
    is_first: bool = True
    may_see_nothing: bool = False

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        return slice(None), slice(None), self.block.queries

    @property
    def keys(self) -> tuple[slice, slice, slice]:
        return slice(None), slice(None), self.block.keys


def _calls(query: Tensor, is_causal: bool, scores: TileScores | None) -> Iterator[_Call] | None:
    """What a tile is computed by; None: one call without a mask."""
    if scores is not None:
        return _masked_calls(query, scores)
    num_queries = query.size(2)
    # Half precision is here only where a result is to be rounded once.
    if not is_causal or query.dtype not in (torch.float32, torch.float64):
        return None
    most = _MOST_QUERIES if torch.get_num_threads() == 1 else _TRIANGLE
    return _triangle_calls(num_queries, query.dtype) if _LEAST_TRIANGLE <= num_queries <= most else None


def _triangle_calls(num_queries: int, dtype: torch.dtype) -> Iterator[_Call]:
    """A causal tile without most of what a causal call computes in vain.

    The kernel cuts the keys of a causal call into pieces of 512, and computes a piece whole as soon as one query sees
    one key of it: as much as a full one for 512 queries, 1.5 times what is seen for 1,024. Blocks of few queries under
    a mask end where their last query does; what lies before a triangle needs no mask.
    """
    mask = _triangle_mask(dtype)
    for first in range(0, num_queries, _TRIANGLE):
        stop = min(first + _TRIANGLE, num_queries)
        for start in range(first, stop, _TRIANGLE_BLOCK):
            end = min(start + _TRIANGLE_BLOCK, stop)
            keys = slice(_TRIANGLE - (start - first), _TRIANGLE + end - start)
            yield _Call(Block(start, end, first, end), mask[: end - start, keys])
        if first:
            yield _Call(Block(first, stop, 0, first), None, is_first=False)


@functools.cache
def _triangle_mask(dtype: torch.dtype) -> Tensor:
    """Block's queries × all keys of a triangle before the block, and its own."""
    with torch.inference_mode(False):
        mask = torch.zeros(_TRIANGLE_BLOCK, _TRIANGLE + _TRIANGLE_BLOCK, dtype=dtype, device="cpu")
        mask[:, _TRIANGLE:] = torch.full((_TRIANGLE_BLOCK,) * 2, float("-inf"), dtype=dtype, device="cpu").triu(1)
    return mask


def _masked_calls(query: Tensor, scores: TileScores) -> Iterator[_Call]:
    """Calls of the blocks in which some query sees some key, from the first to the last."""
    for block in scores.blocks(holds_scores=False, on_cpu=True):
        mask = scores.additive(block, query.dtype, query.device)
        if mask is None or scores.modifiers.mask_mod is None:
            yield _Call(block, mask, may_see_nothing=mask is not None and scores.may_see_nothing(block))
            continue
        # A mask_mod may leave out keys at the ends, like those after a query: they need no computing.
        seen = (mask > float("-inf")).flatten(0, 2).any(0).nonzero()
        if len(seen):
            first, last, start = int(seen[0]), int(seen[-1]), block.kv_start
            found = Block(block.q_start, block.q_stop, start + first, start + last + 1)
            yield _Call(found, mask[..., first : last + 1], may_see_nothing=True)


def _unseen_to_nothing(lse: Tensor, mask: Tensor | None) -> Tensor:
    """The kernel gives out 0 and lse 0 to a query that sees none of the keys: nothing seen is −inf."""
    assert mask is not None
    return torch.where((mask > float("-inf")).any(-1), lse, float("-inf"))
