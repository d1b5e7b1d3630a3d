"""What transformers' mask functions mean, read from how they are built and never from what they give for some indices.

transformers makes the mask of a kind of layer by composing small functions of (batch, head, query, key), over the
indices of the tokens that the model was given. With a cut sequence those are a rank's own, and not consecutive, so what
such a function gives is worthless; which functions it is made of is not. A function of another kind is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from transformers import masking_utils

from dtcp.mask import NO_WINDOW


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """The mask of a kind of layer, in positions within the document.

    Attributes:
        window_size: (left, right), as in ``dtcp.context_parallel_attention``.
        chunk_size: Tokens see those of their own chunk only, counted from the document's first; 0 is no chunks.
    """

    is_causal: bool = False
    window_size: tuple[int, int] = NO_WINDOW
    chunk_size: int = 0

    def meet(self, other: Pattern) -> Pattern:
        """What both allow."""
        windows = zip(self.window_size, other.window_size, strict=True)
        left, right = (max(pair) if -1 in pair else min(pair) for pair in windows)
        if self.chunk_size and other.chunk_size:
            raise NotImplementedError(
                f"dtcp's attention knows one chunk size for a layer, got {self.chunk_size} and {other.chunk_size}"
            )
        return Pattern(
            self.is_causal or other.is_causal, (left, right), self.chunk_size or other.chunk_size
        ).without_future()

    def without_future(self) -> Pattern:
        """The same without a bound that ``is_causal`` makes superfluous."""
        left, right = self.window_size
        return dataclasses.replace(self, window_size=(left, 0 if right > 0 else right)) if self.is_causal else self


def pattern_of(mask_function: Callable[..., Any]) -> Pattern:
    """Return what ``mask_function`` means.

    Raises:
        NotImplementedError: If it is made of functions that are not known here.
    """
    code = getattr(mask_function, "__code__", None)
    meaning = _MEANINGS.get(code) if code is not None else None
    if code is None or meaning is None:
        name = getattr(mask_function, "__qualname__", type(mask_function).__name__).split(".")[0]
        raise NotImplementedError(
            f"dtcp's attention does not know the mask {name!r} of this model; it knows causal, bidirectional, "
            "sliding window and chunked layers, packed documents and padding. Use attn_implementation='eager' without "
            "context parallelism, or dtcp.context_parallel_attention(mask_mod=...) in an attention of your own"
        )
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    return meaning(dict(zip(code.co_freevars, cells, strict=True)))


def _meet_all(cells: dict[str, Any]) -> Pattern:
    pattern = Pattern()
    for function in cells["mask_functions"]:
        pattern = pattern.meet(pattern_of(function))
    return pattern


def _chunked(cells: dict[str, Any]) -> Pattern:
    padding = cells["left_padding"]
    if bool(torch.as_tensor(padding).any()):
        raise NotImplementedError("chunked attention after left padding is not available; pad on the right")
    return Pattern(chunk_size=int(cells["chunk_size"]))


def _both_ways(cells: dict[str, Any]) -> Pattern:
    width = int(cells["sliding_window"])
    return Pattern(window_size=(width, width))


def _code(function: Callable[..., Any]) -> CodeType:
    return function.__code__  # the same for all functions that one factory makes


# Packed documents are told by `prepare`, of the whole sequence; what transformers finds in a part of it means nothing.
_MEANINGS: dict[CodeType, Callable[[dict[str, Any]], Pattern]] = {
    _code(masking_utils.causal_mask_function): lambda cells: Pattern(is_causal=True),
    _code(masking_utils.bidirectional_mask_function): lambda cells: Pattern(),
    _code(masking_utils.and_masks()): _meet_all,
    _code(masking_utils.sliding_window_overlay(1)): lambda cells: Pattern(
        window_size=(int(cells["sliding_window"]) - 1, -1)
    ),
    _code(masking_utils.sliding_window_bidirectional_overlay(1)): _both_ways,
    _code(masking_utils.chunked_overlay(1, torch.zeros(1))): _chunked,
    _code(masking_utils.packed_sequence_mask_function(torch.zeros(1))): lambda cells: Pattern(),
}
if (remap := getattr(masking_utils, "remap_positions_for_packed_sequence", None)) is not None:  # since 5.24
    _MEANINGS[_code(remap(masking_utils.causal_mask_function, torch.zeros(1)))] = lambda cells: pattern_of(
        cells["mask_function"]
    )
