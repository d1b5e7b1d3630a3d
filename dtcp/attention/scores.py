"""What a call does to the scores of a tile between query·key and the softmax: masks, biases, soft caps.

Shapes: B rows, Hq query heads of this rank; a block is some queries × some keys of a tile, (B or 1, Hq or 1, n, k).
"""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dtcp.attention.blocks import Block, cut_blocks
from dtcp.documents import Integers
from dtcp.mask import NO_WINDOW

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class CallMasks(NamedTuple):
    """What one call masks and adds beside ``is_causal``, as it travels through the attention ops.

    Attributes:
        window_size: (left, right), −1 is no bound.
        documents: ``Documents.state``.
        key_lengths: int64 (B,).
        mask_mod: int64 (1,), what ``register_mask_mod`` returned.
        sinks: (Hq,), logit of a column without value, for each head.
        attn_bias: (B or 1, Hq or 1, S_q, S), this rank's queries by all keys in natural order.
        alibi_slopes: (Hq,) or (B, Hq).
        softcap: c in c·tanh(score/c); 0 is none.
        head_offset: Global index of the first query head, for ``mask_mod``.
        head_axis: Mesh axis over which heads are cut, as in ``CallDropout``; or "".
    """

    window_size: tuple[int, int] = NO_WINDOW
    documents: Tensor | None = None
    key_lengths: Tensor | None = None
    mask_mod: Tensor | None = None
    sinks: Tensor | None = None
    attn_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softcap: float = 0.0
    head_offset: int = 0
    head_axis: str = ""

    @property
    def are_none(self) -> bool:
        tensors = (
            self.documents, self.key_lengths, self.mask_mod, self.sinks, self.attn_bias, self.alibi_slopes
        )  # fmt: skip
        return self.window_size == NO_WINDOW and not self.softcap and all(x is None for x in tensors)

    @property
    def masked_by(self) -> str:
        """Name of what asks a kernel for more than the keys that a query sees; "" if nothing does."""
        asked = {"mask_mod": self.mask_mod, "attn_bias": self.attn_bias, "alibi_slopes": self.alibi_slopes}
        return next((name for name, x in asked.items() if x is not None), "")


NO_MASKS = CallMasks()

# A handle in a graph that is still to run backward has to find its function. So functions are kept, but not without
# bound: those who make one in every step would keep all of their documents.
_NUM_KEPT = 1024
_numbers = itertools.count()
_mask_mods: OrderedDict[int, MaskMod] = OrderedDict()
_handles: dict[MaskMod, Tensor] = {}


def register_mask_mod(mask_mod: MaskMod) -> Tensor:
    """Return a handle of the function, int64 (1,), the same one for the same function.

    It is found again until 1024 others were registered after it.
    """
    handle = _handles.get(mask_mod)
    if handle is None:
        handle = _handles[mask_mod] = torch.tensor([next(_numbers)], device="cpu")
        if len(_handles) > _NUM_KEPT:
            _, oldest = _mask_mods.popitem(last=False)
            del _handles[oldest]
    _mask_mods[int(handle)] = mask_mod
    _mask_mods.move_to_end(int(handle))
    return handle


def mask_mod_of(handle: Tensor | None) -> MaskMod | None:
    """Return the function that was registered."""
    if handle is None:
        return None
    found = _mask_mods.get(int(handle))
    if found is None:
        raise RuntimeError(
            f"the mask_mod of this call is forgotten: more than {_NUM_KEPT} others were given since; make a mask_mod "
            "once, or let it read a tensor that changes, and run backwards sooner"
        )
    return found


@dataclass(frozen=True, slots=True)
class Modifiers:
    """What one call does to scores beside masking by intervals of positions; tensors as in ``CallMasks``.

    Attributes:
        grad_bias, grad_slopes: Where the backward adds up gradients, of the shapes of ``attn_bias`` and
            ``alibi_slopes`` in the dtype of the accumulation; None if they are not wanted.
    """

    mask_mod: MaskMod | None = None
    attn_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softcap: float = 0.0
    head_offset: int = 0
    grad_bias: Tensor | None = None
    grad_slopes: Tensor | None = None

    @property
    def are_none(self) -> bool:
        return self.mask_mod is None and self.attn_bias is None and self.alibi_slopes is None and not self.softcap


@dataclass(frozen=True, slots=True)
class TileScores:
    """The scores of one tile.

    Attributes:
        lower, upper: Query i of the tile sees keys ``lower[i] <= j < upper[i]`` of it, int64 (Sq,) on the host.
        rows: Batch rows of the tile, as indices of the caller's batch.
        heads: Query heads of the tile, local to the rank.
        q_start: Slot of its first query, for ``attn_bias``.
        q_positions, kv_positions: Global positions, int64 (Sq,) and (Skv,).
    """

    lower: Integers
    upper: Integers
    modifiers: Modifiers
    rows: range
    heads: range
    q_start: int
    q_positions: Tensor
    kv_positions: Tensor

    @property
    def softcap(self) -> float:
        return self.modifiers.softcap

    def blocks(self, *, holds_scores: bool, on_cpu: bool) -> Iterator[Block]:
        """Yield blocks that hold every pair that is seen.

        Args:
            holds_scores: Whether the scores of all heads are made of one, and not only its mask.
        """
        is_per_head = holds_scores or any(
            x is not None for x in (self.modifiers.mask_mod, self.modifiers.attn_bias, self.modifiers.alibi_slopes)
        )
        copies = len(self.rows) * len(self.heads) if is_per_head else 1
        return cut_blocks(len(self.lower), len(self.kv_positions), copies, self._seen, on_cpu=on_cpu)

    def _seen(self, start: int, stop: int) -> tuple[int, int]:
        lower, upper = self.lower[start:stop], self.upper[start:stop]
        is_any = upper > lower
        return (int(lower[is_any].min()), int(upper[is_any].max())) if is_any.any() else (0, 0)

    def may_see_nothing(self, block: Block) -> bool:
        """Whether some query of ``block`` may see no key of it."""
        is_none = self.upper[block.queries] <= self.lower[block.queries]
        return self.modifiers.mask_mod is not None or self.modifiers.attn_bias is not None or bool(is_none.any())

    def additive(self, block: Block, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """What is added to the scores of ``block``, (B or 1, Hq or 1, n, k): −inf is a mask. None where all is 0."""
        if self.modifiers.are_none and device.type == "cpu" and block.num_pairs <= _MAX_KEPT_PAIRS:
            bounds = (np.stack([x[block.queries] for x in (self.lower, self.upper)]) - block.kv_start).clip(0)
            return _kept_mask(bounds.tobytes(), block.kv_stop - block.kv_start, dtype)
        allowed = _both(self._in_interval(block, device), self._by_mask_mod(block, device))
        bias = _sum(self._bias(block), self._alibi(block))
        if allowed is None:
            return None if bias is None else bias.to(dtype)
        if bias is None:
            bias = torch.zeros((), dtype=dtype, device=device)
        return torch.where(allowed, bias.to(dtype), -math.inf)

    def add_gradient(self, block: Block, grad_scores: Tensor) -> None:
        """Add what ``block`` gives to the gradients of bias and slopes.

        Args:
            grad_scores: (B, Hq, n, k), of the scores after soft cap and additions.
        """
        rows, heads = self._slices()
        if (grad := self.modifiers.grad_bias) is not None:
            part = _sum_to(grad_scores, (grad.size(0), grad.size(1)))
            target = grad[_or_all(rows, grad.size(0)), _or_all(heads, grad.size(1)), self._bias_rows(block)]
            target.index_add_(-1, self.kv_positions[block.keys], part.to(grad.dtype))
        if (grad := self.modifiers.grad_slopes) is not None:
            part = (grad_scores * self._distance(block)).sum((2, 3))
            if grad.ndim == 1:
                grad[heads] += part.sum(0).to(grad.dtype)
            else:
                grad[rows, heads] += part.to(grad.dtype)

    def _slices(self) -> tuple[slice, slice]:
        return slice(self.rows.start, self.rows.stop), slice(self.heads.start, self.heads.stop)

    def _bias_rows(self, block: Block) -> slice:
        return slice(self.q_start + block.q_start, self.q_start + block.q_stop)

    def _in_interval(self, block: Block, device: torch.device) -> Tensor | None:
        bounds = np.stack([self.lower[block.queries], self.upper[block.queries]]) - block.kv_start
        return _within(bounds, block.kv_stop - block.kv_start, device)

    def _by_mask_mod(self, block: Block, device: torch.device) -> Tensor | None:
        if self.modifiers.mask_mod is None:
            return None
        rows = torch.arange(self.rows.start, self.rows.stop, device=device)
        heads = torch.arange(self.heads.start, self.heads.stop, device=device) + self.modifiers.head_offset
        with _disable_current_modes():  # a counter of operations, say, which would meet vmap's tensors
            allowed = evaluate_mask_mod(
                self.modifiers.mask_mod, rows, heads, self.q_positions[block.queries], self.kv_positions[block.keys]
            )
        return None if device.type == "cpu" and bool(allowed.all()) else allowed

    def _bias(self, block: Block) -> Tensor | None:
        bias = self.modifiers.attn_bias
        if bias is None:
            return None
        rows, heads = self._slices()
        part = bias[_or_all(rows, bias.size(0)), _or_all(heads, bias.size(1)), self._bias_rows(block)]
        return part.index_select(-1, self.kv_positions[block.keys])

    def _alibi(self, block: Block) -> Tensor | None:
        slopes = self.modifiers.alibi_slopes
        if slopes is None:
            return None
        rows, heads = self._slices()
        own = slopes[heads][None] if slopes.ndim == 1 else slopes[rows, heads]
        return own[:, :, None, None] * self._distance(block).to(slopes.dtype)

    def _distance(self, block: Block) -> Tensor:
        """−|i − j| of the global positions."""
        return -(self.q_positions[block.queries, None] - self.kv_positions[None, block.keys]).abs()


def _within(bounds: Integers, num_keys: int, device: torch.device) -> Tensor | None:
    """Which keys lie in each query's interval, bool (1, 1, n, num_keys); None for all.

    Args:
        bounds: (2, n), first key and last + 1.
    """
    if (bounds[0] <= 0).all() and (bounds[1] >= num_keys).all():
        return None
    lower, upper = torch.from_numpy(bounds).to(device).unsqueeze(-1)
    keys = torch.arange(num_keys, device=device)
    return ((keys >= lower) & (keys < upper))[None, None]


# A window is one mask over and over, and so is a backward after its forward; not more than 16 MiB of them in float32.
_MAX_KEPT_PAIRS = 1 << 18


@functools.lru_cache(maxsize=16)
def _kept_mask(bounds: bytes, num_keys: int, dtype: torch.dtype) -> Tensor | None:
    """0 within ``_within``, −inf elsewhere, on CPU."""
    device = torch.device("cpu")
    with torch.inference_mode(False):
        allowed = _within(np.frombuffer(bounds, np.int64).reshape(2, -1).copy(), num_keys, device)
        return None if allowed is None else torch.where(allowed, torch.zeros((), dtype=dtype, device=device), -math.inf)


def evaluate_mask_mod(mask_mod: MaskMod, rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return bool (B or 1, H or 1, n, k): 1 where the function does not look at rows or heads."""
    mapped: Any = mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        mapped = torch.vmap(mapped, in_dims=dims)
    allowed = _checked_bool(mapped(rows, heads, queries, keys))
    for dim in (0, 1):  # vmap expands what does not depend on a dim
        if allowed.stride(dim) == 0 and allowed.size(dim) > 1:
            allowed = allowed.narrow(dim, 0, 1)
    return allowed


def _checked_bool(allowed: Any) -> Tensor:
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
        got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
        raise ValueError(f"mask_mod must return a bool tensor, got {got}; compare: lambda b, h, q, kv: q >= kv")
    return allowed


_NUM_PROBED = 256


def checksum_of_mask_mod(mask_mod: MaskMod, rows: int, heads: range, num_queries: int, num_keys: int) -> int:
    """Return a number that tells most functions from each other: what ranks compare, before one waits for another.

    Args:
        rows: B.
        heads: Global indices of the query heads here.

    Raises:
        ValueError: If the function fails.
    """
    number = torch.arange(_NUM_PROBED, device="cpu")
    mixed = (number * 2654435761 + 12345) % 2147483647
    queries = mixed % num_queries
    # Half of them near the diagonal, where most masks have their edges.
    keys = torch.where(number % 2 == 0, (mixed // 7) % num_keys, (queries - number % 16).clamp(0, num_keys - 1))
    places = mixed % rows, heads.start + mixed % len(heads), queries, keys
    try:
        with _disable_current_modes():
            allowed = torch.vmap(mask_mod)(*places)
    except Exception as error:
        raise ValueError(f"mask_mod raised {type(error).__name__}: {error}") from error
    return zlib.crc32(_checked_bool(allowed).numpy().tobytes())


def versions_of_captures(mask_mod: MaskMod) -> int:
    """Return a number that changes when a tensor that the function holds is modified in place, or exchanged."""
    cells = [cell.cell_contents for cell in getattr(mask_mod, "__closure__", None) or ()]
    held = [*cells, *vars(getattr(mask_mod, "__self__", mask_mod)).values()]
    tensors = [x for x in held if isinstance(x, Tensor) and not x.is_inference()]
    return zlib.crc32(repr([(x.data_ptr(), x._version) for x in tensors]).encode())


def _or_all(part: slice, size: int) -> slice:
    """``part`` of a dim, all of one that is broadcast."""
    return slice(None) if size == 1 else part


def _sum_to(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Sum the first two dims that are broadcast."""
    broadcast = [dim for dim, size in enumerate(sizes) if size == 1 and x.size(dim) > 1]
    return x.sum(broadcast, keepdim=True) if broadcast else x


def _both(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x & y


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y
