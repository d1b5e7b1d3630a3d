"""Merge attention outputs computed over disjoint key sets, and add up the gradients of tiles.

Shapes: out (B, H, S, Dv), lse (B, H, S). lse is natural log. Both are kept in float32 (float64 for float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtcp.ranges import named_range


class Partial:
    """Attention of S queries over the keys seen so far: (0, −inf) where none was.

    Args:
        shape: (B, H, S, Dv) of ``out``.
        dtype: Of the accumulation.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def result(self) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""
        if self._out is None or self._lse is None:
            self._out, self._lse = self._nothing_seen()
        return self._out, self._lse

    def merge(self, slots: slice, out: Tensor, lse: Tensor, rows: slice = slice(None)) -> None:
        """Add what the queries ``slots`` of the batch rows ``rows`` saw in another set of keys.

        ``out`` and ``lse`` may be kept and written to.
        """
        is_first = self._out is None
        if is_first and out.shape == self._shape:
            self._out, self._lse = out.to(self._dtype), lse
            return
        whole_out, whole_lse = self.result()
        own_out, own_lse = whole_out[rows, :, slots], whole_lse[rows, :, slots]
        if is_first:
            own_out.copy_(out)
            own_lse.copy_(lse)
            return
        with named_range("merge"):
            merge_into(own_out, own_lse, out, lse)

    def _nothing_seen(self) -> tuple[Tensor, Tensor]:
        batch, heads, seq_len, value_dim = self._shape
        # Memory is (B, S, H, Dv): what kernels return and what the op gives to the caller.
        out = torch.zeros(batch, seq_len, heads, value_dim, dtype=self._dtype, device=self._device)
        lse = torch.full((batch, heads, seq_len), float("-inf"), dtype=self._dtype, device=self._device)
        return out.transpose(1, 2), lse


def merge_into(own_out: Tensor, own_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge (out, lse) of other keys into (own_out, own_lse) of the same queries, in place."""
    # w = e^lse / (e^own_lse + e^lse), which neither over- nor underflows. (−inf) − (−inf) is NaN: a set
    # without keys has weight 0, and (−inf, −inf) stays (0, −inf).
    weight = torch.sigmoid(lse - own_lse).masked_fill_(lse == float("-inf"), 0)
    own_out.lerp_(out.to(own_out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(own_lse, lse, out=own_lse)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor, num_valid: int) -> None:
    """Add to what was seen, in place, a column with the logit ``sinks`` (H,) and no value.

    Args:
        num_valid: Queries that are tokens, the first ones; pads see nothing, not even the sink.
    """
    logits = sinks.to(lse.dtype)[:, None].expand_as(lse)
    # The share of all other columns: 0 where none was seen.
    out.mul_(torch.sigmoid(lse - logits).unsqueeze(-1))
    torch.logaddexp(lse, logits, out=lse)
    lse[:, :, num_valid:] = float("-inf")


def grad_sinks(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of ``sinks`` (H,), this rank's queries' share; ``lse`` counts them."""
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    shares = weights * (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    # Pads have lse +inf, and a gradient that may be anything.
    return -torch.where(lse == float("inf"), 0, shares).sum((0, 2)).to(sinks.dtype)


class Sum:
    """A gradient (B, H, S, D) that tiles add their parts to; rows that no tile touches are 0."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        batch, heads, seq_len, dim = shape
        self.total = torch.zeros(batch, seq_len, heads, dim, dtype=dtype, device=device).transpose(1, 2)

    def add(self, slots: slice, part: Tensor, heads: slice = slice(None), rows: slice = slice(None)) -> None:
        with named_range("merge"):
            self.total[rows, heads, slots].add_(part)
